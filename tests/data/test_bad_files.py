"""Lists and arrays that are damaged or made to do harm: one error, with the file and what to do."""

from __future__ import annotations

import gzip
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from robustmetric.data import Inputs, load, load_pixels
from robustmetric.data.cars import LIMIT, read_mat
from robustmetric.data.idx import read_idx
from robustmetric.errors import UserError
from tests.helpers.command import refused

Maker = Callable[..., Path]

TABLES = {
    "UTF-16": (
        "path,label\n0.png,a\n".encode("utf-16"),
        r"is not UTF-8 text \(it is UTF-16\); save it as UTF-8",
    ),
    "UTF-16 without its mark": (
        "path,label\n".encode("utf-16-le"),
        r"line 1: there is a zero byte.*as UTF-8",
    ),
    "latin-1": (b"path,label\n0.png,K\xe4fer\n", r"is not UTF-8 text \(line 2: .*\); save it as UTF-8"),
    "a zero byte": (b"path,label\n0.png,a\n1.png,\0b\n", "line 3: there is a zero byte"),
    "a huge field": (b"path,label\n0.png," + b"a" * 200_000, r"line 2: this is not CSV \(field larger"),
    "a huge header": (b"path,label," + b"a" * 200_000, r"line 1: this is not CSV \(field larger"),
    "an open quote": (
        b'path,label\n0.png,"a\n' + b"x,y\n" * 100_000,
        r"line 2: this is not CSV.*close quotes",
    ),
    "a million columns": (
        b"path,label" + b",spli" * 1_000_000,
        r"line 1: 1,000,002 columns; expected at most",
    ),
    "one long line": (b"x" * 100_000, r"line 1: the header is 'x+'… \(100,000 characters\) and lacks path"),
    "a long path": (
        b"path,label\n" + b"a/" * 10_000 + b",b\n",
        r"1 of 1 image files .* are missing.*…; correct",
    ),
    "a number of many digits": (
        b"path,label,x_1,y_1,x_2,y_2\n0.png,a,0,0,5," + b"9" * 100_000,
        r"line 2: y_2 is '9+'… .*expected a number of pixels",
    ),
    "only a mark": (b"\xef\xbb\xbf", "line 1: the header is '' and lacks path and label"),
    "nothing": (b"", "line 1: the header is '' and lacks path and label"),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_bad_table_is_one_short_error(what: str, tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    content, message = TABLES[what]
    file.write_bytes(content)
    with pytest.raises((UserError, FileNotFoundError), match=message) as caught:
        load("csv", file)
    assert len(str(caught.value)) < 1500
    assert str(file) in str(caught.value) or "long path" in what


def test_a_bad_table_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "images.csv"
    file.write_bytes("path,label\n0.png,a\n".encode("utf-16"))
    said = refused("train", "--data", "csv", "--root", file, "--out", tmp_path / "run")
    assert f"{file} is not UTF-8 text" in said
    assert "save it as UTF-8" in said
    assert not (tmp_path / "run").exists()


LISTS: dict[str, tuple[str, str]] = {
    "cub": ("make_cub", "images.txt"),
    "sop": ("make_sop", "Ebay_train.txt"),
    "inshop": ("make_inshop", "Eval/list_eval_partition.txt"),
}
CONTENTS = [
    b"\xff\xfe1\0 \0a\0",
    b"1 \0\n",
    b"\xe4\n",
    b"9" * 100_000 + b" a\n",
    b"x" * 100_000,
    b"1\rimage_name item_id evaluation_status\r",
    b"1\nimage_name item_id evaluation_status\n. a train\n",
    b"1\nimage_name item_id evaluation_status\n" + b"y" * 100_000 + b" a train\n",
]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
@pytest.mark.parametrize("name", LISTS)
def test_a_bad_list_is_one_short_error(
    name: str, content: bytes, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    maker, file = LISTS[name]
    root = request.getfixturevalue(maker)(tmp_path)
    (root / file).write_bytes(content)
    with pytest.raises((UserError, FileNotFoundError)) as caught:
        load(name, root)
    assert len(str(caught.value)) < 2500
    assert str(root) in str(caught.value)


def test_a_list_that_is_no_file_is_refused(tmp_path: Path, make_sop: Maker) -> None:
    root = make_sop(tmp_path)
    (root / "Ebay_train.txt").unlink()
    os.mkfifo(root / "Ebay_train.txt")  # nobody ever writes to it
    with pytest.raises(UserError, match=r"Ebay_train.txt is not a file"):
        load("sop", root)


def peak(work: Callable[[], object]) -> int:
    """Return the most memory, in bytes, that was in use while the work was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_idx_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    file = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(file, "wb") as stream:
        stream.write(struct.pack(">4I", 0x803, 1 << 20, 1 << 10, 1 << 10))
        for _ in range(64):
            stream.write(bytes(1 << 20))
    with pytest.raises(UserError, match=r"train-images.* promises .*1,099,511,627,776 bytes.*fetch it again"):
        read_idx(file, 3)
    assert peak(lambda: read_idx(file, 3)) < 1 << 22


def mat(*variables: bytes) -> bytes:
    """Write a MATLAB file of variables that are packed."""
    parts = [struct.pack("<II", 15, len(packed)) + packed for packed in map(zlib.compress, variables)]
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + b"".join(parts)


def numbers(size: int) -> bytes:
    """Write a variable of so many zeros, as bytes."""
    about = struct.pack("<IIII", 6, 8, 9, 0) + struct.pack("<IIii", 5, 8, 1, size) + struct.pack("<II", 1, 0)
    data = about + struct.pack("<II", 2, size) + bytes(size)
    return struct.pack("<II", 14, len(data)) + data


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        [numbers(1 << 27)],
        [numbers(1 << 22)] * 16,  # each would fit alone
        [struct.pack("<II", 14, 1 << 24) + bytes(1 << 24)],  # many empty elements
    ],
    ids=["large", "many", "empty"],
)
def test_a_mat_bomb_is_refused(variables: list[bytes], tmp_path: Path) -> None:
    file = tmp_path / "cars_annos.mat"
    file.write_bytes(mat(*variables))
    assert file.stat().st_size < 1 << 20
    with pytest.raises(UserError, match=r"cars_annos.mat is damaged.*(too large|elements).*fetch it again"):
        read_mat(file)
    if len(variables[0]) > LIMIT:
        assert peak(lambda: read_mat(file)) < 4 * LIMIT


def nested(depth: int) -> bytes:
    """Write a cell in a cell, and so on."""
    flags = struct.pack("<IIII", 6, 8, 1, 0)
    rest = struct.pack("<IIii", 5, 8, 1, 1) + struct.pack("<II", 1, 0)
    data = b""
    for _ in range(depth):
        data = struct.pack("<II", 14, len(flags + rest + data)) + flags + rest + data
    return data


def test_cells_nested_without_end_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cars_annos.mat"
    file.write_bytes(mat(nested(5_000)))
    with pytest.raises(UserError, match=r"cars_annos.mat is damaged.*fetch it again"):
        read_mat(file)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_no_text_makes_a_table_end_in_anything_but_an_error_of_its_file(
    content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "images.csv"
    for start in (b"", b"path,label\n", b'path;label;split\n"'):
        file.write_bytes(start + content)
        with pytest.raises((UserError, FileNotFoundError)):
            load("csv", file)


@pytest.mark.skipif(os.name != "posix", reason="names of files are bytes on POSIX alone")
def test_a_folder_with_a_name_that_is_no_text(tmp_path: Path, make_folder: Maker) -> None:
    root = make_folder(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")))
    for _ in "built", "reused":
        (found,) = load_pixels("folder", root, Inputs(8), ["train"], tmp_path / "cache")
        assert found.pixels.shape == (5, 8, 8, 3)
