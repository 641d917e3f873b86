"""What a network takes: the size and the channels of images, in training, evaluation and a product."""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from robustmetric.data.cache import Pixels, cached, first_readable
from robustmetric.data.decode import LONGEST, Channels, Fit, Size, decoded_or_reason, prepared, whole_images
from robustmetric.data.describe import typical_size
from robustmetric.data.load import load
from robustmetric.data.pairs import ImageArray
from robustmetric.data.stored import cores
from robustmetric.errors import UserError, shorten
from robustmetric.models.source import NetworkSource

Picture = str | os.PathLike[str] | Image.Image
"""An image as a file or as Pillow has it."""

Watch = Callable[[str, int, int], None]
"""Is told, while images are decoded, the split, how many are done and how many there are."""

_USUAL: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(("digits", "mnist", "fashion-mnist"), (None, None)),
    **dict.fromkeys(("cub", "cars", "sop"), (256, 224)),
}
_SQUEEZED = (*_USUAL, "inshop", "market1501")  # the published data sets


@dataclass(frozen=True)
class Inputs:
    """The images that a network takes.

    - `resize`: images are brought to `resize` × `resize` pixels; None leaves them as they are.
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
                gib = f": such an image takes {3 * value**2 / 2**30:,.1f} GiB" if value > 1 else ""
                raise UserError(
                    f"{name} is {value}; it must be from 1 to {LONGEST}, or None{gib}", parameter="size"
                )
        if self.channels not in (None, 1, 3):
            raise UserError(f"channels is {self.channels}; it must be 1, 3 or None")
        if self.fit not in get_args(Fit):
            raise UserError(f"fit is {self.fit!r}; it must be squeeze, crop or pad", parameter="fit")

    def entries(self) -> dict[str, Any]:
        """Return the fields as JSON's types, without a fit that squeezes, as before there were others.

        >>> Inputs(resize=8).entries()
        {'resize': 8, 'crop': None, 'channels': None}
        """
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

        They are kept in `cache`, by default ``~/.cache/robustmetric``. Images that cannot be read raise an
        error that lists them; with `skip_broken` they are left out. `watch` is told, while images are
        decoded, the split, how many are done and how many there are; `report` gets a sentence if what was
        kept is damaged.

        >>> Inputs().pixels(load("digits")).pixels.shape
        (1000, 8, 8, 1)
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
            workers=os.cpu_count() or 1,
            skip_broken=skip_broken,
            progress=None if watch is None else partial(watch, images.split),
            report=report,
        )

    def first(self, images: ImageSet) -> Pixels:
        """Return the first of the `images` that can be read, (1, H, W, C); nothing is kept on disk.

        >>> Inputs(resize=16).first(load("digits")).pixels.shape
        (1, 16, 16, 1)
        """
        return first_readable(images, size=self._size, channels=self._channels_of(images), fit=self.fit)

    def images(self, pixels: Pixels) -> ImageArray:
        """Return decoded `pixels` as the network gets them: (N, C, H, W) in [0, 1], cropped.

        >>> inputs = Inputs(crop=6)
        >>> inputs.images(inputs.first(load("digits")))[:1].shape
        torch.Size([1, 1, 6, 6])
        """
        return ImageArray(pixels.pixels, self.crop)

    def shape(self, pixels: Pixels) -> tuple[int, int]:
        """Return the channels and the height of decoded `pixels` as the network gets them.

        >>> inputs = Inputs(resize=16, crop=12)
        >>> inputs.shape(inputs.first(load("digits")))
        (1, 12)
        """
        return pixels.pixels.shape[3], self.crop or pixels.pixels.shape[1]

    def tensor(self, image: Picture) -> Tensor:
        """Return an image (1, C, H, W) in [0, 1] as the network gets it in training and evaluation.

        `image` is a file or a Pillow image: it is turned upright, laid on white, resized, cropped in the
        middle and brought to the channels, 3 if they are None.

        >>> Inputs(resize=8, channels=1).tensor(Image.new("RGB", (20, 10), "white")).max()
        tensor(1.)
        """
        with whole_images():
            return self.tensors([readable(image, self._decoded(image))])

    def decoded(
        self, images: Iterable[Picture], *, ahead: int
    ) -> Generator[tuple[Picture, NDArray[np.uint8] | str], None, None]:
        """Yield each of the `images` with its pixels (H, W, C), or with the reason why it cannot be read.

        They are files or Pillow images. Threads decode up to `ahead` of them before they are asked for.

        >>> [(_, pixels)] = Inputs(resize=8, channels=1).decoded([Image.new("RGB", (20, 10))], ahead=4)
        >>> pixels.shape
        (8, 8, 1)
        """
        waiting: deque[tuple[Picture, Future[NDArray[np.uint8] | str]]] = deque()
        pool = ThreadPoolExecutor(cores())
        with whole_images():
            try:
                for image in images:
                    waiting.append((image, pool.submit(self._decoded, image)))
                    if len(waiting) > ahead:
                        first, pixels = waiting.popleft()
                        yield first, pixels.result()
                for first, pixels in waiting:
                    yield first, pixels.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def tensors(self, pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Return images (N, C, H, W) in [0, 1], cropped, of N decoded `pixels` (H, W, C).

        >>> Inputs(resize=8, crop=6).tensors([np.zeros((8, 8, 3), np.uint8)] * 2).shape
        torch.Size([2, 3, 6, 6])
        """
        if len({each.shape for each in pixels}) == 1:
            return ImageArray(np.stack(pixels), self.crop)[:]
        found = [ImageArray(each[None], self.crop)[:] for each in pixels]
        sizes = {f"{image.shape[2]} x {image.shape[3]}" for image in found}
        if len(sizes) > 1:
            raise UserError(
                f"images have different sizes ({shorten(sorted(sizes))}, height x width), and nothing brings "
                "them to one: set resize or crop of the inputs"
            )
        return torch.cat(found)

    def _decoded(self, image: Picture) -> NDArray[np.uint8] | str:
        channels: Channels = self.channels or 3
        if isinstance(image, Image.Image):
            return prepared(image, None, self._size, channels, self.fit)
        if isinstance(image, (str, os.PathLike)):
            return decoded_or_reason(Path(image), None, self._size, channels, self.fit)
        raise UserError(f"image is a {type(image).__name__}; give a file or a Pillow image")

    @property
    def _size(self) -> Size | None:
        return None if self.resize is None else (self.resize, self.resize)

    def _channels_of(self, images: ImageSet) -> Channels:
        if self.channels is not None:
            return self.channels
        return 1 if images.pixels is not None and images.pixels.shape[3] == 1 else 3


def readable(image: Picture, found: NDArray[np.uint8] | str) -> NDArray[np.uint8]:
    """Return the pixels (H, W, C) that were `found` of an `image`; the reason why there are none is raised.

    >>> readable("a.png", "is empty (0 bytes)")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: a.png cannot be read: is empty (0 bytes); give an image file
    """
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

    `data` and `root` are those of `robustmetric.data.load`, `inputs` has the size and the channels.
    Images that cannot be read are listed for all splits together before anything is raised; with
    `skip_broken` they are left out. `watch` is told, while images are decoded, the split, how many are done
    and how many there are; `report` gets a sentence if what was kept is damaged.

    >>> train, test = load_pixels("digits", None, Inputs(), ["train", "test"])
    >>> train.pixels.shape, len(test)
    ((1000, 8, 8, 1), 797)
    """
    found: list[Pixels] = []
    broken: list[UserError] = []
    # All are listed before any is decoded.
    for images in [load(data, root, split) for split in splits]:
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
    >>> usual_inputs("digits", None, "c2f2", {"crop": 4})
    Inputs(resize=None, crop=4, channels=None, fit='squeeze')
    """
    given = given or {}
    resize, crop = usual_sizes(data, root, given)
    return Inputs(resize, crop, NetworkSource(network).channels, given.get("fit", usual_fit(data)))


def usual_fit(data: str) -> Fit:
    """Return how images of a data set are fitted: published ones as in their papers, others whole.

    >>> usual_fit("cub"), usual_fit("folder")
    ('squeeze', 'pad')
    """
    return "squeeze" if data in _SQUEEZED else "pad"


def usual_sizes(
    data: str, root: Path | str | None, given: Mapping[str, Any]
) -> tuple[int | None, int | None]:
    """Return the resize and the crop that a data set has unless `given` says otherwise.

    >>> usual_sizes("mnist", None, {"crop": 24})
    (None, 24)
    """
    resize, crop = _USUAL.get(data, (None, None))
    if data not in _USUAL and not {"resize", "crop"} <= given.keys():
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
    """Return the file of each decoded image, relative to the root; None where images are not from files.

    >>> relative_files(Inputs().first(load("digits")), None) is None
    True
    """
    if images.files is None or root is None:
        return None
    base = Path(root).expanduser()
    base = base if base.is_dir() else base.parent
    return [str(file.relative_to(base) if file.is_relative_to(base) else file) for file in images.files]
