"""Embeds all images below a folder, block by block: what is finished is kept until the whole is there."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from robustmetric.data.cache import LISTED
from robustmetric.data.inputs import Picture
from robustmetric.errors import UserError
from robustmetric.files import (
    DamagedError,
    check_writable,
    digest_of_entries,
    is_draft,
    read_sealed,
    write_atomically,
    write_sealed,
    writing,
)
from robustmetric.locks import LOCK, locked
from robustmetric.sphere import BrokenEmbeddingsError
from robustmetric.training.trained import BATCH, Run, check_batch
from robustmetric.vectors import parquet
from robustmetric.vectors.content import About, Floats
from robustmetric.vectors.formats import AGAIN, check_free, files_of, format_of
from robustmetric.vectors.names import Names, images_below

UNFINISHED = ".unfinished"
"""Stands behind the name of a file of vectors for the folder of its finished blocks."""

_PLAN = "plan.json"
_BLOCK = 256  # images at least: what a kill can cost

Progress = Callable[[int, int], None]
"""Is told how many images are done, and how many there are."""

Pixels = tuple[Picture, NDArray[np.uint8] | str]


@dataclass(frozen=True)
class Embedded:
    """What came of embedding a folder, as `embed_folder` returns it.

    `count` vectors were written; `skipped` images were left out, of which the first are `listed` with
    reasons.
    """

    count: int
    skipped: int
    listed: dict[str, str]


def embed_folder(
    run: Run,
    folder: Path | str,
    out: Path | str,
    *,
    batch: int = BATCH,
    skip_broken: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
) -> Embedded:
    """Embed all images below a `folder` with the network of a `run`, and write their vectors to a file `out`.

    The file is .safetensors, .npy or .parquet. Images are found by `robustmetric.vectors.images_below`;
    `batch` go through the network at a time. What is in memory does not grow with their number, but for
    their names. Images that cannot be read raise an error that lists them, when all others are embedded; with
    `skip_broken` they are left out. A file that is there is replaced only with `force`.

    Finished blocks are kept in a folder beside the file, ``OUT.unfinished``, until it is whole: the same call
    goes on from there. Blocks of images that have changed are made anew. Those of another network, or of
    another folder, are refused, and removed with `force`. `progress` is told how many images are done and how
    many there are; `report` gets sentences.

    >>> import tempfile
    >>> from PIL import Image
    >>> from robustmetric.data import Inputs
    >>> from robustmetric.training import Recipe
    >>> from robustmetric.vectors import load_vectors
    >>> run = Run(torch.nn.Flatten(), Inputs(resize=8, channels=1), Recipe(data="digits"), None)
    >>> with tempfile.TemporaryDirectory() as home:
    ...     for name in ("grey", "white"):
    ...         Image.new("L", (9, 9), name).save(Path(home, f"{name}.png"))
    ...     embed_folder(run, home, Path(home, "vectors.npy")).count
    ...     load_vectors(Path(home, "vectors.npy")).files[:]
    2
    ['grey.png', 'white.png']
    """
    folder, out = Path(folder).expanduser(), Path(out).expanduser()
    place = out.with_name(out.name + UNFINISHED)
    check_batch(batch)
    check_free(out, force, place)
    names = images_below(folder)
    if out.suffix == ".parquet":
        parquet.check(names)
    check_writable(out.parent)
    base = folder if folder.is_dir() else folder.parent
    about = About(_text(run.name), run.digest, run.inputs, _text(str(base.absolute())))
    with locked(place, "an embedding", report):
        size = _begin(place, about, max(_BLOCK, batch), force)
        check_free(out, force, place)  # now that nobody else writes it
        _sweep(out)
        blocks = _Blocks(run, base, names, place, about, size)
        blocks.make(batch, progress, report)
        if blocks.broken and not (skip_broken and blocks.kept.any()):
            raise UserError(blocks.complaint(folder), parameter="skip_broken")
        kept = names if blocks.kept.all() else names.only(blocks.kept)
        format_of(out).write(out, about, kept, blocks.dim, blocks.vectors())
        _clear(place)
    with suppress(OSError):  # gone with its lock, unless it was there before
        place.rmdir()
    return Embedded(len(kept), blocks.broken, blocks.listed)


def _begin(place: Path, about: About, size: int, force: bool) -> int:
    """Write down what is to be done, unless it is there; return how many images a block has."""
    file = place / _PLAN
    known = {**about.entries(), "block": size}
    others = [path for path in place.iterdir() if path.name != LOCK and not is_draft(path)]
    if file.exists():
        before = _plan(file)
        differing = [key for key in ("network", "inputs", "folder") if before.get(key) != known[key]]
        if not differing and type(before.get("block")) is int and before["block"] > 0:
            return int(before["block"])
        if differing and not force:
            told = ", ".join(
                f"{key} was {_short(before.get(key))}, is {_short(known[key])}" for key in differing
            )
            raise UserError(
                f"{place} holds blocks of something else ({told}): finish that first, give another file, or "
                "remove them with force",
                parameter="force",
            )
        _clear(place)
    elif others:
        raise UserError(
            f"{place} is not empty, and holds no blocks: look at it, and remove it", parameter="out"
        )
    content = json.dumps({**known, "sha256": digest_of_entries(known)}, indent=1)
    with writing(file, AGAIN):
        write_atomically(file, lambda draft: draft.write(content.encode()))
    return size


def _sweep(out: Path) -> None:
    """Remove what a killed program left of the files that it was about to write."""
    names = [re.escape(file.name) for file in files_of(out)]
    for path in out.parent.iterdir():
        if re.fullmatch(rf"\.({'|'.join(names)})\.[0-9a-f]{{32}}\.tmp", path.name):
            path.unlink(missing_ok=True)


def _plan(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("sha256") != digest_of_entries(found):
            raise ValueError
    except (ValueError, RecursionError):
        raise DamagedError(
            f"{file} is damaged: remove {file.parent} and run the same command again"
        ) from None
    return found


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _clear(place: Path) -> None:
    """Remove the blocks; the plan goes last, for without it they are nobody's."""
    for path in sorted(place.iterdir(), key=lambda path: path.name == _PLAN):
        if path.name != LOCK:
            path.unlink(missing_ok=True)


def _text(text: str) -> str:
    """Return a text as it can be written down: bytes of a name that are none become visible."""
    return text.encode("utf-8", "backslashreplace").decode()


class _Block(NamedTuple):
    """Vectors of the images of a block, and why others of it have none, by their place in it."""

    z: Floats
    broken: dict[int, str]


class _Blocks:
    """The blocks of a folder of images: made where they are missing, and read one after the other.

    `kept` (N,) says which images have a vector, `broken` counts those that have none, `listed` are the first.
    """

    def __init__(self, run: Run, folder: Path, names: Names, place: Path, about: About, size: int) -> None:
        self.run, self.folder, self.names, self.place = run, folder, names, place
        self.about, self.size = about, size
        self.kept = np.ones(len(names), np.bool_)
        self.broken, self.dim = 0, 0
        self.listed: dict[str, str] = {}

    def make(self, batch: int, progress: Progress | None, report: Callable[[str], None]) -> None:
        """Make those that are not there."""
        total = len(self.names)
        missing = [number for number in range(-(-total // self.size)) if not self._take(number)]
        done = total - sum(len(self._rows(number)) for number in missing)
        if done:
            report(f"{done:,} of {total:,} images are embedded already: going on from there")
        self._tell(progress, done)
        keys: dict[int, str] = {}

        def files() -> Iterator[Path]:
            for number in missing:
                keys[number] = self._key(number)  # before they are read
                for row in self._rows(number):
                    yield self.folder / self.names[row]

        with closing(self.run.inputs.decoded(files(), ahead=batch)) as decoded:
            for number in missing:
                block = self._made(number, decoded, batch, partial(self._tell, progress, done))
                self._write(number, keys.pop(number), block)
                self._note(number, block)
                done += len(self._rows(number))

    def complaint(self, folder: Path) -> str:
        """List the images that cannot be read, with reasons, and say what to do."""
        lines = [f"  {name}: {reason}" for name, reason in self.listed.items()]
        if self.broken > len(lines):
            lines.append(f"  and {self.broken - len(lines)} more")
        return "\n".join(
            [
                f"{self.broken} of the {len(self.names)} images below {folder} cannot be read:",
                *lines,
                "Repair or replace them and run again, or leave them out with skip_broken. The others are "
                "embedded and kept.",
            ]
        )

    def vectors(self) -> Iterator[Floats]:
        """Yield the vectors of one block after the other."""
        for number in range(-(-len(self.names) // self.size)):
            block = self._read(number)
            if block is None:
                raise DamagedError(f"{self._path(number)} is gone or damaged: run the same command again")
            if len(block[1].z):
                yield block[1].z

    def _tell(self, progress: Progress | None, done: int, more: int = 0) -> None:
        if progress:
            progress(done + more, len(self.names))

    def _rows(self, number: int) -> range:
        return range(number * self.size, min((number + 1) * self.size, len(self.names)))

    def _path(self, number: int) -> Path:
        return self.place / f"{number:08d}.block"

    def _key(self, number: int) -> str:
        """Return the digest of all that a block is made from, as far as it is seen without reading images."""
        key = hashlib.sha256(f"{self.about.network} {self.about.inputs_digest}".encode())
        for row in self._rows(number):
            name = self.names[row]
            try:
                about = (self.folder / name).stat()
                state = (about.st_size, about.st_mtime_ns)
            except OSError:
                state = (-1, -1)
            key.update(f"\n{name!r} {state}".encode())
        return key.hexdigest()

    def _take(self, number: int) -> bool:
        """Return whether a block is there, is of the images as they are now, and those without are broken."""
        found = self._read(number)
        if found is None or found[0] != self._key(number):
            return False
        files = [self.folder / self.names[self._rows(number)[place]] for place in found[1].broken]
        # A changed permission mends a file without changing its length or time.
        if any(not isinstance(pixels, str) for _, pixels in self.run.inputs.decoded(files, ahead=0)):
            return False
        self._note(number, found[1])
        return True

    def _note(self, number: int, block: _Block) -> None:
        self.dim = block.z.shape[1] if len(block.z) else self.dim
        for place, reason in block.broken.items():
            row = self._rows(number)[place]
            self.kept[row] = False
            self.broken += 1
            if len(self.listed) < LISTED:
                self.listed[self.names[row]] = reason

    def _made(
        self,
        number: int,
        decoded: Generator[Pixels, None, None],
        batch: int,
        tell: Callable[[int], None],
    ) -> _Block:
        rows, found, broken = len(self._rows(number)), [], {}
        for begin in range(0, rows, batch):
            pixels = {}
            for place, (_, one) in enumerate(islice(decoded, min(batch, rows - begin)), begin):
                if isinstance(one, str):
                    broken[place] = one
                else:
                    pixels[place] = one
            found += self._embedded(pixels, broken)
            tell(min(begin + batch, rows))
        z = torch.cat(found).numpy() if found else np.zeros((0, self.dim), np.float32)
        return _Block(z, dict(sorted(broken.items())))

    def _embedded(self, pixels: dict[int, NDArray[np.uint8]], broken: dict[int, str]) -> list[torch.Tensor]:
        """Embed what is decoded of a batch; images that the network is dead for are broken too."""
        if not pixels:
            return []
        images = self.run.inputs.tensors(list(pixels.values()))
        try:
            return [self.run.embed(images, batch=len(images))]
        except BrokenEmbeddingsError:
            found = []
            for place, image in zip(pixels, images, strict=True):
                try:
                    found.append(self.run.embed(image[None]))
                except BrokenEmbeddingsError:
                    broken[place] = "the network gives it a vector of zeros, NaN or infinity"
            if not found:  # it is not for the images
                raise
            return found

    def _write(self, number: int, key: str, block: _Block) -> None:
        head = {"key": key, "dim": block.z.shape[1], "broken": list(block.broken.items())}
        content = json.dumps(head).encode() + b"\n" + block.z.astype("<f4").tobytes()
        with writing(self._path(number), AGAIN):
            write_sealed(self._path(number), lambda file: file.write(content))

    def _read(self, number: int) -> tuple[str, _Block] | None:
        """Read a block and its key; None if it is not there, or damaged."""
        try:
            head, _, rest = read_sealed(self._path(number)).partition(b"\n")
            about = json.loads(head)
            z = np.frombuffer(rest, "<f4").reshape(-1, about["dim"] or 1)
            return str(about["key"]), _Block(z, {int(place): str(why) for place, why in about["broken"]})
        except (OSError, ValueError, KeyError, TypeError):
            return None
