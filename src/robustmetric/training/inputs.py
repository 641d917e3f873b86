"""What a recipe, a run or a command line names: networks with their weights, and images."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from robustmetric import data, models
from robustmetric.data.base import Split
from robustmetric.data.cache import Pixels, cached
from robustmetric.training.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class Subject:
    """A network to evaluate, with its weights, and the images that its recipe names.

    >>> Subject(load_recipe("digits", {"dim": 16})).network(like=pixels(Recipe())[1]).training
    True
    """

    recipe: Recipe
    weights: Path | None = None
    trained: Recipe | None = None

    @classmethod
    def of_run(cls, run: Path, changes: dict[str, Any], weights: Path | None = None) -> Subject:
        """Take what a run trained: its recipe, changed, and its best weights, unless others are given."""
        kept = run / "recipe.yaml"
        if not kept.is_file():
            raise FileNotFoundError(
                f"{run} is no run, it has no recipe.yaml: give the folder of a run, or --model and --weights"
            )
        if weights is None:
            own = [run / "best.safetensors", run / "last.safetensors"]
            weights = next((w for w in own if w.is_file()), None)
            if weights is None:
                raise FileNotFoundError(
                    f"there are no weights {own[0]}: the run has not been validated yet; "
                    f"go on with robustmetric train --out {run} --resume"
                )
        if not weights.is_file():
            raise FileNotFoundError(f"there is no weights file {weights}")
        return cls(load_recipe(kept, changes), weights, load_recipe(kept))

    @property
    def name(self) -> str:
        """The network and how it was trained."""
        return f"{self.recipe.model} {self.recipe.defense}"

    def train_classes(self) -> tuple[str, ...] | None:
        """Name the classes that the run was trained on, if that is known and its images are there."""
        if self.trained is None:
            return None
        try:
            return data.load(self.trained.data, self.trained.root, "train").classes
        except (ValueError, OSError):
            return None

    def network(self, like: Pixels) -> nn.Module:
        """Make the network for images like these, and load its weights completely."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            model = make_model(self.recipe, like)
        if self.weights is not None and (kept := models.load_weights(model, self.weights)):
            raise ValueError(
                f"{self.weights} has another last layer than the network ({', '.join(kept)}): these are not "
                "the weights of this embedding; give those, or the dim that they were trained with"
            )
        return model


def make_model(recipe: Recipe, images: Pixels) -> nn.Module:
    """Make the recipe's network for these images: by name, or by a function of a file of the user's.

    `file.py:function` is called without arguments and returns a module that maps (N, C, H, W) images in
    [0, 1] to (N, D).
    """
    name = recipe.model
    if ".py:" in name:
        if recipe.freeze_bn:
            raise ValueError(f"freeze_bn is an option of the built-in ResNets; {name} must freeze its own")
        return _from_file(name)
    options: dict[str, Any] = {"dim": recipe.dim}
    height, _, channels = images.pixels.shape[1:]
    if name == "c2f2":
        options |= {"channels": channels, "size": recipe.crop or height}
    if recipe.freeze_bn:
        options["freeze_bn"] = True
    return models.model(name, **options)


def _from_file(name: str) -> nn.Module:
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} to take the network {function!r} from")
    spec = importlib.util.spec_from_file_location(f"robustmetric_model_{path.stem}", path)
    assert spec is not None  # noqa: S101
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    # As an import would do it: the file may import its neighbours, and its classes know their module.
    sys.path.append(str(path.parent.resolve()))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    factory = getattr(module, function, None)
    if not callable(factory):
        raise ValueError(f"{path} has no function {function!r}; write --model FILE.py:FUNCTION")
    model = factory()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def pixels(
    recipe: Recipe,
    cache: Path | None = None,
    *,
    splits: Sequence[Split] = get_args(Split),
    skip_broken: bool = False,
    watch: Callable[[str, int, int], None] | None = None,
) -> list[Pixels]:
    """Load the recipe's training and test set, or some `splits`, as pixels, decoded once and kept in `cache`.

    Images that cannot be read are listed for all splits before anything is raised. `watch` is told, while
    images are decoded, the split, how many are done and how many there are.

    >>> train_set, test_set = pixels(Recipe(data="digits"))
    >>> train_set.pixels.shape
    (1000, 8, 8, 1)
    """
    root = recipe.root and recipe.root.expanduser().resolve()
    key = hashlib.sha256(str(root).encode()).hexdigest()[:12]
    folder = (cache or Path.home() / ".cache" / "robustmetric") / f"{recipe.data}-{key}"
    size = None if recipe.resize is None else (recipe.resize, recipe.resize)
    found, broken = [], []
    for split in splits:
        images = data.load(recipe.data, recipe.root, split)
        grey = images.pixels is not None and images.pixels.shape[3] == 1 and recipe.model == "c2f2"
        try:
            found.append(
                cached(
                    images,
                    folder,
                    size=size,
                    channels=1 if grey else 3,
                    workers=os.cpu_count() or 1,
                    skip_broken=skip_broken,
                    progress=None if watch is None else partial(watch, split),
                )
            )
        except ValueError as error:
            broken.append(str(error))
    if broken:
        raise ValueError("\n".join(broken))
    return found
