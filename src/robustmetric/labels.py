"""Labels: the classes of images, and whether triplets can be made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from robustmetric.errors import UserError, describe

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""The integers that torch computes with; uint16 and larger it can do little but store."""


def check_integers(name: str, values: Tensor, count: int, what: str) -> None:
    """Reject `values`, the argument `name`, unless they are `count` integers; `what` says of what.

    >>> check_integers("cameras", torch.ones(2), 2, "the camera of each image")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: cameras must be a tensor of integers of shape (2,), the camera of each ...
    """
    if not isinstance(values, Tensor) or values.dtype not in WHOLE or values.shape != (count,):
        told = f"{name} must be a tensor of integers of shape ({count},), {what}, not {describe(values)}"
        raise UserError(told, parameter=name)


def check_labels(labels: Tensor, count: int) -> None:
    """Reject `labels` that do not name a class for each of `count` images, at least one."""
    check_integers("labels", labels, count, "the class of each image")
    if count == 0:
        raise UserError("the batch is empty; give at least two images of one class and one of another")


def check_classes(labels: Tensor) -> None:
    """Reject `labels` (N,) from which no triplet can be made.

    >>> check_classes(torch.tensor([4, 4, 4]))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: 3 images of one class give no triplet: draw two of a class and one of another
    """
    count, classes = len(labels), len(labels.unique())
    if classes in (1, count):
        kinds = "one class" if classes == 1 else "as many classes"
        raise UserError(f"{count} images of {kinds} give no triplet: draw two of a class and one of another")
