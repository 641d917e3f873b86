"""The data sets of the paper: whether one that is given has the classes that cells need."""

from __future__ import annotations

from pathlib import Path

from robustmetric import data
from robustmetric.data.base import Split
from robustmetric.validate import UserError

CLASSES = {"cub": (100, 100), "cars": (98, 98), "sop": (11318, 11316)}
"""The classes that the published networks were trained on, and tested on."""

_SPLITS: tuple[Split, Split] = ("train", "test")


def check_data(name: str, root: Path | None) -> str | None:
    """Refuse a data set from which no cell can be made; say what it has less of than the published one.

    A triplet takes two classes, and so does a ranking that can go wrong.

    >>> check_data("digits", None) is None
    True
    """
    found = [data.load(name, root, split) for split in _SPLITS]
    counts = [len(images.labels.unique()) for images in found]
    for split, count in zip(_SPLITS, counts, strict=True):
        if count < 2:
            raise UserError(
                f"the {split} split of {name} has {count} class, and each cell needs at least 2: add images "
                "of other classes, or give another data set",
                parameter="data",
            )
    wanted = CLASSES.get(name)
    if wanted is None or tuple(counts) == wanted:
        return None
    told = " and ".join(
        f"{count:,} of {want:,} {split} classes"
        for split, count, want in zip(("training", "test"), counts, wanted, strict=True)
    )
    return f"{name} has {told} of the published one: figures cannot be compared with it"
