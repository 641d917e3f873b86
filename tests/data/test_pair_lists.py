"""Lists of pairs: tables of files, LFW's format, and lists that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from robustmetric.data.pair_lists import read_pairs
from robustmetric.errors import UserError


def images(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def written(root: Path, text: str, name: str = "pairs.csv") -> Path:
    (root / name).write_text(text, encoding="utf-8")
    return root / name


def names_of(file: Path, root: Path | None = None) -> list[tuple[str, str, bool]]:
    found = read_pairs(file, root)
    files, labels = found.images.files or (), found.images.labels
    return [(files[i].name, files[j].name, bool(labels[i] == labels[j])) for i, j in found.pairs.tolist()]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("header", ["", "first,second,same\n", "image one,image two,label\n"])
def test_a_table_of_files(delimiter: str, header: str, tmp_path: Path) -> None:
    images(tmp_path, "a.png", "b.png", "c.png", "d.png")
    text = header + "a.png,b.png,1\n\nb.png, c.png ,True\nd.png,a.png,0\r\n"
    file = written(tmp_path, text.replace(",", delimiter))
    found = read_pairs(file)
    assert names_of(file) == [("a.png", "b.png", True), ("b.png", "c.png", True), ("d.png", "a.png", False)]
    # Each image once, in the order of the list; those that are same by way of others have one label.
    assert [path.name for path in found.images.files or ()] == ["a.png", "b.png", "c.png", "d.png"]
    assert (
        found.images.labels[0] == found.images.labels[1] == found.images.labels[2] != found.images.labels[3]
    )
    assert found.images.root == tmp_path


def test_files_are_relative_to_the_root_or_to_the_list(tmp_path: Path) -> None:
    root = images(tmp_path / "images", "x/a.png", "y/a.png")
    file = written(tmp_path, "x/a.png,y/a.png,0\n")
    found = read_pairs(file, root)
    assert found.images.files == (root / "x" / "a.png", root / "y" / "a.png")
    with pytest.raises(UserError, match=r"2 of 2 image files .* are missing"):
        read_pairs(file)
    outside = written(tmp_path, f"{root / 'x' / 'a.png'},y/a.png,1\n", "absolute.csv")
    assert read_pairs(outside, root).images.files == (root / "x" / "a.png", root / "y" / "a.png")


def test_strange_names(tmp_path: Path) -> None:
    names = ["räume und [b].png", "=1+1.png", "a;b.png", "$(touch x).png", "\x1b[2J.png"]
    images(tmp_path, *names)
    text = "".join(f'"{name}","{names[0]}",0\n' for name in names[1:])
    assert [first for first, _, _ in names_of(written(tmp_path, text))] == names[1:]


def test_lfw(tmp_path: Path) -> None:
    images(tmp_path, *(f"Ann_Lee/Ann_Lee_{k:04d}.jpg" for k in (1, 2)), "Bo/Bo_0011.png", "Cy/Cy_0001.jpg")
    for first in ("2\t1", "1"):
        file = written(
            tmp_path, f"{first}\nAnn_Lee\t1\t2\nAnn_Lee\t2\tBo\t11\r\nCy\t1\tBo\t11\n", "pairs.txt"
        )
        assert names_of(file) == [
            ("Ann_Lee_0001.jpg", "Ann_Lee_0002.jpg", True),
            ("Ann_Lee_0002.jpg", "Bo_0011.png", False),
            ("Cy_0001.jpg", "Bo_0011.png", False),
        ]
        assert read_pairs(file).images.classes == ("Ann_Lee", "Bo", "Cy")


def test_pairs_among_the_images_that_could_be_read(tmp_path: Path) -> None:
    images(tmp_path, "a.png", "b.png", "c.png")
    found = read_pairs(written(tmp_path, "a.png,b.png,1\na.png,c.png,0\nc.png,b.png,0\n"))
    left = (tmp_path / "c.png", tmp_path / "b.png")
    assert found.among(left).tolist() == [[0, 1]]
    assert found.among(found.images.files or ()).equal(found.pairs)
    assert found.among(()).shape == torch.Size([0, 2])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"pairs\.csv lists no pairs; give lines of two files and 1 if they are same, 0 if not"),
        ("first,second,same\n", "lists no pairs"),
        ("a.png,b.png\n", "line 1: 'a.png,b.png' is no pair; expected two files and 1"),
        ("a.png,b.png,1\na.png,b.png,maybe\n", "line 2: .*maybe' is no pair"),
        ("a.png,,1\n", "line 1: .* is no pair"),
        ("a.png,b.png,1\nb.png,b.png,1\n", "line 2: an image makes no pair with itself; give two"),
        ('"a.png,b.png,1\n', "line 1: this is not CSV"),
        (
            "a.png,b.png,1\nb.png,c.png,1\na.png,c.png,0\n",
            "line 3: the images are said to be different, and by other lines they are same: correct one",
        ),
        ("1\nAnn 1\n", "line 2: 'Ann 1' is not 'name 1 2', two images of a person, or 'name 1 other 2'"),
        ("1\nAnn 1 1\n", "line 2: an image makes no pair with itself; give two"),
        ("1\nAnn 1 Ann 2\n", "line 2: 'Ann 1 Ann 2' is not 'name 1 2'"),
        ("a.png,b.png,1\n\0", "is not UTF-8 text"),
    ],
)  # fmt: skip
def test_what_is_no_list(text: str, told: str, tmp_path: Path) -> None:
    images(tmp_path, "a.png", "b.png", "c.png")
    with pytest.raises(UserError, match=told):
        read_pairs(written(tmp_path, text))


def test_files_that_are_missing(tmp_path: Path) -> None:
    images(tmp_path, "a.png")
    file = written(tmp_path, "a.png,gone.png,1\na.png,other.png,0\n")
    told = r"2 of 3 image files of the test split of pairs are missing: .*gone\.png.*other\.png.*correct the"
    with pytest.raises(UserError, match=told):
        read_pairs(file)
    with pytest.raises(UserError, match=r"Bo_0001\.jpg"):
        read_pairs(written(tmp_path, "1\nBo 1 2\n", "pairs.txt"))
    with pytest.raises(UserError, match="are missing"):
        read_pairs(written(tmp_path, f"1\n{'B' * 300} 1 2\n", "pairs.txt"))
    with pytest.raises(UserError, match=r"there is no list of pairs .*none\.csv"):
        read_pairs(tmp_path / "none.csv")
