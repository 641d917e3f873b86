"""Names of before, for the commands that still use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from robustmetric import data
from robustmetric.data.base import Split
from robustmetric.data.cache import Pixels
from robustmetric.data.inputs import load_pixels, relative_files
from robustmetric.data.pairs import ImageArray
from robustmetric.models import NetworkSource
from robustmetric.models import source as networks
from robustmetric.training.code import bare
from robustmetric.training.parts import inputs_of, source_of, suited_recipe
from robustmetric.training.recipe import Recipe
from robustmetric.training.runs import RunFolder, Which

__all__ = [
    "Subject",
    "Which",
    "check_model",
    "first_image",
    "image_files",
    "pixels",
    "suited_recipe",
    "try_network",
]


@dataclass(frozen=True)
class Subject:
    """A network to evaluate, with its weights, and the images that its recipe names."""

    recipe: Recipe
    weights: Path | None = None
    trained: Recipe | None = None
    chosen: str | None = None

    @classmethod
    def of_run(
        cls, run: Path, changes: dict[str, Any], weights: Path | None = None, which: Which | None = None
    ) -> Subject:
        """Take what a run trained: its recipe, changed, and its weights, unless others are given."""
        folder = RunFolder(run)
        trained, chosen = folder.recipe(), None
        if weights is None:
            weights, chosen = folder.weights(which)
        if not weights.is_file():
            raise FileNotFoundError(f"there is no weights file {weights}")
        return cls(folder.recipe(changes), weights, trained, chosen)

    @property
    def name(self) -> str:
        """The network and how it was trained."""
        entries = bare(self.recipe.model_dump())
        return f"{entries['model']} {entries['defense']}"

    def train_classes(self) -> tuple[str, ...] | None:
        """Return the classes that the run was trained on, if that is known and its images are there."""
        if self.trained is None:
            return None
        try:
            return data.load(self.trained.data, self.trained.root, "train").classes
        except (ValueError, OSError):
            return None

    def network(self, like: Pixels) -> nn.Module:
        """Make the network for images like these, and load its weights completely."""
        source = replace(source_of(self.recipe), weights=self.weights)
        return source.make(*inputs_of(self.recipe).shape(like))


def check_model(name: str) -> None:
    """Refuse the name of a network that cannot be made."""
    NetworkSource(name).check()


def try_network(model: nn.Module, images: Pixels, crop: int | None = None, *, gradient: bool = True) -> None:
    """Try a network on the first image."""
    networks.try_network(model, ImageArray(images.pixels, crop)[:1], gradient=gradient)


def pixels(
    recipe: Recipe,
    cache: Path | None = None,
    *,
    splits: Sequence[Split] = ("train", "test"),
    skip_broken: bool = False,
    watch: Callable[[str, int, int], None] | None = None,
) -> list[Pixels]:
    """Load splits of the recipe's data set as pixels."""
    return load_pixels(
        recipe.data, recipe.root, inputs_of(recipe), splits, cache, skip_broken=skip_broken, watch=watch
    )


def first_image(recipe: Recipe, split: Split = "train") -> Pixels:
    """Decode the first image of a split that can be read."""
    return inputs_of(recipe).first(data.load(recipe.data, recipe.root, split))


def image_files(recipe: Recipe, images: Pixels) -> list[str] | None:
    """Name the file of each decoded image, relative to the root."""
    return relative_files(images, recipe.root)
