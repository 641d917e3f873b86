"""Data sets by name: labelled images as files or as pixels, split into training and test images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

from robustmetric.data.base import ImageSet, Split
from robustmetric.data.cars import read_cars
from robustmetric.data.cub import read_cub
from robustmetric.data.digits import read_digits
from robustmetric.data.folder import read_folder
from robustmetric.data.idx import read_fashion_mnist, read_mnist
from robustmetric.data.sop import read_sop
from robustmetric.data.table import read_csv
from robustmetric.registry import lookup

__all__ = ["DATA", "ImageSet", "Split", "load"]

DATA: dict[str, Callable[[Path | None, Split], ImageSet]] = {
    "digits": read_digits,
    "mnist": read_mnist,
    "fashion-mnist": read_fashion_mnist,
    "cub": read_cub,
    "cars": read_cars,
    "sop": read_sop,
    "folder": read_folder,
    "csv": read_csv,
}


def load(name: str, root: Path | str | None = None, split: Split = "train") -> ImageSet:
    """Read one split of a data set, one of ``DATA``; nothing is downloaded, and no image is decoded.

    ``root`` is where the data set lies (``~`` is the home directory); digits needs none. Labels (N,) count
    the classes of the split from 0.

    >>> train = load("digits")
    >>> train.pixels.shape, train.labels[:3], train.classes[:3]
    ((1000, 8, 8, 1), tensor([0, 1, 2]), ('0', '1', '2'))
    >>> load("cubs")
    Traceback (most recent call last):
    ...
    ValueError: unknown data set 'cubs' (did you mean 'cub'?); known: cars, csv, cub, ...
    """
    reader = lookup("data set", name, DATA)
    lookup("split", split, dict.fromkeys(get_args(Split)))
    return reader(None if root is None else Path(root).expanduser(), split)
