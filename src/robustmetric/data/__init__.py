"""Data sets by name: labelled images as files or as pixels, in splits for training, validation and test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from robustmetric.data.base import Half, ImageSet, Split, merged
from robustmetric.data.cars import read_cars
from robustmetric.data.cub import read_cub
from robustmetric.data.digits import read_digits
from robustmetric.data.folder import read_folder
from robustmetric.data.idx import read_fashion_mnist, read_mnist
from robustmetric.data.inshop import read_inshop
from robustmetric.data.listing import check_retrievable
from robustmetric.data.market import read_market1501
from robustmetric.data.sop import read_sop
from robustmetric.data.table import read_csv
from robustmetric.registry import lookup
from robustmetric.validate import UserError

__all__ = ["DATA", "VALIDATION", "ImageSet", "Split", "load", "own_validation"]

DATA: dict[str, Callable[[Path | None, Half], ImageSet]] = {
    "digits": read_digits,
    "mnist": read_mnist,
    "fashion-mnist": read_fashion_mnist,
    "cub": read_cub,
    "cars": read_cars,
    "sop": read_sop,
    "inshop": read_inshop,
    "market1501": read_market1501,
    "folder": read_folder,
    "csv": read_csv,
}

VALIDATION: dict[str, Callable[[Path | None, Literal["validation"]], ImageSet]] = {
    "folder": read_folder,
    "csv": read_csv,
}
"""Those that may set validation images apart; where there are none, their readers give an empty set."""


def load(name: str, root: Path | str | None = None, split: Split = "train") -> ImageSet:
    """Read one split of a data set, one of ``DATA``; nothing is downloaded, and no image is decoded.

    ``root`` is where the data set lies (``~`` is the home directory); digits needs none. Labels (N,) count
    the classes of the split from 0. Some class must have two images, except in "all", which is every image,
    with the classes of all splits merged by name. "validation" is what the data itself sets apart.

    >>> train = load("digits")
    >>> train.pixels.shape, train.labels[:3], train.classes[:3]
    ((1000, 8, 8, 1), tensor([0, 1, 2]), ('0', '1', '2'))
    >>> len(load("digits", split="all"))
    1797
    >>> load("cubs")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown data set 'cubs' (did you mean 'cub'?); known: cars, csv, cub, ...
    """
    reader = lookup("data set", name, DATA)
    lookup("split", split, dict.fromkeys(get_args(Split)))
    place = _place(root)
    if split == "validation":
        images = own_validation(name, root)
        if images is None:
            raise UserError(
                f"{name} sets no validation images apart; choose train, test or all, or set some apart: a "
                "folder by a directory val beside train and test, a CSV file by rows with the split "
                "validation beside test"
            )
        return images
    if split == "all":
        parts = [reader(place, "train"), reader(place, "test")]
        if name in VALIDATION:
            parts.insert(1, VALIDATION[name](place, "validation"))
        return merged(parts)
    return check_retrievable(reader(place, split))


def own_validation(name: str, root: Path | str | None = None) -> ImageSet | None:
    """Read the images that the data itself sets apart to choose the weights by; None if it does not.

    These are the rows of a table with the split validation, if others say test, and what a folder has in
    val or validation beside train and test.

    >>> own_validation("digits") is None
    True
    """
    lookup("data set", name, DATA)
    if name not in VALIDATION:
        return None
    images = VALIDATION[name](_place(root), "validation")
    return check_retrievable(images) if len(images) else None


def _place(root: Path | str | None) -> Path | None:
    return None if root is None else Path(root).expanduser()
