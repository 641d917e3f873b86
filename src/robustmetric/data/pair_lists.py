"""Lists of pairs of images to verify: a table of files, or the format of LFW's pairs.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from robustmetric.data.base import ImageSet
from robustmetric.data.decode import SUFFIXES
from robustmetric.data.listing import listed, read_text
from robustmetric.data.table import DELIMITERS, TRUTH, csv_rows
from robustmetric.errors import UserError, brief

_LFW = re.compile(r"\s*\d+(\s+\d+)?\s*")  # the first line: how many sets of how many pairs


class _Pair(NamedTuple):
    line: int
    files: tuple[Path, Path]
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
        """Return the pairs (Q, 2) as positions of `files`, which are some of the images."""
        place = {file: k for k, file in enumerate(files)}
        known = torch.tensor([place.get(file, -1) for file in self.images.files or ()])
        found = known[self.pairs]
        return found[(found >= 0).all(1)]


def read_pairs(file: Path, root: Path | None = None) -> PairList:
    """Read a list of pairs: lines of two files and 1 if they are of one class, 0 if not.

    Fields are separated by commas, semicolons or tabs; a first line whose third field is neither is a header.
    Files are relative to `root`, by default the folder of the list, `file`. A list whose first line is one or
    two numbers is taken for LFW's pairs.txt: `name 1 2` are two images of a person, `name 1 other 2` images
    of two, and image 1 of `name` is the file `name/name_0001.jpg`.
    """
    if not file.is_file():
        raise UserError(f"there is no list of pairs {file}; give a file of two images and 0 or 1 a line")
    base = file.parent if root is None else root
    text = read_text(file)
    first = text.partition("\n")[0]
    pairs = list((_lfw if first.strip() and _LFW.fullmatch(first) else _table)(file, text, base))
    if not pairs:
        raise UserError(f"{file} lists no pairs; give lines of two files and 1 if they are same, 0 if not")
    for pair in pairs:
        if pair.files[0] == pair.files[1]:
            raise UserError(f"{file}, line {pair.line}: an image makes no pair with itself; give two")
    paths = list(dict.fromkeys(path for pair in pairs for path in pair.files))
    label = _labels(file, pairs, paths)
    images = listed("pairs", "test", paths, [label[path] for path in paths])
    place = {path: k for k, path in enumerate(paths)}
    rows = [[place[path] for path in pair.files] for pair in pairs]
    return PairList(replace(images, root=base), torch.tensor(rows, dtype=torch.long))


def _table(file: Path, text: str, base: Path) -> Iterator[_Pair]:
    delimiter = max(DELIMITERS, key=text.partition("\n")[0].count)
    for number, (line, fields) in enumerate(csv_rows(file, text, delimiter)):
        if not any(fields):
            continue
        same = TRUTH.get(fields[2].lower()) if len(fields) == 3 else None
        if same is None and len(fields) == 3 and number == 0:
            continue  # a header
        if same is None or not all(fields):
            raise UserError(
                f"{file}, line {line}: {brief(delimiter.join(fields))} is no pair; expected two files and "
                "1 if they are same or 0 if not, separated by commas, semicolons or tabs"
            )
        yield _Pair(line, (base / fields[0], base / fields[1]), same, None)


def _lfw(file: Path, text: str, base: Path) -> Iterator[_Pair]:
    for number, line in enumerate(text.split("\n")[1:], start=2):
        if not (fields := line.split()):
            continue
        name, other = fields[0], fields[0] if len(fields) == 3 else fields[2 % len(fields)]
        numbers = [fields[1 % len(fields)], fields[-1]]
        same = len(fields) == 3
        right = len(fields) in (3, 4) and all(one.isdecimal() and len(one) < 9 for one in numbers)
        if not right or (name == other and not same):
            raise UserError(
                f"{file}, line {number}: {brief(line.strip())} is not 'name 1 2', two images of a person, or "
                "'name 1 other 2', images of two"
            )
        first, second = (
            _image(base / person, f"{person}_{int(k):04d}")
            for person, k in zip((name, other), numbers, strict=True)
        )
        yield _Pair(number, (first, second), same, (name, other))


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
        return {p: n for pair in pairs for p, n in zip(pair.files, pair.names or (), strict=True)}
    above: dict[Path, Path] = {path: path for path in paths}

    def root_of(path: Path) -> Path:
        while above[path] != path:
            above[path] = above[above[path]]
            path = above[path]
        return path

    for pair in pairs:
        if pair.same:
            above[root_of(pair.files[1])] = root_of(pair.files[0])
    for pair in pairs:
        if not pair.same and root_of(pair.files[0]) == root_of(pair.files[1]):
            raise UserError(
                f"{file}, line {pair.line}: the images are said to be different, and by other lines they are "
                "same: correct one of them"
            )
    return {path: str(root_of(path)) for path in paths}
