"""Cars-196 from a real .mat file, and files that are none."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from numpy.typing import NDArray
from scipy.io import loadmat, savemat

from robustmetric.data import cars as cars_module
from robustmetric.data import load
from robustmetric.data.cars import read_mat

Maker = Callable[..., Path]

# What MATLAB itself wrote, from version 5.3 on, little-endian and big-endian, comes with SciPy.
MATLAB = Path(scipy.io.__file__).parent / "matlab" / "tests" / "data"
KINDS = ("cell", "cellnest", "structarr", "structnest", "string", "unicode", "double", "minus", "emptycell")


def variables(file: Path) -> dict[str, Any]:
    return {name: value for name, value in loadmat(file).items() if not name.startswith("__")}


def flat(value: NDArray[Any]) -> object:
    """Write SciPy's arrays as read_mat does."""
    if value.dtype.names:
        items = value.flatten(order="F")
        return {field: [flat(item[field]) for item in items] for field in value.dtype.names}
    if value.dtype.kind == "U":
        return "".join(value.tolist())
    items = value.flatten(order="F")
    return [flat(item) for item in items] if value.dtype == object else items.tolist()


@pytest.mark.parametrize("packed", [True, False])
def test_the_first_half_of_the_classes_trains(packed: bool, make_cars: Maker, tmp_path: Path) -> None:
    root = make_cars(tmp_path, (2, 3, 3, 2), packed=packed)
    train, test = load("cars", root), load("cars", root, "test")
    assert train.classes == ("Make Model 1 Sedan 2012", "Make Model 2 Sedan 2012")
    assert test.classes == ("Make Model 3 Sedan 2012", "Make Model 4 Sedan 2012")
    assert train.labels.tolist() == [0, 0, 1, 1, 1]
    assert test.labels.tolist() == [0, 0, 0, 1, 1]
    assert train.files is not None
    assert train.files[0] == root / "car_ims" / "000001.jpg"
    assert test.files is not None
    assert test.files[0] == root / "car_ims" / "000006.jpg"


def test_at_full_size_98_classes_train(make_cars: Maker, tmp_path: Path) -> None:
    make_cars(tmp_path, [2] * 196)
    train, test = load("cars", tmp_path), load("cars", tmp_path, "test")
    assert (len(train.classes), len(test.classes)) == (98, 98)
    assert test.classes[0] == "Make Model 99 Sedan 2012"


def test_classes_of_any_type_of_number_are_read(make_cars: Maker, tmp_path: Path) -> None:
    root = make_cars(tmp_path)
    expected = load("cars", root).labels
    for kind in (np.float64, np.uint16, np.int32):
        content = variables(root / "cars_annos.mat")
        for item in content["annotations"][0]:
            item["class"] = item["class"].astype(kind)
        savemat(root / "cars_annos.mat", content)
        assert load("cars", root).labels.equal(expected)


@pytest.mark.parametrize("part", ["cars_annos.mat", "car_ims"])
def test_a_missing_part_is_named(part: str, make_cars: Maker, tmp_path: Path) -> None:
    root = make_cars(tmp_path)
    (root / part).rename(root / "elsewhere")
    with pytest.raises(FileNotFoundError, match=f"lacks {part} of cars; .*not the devkit"):
        load("cars", root)


def header(version: bytes) -> bytes:
    return b"MATLAB MAT-file".ljust(124) + version


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is not a MATLAB 5 file: it starts with b''; fetch the original"),
        (b"<!DOCTYPE html><html>" * 20, r"is not a MATLAB 5 file: it starts with b'<!DOCTYPE html><'"),
        (bytes(4096), r"is not a MATLAB 5 file"),  # SciPy takes this for a file of MATLAB 4
        (header(b"\0\2IM") + b"\x89HDF", r"is a MATLAB 7\.3 file; save it with -v7 in MATLAB"),
        (header(b"\0\1IM"), r"lacks the variable annotations and class_names"),
        (header(b"\0\1IM") + b"\x0e\0\0", r"is damaged or truncated \(error"),
        (header(b"\0\1IM") + struct.pack("<II", 14, 99), r"damaged or truncated .*99 bytes where 0 are left"),
        (
            header(b"\0\1IM") + struct.pack("<IId", 9, 8, 1),
            r"an element of type 9 where a variable should be",
        ),
        (header(b"\0\1IM") + struct.pack("<II", 15, 4) + b"junk", r"damaged or truncated .*decompressing"),
    ],
)
def test_what_is_no_matlab_5_file_is_refused(
    content: bytes, message: str, make_cars: Maker, tmp_path: Path
) -> None:
    root = make_cars(tmp_path)
    (root / "cars_annos.mat").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load("cars", root)
    assert str(root / "cars_annos.mat") in str(caught.value)


def test_a_variable_that_unpacks_without_end_is_refused(
    make_cars: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_cars(tmp_path)
    bomb = zlib.compress(bytes(1 << 20))
    content = header(b"\0\1IM") + struct.pack("<II", 15, len(bomb)) + bomb
    (root / "cars_annos.mat").write_bytes(content)
    monkeypatch.setattr(cars_module, "LIMIT", 1 << 16)
    with pytest.raises(ValueError, match="cut off or too large"):
        load("cars", root)


@pytest.mark.parametrize("packed", [True, False])
def test_no_damage_does_more_than_raise(packed: bool, make_cars: Maker, tmp_path: Path) -> None:
    root = make_cars(tmp_path, packed=packed)
    file = root / "cars_annos.mat"
    original, draw = file.read_bytes(), random.Random(0)  # noqa: S311
    for _ in range(300):
        damaged = bytearray(original)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.choice((0, 1, 8, 255, draw.randrange(256)))
        file.write_bytes(damaged[: draw.choice((len(damaged), draw.randrange(len(damaged))))])
        try:
            load("cars", root)
        except (ValueError, FileNotFoundError) as error:
            assert str(root) in str(error)  # noqa: PT017


def spoil(root: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    savemat(root / "cars_annos.mat", change(variables(root / "cars_annos.mat")))


def with_field(content: dict[str, Any], field: str, value: object) -> dict[str, Any]:
    content["annotations"][0, 2][field] = value
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"class_names": c["class_names"]}, "lacks the variable annotations;"),
        (lambda c: {"annotations": c["annotations"]}, "lacks the variable class_names;"),
        (lambda c: {**c, "annotations": [1, 2]}, "annotations in .* is not a struct array with the fields"),
        (
            lambda c: {**c, "annotations": {"class": 1, "test": 0}},
            "fields relative_im_path and class",
        ),
        (
            lambda c: {**c, "class_names": c["class_names"][:, :3]},
            "images of the classes 4, but class_names has 3",
        ),
        (
            lambda c: {**c, "annotations": c["annotations"][:, :8]},
            r"names 4 classes and has no image of 1 .*\(4\)",
        ),
        (lambda c: {**c, "class_names": "Audi"}, "class_names in .* is not a cell array of names"),
        (
            lambda c: with_field(c, "class", 0),
            "images of the classes 0, but class_names has 4 names, for 1 to 4",
        ),
        (
            lambda c: with_field(c, "class", 1.5),
            r"annotation 3 in .* and class \[1\.5\]; expected a path and a",
        ),
        (lambda c: with_field(c, "class", [1, 2]), r"annotation 3 in .* and class \[1, 2\]"),
        (lambda c: with_field(c, "class", "1"), "annotation 3 in .* and class '1'"),
        (lambda c: with_field(c, "relative_im_path", 7), r"annotation 3 in .* relative_im_path \[7\]"),
        (lambda c: with_field(c, "relative_im_path", ""), "annotation 3 in .* has relative_im_path"),
        (
            lambda c: with_field(c, "relative_im_path", "car_ims/000001.jpg"),
            "more than once: car_ims/000001.jpg",
        ),
    ],
)
def test_annotations_that_disagree_are_refused(
    change: Callable[[dict[str, Any]], Mapping[str, Any]], message: str, make_cars: Maker, tmp_path: Path
) -> None:
    root = make_cars(tmp_path)
    spoil(root, change)
    with pytest.raises(ValueError, match=message):
        load("cars", root)


@pytest.mark.parametrize("packed", [True, False])
def test_the_mat_reader_agrees_with_scipy(packed: bool, make_cars: Maker, tmp_path: Path) -> None:
    file = make_cars(tmp_path, packed=packed) / "cars_annos.mat"
    assert read_mat(file) == {name: flat(value) for name, value in variables(file).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_mat_reader_agrees_with_scipy_on_files_that_matlab_wrote(kind: str) -> None:
    if not MATLAB.is_dir():
        pytest.skip("this SciPy came without its test files")
    files = list(MATLAB.glob(f"test{kind}_[5-9]*.mat"))
    assert files
    for file in files:
        assert repr(read_mat(file)) == repr({name: flat(value) for name, value in variables(file).items()})


def test_other_variables_do_no_harm(make_cars: Maker, tmp_path: Path) -> None:
    root = make_cars(tmp_path)
    spoil(root, lambda c: {**c, "empty": {}, "more": scipy.sparse.eye(2).tocsc(), "z": np.array([1j])})
    assert len(load("cars", root)) == 5
