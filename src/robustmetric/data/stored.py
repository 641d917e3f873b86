"""Pixels in a file, read by rows, with digests of blocks of rows that are the same wherever pixels are.

A mapped file that shrinks ends the process that touches it, by SIGBUS. These are read instead: what is
missing is an error that names the file.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from robustmetric.errors import UserError

BLOCK = 16  # rows that share a digest: a damaged block redoes these alone

_PIECE = 1 << 20  # bytes read at a time to be digested
_SHARE = 1 << 23  # bytes that are worth a thread's while

Row = int | np.integer[Any]
Rows = Row | slice | Sequence[int] | NDArray[Any]


class ChangedError(UserError):
    """Pixels that changed in their file while they were read."""


class Stored:
    """Pixels (N, H, W, C) with 8 bits in the file `path`, from the byte `start` on, read when needed.

    Indexed like an array by a number, a slice or an array of numbers, and behind them by anything; the result
    is an array in memory. The file stays open, so that it may be replaced or removed meanwhile. `blocks` are
    the digests of its blocks, where they were checked.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a").write_bytes(bytes(range(12)))
    ...     stored = Stored(Path(folder, "a"), (3, 2, 2, 1))
    >>> stored[1, 0].tolist(), stored[np.array([2, 0])].shape
    ([[4], [5]], (2, 2, 2, 1))
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(
        self, path: Path, shape: Sequence[int], start: int = 0, blocks: Sequence[bytes] | None = None
    ) -> None:
        self.path, self.blocks = path, blocks
        count, height, width, channels = shape
        self.shape = (count, height, width, channels)
        self._start, self._row = start, height * width * channels
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._file)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.path, self.shape, self._start, self.blocks)

    @property
    def nbytes(self) -> int:
        """All bytes of the pixels."""
        return len(self) * self._row

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("pixels in a file cannot be an array without a copy")
        found: NDArray[Any] = self[:].astype(dtype or self.dtype, copy=False)
        return found

    def __getitem__(self, index: Rows | tuple[Rows | EllipsisType, ...]) -> NDArray[np.uint8]:
        if not isinstance(index, tuple):
            return self._rows(index)
        first, *rest = index
        if isinstance(first, EllipsisType):
            raise TypeError("pixels in a file are indexed by their rows first")
        one = isinstance(first, (int, np.integer))
        found: NDArray[np.uint8] = self._rows(first)[(*rest,) if one else (slice(None), *rest)]
        return found

    def _rows(self, index: Rows) -> NDArray[np.uint8]:
        if isinstance(index, (int, np.integer)):
            return self._read(self._place(index), 1).reshape(self.shape[1:])
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step == 1:
                return self._read(begin, max(0, end - begin))
            index = np.arange(begin, end, step)
        index = np.asarray(index)
        rows = np.flatnonzero(index) if index.dtype == np.bool_ else index
        if rows.ndim != 1 or (index.dtype == np.bool_ and len(index) != len(self)):
            raise IndexError(f"rows are {index.dtype} {index.shape}; expected (R,), or a mask ({len(self)},)")
        rows = np.where(rows < 0, rows + len(self), rows)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows reach from {rows.min()} to {rows.max()}; there are {len(self)}")
        found = np.empty((len(rows), *self.shape[1:]), np.uint8)
        flat = found.data.cast("B") if found.size else memoryview(b"")
        # Neighbours are read together.
        ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        begin = 0
        for end in ends if found.size else ():
            self.read_into(flat[begin * self._row : end * self._row], int(rows[begin]) * self._row)
            begin = end
        return found

    def _place(self, index: Row) -> int:
        row = int(index)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} is not among {len(self)}")
        return row % len(self)

    def _read(self, row: int, count: int) -> NDArray[np.uint8]:
        found = np.empty((count, *self.shape[1:]), np.uint8)
        if found.size:
            self.read_into(found.data.cast("B"), row * self._row)
        return found

    def read_into(self, room: memoryview, place: int) -> None:
        """Fill the `room` with the pixels' bytes from `place` on; a file that ends before raises an error."""
        place += self._start
        while room:
            try:
                read = self._part(room, place)
            except OSError as error:
                reason = error.strerror or error
                raise ChangedError(f"{self.path} cannot be read ({reason}): {_AGAIN}") from None
            if not read:
                raise ChangedError(f"{self.path} became shorter while it was read: {_AGAIN}")
            room, place = room[read:], place + read

    def _part(self, room: memoryview, place: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file, [room], place)
        with self._lock:  # Windows has one position in a file for all threads
            os.lseek(self._file, place, os.SEEK_SET)
            data = os.read(self._file, min(len(room), _PIECE))
        room[: len(data)] = data
        return len(data)

    def is_all_behind(self, head: bytes) -> bool:
        """Return whether the file consists of `head` and the pixels, and nothing else.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a").write_bytes(b"head" + bytes(3))
        ...     stored = Stored(Path(folder, "a"), (3, 1, 1, 1), 4)
        ...     stored.is_all_behind(b"head"), stored.is_all_behind(b"tail")
        (True, False)
        """
        found = bytearray(len(head))
        self.read_into(memoryview(found), -self._start)
        return found == head and os.fstat(self._file).st_size == len(head) + self.nbytes

    def damaged(self, blocks: Sequence[bytes]) -> list[int]:
        """Return which of the file's blocks do not have these digests.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a").write_bytes(bytes(20))
        ...     Stored(Path(folder, "a"), (20, 1, 1, 1)).damaged([hashlib.sha256(bytes(16)).digest(), b""])
        [1]
        """
        each = max(1, _SHARE // (BLOCK * self._row or 1))
        shares = [range(begin, min(begin + each, len(blocks))) for begin in range(0, len(blocks), each)]
        with ThreadPoolExecutor(cores()) as pool:
            found = (digest for share in pool.map(self._digests, shares) for digest in share)
            return [k for k, (digest, block) in enumerate(zip(found, blocks, strict=True)) if digest != block]

    def _digests(self, blocks: Iterable[int]) -> list[bytes | None]:
        """Return the digests of some blocks; None where the file ends before."""
        room = memoryview(bytearray(min(_PIECE, BLOCK * self._row)))
        found: list[bytes | None] = []
        for block in blocks:
            digest = hashlib.sha256()
            place, end = (min(b * BLOCK, len(self)) * self._row for b in (block, block + 1))
            try:
                while place < end:
                    part = room[: end - place]
                    self.read_into(part, place)
                    digest.update(part)
                    place += len(part)
            except UserError:
                found.append(None)
            else:
                found.append(digest.digest())
        return found


_AGAIN = "another program changed it, or the disk fails; the next start decodes what is lost"

Pictures: TypeAlias = NDArray[np.uint8] | Stored
"""Pixels (N, H, W, C) with 8 bits, in memory or in a file."""


def block_digests(pixels: Pictures) -> Sequence[bytes]:
    """Return the sha256 of each block of 16 rows of `pixels` (N, H, W, C).

    >>> len(block_digests(np.zeros((17, 2, 2, 1), np.uint8)))
    2
    """
    if isinstance(pixels, Stored) and pixels.blocks is not None:
        return pixels.blocks
    blocks = (pixels[begin : begin + BLOCK] for begin in range(0, len(pixels), BLOCK))
    return [hashlib.sha256(np.ascontiguousarray(block).data).digest() for block in blocks]


def content_digest(shape: Sequence[int], blocks: Sequence[bytes]) -> str:
    """Return one digest, in hexadecimal, of pixels of this `shape` whose `blocks` have these digests.

    >>> content_digest((0, 2, 2, 1), [])[:8]
    '475528c2'
    """
    return hashlib.sha256(b"".join([repr([*shape]).encode(), *blocks])).hexdigest()


def cores() -> int:
    """Return how many processors this process may use.

    >>> cores() >= 1
    True
    """
    # Fewer than the machine has, where a scheduler or container gives this process a part of them.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
