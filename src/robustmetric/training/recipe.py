"""Recipes: everything that a training depends on, as data that can be read, changed and kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from robustmetric.errors import UserError, brief, fraction
from robustmetric.registry import lookup, unknown
from robustmetric.training.code import admit_files, files_beside
from robustmetric.training.entries import read_entries, read_file

Level = Annotated[float, BeforeValidator(fraction)]


class Recipe(BaseModel):
    """What to train on, which network, which defense, and how.

    >>> Recipe(data="digits", defense="HM[S,LGA]&ICS", eps="8/255").eps == 8 / 255
    True
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    data: str = Field("digits", description="data set: a name or file.py:function")
    root: Path | None = Field(None, description="where its files are")
    model: str = Field("c2f2", description="network: a name, timm:NAME or file.py:function")
    weights: Path | None = Field(None, description="weights to begin with")
    dim: int | None = Field(
        None, ge=1, le=65_536, description="length of the embeddings, null for the network's own, 512 by name"
    )
    freeze_bn: bool = Field(False, description="keep BatchNorm's statistics as they are (ResNets)")
    defense: str = Field("HM[S,LGA]&ICS", description="defense in the paper's notation")
    reference: bool = Field(False, description="train as the published figures were: see docs/method.md")
    eps: Level = Field(8 / 255, ge=0, le=1, description="ε, the largest change of a pixel")
    alpha: Level = Field(1 / 255, gt=0, le=1, description="α, the size of a step")
    steps: int = Field(8, ge=1, le=1_000_000, description="η, the number of steps")
    margin: float = Field(0.2, gt=0, le=2, description="γ of the triplet loss")
    epochs: int = Field(8, ge=1, le=1_000_000, description="how often each image is an anchor")
    batch: int = Field(
        112, ge=8, le=65_536, multiple_of=2, description="images in a batch of a worker, two a pair"
    )
    lr: float = Field(1e-3, gt=0, le=1e6, description="learning rate of Adam")
    schedule: Literal["constant", "cosine"] = Field(
        "constant", description="the learning rate after the warm-up: constant, or cosine down to 0"
    )
    warmup: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="steps in which the learning rate rises to lr, a quarter of all at most",
    )
    clip: float | None = Field(None, gt=0, le=1e30, description="largest norm of the gradient, null for any")
    weight_decay: float = Field(0.0, ge=0, le=1e6, description="weight decay of Adam")
    resize: int | None = Field(
        None, ge=4, le=4096, description="size that images are brought to, before cropping"
    )
    fit: Literal["squeeze", "crop", "pad"] = Field(
        "squeeze", description="how images become squares: squeeze, crop (the middle) or pad (with white)"
    )
    crop: int | None = Field(
        None, ge=4, le=4096, description="size of a random crop in training, central in tests"
    )
    flip: bool = Field(False, description="mirror half of the training images")
    zoom: float | None = Field(
        None, gt=0, le=1, description="smallest share of an image that training enlarges, null for off"
    )
    jitter: float = Field(
        0.0, ge=0, le=1, description="largest change of brightness, contrast and saturation in training"
    )
    validation: float = Field(
        0.1, ge=0, le=0.5, description="share of the training images that choose the weights, 0 for none"
    )
    validate_by: Literal["plain", "robust"] = Field(
        "plain", description="R@1 that chooses the weights: of images as they are, or robust, under attack"
    )
    validate_every: int = Field(1, ge=1, le=1_000_000, description="epochs between two validations")
    save_every: int = Field(100, ge=1, le=1_000_000_000, description="steps between two checkpoints")
    save_minutes: float = Field(10.0, gt=0, le=1e6, description="minutes between two checkpoints, at most")
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true"] = Field(
        "32-true", description="floats"
    )
    seed: int = Field(0, ge=0, lt=2**32, description="starts every random draw")


def recipe_names() -> list[str]:
    """List the recipes that come with the package.

    >>> "28x28" in recipe_names()
    True
    """
    folder = resources.files("robustmetric.training") / "recipes"
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def usual_recipe(data: str) -> str:
    """Name the recipe that a data set is trained with unless another one is given.

    >>> usual_recipe("mnist"), usual_recipe("cub"), usual_recipe("sop"), usual_recipe("folder")
    ('28x28', '224x224-code', '224x224-code-sop', 'images')
    """
    return _USUAL.get(data, "images")


_USUAL = {
    "digits": "digits",
    "mnist": "28x28",
    "fashion-mnist": "28x28",
    "cub": "224x224-code",
    "cars": "224x224-code",
    "sop": "224x224-code-sop",
}


def load_recipe(
    name: str | Path | None = None, changes: Mapping[str, Any] | None = None, *, trust: bool = False
) -> Recipe:
    """Read a recipe by its `name` or from a YAML file, with some of its entries changed.

    Python files that a YAML file names are looked for beside it; those in `changes` from the working
    directory. Code that the YAML file names, and that is not known to be the user's, is refused; `trust`
    takes it, and trusts it from now on as long as it stays the same.

    >>> load_recipe("28x28", {"steps": 8, "data": "mnist"}).steps
    8
    """
    entries: dict[str, Any] = {}
    changes = changes or {}
    if name is not None:
        entries = _read(name)
        if _is_file(name):
            entries = files_beside(entries, Path(name).parent)
            kept = {key: value for key, value in entries.items() if key not in changes}
            admit_files(kept, Path(name), changes, trust=trust)
    try:
        return make_recipe({**entries, **changes})
    except UserError as error:
        if name is None or not _is_file(name) or error.parameter in changes:
            raise
        raise UserError(f"{name}: {error}", parameter=error.parameter) from None


def make_recipe(entries: Mapping[str, Any]) -> Recipe:
    """Check the entries of a recipe; say which is wrong, what it is and what it may be.

    >>> make_recipe({"epoch": 3})
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown recipe entry 'epoch' (did you mean 'epochs'?); known: alpha, ...
    """
    for key in entries:
        if key not in Recipe.model_fields:
            told = unknown("recipe entry", str(key), Recipe.model_fields, _SYNONYMS)
            raise UserError(told, parameter=str(key))
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
    """Write a recipe that comes with the package as YAML: what it is for, then every entry with its meaning.

    >>> print(recipe_text("digits").splitlines()[0])
    # scikit-learn's digits, 8×8: a training of seconds to try things with.
    """
    head = [line for line in _packaged(name).splitlines() if line.startswith("#")]
    return "\n".join([*head, dump_recipe(load_recipe(name))])


def dump_recipe(recipe: Recipe) -> str:
    """Return a `recipe` as YAML, with what each entry means.

    >>> print(dump_recipe(Recipe()).splitlines()[0])
    data: digits  # data set: a name or file.py:function
    """
    values = recipe.model_dump(mode="json")
    lines = []
    for key, field in Recipe.model_fields.items():
        # On one line, whatever is in it, for the comment behind it.
        readable = str(values[key]).isprintable()
        entry = yaml.safe_dump({key: values[key]}, allow_unicode=readable, width=math.inf).strip()
        lines.append(f"{entry}  # {field.description}")
    return "\n".join(lines) + "\n"


def _read(name: str | Path) -> dict[str, Any]:
    if _is_file(name):
        return read_file(Path(name))
    return dict(_packaged_entries(str(name)))


@cache
def _packaged_entries(name: str) -> dict[str, Any]:
    return read_entries(_packaged(name), name)


def _is_file(name: str | Path) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def _packaged(name: str) -> str:
    folder = resources.files("robustmetric.training") / "recipes"
    known = {key: folder / f"{key}.yaml" for key in recipe_names()}
    return lookup("recipe", name, known).read_text(encoding="utf-8")
