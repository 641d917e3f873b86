"""What a run trained, for use elsewhere: the network, its preprocessing, and the vectors of images."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robustmetric.data.inputs import Inputs, Picture, readable
from robustmetric.errors import UserError, whole
from robustmetric.evaluation.identity import digest_of
from robustmetric.perturb import check_images, device_of, frozen
from robustmetric.sphere import embed
from robustmetric.training.folder import RunFolder, Which
from robustmetric.training.recipe import Recipe

BATCH = 64
"""Images that go through the network at once, unless told otherwise."""


@dataclass(frozen=True, eq=False)
class Run:
    """What a run trained, as `load_run` returns it.

    - `network`: in evaluation mode, on the CPU.
    - `inputs`: what the network takes; ``inputs.tensor(image)`` makes it from a file or a Pillow image.
    - `recipe`: that of the run.
    - `chosen`: how the weights were chosen; None if they were given.
    """

    network: nn.Module
    inputs: Inputs
    recipe: Recipe
    chosen: str | None

    @property
    def name(self) -> str:
        """The network and how it was trained, with the user's files by their names alone."""
        return self.recipe.name

    @property
    def digest(self) -> str:
        """The SHA-256 of the network, as a record has it: the same for the same weights."""
        return digest_of(self.network)

    def embed(self, images: Picture | Iterable[Picture] | Tensor, *, batch: int = BATCH) -> Tensor:
        """Return the vectors (N, D) of N `images`, of length 1, on the CPU.

        `images` are one or many files or Pillow images, which are brought to what the network takes as in
        training; or a tensor (N, C, H, W) in [0, 1], which it gets as it is. They go through the network
        `batch` at a time, on its device; another batch changes nothing but rounding. The network is held in
        evaluation mode, and comes back as it was.

        >>> from PIL import Image
        >>> run = Run(nn.Flatten(), Inputs(resize=8, channels=1), Recipe(data="digits"), None)
        >>> run.embed([Image.new("L", (20, 10), "white"), Image.new("L", (9, 9), "grey")]).shape
        torch.Size([2, 64])
        >>> run.embed(torch.rand(1, 3, 8, 8))
        Traceback (most recent call last):
        ...
        robustmetric.UserError: images have 3 channels, and the network takes 1: ...
        """
        whole("batch", batch, 1)
        given: Any = images
        if isinstance(given, np.ndarray):
            check_images(given)  # type: ignore[arg-type]  # it says how to make a tensor of an array
        if isinstance(given, Tensor):
            check_images(given)
            self._check_channels(given)
            parts: Iterator[Tensor] = iter(given.split(batch))
        else:
            one = isinstance(given, (str, os.PathLike)) or not isinstance(given, Iterable)
            parts = self._tensors([given] if one else given, batch)
        found = [self._embedded(part) for part in parts]
        if not found:
            raise UserError("there are no images to embed: give at least one")
        return torch.cat(found)

    def _tensors(self, images: Iterable[Picture], batch: int) -> Iterator[Tensor]:
        """Decode files and Pillow images, ahead of the network."""
        with closing(self.inputs.decoded(images, ahead=batch)) as decoded:
            while some := [readable(*one) for one in islice(decoded, batch)]:
                yield self.inputs.tensors(some)

    def _embedded(self, images: Tensor) -> Tensor:
        with frozen(self.network), torch.no_grad():
            z = embed(self.network, images.to(device_of(self.network), torch.float32))
        return z.to("cpu", torch.float32)

    def _check_channels(self, images: Tensor) -> None:
        found, taken = images.shape[1], self.inputs.channels
        if taken is not None and found != taken:
            raise UserError(
                f"images have {found} channels, and the network takes {taken}: give (N, {taken}, H, W), or "
                "files or Pillow images, which are brought to it"
            )


def load_run(folder: Path | str, weights: Path | Which | None = None, *, trust: bool = False) -> Run:
    """Load the network of a run with its preprocessing, on the CPU; the images of the run are not needed.

    `folder` is that of a run. `weights` are "last", "best" or a file; by default those that
    `RunFolder.weights` returns. Code that the run brings along is refused unless you `trust` it.

    >>> import tempfile, robustmetric as rm
    >>> from robustmetric.training import load_recipe, train
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recipe = load_recipe("digits", {"epochs": 1, "steps": 1, "batch": 512})
    ...     _ = train(recipe, Path(folder, "run"), progress=False)
    ...     run = rm.load_run(Path(folder, "run"))
    >>> run.embed(Image.new("RGB", (8, 8))).shape
    torch.Size([1, 512])
    """
    run = RunFolder(folder, trust=trust)
    channels, size = run.shape()
    network = run.source(weights).make(channels, size).eval()
    inputs = replace(run.inputs(any_size=True), channels=3 if channels == 3 else 1)
    return Run(network, inputs, run.recipe(), run.choose(weights).chosen)
