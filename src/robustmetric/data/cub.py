"""CUB-200-2011, birds: 11,788 images of 200 classes, of which the first 100 train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from robustmetric.data.base import Half, ImageSet
from robustmetric.data.listing import check_distinct, find_root, half, integer, listed, read_fields
from robustmetric.errors import UserError, shorten

PUBLISHED = "CUB-200-2011 is published at https://www.vision.caltech.edu/datasets/cub_200_2011/"


def read_cub(root: Path | None, split: Half) -> ImageSet:
    """Read CUB-200-2011 from its directory, or from the one that holds ``CUB_200_2011``.

    The first half of the classes, by number, trains; the rest tests. Images keep the order of
    ``images.txt``. Names come from ``classes.txt`` or, without it, from the folders of the images.

    >>> read_cub(None, "train")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: cub needs a root: the directory that holds images.txt, image_class_labels.txt, ...
    """
    holds = ("images.txt", "image_class_labels.txt", "images")
    folder = find_root("cub", root, holds, PUBLISHED, nested="CUB_200_2011")
    images = _numbered(folder / "images.txt", "image_id", "path")
    check_distinct(folder / "images.txt", images.values())
    labels = _labels(folder / "image_class_labels.txt")
    _check_same("images", folder / "images.txt", images, folder / "image_class_labels.txt", labels)

    names = {labels[image]: _folder(path) for image, path in images.items()}
    if (file := folder / "classes.txt").exists():
        named = _numbered(file, "class_id", "name")
        _check_same("classes", file, named, folder / "image_class_labels.txt", names)
        names = named
    _check_folders(folder, images, labels, names)

    classes = set(half(names, split))
    rows = [(folder / "images" / path, labels[k]) for k, path in images.items() if labels[k] in classes]
    return listed("cub", split, rows, names, hint=f"unpack the images again. {PUBLISHED}")


def _numbered(path: Path, number: str, text: str) -> dict[int, str]:
    """Read lines of a number and a text, in their order."""
    rows: dict[int, str] = {}
    for line, (first, second) in read_fields(path, number, text):
        where = f"{path}, line {line}: {number}"
        key = integer(first, where)
        if key in rows:
            raise UserError(f"{where} {key} was already given; each must be there once")
        rows[key] = second
    return rows


def _labels(path: Path) -> dict[int, int]:
    labels = _numbered(path, "image_id", "class_id")
    return {image: integer(text, f"{path}: class_id of image {image}") for image, text in labels.items()}


def _check_same(
    what: str, file: Path, ids: Mapping[int, object], other: Path, others: Mapping[int, object]
) -> None:
    for has, lacks, extra in ((file, other, set(ids) - set(others)), (other, file, set(others) - set(ids))):
        if extra:
            raise UserError(
                f"{has} and {lacks.name} disagree: {len(extra)} {what} are in {has.name} only "
                f"({shorten(sorted(extra))}); take both files from one copy of the data set"
            )


def _check_folders(
    root: Path, images: Mapping[int, str], labels: Mapping[int, int], names: Mapping[int, str]
) -> None:
    # Each class has its folder, so labels that were shifted or mixed up are seen here.
    wrong = [
        f"{path} is labelled {names[labels[image]]}"
        for image, path in images.items()
        if _folder(path) != names[labels[image]]
    ]
    if wrong:
        raise UserError(
            f"the labels in {root / 'image_class_labels.txt'} disagree with the folders of {len(wrong)} "
            f"images: {shorten(wrong)}; take all files from one copy of the data set"
        )


def _folder(path: str) -> str:
    return PurePosixPath(path).parent.name
