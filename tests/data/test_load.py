"""What holds for every data set: names, splits, labels, order, and what is refused in the same words."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import robustmetric as rm
from robustmetric.data import ImageSet, Split, load, own_validation
from robustmetric.data.base import Half
from robustmetric.data.listing import half

Maker = Callable[..., Path]

ZERO_SHOT = ("cub", "cars", "sop", "inshop", "market1501", "folder", "csv")
HALVES: tuple[Half, ...] = get_args(Half)
NEED_ROOT = ("mnist", *ZERO_SHOT)


@pytest.fixture(scope="session")
def make(make_any: Callable[..., Path]) -> Callable[[str, Path, Sequence[int]], Path]:
    """Write a data set by name with so many images for each class; classes come in sorted order."""

    def write(name: str, root: Path, counts: Sequence[int]) -> Path:
        middle = len(half(range(len(counts)), "train"))
        names = [f"class {i}" for i, count in enumerate(counts) for _ in range(count)]
        arguments: dict[str, tuple[Any, ...]] = {
            **dict.fromkeys(("sop", "inshop", "market1501"), (counts[:middle], counts[middle:])),
            "folder": ({f"class {i}": count for i, count in enumerate(counts)},),
            "csv": (names,),
        }
        return make_any(name, root, *arguments.get(name, (counts,)))

    return write


def test_an_unknown_data_set_gets_the_nearest_and_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown data set 'fashion'") as caught:
        load("fashion")
    assert "did you mean 'fashion-mnist'?" in str(caught.value)
    split: Any = "val"
    with pytest.raises(ValueError, match=r"unknown split 'val'.*known: all, test, train, validation"):
        load("digits", split=split)


def test_digits_are_the_first_thousand_and_the_rest_spread_over_a_byte() -> None:
    train, test = load("digits"), load("digits", split="test")
    assert train.pixels is not None
    assert test.pixels is not None
    assert (train.name, train.split, test.split) == ("digits", "train", "test")
    assert (train.pixels.shape, test.pixels.shape) == ((1000, 8, 8, 1), (797, 8, 8, 1))
    assert train.pixels.dtype == np.uint8
    assert np.unique(train.pixels).tolist() == [round(value * 255 / 16) for value in range(17)]
    assert train.classes == test.classes == tuple("0123456789")
    assert train.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    torch.from_numpy(train.pixels)  # warns if it could not be written to


def test_a_data_set_of_ones_own_can_be_added() -> None:
    @rm.register("data set", "mine")
    def mine(root: Path | None, split: Split) -> ImageSet:
        return ImageSet("mine", split, torch.zeros(2).long(), (split,), files=(Path(str(root)), Path("b")))

    assert load("mine", "here", "test").files == (Path("here"), Path("b"))
    assert load("mine", "here", "all").classes == ("test", "train")
    assert own_validation("mine", "here") is None


@pytest.mark.parametrize("name", [*NEED_ROOT, "fashion-mnist"])
def test_a_root_is_asked_for_and_must_be_a_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(rm.UserError, match=rf"there is no .*nowhere for {name}; give .*that holds"):
        load(name, tmp_path / "nowhere")
    if name != "fashion-mnist":
        with pytest.raises(rm.UserError, match=f"^{name} needs a root: .*that holds"):
            load(name)
    if name != "csv":
        (tmp_path / "file").touch()
        with pytest.raises(rm.UserError, match=f"there is no directory .*file for {name}"):
            load(name, tmp_path / "file")


def test_digits_take_no_root_and_no_options(tmp_path: Path) -> None:
    with pytest.raises(rm.UserError, match=r"take no root, but got .*leave it out"):
        load("digits", tmp_path)
    with pytest.raises(rm.UserError, match=r"'digits\(first=3\)' has no option 'first'"):
        load("digits(first=3)")


@pytest.mark.parametrize("name", [name for name in ZERO_SHOT if name != "folder"])
def test_missing_image_files_are_counted_and_the_first_five_listed(
    name: str, make: Callable[[str, Path, Sequence[int]], Path], tmp_path: Path
) -> None:
    root = make(name, tmp_path, (9, 9))
    files = load(name, root).files
    assert files is not None
    for file in files[1:8]:
        file.unlink()
        if name == "market1501":  # it lists what is there, so that only a broken link can be missing
            file.symlink_to(file)
    with pytest.raises(rm.UserError, match=f"^7 of 9 image files of the train split of {name}") as caught:
        load(name, root)
    assert [str(file) in str(caught.value) for file in files] == [False, *[True] * 5, *[False] * 3]
    caught.match("and 2 more; ")


@settings(max_examples=12)
@given(counts=st.lists(st.integers(1, 3), min_size=2, max_size=5))
@pytest.mark.parametrize("name", ZERO_SHOT)
def test_labels_count_from_zero_in_a_fixed_order_and_splits_share_no_class(
    name: str, make: Callable[[str, Path, Sequence[int]], Path], counts: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = make(name, Path(folder), counts)
        middle = (len(counts) + 1) // 2
        seen: list[ImageSet] = []
        for split, part in zip(HALVES, (counts[:middle], counts[middle:]), strict=True):
            if max(part) < 2:
                with pytest.raises(ValueError, match="no class"):
                    load(name, root, split)
                continue
            images, again = load(name, root, split), load(name, root, split)
            assert (images.name, images.split, images.pixels) == (name, split, None)
            assert images.labels.dtype == torch.int64
            assert len(images.classes) == len(set(images.classes)) == len(part)
            # Every label is used, as often as its class has images.
            assert torch.bincount(images.labels).tolist() == part
            assert images.files is not None
            assert len(set(images.files)) == len(images) == sum(part)
            assert images.files == again.files
            assert images.labels.equal(again.labels)
            assert images.classes == again.classes
            seen.append(images)
        if len(seen) == 2:
            train, test = seen
            assert not set(train.classes) & set(test.classes)
            assert not set(train.files or ()) & set(test.files or ())


@settings(max_examples=8)
@given(counts=st.lists(st.integers(1, 3), min_size=2, max_size=4))
@pytest.mark.parametrize("name", ZERO_SHOT)
def test_all_is_every_image_whatever_the_classes_have(
    name: str, make: Callable[[str, Path, Sequence[int]], Path], counts: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = make(name, Path(folder), counts)
        images = load(name, root, "all")
        assert (images.name, images.split, len(images)) == (name, "all", sum(counts))
        assert torch.bincount(images.labels).tolist() == counts
        for split in HALVES:
            try:
                part = load(name, root, split)
            except ValueError:  # no class has two images
                continue
            place = {file: row for row, file in enumerate(images.files or ())}
            for file, label in zip(part.files or (), part.labels.tolist(), strict=True):
                assert images.classes[images.labels[place[file]]] == part.classes[label]


@pytest.mark.parametrize("name", ["digits", *ZERO_SHOT])
def test_no_validation_images_are_made_up(
    name: str, make: Callable[[str, Path, Sequence[int]], Path], tmp_path: Path
) -> None:
    root = None if name == "digits" else make(name, tmp_path, (2, 2))
    assert own_validation(name, root) is None
    with pytest.raises(
        ValueError, match=f"^{name} sets no validation images apart; choose train, test or all"
    ):
        load(name, root, "validation")


def test_no_image_is_decoded(make: Callable[[str, Path, Sequence[int]], Path], tmp_path: Path) -> None:
    roots = {name: make(name, tmp_path / name, (2, 2)) for name in ZERO_SHOT}
    for folder, _, files in os.walk(tmp_path):
        for file in files:
            if file.lower().endswith((".jpg", ".png")):
                Path(folder, file).write_bytes(b"no image")
    assert all(len(load(name, root)) == 2 for name, root in roots.items())


# Data sets in files of the user's

SETS = """
import torch, numpy as np
from pathlib import Path
from robustmetric.data import ImageSet, sets_apart

def good(root, split, count=4):
    labels = torch.arange(count) % 2
    return ImageSet("mine/own", split, labels, ("a", "b"), pixels=np.zeros((count, 8, 8, 3), np.uint8))

@sets_apart
def apart(root, split):
    return good(root, split, 6 if split == "validation" else 4)

def listed(root, split):
    return [1, 2]

def floats(root, split):
    return ImageSet("mine", split, torch.zeros(2), ("a",), files=(Path("x"), Path("y")))

def beyond(root, split):
    return ImageSet("mine", split, torch.tensor([1, 2]), ("a", "b"), files=(Path("x"), Path("y")))

def wide(root, split):
    return ImageSet("mine", split, torch.tensor([0, 0]), ("a",), pixels=np.zeros((2, 8, 8, 4), np.uint8))

def fails(root, split):
    return {}["no such key"]

def rootless(split):
    return None
"""


@pytest.fixture
def sets(tmp_path: Path) -> str:
    (tmp_path / "sets.py").write_text(SETS)
    return f"{tmp_path}/sets.py"


def test_a_function_of_ones_own_reads_a_data_set(sets: str, tmp_path: Path) -> None:
    found = load(f"{sets}:good", tmp_path, "test")
    assert (found.name, len(found), found.root) == ("mine/own", 4, tmp_path)
    assert len(load(f"{sets}:good(count=8)")) == 8
    assert len(load(f"{sets}:good", split="all")) == 8
    assert own_validation(f"{sets}:good") is None
    assert len(load(f"{sets}:apart", split="validation")) == 6
    assert len(load(f"{sets}:apart", split="all")) == 14
    with pytest.raises(rm.UserError, match=r"sets no validation images apart; .*sets_apart"):
        load(f"{sets}:good", split="validation")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("listed", "the train split of the data set .*listed must be an ImageSet, not a list"),
        ("floats", r"labels of .*floats must be a tensor \(N,\) of int64, not float32 of shape \(2,\)"),
        ("beyond", "labels of .*beyond must count the classes, 0 to 1, not 1 to 2"),
        ("wide", r"pixels of .*wide must be 8 bits .*, not an array, uint8 of shape \(2, 8, 8, 4\)"),
        ("fails", r"(?s)fails failed on its train split with KeyError.*Traceback.*in fails"),
        ("rootless", r"rootless takes \(split\); it must take \(root, split\)"),
        ("goood", r"unknown name 'goood' \(did you mean 'good'"),
        ("good(size=3)", "has no option 'size'; its options: .*count"),
        ("good(split='test')", r"has no option 'split'; its options: count"),
    ],
)
def test_functions_that_break_their_contract(name: str, told: str, sets: str) -> None:
    with pytest.raises(rm.UserError, match=told):
        load(f"{sets}:{name}")
