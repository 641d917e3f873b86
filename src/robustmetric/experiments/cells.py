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
from robustmetric.errors import UserError
from robustmetric.evaluation.plan import Plan
from robustmetric.experiments.samplers import DRAWN, STATISTICS
from robustmetric.registry import lookup
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
    """How large an experiment is run: what is not the paper's, and where the images are.

    - `epochs`: those of a training; None for the recipe's.
    - `changes`: other entries of the recipe that are changed.
    - `steps`: η of the evaluation's attacks.
    - `queries`: how many test images are attacked; None for all.
    - `batches`: how many batches Table 1 looks at.
    - `devices`: workers of a training; None for as many as the published ones had.
    - `skip_broken`: leave out images that cannot be read.
    - `roots`: where the files of each data set are. This, `cache` and `accelerator` say nothing of the
      result.

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
    accelerator: str = "auto"

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "queries", "batches", "devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}", parameter=name)
        lookup("accelerator", self.accelerator, _DEVICES)
        if fixed := sorted(self.changes.keys() & _OF_CELL):
            raise UserError(
                f"{', '.join(fixed)} cannot be set: it belongs to the cells, or has an option of its own"
            )

    @property
    def device(self) -> torch.device:
        """What evaluates, and measures: one of what trains."""
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        wanted = _DEVICES[self.accelerator] or ("cuda" if there["cuda"] else "cpu")
        if not there[wanted]:
            raise UserError(f"torch finds no {wanted} here: use cpu", parameter="accelerator")
        return torch.device(wanted)

    @property
    def weights(self) -> str | None:
        """What the file of the weights is called that networks begin with; a run's with the run's folder.

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
        usual = load_recipe(usual_recipe(task.data))
        epochs = self.epochs or usual.epochs
        entries: dict[str, Any] = {
            "data": task.data,
            "root": self.roots.get(task.data),
            "seed": task.seed,
            "epochs": epochs,
            "validation": 0,
            "validate_every": epochs,
            "reference": True,
            **self.changes,
        }
        if isinstance(task, Cell):
            entries["defense"] = task.defense
            if task.steps is not None:
                entries["steps"] = task.steps
        return suited_recipe(entries)

    def plan(self, task: Cell) -> Plan:
        """Return how a cell's network is evaluated: as published ones were."""
        return Plan.make(
            protocol="reference",
            eps=self.recipe(task).eps,
            steps=self.steps,
            queries=self.queries,
            checks="none",
        )

    def identity(self, task: Task) -> dict[str, Any]:
        """Return all that a cell's training depends on, in JSON's types, wherever its files are.

        Images of one's own are told by the name of their folder or file; records tell of their pixels.
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
            found["workers"] = self.workers(task.data)
        else:
            del recipe["defense"], recipe["epochs"], recipe["validate_every"]
            found["batches"] = self.batches
            found["samplers"], found["statistics"] = list(DRAWN), list(STATISTICS)
        return found

    def name(self, task: Task) -> str:
        """Return the name of a cell's folder, which tells trainings apart.

        >>> Scale().name(Cell("digits", "HM[S,LGA]&ICS", 8))[:32]
        'digits-HM-S-LGA-and-ICS-8-seed0-'
        """
        text = json.dumps(self.identity(task), sort_keys=True)
        return f"{task.slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def told(self, data: Sequence[str], *, trains: bool = True) -> str:
        """Say at which scale the cells of `data` sets are run; `trains` is False for those of Table 1."""
        each = {name: self._told(name) if trains else self._told_of_batches(name) for name in data}
        if len(set(each.values())) == 1:
            return each[data[0]]
        return "; ".join(f"{name}: {text}" for name, text in each.items())

    def _told(self, data: str) -> str:
        usual, published = load_recipe(usual_recipe(data)), data in PUBLISHED_WORKERS

        def beside(value: int, was: int) -> str:
            return f" (published: {was})" if published and value != was else ""

        epochs, workers = self.epochs or usual.epochs, self.workers(data)
        asked = "all queries" if self.queries is None else f"{self.queries} queries"
        parts = [
            counted(epochs, "epoch") + beside(epochs, usual.epochs),
            asked + (" (published: all)" if self.queries is not None and published else ""),
            f"attacks of {counted(self.steps, 'step')}" + beside(self.steps, Scale.steps),
            counted(workers, "worker") + beside(workers, PUBLISHED_WORKERS.get(data, 1)),
        ]
        return ", ".join([*parts, *self._told_of_recipe(data)])

    def _told_of_batches(self, data: str) -> str:
        parts = [counted(self.batches, "batch", "batches")]
        if self.weights is None:
            parts.append(began(None))
        return ", ".join([*parts, *self._told_of_recipe(data)])

    def _told_of_recipe(self, data: str) -> Iterator[str]:
        if self.weights is not None:
            yield began(self.weights)
        elif data in PUBLISHED_WORKERS:
            yield "from random weights (published: ImageNet's)"
        named = bare(self.changes)
        yield from (f"{k} = {value}" for k, value in named.items() if value is not None and k != "weights")


def began(weights: str | None) -> str:
    """Say what a network was before it was trained or measured; `weights` name the file that it has them of.

    >>> began("last.safetensors")
    'from the weights last.safetensors'
    """
    return "at the start of training" if weights is None else f"from the weights {weights}"


def counted(number: int, thing: str, things: str | None = None) -> str:
    """Write how many there are of a `thing`; `things` is what several are called.

    >>> counted(1, "epoch"), counted(1000, "step"), counted(2, "batch", "batches")
    ('1 epoch', '1,000 steps', '2 batches')
    """
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


_FIXED = ("digits", "mnist", "fashion-mnist", "cub", "cars", "sop")  # data sets that are the same everywhere
_DEVICES = {"auto": None, "cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}
_OF_CELL = {"data", "root", "defense", "steps", "epochs", "seed", "validation", "validate_every", "reference"}


@dataclass(frozen=True, eq=False)
class Job:
    """A cell to be made: the `task`, its `scale`, and the `folder` that it is made in.

    `command` are the arguments of the command line that makes this cell alone.
    """

    task: Task
    scale: Scale
    folder: Path
    command: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """The name of the cell."""
        return self.scale.name(self.task)


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


def names_of(scale: Scale, tasks: Sequence[Task]) -> dict[str, Task]:
    """Return different `tasks` by the names of their folders.

    >>> list(names_of(Scale(), [Cell("digits", "N/A[R]"), Cell("digits", "N/A[R]")])) == [
    ...     Scale().name(Cell("digits", "N/A[R]"))
    ... ]
    True
    """
    return {scale.name(task): task for task in dict.fromkeys(tasks)}
