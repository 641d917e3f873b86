"""A cache in the making: rows written at their places and marked, finished in one step."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray

from robustmetric.data.cache_plan import MARK, Finished, LostError, Plan, Row, opened, start_of_file
from robustmetric.data.decode import decoded_or_reason, one_size
from robustmetric.data.stored import BLOCK, Stored, cores
from robustmetric.errors import UserError
from robustmetric.files import digest_of_entries, publish, write_atomically

if sys.platform != "win32":
    import fcntl

JOURNAL_SECONDS = 2.0  # the most work that a kill can cost
LISTED = 20  # broken files that a message names

_AHEAD, _AHEAD_BYTES = 256, 1 << 28  # images decoded ahead of the writer: bounds the memory
_UNMARKED = bytes(MARK)

Progress = Callable[[int, int], None]
Broken = dict[int, str]  # rows whose files cannot be decoded, and why


def built(
    plan: Plan, workers: int, skip_broken: bool, progress: Progress | None, report: Callable[[str], object]
) -> Finished:
    """Build the cache from where the last build stopped, and open it; `report` is told of damaged ones."""
    before = []
    for path in plan.finished():
        if path.suffix != ".npy":
            continue
        try:
            found = opened(path)
        except LostError as error:
            report(f"the cache {path} {error}: its images are decoded again")
            continue
        if found is not None:
            before.append(found)
            if found.fault is not None:
                report(f"the cache {path} {found.fault}")
    row = (*(plan.size or one_size((source.file, source.box) for source in plan.sources)), plan.channels)
    total = len(plan.sources)
    needed = total * math.prod(row) + len(start_of_file((0, *row))) + total * MARK
    with _full_disk_explained(plan, needed):
        _check_space(plan, needed)
        with _Partial(plan, row) as cache:
            broken = _fill(plan, cache, before, row, workers, progress)
            kept = [index for index in range(total) if index not in broken]
            if broken and not (skip_broken and kept):
                told = f"{broken_message(plan, broken)} The others are decoded and kept."
                raise UserError(told, parameter="skip_broken")
            if broken:
                cache.close_gaps(kept)
            blocks = cache.finish(kept)
        # The description goes first: a cache without its pixels is no cache, and its rows are still marked.
        _describe(plan, row, kept, broken, blocks)
        publish(plan.working("pixels"), plan.pixels)
    _remove([plan.working("marks"), *plan.stale()])
    result = plan.opened()
    if result is None:
        raise OSError(
            f"{plan.pixels} was written but cannot be read back; check the disk, or choose another folder"
        )
    return result


def _fill(
    plan: Plan,
    cache: _Partial,
    finished: Sequence[Finished],
    row: Row,
    workers: int,
    progress: Progress | None,
) -> Broken:
    """Copy or decode what is not marked yet; return what cannot be decoded."""
    copies = _copies(cache, finished)
    missing = [index for index in cache.missing if index not in copies]
    broken: Broken = {}
    total, before = len(plan.sources), len(plan.sources) - len(cache.missing)
    marked = time.monotonic()
    if progress:
        progress(before, total)
    # Threads do: Pillow lets go of Python's lock in nine tenths of the work, and they start at once.
    with ThreadPoolExecutor(min(workers, cores())) as pool:
        try:
            copied = ((index, pixels[place]) for index, (pixels, place) in copies.items())
            results = chain(copied, _decode(plan, missing, row, pool))
            for done, (index, result) in enumerate(results, before + 1):
                if isinstance(result, str):
                    broken[index] = result
                else:
                    cache.write(index, result)
                if time.monotonic() - marked >= JOURNAL_SECONDS:
                    cache.mark()
                    marked = time.monotonic()
                if progress:
                    progress(done, total)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            cache.mark()
    return broken


def _copies(cache: _Partial, finished: Sequence[Finished]) -> dict[int, tuple[Stored, int]]:
    """Find missing rows in finished caches: for each, the pixels of one and the row there."""
    place = {mark: (found.pixels, row) for found in finished for row, mark in enumerate(found.marks) if mark}
    return {index: place[cache.marks[index]] for index in cache.missing if cache.marks[index] in place}


def _decode(
    plan: Plan, missing: Sequence[int], row: Row, pool: ThreadPoolExecutor
) -> Iterator[tuple[int, NDArray[np.uint8] | str]]:
    """Return each row with its pixels, or with the reason why there are none."""

    def work(index: int) -> NDArray[np.uint8] | str:
        return decoded_or_reason(*plan.sources[index][:2], row[:2], plan.channels, plan.fit)

    ahead = max(1, min(_AHEAD, _AHEAD_BYTES // math.prod(row)))
    for start in range(0, len(missing), ahead):
        part = missing[start : start + ahead]
        yield from zip(part, pool.map(work, part), strict=True)


def broken_message(plan: Plan, broken: Broken) -> str:
    """List the files that cannot be decoded, with reasons, and say what to do."""
    rows = sorted(broken)
    lines = [f"  {plan.sources[row].file}: {broken[row]}" for row in rows[:LISTED]]
    if len(rows) > LISTED:
        lines.append(f"  and {len(rows) - LISTED} more")
    return "\n".join(
        [
            f"{len(rows)} of the {len(plan.sources)} images of {plan.description['name']} "
            f"({plan.description['split']}) cannot be read:",
            *lines,
            "Repair or replace them and run again, or leave them out with skip_broken.",
        ]
    )


def _describe(plan: Plan, row: Row, kept: Sequence[int], broken: Broken, blocks: Sequence[bytes]) -> None:
    marks = plan.marks(row)
    about = {
        **plan.description,
        "key": plan.key,
        "dtype": "uint8",
        "shape": [len(kept), *row],
        "files": [str(plan.sources[index].file) for index in kept],
        "marks": b"".join(marks[index] for index in kept).hex(),
        "skipped": [
            {"row": index, "file": str(plan.sources[index].file), "reason": reason}
            for index, reason in broken.items()
        ],
        "digests": {"rows": BLOCK, "sha256": [digest.hex() for digest in blocks]},
        "pillow": PIL.__version__,
    }
    text = json.dumps({**about, "sha256": digest_of_entries(about)}, indent=1)
    write_atomically(plan.about, lambda file: file.write(text.encode()))


class _Partial:
    """The pixels of a cache in the making, each row at its place, and a seal for each row safely on disk.

    A seal is a digest of the row's mark and its pixels.
    """

    def __init__(self, plan: Plan, row: Row) -> None:
        pixels, seals = plan.working("pixels"), plan.working("marks")
        self.path, self._row = pixels, row
        self._start = len(start_of_file((0, *row)))
        self._bytes = math.prod(row)
        self.marks = plan.marks(row)
        self._waiting: list[int] = []
        pixels.touch()
        seals.touch()
        # Unbuffered and not memory-mapped: on a full disk, writing to a mapping kills the process.
        self._pixels = pixels.open("r+b", buffering=0)
        self._journal = seals.open("r+b", buffering=0)
        found = seals.read_bytes()
        self._seals = [found[k * MARK : (k + 1) * MARK] for k in range(len(self.marks))]
        self.missing = [k for k, seal in enumerate(self._seals) if not (any(seal) and self._holds(k))]
        for index in self.missing:
            self._seals[index] = _UNMARKED
        # A row about to be overwritten must not be found under its old seal.
        _write(self._journal, 0, b"".join(self._seals))
        os.fsync(self._journal.fileno())

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self._pixels.close()
        self._journal.close()

    def _place(self, index: int) -> int:
        return self._start + index * self._bytes

    def _holds(self, index: int) -> bool:
        """Return whether a row has the mark and the pixels that its seal was made for."""
        return _seal(self.marks[index], self._read(index)) == self._seals[index]

    def _read(self, place: int) -> bytes:
        self._pixels.seek(self._place(place))
        data = b""
        while len(data) < self._bytes and (part := self._pixels.read(self._bytes - len(data))):
            data += part
        return data

    def write(self, index: int, pixels: NDArray[np.uint8]) -> None:
        data = pixels.tobytes()
        _write(self._pixels, self._place(index), data)
        self._seals[index] = _seal(self.marks[index], data)
        self._waiting.append(index)

    def mark(self) -> None:
        """Bring the pixels written so far to the disk, then their seals."""
        # Forgotten first: after a failed fsync the pixels may be lost, and the next one would not say so.
        written, self._waiting = self._waiting, []
        os.fsync(self._pixels.fileno())
        for index in written:
            _write(self._journal, index * MARK, self._seals[index])
        os.fsync(self._journal.fileno())

    def close_gaps(self, kept: Sequence[int]) -> None:
        """Move the kept rows together, in order."""
        first = next((place for place, index in enumerate(kept) if place != index), len(kept))
        # From here on rows are not where their seals say: a build that dies now decodes them again.
        self._journal.truncate(first * MARK)
        os.fsync(self._journal.fileno())
        for place in range(first, len(kept)):
            _write(self._pixels, self._place(place), self._read(kept[place]))

    def finish(self, kept: Sequence[int]) -> list[bytes]:
        """Make it a whole .npy file of the kept rows, and return the digests of its blocks."""
        _write(self._pixels, 0, start_of_file((len(kept), *self._row)))
        self._pixels.truncate(self._place(len(kept)))
        os.fsync(self._pixels.fileno())
        blocks = [hashlib.sha256() for _ in range(0, len(kept), BLOCK)]
        for place, index in enumerate(kept):
            data = self._read(place)
            if _seal(self.marks[index], data) != self._seals[index]:
                raise UserError(
                    f"{self.path} does not hold what was written to it: check the disk, or choose another "
                    "folder; the same command decodes anew what is lost"
                )
            blocks[place // BLOCK].update(data)
        return [block.digest() for block in blocks]


def _seal(mark: bytes, pixels: bytes) -> bytes:
    return hashlib.blake2b(pixels, digest_size=MARK, key=mark).digest()


def _write(file: io.FileIO, place: int, data: bytes) -> None:
    """Write all of `data`: an unbuffered file may take less at a time."""
    file.seek(place)
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


# The folder


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except PermissionError:  # Windows keeps a file that is open elsewhere; the next build tries again
            continue


@contextmanager
def locked(plan: Plan) -> Iterator[None]:
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


def _check_space(plan: Plan, needed: int) -> None:
    """Refuse to start what cannot be finished."""
    present = plan.working("pixels")
    # A partial file has holes: what counts is the space that it takes.
    taken = getattr(present.stat(), "st_blocks", 0) * 512 if present.exists() else 0
    if needed - taken > shutil.disk_usage(plan.folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _full_disk_explained(plan: Plan, needed: int) -> Iterator[None]:
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
