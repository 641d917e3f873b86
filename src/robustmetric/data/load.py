"""Reads a split of a data set: a built-in one by its name, or one that a function of the user's reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from robustmetric.data import published
from robustmetric.data.arrays import read_digits, read_mnist
from robustmetric.data.base import ImageSet, Part, Split, merged
from robustmetric.data.folder import read_folder
from robustmetric.data.listing import check_retrievable
from robustmetric.data.table import read_csv
from robustmetric.errors import UserError, check_signature, describe, instance
from robustmetric.registry import Registry, lookup, registry
from robustmetric.usercode import UserCodeError, own_traceback

DATA: Registry[ImageSet] = registry("data set")
"""All data sets: functions that take a root, which may be None, and a split, and return an ImageSet."""

# In the order in which they are shown.
for _name, _read in {
    "digits": read_digits,
    **published.originals(
        {
            "mnist": read_mnist,
            "fashion-mnist": read_mnist,
            "cub": published.read_cub,
            "cars": published.read_cars,
            "sop": published.read_sop,
            "inshop": published.read_inshop,
            "market1501": published.read_market1501,
        }
    ),
    "folder": read_folder,
    "csv": read_csv,
}.items():
    DATA.register(_name)(_read)


def load(name: str, root: Path | str | None = None, split: Split = "train") -> ImageSet:
    """Read one split of a data set; nothing is downloaded, and no image is decoded.

    `name` is one of `DATA`, or `file.py:function` for a function `(root, split) -> ImageSet`, with its
    options in brackets, `file.py:function(year=2020)`. `root` is the dataset directory (`~` is the home
    directory); digits needs none. Labels (N,) count the classes of the `split` from 0. Some class must have
    two images, except in the split "all", which is every image, with the classes of all splits merged by
    name. "validation" is what the data itself sets apart.

    >>> train = load("digits")
    >>> train.pixels.shape, train.labels[:3], train.classes[:3]
    ((1000, 8, 8, 1), tensor([0, 1, 2]), ('0', '1', '2'))
    """
    reader = _Reader(name, root)
    lookup("split", split, dict.fromkeys(get_args(Split)))
    if split == "all":
        apart = reader("validation") if reader.sets_apart else None
        parts = [reader("train"), *([] if apart is None else [apart]), reader("test")]
        return replace(merged(parts), root=reader.root)
    images = reader(split) if split != "validation" else reader.validation()
    if images is None:
        raise UserError(
            f"{name} sets no validation images apart; choose train, test or all, or set some apart: a "
            "folder by a directory val beside train and test, a CSV file by rows with the split "
            "validation beside test, a function of your own by the decorator sets_apart",
            parameter="split",
        )
    return check_retrievable(images)


def own_validation(name: str, root: Path | str | None = None) -> ImageSet | None:
    """Read the images that the data itself sets apart to choose the weights by; None if it does not.

    These are the rows of a table with the split validation, if others say test, and what a folder has in
    val or validation beside train and test. `name` and `root` are those of `load`.
    """
    images = _Reader(name, root).validation()
    return None if images is None else check_retrievable(images)


class _Reader:
    """A data set at its root: reads its splits, and checks what a function of the user's returns."""

    def __init__(self, name: str, root: Path | str | None) -> None:
        self.name = name
        self.read: Callable[..., Any] = DATA.bind(name)
        check_signature(f"the data set {name}", self.read, "root, split")
        self.root = None if root is None else Path(root).expanduser()
        plain = getattr(self.read, "func", self.read)  # options bind the function
        self.sets_apart = bool(getattr(plain, "sets_apart", False))

    def __call__(self, split: Part) -> ImageSet:
        try:
            images = self.read(self.root, split)
        except UserError:
            raise
        except Exception as error:
            if (own := own_traceback(error)) is None:
                raise
            raise UserCodeError(
                f"the data set {self.name} failed on its {split} split with {type(error).__name__}: "
                f"{error}\n{own}"
            ) from error
        _check(f"the {split} split of the data set {self.name}", images)
        found: ImageSet = replace(images, root=self.root)
        return found

    def validation(self) -> ImageSet | None:
        images = self("validation") if self.sets_apart else None
        return images if images is not None and len(images) else None


def _check(what: str, images: object) -> None:
    """Refuse what is no image set with labels that count its classes."""
    images = instance(what, images, ImageSet)
    labels: object = images.labels
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.ndim != 1:
        raise UserError(f"labels of {what} must be a tensor (N,) of int64, not {describe(labels)}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(images.classes):
        raise UserError(
            f"labels of {what} must count the classes, 0 to {len(images.classes) - 1}, not "
            f"{int(labels.min())} to {int(labels.max())}"
        )
    pixels: Any = images.pixels
    if pixels is not None and (pixels.ndim != 4 or pixels.shape[3] not in (1, 3) or pixels.dtype != "uint8"):
        raise UserError(f"pixels of {what} must be 8 bits (N, H, W, 1 or 3), not {describe(pixels)}")
