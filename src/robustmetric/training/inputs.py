"""What a recipe, a run or a command line names: networks with their weights, and images."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from robustmetric import data, models
from robustmetric.data.base import ImageSet, Split
from robustmetric.data.cache import Pixels, cached, first_readable
from robustmetric.data.decode import Channels
from robustmetric.data.describe import typical_size
from robustmetric.data.pairs import ImageArray
from robustmetric.distance import embed
from robustmetric.perturb import differentiate, frozen
from robustmetric.training.folder import chosen_on
from robustmetric.training.recipe import Recipe, load_recipe, sizes_for, usual_recipe
from robustmetric.validate import UserError

Which = Literal["last", "best"]
"""The weights of a run: of its end, or of the validation with the highest R@1."""


@dataclass(frozen=True)
class Subject:
    """A network to evaluate, with its weights, and the images that its recipe names.

    `chosen` says how a run's weights were chosen: "last weights", "chosen on validation images" or "chosen on
    test images"; None where that is not known.

    >>> Subject(load_recipe("digits", {"dim": 16})).network(like=pixels(Recipe())[1]).training
    True
    """

    recipe: Recipe
    weights: Path | None = None
    trained: Recipe | None = None
    chosen: str | None = None

    @classmethod
    def of_run(
        cls, run: Path, changes: dict[str, Any], weights: Path | None = None, which: Which | None = None
    ) -> Subject:
        """Take what a run trained: its recipe, changed, and its weights, unless others are given.

        Its own are the best ones where validation images chose them, else the last; `which` asks for either.
        """
        kept = run / "recipe.yaml"
        if not kept.is_file():
            raise FileNotFoundError(
                f"{run} is no run, it has no recipe.yaml: give the folder of a run, or --model and --weights"
            )
        trained = load_recipe(kept)
        chosen = None
        if weights is None:
            by = chosen_on(run, trained)
            usual = ("best", "last") if by == "validation images" else ("last", "best")
            own = {name: run / f"{name}.safetensors" for name in ([which] if which else usual)}
            name = next((name for name, file in own.items() if file.is_file()), None)
            if name is None:
                raise FileNotFoundError(
                    f"there are no weights {next(iter(own.values()))}: the run has not been validated yet; "
                    f"go on with robustmetric train --out {run} --resume"
                )
            weights, chosen = own[name], "last weights" if name == "last" else f"chosen on {by}"
        if not weights.is_file():
            raise FileNotFoundError(f"there is no weights file {weights}")
        return cls(load_recipe(kept, changes), weights, trained, chosen)

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
        model = self._new(like)
        if self.weights is None:
            return model
        try:
            kept = models.load_weights(model, self.weights)
        except ValueError:
            self._check_channels(like)
            raise
        if kept:
            raise UserError(
                f"{self.weights} has another last layer than the network ({', '.join(kept)}): these are not "
                "the weights of this embedding; give those, or the dim that they were trained with"
            )
        return model

    def _new(self, like: Pixels) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            return make_model(self.recipe, like)

    def _check_channels(self, like: Pixels) -> None:
        """Say so if the weights would fit images with another number of channels."""
        count = like.pixels.shape[3]
        other = 1 if count == 3 else 3
        try:
            images = replace(like, pixels=np.empty((1, *like.pixels.shape[1:3], other), np.uint8))
            models.load_weights(self._new(images), self.weights or "")
        except (ValueError, OSError):
            return
        raise UserError(
            f"{self.weights} is of a {self.recipe.model} for images with {_channels(other)}, and these have "
            f"{count}: c2f2 gets one channel where its images are grey, any other network gets three; give "
            f"weights that were trained on images with {_channels(count)}"
        )


def _channels(count: int) -> str:
    return f"{count} channel{'s' if count > 1 else ''}"


def check_model(name: str) -> None:
    """Refuse the name of a network that cannot be made, as far as that is known without making it.

    >>> check_model("nets.py")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: 'nets.py' names a file and no function in it; write --model FILE.py:FUNCTION, ...
    """
    if name.endswith(".py"):
        raise UserError(
            f"{name!r} names a file and no function in it; write --model FILE.py:FUNCTION, such as "
            f"{name}:network"
        )
    if ".py:" in name:
        file, _, function = name.rpartition(":")
        if not Path(file).is_file():
            raise FileNotFoundError(f"there is no file {file} to take the network {function!r} from")
    elif not name.startswith("timm:") and name not in models.MODELS:
        models.model(name)  # says which there are


def make_model(recipe: Recipe, images: Pixels) -> nn.Module:
    """Make the recipe's network for these images: by name, or by a function of a file of the user's.

    `file.py:function` is called without arguments and returns a module that maps (N, C, H, W) images in
    [0, 1] to (N, D).
    """
    name = recipe.model
    check_model(name)
    if ".py:" in name:
        if recipe.freeze_bn:
            raise UserError(f"freeze_bn is an option of the built-in ResNets; {name} must freeze its own")
        return _from_file(name)
    options: dict[str, Any] = {"dim": recipe.dim}
    height, _, channels = images.pixels.shape[1:]
    if name == "c2f2":
        options |= {"channels": channels, "size": recipe.crop or height}
    if recipe.freeze_bn:
        options["freeze_bn"] = True
    try:
        return models.model(name, **options)
    except ImportError as error:  # of timm
        raise UserError(str(error)) from error


def try_network(model: nn.Module, images: Pixels, crop: int | None = None, *, gradient: bool = True) -> None:
    """Embed the first image and differentiate by it, as a defense will; what fails is said in a sentence.

    Without `gradient` it is embedded alone. The network comes back as it was.

    >>> grey = Pixels(np.zeros((1, 8, 8, 1), np.uint8), torch.tensor([0]), ("zero",))
    >>> try_network(nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), grey)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the network failed on an image of shape (1, 1, 8, 8) (RuntimeError: ...); give ...
    """
    image = ImageArray(images.pixels, crop)[:1]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with frozen(model), torch.no_grad():
            embed(model, image.to(device))
            if gradient:
                differentiate(lambda x, _: embed(model, x).sum(1), image.to(device), torch.arange(1))
    except (ValueError, OSError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the network failed on an image of shape {tuple(image.shape)} "
            f"({type(error).__name__}: {reason}); give images of the size that it takes, with --size N or "
            "--set resize=N --set crop=N, or a network for these"
        ) from error


def _from_file(name: str) -> nn.Module:
    file, _, function = name.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"robustmetric_model_{path.stem}", path)
    assert spec is not None  # noqa: S101
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    # As an import would do it: the file may import its neighbours, and its classes know their module.
    sys.path.append(str(path.parent.resolve()))
    sys.modules[spec.name] = module
    _call(file, path, partial(spec.loader.exec_module, module))
    factory = getattr(module, function, None)
    if not callable(factory):
        raise UserError(f"{path} has no function {function!r}; write --model FILE.py:FUNCTION")
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UserError(
            f"{name} cannot be called without arguments ({error}): give them defaults, or name a function "
            "that needs none"
        ) from None
    model = _call(name, path, factory)
    if not isinstance(model, nn.Module):
        raise UserError(f"{name} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _call(name: str, file: Path, code: Callable[[], object]) -> object:
    """Run code of the user's; whatever it raises is said with its place in the file."""
    try:
        return code()
    except Exception as error:
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file.absolute()
        ]
        place = f" in line {lines[-1]} of {file}" if lines else ""
        raise UserError(
            f"{name} raised {type(error).__name__}{place}: {error}; mend the file, or name another function"
        ) from error


def pixels(
    recipe: Recipe,
    cache: Path | None = None,
    *,
    splits: Sequence[Split] = ("train", "test"),
    skip_broken: bool = False,
    watch: Callable[[str, int, int], None] | None = None,
) -> list[Pixels]:
    """Load the recipe's training and test set, or some `splits`, as pixels, decoded once and kept in `cache`.

    Images that cannot be read are listed for all splits before anything
    is raised. `watch` is told, while images are decoded, the split, how many are done and how many there are.

    >>> train_set, test_set = pixels(Recipe(data="digits"))
    >>> train_set.pixels.shape
    (1000, 8, 8, 1)
    """
    root = recipe.root and recipe.root.expanduser().resolve()
    key = hashlib.sha256(str(root).encode()).hexdigest()[:12]
    folder = (cache or Path.home() / ".cache" / "robustmetric") / f"{recipe.data}-{key}"
    found, broken = [], []
    # All are listed before any is decoded.
    for split, images in [(split, data.load(recipe.data, recipe.root, split)) for split in splits]:
        try:
            found.append(
                cached(
                    images,
                    folder,
                    size=_size(recipe),
                    channels=_channels_for(recipe, images),
                    workers=os.cpu_count() or 1,
                    skip_broken=skip_broken,
                    progress=None if watch is None else partial(watch, split),
                )
            )
        except ValueError as error:
            broken.append(str(error))
    if broken:
        raise UserError("\n".join(broken))
    return found


def first_image(recipe: Recipe, split: Split = "train") -> Pixels:
    """Decode the first image of a split that can be read, to try a network on; nothing is kept on disk.

    >>> first_image(Recipe(data="digits")).pixels.shape
    (1, 8, 8, 1)
    """
    images = data.load(recipe.data, recipe.root, split)
    return first_readable(images, size=_size(recipe), channels=_channels_for(recipe, images))


def suited_recipe(changes: Mapping[str, Any]) -> Recipe:
    """Take the usual recipe of a data set, changed, and suit it to the images and to the network.

    The recipe of images of one's own looks at their sizes, as far as `resize` and `crop` are not given.
    BatchNorm is frozen where the recipe says so and the network is one of the ResNets, which can do that.

    >>> suited_recipe({"data": "digits", "steps": 2}).steps
    2
    """
    name = usual_recipe(str(changes.get("data", "digits")))
    recipe = load_recipe(name, changes)
    suited: dict[str, Any] = {}
    if recipe.freeze_bn and not recipe.model.startswith("resnet"):
        suited["freeze_bn"] = False
    if name == "images" and not {"resize", "crop"} <= changes.keys():
        # Of all images: an evaluation may have no others than test images.
        typical = changes.get("resize") or typical_size(data.load(recipe.data, recipe.root, "all"))
        suited["resize"], suited["crop"] = sizes_for(typical)
    return load_recipe(name, {**suited, **changes})


def _size(recipe: Recipe) -> tuple[int, int] | None:
    return None if recipe.resize is None else (recipe.resize, recipe.resize)


def _channels_for(recipe: Recipe, images: ImageSet) -> Channels:
    """One channel for c2f2 where the images are grey, three for all else."""
    grey = images.pixels is not None and images.pixels.shape[3] == 1 and recipe.model == "c2f2"
    return 1 if grey else 3


def image_files(recipe: Recipe, images: Pixels) -> list[str] | None:
    """Name the file of each decoded image, relative to the root; None where images are not from files.

    >>> image_files(Recipe(data="digits"), pixels(Recipe())[1]) is None
    True
    """
    if images.files is None or recipe.root is None:
        return None
    root = recipe.root.expanduser()
    root = root if root.is_dir() else root.parent
    return [str(file.relative_to(root) if file.is_relative_to(root) else file) for file in images.files]
