"""Images decoded and resized once, into one file that every later run reads.

A cache is two files: `<data set>-<split>-<size>-<key>.npy`, which `numpy.load` opens, and a `.json` of the
same name that says what is in it, with digests of itself and of the pixels, block by block. They are checked
whenever a cache is opened; the images of a damaged block are decoded anew. The key is a digest of what the
cache was made from: data set, split, size, fit, channels, and each file's path, length and modification
time, with its box. A file replaced by another of the same length and time is the one change that it cannot
see.

How a build survives: each image is written at its final place in a `.partial` file, and marked in a journal
with a digest of its file and its pixels once they are on disk. Whatever ends a build (Ctrl-C, a kill, a full
disk, broken images), the next one decodes only the images without a valid mark. Images that have the same
mark in a finished cache are copied from there, so that a changed file redoes itself alone. A cache gets its
name when it is complete, and is never changed after that: other processes may have it open.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from robustmetric.data.base import Columns, ImageSet
from robustmetric.data.cache_build import Progress, broken_message, built, locked
from robustmetric.data.cache_plan import Finished, Plan
from robustmetric.data.decode import LONGEST, Channels, Fit, Size, decoded_or_reason, resized, whole_images
from robustmetric.data.stored import Pictures, block_digests, content_digest
from robustmetric.errors import UserError


@dataclass(frozen=True, eq=False)
class Pixels:
    """N decoded images: `pixels` (N, H, W, C) uint8, in memory or in a file; `labels` (N,) into `classes`.

    `skipped` are the files that were left out because they could not be read. The others tell, as in an
    ImageSet, what is known of the images that are kept.

    >>> import torch
    >>> grey = np.zeros((2, 8, 8, 1), dtype=np.uint8)
    >>> len(Pixels(grey, torch.tensor([0, 0]), ("zero",)))
    2
    """

    pixels: Pictures
    labels: Tensor
    classes: tuple[str, ...]
    skipped: tuple[Path, ...] = ()
    files: tuple[Path, ...] | None = None
    cameras: Tensor | None = None
    is_query: Tensor | None = None
    is_gallery: Tensor | None = None
    columns: Columns = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pixels)

    @cached_property
    def digest(self) -> str:
        """A sha256 of the pixels and their shape, in hexadecimal: the same wherever they are stored."""
        return content_digest(self.pixels.shape, block_digests(self.pixels))


def cached(
    images: ImageSet,
    folder: Path,
    *,
    size: Size | None,
    channels: Channels = 3,
    fit: Fit = "squeeze",
    workers: int = 1,
    skip_broken: bool = False,
    progress: Progress | None = None,
    report: Callable[[str], object] = print,
) -> Pixels:
    """Return the N images as 8-bit pixels (N, H, W, C), decoded into `folder` unless they are there already.

    Each image is turned upright (EXIF), laid on white where it is transparent, brought to 8-bit RGB or grey
    (`channels` 3 or 1; CMYK without colour management, 16 bits by scaling), cut to its box if it has one, and
    brought to `size` = (height, width) by Pillow's antialiased bilinear filter: squeezed, or as `fit` says
    ("crop" takes the middle, "pad" keeps all and fills up with white). `size=None` keeps images as they are;
    they must then all have one size. Of an animation the first frame counts. An image set that
    holds pixels is fitted in memory and never written to `folder`.

    Decoding uses `workers` threads, at most one a core. `progress` is called with (done, total) while a cache
    is built, and not when one is reused; `report` gets a sentence if one is found damaged. Images that cannot
    be decoded raise one ValueError that lists them, after all others have been decoded and kept; with
    `skip_broken` they are left out and given in `Pixels.skipped`. Caches of the same data set, split, size,
    fit and channels made from other files give the images that have not changed, and are removed once the new
    one is complete. A second process that asks for the same cache waits for the first one and takes its
    result; on Windows nothing is locked, so build from one process there.

    >>> import torch
    >>> grey = np.zeros((2, 8, 8, 1), dtype=np.uint8)
    >>> digits = ImageSet("tiny", "train", torch.tensor([0, 0]), ("zero",), pixels=grey)
    >>> cached(digits, Path("unused"), size=(16, 16)).pixels.shape
    (2, 16, 16, 3)
    """
    _check(images, size, channels, workers)
    if images.pixels is not None:
        _check_memory(images, size, channels)
        return _known(_fitted(images.pixels, size, channels, fit), images)
    plan = Plan.of(images, folder, size, channels, fit)
    with whole_images():
        result = _reused(plan, skip_broken)
        if result is None:
            with locked(plan):
                # Another process may have built it while this one waited.
                result = _reused(plan, skip_broken) or built(plan, workers, skip_broken, progress, report)
    if not result.skipped:
        return _known(result.pixels, images)
    kept = images.take([row for row in range(len(images)) if row not in result.skipped])
    # A file may be listed several times.
    skipped = dict.fromkeys(plan.sources[row].file for row in sorted(result.skipped))
    return _known(result.pixels, kept, tuple(skipped))


def first_readable(
    images: ImageSet, *, size: Size | None, channels: Channels = 3, fit: Fit = "squeeze"
) -> Pixels:
    """Decode the first image that can be read, as `cached` does, to try a network on; nothing is written.

    >>> import torch
    >>> grey = np.zeros((2, 8, 8, 1), dtype=np.uint8)
    >>> digits = ImageSet("tiny", "train", torch.tensor([0, 0]), ("zero",), pixels=grey)
    >>> first_readable(digits, size=(16, 16)).pixels.shape
    (1, 16, 16, 3)
    """
    if images.pixels is not None:
        return _known(_fitted(images.pixels[:1], size, channels, fit), images.take([0]))
    reason = "there is none"
    with whole_images():
        for row, file in enumerate(images.files or ()):
            image = decoded_or_reason(file, images.box(row), size, channels, fit)
            if not isinstance(image, str):
                return _known(image[None], images.take([row]))
            reason = f"{file}: {image}"
    raise UserError(
        f"no {images.split} image of {images.name} can be read; the last one tried: {reason}: repair some"
    )


def _known(pixels: Pictures, images: ImageSet, skipped: tuple[Path, ...] = ()) -> Pixels:
    """Return the pixels of these images with all that is known of them."""
    return Pixels(
        pixels,
        images.labels,
        images.classes,
        skipped,
        files=images.files,
        cameras=images.cameras,
        is_query=images.is_query,
        is_gallery=images.is_gallery,
        columns=images.columns,
    )


def _check(images: ImageSet, size: Size | None, channels: int, workers: int) -> None:
    if len(images) == 0:
        raise UserError(f"the {images.split} split of {images.name} has no images; check its root and split")
    if size is not None and (len(size) != 2 or min(size) < 1 or max(size) > LONGEST):
        raise UserError(
            f"size is {size!r}; expected (height, width), both from 1 to {LONGEST}, or None", parameter="size"
        )
    if channels not in (1, 3):
        raise UserError(f"channels is {channels!r}; expected 3 (RGB) or 1 (grey)")
    if workers < 1:
        raise UserError(f"workers is {workers!r}; expected at least 1")


def _check_memory(images: ImageSet, size: Size | None, channels: Channels) -> None:
    """Refuse to bring images that are in memory to a size that this machine has no memory for."""
    if size is None or "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return
    needed = len(images) * math.prod(size) * channels
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise UserError(
            f"the {len(images):,} images of {images.name} ({images.split}) are held in memory: at "
            f"{size[0]} x {size[1]} pixels they take {needed / 2**30:,.1f} GiB, and this machine has "
            f"{memory / 2**30:,.1f}; choose a smaller size",
            parameter="size",
        )


def _fitted(pixels: NDArray[np.uint8], size: Size | None, channels: Channels, fit: Fit) -> NDArray[np.uint8]:
    """Fit pixels (N, H, W, C) that are in memory."""
    if pixels.shape[3] == channels and size in (None, pixels.shape[1:3]):
        result: NDArray[np.uint8] = pixels.view()
    else:
        pictures = pixels[..., 0] if pixels.shape[3] == 1 else pixels
        result = np.stack([resized(Image.fromarray(picture), size, channels, fit) for picture in pictures])
    result.flags.writeable = False
    return result


def _reused(plan: Plan, skip_broken: bool) -> Finished | None:
    """Open the cache if it is there, whole, and all that was skipped in it is still broken."""
    result = plan.opened()
    if result is None or not result.skipped:
        return result
    # A changed permission repairs a file without changing its length or time.
    now = {row: decoded_or_reason(*plan.sources[row][:2], (1, 1), 1) for row in result.skipped}
    broken = {row: reason for row, reason in now.items() if isinstance(reason, str)}
    if len(broken) < len(now):
        return None
    if not skip_broken:
        raise UserError(broken_message(plan, broken), parameter="skip_broken")
    return result
