"""Names of files in one piece of memory, and the images below a folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustmetric.data.decode import SUFFIXES
from robustmetric.errors import UserError
from robustmetric.vectors import Names, images_below

STRANGE = [
    "new\nline.png",
    "'quote\".png",
    "esc\x1b[2J.png",
    os.fsdecode(b"byte\xff.png"),
    "ü 漢.png",
    " .png",
]
texts = st.text(st.characters(exclude_categories=["Cs"])) | st.binary().map(
    lambda raw: raw.decode("utf-8", "surrogateescape")
)


@given(st.lists(texts))
def test_names_come_back(names: list[str]) -> None:
    kept = Names.of(names)
    assert len(kept) == len(names)
    assert list(kept) == names == kept[:]
    assert kept[::-2] == names[::-2]
    assert [kept[-k] for k in range(1, len(names) + 1)] == names[::-1]


@given(st.lists(st.tuples(texts, st.booleans())))
def test_some_of_the_names(pairs: list[tuple[str, bool]]) -> None:
    names = Names.of(name for name, _ in pairs)
    some = names.only(np.array([wanted for _, wanted in pairs], np.bool_))
    assert list(some) == [name for name, wanted in pairs if wanted]


def is_utf8(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@given(st.lists(texts))
def test_names_are_text_if_each_is(names: list[str]) -> None:
    assert Names.of(names).is_text() == all(map(is_utf8, names))


def test_a_character_that_two_names_share_is_no_text() -> None:
    first, second = (b"a" + "ü".encode()[:1], "ü".encode()[1:])
    names = Names.of([os.fsdecode(first), os.fsdecode(second)])
    assert names.text.tobytes().decode() == "aü"
    assert not names.is_text()


@pytest.mark.parametrize("index", [2, -3])
def test_a_name_that_is_not_there(index: int) -> None:
    with pytest.raises(IndexError, match=f"name {index} is not among 2"):
        Names.of(["a", "b"])[index]


@pytest.mark.parametrize("ends", [[1, 4], [3, 2, 3], [-1, 3], []])
def test_ends_that_do_not_fit_are_refused(ends: list[int]) -> None:
    with pytest.raises(UserError, match="do not fit the 3 bytes of their text"):
        Names(np.zeros(3, np.uint8), np.array(ends, np.int64))


# Images below a folder


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_images_are_found_below_all_folders_in_the_order_of_their_names(tmp_path: Path) -> None:
    put(tmp_path, "b/2.png", "b/10.PNG", "b/c/1.webp", "a-1.jpg", "a/1.jpeg", "a.bmp", "z.png", "b.png/1.png")
    put(tmp_path, "notes.txt", "b/photo.heic", ".hidden.png", ".hidden/1.png", "png")
    wanted = sorted(
        file.relative_to(tmp_path).as_posix()
        for file in tmp_path.rglob("*")
        if file.is_file() and file.suffix.lower() in SUFFIXES and ".hidden" not in str(file)
    )
    assert len(wanted) == 8
    assert list(images_below(tmp_path)) == wanted


def test_strange_names_are_found(tmp_path: Path) -> None:
    put(tmp_path, *(f"fo\nlder/{name}" for name in STRANGE))
    assert sorted(images_below(tmp_path)) == sorted(f"fo\nlder/{name}" for name in STRANGE)


def test_links_are_followed_but_not_in_a_circle(tmp_path: Path) -> None:
    put(tmp_path, "photos/a/1.png", "elsewhere/2.png")
    (tmp_path / "photos" / "a" / "up").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos" / "c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos" / "3.png").symlink_to(tmp_path / "elsewhere" / "2.png")
    (tmp_path / "photos" / "gone.png").symlink_to(tmp_path / "nowhere")
    assert list(images_below(tmp_path / "photos")) == ["3.png", "a/1.png", "b/2.png", "c/2.png", "gone.png"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes are POSIX's")
def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    put(tmp_path, "1.png")
    os.mkfifo(tmp_path / "2.png")
    assert list(images_below(tmp_path)) == ["1.png"]


def test_the_files_of_a_table(tmp_path: Path) -> None:
    put(tmp_path, "a/1.png", "2.png", "3.png")
    (tmp_path / "mine.csv").write_text("path,label,shop\n2.png,x,A\na/1.png,x,B\n")
    assert sorted(images_below(tmp_path / "mine.csv")) == ["2.png", "a/1.png"]


def test_boxes_have_no_names(tmp_path: Path) -> None:
    put(tmp_path, "1.png")
    (tmp_path / "mine.csv").write_text("path,label,x_1,y_1,x_2,y_2\n1.png,x,0,0,4,4\n1.png,x,2,2,6,6\n")
    with pytest.raises(UserError, match="has boxes, and vectors are found by the names of their files: cut"):
        images_below(tmp_path / "mine.csv")


def test_a_folder_without_images(tmp_path: Path) -> None:
    put(tmp_path, "notes.txt")
    with pytest.raises(
        UserError, match=r"no images below .*; expected files that end in \.jpg, \.jpeg, \.png"
    ):
        images_below(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere of images; give one, or"):
        images_below(tmp_path / "nowhere")
