"""Files of vectors: safetensors, numpy's .npy with a .json beside it, and Parquet.

Each is written from blocks of vectors, one after the other, and appears complete or not at all. The first two
are mapped into memory when they are read; Parquet is read as a whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from robustmetric.errors import UserError
from robustmetric.files import DamagedError, write_atomically, writing
from robustmetric.vectors import parquet
from robustmetric.vectors.content import About, Floats, Hashed, Read, check_sizes, digest_of, looked_at, near
from robustmetric.vectors.names import Names

AGAIN = "then run the same command again"
_HEADER = 1 << 20  # bytes that a header takes at most
_UNKNOWN = "0" * 64  # stands for a digest until it is known
# The tensors of a file: their type and the bytes of a number, the longest first, so that all are aligned.
_TENSORS = {"ends": ("I64", 8), "vectors": ("F32", 4), "names": ("U8", 1)}
_TYPES = {"I64": "<i8", "F32": "<f4", "U8": "u1"}


class Content(NamedTuple):
    """What is in a file: vectors z (N, D), the digest of all, and how far squared lengths are from 1."""

    about: About
    names: Names
    z: Floats
    sha256: str
    off: float


class Format(NamedTuple):
    """How a kind of file is written and read; `beside` is put behind its name for a second file."""

    write: Callable[[Path, About, Names, int, Iterable[Floats]], None]
    read: Callable[[Path], Read]
    beside: str | None = None


def format_of(path: Path) -> Format:
    """Return the format of a file by its name, `path`.

    >>> format_of(Path("vectors.csv"))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: vectors.csv: vectors are kept as .safetensors, .npy or .parquet; give a name ...
    """
    if (found := _FORMATS.get(path.suffix)) is None:
        raise UserError(
            f"{path}: vectors are kept as {', '.join(list(_FORMATS)[:-1])} or {list(_FORMATS)[-1]}; give a "
            "name that ends so",
            parameter="out",
        )
    return found


def files_of(path: Path) -> list[Path]:
    """Return the files that vectors at `path` are kept in: that one, and what stands beside it.

    >>> [file.name for file in files_of(Path("vectors.npy"))]
    ['vectors.npy', 'vectors.npy.json']
    """
    beside = format_of(path).beside
    return [path] if beside is None else [path, path.with_name(path.name + beside)]


def check_free(path: Path, force: bool, begun: Path | None = None) -> None:
    """Refuse a file of vectors `path` that cannot be, or that is there already and not to be replaced.

    If a folder `begun` is there, what stands beside it alone is what an interruption left.

    >>> check_free(Path("."), force=False)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: .: vectors are kept as .safetensors, .npy or .parquet; give a name that ends so
    """
    files = files_of(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file for the vectors", parameter="out")
    left = begun is not None and begun.exists()
    for file in files[:1] if left else files:
        if not force and file.exists():
            also = f" ({begun} is what an interruption left: remove it)" if left else ""
            raise UserError(
                f"{file} is there already{also}: give another file, or replace it with force",
                parameter="force",
            )


def read(path: Path) -> Content:
    """Read the file of vectors `path`, and check all that is in it against its digest.

    >>> read(Path("nowhere.npy"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no file of vectors nowhere.npy; make one with robustmetric embed
    """
    reader = format_of(path).read
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of vectors {path}; make one with robustmetric embed")
    try:
        about, names, z, stated = reader(path)
        check_sizes(z.shape, names)
        vectors, off = looked_at(z)
    except (DamagedError, OSError, parquet.MissingError):
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read as vectors: {error}") from None
    sha256 = digest_of(about, z.shape, vectors, names)
    if sha256 != stated:
        raise DamagedError(
            f"{path} is damaged: its content does not match the digest in it; embed the images again, or "
            "take a copy"
        )
    try:
        return Content(about, names, z, sha256, near(off))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _put(file: BinaryIO, about: About, names: Names, dim: int, blocks: Iterable[Floats]) -> str:
    """Write blocks of vectors one behind the other; return the digest of all content."""
    hashed = Hashed()
    for block in blocks:
        rows = np.ascontiguousarray(block, "<f4")
        hashed.update(rows)
        file.write(rows.data)
    return digest_of(about, (len(names), dim), hashed.digest(), names)


# safetensors


def _write_safetensors(path: Path, about: About, names: Names, dim: int, blocks: Iterable[Floats]) -> None:
    shapes = {"ends": [len(names)], "vectors": [len(names), dim], "names": [len(names.text)]}

    def fill(file: BinaryIO) -> None:
        file.write(_head(about, shapes, _UNKNOWN))
        file.write(names.ends.astype("<i8").data)
        sha256 = _put(file, about, names, dim, blocks)
        file.write(names.text.data)
        file.seek(0)
        file.write(_head(about, shapes, sha256))

    with writing(path, AGAIN):
        write_atomically(path, fill)


def _head(about: About, shapes: dict[str, list[int]], sha256: str) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {**about.entries(), "sha256": sha256}}
    place = 0
    for name, (kind, width) in _TENSORS.items():
        end = place + width * math.prod(shapes[name])
        entries[name] = {"dtype": kind, "shape": shapes[name], "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_safetensors(path: Path) -> Read:
    with path.open("rb") as file:
        length = path.stat().st_size
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= min(_HEADER, length):
            raise ValueError("its header is not one of ours")
        entries = json.loads(file.read(size).decode("utf-8"))
        if not isinstance(entries, dict) or not isinstance(entries.get("__metadata__"), dict):
            raise ValueError("it has no metadata")
        about = About.read(entries["__metadata__"])
        arrays, place = {}, 8 + size
        for name, (kind, width) in _TENSORS.items():
            shape = _shape(entries.get(name), kind, width, place - 8 - size)
            end = place + width * math.prod(shape)
            if end > length:
                raise ValueError(f"it has {length:,} bytes and its {name} need {end:,}: it is cut off")
            # A copy on write: nothing that is done with it reaches the file.
            arrays[name] = (
                np.memmap(file, _TYPES[kind], "c", place, shape) if end > place else np.zeros(shape, "u1")
            )
            place = end
    if place != length:
        raise ValueError(f"it has {length:,} bytes, where its vectors and names take {place:,}")
    names = Names(np.asarray(arrays["names"]), np.array(arrays["ends"], np.int64))
    return about, names, np.asarray(arrays["vectors"]), str(entries["__metadata__"].get("sha256"))


def _shape(entry: object, kind: str, width: int, place: int) -> tuple[int, ...]:
    """Return the shape of a tensor of this kind that is at this place."""
    known = entry if isinstance(entry, dict) and entry.get("dtype") == kind else {}
    shape = known.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
        raise ValueError("it lacks vectors, or their names")
    if known.get("data_offsets") != [place, place + width * math.prod(shape)]:
        raise ValueError("its vectors and names are not where they should be")
    return tuple(shape)


# numpy


def _write_npy(path: Path, about: About, names: Names, dim: int, blocks: Iterable[Floats]) -> None:
    sha256 = ""
    beside = path.with_name(path.name + BESIDE)

    def fill(file: BinaryIO) -> None:
        nonlocal sha256
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(names), dim)}
        np.lib.format.write_array_header_1_0(file, header)
        sha256 = _put(file, about, names, dim, blocks)
        file.flush()
        with writing(beside, AGAIN):  # first, so that vectors never stand there without their names
            write_atomically(beside, describe)

    def describe(file: BinaryIO) -> None:
        file.write(json.dumps({**about.entries(), "sha256": sha256}, indent=1)[:-2].encode())
        file.write(b',\n "files": [')
        for place, name in enumerate(names):
            file.write((",\n  " if place else "\n  ").encode() + json.dumps(name).encode())
        file.write(b"\n ]\n}\n")

    with writing(path, AGAIN):
        write_atomically(path, fill)


def _read_npy(path: Path) -> Read:
    beside = path.with_name(path.name + BESIDE)
    if not beside.is_file():
        raise FileNotFoundError(f"{beside} is gone, which has the names of the files of {path}: restore it")
    entries = json.loads(beside.read_text(encoding="utf-8"))
    if not isinstance(entries, dict) or not isinstance(files := entries.get("files"), list):
        raise ValueError(f"{beside.name} lists no files")
    if not all(isinstance(name, str) for name in files):
        raise ValueError(f"{beside.name} has names that are no texts")
    try:
        z = np.lib.format.open_memmap(path, "c")  # which takes no pickles
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged header makes numpy raise nearly anything
        raise ValueError(f"it is no array, or damaged ({type(error).__name__}: {error})") from None
    if z.dtype != np.dtype("<f4") or not z.flags.c_contiguous:
        raise ValueError("it is no array of float32 by rows")
    if z.offset + z.nbytes != path.stat().st_size:
        raise ValueError(
            f"it has {path.stat().st_size:,} bytes, where its array takes {z.offset + z.nbytes:,}"
        )
    return About.read(entries), Names.of(files), np.asarray(z), str(entries.get("sha256"))


BESIDE = ".json"
_FORMATS = {
    ".safetensors": Format(_write_safetensors, _read_safetensors),
    ".npy": Format(_write_npy, _read_npy, BESIDE),
    ".parquet": Format(parquet.write, parquet.read),
}
