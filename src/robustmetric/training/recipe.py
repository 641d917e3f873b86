"""Recipes: everything that a training depends on, as data that can be read, changed and kept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from robustmetric.errors import UserError, brief, fraction
from robustmetric.registry import lookup, unknown
from robustmetric.text import printable
from robustmetric.usercode import OWN, imported_files, untrusted

Level = Annotated[float, BeforeValidator(fraction)]
Precision = Literal["32-true", "bf16-mixed", "16-mixed", "64-true"]

LARGEST = 1_000_000
"""Bytes of a recipe file."""


class Recipe(BaseModel):
    """What to train on, which network, which defense, and how.

    >>> Recipe(data="digits", defense="HM[S,LGA]&ICS", eps="8/255").eps == 8 / 255
    True
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    data: str = Field("digits", description="data set: a name or file.py:function")
    root: Path | None = Field(None, description="dataset directory")
    model: str = Field("c2f2", description="network: a name, timm:NAME or file.py:function")
    weights: Path | None = Field(None, description="initial weights")
    dim: int | None = Field(None, ge=1, le=65_536, description="embedding length, null for the network's own")
    freeze_bn: bool = Field(False, description="freeze BatchNorm's statistics (ResNets)")
    defense: str = Field("HM[S,LGA]&ICS", description="defense in the paper's notation")
    reference: bool = Field(False, description="train as the published figures were: see docs/method.md")
    eps: Level = Field(8 / 255, ge=0, le=1, description="ε, the largest change of a pixel")
    alpha: Level = Field(1 / 255, gt=0, le=1, description="α, the step size")
    steps: int = Field(8, ge=1, le=1_000_000, description="η, the number of steps")
    margin: float = Field(0.2, gt=0, le=2, description="γ of the triplet loss")
    epochs: int = Field(8, ge=1, le=1_000_000, description="number of epochs")
    batch: int = Field(112, ge=8, le=65_536, multiple_of=2, description="images per batch of a worker")
    lr: float = Field(1e-3, gt=0, le=1e6, description="learning rate of Adam")
    schedule: Literal["constant", "cosine"] = Field("constant", description="learning rate after the warm-up")
    warmup: int = Field(0, ge=0, le=1_000_000_000, description="steps of warm-up, at most a quarter of all")
    clip: float | None = Field(None, gt=0, le=1e30, description="largest norm of the gradient, null for any")
    weight_decay: float = Field(0.0, ge=0, le=1e6, description="weight decay of Adam")
    resize: int | None = Field(None, ge=4, le=4096, description="size of images before cropping")
    fit: Literal["squeeze", "crop", "pad"] = Field("squeeze", description="how images become square")
    crop: int | None = Field(None, ge=4, le=4096, description="crop size; random in training, else central")
    flip: bool = Field(False, description="mirror half of the training images")
    zoom: float | None = Field(None, gt=0, le=1, description="smallest share to zoom in on, null for off")
    jitter: float = Field(0.0, ge=0, le=1, description="change of brightness, contrast and saturation")
    validation: float = Field(0.1, ge=0, le=0.5, description="share of training images set apart to validate")
    validate_by: Literal["plain", "robust"] = Field("plain", description="R@1 that chooses the best weights")
    validate_every: int = Field(1, ge=1, le=1_000_000, description="epochs between two validations")
    save_every: int = Field(100, ge=1, le=1_000_000_000, description="steps between two checkpoints")
    save_minutes: float = Field(10.0, gt=0, le=1e6, description="minutes between two checkpoints, at most")
    precision: Precision = Field("32-true", description="floating-point precision")
    seed: int = Field(0, ge=0, lt=2**32, description="random seed")

    @property
    def name(self) -> str:
        """The network and how it is trained, with the user's files by their names alone."""
        entries = bare(self.model_dump())
        return f"{entries['model']} {entries['defense']}"


def recipe_names() -> list[str]:
    """List the recipes of the package.

    >>> "28x28" in recipe_names()
    True
    """
    return sorted(_packaged())


def usual_recipe(data: str) -> str:
    """Name the default recipe of a data set."""
    known = {"digits": "digits", "mnist": "28x28", "fashion-mnist": "28x28", "sop": "224x224-code-sop"}
    return {**known, **dict.fromkeys(("cub", "cars"), "224x224-code")}.get(data, "images")


def load_recipe(
    name: str | Path | None = None, changes: Mapping[str, Any] | None = None, *, trust: bool = False
) -> Recipe:
    """Read a recipe by its `name` or from a YAML file, with some of its entries changed.

    Python files that a YAML file names are first looked for in its folder, and refused unless `trust` says
    that they may run; those in `changes` are the user's own.

    >>> load_recipe("28x28", {"steps": 8, "data": "mnist"}).steps
    8
    """
    changes = changes or {}
    if name is None:
        return make_recipe(changes)
    if Path(name).suffix not in (".yaml", ".yml"):
        return make_recipe({**_parsed(str(name)), **changes})
    file = Path(name)
    entries = {key: value for key, value in read_file(file).items() if key not in changes}
    if not trust and names_code(entries):
        placed = named_files(files_beside(entries, file.parent, check=False))
        raise untrusted(file, [part for one in placed for part in imported_files(one)], file.parent)
    try:
        return make_recipe({**files_beside(entries, file.parent), **changes})
    except UserError as error:
        if error.parameter in changes:
            raise
        raise UserError(f"{name}: {error}", parameter=error.parameter) from None


def make_recipe(entries: Mapping[str, Any]) -> Recipe:
    """Check the entries of a recipe; say which is wrong, what it is and what it may be.

    >>> make_recipe({"epoch": 3})
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown recipe entry 'epoch' (did you mean 'epochs'?); known: alpha, ...
    """
    for key, value in entries.items():
        if key not in Recipe.model_fields:
            told = unknown("recipe entry", str(key), Recipe.model_fields, _SYNONYMS)
            raise UserError(told, parameter=str(key))
        if "\0" in str(value):
            raise UserError(f"{key} is {brief(value)}: it holds a NUL character", parameter=key)
    try:
        return Recipe(**entries)
    except ValidationError as error:
        problems = [
            f"{problem['loc'][0]} is {brief(problem['input'])}: "
            f"{problem['msg'][:1].lower()}{problem['msg'][1:]}"
            f"{_LEVELS if problem['loc'][0] in ('eps', 'alpha') else ''}"
            for problem in error.errors()
        ]
        first = str(error.errors()[0]["loc"][0])
        raise UserError("; ".join(problems), parameter=first) from None


_LEVELS = ", for pixels are in [0, 1]: 8 grey levels are 8/255"
_SYNONYMS = {
    "learning_rate": "lr", "wd": "weight_decay", "network": "model", "backbone": "model", "arch": "model",
    "embedding_size": "dim", "epsilon": "eps", "step_size": "alpha", "gamma": "margin",
    "iterations": "steps", "pretrained": "weights", "color_jitter": "jitter", "random_resized_crop": "zoom",
}  # fmt: skip
"""What others call some entries, as far as the letters do not tell."""


def recipe_text(name: str) -> str:
    """Write a recipe of the package as YAML: what it is for, then every entry with its meaning."""
    head = [line for line in lookup("recipe", name, _packaged()).splitlines() if line.startswith("#")]
    return "\n".join([*head, dump_recipe(load_recipe(name))])


def dump_recipe(recipe: Recipe) -> str:
    """Return a `recipe` as YAML, with the meaning of each entry.

    >>> print(dump_recipe(Recipe()).splitlines()[0])
    data: digits  # data set: a name or file.py:function
    """
    lines = []
    for key, value in recipe.model_dump(mode="json").items():
        # Whatever is in it, on one line, which ends with the comment.
        entry = yaml.safe_dump({key: value}, allow_unicode=str(value).isprintable(), width=math.inf).strip()
        lines.append(f"{entry}  # {Recipe.model_fields[key].description}")
    return "\n".join(lines) + "\n"


def read_file(path: Path) -> dict[str, Any]:
    """Return the entries of a recipe's YAML file, unchecked."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe file {path}")
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise UserError(f"{path} is larger than {LARGEST:,} bytes: this is no recipe")
    try:
        entries = read_yaml(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error.reason}): save it as UTF-8") from None
    if not isinstance(entries, dict):
        raise UserError(f"{path} is no recipe: write entries such as 'epochs: 8', one in each line")
    return entries


def read_yaml(text: str, where: str) -> Any:
    """Return what a YAML `text` of plain values holds; `where` it comes from is named in errors.

    >>> read_yaml("64", "--set dim"), read_yaml("", "--set dim")
    (64, None)
    """
    maps = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):  # as far as the first that a recipe has not
            maps += isinstance(event, yaml.MappingStartEvent)
            if maps > 1 or isinstance(event, yaml.SequenceStartEvent | yaml.AliasEvent):
                raise UserError(f"{where}: write single values, no lists, maps or aliases")
        return yaml.safe_load(text)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        told = " ".join(str(error).split())
        raise UserError(printable(f"{where}: this is not YAML of plain values: {told[:200]}")) from None


@cache
def _packaged() -> dict[str, str]:
    folder = resources.files("robustmetric.training") / "recipes"
    files = {entry.name: entry for entry in folder.iterdir() if entry.name.endswith(".yaml")}
    return {name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for name, file in files.items()}


@cache
def _parsed(name: str) -> dict[str, Any]:
    return dict(read_yaml(lookup("recipe", name, _packaged()), name))


# The Python files that a recipe names

_SEVERAL = re.compile(r"(\s*)([^\[\],&()\s][^\[\],&()]*?\.py)(?=:\w)")
_NAMED = {"model": OWN, "data": OWN, "defense": _SEVERAL}
"""The entries that may name files: a network and a data set one, a defense one for each part."""


def rename_files(entries: Mapping[str, Any], change: Callable[[Path], Path]) -> dict[str, Any]:
    """Return the entries of a recipe with each Python file that they name changed.

    >>> rename_files({"defense": "HM[b.py:Mine,LGA]&c.py:Term"}, lambda file: "code" / file)
    {'defense': 'HM[code/b.py:Mine,LGA]&code/c.py:Term'}
    """
    changed = dict(entries)
    for key, pattern in _NAMED.items():
        if isinstance(text := entries.get(key), str):
            changed[key] = pattern.sub(lambda found: f"{found[1]}{change(Path(found[2]).expanduser())}", text)
    return changed


def bare(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a recipe with files by their names alone, wherever they are.

    >>> bare({"model": "/home/me/nets.py:small"})
    {'model': 'nets.py:small'}
    """
    return rename_files(entries, lambda file: Path(file.name))


def named_files(entries: Mapping[str, Any]) -> list[Path]:
    """Return the Python files that a recipe names, each once."""
    found: dict[Path, None] = {}
    rename_files(entries, lambda file: found.setdefault(file) or file)
    return list(found)


def names_code(entries: Mapping[str, Any]) -> bool:
    """Return whether entries may name a Python file, however they are read."""
    return any(".py:" in str(entries.get(key)) for key in _NAMED)


def files_beside(entries: Mapping[str, Any], folder: Path, *, check: bool = True) -> dict[str, Any]:
    """Return the entries of a recipe with its files in the `folder` that the recipe was read from.

    A file that is not there stays as it is. A folder whose path cannot be written in a defense is refused.
    """

    def place(file: Path) -> Path:
        beside = (folder / file).absolute()
        return beside if beside.is_file() else file

    placed = rename_files(entries, place)
    if check and named_files(placed) != list(dict.fromkeys(map(place, named_files(entries)))):
        raise UserError(
            f"the path of {folder.absolute()} cannot stand in the defense {entries['defense']!r}, where "
            "brackets, commas and & have a meaning: move it to a folder without these",
            parameter="out",
        )
    return placed
