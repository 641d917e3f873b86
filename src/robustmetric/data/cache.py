"""Images decoded and resized once, into one memory-mapped file that every later run opens at once.

A cache is two files: `<data set>-<split>-<size>-<key>.npy`, which `numpy.load(…, mmap_mode="r")` opens,
and a `.json` of the same name that says what is in it. The key is a digest of what the cache was made from:
data set, split, size, channels, and each file's path, length and modification time. A file replaced by
another of the same length and time is the one change that it cannot see.

How a build survives: each image is written at its final place in a `.partial` file, and marked in a journal
with a digest of its file once its pixels are on disk. Whatever ends a build (Ctrl-C, a kill, a full disk,
broken images), the next one decodes only the images without a valid mark. A cache gets its name when it is
complete.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import PIL
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from robustmetric.data.base import ImageSet
from robustmetric.files import publish, write_atomically

if sys.platform != "win32":
    import fcntl

FORMAT = 1  # of the cache: raised when the same files would give other pixels
JOURNAL_SECONDS = 2.0  # the most work that a kill can cost
LISTED = 20  # broken files that a message names

_AHEAD = 256  # images decoded ahead of the writer: bounds the memory
_MARK = 16  # bytes of a mark in the journal
_UNMARKED = bytes(_MARK)
_ORIENTATION = 0x0112  # EXIF's number for the way up

Size = tuple[int, int]
Channels = Literal[1, 3]
Progress = Callable[[int, int], None]
_Broken = list[tuple[Path, str]]  # files that cannot be decoded, and why


@dataclass(frozen=True, eq=False)
class Pixels:
    """N decoded images: `pixels` (N, H, W, C) uint8, read-only; `labels` (N,) into `classes`.

    `skipped` are the files that were left out because they could not be read, with their labels.

    >>> grey = np.zeros((2, 8, 8, 1), dtype=np.uint8)
    >>> len(Pixels(grey, torch.tensor([0, 0]), ("zero",)))
    2
    """

    pixels: NDArray[np.uint8]
    labels: Tensor
    classes: tuple[str, ...]
    skipped: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.pixels)


def cached(
    images: ImageSet,
    folder: Path,
    *,
    size: Size | None,
    channels: Channels = 3,
    workers: int = 1,
    skip_broken: bool = False,
    progress: Progress | None = None,
) -> Pixels:
    """Return the N images as 8-bit pixels (N, H, W, C), decoded into `folder` unless they are there already.

    Each image is turned upright (EXIF), laid on white where it is transparent, brought to 8-bit RGB or grey
    (`channels` 3 or 1; CMYK without colour management, 16 bits by scaling) and squeezed to `size` = (height,
    width) by Pillow's antialiased bilinear filter. `size=None` keeps images as they are; they must then all
    have one size. Of an animation the first frame counts. An image set that holds pixels is fitted in memory
    and never written to `folder`.

    Decoding uses `workers` threads, at most one a core. `progress` is called with (done, total) while a cache
    is built, and not when one is reused. Images that cannot be decoded raise one ValueError that lists them,
    after all others have been decoded and kept; with `skip_broken` they are left out and given in
    `Pixels.skipped`. Caches of the same data set, split, size and channels made from other files are removed
    once the new one is complete. A second process that asks for the same cache waits for the first one and
    takes its result; on Windows nothing is locked, so build from one process there.

    >>> grey = np.zeros((2, 8, 8, 1), dtype=np.uint8)
    >>> digits = ImageSet("tiny", "train", torch.tensor([0, 0]), ("zero",), pixels=grey)
    >>> cached(digits, Path("unused"), size=(16, 16)).pixels.shape
    (2, 16, 16, 3)
    """
    _check(images, size, channels, workers)
    if images.pixels is not None:
        return Pixels(_fitted(images.pixels, size, channels), images.labels, images.classes)
    plan = _Plan.of(images, folder, size, channels)
    with _whole_images():
        result = _reused(plan, skip_broken)
        if result is None:
            with _locked(plan):
                # Another process may have built it while this one waited.
                result = _reused(plan, skip_broken) or _built(plan, workers, skip_broken, progress)
    pixels, skipped = result
    if not skipped:
        return Pixels(pixels, images.labels, images.classes)
    kept = [row for row, file in enumerate(plan.files) if file not in skipped]
    return Pixels(pixels, images.labels[torch.tensor(kept)], images.classes, tuple(skipped))


def _check(images: ImageSet, size: Size | None, channels: int, workers: int) -> None:
    if len(images) == 0:
        raise ValueError(f"the {images.split} split of {images.name} has no images; check its root and split")
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise ValueError(f"size is {size!r}; expected (height, width), both at least 1, or None")
    if channels not in (1, 3):
        raise ValueError(f"channels is {channels!r}; expected 3 (RGB) or 1 (grey)")
    if workers < 1:
        raise ValueError(f"workers is {workers!r}; expected at least 1")


# One image


def _decoded(file: Path, size: Size | None, channels: Channels) -> NDArray[np.uint8]:
    """Decode one file into (H, W, C)."""
    with Image.open(file) as image:
        image.load()
        return _fit(_eight_bits(_upright(image)), size, channels)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a damaged EXIF block says nothing about the pixels
        return 1


def _upright(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image) if 2 <= _orientation(image) <= 8 else image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Bring an image of any mode to one that Pillow converts rightly to RGB and to grey."""
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("has 32-bit pixels, whose range is not known; save it with 8 or 16 bits")
        # Pillow's own conversion has clipped at 255 or cut off the low byte, by version.
        return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("has floating-point pixels, whose range is not known; save it with 8 or 16 bits")
    if image.has_transparency_data:
        # White is what product photos are shown on; dropping alpha would bring up colours nobody sees.
        opaque = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", opaque.size, "white"), opaque).convert("RGB")
    return image


def _fit(image: Image.Image, size: Size | None, channels: Channels) -> NDArray[np.uint8]:
    """Convert and resize an 8-bit image into (H, W, C)."""
    mode = "RGB" if channels == 3 else "L"
    if image.mode != mode:
        image = image.convert(mode)
    if size is not None and (image.height, image.width) != size:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(image)
    return pixels.reshape(image.height, image.width, channels)


def _fitted(pixels: NDArray[np.uint8], size: Size | None, channels: Channels) -> NDArray[np.uint8]:
    """Fit pixels (N, H, W, C) that are in memory."""
    if pixels.shape[3] == channels and size in (None, pixels.shape[1:3]):
        result: NDArray[np.uint8] = pixels.view()
    else:
        pictures = pixels[..., 0] if pixels.shape[3] == 1 else pixels
        result = np.stack([_fit(Image.fromarray(picture), size, channels) for picture in pictures])
    result.flags.writeable = False
    return result


def _decoded_or_reason(file: Path, *, size: Size, channels: Channels) -> NDArray[np.uint8] | str:
    """Decode one file, or say in a few words why that fails."""
    try:
        return _decoded(file, size, channels)
    except MemoryError:
        raise
    except Exception as error:  # damaged files make Pillow's readers raise nearly anything
        return _reason(file, error)


def _reason(file: Path, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        empty = file.stat().st_size == 0
        return "is empty (0 bytes)" if empty else "is not an image in a format that Pillow reads"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


@contextmanager
def _whole_images() -> Iterator[None]:
    """Refuse truncated images, even where another library has told Pillow to fill them with grey."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _one_size(files: Sequence[Path]) -> Size:
    """Return the size that all images have, from their headers alone."""
    sizes: dict[Size, Path] = {}
    for file in files:
        try:
            with Image.open(file) as image:
                sideways = 5 <= _orientation(image) <= 8
                sizes.setdefault(image.size if sideways else (image.height, image.width), file)
        except Exception:  # noqa: S112  decoding it will say why
            continue
        if len(sizes) > 1:
            (size, first), (other, second) = sizes.items()
            raise ValueError(
                f"{first} is {size[0]} x {size[1]} pixels (height x width) and {second} is "
                f"{other[0]} x {other[1]}; give the size that all are to have, such as size=(256, 256)"
            )
    return next(iter(sizes), (1, 1))  # no file opens: any size will do to list the reasons


# The cache's names


@dataclass(frozen=True)
class _Plan:
    """What a cache is made from, and where it goes."""

    folder: Path
    stem: str  # the same for all caches of one data set, split, size and channels
    key: str
    files: tuple[Path, ...]
    stats: tuple[tuple[int, int], ...]  # length and modification time of each file
    description: dict[str, object]
    size: Size | None
    channels: Channels

    @classmethod
    def of(cls, images: ImageSet, folder: Path, size: Size | None, channels: Channels) -> _Plan:
        files = images.files or ()
        stats = tuple(_stat(file) for file in files)
        description: dict[str, object] = {
            "format": FORMAT,
            "name": images.name,
            "split": images.split,
            "size": size and list(size),
            "channels": channels,
        }
        rows = [[str(file), *stat] for file, stat in zip(files, stats, strict=True)]
        shown = f"{size[0]}x{size[1]}" if size else "original"
        stem = re.sub(r"[^\w.-]", "_", f"{images.name}-{images.split}-{shown}x{channels}")
        key = _digest({**description, "files": rows}).hex()
        return cls(folder, stem, key, files, stats, description, size, channels)

    @property
    def pixels(self) -> Path:
        return self.folder / f"{self.stem}-{self.key}.npy"

    @property
    def about(self) -> Path:
        return self.pixels.with_suffix(".json")

    def working(self, kind: Literal["pixels", "marks", "json", "lock"]) -> Path:
        """Name a file that builds work on; without the key, so that a repaired file redoes itself alone."""
        return self.folder / (f"{self.stem}.lock" if kind == "lock" else f"{self.stem}.{kind}.partial")

    def marks(self, row: tuple[int, int, int]) -> list[bytes]:
        """Return, for each file, the mark of a row of this shape decoded from it as it is now."""
        return [
            _digest([FORMAT, row, str(file), stat]) for file, stat in zip(self.files, self.stats, strict=True)
        ]

    def stale(self) -> Iterator[Path]:
        """Find the finished files of other keys."""
        for path in self.folder.glob(f"{glob.escape(self.stem)}-{'[0-9a-f]' * 2 * _MARK}.*"):
            if path.suffix in (".npy", ".json") and path.stem != self.pixels.stem:
                yield path


def _stat(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:
        return -1, -1  # decoding it will say why
    return stat.st_size, stat.st_mtime_ns


def _digest(value: object) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=_MARK).digest()


# A finished cache

_Result = tuple[NDArray[np.uint8], dict[Path, str]]  # pixels, and the files left out with reasons


def _reused(plan: _Plan, skip_broken: bool) -> _Result | None:
    """Open the cache if it is there, whole, and all that was skipped in it is still broken."""
    result = _opened(plan)
    if result is None or not result[1]:
        return result
    # A changed permission repairs a file without changing its length or time.
    now = [(file, _decoded_or_reason(file, size=(1, 1), channels=1)) for file in result[1]]
    broken = [(file, reason) for file, reason in now if isinstance(reason, str)]
    if len(broken) < len(now):
        return None
    if not skip_broken:
        raise ValueError(_broken_message(plan, broken))
    return result


def _opened(plan: _Plan) -> _Result | None:
    try:
        about = json.loads(plan.about.read_text(encoding="utf-8"))
        skipped = {Path(entry["file"]): str(entry["reason"]) for entry in about["skipped"]}
        pixels: NDArray[np.uint8] = npy.open_memmap(plan.pixels, mode="r")
        whole = plan.pixels.stat().st_size == len(_header(pixels.shape)) + pixels.nbytes
        expected = [sum(file not in skipped for file in plan.files), *about["shape"][1:]]
        if whole and pixels.dtype == np.uint8 and list(pixels.shape) == about["shape"] == expected:
            return pixels, skipped
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: either way it is built anew
        pass
    return None


def _header(shape: tuple[int, ...]) -> bytes:
    """Return the start of a .npy file; its length does not depend on the number of rows."""
    start = io.BytesIO()
    npy.write_array_header_1_0(start, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return start.getvalue()


# A cache in the making


class _Partial:
    """The pixels of a cache in the making, each row at its place, and a mark for each row safely on disk."""

    def __init__(self, plan: _Plan, row: tuple[int, int, int]) -> None:
        pixels, marks = plan.working("pixels"), plan.working("marks")
        self._row = row
        self._start = len(_header((0, *row)))
        self._bytes = int(np.prod(row))
        self._expected = plan.marks(row)
        self._waiting: list[int] = []
        pixels.touch()
        marks.touch()
        length, found = pixels.stat().st_size, marks.read_bytes()
        valid = [
            mark if length >= self._place(index + 1) and found.startswith(mark, index * _MARK) else _UNMARKED
            for index, mark in enumerate(self._expected)
        ]
        self.missing = [index for index, mark in enumerate(valid) if mark == _UNMARKED]
        # Unbuffered and not memory-mapped: on a full disk, writing to a mapping kills the process.
        self._pixels = pixels.open("r+b", buffering=0)
        self._marks = marks.open("r+b", buffering=0)
        # A row about to be overwritten must not be found under its old mark.
        _write(self._marks, 0, b"".join(valid))
        os.fsync(self._marks.fileno())

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self._pixels.close()
        self._marks.close()

    def _place(self, index: int) -> int:
        return self._start + index * self._bytes

    def write(self, index: int, pixels: NDArray[np.uint8]) -> None:
        _write(self._pixels, self._place(index), pixels.tobytes())
        self._waiting.append(index)

    def mark(self) -> None:
        """Bring the pixels written so far to the disk, then their marks."""
        # Forgotten first: after a failed fsync the pixels may be lost, and the next one would not say so.
        written, self._waiting = self._waiting, []
        os.fsync(self._pixels.fileno())
        for index in written:
            _write(self._marks, index * _MARK, self._expected[index])
        os.fsync(self._marks.fileno())

    def close_gaps(self, kept: Sequence[int]) -> None:
        """Move the kept rows together, in order."""
        first = next((place for place, index in enumerate(kept) if place != index), len(kept))
        # From here on rows are not where their marks say: a build that dies now decodes them again.
        self._marks.truncate(first * _MARK)
        os.fsync(self._marks.fileno())
        for place in range(first, len(kept)):
            self._pixels.seek(self._place(kept[place]))
            _write(self._pixels, self._place(place), _read(self._pixels, self._bytes))

    def finish(self, rows: int) -> None:
        """Make it a whole .npy file of so many rows."""
        _write(self._pixels, 0, _header((rows, *self._row)))
        self._pixels.truncate(self._place(rows))
        os.fsync(self._pixels.fileno())


def _write(file: io.FileIO, place: int, data: bytes) -> None:
    """Write all of `data`: an unbuffered file may take less at a time."""
    file.seek(place)
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _read(file: io.FileIO, length: int) -> bytes:
    data = b""
    while len(data) < length:
        data += file.read(length - len(data))
    return data


def _built(plan: _Plan, workers: int, skip_broken: bool, progress: Progress | None) -> _Result:
    """Build the cache from where the last build stopped, and open it."""
    row = (*(plan.size or _one_size(plan.files)), plan.channels)
    needed = len(plan.files) * int(np.prod(row)) + len(_header((0, *row))) + len(plan.files) * _MARK
    with _full_disk_explained(plan, needed):
        _check_space(plan, needed)
        with _Partial(plan, row) as cache:
            broken = _decode_missing(plan, cache, row[:2], workers, progress)
            left_out = {file for file, _ in broken}
            kept = [index for index, file in enumerate(plan.files) if file not in left_out]
            if broken and not (skip_broken and kept):
                raise ValueError(f"{_broken_message(plan, broken)} The others are decoded and kept.")
            if broken:
                cache.close_gaps(kept)
            cache.finish(len(kept))
        # The description goes first: a cache without its pixels is no cache, and its rows are still marked.
        _describe(plan, (len(kept), *row), broken)
        publish(plan.working("pixels"), plan.pixels)
    _remove([plan.working("marks"), *plan.stale()])
    result = _opened(plan)
    if result is None:
        raise OSError(
            f"{plan.pixels} was written but cannot be read back; check the disk, or choose another folder"
        )
    return result


def _decode_missing(
    plan: _Plan, cache: _Partial, size: Size, workers: int, progress: Progress | None
) -> _Broken:
    """Decode what is not marked yet; return what cannot be decoded."""
    decode = partial(_decoded_or_reason, size=size, channels=plan.channels)
    broken: _Broken = []
    total, missing = len(plan.files), cache.missing
    marked = time.monotonic()
    if progress:
        progress(total - len(missing), total)
    # Threads do: Pillow lets go of Python's lock in nine tenths of the work, and they start at once.
    with ThreadPoolExecutor(min(workers, _cores())) as pool:
        try:
            for start in range(0, len(missing), _AHEAD):
                part = missing[start : start + _AHEAD]
                results = pool.map(decode, [plan.files[index] for index in part])
                for done, (index, result) in enumerate(zip(part, results, strict=True), start + 1):
                    if isinstance(result, str):
                        broken.append((plan.files[index], result))
                    else:
                        cache.write(index, result)
                    if time.monotonic() - marked >= JOURNAL_SECONDS:
                        cache.mark()
                        marked = time.monotonic()
                    if progress:
                        progress(total - len(missing) + done, total)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            cache.mark()
    return broken


def _cores() -> int:
    # Fewer than the machine has, where a scheduler or container gives this process a part of them.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _broken_message(plan: _Plan, broken: _Broken) -> str:
    lines = [f"  {file}: {reason}" for file, reason in broken[:LISTED]]
    if len(broken) > LISTED:
        lines.append(f"  and {len(broken) - LISTED} more")
    return "\n".join(
        [
            f"{len(broken)} of the {len(plan.files)} images of {plan.description['name']} "
            f"({plan.description['split']}) cannot be read:",
            *lines,
            "Repair or replace them and run again, or leave them out with skip_broken=True (--skip-broken).",
        ]
    )


def _describe(plan: _Plan, shape: tuple[int, ...], broken: _Broken) -> None:
    left_out = {file for file, _ in broken}
    about = {
        **plan.description,
        "key": plan.key,
        "dtype": "uint8",
        "shape": shape,
        "files": [str(file) for file in plan.files if file not in left_out],
        "skipped": [{"file": str(file), "reason": reason} for file, reason in broken],
        "pillow": PIL.__version__,
    }
    text = json.dumps(about, indent=1)
    write_atomically(plan.about, lambda file: file.write(text.encode()))


# The folder


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except PermissionError:  # Windows keeps a file that is open elsewhere; the next build tries again
            continue


@contextmanager
def _locked(plan: _Plan) -> Iterator[None]:
    """Keep other processes from building caches of the same data set, split and size."""
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        lock = plan.working("lock").open("w")
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write a cache to {plan.folder} ({error.strerror}); choose a folder that can be written",
        ) from error
    with lock:  # never removed: a waiting process may have opened it already
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_space(plan: _Plan, needed: int) -> None:
    """Refuse to start what cannot be finished."""
    present = plan.working("pixels")
    # A partial file has holes: what counts is the space that it takes.
    taken = getattr(present.stat(), "st_blocks", 0) * 512 if present.exists() else 0
    if needed - taken > shutil.disk_usage(plan.folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _full_disk_explained(plan: _Plan, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(plan.folder).free
        raise OSError(
            error.errno,
            f"no space ({error.strerror}) for the pixels of {plan.description['name']} "
            f"({plan.description['split']}): they need {needed:,} bytes in {plan.folder}, where {free:,} are "
            "free. Make room, or choose another folder or a smaller size. The cache that was there before is "
            "untouched, and the images decoded so far are kept",
        ) from error
