"""What is measured: the trainings, the records of each, and the commands that make them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from robustmetric.experiments.cells import slug

RESULTS = Path(__file__).parents[2] / "results"
"""Where records are kept."""
QUERIES = 1000
SEEDS = (0, 1, 2)
CHEAP = 8
"""The lower η, whose steps cross the ball as those of 32 do: α = 1.25·ε/η."""
ATTACKED = 77  # ε, in levels of 255

Kind = Literal["reference", "strict"]
KINDS: tuple[Kind, ...] = ("reference", "strict")
"""The records of a network, each by its protocol; that of `strict` holds the worst-case suite."""
WHOLE_SUITE, SHORT_SUITE = "worst-case", "worst-case(goals='misrank,shift')"


@dataclass(frozen=True)
class Network:
    """A training on `data` with a `defense` of η `steps` (None without attacks), and its records.

    `reference` trains as the published networks were: see docs/method.md.
    """

    data: str
    defense: str
    steps: int | None = None
    epochs: int = 8
    seed: int = 0
    reference: bool = False

    @property
    def kept(self) -> bool:
        """Whether the weights are kept, in half precision, as part of the zoo."""
        return self.epochs == 8

    @property
    def label(self) -> str:
        """The training in a few words."""
        eta = "" if self.steps is None else f", η = {self.steps}"
        seed = f", seed {self.seed}" if not self.kept else ""
        return f"{self.defense}{eta}{', as published' if self.reference else ''}{seed}"

    @property
    def name(self) -> str:
        """The folder of the training, below that of the results."""
        eta = "" if self.steps is None else f"-{self.steps}"
        if self.kept:
            return f"zoo/{self.data}/{slug(self.defense)}{eta}"
        return (
            f"one-epoch/{self.data}/{slug(self.defense)}{eta}{'-reference' * self.reference}-seed{self.seed}"
        )

    @property
    def suite(self) -> str:
        """The suite of its strict record: of networks that are not kept the two goals that matter most."""
        return WHOLE_SUITE if self.kept else SHORT_SUITE

    def train(self, root: str = "DIR", out: str = "RUN") -> list[str]:
        """Return the arguments that train it, on the files in `root`, into the folder `out`."""
        words = ["train", "--data", self.data, "--root", root, "--defense", self.defense]
        if self.steps == CHEAP:
            words += ["--steps", str(CHEAP), "--alpha", f"{1.25 * ATTACKED / CHEAP}/255"]
        if self.epochs != 8:
            words += ["--epochs", str(self.epochs)]
        if self.seed:
            words += ["--seed", str(self.seed)]
        if self.reference:
            words += ["--set", "reference=true"]
        return [*words, "--out", out]

    def evaluate(
        self, kind: Kind, root: str = "DIR", run: str | None = None, out: str = "SCORES"
    ) -> list[str]:
        """Return the arguments that evaluate it, as `kind` of record, from the folder of its `run`."""
        words = ["evaluate", run or (f"results/{self.name}" if self.kept else "RUN"), "--data", self.data]
        words += ["--root", root, "--weights", "last", "--queries", str(QUERIES)]
        if kind == "reference":
            return [*words, "--protocol", "reference", "--checks", "none", "--out", out]
        return [*words, "--suite", self.suite, "--out", out]

    def record(self, kind: Kind) -> Path:
        """Return the file of a record, whether it is there or not."""
        return RESULTS / self.name / f"evaluation-{kind}" / "record.json"


def written(arguments: Sequence[str]) -> str:
    """Write a command as one types it."""
    return shlex.join(["robustmetric", *arguments])


HM = "HM[S,LGA]&ICS"
FASHION = tuple(
    Network("fashion-mnist", defense, steps)
    for defense, steps in (("N/A[R]", None), ("N/A[S]", None), ("ACT[R]", 32), (HM, 32), (HM, CHEAP))
)
"""Fashion-MNIST at the recipe's length."""
CLAIM = tuple(
    Network("fashion-mnist", name, CHEAP, 1, seed) for seed in SEEDS for name in ("EST[R]", "ACT[R]", HM)
)
"""What the paper's central claim compares, at equal cost."""
OTHERS = tuple(
    Network("fashion-mnist", name, CHEAP, 1, seed)
    for seed in SEEDS
    for name in ("HM[R,M]", "HM[S,M]", "HM[S,LGA]")
)
"""The steps from ACT to the whole method."""
WHY = tuple(
    [Network("fashion-mnist", HM, CHEAP, 1, seed, reference=True) for seed in SEEDS]
    + [Network("fashion-mnist", name, 32, 1) for name in (HM, "ACT[R]")]
)
"""Trainings that tell what a difference to the published figures comes from."""
MNIST = tuple(
    Network("mnist", name, steps, 1) for name, steps in (("N/A[R]", None), ("ACT[R]", 32), (HM, 32))
)
"""MNIST, an epoch."""
NETWORKS = (*FASHION, *CLAIM, *WHY, *MNIST, *OTHERS)
"""All trainings, in the order of their weight."""


def tasks() -> Iterator[tuple[Network, Kind]]:
    """Return the records in the order in which they are made: what matters most comes first."""
    for group in (FASHION, CLAIM, WHY, MNIST, OTHERS):
        for kind in KINDS:
            yield from ((network, kind) for network in group)


@dataclass(frozen=True)
class Samplers:
    """A measurement of Table 1 on `data`: at the start, or with the weights of a trained `network`."""

    data: str
    network: Network | None = None

    @property
    def label(self) -> str:
        """The moment of the measurement in a few words."""
        return "at the start" if self.network is None else f"after {self.network.label}"

    @property
    def name(self) -> str:
        """The folder of the measurement, below that of the results."""
        after = "start" if self.network is None else Path(self.network.name).name
        return f"samplers/{self.data}/{after}"

    def reproduce(self, root: str = "DIR", out: str = "OUT") -> list[str]:
        """Return the arguments that measure it, on the files in `root`, into the folder `out`."""
        words = ["reproduce", "table1", "--data", self.data, "--root", root]
        if self.network is not None:
            words += ["--weights", f"results/{self.network.name}/last.safetensors"]
        return [*words, "--out", out]

    @property
    def result(self) -> Path:
        """The file of the measurement."""
        return RESULTS / self.name / "cell.json"


SAMPLERS = tuple(
    Samplers("fashion-mnist", network) for network in (None, FASHION[0], FASHION[1], FASHION[-1])
)
"""Table 1 on Fashion-MNIST."""
