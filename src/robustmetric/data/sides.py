"""Who asks and who is ranked: decoded images as queries and gallery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robustmetric.data.cache import Pixels
from robustmetric.data.pairs import ImageArray
from robustmetric.validate import UserError


@dataclass(frozen=True, eq=False)
class Side:
    """N images that ask or are ranked, with their labels (N,) and, if they are known, cameras (N,)."""

    images: ImageArray
    labels: Tensor
    cameras: Tensor | None = None
    files: Sequence[str] | None = None


@dataclass(frozen=True, eq=False)
class Sides:
    """Queries, and the gallery if it is another one than the queries themselves.

    `own` (Q,) is each query's position in that gallery, −1 for none; labels count `classes` on both sides.
    """

    queries: Side
    classes: tuple[str, ...]
    gallery: Side | None = None
    own: Tensor | None = None


def by_marks(images: Pixels, crop: int | None = None, files: Sequence[str] | None = None) -> Sides:
    """Part images into queries and gallery as the data marks them; without marks each is both.

    `files` names the images.

    >>> import numpy as np
    >>> grey, labels = np.zeros((3, 8, 8, 1), np.uint8), torch.tensor([0, 0, 0])
    >>> asks, ranked = torch.tensor([True, True, False]), torch.tensor([False, True, True])
    >>> sides = by_marks(Pixels(grey, labels, ("zero",), is_query=asks, is_gallery=ranked))
    >>> len(sides.queries.images), len(sides.gallery.images), sides.own
    (2, 2, tensor([-1,  0]))
    """
    every = torch.ones(len(images), dtype=torch.bool)
    asks = every if images.is_query is None else images.is_query
    ranked = every if images.is_gallery is None else images.is_gallery
    if not asks.any() or not ranked.any():
        raise UserError(
            f"of {len(images)} images {int(asks.sum())} are queries and {int(ranked.sum())} are in the "
            "gallery; mark some as each (is_query, is_gallery), or leave the marks out"
        )

    def side(some: Tensor) -> Side:
        rows = some.nonzero()[:, 0]
        return Side(
            ImageArray(images.pixels, crop, rows.numpy()),
            images.labels[rows],
            None if images.cameras is None else images.cameras[rows],
            None if files is None else [files[row] for row in rows.tolist()],
        )

    if asks.all() and ranked.all():
        return Sides(side(every), images.classes)
    place = torch.where(ranked, ranked.cumsum(0) - 1, -1)
    return Sides(side(asks), images.classes, side(ranked), place[asks])


def of_two(
    queries: Pixels,
    gallery: Pixels,
    crop: int | None = None,
    files: Sequence[str] | None = None,
    gallery_files: Sequence[str] | None = None,
) -> Sides:
    """Let images query others: classes are the same if their names are, and so are cameras.

    Where the data marks queries and gallery, those alone ask and are ranked. `files` and `gallery_files` name
    the images.

    >>> import numpy as np
    >>> grey = np.zeros((2, 8, 8, 1), np.uint8)
    >>> first, second = (Pixels(grey, torch.tensor([0, 1]), names) for names in (("b", "c"), ("a", "b")))
    >>> sides = of_two(first, second)
    >>> sides.classes, sides.queries.labels, sides.gallery.labels
    (('a', 'b', 'c'), tensor([1, 2]), tensor([0, 1]))
    """
    if (queries.cameras is None) != (gallery.cameras is None):
        known, unknown = ("queries", "gallery") if gallery.cameras is None else ("gallery", "queries")
        raise UserError(
            f"the cameras of the {known} are known and those of the {unknown} are not: give both, or neither"
        )
    classes = tuple(sorted({*queries.classes, *gallery.classes}))
    place = {name: label for label, name in enumerate(classes)}
    # A table numbers its cameras by their names, each table by itself.
    names = sorted({*queries.columns.get("camera", ()), *gallery.columns.get("camera", ())})
    number = {name: k for k, name in enumerate(names)}

    def side(images: Pixels, marked: Tensor | None, files: Sequence[str] | None) -> Side:
        cameras = images.cameras
        if cameras is not None and (texts := images.columns.get("camera")):
            cameras = torch.tensor([number[text] for text in texts])
        labels = torch.tensor([place[name] for name in images.classes])[images.labels]
        rows = torch.arange(len(images)) if marked is None else marked.nonzero()[:, 0]
        if len(rows) == 0:
            raise UserError(f"none of {len(images)} images is marked (is_query, is_gallery): mark some")
        return Side(
            ImageArray(images.pixels, crop, rows.numpy()),
            labels[rows],
            None if cameras is None else cameras[rows],
            None if files is None else [files[row] for row in rows.tolist()],
        )

    asks, ranked = side(queries, queries.is_query, files), side(gallery, gallery.is_gallery, gallery_files)
    return Sides(asks, classes, ranked)
