"""Cells: the single trainings and measurements that tables and figures are made of, and at which scale."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from robustmetric.defenses import defense
from robustmetric.errors import UserError, whole
from robustmetric.evaluation.plan import Plan
from robustmetric.experiments.samplers import DRAWN, STATISTICS
from robustmetric.training.folder import RunFolder
from robustmetric.training.parts import suited_recipe
from robustmetric.training.recipe import Recipe, bare, load_recipe, named_files, usual_recipe
from robustmetric.usercode import imported_files, without_folder

PUBLISHED_WORKERS = dict.fromkeys(("cub", "cars", "sop"), 2)
"""How many workers shared an update of the published trainings."""


@dataclass(frozen=True)
class Cell:
    """A training and its evaluation: `defense` on `data` with `steps` (η, None without attacks) and `seed`.

    Two cells that train the same are equal: `Cell.of` writes a defense in one way.

    >>> Cell.of("cub", "HM[R,R]", None) == Cell.of("cub", "N/A[R]", None)
    True
    """

    data: str
    defense: str
    steps: int | None = None
    seed: int = 0

    @classmethod
    def of(cls, data: str, name: str, steps: int | None, seed: int = 0) -> Cell:
        """Return the cell of a published `name`, which may be another one's name for the same training."""
        return cls(data, as_trained(data, name), steps, seed)

    @property
    def label(self) -> str:
        """The cell in a few words."""
        eta = "" if self.steps is None else f" η={self.steps}"
        return f"{without_folder(self.data)} {self.defense}{eta} seed {self.seed}"

    @property
    def slug(self) -> str:
        """The cell as part of a file's name."""
        eta = "" if self.steps is None else f"-{self.steps}"
        return f"{slug(without_folder(self.data))}-{slug(self.defense)}{eta}-seed{self.seed}"


@dataclass(frozen=True)
class Samplers:
    """Table 1's measurement: the hardness that each sampler draws on `data`.

    The network is the one that a training begins with: trained already, if the weights are a run's.

    >>> Samplers("cub").slug
    'cub-samplers-seed0'
    """

    data: str
    seed: int = 0

    @property
    def label(self) -> str:
        """The measurement in a few words."""
        return f"{without_folder(self.data)} samplers seed {self.seed}"

    @property
    def slug(self) -> str:
        """The measurement as part of a file's name."""
        return f"{slug(without_folder(self.data))}-samplers-seed{self.seed}"


Task = Cell | Samplers


@dataclass(frozen=True)
class Scale:
    """The scale of an experiment: what is not the paper's, and where the images are.

    - `epochs`: those of a training; None for the recipe's.
    - `changes`: other entries of the recipe.
    - `steps`: η of the evaluation's attacks.
    - `queries`: number of test images that are attacked; None for all.
    - `batches`: number of batches that Table 1 looks at.
    - `devices`: workers of a training; None for as many as the published ones had.
    - `skip_broken`: leave out images that cannot be read.
    - `roots`: the directory of each data set. This, `cache` and `device` do not change the result.

    >>> Scale(epochs=2).told(["digits"])
    '2 epochs, all queries, attacks of 32 steps, 1 worker'
    """

    epochs: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 32
    queries: int | None = None
    batches: int = 1000
    devices: int | None = None
    skip_broken: bool = False
    roots: Mapping[str, Path] = field(default_factory=dict)
    cache: Path | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "queries", "batches", "devices"):
            if (value := getattr(self, name)) is not None:
                whole(name, value, least=1)
        if fixed := sorted(self.changes.keys() & _OF_CELL):
            raise UserError(
                f"{', '.join(fixed)} cannot be set: it belongs to the cells, or has an option of its own"
            )

    @property
    def torch_device(self) -> torch.device:
        """What evaluates, and measures: one of what trains."""
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        wanted = ("cuda" if there["cuda"] else "cpu") if self.device == "auto" else self.device
        if not there[wanted]:
            raise UserError(f"torch finds no {wanted} here: use cpu", parameter="device")
        return torch.device(wanted)

    @property
    def weights(self) -> str | None:
        """The name of the file of weights that networks begin with, after its run if it is of a run.

        >>> Scale(changes={"weights": "/runs/digits/last.safetensors"}).weights
        'digits/last.safetensors'
        """
        if (given := self.changes.get("weights")) is None:
            return None
        file = Path(str(given))
        run = RunFolder(file.parent)
        return f"{run.path.name}/{file.name}" if file in (run.last, run.best, run.good) else file.name

    def workers(self, data: str) -> int:
        """Return the number of workers that share an update."""
        return PUBLISHED_WORKERS.get(data, 1) if self.devices is None else self.devices

    def recipe(self, task: Task) -> Recipe:
        """Return the recipe of a cell: its data set's, trained as the published networks were."""
        if task not in self._recipes:  # which may look at the images of a folder
            self._recipes[task] = self._recipe(task)
        return self._recipes[task]

    @cached_property
    def _recipes(self) -> dict[Task, Recipe]:
        return {}

    def _recipe(self, task: Task) -> Recipe:
        epochs = self.epochs or load_recipe(usual_recipe(task.data)).epochs
        entries = {"data": task.data, "root": self.roots.get(task.data), "seed": task.seed, "epochs": epochs}
        entries |= {"validation": 0, "validate_every": epochs, "reference": True, **self.changes}
        if isinstance(task, Cell):
            entries["defense"] = task.defense
            if task.steps is not None:
                entries["steps"] = task.steps
        return suited_recipe(entries)

    def plan(self, task: Cell) -> Plan:
        """Return how a cell's network is evaluated: as published ones were."""
        budget = {"eps": self.recipe(task).eps, "steps": self.steps}
        return Plan.make(protocol="reference", queries=self.queries, checks="none", **budget)

    def identity(self, task: Task) -> dict[str, Any]:
        """Return all that a cell's training depends on, in JSON's types, wherever its files are.

        Images of one's own are known by the name of their folder or file; records tell of their pixels.
        """
        whole = self.recipe(task)
        recipe = bare(whole.model_dump(mode="json"))
        recipe["root"] = None if task.data in _FIXED or whole.root is None else whole.root.name
        recipe["weights"] = None if whole.weights is None else _sha256(whole.weights)
        named = [file.absolute() for file in named_files(whole.model_dump())]
        code = {part for file in named for part in imported_files(file) if part.is_file()}
        found: dict[str, Any] = {
            "recipe": recipe,
            "code": sorted([file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in code),
            "skip_broken": self.skip_broken,
        }
        if isinstance(task, Cell):
            return {**found, "workers": self.workers(task.data)}
        del recipe["defense"], recipe["epochs"], recipe["validate_every"]
        return {**found, "batches": self.batches, "samplers": list(DRAWN), "statistics": list(STATISTICS)}

    def name(self, task: Task) -> str:
        """Return the name of a cell's folder, which tells trainings apart.

        >>> Scale().name(Cell("digits", "HM[S,LGA]&ICS", 8))[:32]
        'digits-HM-S-LGA-and-ICS-8-seed0-'
        """
        text = json.dumps(self.identity(task), sort_keys=True)
        return f"{task.slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def told(self, data: Sequence[str], *, trains: bool = True) -> str:
        """Say at which scale the cells of `data` sets are run; `trains` is False for those of Table 1."""
        each = {name: ", ".join(self._told(name, trains)) for name in data}
        if len(set(each.values())) == 1:
            return each[data[0]]
        return "; ".join(f"{name}: {text}" for name, text in each.items())

    def _told(self, data: str, trains: bool) -> Iterator[str]:
        usual, published = load_recipe(usual_recipe(data)).epochs, data in PUBLISHED_WORKERS
        epochs, workers, usually = self.epochs or usual, self.workers(data), PUBLISHED_WORKERS.get(data, 1)
        queries = "all queries" if self.queries is None else f"{self.queries} queries"
        parts = [
            (counted(epochs, "epoch"), usual, epochs == usual),
            (queries, "all", self.queries is None),
            (f"attacks of {counted(self.steps, 'step')}", Scale.steps, self.steps == Scale.steps),
            (counted(workers, "worker"), usually, workers == usually),
        ]
        for text, was, same in parts if trains else [(counted(self.batches, "batch", "batches"), 0, True)]:
            yield text if same or not published else f"{text} (published: {was})"
        if self.weights is not None or not trains:
            yield began(self.weights)
        if self.weights is None and published:
            yield "from random weights (published: ImageNet's)"
        for entry, value in bare(self.changes).items():
            if value is not None and entry != "weights":
                yield f"{entry} = {value}"


def began(weights: str | None) -> str:
    """Say what a network was before it was trained or measured; `weights` is the name of their file.

    >>> began("last.safetensors")
    'from the weights last.safetensors'
    """
    return "at the start of training" if weights is None else f"from the weights {weights}"


def counted(number: int, thing: str, things: str | None = None) -> str:
    """Write how many there are of a `thing`; `things` is its plural.

    >>> counted(1, "epoch"), counted(1000, "step"), counted(2, "batch", "batches")
    ('1 epoch', '1,000 steps', '2 batches')
    """
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


_FIXED = ("digits", "mnist", "fashion-mnist", "cub", "cars", "sop")  # data sets that are the same everywhere
_OF_CELL = {"data", "root", "defense", "steps", "epochs", "seed", "validation", "validate_every", "reference"}


@dataclass(frozen=True, eq=False)
class Job:
    """A cell to be made: the `task`, its `scale`, and the `folder` that it is made in."""

    task: Task
    scale: Scale
    folder: Path

    @property
    def workers(self) -> int:
        """The number of processes that it takes."""
        return self.scale.workers(self.task.data) if isinstance(self.task, Cell) else 1


@cache
def _sha256(file: Path) -> str:
    """Return the digest of a file of weights."""
    if file.is_dir():
        raise UserError(
            f"{file} is a folder, not a file of weights; give a file in it, as a run's last.safetensors",
            parameter="weights",
        )
    if not file.is_file():
        raise UserError(f"there is no weights file {file}: give another file", parameter="weights")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def as_trained(data: str, name: str) -> str:
    """Return the one name of a training for a published `name` on `data`.

    HM[X,X] is regular training; parameters that are the default are left out; on SOP λ is 0.05 unless it is
    given.

    >>> as_trained("cub", "HM[S,S]"), as_trained("cub", "HM[S,gB(M,ξ=0.1)]")
    ('N/A[S]', 'HM[S,gB(M)]')
    >>> as_trained("sop", "HM[S,LGA]&ICS"), as_trained("sop", "HM[S,LGA]&ICS(λ=0.5)")
    ('HM[S,LGA]&ICS(λ=0.05)', 'HM[S,LGA]&ICS')
    """
    written = defense(name).name
    if same := re.fullmatch(r"HM\[([RMSDH]),\1\]", written):
        return f"N/A[{same[1]}]"
    if data == "sop" and written.endswith("&ICS"):
        return f"{written}(λ=0.05)"
    return written.replace("ICS(λ=0.5)", "ICS").replace("gB(M,ξ=0.1)", "gB(M)")


_SPELLED = {"γ": "gamma", "λ": "lambda", "ξ": "xi", "&": "-and-", "-": "minus", "/": "over"}


def slug(text: str) -> str:
    """Write a text with letters, digits, dots and dashes alone; different defenses stay different.

    >>> slug("HM[S,-γ/2]&ICS(λ=0.05)")
    'HM-S-minusgammaover2-and-ICS-lambda0.05'
    """
    if text == "N/A" or text.startswith("N/A["):
        text = text.replace("N/A", "NA")
    if not text.replace("-", "").isalnum():  # a data set's name has dashes
        text = "".join(_SPELLED.get(letter, letter) for letter in text)
    return re.sub(r"-+", "-", re.sub(r"[^\w.-]", "-", text.replace("=", ""))).strip("-")
