"""Labels: the classes of images, and whether triplets can be made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from robustmetric.errors import UserError


def check_labels(labels: Tensor, count: int) -> None:
    """Reject `labels` that do not name a class for each of `count` images.

    >>> check_labels(torch.tensor([4, 4, 4]), 2)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: labels have shape (3,) for 2 images; they must have shape (2,): one class for ...
    """
    if not isinstance(labels, Tensor) or labels.dtype not in WHOLE:
        found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise UserError(
            f"labels must be a tensor of integers, not {found}: use torch.as_tensor(labels).long()"
        )
    if labels.shape != (count,):
        raise UserError(
            f"labels have shape {tuple(labels.shape)} for {count} images; they must have shape ({count},): "
            "one class for each image"
        )
    if count == 0:
        raise UserError("the batch is empty; give at least two images of one class and one of another")


WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""The integers that torch computes with; uint16 and larger it can do little but store."""


def check_classes(labels: Tensor) -> None:
    """Reject `labels` (N,) from which no triplet can be made.

    >>> check_classes(torch.tensor([4, 4, 4]))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: all 3 images are of class 4; a triplet needs a negative: put at least two ...
    """
    count = len(labels)
    classes, sizes = labels.unique(return_counts=True)
    if len(classes) == 1:
        raise UserError(
            f"all {count} images are of class {int(classes)}; a triplet needs a negative: put at least two "
            "classes in a batch"
        )
    if sizes.max() == 1:
        raise UserError(
            f"no two of the {count} images share a class; a triplet needs a positive: draw batches with at "
            "least two images of some class"
        )
