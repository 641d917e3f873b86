"""A table of one's own: splits, labels of any text, and every error with its line."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from robustmetric.data import Inputs, load, load_pixels, own_validation
from robustmetric.errors import UserError

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


def test_a_directory_holds_exactly_one_table(make_csv: Maker, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds 0 \.csv files; give the file itself as the root"):
        load("csv", tmp_path)
    file = make_csv(tmp_path)
    (tmp_path / "._images.csv").write_bytes(b"\0\5\x16\7")
    assert load("csv", tmp_path).files == load("csv", file).files
    (tmp_path / "more.CSV").touch()
    with pytest.raises(
        ValueError, match=r"holds 2 \.csv files: images\.csv, more\.CSV; give the file itself"
    ):
        load("csv", tmp_path)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the header is '' and lacks path and label; expected path and label"),
        ("file,label\n0.png,a\n", 1, "the header is 'file,label' and lacks path"),
        ("path,label,x_1,x_2\n0.png,a,1,2\n", 1, "the header is .* and lacks y_1 and y_2"),
        ("path,label,LABEL\n0.png,a,b\n", 1, "a column is there twice in 'path,label,LABEL'"),
        ("path,label\n0.png,a\n1.png,  \n", 3, "the label is empty; every image needs one"),
        ("path,label,camera\n0.png,a,1\n1.png,a,\n", 3, "the camera is empty"),
        ("path,label\n0.png,a\n1.png\n", 3, r"1 fields; expected 2 \(path, label\)"),
        ("path,label\n0.png,a,b\n", 2, r"3 fields; expected 2 \(path, label\), with quotes around text"),
        ("path,label,split\n0.png,a,dev\n", 2, "split is 'dev'; expected train, test or validation"),
        ("path,label,is_query\n0.png,a,yes\n", 2, "is_query is 'yes'; expected true or false"),
        ("path,label\n0.png,a\n\n./0.png,b\n", 4, ".*/0.png' is already in line 2; list each image once"),
        ('path,label\n0.png,"a"b\n', 2, "this is not CSV"),
        ("path,label,x_1,y_1,x_2,y_2\n0.png,a,5,0,5,9\n", 2, "the box x_1,y_1,x_2,y_2 is 5,0,5,9; expected"),
        ("path,label,x_1,y_1,x_2,y_2\n0.png,a,0,0,5,\n", 2, "the box .* is 0,0,5,; .*or all empty"),
        ("path,label,x_1,y_1,x_2,y_2\n0.png,a,0,0,5,inf\n", 2, "y_2 is 'inf'; expected a number of pixels"),
    ],
)
def test_a_wrong_table_is_refused_with_the_line(text: str, line: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"images\.csv, line {line}: {message}") as caught:
        load("csv", file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("column", "meant"),
    [("Splits", "split"), ("is_gallary", "is_gallery"), ("query", "is_query"), ("camera_id", "camera")],
)
def test_a_slip_in_the_name_of_a_column_is_refused(column: str, meant: str, tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    file.write_text(f"path,label,{column}\n0.png,a,1\n")
    message = (
        rf"line 1: unknown column '{column}' \(did you mean '{meant}'\?\); correct it, or give it a name"
    )
    with pytest.raises(ValueError, match=message):
        load("csv", file)


def write(folder: Path, lines: Sequence[str], *, delimiter: str = ",", mark: bool = False) -> Path:
    """Write a table whose lines are given with commas, and the images 0.png to 9.png."""
    for i in range(10):
        (folder / f"{i}.png").touch()
    file = folder / "images.csv"
    text = "\n".join(line.replace(",", delimiter) for line in lines)
    file.write_text(text, encoding="utf-8-sig" if mark else "utf-8")
    return file


@pytest.mark.parametrize("mark", [False, True])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_further_columns_are_kept_whatever_separates_them(delimiter: str, mark: bool, tmp_path: Path) -> None:
    lines = [
        ",Category,LABEL, path ,labels,Split",
        "0,hat,b , 1.png,x,train",
        "",
        "1,coat,a,0.png,y,test",
        '2,"a ""b"" c",b,3.png,,train',
        "3,hat,a,2.png,z,Test",
    ]
    file = write(tmp_path, lines, delimiter=delimiter, mark=mark)
    train, test = load("csv", file), load("csv", file, "test")
    # A column without a name, as pandas writes its index, is left out.
    assert train.columns == {"Category": ("hat", 'a "b" c'), "labels": ("x", "")}
    assert test.columns == {"Category": ("coat", "hat"), "labels": ("y", "z")}
    assert (names(train.files), train.classes) == (["1.png", "3.png"], ("b",))
    assert (names(test.files), test.classes) == (["0.png", "2.png"], ("a",))
    everything = load("csv", file, "all")
    assert everything.columns["Category"] == ("hat", 'a "b" c', "coat", "hat")


def test_validation_beside_test_is_set_apart(tmp_path: Path) -> None:
    pairs = ("a,train", "a,train", "b,val", "b,validation", "c,test", "c,test")
    rows = [f"{number}.png,{rest}" for number, rest in enumerate(pairs)]
    file = write(tmp_path, ["path,label,split", *rows])
    apart = own_validation("csv", file)
    assert apart is not None
    assert (apart.split, apart.classes, names(apart.files)) == ("validation", ("b",), ["2.png", "3.png"])
    assert load("csv", file, "validation").files == apart.files
    assert (load("csv", file).classes, load("csv", file, "test").classes) == (("a",), ("c",))
    assert load("csv", file, "all").classes == ("a", "b", "c")


def test_a_file_of_open_metric_learning_is_read(tmp_path: Path) -> None:
    # As pandas writes it: numbers beside empty fields become floats.
    header = "label,path,split,is_query,is_gallery,category,sequence,x_1,x_2,y_1,y_2"
    rows = [
        "7,0.png,train,,,hats,0,,,,",
        "7,1.png,train,,,hats,0,1.0,9.0,2.0,8.0",
        "9,2.png,validation,True,False,hats,1,0.0,5.4,0.0,5.6",
        "9,3.png,validation,False,True,hats,1,,,,",
        "8,4.png,validation,1.0,1,coats,2,3.0,4.0,5.0,6.0",
    ]
    file = write(tmp_path, [header, *rows])
    train, test = load("csv", file), load("csv", file, "test")
    assert (train.is_query, train.is_gallery) == (None, None)
    assert train.boxes is not None
    assert train.boxes.tolist() == [[0, 0, 0, 0], [1, 2, 9, 8]]
    marks = [found.tolist() for found in (test.is_query, test.is_gallery) if found is not None]
    assert marks == [[True, False, True], [False, True, True]]
    assert test.boxes is not None
    assert test.boxes.tolist() == [[0, 0, 5, 6], [0, 0, 0, 0], [3, 5, 4, 6]]
    assert test.boxes.dtype == np.int64
    assert test.columns == {"category": ("hats", "hats", "coats"), "sequence": ("1", "1", "2")}
    everything = load("csv", file, "all")
    assert everything.is_query is not None
    assert everything.is_query.tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("column", ["is_query", "is_gallery"])
def test_every_image_that_tests_needs_a_mark(column: str, tmp_path: Path) -> None:
    rows = ["0.png,a,train,", "1.png,a,train,1", "2.png,b,test,1", "3.png,b,test,"]
    file = write(tmp_path, [f"path,label,split,{column}", *rows])
    marks = getattr(load("csv", file), column)
    assert marks.tolist() == [True, True]
    with pytest.raises(ValueError, match=f"images.csv, line 5: {column} is empty; only rows that train may"):
        load("csv", file, "test")


@pytest.mark.parametrize(("column", "what"), [("is_query", "query"), ("is_gallery", "gallery")])
def test_a_test_split_without_queries_or_gallery_is_refused(column: str, what: str, tmp_path: Path) -> None:
    file = write(tmp_path, [f"path,label,split,{column}", "0.png,a,test,0", "1.png,a,test,false"])
    with pytest.raises(ValueError, match=f"the test split of csv has no {what} image"):
        load("csv", file, "test")
    assert len(load("csv", file, "all")) == 2


def test_cameras_have_one_number_in_all_splits(tmp_path: Path) -> None:
    rows = ["0.png,a,train,c2", "1.png,a,train,c10", "2.png,b,test,door 7", "3.png,b,test,c2"]
    file = write(tmp_path, ["path,label,split,camera", *rows])
    numbers = [load("csv", file, split).cameras for split in ("train", "test", "all")]
    assert [found.tolist() for found in numbers if found is not None] == [[1, 0], [2, 1], [1, 0, 2, 1]]


def test_an_image_may_be_listed_with_several_boxes(tmp_path: Path) -> None:
    header = "path,label,x_1,y_1,x_2,y_2"
    rows = ["0.png,a,0,0,5,5", "0.png,a,0,0,5,6", "0.png,a,,,,"]
    images = load("csv", write(tmp_path, [header, *rows]))
    assert names(images.files) == ["0.png"] * 3
    assert images.boxes is not None
    assert images.boxes.tolist() == [[0, 0, 5, 5], [0, 0, 5, 6], [0, 0, 0, 0]]
    with pytest.raises(
        ValueError, match=r"line 5: '.*0.png' is already in line 3; list each image once, or each box"
    ):
        load("csv", write(tmp_path, [header, *rows, "0.png,b,0,0,5.2,6"]))


# Files that are damaged or made to do harm

HEAD = b"path,label\n0.png,"
TABLES = {
    "UTF-16": (
        "path,label\n0.png,a\n".encode("utf-16"),
        "is not UTF-8 text, but UTF-16 or damaged",
    ),
    "latin-1": (HEAD + b"K\xe4fer\n", r"is not UTF-8 text \(line 2: .*\); save it as UTF-8"),
    "a zero byte": (HEAD + b"\0b\n", "is not UTF-8 text, but UTF-16 or damaged"),
    "a huge field": (HEAD + b"a" * 200_000, r"line 2: this is not CSV \(field larger"),
    "an open quote": (HEAD + b'"a\n' + b"x,y\n" * 100_000, r"line 2: this is not CSV.*close quotes"),
    "many columns": (b"path,label" + b",spli" * 1_000_000, r"line 1: 1,000,002 columns; expected at most"),
    "one long line": (b"x" * 100_000, r"line 1: the header is 'x+ … x+' and lacks path"),
    "a long path": (b"path,label\n" + b"a/" * 10_000 + b",b\n", r"1 of 1 image files .* are missing.* … "),
    "only a mark": (b"\xef\xbb\xbf", "line 1: the header is '' and lacks path and label"),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_bad_table_is_one_short_error(what: str, tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    content, message = TABLES[what]
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load("csv", file)
    assert len(str(caught.value)) < 1500
    assert str(file) in str(caught.value) or "long path" in what


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_no_text_makes_a_table_end_in_anything_but_an_error_of_its_file(
    content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "images.csv"
    for start in (b"", b"path,label\n", b'path;label;split\n"'):
        file.write_bytes(start + content)
        with pytest.raises(UserError):
            load("csv", file)


@pytest.mark.skipif(os.name != "posix", reason="names of files are bytes on POSIX alone")
def test_a_folder_with_a_name_that_is_no_text(tmp_path: Path, make_folder: Maker) -> None:
    root = make_folder(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")))
    for _ in "built", "reused":
        (found,) = load_pixels("folder", root, Inputs(8), ["train"], tmp_path / "cache")
        assert found.pixels.shape == (5, 8, 8, 3)
