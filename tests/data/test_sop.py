"""Stanford Online Products in its original layout, and lists that disagree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from robustmetric.data import load

Maker = Callable[..., Path]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_published_lists_are_the_splits(make_sop: Maker, tmp_path: Path) -> None:
    root = make_sop(tmp_path, (2, 3), (3, 2))
    train, test = load("sop", root), load("sop", root, "test")
    assert (train.classes, test.classes) == (("1", "2"), ("3", "4"))
    assert train.labels.tolist() == [0, 0, 1, 1, 1]
    assert test.labels.tolist() == [0, 0, 0, 1, 1]
    assert train.files is not None
    assert train.files[0] == root / "bicycle_final" / "111085122871_0.JPG"


def test_classes_are_ordered_by_number_and_not_by_text(make_sop: Maker, tmp_path: Path) -> None:
    root = make_sop(tmp_path, [2] * 11, (2,))
    assert load("sop", root).classes == tuple(str(number) for number in range(1, 12))


def test_the_directory_above_is_accepted(make_sop: Maker, tmp_path: Path) -> None:
    root = make_sop(tmp_path / "Stanford_Online_Products")
    assert load("sop", tmp_path, "test").files == load("sop", root, "test").files


@pytest.mark.parametrize("part", ["Ebay_train.txt", "Ebay_test.txt"])
def test_a_missing_list_is_named(part: str, make_sop: Maker, tmp_path: Path) -> None:
    root = make_sop(tmp_path)
    (root / part).unlink()
    with pytest.raises(
        FileNotFoundError, match=f"lacks {part} of sop; .*Lifted Structured Feature Embedding"
    ):
        load("sop", root)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "train",
            "image_id ",
            "id ",
            "Ebay_train.txt: the header is 'id class_id super_class_id path'; expected",
        ),
        (
            "train",
            "image_id class_id super_class_id path\n",
            "",
            "the header is '1 1 1 bicycle_final/.*; expected",
        ),
        (
            "train",
            "4 2 1",
            "4 2",
            r"line 5: '4 2 bicycle_final/.*' is not 'image_id class_id super_class_id path'",
        ),
        ("train", "4 2 1", "4 b 1", r"line 5: class_id is 'b'; expected a whole number"),
        ("train", "4 2 1", "a 2 1", r"line 5: image_id is 'a'; expected a whole number"),
        ("train", "4 2 1", "3 2 1", r"line 5: image_id 3 was already given"),
        (
            "train",
            "872_1",
            "872_0",
            r"Ebay_train\.txt lists images more than once: bicycle_final/111085122872_0",
        ),
        ("test", " 3 1 ", " 2 1 ", r"1 classes are in both Ebay_train.txt and Ebay_test.txt of .* \(2\)"),
        (
            "test",
            "6 3 1 ",
            "5 3 1 ",
            r"1 images are in both .* \(5\); the splits share none: fetch both files",
        ),
        ("test", "873_0", "871_0", r"1 paths are in both .* \(bicycle_final/111085122871_0\.JPG\)"),
    ],
)
def test_lists_that_disagree_are_refused(
    file: str, old: str, new: str, message: str, make_sop: Maker, tmp_path: Path
) -> None:
    root = make_sop(tmp_path)
    edit(root / f"Ebay_{file}.txt", old, new)
    with pytest.raises(ValueError, match=message) as caught:
        load("sop", root)
    assert str(tmp_path) in str(caught.value)


def test_an_empty_list_has_no_header(make_sop: Maker, tmp_path: Path) -> None:
    root = make_sop(tmp_path)
    (root / "Ebay_test.txt").write_text("")
    with pytest.raises(ValueError, match=r"Ebay_test\.txt: the header is ''; expected 'image_id"):
        load("sop", root)
