"""Images decoded and resized once, into one file that later runs map into memory.

A cache is an array in numpy's format and a JSON object after it: a digest of what the array was made from
(path, size, time of change and box of each file, the size of images, Pillow's version), the files that were
left out, and a digest of each block of images. A block is compared with its digest when it is first read. A
file replaced by another of the same size and time of change is the one change that goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

import numpy as np
import PIL
from filelock import FileLock
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray
from PIL import Image
from torch import Tensor

from robustmetric.data.base import Columns, ImageSet
from robustmetric.data.decode import Channels, Fit, Size, decoded_or_reason, one_size, resized, whole_images
from robustmetric.errors import UserError
from robustmetric.files import DamagedError, digest_of_entries, write_atomically, writing

FORMAT = 1  # raised when the same files would give other pixels
BLOCK = 16  # images that share a digest
LISTED = 20  # broken files that a message names

_AHEAD_BYTES = 1 << 28  # of images decoded before they are written

Item = TypeVar("Item")
Made = TypeVar("Made")


class Stored:
    """Pixels (N, H, W, C) with 8 bits in the cache `path`, mapped into memory, checked when first read.

    Indexed like an array; the result is an array in memory.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, path: Path, made_from: str | None = None) -> None:
        self.path = path
        with path.open("rb") as file:
            npy.read_magic(file)
            shape, _, dtype = npy.read_array_header_1_0(file)
            mapped = np.memmap(file, dtype, "r", start := file.tell(), shape)
            file.seek(start + mapped.nbytes)
            about = json.loads(file.read())
        if about["sha256"] != digest_of_entries(about) or (about["shape"], "|u1") != ([*shape], dtype.str):
            raise DamagedError(f"{path} is damaged: its description does not match its digest")
        self.made_from: str = about["made_from"]
        if made_from not in (None, self.made_from):
            raise DamagedError(
                f"another program made the cache {path} of other images: run the command again"
            )
        self.skipped = {int(row): str(reason) for row, reason in about["skipped"].items()}
        self.blocks = [bytes.fromhex(digest) for digest in about["blocks"]]
        count, height, width, channels = shape
        self.shape = (count, height, width, channels)
        self._pixels = mapped.view(np.ndarray)
        self._rows = np.arange(len(self))
        self._checked = np.zeros(len(self.blocks), bool)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.path, self.made_from)

    @property
    def nbytes(self) -> int:
        """All bytes of the pixels."""
        return int(self._pixels.nbytes)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        rows = self._rows[index[0] if isinstance(index, tuple) else index]
        for block in np.unique(rows // BLOCK).tolist():
            self._check(block)
        found: NDArray[np.uint8] = self._pixels[index]
        return found if found.flags.writeable else found.copy()

    def _check(self, block: int) -> None:
        if self._checked[block]:
            return
        begin, end = block * BLOCK, min(block * BLOCK + BLOCK, len(self))
        if hashlib.sha256(self._pixels[begin:end].data).digest() != self.blocks[block]:
            with suppress(OSError):
                self.path.unlink()  # the next start makes it again
            raise DamagedError(
                f"the cache {self.path} is damaged in its images {begin:,} to {end - 1:,}, and was removed: "
                "run the same command again, which decodes the images anew"
            )
        self._checked[block] = True


Pictures: TypeAlias = NDArray[np.uint8] | Stored
"""Pixels (N, H, W, C) with 8 bits, in memory or in a file."""


@dataclass(frozen=True, eq=False)
class Pixels:
    """N decoded images: `pixels` (N, H, W, C) uint8, in memory or in a file; `labels` (N,) into `classes`.

    `skipped` are the files that were left out because they cannot be read. The other fields are those of the
    `ImageSet`, for the images that are kept.
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
        if isinstance(self.pixels, Stored):
            blocks = self.pixels.blocks
        else:
            starts = range(0, len(self), BLOCK)
            parts = (np.ascontiguousarray(self.pixels[begin : begin + BLOCK]) for begin in starts)
            blocks = [hashlib.sha256(part.data).digest() for part in parts]
        return hashlib.sha256(b"".join([repr([*self.pixels.shape]).encode(), *blocks])).hexdigest()


def cached(
    images: ImageSet,
    folder: Path,
    *,
    size: Size | None,
    channels: Channels = 3,
    fit: Fit = "squeeze",
    skip_broken: bool = False,
    progress: Callable[[int, int], None] | None = None,
    report: Callable[[str], object] = print,
) -> Pixels:
    """Return the N images as 8-bit pixels (N, H, W, C), decoded into `folder` unless they are there already.

    Each image is turned upright (EXIF), laid on white where it is transparent, converted to 8-bit RGB or grey
    (`channels` 3 or 1), cut to its box if it has one, and resized to `size` = (height, width) by Pillow's
    antialiased bilinear filter, as `fit` says. With `size=None` all must have one size. An image set that
    holds pixels is resized in memory.

    `progress` is called with (done, total) while images are decoded; `report` gets a sentence if a cache is
    damaged. Images that cannot be decoded raise one error that lists them; with `skip_broken` they are left
    out and named in `Pixels.skipped`. A second process that asks for the same cache waits for the first one.
    """
    if len(images) == 0:
        raise UserError(f"the {images.split} split of {images.name} has no images; check its root and split")
    if images.pixels is not None:
        return _known(_fitted(images.pixels, size, channels, fit), images)
    source = _Source(images, folder, size, channels, fit)
    with whole_images():
        found = source.opened(skip_broken)
        if found is None:
            with writing(source.path, "or choose another folder for the cache"):
                folder.mkdir(parents=True, exist_ok=True)
                with FileLock(source.path.with_suffix(".lock")):
                    # Another process may have built it while this one waited.
                    found = source.opened(skip_broken, report)
                    if found is None:
                        found = source.built(skip_broken, progress)
    if not found.skipped:
        return _known(found, images)
    kept = images.take([row for row in range(len(images)) if row not in found.skipped])
    files = images.files or ()
    return _known(found, kept, tuple(dict.fromkeys(files[row] for row in sorted(found.skipped))))


def first_readable(
    images: ImageSet, *, size: Size | None, channels: Channels = 3, fit: Fit = "squeeze"
) -> Pixels:
    """Decode the first image that can be read, as `cached` does, to try a network on; nothing is written."""
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


class _Source:
    """What a cache is made from, and its file `path`."""

    def __init__(
        self, images: ImageSet, folder: Path, size: Size | None, channels: Channels, fit: Fit
    ) -> None:
        self.images, self.size, self.channels, self.fit = images, size, channels, fit
        self.files = [(file, images.box(row)) for row, file in enumerate(images.files or ())]
        made_of = [[str(file), *_stat(file), *(box or ())] for file, box in self.files]
        content = [FORMAT, PIL.__version__, images.name, images.split, size, channels, fit, made_of]
        self.made_from = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        shown = f"{size[0]}x{size[1]}{'' if fit == 'squeeze' else fit}" if size else "original"
        stem = re.sub(r"[^\w.-]", "_", f"{images.name}-{images.split}-{shown}x{channels}")
        self.path = folder / f"{stem}.npy"

    def opened(self, skip_broken: bool, report: Callable[[str], object] | None = None) -> Stored | None:
        """Open the cache if it is there, whole, of these files, and what it leaves out is still broken."""
        try:
            found = Stored(self.path)
        except FileNotFoundError:
            return None
        except Exception:  # a damaged header makes numpy raise nearly anything
            if report is not None:
                report(f"the cache {self.path} is damaged: its images are decoded again")
            return None
        if found.made_from != self.made_from:
            return None
        # A changed permission repairs a file without changing its size or time.
        broken = {row: self._decoded(row, (1, 1)) for row in found.skipped}
        if any(not isinstance(reason, str) for reason in broken.values()):
            return None
        if broken and not skip_broken:
            raise self._error(broken)
        return found

    def built(self, skip_broken: bool, progress: Callable[[int, int], None] | None) -> Stored:
        """Decode all images into the cache, and open it."""
        total = len(self.files)
        size = self.size or one_size(self.files)
        shape = (*size, self.channels)
        for draft in self.path.parent.glob(f".{self.path.name}.*.tmp"):  # left by a process that was killed
            draft.unlink(missing_ok=True)

        def fill(file: BinaryIO) -> None:
            _write_header(file, (total, *shape))
            broken: dict[int, str] = {}
            blocks = []
            for row, pixels in enumerate(self._readable(size, broken, progress)):
                if row % BLOCK == 0:
                    blocks.append(hashlib.sha256())
                blocks[-1].update(pixels)
                file.write(pixels)
            if broken and not (skip_broken and blocks):
                raise self._error(broken)
            about = {
                "made_from": self.made_from,
                "shape": [total - len(broken), *shape],
                "skipped": {str(row): reason for row, reason in broken.items()},
                "blocks": [block.hexdigest() for block in blocks],
            }
            file.write(json.dumps({**about, "sha256": digest_of_entries(about)}).encode())
            file.seek(0)
            _write_header(file, (total - len(broken), *shape))

        write_atomically(self.path, fill)
        return Stored(self.path)

    def _readable(
        self, size: Size, broken: dict[int, str], progress: Callable[[int, int], None] | None
    ) -> Iterator[bytes]:
        """Yield the pixels of the images that can be read, and put the others into `broken`."""
        told = progress or (lambda done, total: None)
        total = len(self.files)
        told(0, total)
        ahead = min(256, max(1, _AHEAD_BYTES // (math.prod(size) * self.channels)))
        for row, found in in_threads(partial(self._decoded, size=size), range(total), ahead):
            if isinstance(found, str):
                broken[row] = found
            else:
                yield found.tobytes()
            told(row + 1, total)

    def _decoded(self, row: int, size: Size) -> NDArray[np.uint8] | str:
        return decoded_or_reason(*self.files[row], size, self.channels, self.fit)

    def _error(self, broken: Mapping[int, object]) -> UserError:
        lines = [f"  {self.files[row][0]}: {reason}" for row, reason in broken.items()]
        more = [f"  and {len(broken) - LISTED} more"] if len(broken) > LISTED else []
        what = f"{len(broken)} of the {len(self.files)} images of {self.images.name} ({self.images.split})"
        advice = "Repair or replace them and run again, or leave them out with skip_broken."
        text = "\n".join([f"{what} cannot be read:", *lines[:LISTED], *more, advice])
        return UserError(text, parameter="skip_broken")


def in_threads(
    work: Callable[[Item], Made], items: Iterable[Item], ahead: int
) -> Generator[tuple[Item, Made], None, None]:
    """Yield each item with what `work` makes of it, in order; threads work on up to `ahead` items more."""
    waiting: deque[tuple[Item, Future[Made]]] = deque()
    pool = ThreadPoolExecutor(cores())
    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) > ahead:
                first, made = waiting.popleft()
                yield first, made.result()
        for first, made in waiting:
            yield first, made.result()
    finally:
        pool.shutdown(cancel_futures=True)


def cores() -> int:
    """Return how many processors this process may use."""
    # Fewer than the machine has, where a scheduler or container gives this process a part of them.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _known(pixels: Pictures, images: ImageSet, skipped: tuple[Path, ...] = ()) -> Pixels:
    """Return the pixels of these images with all that is known of them."""
    known = {
        name: getattr(images, name) for name in ("files", "cameras", "is_query", "is_gallery", "columns")
    }
    return Pixels(pixels, images.labels, images.classes, skipped, **known)


def _fitted(pixels: NDArray[np.uint8], size: Size | None, channels: Channels, fit: Fit) -> NDArray[np.uint8]:
    """Fit pixels (N, H, W, C) that are in memory."""
    if pixels.shape[3] == channels and size in (None, pixels.shape[1:3]):
        result: NDArray[np.uint8] = pixels.view()
    else:
        # All at once: too much is refused before any work.
        result = np.empty((len(pixels), *(size or pixels.shape[1:3]), channels), np.uint8)
        for row, picture in enumerate(pixels[..., 0] if pixels.shape[3] == 1 else pixels):
            result[row] = resized(Image.fromarray(picture), size, channels, fit)
    result.flags.writeable = False
    return result


def _stat(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:
        return -1, -1  # decoding it will say why
    return stat.st_size, stat.st_mtime_ns


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """Write the start of a .npy file; its length does not depend on the number of rows."""
    npy.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
