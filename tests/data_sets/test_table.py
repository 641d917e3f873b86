"""A table of one's own: splits, labels of any text, and every error with its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from robustmetric.data import load

Maker = Callable[..., Path]


def names(files: tuple[Path, ...] | None) -> list[str]:
    assert files is not None
    return [file.name for file in files]


def test_without_a_split_column_the_first_half_of_the_sorted_labels_trains(
    make_csv: Maker, tmp_path: Path
) -> None:
    file = make_csv(tmp_path, ("dog", "cat", "emu", "dog", "bee", "bee", "emu", "cat"))
    train, test = load("csv", file), load("csv", file, "test")
    assert (train.classes, test.classes) == (("bee", "cat"), ("dog", "emu"))
    # Images keep the order of the file.
    assert names(train.files) == ["1.png", "4.png", "5.png", "7.png"]
    assert train.labels.tolist() == [1, 0, 0, 1]
    assert test.labels.tolist() == [0, 1, 0, 1]


def test_a_split_column_is_followed(make_csv: Maker, tmp_path: Path) -> None:
    labels, splits = ("a", "b", "a", "a", "b", "a"), ("train", "train", "test", "train", "test", "test")
    file = make_csv(tmp_path, labels, splits)
    train, test = load("csv", file), load("csv", file, "test")
    assert train.classes == test.classes == ("a", "b")
    assert names(train.files) == ["0.png", "1.png", "3.png"]
    assert test.labels.tolist() == [0, 1, 0]


def test_labels_are_any_text(make_csv: Maker, tmp_path: Path) -> None:
    file = make_csv(tmp_path, ("10", "9", "a, b", "Käfer", "10", "9", "a, b", "Käfer"))
    assert load("csv", file).classes == ("10", "9")
    assert load("csv", file, "test").classes == ("Käfer", "a, b")


def test_columns_in_any_order_with_spaces_marks_and_empty_lines(make_csv: Maker, tmp_path: Path) -> None:
    file = make_csv(tmp_path, ("cat", "cat", "dog", "dog"))
    lines = [
        "label, path",
        "cat , pictures/0.png",
        "",
        'dog,"pictures/2.png"',
        "cat,pictures/1.png",
        "dog,pictures/3.png",
    ]
    file.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    assert names(load("csv", file).files) == ["0.png", "1.png"]
    assert load("csv", file).classes == ("cat",)


def test_paths_are_relative_to_the_file_or_absolute(make_csv: Maker, tmp_path: Path) -> None:
    make_csv(tmp_path / "images", ("a", "a"))
    picture = tmp_path / "images" / "pictures" / "0.png"
    file = tmp_path / "lists" / "list.txt"
    file.parent.mkdir()
    file.write_text(f"path,label\n../images/pictures/1.png,a\n{picture},a\n")
    files = load("csv", file).files
    assert files is not None
    assert files[0].samefile(tmp_path / "images" / "pictures" / "1.png")
    assert files[1] == picture


def test_a_directory_with_one_csv_will_do(make_csv: Maker, tmp_path: Path) -> None:
    file = make_csv(tmp_path)
    (tmp_path / "._images.csv").write_bytes(b"\0\5\x16\7")
    (tmp_path / "notes.txt").touch()
    assert load("csv", tmp_path).files == load("csv", file).files


def test_a_directory_with_none_or_two_is_refused(make_csv: Maker, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds 0 \.csv files; give the file itself as the root"):
        load("csv", tmp_path)
    make_csv(tmp_path)
    (tmp_path / "more.CSV").touch()
    with pytest.raises(
        ValueError, match=r"holds 2 \.csv files: images\.csv, more\.CSV; give the file itself"
    ):
        load("csv", tmp_path)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the header is ''; expected path,label or path,label,split, separated by commas"),
        ("0.png,a\n1.png,a\n", 1, "the header is '0.png,a'; expected"),
        ("path;label\n0.png;a\n", 1, "the header is 'path;label'; expected"),
        ("path,label,splt\n0.png,a,train\n", 1, "the header is 'path,label,splt'; expected"),
        ("path,label,label\n0.png,a,b\n", 1, "the header is 'path,label,label'; expected"),
        ("path,label\n0.png,a\n1.png,\n", 3, "the label is empty; every image needs a path and a label"),
        ("path,label\n0.png,a\n1.png,  \n", 3, "the label is empty"),
        ("path,label\n0.png,a\n,b\n", 3, "the path is empty"),
        ("path,label\n0.png,a\n1.png\n", 3, r"1 fields; expected 2 \(path,label\)"),
        ("path,label\n0.png,a,b\n", 2, r"3 fields; expected 2 \(path,label\), with quotes around text"),
        ("path,label,split\n0.png,a,val\n", 2, "the split is 'val'; expected train or test"),
        ("path,label,split\n0.png,a,\n", 2, "the split is ''; expected train or test"),
        ("path,label\n0.png,a\n\n0.png,b\n", 4, "'0.png' is already in line 2; list each image once"),
        ("path,label\n0.png,a\n./0.png,a\n", 3, "'./0.png' is already in line 2"),
        ('path,label\n0.png,"a"b\n', 2, "this is not CSV"),
        ('path,label\n0.png,"a\n', 2, "this is not CSV"),
    ],
)
def test_a_wrong_table_is_refused_with_the_line(text: str, line: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"images\.csv, line {line}: {message}") as caught:
        load("csv", file)
    assert str(file) in str(caught.value)


def test_a_table_in_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    file.write_text("path,label\n0.png,Käfer\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"images\.csv is not UTF-8 text"):
        load("csv", file)


def test_a_table_without_rows_has_no_class(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text("path,label\n")
    with pytest.raises(ValueError, match=r"no class in the train split of csv .*\(0 images, 0 classes\)"):
        load("csv", tmp_path)
