"""The data sets of the paper: whether one that is given has the classes that cells need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from robustmetric import data
from robustmetric.data.base import Split
from robustmetric.errors import UserError
from robustmetric.experiments.cells import Job, Scale
from robustmetric.experiments.outcome import Outcome

CLASSES = {"cub": (100, 100), "cars": (98, 98), "sop": (11318, 11316)}
"""The classes that the published networks were trained on, and tested on."""

_SPLITS: tuple[Split, Split] = ("train", "test")


def check_data(name: str, root: Path | None, queries: int | None = None) -> str | None:
    """Refuse a data set from which no cell can be made; say what it has less of than the published one.

    A triplet takes two classes, and so does a ranking that can go wrong. There must be as many test images as
    `queries` are attacked.

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
    if queries is not None and queries > len(found[1]):
        raise UserError(
            f"queries must be at most {len(found[1]):,}, the test images of {name}, not {queries:,}",
            parameter="queries",
        )
    wanted = CLASSES.get(name)
    if wanted is None or tuple(counts) == wanted:
        return None
    told = " and ".join(
        f"{count:,} of {want:,} {split} classes"
        for split, count, want in zip(("training", "test"), counts, wanted, strict=True)
    )
    return f"{name} has {told} of the published one: figures cannot be compared with it"


def check_same(scale: Scale, found: Mapping[Job, Outcome | None]) -> None:
    """Refuse outcomes of cells that were made from other images than those in the roots of a `scale`."""
    for name, root in scale.roots.items():
        if name not in CLASSES or not root.exists():
            continue
        test = data.load(name, root, "test")
        now = (len(test), len(test.labels.unique()))
        for outcome in (one for job, one in found.items() if one and one.record and job.task.data == name):
            about = outcome.record.data  # type: ignore[union-attr]
            if (was := (about.images + len(about.skipped), about.classes)) != now:
                raise UserError(
                    f"{outcome.folder} is of other images: {was[0]:,} test images of {was[1]:,} classes, and "
                    f"{root} has {now[0]:,} of {now[1]:,}; give the root that it was made with, or another "
                    "--out",
                    parameter="root",
                )
