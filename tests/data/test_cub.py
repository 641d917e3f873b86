"""CUB-200-2011 in its original layout, and files that disagree."""

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


def test_the_first_half_of_the_classes_trains(make_cub: Maker, tmp_path: Path) -> None:
    root = make_cub(tmp_path, (3, 2, 2, 3))
    train, test = load("cub", root), load("cub", root, "test")
    assert train.classes == ("001.Bird_1", "002.Bird_2")
    assert test.classes == ("003.Bird_3", "004.Bird_4")
    assert train.labels.tolist() == [0, 0, 0, 1, 1]
    assert test.labels.tolist() == [0, 0, 1, 1, 1]
    assert train.files is not None
    assert train.files[3] == root / "images" / "002.Bird_2" / "Bird_2_0000.jpg"


def test_at_full_size_a_hundred_classes_train_by_number_and_not_by_name(
    tmp_path: Path, make_cub: Maker
) -> None:
    make_cub(tmp_path, [2] * 200)
    train, test = load("cub", tmp_path), load("cub", tmp_path, "test")
    assert (len(train.classes), len(test.classes)) == (100, 100)
    assert (train.classes[-1], test.classes[0]) == ("100.Bird_100", "101.Bird_101")


def test_the_directory_above_is_accepted(make_cub: Maker, tmp_path: Path) -> None:
    root = make_cub(tmp_path / "CUB_200_2011")
    assert load("cub", tmp_path).files == load("cub", root).files


def test_without_classes_txt_folders_name_the_classes(make_cub: Maker, tmp_path: Path) -> None:
    root = make_cub(tmp_path)
    named = load("cub", root, "test")
    (root / "classes.txt").unlink()
    assert load("cub", root, "test").classes == named.classes


def test_order_follows_images_txt_and_labels_their_numbers(make_cub: Maker, tmp_path: Path) -> None:
    root = make_cub(tmp_path)
    lines = (root / "images.txt").read_text().splitlines()
    (root / "images.txt").write_text("\r\n".join([*reversed(lines), "", ""]))
    train = load("cub", root)
    assert train.labels.tolist() == [1, 1, 0, 0, 0]
    assert train.files is not None
    assert train.files[0].name == "Bird_2_0001.jpg"


@pytest.mark.parametrize("part", ["images.txt", "image_class_labels.txt", "images"])
def test_a_missing_part_is_named(part: str, make_cub: Maker, tmp_path: Path) -> None:
    root = make_cub(tmp_path)
    (root / part).rename(root / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match=f"lacks {part} of cub; give the directory that holds images.txt"
    ):
        load("cub", root)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "image_class_labels.txt",
            "10 4\n",
            "",
            r"images\.txt and image_class_labels\.txt disagree: 1 images are in images\.txt only \(10\)",
        ),
        (
            "images.txt",
            "10 004.Bird_4/Bird_4_0002.jpg\n",
            "",
            r"disagree: 1 images are in image_class_labels\.txt only \(10\)",
        ),
        (
            "classes.txt",
            "4 004.Bird_4\n",
            "",
            r"disagree: 1 classes are in image_class_labels\.txt only \(4\)",
        ),
        ("classes.txt", "4 004", "5 005.B\n4 004", r"disagree: 1 classes are in classes\.txt only \(5\)"),
        (
            "image_class_labels.txt",
            "3 1\n",
            "3 2\n",
            r"disagree with the folders of 1 images: 001\.Bird_1/Bird_1_0002\.jpg is labelled 002\.Bird_2;",
        ),
        ("image_class_labels.txt", "3 1\n", "2 1\n", r"line 3: image_id 2 was already given"),
        ("image_class_labels.txt", "3 1\n", "x 1\n", r"line 3: image_id is 'x'; expected a whole number"),
        (
            "image_class_labels.txt",
            "3 1\n",
            "3 1.5\n",
            r"class_id of image 3 is '1\.5'; expected a whole number",
        ),
        ("image_class_labels.txt", "3 1\n", "3\n", r"line 3: '3' is not 'image_id class_id'"),
        ("images.txt", "Bird_1_0001", "Bird_1_0000", r"more than once: 001\.Bird_1/Bird_1_0000\.jpg"),
    ],
)
def test_files_that_disagree_are_refused(
    file: str, old: str, new: str, message: str, make_cub: Maker, tmp_path: Path
) -> None:
    root = make_cub(tmp_path)
    edit(root / file, old, new)
    with pytest.raises(ValueError, match=message) as caught:
        load("cub", root)
    assert str(tmp_path) in str(caught.value)


def test_shifted_labels_are_seen_without_classes_txt(make_cub: Maker, tmp_path: Path) -> None:
    root = make_cub(tmp_path)
    (root / "classes.txt").unlink()
    edit(root / "image_class_labels.txt", "3 1\n", "3 2\n")
    with pytest.raises(ValueError, match="disagree with the folders of 1 images"):
        load("cub", root)
