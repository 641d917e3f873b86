"""What a network takes: the size and the channels of images, in training, evaluation and a product."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from robustmetric.data.base import ImageSet, Split
from robustmetric.data.cache import Pixels, cached, first_readable, in_threads
from robustmetric.data.decode import LONGEST, Channels, Fit, Size, decoded_or_reason, prepared, whole_images
from robustmetric.data.describe import typical_size
from robustmetric.data.load import load
from robustmetric.data.pairs import ImageArray
from robustmetric.errors import UserError, describe, shorten
from robustmetric.models.source import NetworkSource

Picture = str | os.PathLike[str] | Image.Image
"""An image as a file or as Pillow has it."""

Watch = Callable[[str, int, int], None]
"""Called, while images are decoded, with the split, how many are done and how many there are."""

_AS_THEY_ARE = ("digits", "mnist", "fashion-mnist")
_PHOTOS = ("cub", "cars", "sop")  # 256 × 256 and crops of 224 × 224, as in their papers
_SQUEEZED = (*_AS_THEY_ARE, *_PHOTOS, "inshop", "market1501")  # the published data sets


@dataclass(frozen=True)
class Inputs:
    """The images that a network takes.

    - `resize`: resize images to `resize` × `resize` pixels; None leaves them as they are.
    - `crop`: the middle `crop` × `crop` pixels are taken of that; None takes all.
    - `channels`: 3 (RGB) or 1 (grey); None is 1 for grey images that are in memory, and 3 for all others.
    - `fit`: how other images become a square: "squeeze" changes their aspect, "crop" takes the middle
      square, "pad" keeps all and fills up evenly with white.

    >>> Inputs(resize=10, crop=8, channels=3).tensor(Image.new("L", (40, 30))).shape
    torch.Size([1, 3, 8, 8])
    """

    resize: int | None = None
    crop: int | None = None
    channels: Channels | None = None
    fit: Fit = "squeeze"

    def __post_init__(self) -> None:
        for name in ("resize", "crop"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= LONGEST:
                raise UserError(f"{name} must be from 1 to {LONGEST}, or None, not {value}", parameter="size")
        if self.channels not in (None, 1, 3):
            raise UserError(f"channels is {self.channels}; it must be 1, 3 or None")
        if self.fit not in get_args(Fit):
            raise UserError(f"fit is {self.fit!r}; it must be squeeze, crop or pad", parameter="fit")

    def entries(self) -> dict[str, Any]:
        """Return the fields as JSON's types; a fit that squeezes is left out."""
        found = asdict(self)
        return {name: found[name] for name in found if name != "fit" or self.fit != "squeeze"}

    def pixels(
        self,
        images: ImageSet,
        cache: Path | None = None,
        *,
        skip_broken: bool = False,
        watch: Watch | None = None,
        report: Callable[[str], object] = print,
    ) -> Pixels:
        """Return the `images` as pixels (N, H, W, C), resized and not cropped, decoded once.

        They are kept in `cache`, by default ``~/.cache/robustmetric``. The options are those of `cached`.
        """
        root = images.root and images.root.resolve()
        key = hashlib.sha256(os.fsencode(str(root))).hexdigest()[:12]
        name = re.sub(r"[^\w.-]", "_", images.name)
        return cached(
            images,
            (cache or Path.home() / ".cache" / "robustmetric") / f"{name}-{key}",
            size=self._size,
            channels=self._channels_of(images),
            fit=self.fit,
            skip_broken=skip_broken,
            progress=None if watch is None else partial(watch, images.split),
            report=report,
        )

    def first(self, images: ImageSet) -> Pixels:
        """Return the first of the `images` that can be read, (1, H, W, C); nothing is kept on disk."""
        return first_readable(images, size=self._size, channels=self._channels_of(images), fit=self.fit)

    def images(self, pixels: Pixels) -> ImageArray:
        """Return decoded `pixels` as the network gets them: (N, C, H, W) in [0, 1], cropped."""
        return ImageArray(pixels.pixels, self.crop)

    def shape(self, pixels: Pixels) -> tuple[int, int]:
        """Return the channels and the height of decoded `pixels` as the network gets them."""
        return pixels.pixels.shape[3], self.crop or pixels.pixels.shape[1]

    def tensor(self, image: Picture) -> Tensor:
        """Return an image, a file or a Pillow image, as (1, C, H, W) in [0, 1], as the network gets it."""
        with whole_images():
            return self.tensors([readable(image, self._decoded(image))])

    def decoded(
        self, images: Iterable[Picture], *, ahead: int
    ) -> Generator[tuple[Picture, NDArray[np.uint8] | str], None, None]:
        """Yield each of the `images` with its pixels (H, W, C), or with the reason why it cannot be read.

        They are files or Pillow images. Threads decode up to `ahead` of them before they are asked for.
        """
        with whole_images(), closing(in_threads(self._decoded, images, ahead)) as found:
            yield from found

    def tensors(self, pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Return images (N, C, H, W) in [0, 1], cropped, of N decoded `pixels` (H, W, C)."""
        if len({each.shape for each in pixels}) == 1:
            return ImageArray(np.stack(pixels), self.crop)[:]
        found = [ImageArray(each[None], self.crop)[:] for each in pixels]
        sizes = {f"{image.shape[2]} x {image.shape[3]}" for image in found}
        if len(sizes) > 1:
            raise UserError(
                f"images have different sizes ({shorten(sorted(sizes))}, height x width): set resize or crop "
                "of the inputs"
            )
        return torch.cat(found)

    def _decoded(self, image: Picture) -> NDArray[np.uint8] | str:
        channels: Channels = self.channels or 3
        if isinstance(image, Image.Image):
            return prepared(image, None, self._size, channels, self.fit)
        if isinstance(image, (str, os.PathLike)):
            return decoded_or_reason(Path(image), None, self._size, channels, self.fit)
        raise UserError(f"image must be a file or a Pillow image, not {describe(image)}")

    @property
    def _size(self) -> Size | None:
        return None if self.resize is None else (self.resize, self.resize)

    def _channels_of(self, images: ImageSet) -> Channels:
        if self.channels is not None:
            return self.channels
        return 1 if images.pixels is not None and images.pixels.shape[3] == 1 else 3


def readable(image: Picture, found: NDArray[np.uint8] | str) -> NDArray[np.uint8]:
    """Return the pixels (H, W, C) of an `image`; the reason why there are none is raised."""
    if isinstance(found, str):
        raise UserError(f"{image} cannot be read: {found}; give an image file")
    return found


def load_pixels(
    data: str,
    root: Path | str | None,
    inputs: Inputs,
    splits: Sequence[Split],
    cache: Path | None = None,
    *,
    skip_broken: bool = False,
    watch: Watch | None = None,
    report: Callable[[str], object] = print,
) -> list[Pixels]:
    """Load the `splits` of a data set as pixels, in their order, decoded once and kept in `cache`.

    `data` and `root` are those of `robustmetric.data.load`. Images that cannot be read are listed for all
    splits together before anything is raised; with `skip_broken` they are left out. `watch` is called while
    images are decoded; `report` gets a sentence if a cache is damaged, or if files are no images that are
    read.

    >>> train, test = load_pixels("digits", None, Inputs(), ["train", "test"])
    >>> train.pixels.shape, len(test)
    ((1000, 8, 8, 1), 797)
    """
    found: list[Pixels] = []
    broken: list[UserError] = []
    # All are listed before any is decoded.
    for images in [load(data, root, split) for split in splits]:
        if images.unread:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(images.unread.items()))
            report(f"not read in the {images.split} split of {data}: {kinds}; convert images to .png")
        try:
            found.append(inputs.pixels(images, cache, skip_broken=skip_broken, watch=watch, report=report))
        except UserError as error:
            broken.append(error)
    if broken:
        raise UserError("\n".join(map(str, broken)), parameter=broken[0].parameter)
    return found


def usual_inputs(
    data: str, root: Path | str | None, network: str, given: Mapping[str, Any] | None = None
) -> Inputs:
    """Return what a network gets of a data set unless told otherwise.

    `data` and `root` are those of `robustmetric.data.load`; `network` is a name or a file's function.
    What is `given` of resize, crop and fit stays; the sizes follow from it, or from those of the images.

    >>> usual_inputs("cub", None, "resnet18")
    Inputs(resize=256, crop=224, channels=3, fit='squeeze')
    """
    given = given or {}
    resize, crop = usual_sizes(data, root, given)
    return Inputs(resize, crop, NetworkSource(network).channels, given.get("fit", usual_fit(data)))


def usual_fit(data: str) -> Fit:
    """Return how images of a data set are fitted: published ones as in their papers, others whole."""
    return "squeeze" if data in _SQUEEZED else "pad"


def usual_sizes(
    data: str, root: Path | str | None, given: Mapping[str, Any]
) -> tuple[int | None, int | None]:
    """Return the resize and the crop that a data set has unless `given` says otherwise."""
    resize, crop = (256, 224) if data in _PHOTOS else (None, None)
    if data not in (*_PHOTOS, *_AS_THEY_ARE) and not {"resize", "crop"} <= given.keys():
        # Of all images: an evaluation may have no others than test images.
        resize, crop = sizes_for(given.get("resize") or typical_size(load(data, root, "all")))
    return given.get("resize", resize), given.get("crop", crop)


def sizes_for(typical: int) -> tuple[int, int]:
    """Return the resize and crop that suit images of a typical size: none is blown up.

    >>> sizes_for(500), sizes_for(64)
    ((256, 224), (64, 56))
    """
    if typical >= 256:
        return 256, 224
    resize = max(16, typical)
    return resize, round(resize * 7 / 8)


def relative_files(images: Pixels, root: Path | str | None) -> list[str] | None:
    """Return the file of each decoded image, relative to the root; None where images are not from files."""
    if images.files is None or root is None:
        return None
    base = Path(root).expanduser()
    base = base if base.is_dir() else base.parent
    return [str(file.relative_to(base) if file.is_relative_to(base) else file) for file in images.files]
