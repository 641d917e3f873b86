"""Vectors of images in a file: made of a folder in blocks, and searched exactly in bounded memory."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from robustmetric.data import load
from robustmetric.data.decode import SUFFIXES
from robustmetric.errors import UserError, brief, shorten, whole
from robustmetric.files import (
    AGAIN,
    DamagedError,
    is_draft,
    load_entries,
    read_sealed,
    save,
    save_entries,
    write_sealed,
    writing,
)
from robustmetric.locks import claimed
from robustmetric.sphere import BrokenEmbeddingsError
from robustmetric.squares import check_embeddings, keys_of, positions_of, square_distance, squares_of
from robustmetric.training import Run
from robustmetric.training.trained import BATCH

FORMATS = ("safetensors", "npy", "parquet")
"""The formats of vectors, and the endings of their files."""

UNFINISHED = ".unfinished"
"""Follows the name of a file of vectors in that of the folder of its finished blocks."""

K = 10
"""How many are found unless told otherwise."""

_BLOCK = 512  # images that a kill can cost
_LISTED = 20  # images without a vector that are named
_PIECE = 1 << 22  # bytes of a file that are hashed at once: threads share them
_OFF = 1e-4  # how far a squared length may be from 1
_NONE = torch.iinfo(torch.long).max  # after every key
_ROWS = 256  # queries at once
_NUMBERS = 1 << 22  # of the vectors at once
_AGAIN = 1 << 17  # numbers that are measured again at once
_FORMAT = "robustmetric vectors 2"
_TENSORS = {"ends": ("I64", 8), "vectors": ("F32", 4), "names": ("U8", 1)}  # aligned in this order

Floats = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with the number of images that are done, and of all."""


class Found(NamedTuple):
    """The nearest vectors of Q queries: `position` (Q, K), the nearest first, and `distance` (Q, K)."""

    position: Tensor
    distance: Tensor


class Vectors:
    """N vectors of length 1, `z` (N, D) in float32, with the `files` that they are of.

    `load_vectors` returns them mapped into memory, with the `path` of that file and metadata `about` them.

    >>> vectors = Vectors(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), ["a.png", "b.png", "c.png"])
    >>> found = vectors.search(torch.tensor([[0.0, 1.0]]), k=2)
    >>> [vectors.files[place] for place in found.position[0]], found.distance
    (['b.png', 'c.png'], tensor([[0.0000, 0.6325]]))
    """

    def __init__(
        self,
        z: Tensor,
        files: Sequence[str],
        about: Mapping[str, str] | None = None,
        *,
        path: Path | None = None,
    ) -> None:
        _check_unit(z)
        if z.dtype != torch.float32 or z.device.type != "cpu" or len(files) != len(z):
            raise UserError(
                f"z is {z.dtype} on {z.device}, {len(z)} vectors for {len(files)} files; it must be float32 "
                "on the CPU, a vector for each file"
            )
        self.z, self.files, self.about, self.path = z.contiguous(), files, about or {}, path

    def __len__(self) -> int:
        return len(self.z)

    def __repr__(self) -> str:
        return f"Vectors({len(self):,} of {self.z.shape[1]}{'' if self.path is None else f', {self.path}'})"

    def search(self, z: Tensor, k: int = K) -> Found:
        """Return the `k` vectors, or all if there are fewer, that are nearest to each of `z` (Q, D).

        They are ranked as everywhere, by distance and then by position. `z` are vectors of length 1 of the
        same network. A search reads all vectors once, in blocks.
        """
        k = min(whole("k", k, least=1), len(self))
        _check_unit(z)
        if z.shape[1] != self.z.shape[1]:
            raise UserError(f"z has {z.shape[1]} columns, not {self.z.shape[1]}: embed both with one network")
        queries = z.detach().to("cpu", torch.float32).contiguous()
        parts = queries.split(max(1, min(_ROWS, _NUMBERS // k)))
        keys = torch.cat([_best(self.z.numpy(), part.numpy(), k) for part in parts])
        return Found(positions_of(keys), torch.from_numpy(np.sqrt(squares_of(keys.numpy()))))

    def check(self, run: Run) -> None:
        """Refuse a `run` whose network or preprocessing is not the one that the vectors are of."""
        now = _about(run)
        if any(self.about.get(name) != now[name] for name in ("network", "inputs")):
            of, given = (
                f"{about.get('run')} (SHA-256 {about.get('network', '')[:12]}, {about.get('inputs')})"
                for about in (self.about, now)
            )
            raise UserError(
                f"{self.path or 'these vectors'} are of {of}, not of {given}: give that run, or embed again"
            )


def _about(run: Run, folder: Path | None = None) -> dict[str, str]:
    """Return the metadata of vectors that a run makes of the images of a folder."""
    return {
        "format": _FORMAT,
        "run": run.name,
        "network": run.digest,
        "inputs": json.dumps(run.inputs.entries(), sort_keys=True),
        "folder": "" if folder is None else _text(str(folder.absolute())),
    }


def _check_unit(z: Tensor) -> None:
    check_embeddings(z, "z")
    for part in z.split(max(1, _NUMBERS // z.shape[1])):
        if not ((torch.linalg.vector_norm(part, dim=1) - 1).abs() <= _OFF / 2.1).all():
            raise BrokenEmbeddingsError("some vectors are not of length 1: take what a run embeds")


# Embed


@dataclass(frozen=True)
class Embedded:
    """The result of `embed_folder`: `count` vectors, `skipped` images, and the first of them with reasons.

    These are `listed` by name.
    """

    count: int
    skipped: int
    listed: dict[str, str]


def embed_folder(
    run: Run,
    folder: Path | str,
    out: Path | str,
    *,
    to: str | None = None,
    batch: int = BATCH,
    skip_broken: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
) -> Embedded:
    """Embed all images below a `folder` with the network of a `run`, and write the vectors to the file `out`.

    The format `to` is one of `FORMATS`, by default what the name ends in; only safetensors can be searched
    here. An existing file is overwritten only with `force`. In place of the folder a CSV file may list
    images. `batch` images, at most 512, go through the network at a time. Images without a vector raise an
    error that lists them when all others are embedded; with `skip_broken` they are left out. Memory does not
    grow with the number of images, except for their names.

    Finished blocks are kept in the folder ``OUT.unfinished``: the same call resumes. Blocks whose images
    changed are made again. `progress` is called with the images done and all; `report` with sentences.
    """
    folder, out = Path(folder).expanduser(), Path(out).expanduser()
    batch = min(whole("batch", batch, least=1), _BLOCK)
    to = to or out.suffix.removeprefix(".")
    if to not in FORMATS:
        raise UserError(f"vectors are written to {', '.join(FORMATS)}, not {brief(to)}", parameter="to")
    arrow = _arrow() if to == "parquet" else None
    place, base = out.with_name(out.name + UNFINISHED), folder if folder.is_dir() else folder.parent
    with ExitStack() as claims:
        claims.enter_context(claimed(out, "an embedding", force=force))
        if to == "npy":
            claims.enter_context(claimed(_beside(out), "an embedding", force=force or place.exists()))
        names, about = images_below(folder, report), _about(run, base)
        _begin(place, about, force)
        blocks = _Blocks(run, base, names, place, str(about))
        blocks.make(batch, progress, report)
        has = np.concatenate([_has_vector(z) for z in blocks])
        broken = np.flatnonzero(~has).tolist()
        listed = {names[row]: blocks.reason(row) for row in broken[:_LISTED]}
        if broken and not (skip_broken and has.any()):
            lines = [f"  {name}: {reason}" for name, reason in listed.items()]
            lines += [f"  and {len(broken) - _LISTED} more"] if len(broken) > _LISTED else []
            raise UserError(
                f"{len(broken)} of the {len(names)} images below {folder} cannot be embedded:\n"
                + "\n".join(lines)
                + "\nRepair them and run again, or leave them out with skip_broken; the others are kept",
                parameter="skip_broken",
            )
        kept = [name for name, one in zip(names, has, strict=True) if one]
        file = out if to == "safetensors" else place / "vectors.safetensors"
        save_vectors(file, about, kept, (z[_has_vector(z)] for z in blocks if z.size))
        if to == "npy":
            _write_npy(load_vectors(file), out)
        elif to == "parquet":
            _write_parquet(load_vectors(file), out, arrow)
        shutil.rmtree(place)
    return Embedded(len(kept), len(broken), listed)


def _begin(place: Path, about: dict[str, str], force: bool) -> None:
    """Write down what is embedded, or see that what is in `place` is of the same."""
    plan, left = place / "plan.json", place.exists() and not all(map(is_draft, place.iterdir()))
    if left and not force and (not plan.exists() or load_entries(plan) != about):
        raise UserError(
            f"{place} holds blocks of another network or folder: give another path, or overwrite them",
            parameter="force",
        )
    with writing(plan, AGAIN):
        place.mkdir(exist_ok=True)
    save_entries(plan, about)


class _Blocks:
    """Blocks of vectors of image files (n, D), where images without a vector have NaN; kept in a folder."""

    def __init__(self, run: Run, base: Path, names: Sequence[str], place: Path, about: str) -> None:
        self.run, self.base, self.names, self.place = run, base, names, place
        self.rows = [range(k, min(k + _BLOCK, len(names))) for k in range(0, len(names), _BLOCK)]
        self.keys = [self._key(about, rows) for rows in self.rows]  # before any image is read

    def __iter__(self) -> Iterator[Floats]:
        for number in range(len(self.rows)):
            yield self._read(number)

    def make(self, batch: int, progress: Progress | None, report: Callable[[str], None]) -> None:
        """Make the blocks that are missing, damaged, or of images that changed since."""
        total = len(self.names)
        missing = [number for number in range(len(self.rows)) if not self._has(number)]
        done = total - sum(len(self.rows[number]) for number in missing)
        if done:
            report(f"{done:,} of {total:,} images are embedded already: resuming")
        files = (self.base / self.names[row] for number in missing for row in self.rows[number])
        with closing(self.run.inputs.decoded(files, ahead=batch)) as decoded:
            for number in missing:
                found: list[Tensor | None] = []
                for begin in range(0, len(self.rows[number]), batch):
                    count = min(batch, len(self.rows[number]) - begin)
                    found += self._embedded([pixels for _, pixels in islice(decoded, count)])
                    done += count
                    if progress is not None:
                        progress(done, total)
                dim = next((z.shape[1] for z in found if z is not None), 0)
                z = torch.cat([torch.full((1, dim), math.nan) if z is None else z for z in found])
                content = z.numpy().tobytes()
                with writing(self._path(number), AGAIN):
                    write_sealed(self._path(number), lambda file: file.write(content), self.keys[number])  # noqa: B023

    def reason(self, row: int) -> str:
        """Return why the image of a row has no vector."""
        ((_, pixels),) = self.run.inputs.decoded([self.base / self.names[row]], ahead=0)
        return pixels if isinstance(pixels, str) else "the network returns zeros, NaN or infinity for it"

    def _embedded(self, pixels: Sequence[NDArray[np.uint8] | str]) -> list[Tensor | None]:
        """Return the vector (1, D) of each decoded image of a batch, None if it has none."""
        some = [one for one in pixels if not isinstance(one, str)]
        if not some:
            return [None] * len(pixels)
        images = self.run.inputs.tensors(some)
        try:
            found: Iterator[Tensor | None] = iter(self.run.embed(images, batch=len(images)).split(1))
        except BrokenEmbeddingsError:
            alone = [self._alone(image[None]) for image in images]
            if not any(z is not None for z in alone):  # it is not for the images
                raise
            found = iter(alone)
        return [None if isinstance(one, str) else next(found) for one in pixels]

    def _alone(self, image: Tensor) -> Tensor | None:
        try:
            return self.run.embed(image)
        except BrokenEmbeddingsError:
            return None

    def _path(self, number: int) -> Path:
        return self.place / f"{number:08d}.block"

    def _key(self, about: str, rows: range) -> bytes:
        """Return the digest of all that a block is made from, as far as it is seen without reading images."""
        key = hashlib.sha256(about.encode())
        for row in rows:
            try:
                found = (self.base / self.names[row]).stat()
                state = (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            except OSError:
                state = (-1, -1, -1)
            key.update(f"\n{self.names[row]!r} {state}".encode())
        return key.digest()

    def _has(self, number: int) -> bool:
        """Return whether a block is finished; an image that had no vector may be readable by now."""
        try:
            z = self._read(number)
        except (FileNotFoundError, DamagedError):
            return False
        rows = [row for row, one in zip(self.rows[number], _has_vector(z), strict=True) if not one]
        broken = (self.base / self.names[row] for row in rows)
        return all(isinstance(pixels, str) for _, pixels in self.run.inputs.decoded(broken, ahead=0))

    def _read(self, number: int) -> Floats:
        content = read_sealed(self._path(number), self.keys[number])
        return np.frombuffer(content, np.float32).reshape(len(self.rows[number]), -1)


def _has_vector(z: Floats) -> NDArray[np.bool_]:
    """Return which rows of a block (n, D) are vectors; none if D is 0."""
    return np.asarray((~np.isnan(z)).sum(1) > 0, np.bool_)


def images_below(folder: Path, report: Callable[[str], None] = print) -> list[str]:
    """Return the images below a `folder` by their names relative to it, sorted.

    Links are followed; hidden files are left out. A CSV file in place of the folder lists the images, as the
    data set `csv`. Links without a file, and files that are not read, are passed to `report`.
    """
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder {folder} of images; give one, or a CSV file")
    if not folder.is_dir():
        images = load("csv", folder, "all")
        if images.boxes is not None:
            raise UserError(f"{folder} has boxes, and vectors have the names of files: cut the boxes out")
        return [path.relative_to(folder.parent).as_posix() for path in images.files or ()]
    found: list[str] = []
    links: list[str] = []
    unread: Counter[str] = Counter()

    def walk(place: Path, prefix: str, above: tuple[tuple[int, int], ...]) -> None:
        about = place.stat()
        here = (about.st_dev, about.st_ino)
        with os.scandir(place) as entries:
            for entry in entries if here not in above else ():  # a link may lead up
                name = prefix + entry.name
                if entry.name.startswith("."):
                    continue
                try:
                    is_folder, is_file = entry.is_dir(), entry.is_file()
                except OSError:  # a link to itself
                    is_folder = is_file = False
                if is_folder:
                    walk(place / entry.name, f"{name}/", (*above, here))
                elif is_file and name.lower().endswith(SUFFIXES):
                    found.append(name)
                elif is_file:
                    unread[Path(name).suffix.lower() or "without an ending"] += 1
                elif entry.is_symlink():
                    links.append(name)

    walk(folder, "", ())
    if links:
        report(f"links without a file are left out: {shorten(sorted(links))}")
    if unread:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(unread.items()))
        report(f"not read below {folder}: {kinds}; convert images to .png")
    if not found:
        raise UserError(f"there are no images below {folder}: no file ends in {', '.join(SUFFIXES)}")
    return sorted(found)


# Files


def load_vectors(path: Path | str) -> Vectors:
    """Load the vectors that `robustmetric embed` wrote to `path`, and check all of it against its digest.

    The file is .safetensors and is mapped into memory: it may be larger than that.
    """
    path = Path(path).expanduser()
    if path.suffix != ".safetensors":
        raise UserError(f"{path} cannot be searched: embed to .safetensors; others are for other programs")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of vectors {path}; make one with robustmetric embed")
    try:
        sha256 = _digest(path)
        with safe_open(path, "pt") as file:  # tensors are mapped, and copied on write
            about = dict(sorted((file.metadata() or {}).items()))  # which come in any order
            z, text, ends = (file.get_tensor(name) for name in ("vectors", "names", "ends"))
        stated, content = about.pop("sha256"), text.numpy().tobytes()
        if about["format"] != _FORMAT:
            raise ValueError(f"its format is {brief(about['format'])}, not {_FORMAT}")
        names = [
            content[begin:end].decode("utf-8", "surrogateescape")
            for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
        ]
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:  # damaged files make the parsers raise nearly anything
        raise DamagedError(f"{path} cannot be read as vectors: {type(error).__name__}: {error}") from None
    if sha256 != stated:
        raise DamagedError(f"{path} is damaged: its content does not match its digest; embed again")
    return Vectors(z, names, about, path=path)


def save_vectors(
    path: Path, about: Mapping[str, str], names: Sequence[str], blocks: Iterable[Floats]
) -> None:
    """Write `blocks` of vectors (n, D) to the .safetensors file `path`, with `names` and metadata, `about`.

    There may be more than memory holds; the file appears when it is complete.
    """
    parts = [name.encode("utf-8", "surrogateescape") for name in names]
    ends = np.cumsum([len(part) for part in parts], dtype="<i8")
    entries = {"format": _FORMAT, **about, "sha256": "0" * 64}  # until it is known

    def head(dim: int) -> bytes:
        shapes = {"ends": [len(names)], "vectors": [len(names), dim], "names": [int(ends[-1])]}
        header: dict[str, Any] = {"__metadata__": entries}
        place = 0
        for name, (kind, width) in _TENSORS.items():
            end = place + width * math.prod(shapes[name])
            header[name] = {"dtype": kind, "shape": shapes[name], "data_offsets": [place, end]}
            place = end
        content = json.dumps(header, separators=(",", ":")).encode()
        content += b" " * (-len(content) % 8)
        return len(content).to_bytes(8, "little") + content

    def fill(file: BinaryIO) -> None:
        dim = 0
        for block in blocks:
            if not dim:
                dim = block.shape[1]
                file.write(head(dim) + ends.tobytes())
            file.write(block.tobytes())
        file.write(b"".join(parts))
        file.flush()
        entries["sha256"] = _digest(Path(file.name))
        file.seek(0)
        file.write(head(dim))

    save(path, fill)


def _digest(path: Path) -> str:
    """Return the SHA-256 of all content of a .safetensors file except the entry sha256."""
    content = np.memmap(path, np.uint8, "r")
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:begin].tobytes())
    header["__metadata__"].pop("sha256")
    places = range(begin, len(content), _PIECE)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pieces = pool.map(lambda k: hashlib.sha256(content[k : k + _PIECE].data).digest(), places)
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode() + b"".join(pieces)).hexdigest()


def _beside(path: Path) -> Path:
    """Return the file with the names and the metadata of an .npy file."""
    return path.with_name(f"{path.name}.json")


def _write_npy(vectors: Vectors, out: Path) -> None:
    entries = {**vectors.about, "files": list(vectors.files)}
    save(_beside(out), json.dumps(entries, indent=1) + "\n")
    save(out, lambda file: np.save(file, vectors.z.numpy()))


def _write_parquet(vectors: Vectors, out: Path, arrow: Any) -> None:
    z, dim = vectors.z.numpy(), vectors.z.shape[1]
    columns = [("file", arrow.string()), ("vector", arrow.list_(arrow.float32(), dim))]
    schema, rows = arrow.schema(columns, metadata=dict(vectors.about)), max(1, _NUMBERS // dim)

    def fill(file: BinaryIO) -> None:
        with arrow.parquet.ParquetWriter(file, schema, use_dictionary=False, compression="none") as writer:
            for begin in range(0, len(z), rows):
                numbers = arrow.array(z[begin : begin + rows].reshape(-1))
                names = arrow.array(map(_text, vectors.files[begin : begin + rows]), arrow.string())
                both = [names, arrow.FixedSizeListArray.from_arrays(numbers, dim)]
                writer.write_batch(arrow.record_batch(both, schema=schema))

    save(out, fill)


def _arrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError:
        told = "Parquet needs pyarrow: pip install 'robustmetric[parquet]', or write .safetensors"
        raise UserError(told, parameter="out") from None


def _text(text: str) -> str:
    """Return a text with bytes that are not UTF-8 made visible."""
    return text.encode("utf-8", "backslashreplace").decode()


# Search


def _best(z: Floats, queries: Floats, k: int) -> Tensor:
    """Return the keys (Q, k) of the nearest of z (N, D) to queries (Q, D), ascending.

    A product in float32 tells each distance within a bound. Whatever may be among the nearest by that is
    measured again as everywhere, so that ranks and ties are those of every other ranking.
    """
    best, bound = torch.full((len(queries), k), _NONE), _bound(z.shape[1])
    for begin in range(0, len(z), width := max(1, _NUMBERS // z.shape[1])):
        block = z[begin : begin + width]
        product = queries @ block.T
        last = best[:, -1].numpy()
        # Until k are found, the bits of the last key are no number.
        square = np.where(last == _NONE, np.inf, squares_of(last)).astype(np.float64)
        least = (1 - (square + bound) / 2).astype(np.float32)  # product of what may be as near as the k-th
        row, column = np.nonzero(product >= least[:, None])
        if len(row) > 8 * k * len(queries):
            # The k-th of the block leaves few, except for those that are as near.
            nth = min(k, len(block))
            kth = np.partition(product, -nth, axis=1)[:, -nth]
            row, column = np.nonzero(product >= np.maximum(least, kth - np.float32(bound))[:, None])
        if len(row):
            best = _merged(best, torch.from_numpy(row), _keys(queries, block, row, column, begin))
    return best


def _bound(dim: int) -> float:
    """Return how far |x|² + |y|² − 2⟨x, y⟩ is from 2 − 2p at most, with p the product in float32."""
    unit = 2.0**-24
    # A product of D numbers, in whatever order, is off by D units of |x|·|y| < 1.01; squared lengths by as
    # much, which were summed in float32 too. The rest is for what is rounded once.
    return 2 * _OFF + 1.01 * 4 * dim * unit + 16 * unit


def _keys(
    queries: Floats, block: Floats, row: NDArray[np.int64], column: NDArray[np.int64], begin: int
) -> Tensor:
    """Measure pairs again: queries `row` and vectors `column` of the block that begins at `begin`."""
    each = max(1, _AGAIN // block.shape[1])
    found = []
    for some in (slice(start, start + each) for start in range(0, len(row), each)):
        pair = torch.from_numpy(queries[row[some]]), torch.from_numpy(block[column[some]])
        found.append(keys_of(square_distance(*pair), torch.from_numpy(column[some] + begin)))
    return torch.cat(found)


def _merged(best: Tensor, row: Tensor, keys: Tensor) -> Tensor:
    """Merge new keys (n,) of queries `row` (n,), ascending, into the best (Q, k)."""
    count = torch.bincount(row, minlength=len(best))
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    fresh = torch.full((len(best), int(count.max())), _NONE)
    fresh[row, place] = keys
    return torch.cat([best, fresh], 1).sort(1).values[:, : best.shape[1]]
