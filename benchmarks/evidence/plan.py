"""What is measured: the trainings, the records of each, and the commands that make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from robustmetric.evaluation.suite import WorstCase
from robustmetric.experiments.cells import Cell, counted, slug
from robustmetric.text import command_line

RESULTS = Path(__file__).parents[2] / "results"
"""Where records are kept."""
QUERIES = 1000
SEEDS = (0, 1, 2)
CHEAP = 8
"""The lower η, whose steps cross the ball as those of 32 do: α = 1.25·ε/η."""
ATTACKED = 77  # ε, in levels of 255

SMALL = 8  # ε of the paper's 224×224 images, in levels of 255

Kind = Literal["reference", "small", "strict", "small-strict", "more-steps"]
KINDS: tuple[Kind, ...] = ("reference", "small", "strict", "small-strict", "more-steps")
"""The records of a network, by protocol: those of `strict` hold the worst-case suite, `small` ones have
ε = 8/255, and the attacks along gradients of `more-steps` have four times the steps of the suite's."""
WHOLE_SUITE, SHORT_SUITE = "worst-case", "worst-case(goals='misrank,shift')"  # of the two goals that matter
SHIFT_SUITE = f"worst-case(goals='shift', steps={4 * WorstCase().steps})"


@dataclass(frozen=True)
class Network(Cell):
    """A cell that is trained for `epochs`, and by `reference` as the published networks were; its records."""

    epochs: int = 8
    reference: bool = False

    @property
    def kept(self) -> bool:
        """Whether the weights are kept, in half precision."""
        return self in FASHION

    @property
    def title(self) -> str:
        """The training in a few words, whatever its seed."""
        eta = "" if self.steps is None else f", η = {self.steps}"
        return f"{self.defense}{eta}{', as published' if self.reference else ''}"

    @property
    def label(self) -> str:
        """The training in a few words."""
        return self.title if self.kept else f"{self.title}, seed {self.seed}"

    @property
    def length(self) -> str:
        """How long it is trained."""
        return counted(self.epochs, "epoch")

    @property
    def name(self) -> str:
        """The folder of the training, below that of the results."""
        training = slug(self.defense) + ("" if self.steps is None else f"-{self.steps}")
        if self.kept:
            return f"zoo/{self.data}/{training}"
        place = {1: "one-epoch", 2: "two-epochs", 8: "eight-epochs"}[self.epochs]
        return f"{place}/{self.data}/{training}{'-reference' * self.reference}-seed{self.seed}"

    def train(self, root: str = "DIR", out: str = "RUN") -> list[str]:
        """Return the arguments that train it, on the files in `root`, into the folder `out`."""
        words = ["train", "--data", self.data, "--root", root, "--defense", self.defense]
        if self.steps == CHEAP:
            words += ["--steps", str(CHEAP), "--alpha", f"{1.25 * ATTACKED / CHEAP}/255"]
        if not self.kept:
            words += ["--epochs", str(self.epochs), "--after-collapse", "continue"]
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
        words += ["--eps", f"{SMALL}/255"] if kind.startswith("small") else []
        options = {
            "strict": ["--suite", WHOLE_SUITE if self.kept else SHORT_SUITE],
            "small-strict": ["--attacks", "ES,LTM,GTM", "--suite", "worst-case(goals='misrank')"],
            "more-steps": ["--attacks", "ES", "--suite", SHIFT_SUITE],
        }
        return [*words, *options.get(kind, ["--protocol", "reference", "--checks", "none"]), "--out", out]

    def record(self, kind: Kind) -> Path:
        """Return the file of a record, whether it is there or not."""
        return RESULTS / self.name / f"evaluation-{kind}" / "record.json"


def written(arguments: Sequence[str]) -> str:
    """Write a command as one types it: what has quotes of its own stands in double ones.

    >>> print(written(["evaluate", "RUN", "--suite", "worst-case(goals='misrank')"]))
    robustmetric evaluate RUN --suite "worst-case(goals='misrank')"
    """
    return command_line(["robustmetric", *arguments])


HM = "HM[S,LGA]&ICS"
FASHION = tuple(
    Network("fashion-mnist", defense, steps)
    for defense, steps in (("N/A[R]", None), ("N/A[S]", None), ("ACT[R]", 32), (HM, 32), (HM, CHEAP))
)
"""Fashion-MNIST at the recipe's length."""
FULL, FEW = FASHION[3:]
"""The whole method at full length, with η = 32 and with few steps."""
COMPARED = (FASHION[0], FASHION[2], FULL)
"""Those whose ERS was published: they are attacked with the smaller ε too."""


def _short(*defenses: str, epochs: int = 1) -> tuple[Network, ...]:
    """Return short trainings with the lower η, of each seed."""
    return tuple(Network("fashion-mnist", d, CHEAP, seed, epochs) for seed in SEEDS for d in defenses)


RIVALS = ("ACT[R]", "EST[R]")
CLAIM = _short("EST[R]", "ACT[R]", HM)
"""What the paper's central claim compares, with the same η and length."""
LONGER = _short(HM, epochs=2)
"""The whole method with the whole epochs that take no more passes than one of ACT."""
OTHERS = _short("HM[R,M]", "HM[S,M]", "HM[S,LGA]")
"""The steps from ACT to the whole method."""
HARDER = ("HM[S,-γ/2]&ICS", "HM[S,0]&ICS")
"""The whole method with fixed destinations: the middle and the hard end of what LGA can ask for."""
WHY = (
    *(Network("fashion-mnist", name, CHEAP, epochs=1) for name in HARDER),
    *(Network("fashion-mnist", HM, CHEAP, seed, epochs=1, reference=True) for seed in SEEDS),
    Network("fashion-mnist", HM, 32, epochs=1),
)
"""Short trainings that tell what a difference to the published figures comes from."""
MNIST = tuple(
    Network("mnist", name, steps, epochs=1) for name, steps in (("N/A[R]", None), ("ACT[R]", 32), (HM, 32))
)
"""MNIST, an epoch."""
MNIST_LONGER = tuple(Network("mnist", name, steps) for name, steps in (("N/A[R]", None), (HM, CHEAP)))
"""MNIST at the recipe's length, as far as it is cheap: does the length make up for what an epoch lacks?"""
NETWORKS = (*FASHION, *CLAIM, *LONGER, *WHY, *MNIST, *MNIST_LONGER, *OTHERS)
"""All trainings, in the order of their weight."""


def tasks() -> Iterator[tuple[Network, Kind]]:
    """Return the records in the order in which they are made: what matters most comes first.

    In a group, all of a network come together: not all weights are kept, and a training is made once.
    """
    both: tuple[Kind, ...] = ("reference", "strict")
    plan: tuple[tuple[Sequence[Network], Sequence[Kind]], ...] = (
        (FASHION, both[:1]),
        (COMPARED, ("small",)),
        (FASHION, both[1:]),
        (CLAIM, both),
        (FASHION, ("small-strict",)),
        (MNIST, (*both, "small")),
        (OTHERS, both),
        (FASHION[2:], ("more-steps",)),
        (MNIST_LONGER, both[:1]),
        (WHY, both[:1]),
        (CLAIM, ("small-strict",)),
        (LONGER, (*both, "small-strict")),
    )
    return ((network, kind) for group, kinds in plan for network in group for kind in kinds)


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
