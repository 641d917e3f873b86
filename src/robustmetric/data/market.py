"""Market-1501, pedestrians seen by six cameras: 32,668 images of 1,501 identities, of which 751 train."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from robustmetric.data.base import Half, ImageSet
from robustmetric.data.listing import find_root, listed, with_queries
from robustmetric.errors import UserError, shorten

PUBLISHED = (
    "Market-1501 is published with 'Scalable Person Re-identification: A Benchmark' at "
    "http://www.liangzheng.org/Project/project_reid.html"
)
FOLDERS = TRAIN, GALLERY, QUERY = "bounding_box_train", "bounding_box_test", "query"
NAME = re.compile(r"(-1|\d+)_c(\d+)\D")  # 0002_c1s1_000451_03.jpg, and DukeMTMC-reID's 0001_c2_f0046182.jpg
JUNK, DISTRACTOR = -1, 0


class _Image(NamedTuple):
    file: Path
    identity: str
    camera: int


def read_market1501(root: Path | None, split: Half) -> ImageSet:
    """Read Market-1501, or a data set like it, from its directory or that which holds Market-1501-v15.09.15.

    ``bounding_box_train`` trains; ``query`` is searched for in ``bounding_box_test``. File names tell
    identity and camera. Junk (identity -1) is left out, distractors (0000) are in the gallery alone.

    >>> read_market1501(None, "train")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: market1501 needs a root: the directory that holds bounding_box_train, ...
    """
    folder = find_root("market1501", root, FOLDERS, PUBLISHED, nested="Market-1501-v15.09.15")
    found = (
        _images(folder / TRAIN) if split == "train" else _images(folder / QUERY) + _images(folder / GALLERY)
    )
    rows = [(image.file, image.identity) for image in found]
    hint = f"unpack the images again. {PUBLISHED}"
    images = listed("market1501", split, rows, {name: name for _, name in rows}, hint=hint)
    images = replace(images, cameras=torch.tensor([image.camera for image in found], dtype=torch.long))
    if split == "train":
        return images
    return with_queries(images, [image.file.parent.name == QUERY for image in found])


def _images(folder: Path) -> list[_Image]:
    """List the images of one directory that count, in the order of their names."""
    visible = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    files = [file for file in visible if file.suffix.lower() in (".jpg", ".jpeg", ".png")]
    names = [NAME.match(file.name) for file in files]
    if wrong := [file.name for file, name in zip(files, names, strict=True) if name is None]:
        raise UserError(
            f"{len(wrong)} images in {folder} do not tell identity and camera by a name such as "
            f"0002_c1s1_000451_03.jpg: {shorten(wrong)}; rename or remove them"
        )
    images = [
        _Image(file, name[1], int(name[2]))
        for file, name in zip(files, names, strict=True)
        if name is not None
    ]
    left_out = (JUNK,) if folder.name == GALLERY else (JUNK, DISTRACTOR)
    return [image for image in images if int(image.identity) not in left_out]
