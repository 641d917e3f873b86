"""The folder of a run: what is in it, whether it can be taken, and where its network comes from."""

from __future__ import annotations

import csv
import json
import platform
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from robustmetric import data
from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError, brief
from robustmetric.evaluation.identity import versions
from robustmetric.files import is_draft, load_entries, write_atomically
from robustmetric.locks import LOCK
from robustmetric.models import NetworkSource
from robustmetric.training.parts import inputs_of, source_of
from robustmetric.training.recipe import (
    Recipe,
    bare,
    dump_recipe,
    files_beside,
    load_recipe,
    make_recipe,
    named_files,
    names_code,
    read_file,
    rename_files,
)
from robustmetric.training.stops import saving
from robustmetric.usercode import digest_of, files_below, imported_files, untrusted

Which = Literal["last", "best"]
"""The weights of a run: of its end, or of the best validation."""

_CODE = "code"
_MOVED = {"root"}
"""The entries of a recipe that may change: digests tell whether moved images are the same."""
_RESUMED = {*_MOVED, "epochs"}
"""Those that may change when a run is resumed."""


class Weights(NamedTuple):
    """A file of weights, and how a run chose them.

    `chosen` is "last weights", "chosen on validation images" or "chosen on test images"; None where that is
    not known.
    """

    file: Path
    chosen: str | None


class RunFolder:
    """The folder of a run, `path`: the one place that knows its files.

    A run whose recipe names code is refused unless `trust` says that its code may run.

    >>> RunFolder(Path("runs/digits")).metrics
    PosixPath('runs/digits/metrics.csv')
    """

    def __init__(self, path: Path | str, *, trust: bool = False) -> None:
        self.path, self.trust = Path(path).expanduser(), trust
        self.recipe_file = self.path / "recipe.yaml"  # as resolved
        self.about = self.path / "run.json"  # what it began with, how weights were chosen, versions
        self.metrics = self.path / "metrics.csv"
        self.checkpoint = self.path / "last.ckpt"
        self.last = self.path / "last.safetensors"  # the weights of the last validation, and of the end
        self.best = self.path / "best.safetensors"  # the weights of the best validation
        self.good = self.path / "good.safetensors"  # after a collapse: the last weights before it
        self.evaluation = self.path / "evaluation"
        self.code = self.path / _CODE  # copies of the user's files

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def exists(self) -> bool:
        """Whether there is a run in the folder."""
        return self.recipe_file.is_file()

    @property
    def name(self) -> str:
        """The network and how it was trained, with the user's files by their names alone."""
        return make_recipe(read_file(self.recipe_file)).name

    def recipe(self, changes: Mapping[str, Any] | None = None, *, resumed: bool = False) -> Recipe:
        """Return the run's recipe with some `changes`; the files that it names are those of the run.

        A recipe or code that was edited is refused; a `resumed` recipe may have other epochs.
        """
        if not self.exists:
            raise FileNotFoundError(f"'{self.path}' is not a run folder: no {self.recipe_file.name} in it")
        entries = read_file(self.recipe_file)
        if not self.trust and names_code({k: v for k, v in entries.items() if k not in (changes or {})}):
            raise untrusted(self.path, files_below(self.code), self.code)
        known, now = self._entry("origin").get("code"), self.code_digest()
        if isinstance(known, str) and known != now:
            raise UserError(
                f"the copies in {self.code} were changed since the training: their sha256 is {now}, was "
                f"{known}; restore them, or, if you changed them yourself, correct it in {self.about}"
            )
        recipe = load_recipe(self.recipe_file, changes, trust=True)
        self._check_edited(entries, _RESUMED if resumed else _MOVED)
        return recipe

    def _check_edited(self, entries: dict[str, Any], may_change: AbstractSet[str]) -> None:
        """Reject a recipe with other values than run.json has."""
        if not (kept := self._entry("recipe")):
            return
        # Entries that run.json does not know had their defaults.
        trained = {**make_recipe({}).model_dump(mode="json"), **kept}
        now = make_recipe(entries).model_dump(mode="json")
        if edited := [k for k in now if k not in may_change and now[k] != trained[k]]:
            told = ", ".join(f"{k} is {brief(now[k])}, was {brief(trained[k])}" for k in edited)
            raise UserError(
                f"{self.recipe_file} is not the recipe that this run began with: {told}; restore it, or "
                f"train with it in another folder (train --recipe {self.recipe_file} --out NEW)"
            )

    # Training

    def check(self, recipe: Recipe, resume: bool) -> None:
        """Reject a folder that holds anything but, to `resume`, a run of this `recipe`."""
        if not self.exists:
            others = self.path.iterdir() if self.path.is_dir() else [self.path] if self.path.exists() else []
            if any(not is_draft(path) and path.name != LOCK for path in others):
                raise UserError(
                    f"{self.path} is not empty and holds no run: give another folder", parameter="out"
                )
            return
        if not resume:
            raise UserError(
                f"{self.path} holds a run already: resume it, or give another folder", parameter="out"
            )
        before, now = (bare(r.model_dump()) for r in (self.continued(recipe), recipe))
        if differing := [k for k in Recipe.model_fields if k not in _RESUMED and before[k] != now[k]]:
            told = ", ".join(f"{k} was {before[k]!r}, is {now[k]!r}" for k in differing)
            raise UserError(
                f"{self.path} holds another run: {told}; resume with its own recipe, or give another folder",
                parameter="out",
            )
        self._check_code(recipe)
        if not self.about.is_file():
            raise UserError(
                f"{self.about} is missing, which says what the run began with: restore it, or begin a new run"
            )

    def _check_code(self, recipe: Recipe) -> None:
        """Reject copies of the user's files that are not what the `recipe` names."""
        if all(self._holds(file) for file in named_files(recipe.model_dump())):
            return
        copies = {self.path / path: content for path, content in _copies(recipe.model_dump())[1].items()}
        there = {file: file.read_bytes() for file in files_below(self.code)}
        if copies != there:
            names = ", ".join(sorted({file.name for file, _ in copies.items() ^ there.items()}))
            raise UserError(
                f"{self.code} holds other code than the files that you name ({names}): restore them, or name "
                f"none and resume with the run's own code (--out {self.path} --resume --trust)"
            )

    def _holds(self, file: Path) -> bool:
        return file.absolute().is_relative_to(self.path.absolute())

    def continued(self, recipe: Recipe) -> Recipe:
        """Return the run's own recipe, which names its copies, with the epochs and the root of `recipe`."""
        own = RunFolder(self.path, trust=True)  # `check` compares the code
        return own.recipe({name: getattr(recipe, name) for name in _RESUMED}, resumed=True)

    def check_origin(self, now: Mapping[str, Any]) -> None:
        """Reject images or workers, as far as `now` has them, other than those the run began with."""
        before = self._entry("origin")
        known = [name for name in now if before.get(name)]
        found = [told for name in known if (told := _difference(name, before[name], now[name]))]
        if found:
            last = f" with --weights {self.last}" if self.last.is_file() else ""
            raise UserError(
                f"{self.path} began with something else: {'; '.join(found)}; or begin a new run in another "
                f"folder{last}"
            )

    def code_digest(self) -> str | None:
        """Return the digest of the run's copies of the user's files; None if there are none."""
        files = files_below(self.code)
        return digest_of(files, self.code) if files else None

    def begin(
        self,
        recipe: Recipe,
        choice: Mapping[str, Any],
        *,
        skipped: list[str],
        shape: tuple[int, int, int],
        origin: Mapping[str, Any],
    ) -> None:
        """Write down what is about to happen: the user's files, the `recipe` as resolved, and `run.json`.

        `skipped` are the images left out, `choice` tells how weights are chosen, `shape` is the height,
        width and channels of the images; `origin` has what a resumed run must have again.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for rest in filter(is_draft, self.path.iterdir()):
            rest.unlink()
        entries = recipe.model_dump()
        if all(self._holds(file) for file in named_files(entries)):
            here = self.path.absolute()
            entries = rename_files(entries, lambda file: file.absolute().relative_to(here))
        else:
            entries = copy_files(entries, self.path)
        files_beside(entries, self.path)  # which refuses a path that a defense cannot hold
        kept = make_recipe(entries)
        with saving(self.recipe_file):
            write_atomically(self.recipe_file, lambda file: file.write(dump_recipe(kept).encode()))
        start = {
            "command": sys.argv[1:],
            **versions("robustmetric", "torch", "lightning", "numpy", "pillow"),
            "platform": platform.platform(),
        }
        starts = self.read().get("starts")
        self.write(
            {
                "recipe": kept.model_dump(mode="json"),
                "skipped": skipped,
                "choice": {**self._entry("choice"), **choice},
                "starts": [*(starts if isinstance(starts, list) else []), start],
                "origin": {**self._entry("origin"), **origin, "code": self.code_digest()},
                "images": dict(zip(("height", "width", "channels"), shape, strict=True)),
            }
        )

    def finish(self, choice: Mapping[str, Any]) -> None:
        """Add to `run.json` how the weights were chosen: `choice`."""
        self.write({**self.read(), "choice": dict(choice)})

    def write(self, content: Mapping[str, Any]) -> None:
        """Write the `content` of `run.json`."""
        with saving(self.about):
            write_atomically(self.about, lambda file: file.write(json.dumps(content, indent=1).encode()))

    def read(self) -> dict[str, Any]:
        """Return the contents of `run.json`, which may be edited by hand; empty if it is missing."""
        return load_entries(self.about, sealed=False) if self.about.is_file() else {}

    def _entry(self, name: str) -> dict[str, Any]:
        found = self.read().get(name)
        return found if isinstance(found, dict) else {}

    # What it trained

    def weights(self, which: Which | None = None) -> Weights:
        """Return the weights that count, and how they were chosen.

        The best ones where validation images chose them; the last ones elsewhere, with `reference`, and where
        validation did not tell weights apart; or `which`.
        """
        recipe, choice = self.recipe(), self._entry("choice")
        by = choice.get("images") or f"{'validation' if recipe.validation else 'test'} images"
        last = recipe.reference or by == "test images" or choice.get("weights") == "last"
        files = {"last": self.last, "best": self.best}
        wanted = [which] if which else ["last", "best"] if last else ["best", "last"]
        name = next((name for name in wanted if files[name].is_file()), None)
        if name is None:
            there = " and ".join(name for name, file in files.items() if file.is_file()) or "no"
            raise FileNotFoundError(
                f"there are no weights {files[wanted[0]]}: the folder holds {there} weights; ask for others, "
                "or resume the training until its next validation"
            )
        return Weights(files[name], "last weights" if name == "last" else f"chosen on {by}")

    def choose(self, weights: Path | Which | None = None) -> Weights:
        """Return the `weights` that are asked for: "last", "best", another file, or those that count."""
        if weights is None or weights == "last" or weights == "best":
            return self.weights(weights)
        if not Path(weights).is_file():
            raise FileNotFoundError(f"there is no weights file {weights}")
        return Weights(Path(weights), None)

    def source(self, weights: Path | Which | None = None) -> NetworkSource:
        """Return where the run's network comes from, with its `weights`, as `choose` takes them."""
        return replace(source_of(self.recipe()), weights=self.choose(weights).file)

    def inputs(self, *, any_size: bool = False) -> Inputs:
        """Return what the run's network takes: the sizes of its recipe, the channels that it was made for.

        With `any_size`, images are resized to the size of training also where the recipe resizes none.
        """
        inputs = inputs_of(self.recipe())
        if any_size and inputs.resize is None and inputs.crop is None:
            inputs = replace(inputs, resize=self.shape()[1])
        return replace(inputs, channels=inputs.channels or self._entry("images").get("channels"))

    def shape(self) -> tuple[int, int]:
        """Return the channels and the size (the height) of the images that the network was made for."""
        known, recipe = self._entry("images"), self.recipe()
        if {"height", "channels"} <= known.keys():
            return known["channels"], recipe.crop or known["height"]
        inputs = inputs_of(recipe)
        return inputs.shape(inputs.first(data.load(recipe.data, recipe.root, "train")))

    def train_classes(self) -> tuple[str, ...] | None:
        """Return the classes that the run was trained on, if its images are there."""
        recipe = self.recipe()
        try:
            return data.load(recipe.data, recipe.root, "train").classes
        except (UserError, OSError):
            return None


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of metrics; none if it is missing. A row that was cut short is left out.

    >>> read_rows(Path("nowhere.csv"))
    []
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(line for line in file if line.endswith("\n")))
    except (ValueError, csv.Error):
        rows = [{}]
    if not all(
        None not in row and None not in row.values() and row.get("step", "").isdecimal() for row in rows
    ):
        raise UserError(f"{path} is no table with a step in each row: restore it, or move it away")
    return rows


def copy_files(entries: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Copy the files that a recipe names into ``folder/code``, with what they import from their folders.

    The entries that come back name the copies, relative to the `folder`. Files of another directory go to a
    directory of their own.
    """
    named, copies = _copies(entries)
    for path, content in copies.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with saving(folder / path):
            write_atomically(folder / path, lambda file: file.write(content))  # noqa: B023
    return named


def _copies(entries: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Path, bytes]]:
    """Return the entries of a recipe that name copies of its files, and the contents of these by path."""
    homes: dict[Path, Path] = {}
    contents: dict[Path, bytes] = {}

    def copy(file: Path) -> Path:
        home = file.absolute().parent
        place = homes.setdefault(home, Path(_CODE, str(len(homes) + 1)) if homes else Path(_CODE))
        for part in imported_files(file.absolute()):
            contents[place / part.relative_to(home)] = part.read_bytes()
        return place / file.name

    return rename_files(entries, copy), contents


def _difference(name: str, was: Any, now: Any) -> str | None:
    """Say what of the origin of a run is not what it was, and what to do."""
    if was == now:
        return None
    if name == "workers":
        return f"the number of workers was {was}, is {now}: give --devices {was} (times --nodes)"
    for kind, new in now.items():
        old = was.get(kind)
        if not isinstance(old, dict) or old == new:
            continue
        counts = [f"{one.get('count')} of {one.get('classes')} classes" for one in (old, new)]
        if counts[0] != counts[1]:
            return f"the {kind} were {counts[0]}, are {counts[1]}: restore them"
        what = "are in other classes" if old.get("labels") != new["labels"] else "have other pixels"
        return f"of the {kind}, {counts[0]}, some {what}: restore them"
    return None
