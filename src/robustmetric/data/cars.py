"""Cars-196: 16,185 images of 196 classes, of which the first 98 train."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from robustmetric.data.base import Half, ImageSet
from robustmetric.data.listing import check_distinct, find_root, half, listed, read_bytes
from robustmetric.errors import UserError, shorten

PUBLISHED = (
    "Cars-196 is published at https://ai.stanford.edu/~jkrause/cars/car_dataset.html: take car_ims.tgz and "
    "cars_annos.mat, not the devkit, which has no labels for half of the images"
)

# MATLAB's numbers for the types of elements, and for the classes of the arrays made of them.
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
TEXTS = {1: "utf-8", 2: "utf-8", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
CELL, STRUCT, CHAR, NUMERIC = 1, 2, 4, range(6, 16)
MOST = 1 << 19  # elements of an array; the published ones have about a hundred thousand
LIMIT = 1 << 25  # bytes of all unpacked variables; the published ones have about ten million


def read_cars(root: Path | None, split: Half) -> ImageSet:
    """Read Cars-196 from the directory that holds ``cars_annos.mat`` and ``car_ims``.

    The first half of the classes, by number, trains; the rest tests. Images keep the order of the file.

    >>> read_cars(None, "train")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: cars needs a root: the directory that holds cars_annos.mat, car_ims. Cars-196 ...
    """
    folder = find_root("cars", root, ("cars_annos.mat", "car_ims"), PUBLISHED)
    file = folder / "cars_annos.mat"
    variables = read_mat(file)
    if missing := [name for name in ("annotations", "class_names") if name not in variables]:
        raise UserError(f"{file} lacks the variable {' and '.join(missing)}; fetch the original. {PUBLISHED}")
    images = _images(file, variables["annotations"])
    names = _names(file, variables["class_names"])
    check_distinct(file, (path for path, _ in images))

    used = {number for _, number in images}
    if unknown := sorted(used - set(names)):
        raise UserError(
            f"{file} has images of the classes {shorten(unknown)}, but class_names has {len(names)} names, "
            f"for 1 to {len(names)}; fetch the original. {PUBLISHED}"
        )
    if unused := sorted(set(names) - used):
        raise UserError(
            f"{file} names {len(names)} classes and has no image of {len(unused)} of them "
            f"({shorten(unused)}); fetch the original. {PUBLISHED}"
        )
    classes = set(half(names, split))
    rows = [(folder / path, number) for path, number in images if number in classes]
    return listed("cars", split, rows, names, hint=f"unpack car_ims.tgz again. {PUBLISHED}")


def read_mat(file: Path) -> dict[str, Any]:
    """Read the variables of a MATLAB 5 file, packed or not: text as str, numbers and cells as flat lists.

    A struct array is a dict of a list for each field; arrays of other kinds are None. This is not left to
    SciPy, whose reader takes the whole process down on a damaged file.

    >>> import tempfile
    >>> from scipy.io import savemat
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     savemat(Path(folder, "a.mat"), {"name": "Audi", "doors": [3, 5]})
    ...     read_mat(Path(folder, "a.mat"))
    {'name': 'Audi', 'doors': [3, 5]}
    """
    data = read_bytes(file, LIMIT)
    version = data[124:128]
    if version in (b"\x00\x02IM", b"\x02\x00MI"):
        raise UserError(f"{file} is a MATLAB 7.3 file; save it with -v7 in MATLAB, or fetch the original")
    if version not in (b"\x00\x01IM", b"\x01\x00MI"):
        raise UserError(
            f"{file} is not a MATLAB 5 file: it starts with {data[:16]!r}; fetch the original. {PUBLISHED}"
        )
    order = "<" if version.endswith(b"IM") else ">"
    try:
        return dict(_variables(memoryview(data)[128:], order, LIMIT))
    except Exception as error:  # a damaged file may break any step
        reason = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{file} is damaged or truncated ({reason}); fetch it again. {PUBLISHED}") from error


def _variables(data: memoryview, order: str, room: int) -> Iterator[tuple[str, Any]]:
    """Return name and value of each variable; all that are packed unpack to less than `room` bytes."""
    for kind, content in _elements(data, order):
        if kind == COMPRESSED:
            unpacker = zlib.decompressobj()
            unpacked = unpacker.decompress(content, room)
            room -= len(unpacked)
            if not unpacker.eof or room <= 0:
                raise UserError("a packed variable is cut off or too large")
            yield from _variables(memoryview(unpacked), order, room)
        elif kind == MATRIX:
            yield _array(content, order)
        else:
            raise UserError(f"an element of type {kind} where a variable should be")


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Return type and content of each element."""
    position = count = 0
    while position < len(data):
        count += 1
        if count > MOST:
            raise UserError(f"more than {MOST:,} elements in an array")
        kind, size = struct.unpack_from(f"{order}II", data, position)
        position += 8
        if kind >> 16:  # a small element: length and type share four bytes, the content has the other four
            kind, size = kind & 0xFFFF, kind >> 16
            position -= 4
        if position + size > len(data):
            raise UserError(f"an element of {size} bytes where {len(data) - position} are left")
        yield kind, data[position : position + size]
        position += size
        if kind != COMPRESSED:
            position += -position % 8  # others are filled up to eight bytes


def _array(data: memoryview, order: str) -> tuple[str, Any]:
    """Return an array's name and value."""
    if not data:  # how a cell or field that was never set is written
        return "", []
    (_, flags), *elements = _elements(data, order)
    kind = struct.unpack_from(f"{order}I", flags)[0] & 0xFF
    if kind not in (CELL, STRUCT, CHAR, *NUMERIC):
        return "", None
    _, (_, name), *content = elements
    return str(name, "ascii"), _value(kind, content, order)


def _value(kind: int, content: list[tuple[int, memoryview]], order: str) -> Any:
    if kind == CELL:
        return [_array(part, order)[1] for _, part in content]
    if kind == STRUCT:
        (_, size), (_, names), *parts = content
        width = struct.unpack(f"{order}i", size)[0]
        fields = [str(names[i : i + width], "ascii").split("\0")[0] for i in range(0, len(names), width)]
        values = [_array(part, order)[1] for _, part in parts]
        if len(values) % max(len(fields), 1):
            raise UserError(f"a struct array of {len(fields)} fields with {len(values)} values")
        return {field: values[i :: len(fields)] for i, field in enumerate(fields)}
    if kind == CHAR:
        code = TEXTS[content[0][0]]
        return str(content[0][1], code if code == "utf-8" else f"{code}-{'le' if order == '<' else 'be'}")
    return np.frombuffer(content[0][1], dtype=order + NUMBERS[content[0][0]]).tolist()


def _images(file: Path, annotations: Any) -> list[tuple[str, int]]:
    """Return path and class number of each image."""
    fields = ("relative_im_path", "class")
    if not isinstance(annotations, dict) or not set(fields) <= set(annotations):
        raise UserError(
            f"annotations in {file} is not a struct array with the fields {' and '.join(fields)}; "
            f"fetch the original. {PUBLISHED}"
        )
    images = []
    pairs = zip(annotations["relative_im_path"], annotations["class"], strict=True)
    for image, (path, label) in enumerate(pairs, start=1):
        if not (isinstance(path, str) and path and _is_class(label)):
            raise UserError(
                f"annotation {image} in {file} has relative_im_path {path!r} and class {label!r}; "
                f"expected a path and a whole number. {PUBLISHED}"
            )
        images.append((path, int(label[0])))
    return images


def _is_class(value: Any) -> bool:
    # MATLAB's numbers are arrays, and floating-point unless made otherwise.
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], int | float):
        return False
    return float(value[0]).is_integer()


def _names(file: Path, class_names: Any) -> dict[int, str]:
    if not isinstance(class_names, list) or not all(isinstance(name, str) for name in class_names):
        raise UserError(
            f"class_names in {file} is not a cell array of names; fetch the original. {PUBLISHED}"
        )
    return dict(enumerate(class_names, start=1))
