"""Data sets that are arrays: MNIST and Fashion-MNIST from their idx files, and scikit-learn's digits."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from robustmetric.data.base import Half, ImageSet
from robustmetric.data.listing import check_root, count_classes
from robustmetric.errors import UserError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SIZE = 28
CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
}
LIMIT = 1 << 28  # bytes of a file, unpacked; the published ones have at most 47 million
TRAINING = 1000  # of the digits


def read_digits(root: Path | None, split: Half) -> ImageSet:
    """Read scikit-learn's 1797 digits as pixels (N, 8, 8, 1): the first 1000 train, the others test.

    Their values 0 to 16 are spread over 0 to 255.
    """
    from sklearn.datasets import load_digits  # takes a second, which other data sets need not wait for

    if root is not None:
        raise UserError(f"digits come with scikit-learn and take no root, but got {root}; leave it out")
    bunch = load_digits()
    part = slice(TRAINING) if split == "train" else slice(TRAINING, None)
    pixels = np.rint(bunch.images[part, :, :, None] * (255 / 16)).astype(np.uint8)
    labels, classes = count_classes(bunch.target[part].tolist())
    return ImageSet("digits", split, labels, tuple(str(digit) for digit in classes), pixels=pixels)


def read_mnist(name: str, root: Path | None, split: Half) -> ImageSet:
    """Read MNIST or Fashion-MNIST from a directory of idx files, as pixels (N, 28, 28, 1)."""
    if root is None and name == "fashion-mnist" and DEBIAN.is_dir():
        root = DEBIAN
    root = check_root(name, root, "the directory that holds its idx files")
    pixels, targets = (read_idx(_find(name, root, split, kind, k), k) for kind, k in KINDS.items())
    if pixels.shape[1:] != (SIZE, SIZE) or len(pixels) != len(targets):
        raise UserError(
            f"the {split} files in {root} hold images of shape {pixels.shape} and {len(targets)} labels; "
            f"{name} has as many labels as images, of {SIZE} × {SIZE} pixels"
        )
    names = CLASSES[name]
    if (wrong := targets[targets >= len(names)]).size:
        raise UserError(f"{root} holds the label {wrong[0]}; {name}'s labels are 0 to {len(names) - 1}")
    labels, classes = count_classes(targets.tolist())
    return ImageSet(name, split, labels, tuple(names[k] for k in classes), pixels=pixels[..., None])


KINDS = {"images": 3, "labels": 1}  # their dimensions


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of bytes, gzipped or not, as an array with that many dimensions."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"  # browsers unpack a file and leave the .gz in its name
        with gzip.open(path) if packed else path.open("rb") as stream:
            head = stream.read(4 + 4 * dimensions)
            if head[:4] != bytes([0, 0, 8, dimensions]) or len(head) < 4 + 4 * dimensions:
                raise UserError(
                    f"{path} is no idx file of bytes with {dimensions} dimensions; fetch it again"
                )
            shape = struct.unpack(f">{dimensions}I", head[4:])
            data = bytearray(stream.read(min(math.prod(shape), LIMIT) + 1))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is a damaged or truncated gzip file ({error}); fetch it again") from None
    if math.prod(shape) != len(data):
        raise UserError(
            f"{path} is truncated or damaged: its header promises {' × '.join(map(str, shape))} bytes, and "
            f"{'more' if len(data) > math.prod(shape) else len(data)} follow; fetch it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _find(name: str, root: Path, split: Half, kind: str, dimensions: int) -> Path:
    # The dot is how the files are called where someone unpacked them by hand.
    prefix = {"train": "train", "test": "t10k"}[split]
    stems = [f"{prefix}-{kind}{mark}idx{dimensions}-ubyte" for mark in "-."]
    for path in [root / f"{stem}{suffix}" for stem in stems for suffix in ("", ".gz")]:
        if path.is_file():
            return path
    raise UserError(f"{root} lacks {stems[0]} (or {stems[1]}; either may end in .gz) of {name}")
