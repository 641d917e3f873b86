"""A directory for each class: splits, order, what counts as an image."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robustmetric.data import Inputs, load, load_pixels, own_validation
from robustmetric.errors import UserError

Maker = Callable[..., Path]


def names(files: tuple[Path, ...] | None) -> list[str]:
    assert files is not None
    return [f"{file.parent.name}/{file.name}" for file in files]


def test_the_first_half_of_the_sorted_classes_trains(make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path, {"emu": 2, "bird": 2, "dog": 2, "cat": 1})
    train, test = load("folder", root), load("folder", root, "test")
    assert (train.classes, test.classes) == (("bird", "cat"), ("dog", "emu"))
    assert names(train.files) == ["bird/0.png", "bird/1.png", "cat/0.png"]
    assert train.labels.tolist() == [0, 0, 1]
    assert test.labels.tolist() == [0, 0, 1, 1]


def test_train_and_test_directories_are_the_splits(make_folder: Maker, tmp_path: Path) -> None:
    counts = {"train/cat": 2, "train/dog": 1, "test/cat": 1, "test/emu": 2, "other/x": 1}
    root = make_folder(tmp_path, counts)
    train, test = load("folder", root), load("folder", root, "test")
    assert (train.classes, test.classes) == (("cat", "dog"), ("cat", "emu"))
    assert names(train.files) == ["cat/0.png", "cat/1.png", "dog/0.png"]
    assert test.labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize("name", ["val", "validation"])
def test_a_validation_directory_tests_if_there_is_no_other(
    name: str, make_folder: Maker, tmp_path: Path
) -> None:
    root = make_folder(tmp_path, {"train/cat": 2, f"{name}/dog": 3})
    assert load("folder", root).classes == ("cat",)
    assert load("folder", root, "test").classes == ("dog",)
    assert own_validation("folder", root) is None
    assert load("folder", root, "all").classes == ("cat", "dog")


@pytest.mark.parametrize("name", ["val", "validation"])
@pytest.mark.parametrize("tests", [("test",), ("query", "gallery")])
def test_a_validation_directory_beside_tests_is_set_apart(
    name: str, tests: tuple[str, ...], make_folder: Maker, tmp_path: Path
) -> None:
    counts = {"train/cat": 2, f"{name}/dog": 3, **{f"{test}/emu": 2 for test in tests}}
    root = make_folder(tmp_path, counts)
    apart = own_validation("folder", root)
    assert apart is not None
    assert (apart.split, apart.classes, len(apart)) == ("validation", ("dog",), 3)
    assert load("folder", root, "validation").files == apart.files
    assert load("folder", root).classes == ("cat",)
    assert load("folder", root, "test").classes == ("emu",)
    assert len(load("folder", root, "all")) == 5 + 2 * len(tests)


def test_query_and_gallery_directories_are_the_test_side(make_folder: Maker, tmp_path: Path) -> None:
    counts = {"train/cat": 2, "query/dog": 1, "query/emu": 2, "gallery/dog": 1, "gallery/ant": 2}
    root = make_folder(tmp_path, counts)
    train, test = load("folder", root), load("folder", root, "test")
    assert (train.is_query, train.is_gallery) == (None, None)
    assert names(test.files) == ["dog/0.png", "emu/0.png", "emu/1.png", "ant/0.png", "ant/1.png", "dog/0.png"]
    assert (test.classes, test.labels.tolist()) == (("ant", "dog", "emu"), [1, 2, 2, 0, 0, 1])
    marks: tuple[Any, ...] = (test.is_query, test.is_gallery)
    assert [found.tolist() for found in marks] == [[True] * 3 + [False] * 3, [False] * 3 + [True] * 3]
    everything = load("folder", root, "all")
    marks = (everything.is_query, everything.is_gallery)
    assert [found.tolist() for found in marks] == [
        [True] * 5 + [False] * 3,
        [True] * 2 + [False] * 3 + [True] * 3,
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("val", "validation"), "holds val and validation; which of them is meant"),
        (("test", "query", "gallery"), "holds test beside query and gallery; which of them is meant"),
    ],
)
def test_two_directories_for_one_split_are_refused(
    names: tuple[str, ...], message: str, make_folder: Maker, tmp_path: Path
) -> None:
    root = make_folder(tmp_path, {f"{name}/cat": 2 for name in ("train", *names)})
    with pytest.raises(ValueError, match=message):
        load("folder", root)


def test_files_come_in_natural_order(make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path, {"a": 12, "b": 2})
    assert names(load("folder", root).files) == [f"a/{i}.png" for i in range(12)]
    for name in ("x1.png", "x01.png", "x1a10.png", "x1a9.png", "10x.png", "²3.png"):
        (root / "b" / name).touch()
    found = names(load("folder", root, "test").files)
    expected = ["0", "1", "10x", "x01", "x1", "x1a9", "x1a10", "²3"]
    assert found == [f"b/{name}.png" for name in expected]


UNREAD = ("notes.txt", ".0.png", "photo.heic", "2.HEIC", "png")


def test_other_hidden_and_deeper_files_are_left_aside_and_counted(make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path, {"cat": 2, "dog": 2, ".hidden": 2, "cat/deeper": 2, "cat/odd.png": 1})
    for name in ("readme.txt", "dog/notes.md", *("cat/" + n for n in UNREAD)):
        (root / name).touch()
    train = load("folder", root)
    assert train.classes == ("cat",)
    assert names(train.files) == ["cat/0.png", "cat/1.png"]
    assert train.unread == {".heic": 2, ".txt": 1, "without an ending": 1}
    said: list[str] = []
    load_pixels("folder", root, Inputs(8), ["train"], tmp_path / "cache", report=said.append)
    (line,) = said
    assert "train split of folder: 2 .heic, 1 .txt, 1 without an ending; convert images to .png" in line


def test_links_are_followed(make_folder: Maker, tmp_path: Path) -> None:
    make_folder(tmp_path / "real", {"cat": 2, "dog": 2})
    root = tmp_path / "links"
    (root / "dog").mkdir(parents=True)
    (root / "cat").symlink_to(tmp_path / "real" / "cat", target_is_directory=True)
    for i in range(2):
        (root / "dog" / f"{i}.png").symlink_to(tmp_path / "real" / "dog" / f"{i}.png")
    assert names(load("folder", root).files) == ["cat/0.png", "cat/1.png"]
    assert names(load("folder", root, "test").files) == ["dog/0.png", "dog/1.png"]


def test_broken_links_and_pipes_are_broken_images(make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data", {"cat": 2, "dog": 2})
    os.mkfifo(root / "cat" / "pipe.png")
    (root / "cat" / "loop.png").symlink_to(root / "cat" / "loop.png")
    (root / "cat" / "gone.png").symlink_to(tmp_path / "gone")
    with pytest.raises(
        UserError, match=r"(?s)3 of the 5 .*gone.png: No such file.*symbolic links.*is not a file"
    ):
        load_pixels("folder", root, Inputs(8), ["train"], tmp_path / "cache")
    (found,) = load_pixels("folder", root, Inputs(8), ["train"], tmp_path / "cache", skip_broken=True)
    assert [file.name for file in found.skipped] == ["gone.png", "loop.png", "pipe.png"]


@pytest.mark.parametrize("target", ["gone", "fox"])
def test_a_class_that_is_a_broken_link_is_named(target: str, make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    (root / "fox").symlink_to(root / target)
    with pytest.raises(UserError, match=r"links that lead nowhere: .*fox; mend or remove"):
        load("folder", root)


@pytest.mark.parametrize("split", ["train", "test"])
def test_class_directories_without_images_are_named(split: str, make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    for name in ("ant/1.heic", "ant/2.HEIC", "bee/notes", "bee/.hidden", "bee/deeper/1.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    with pytest.raises(UserError, match=r"^2 class directories hold no .*ant, .*bee; .*2 .heic") as told:
        load("folder", root, split)  # type: ignore[arg-type]
    told.match(r"read are .jpg, .jpeg, .png.*Convert.*call splits train and test, val")


def test_images_without_class_directories_are_refused(make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path, {".": 3})
    with pytest.raises(
        ValueError, match="holds no directories; put the images of each class into one of its own"
    ):
        load("folder", root)


def test_one_class_leaves_nothing_to_test(make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path, {"cat": 3})
    assert len(load("folder", root)) == 3
    with pytest.raises(ValueError, match=r"test split of folder has two images \(0 images, 0 classes\)"):
        load("folder", root, "test")
