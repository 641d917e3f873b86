"""In-Shop Clothes Retrieval: 52,712 images of 7,982 items; of those that test, queries and a gallery."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from robustmetric.data.base import Half, ImageSet
from robustmetric.data.listing import (
    check_distinct,
    check_root,
    integer,
    listed,
    quoted,
    read_table,
    read_text,
    with_queries,
)
from robustmetric.errors import UserError

PUBLISHED = (
    "In-Shop Clothes Retrieval is published at "
    "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html"
)
LIST = "list_eval_partition.txt"
HEADER = ("image_name", "item_id", "evaluation_status")
STATUS: dict[str, Half] = {"train": "train", "query": "test", "gallery": "test"}


def read_inshop(root: Path | None, split: Half) -> ImageSet:
    """Read In-Shop from the directory that holds ``list_eval_partition.txt``, itself or in Eval or Anno.

    The split is that of the list: train; query and gallery test. Images lie below the root or below ``Img``,
    and keep the order of the list.

    >>> read_inshop(None, "train")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: inshop needs a root: the directory that holds list_eval_partition.txt (or Eval ...
    """
    needs = f"the directory that holds {LIST} (or Eval or Anno with it) and the images. {PUBLISHED}"
    root = check_root("inshop", root, needs)
    file = next((f for f in (root / LIST, root / "Eval" / LIST, root / "Anno" / LIST) if f.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{root} lacks {LIST} of inshop; give {needs}")
    lines = _read(file)
    folder = _images(root, lines[0][0]) if lines else root
    chosen = [(folder / image, item, status) for image, item, status in lines if STATUS[status] == split]
    rows = [(image, item) for image, item, _ in chosen]
    hint = f"unpack the images again. {PUBLISHED}"
    images = listed("inshop", split, rows, {item: item for _, item in rows}, hint=hint)
    if split == "train":
        return images
    return with_queries(images, [status == "query" for _, _, status in chosen])


def _read(file: Path) -> list[tuple[str, str, str]]:
    """Return image, item and status of each row."""
    promised = integer(read_text(file).partition("\n")[0].strip(), f"{file}, line 1: the number of images")
    rows = []
    for line, (image, item, status) in read_table(file, *HEADER, skip=1):
        if status not in STATUS:
            raise UserError(
                f"{file}, line {line}: evaluation_status is {quoted(status)}; expected {', '.join(STATUS)}"
            )
        rows.append((image, item, status))
    if len(rows) != promised:
        raise UserError(
            f"{file} promises {promised} images and lists {len(rows)}; fetch it again. {PUBLISHED}"
        )
    check_distinct(file, (image for image, _, _ in rows))
    return rows


def _images(root: Path, image: str) -> Path:
    """Return the directory that the list's paths are relative to."""
    top = PurePosixPath(image).parts[:1]
    return root / "Img" if os.path.isdir(root.joinpath("Img", *top)) else root  # noqa: PTH112 (of any length)
