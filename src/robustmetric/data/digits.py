"""The handwritten digits that come with scikit-learn: 1797 images of 8×8, nothing to fetch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from robustmetric.data.base import Half, ImageSet
from robustmetric.data.listing import count_classes
from robustmetric.errors import UserError

TRAINING = 1000


def read_digits(root: Path | None, split: Half) -> ImageSet:
    """Read scikit-learn's digits as pixels (N, 8, 8, 1): the first 1000 train, the other 797 test.

    Their values 0 to 16 are spread over 0 to 255.

    >>> read_digits(None, "test").pixels.shape
    (797, 8, 8, 1)
    """
    from sklearn.datasets import load_digits  # takes a second, which other data sets need not wait for

    if root is not None:
        raise UserError(f"digits come with scikit-learn and take no root, but got {root}; leave it out")
    bunch = load_digits()
    part = slice(TRAINING) if split == "train" else slice(TRAINING, None)
    pixels = np.rint(bunch.images[part, :, :, None] * (255 / 16)).astype(np.uint8)
    labels, classes = count_classes(bunch.target[part].tolist())
    return ImageSet("digits", split, labels, tuple(str(digit) for digit in classes), pixels=pixels)
