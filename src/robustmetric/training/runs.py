"""The folder of a run: what is in it, whether it can be taken, and where its network comes from."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from robustmetric import data
from robustmetric.data.cache import Pixels
from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError, brief
from robustmetric.evaluation.identity import versions
from robustmetric.files import DamagedError, digest_of_entries, is_draft, write_atomically
from robustmetric.locks import LOCK
from robustmetric.models import NetworkSource
from robustmetric.training.code import (
    bare,
    check_place,
    copy_files,
    named_files,
    remember_files,
    rename_files,
)
from robustmetric.training.entries import read_file
from robustmetric.training.origins import code_of, differences
from robustmetric.training.parts import inputs_of, source_of
from robustmetric.training.recipe import Recipe, dump_recipe, load_recipe, make_recipe
from robustmetric.training.stops import saving
from robustmetric.trust import store
from robustmetric.usercode import file_of

Which = Literal["last", "best"]
"""The weights of a run: of its end, or of the validation with the highest R@1."""

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


def name_of(recipe: Recipe) -> str:
    """Return what a run of a `recipe` is called: the network and how it is trained.

    >>> name_of(Recipe(data="digits"))
    'c2f2 HM[S,LGA]&ICS'
    """
    entries = bare(recipe.model_dump())
    return f"{entries['model']} {entries['defense']}"


class RunFolder:
    """The folder of a run, `path`: the one place that knows what its files are called.

    Code that its recipe names is run only if the user trusts it, as `load_recipe` has it; `trust` does.

    >>> RunFolder(Path("runs/digits")).metrics
    PosixPath('runs/digits/metrics.csv')
    """

    def __init__(self, path: Path | str, *, trust: bool = False) -> None:
        self.path, self.trust = Path(path).expanduser(), trust

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def recipe_file(self) -> Path:
        """The recipe as resolved."""
        return self.path / "recipe.yaml"

    @property
    def about(self) -> Path:
        """Versions, images left out, how weights were chosen, the shape of the images."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """The table of what was logged."""
        return self.path / "metrics.csv"

    @property
    def checkpoint(self) -> Path:
        """Lightning's checkpoint, from which a training goes on."""
        return self.path / "last.ckpt"

    @property
    def last(self) -> Path:
        """The weights of the last validation, and of the end."""
        return self.path / "last.safetensors"

    @property
    def best(self) -> Path:
        """The weights of the validation with the highest R@1."""
        return self.path / "best.safetensors"

    @property
    def good(self) -> Path:
        """After a collapse: the last weights at which all was well."""
        return self.path / "good.safetensors"

    @property
    def evaluation(self) -> Path:
        """The folder of the record."""
        return self.path / "evaluation"

    @property
    def code(self) -> Path:
        """The folder with copies of the user's files."""
        return self.path / _CODE

    @property
    def exists(self) -> bool:
        """Whether there is a run in the folder."""
        return self.recipe_file.is_file()

    @property
    def name(self) -> str:
        """The network and how it was trained, with the user's files by their names alone."""
        return name_of(self.recipe())

    def check(self, recipe: Recipe, resume: bool) -> None:
        """Refuse a folder that holds another run or anything else.

        With `resume`, the run that it holds must be one of this `recipe`, its epochs aside; where the images
        and the user's files are does not count.
        """
        if self.recipe_file.exists():
            if not resume:
                raise UserError(
                    f"{self.path} holds a run already: resume it, or give another folder", parameter="out"
                )
            before, now = (bare(r.model_dump()) for r in (self.recipe(resumed=True), recipe))
            differing = [k for k in Recipe.model_fields if k not in _RESUMED and before[k] != now[k]]
            if differing:
                told = ", ".join(f"{k} was {before[k]!r}, is {now[k]!r}" for k in differing)
                raise UserError(
                    f"{self.path} holds another run: {told}; resume with its own recipe, or give another "
                    "folder",
                    parameter="out",
                )
        elif self.path.exists() and (
            not self.path.is_dir()
            or any(not is_draft(path) and path.name != LOCK for path in self.path.iterdir())
        ):
            raise UserError(
                f"{self.path} is not empty and holds no run: give another folder", parameter="out"
            )
        else:
            check_place(recipe.model_dump(), self.code)

    def check_origin(self, now: Mapping[str, Any]) -> None:
        """Refuse to go on with a run whose images, files or workers are not those it began with.

        `now` has some of these, as `begin` takes them. A run of before, which did not write them down,
        is not refused.
        """
        if not self.about.exists():
            raise UserError(
                f"{self.about} is gone, which says what the run began with: restore it, or begin a new run "
                "in another folder"
            )
        if found := differences(self._origin(), now):
            last = f" with --weights {self.last}" if self.last.is_file() else ""
            raise UserError(
                f"{self.path} began with something else: {'; '.join(found)}; or begin a new run in another "
                f"folder{last}"
            )

    def _origin(self) -> dict[str, Any]:
        found = self.read().get("origin")
        return found if isinstance(found, dict) else {}

    def continued(self, recipe: Recipe, report: Callable[[str], None] = print) -> Recipe:
        """Return the run's own recipe, whose files are its copies, with the epochs and the root of `recipe`.

        `report` is told of files that have changed since they were copied.
        """
        kept = self.recipe({name: getattr(recipe, name) for name in _RESUMED}, resumed=True)
        named = named_files(kept.model_dump())
        copies = {file.name: file for file in named}
        known = self._origin().get("files")
        given = [Path(str(file)) for file in known] if isinstance(known, list) else []
        for file in dict.fromkeys([*named_files(recipe.model_dump()), *given]):
            copy = copies.get(file.name)
            if copy is not None and file.is_file() and file.read_bytes() != copy.read_bytes():
                report(f"{file} is not what the run began with: its copy counts, {copy}")
        return kept

    def begin(
        self,
        recipe: Recipe,
        skipped: list[str],
        choice: Mapping[str, Any],
        images: Pixels | None = None,
        origin: Mapping[str, Any] | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        """Write down what is about to happen: the user's files, the `recipe` as resolved, and `run.json`.

        `skipped` are the images left out, `choice` tells how weights are chosen, `images` are some of those
        that are trained on; `origin` has what a resumed run must have again, beside the user's files. Those
        are trusted from now on; `report` is told if that cannot be written down.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for rest in filter(is_draft, self.path.iterdir()):
            rest.unlink()
        kept = make_recipe(self._copied(recipe.model_dump()))
        if not remember_files(kept.model_dump(), self.path):
            report(f"{store()} cannot be written: the code in {self.code} will need --trust to run again")
        with saving(self.recipe_file):
            write_atomically(self.recipe_file, lambda file: file.write(dump_recipe(kept).encode()))
        about = versions("robustmetric", "torch", "lightning", "numpy", "pillow")
        about["platform"] = platform.platform()
        before = self.read()
        starts, chosen = before.get("starts"), before.get("choice")
        here = self.path.absolute()
        given = [str(file.absolute()) for file in named_files(recipe.model_dump())]
        files = [file for file in given if not Path(file).is_relative_to(here)]
        content = {
            "recipe": kept.model_dump(mode="json"),
            "skipped": skipped,
            "choice": {**(chosen if isinstance(chosen, dict) else {}), **choice},
            "starts": [*(starts if isinstance(starts, list) else []), {"command": sys.argv[1:], **about}],
        }
        content["origin"] = {
            **self._origin(),
            **({"files": files} if files else {}),
            **(origin or {}),
            "code": code_of(self.code),
        }
        if images is not None:
            content["images"] = dict(
                zip(("height", "width", "channels"), images.pixels.shape[1:], strict=True)
            )
        self.write(content)

    def _copied(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Copy the user's files into the run; those of a run that goes on are there already."""
        here = self.path.absolute()
        if all(file.absolute().is_relative_to(here) for file in named_files(entries)):
            return rename_files(entries, lambda file: file.absolute().relative_to(here))
        return copy_files(entries, self.path, _CODE)

    def finish(self, choice: Mapping[str, Any]) -> None:
        """Add to `run.json` how the weights were chosen: `choice`."""
        self.write({**self.read(), "choice": dict(choice)})

    def read(self) -> dict[str, Any]:
        """Return the contents of `run.json`; empty if it is missing. A damaged one is refused.

        >>> RunFolder("nowhere").read()
        {}
        """
        try:
            found = json.loads(self.about.read_text(encoding="utf-8"))
        except OSError:
            return {}
        except (ValueError, RecursionError):
            found = None
        # Runs of before have no digest.
        if not isinstance(found, dict) or found.pop("sha256", None) not in (None, digest_of_entries(found)):
            raise DamagedError(
                f"{self.about} is damaged, or was changed by hand: its digest does not match; restore it, or "
                "remove it if only the network of the run is to be used"
            )
        return found

    def recipe(self, changes: Mapping[str, Any] | None = None, *, resumed: bool = False) -> Recipe:
        """Return the run's recipe with some `changes`; the files that it names are those of the run.

        A recipe that was edited is refused; a `resumed` one may have other epochs.
        """
        if not self.exists:
            raise FileNotFoundError(
                f"{self.path} is no run, it has no {self.recipe_file.name}: give the folder of a run"
            )
        recipe = load_recipe(self.recipe_file, changes, trust=self.trust)
        self._check_edited(_RESUMED if resumed else _MOVED)
        file = file_of(recipe.model)
        # Runs of before copied no files, and kept this number for networks that did not know of it.
        old = file is not None and not file.file.is_relative_to(self.code.absolute()) and recipe.dim == 512
        return recipe.model_copy(update={"dim": None}) if old and "dim" not in (changes or {}) else recipe

    def _check_edited(self, may_change: AbstractSet[str]) -> None:
        """Refuse a recipe with other values than run.json has; runs of before kept none there."""
        kept = self.read().get("recipe")
        if not isinstance(kept, dict):
            return
        # Of entries that the version before did not have, it did as the default says.
        trained = {**make_recipe({}).model_dump(mode="json"), **kept}
        now = make_recipe(read_file(self.recipe_file)).model_dump(mode="json")
        if edited := [k for k in now if k not in may_change and now[k] != trained[k]]:
            told = ", ".join(f"{k} is {brief(now[k])}, was {brief(trained[k])}" for k in edited)
            raise UserError(
                f"{self.recipe_file} is not the recipe that this run began with: {told}; restore it, or "
                f"train by it in another folder (train --recipe {self.recipe_file} --out NEW)"
            )

    def weights(self, which: Which | None = None) -> Weights:
        """Return the weights that count, and how they were chosen.

        The best ones where validation images chose them, the last elsewhere, by `reference`, and where
        validation did not tell weights apart; or `which`.
        """
        by, choice = self._chosen_on(), self.read().get("choice")
        undecided = isinstance(choice, dict) and choice.get("weights") == "last"
        last = undecided or by == "test images" or self.recipe().reference
        usual = get_args(Which) if last else ("best", "last")
        own = {"last": self.last, "best": self.best}
        names = [which] if which else usual
        name = next((name for name in names if own[name].is_file()), None)
        if name is None:
            here = [name for name, file in own.items() if file.is_file()]
            if here:
                why = f"the folder holds the {here[0]} ones alone; ask for {here[0]}, or for none"
            elif self.checkpoint.is_file():
                why = "the run has not been validated yet; resume its training"
            else:
                why = (
                    "the folder holds no weights; take a whole copy of it, or train again by its "
                    f"{self.recipe_file.name}"
                )
            raise FileNotFoundError(f"there are no weights {own[names[0]]}: {why}")
        return Weights(own[name], "last weights" if name == "last" else f"chosen on {by}")

    def source(self, weights: Path | Which | None = None) -> NetworkSource:
        """Return where the run's network comes from, with its `weights`: "last", "best", or another file.

        By default they are those that `weights` returns.
        """
        return replace(source_of(self.recipe()), weights=self.choose(weights).file)

    def choose(self, weights: Path | Which | None = None) -> Weights:
        """Return the `weights` that are asked for: "last", "best", another file, or those that count."""
        if weights is None or weights == "last" or weights == "best":
            return self.weights(weights)
        if not Path(weights).is_file():
            raise FileNotFoundError(f"there is no weights file {weights}")
        return Weights(Path(weights), None)

    def inputs(self, *, any_size: bool = False) -> Inputs:
        """Return what the run's network takes: the sizes of its recipe, the channels that it was made for.

        With `any_size`, images are brought to the size of training also where the recipe resizes none.
        """
        inputs = inputs_of(self.recipe())
        if any_size and inputs.resize is None and inputs.crop is None:
            inputs = replace(inputs, resize=self.shape()[1])
        return replace(inputs, channels=inputs.channels or self._images().get("channels"))

    def shape(self) -> tuple[int, int]:
        """Return the channels and the size (the height) of the images that the network was made for.

        An older run, which did not write them down, looks at its first image.
        """
        known, recipe = self._images(), self.recipe()
        if known:
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

    def _images(self) -> dict[str, Any]:
        known = self.read().get("images")
        whole = isinstance(known, dict) and {"height", "width", "channels"} <= known.keys()
        return known if whole else {}  # type: ignore[return-value]

    def _chosen_on(self) -> str:
        """Say which images chose the best weights: "validation images" or "test images"."""
        found = self.read()
        choice = found.get("choice")
        if isinstance(choice, dict) and "images" in choice:
            return str(choice["images"])
        # A run.json without it is of a time when test images chose.
        return "validation images" if self.recipe().validation and not found else "test images"

    def write(self, content: Mapping[str, Any]) -> None:
        """Write `run.json`: its `content`, and the digest of that."""
        text = json.dumps({**content, "sha256": digest_of_entries(content)}, indent=1)
        with saving(self.about):
            write_atomically(self.about, lambda file: file.write(text.encode()))
