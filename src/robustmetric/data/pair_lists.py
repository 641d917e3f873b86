"""Lists of pairs of images to verify: a table of files, or the format of LFW's pairs.txt."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from robustmetric.data.base import ImageSet
from robustmetric.data.decode import SUFFIXES
from robustmetric.data.listing import integer, listed, quoted, read_text
from robustmetric.data.table import DELIMITERS, TRUTH
from robustmetric.errors import UserError

_LFW = re.compile(r"\s*\d+(\s+\d+)?\s*")  # the first line: how many sets of how many pairs


class _Pair(NamedTuple):
    line: int
    first: Path
    second: Path
    same: bool
    names: tuple[str, str] | None  # of the persons


@dataclass(frozen=True, eq=False)
class PairList:
    """The `images` of a list of pairs, each once, and the `pairs` (P, 2) as positions of them.

    Images that are said to be same, directly or by way of others, have one label.
    """

    images: ImageSet
    pairs: Tensor

    def among(self, files: tuple[Path, ...]) -> Tensor:
        """Return the pairs (Q, 2) as positions of `files`, which are some of the images.

        >>> empty = ImageSet("pairs", "test", torch.zeros(3).long(), ("a",), files=tuple(map(Path, "xyz")))
        >>> PairList(empty, torch.tensor([[0, 1], [0, 2]])).among((Path("x"), Path("z")))
        tensor([[0, 1]])
        """
        place = {file: k for k, file in enumerate(files)}
        known = torch.tensor([place.get(file, -1) for file in self.images.files or ()])
        found = known[self.pairs]
        return found[(found >= 0).all(1)]


def read_pairs(file: Path, root: Path | None = None) -> PairList:
    r"""Read a list of pairs: lines of two files and 1 if they are of one class, 0 if not.

    Fields are separated by commas, semicolons or tabs; a first line whose third field is neither is a header.
    Files are relative to `root`, by default the folder of the list, `file`. A list whose first line is one or
    two numbers is taken for LFW's pairs.txt: `name 1 2` are two images of a person, `name 1 other 2` images
    of two, and image 1 of `name` is the file `name/name_0001.jpg`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for image in ("1.png", "2.png", "3.png"):
    ...         Path(folder, image).touch()
    ...     _ = Path(folder, "pairs.csv").write_text("first,second,same\n1.png,2.png,1\n1.png,3.png,0\n")
    ...     found = read_pairs(Path(folder, "pairs.csv"))
    >>> found.images.labels, found.pairs.tolist()
    (tensor([0, 0, 1]), [[0, 1], [0, 2]])
    """
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no list of pairs {file}; give a file of two images and 0 or 1 a line"
        )
    base = file.parent if root is None else root
    text = read_text(file)
    first = text.partition("\n")[0]
    pairs = list(
        _lfw(file, text, base) if first.strip() and _LFW.fullmatch(first) else _table(file, text, base)
    )
    if not pairs:
        raise UserError(f"{file} lists no pairs; give lines of two files and 1 if they are same, 0 if not")
    paths = list(dict.fromkeys(path for pair in pairs for path in (pair.first, pair.second)))
    label = _labels(file, pairs, paths)
    hint = f"correct the paths, which are relative to {base}"
    images = listed("pairs", "test", [(path, label[path]) for path in paths], _names(label), hint=hint)
    place = {path: k for k, path in enumerate(paths)}
    rows = [[place[pair.first], place[pair.second]] for pair in pairs]
    return PairList(replace(images, root=base), torch.tensor(rows, dtype=torch.long))


def _table(file: Path, text: str, base: Path) -> Iterator[_Pair]:
    line = text.partition("\n")[0]
    delimiter = max(DELIMITERS, key=line.count)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    number = 0
    try:
        for fields in reader:
            number, before = reader.line_num, number
            where, texts = f"{file}, line {number}:", [field.strip() for field in fields]
            if not any(texts):
                continue
            if len(texts) != 3:
                raise UserError(
                    f"{where} {len(texts)} fields; expected two files and 1 if they are same or 0 if not, "
                    "separated by commas, semicolons or tabs"
                )
            same = TRUTH.get(texts[2].lower())
            if same is None and before == 0:
                continue  # a header
            if same is None:
                raise UserError(f"{where} the third field is {quoted(texts[2])}; expected 1 or 0")
            yield _pair(where, number, texts[0], texts[1], base, same)
    except csv.Error as error:
        raise UserError(
            f"{file}, line {number + 1}: this is not CSV ({error}); close quotes, and give each pair a line"
        ) from None


def _pair(where: str, number: int, first: str, second: str, base: Path, same: bool) -> _Pair:
    if not first or not second:
        raise UserError(f"{where} a file is empty; every pair needs two")
    if first == second:
        raise UserError(f"{where} {quoted(first)} makes no pair with itself; give two images")
    return _Pair(number, base / first, base / second, same, None)


def _lfw(file: Path, text: str, base: Path) -> Iterator[_Pair]:
    for number, line in enumerate(text.split("\n")[1:], start=2):
        fields, where = line.split(), f"{file}, line {number}:"
        if not fields:
            continue
        if len(fields) not in (3, 4):
            raise UserError(
                f"{where} {quoted(line.strip())} is not 'name 1 2', two images of a person, or "
                "'name 1 other 2', images of two"
            )
        name, other = fields[0], fields[0] if len(fields) == 3 else fields[2]
        if len(fields) == 4 and name == other:
            raise UserError(f"{where} two persons are both {quoted(name)}; write 'name 1 2' for one")
        numbers = [integer(fields[k], f"{where} the number of an image") for k in (1, len(fields) - 1)]
        if name == other and numbers[0] == numbers[1]:
            raise UserError(f"{where} {quoted(line.strip())} makes no pair of an image with itself; give two")
        first, second = (
            _image(base / person, f"{person}_{k:04d}")
            for person, k in zip((name, other), numbers, strict=True)
        )
        yield _Pair(number, first, second, len(fields) == 3, (name, other))


def _image(folder: Path, stem: str) -> Path:
    """Find the image of this name, whatever it ends in; one that is missing is called .jpg."""
    names = [f"{stem}{suffix}" for suffix in SUFFIXES]
    try:
        return next((folder / name for name in names if (folder / name).is_file()), folder / names[0])
    except OSError:  # a name that no file can have
        return folder / names[0]


def _labels(file: Path, pairs: list[_Pair], paths: list[Path]) -> dict[Path, str]:
    """Name the class of each image: the person, or the first image that it is the same as."""
    if all(pair.names is not None for pair in pairs):
        return {
            p: n for pair in pairs for p, n in zip((pair.first, pair.second), pair.names or (), strict=True)
        }
    above: dict[Path, Path] = {path: path for path in paths}

    def root_of(path: Path) -> Path:
        while above[path] != path:
            above[path] = above[above[path]]
            path = above[path]
        return path

    for pair in pairs:
        if pair.same:
            above[root_of(pair.second)] = root_of(pair.first)
    for pair in pairs:
        if not pair.same and root_of(pair.first) == root_of(pair.second):
            raise UserError(
                f"{file}, line {pair.line}: the images are said to be different, and by other lines they are "
                "same: correct one of them"
            )
    return {path: str(root_of(path)) for path in paths}


def _names(label: dict[Path, str]) -> dict[str, str]:
    return {name: name for name in label.values()}
