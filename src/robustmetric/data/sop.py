"""Stanford Online Products: 120,053 images of 22,634 products, of which 11,318 train."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from robustmetric.data.base import Half, ImageSet
from robustmetric.data.listing import check_distinct, find_root, integer, listed, read_table
from robustmetric.errors import UserError, shorten

PUBLISHED = (
    "Stanford Online Products is published with 'Deep Metric Learning via Lifted Structured Feature "
    "Embedding' at https://cvgl.stanford.edu/projects/lifted_struct/"
)
HEADER = ("image_id", "class_id", "super_class_id", "path")


class _Row(NamedTuple):
    image: int
    label: int
    path: str


def read_sop(root: Path | None, split: Half) -> ImageSet:
    """Read Stanford Online Products from its directory, or the one that holds ``Stanford_Online_Products``.

    The split is the published one, ``Ebay_train.txt`` and ``Ebay_test.txt``, which share no class. Images
    keep the order of the file; a class is called by its number.

    >>> read_sop(None, "train")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: sop needs a root: the directory that holds Ebay_train.txt, Ebay_test.txt. ...
    """
    holds = ("Ebay_train.txt", "Ebay_test.txt")
    folder = find_root("sop", root, holds, PUBLISHED, nested="Stanford_Online_Products")
    train, test = (_read(folder / file) for file in holds)
    for what, shared in (
        ("images", {row.image for row in train} & {row.image for row in test}),
        ("classes", {row.label for row in train} & {row.label for row in test}),
        ("paths", {row.path for row in train} & {row.path for row in test}),
    ):
        if shared:
            raise UserError(
                f"{len(shared)} {what} are in both Ebay_train.txt and Ebay_test.txt of {folder} "
                f"({shorten(sorted(shared))}); the splits share none: fetch both files again. {PUBLISHED}"
            )
    rows = [(folder / row.path, row.label) for row in (train if split == "train" else test)]
    names = {label: str(label) for _, label in rows}
    return listed("sop", split, rows, names, hint=f"unpack the images again. {PUBLISHED}")


def _read(path: Path) -> list[_Row]:
    rows: dict[int, _Row] = {}
    for line, (image_id, class_id, _, name) in read_table(path, *HEADER):
        where = f"{path}, line {line}:"
        image = integer(image_id, f"{where} image_id")
        if image in rows:
            raise UserError(f"{where} image_id {image} was already given; each must be there once")
        rows[image] = _Row(image, integer(class_id, f"{where} class_id"), name)
    check_distinct(path, (row.path for row in rows.values()))
    return list(rows.values())
