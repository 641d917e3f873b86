"""What every data set gives: images, as files or as pixels, their labels and what else is known of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robustmetric.errors import UserError

Split = Literal["train", "validation", "test", "all"]
Part = Literal["train", "validation", "test"]
Half = Literal["train", "test"]
"""What every data set has."""

F = TypeVar("F", bound=Callable[..., Any])

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels of the upright image
Columns = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """One split of a data set: N images of known classes, either as files or as pixels in memory.

    `name` is that of the data set, `split` that of its part. `labels` (N,) count the classes of this split
    from 0, in the order of `classes`. The images are N `files`, or `pixels` (N, H, W, C) with 8 bits. What
    else may be known of them:

    - `boxes` (N, 4) int64: left, top, right, bottom of the part that counts, in pixels of the upright image,
      right and bottom exclusive; a row of zeros is the whole image. Files only.
    - `cameras` (N,) int64: which camera took them.
    - `is_query`, `is_gallery` (N,) bool: which are searched for, and which are searched; without them,
      every image is both.
    - `columns`: further columns of a table by name, N texts each.
    - `root`: where the data set lies; `load` sets it.
    - `unread`: how many files of each ending were left aside, as they are no images that are read.

    >>> grey = np.zeros((2, 8, 8, 1), dtype=np.uint8)
    >>> len(ImageSet("tiny", "train", torch.tensor([0, 0]), ("zero",), pixels=grey))
    2
    """

    name: str
    split: Split
    labels: Tensor
    classes: tuple[str, ...]
    files: tuple[Path, ...] | None = None
    pixels: NDArray[np.uint8] | None = None
    boxes: NDArray[np.int64] | None = None
    cameras: Tensor | None = None
    is_query: Tensor | None = None
    is_gallery: Tensor | None = None
    columns: Columns = field(default_factory=dict)
    root: Path | None = None
    unread: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.files is None) == (self.pixels is None):
            raise UserError("an image set holds either files or pixels")
        if self.pixels is not None and self.boxes is not None:
            raise UserError("boxes cut parts out of files; cut pixels that are in memory yourself")
        if self.boxes is not None and self.boxes.shape != (len(self), 4):
            raise UserError(f"boxes are {self.boxes.shape}; expected ({len(self)}, 4), one for each image")
        known = {name: getattr(self, name) for name in ("labels", "cameras", "is_query", "is_gallery")}
        for name, values in (known | dict(self.columns)).items():
            if values is not None and len(values) != len(self):
                whose = f"{name} of {self.name} ({self.split})"
                raise UserError(f"{whose} has {len(values)} values for {len(self)} images; each needs one")

    def __len__(self) -> int:
        return len(self.files if self.files is not None else self.pixels)  # type: ignore[arg-type]

    def box(self, index: int) -> Box | None:
        """Return the box of the image at `index`, or None for the whole.

        >>> boxes = np.array([[0, 0, 0, 0], [1, 2, 5, 6]])
        >>> two = ImageSet("mine", "train", torch.tensor([0, 0]), ("x",), (Path("a"), Path("b")), boxes=boxes)
        >>> two.box(0), two.box(1)
        (None, (1, 2, 5, 6))
        """
        left, top, right, bottom = (0, 0, 0, 0) if self.boxes is None else self.boxes[index].tolist()
        return (left, top, right, bottom) if right else None

    def take(self, rows: Sequence[int] | Tensor) -> ImageSet:
        """Return the images in these `rows`, in this order, with all that is known of them.

        Classes stay as they are, even those without an image left.

        >>> files = (Path("a.png"), Path("b.png"), Path("c.png"))
        >>> three = ImageSet("mine", "train", torch.tensor([0, 1, 1]), ("x", "y"), files)
        >>> three.take([2, 0]).files, three.take([2, 0]).labels
        ((PosixPath('c.png'), PosixPath('a.png')), tensor([1, 0]))
        """
        index = torch.as_tensor(rows, dtype=torch.long)
        places = index.tolist()

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index]

        return replace(
            self,
            labels=self.labels[index],
            files=self.files and tuple(self.files[i] for i in places),
            pixels=None if self.pixels is None else self.pixels[index.numpy()],
            boxes=None if self.boxes is None else self.boxes[index.numpy()],
            cameras=some(self.cameras),
            is_query=some(self.is_query),
            is_gallery=some(self.is_gallery),
            columns={name: tuple(texts[i] for i in places) for name, texts in self.columns.items()},
        )


def sets_apart(reader: F) -> F:
    """Mark the `reader` of a data set that may set validation images apart.

    Such a reader is asked for the split "validation" too, and returns an empty set where there are none.

    >>> @sets_apart
    ... def mine(root, split):
    ...     return ImageSet("mine", split, torch.zeros(0).long(), (), files=())
    >>> mine.sets_apart
    True
    """
    reader.sets_apart = True  # type: ignore[attr-defined]
    return reader


def merged(parts: Sequence[ImageSet]) -> ImageSet:
    """Put the splits of a data set together as "all": classes are the same if their names are.

    Images that are not said to be queries or gallery images are both, as everywhere.

    >>> train = ImageSet("mine", "train", torch.tensor([0, 1]), ("x", "y"), (Path("a.png"), Path("b.png")))
    >>> test = ImageSet("mine", "test", torch.tensor([0]), ("a",), (Path("c.png"),))
    >>> merged([train, test]).classes, merged([train, test]).labels
    (('a', 'x', 'y'), tensor([1, 2, 0]))
    """
    classes = tuple(sorted({name for part in parts for name in part.classes}))
    place = {name: label for label, name in enumerate(classes)}
    labels = [place[part.classes[label]] for part in parts for label in part.labels.tolist()]
    pixels = [part.pixels for part in parts if part.pixels is not None]
    files = [part.files for part in parts if part.files is not None]
    cameras = [part.cameras for part in parts if part.cameras is not None]
    boxes = [np.zeros((len(part), 4), np.int64) if part.boxes is None else part.boxes for part in parts]
    names = dict.fromkeys(chain.from_iterable(part.columns for part in parts))
    return ImageSet(
        parts[0].name,
        "all",
        torch.tensor(labels, dtype=torch.long),
        classes,
        files=tuple(chain.from_iterable(files)) if files else None,
        pixels=np.concatenate(pixels) if pixels else None,
        boxes=None if all(part.boxes is None for part in parts) else np.concatenate(boxes),
        cameras=torch.cat(cameras) if len(cameras) == len(parts) else None,
        is_query=_marks([part.is_query for part in parts], parts),
        is_gallery=_marks([part.is_gallery for part in parts], parts),
        columns={
            name: tuple(chain.from_iterable(part.columns.get(name, ("",) * len(part)) for part in parts))
            for name in names
        },
    )


def _marks(marks: Sequence[Tensor | None], parts: Sequence[ImageSet]) -> Tensor | None:
    if all(mark is None for mark in marks):
        return None
    pairs = zip(marks, parts, strict=True)
    return torch.cat([torch.ones(len(part), dtype=torch.bool) if m is None else m for m, part in pairs])
