"""Published data sets in their original layouts, and files that are damaged or disagree."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from robustmetric.data import load, published
from robustmetric.errors import UserError

Maker = Callable[..., Path]
NAMES = ("cub", "cars", "sop", "inshop", "market1501")
LIST = "list_eval_partition.txt"


CLASSES = {
    "cub": (("001.Bird_1", "002.Bird_2"), ("003.Bird_3", "004.Bird_4")),
    "cars": (
        ("Make Model 1 Sedan 2012", "Make Model 2 Sedan 2012"),
        ("Make Model 3 Sedan 2012", "Make Model 4 Sedan 2012"),
    ),
    "sop": (("1", "2"), ("3", "4")),
    "inshop": (("id_00000001", "id_00000002"), ("id_00000003", "id_00000004")),
    "market1501": (("0001", "0002"), ("0003", "0004")),
}
FIRST = {
    "cub": ("images/001.Bird_1/Bird_1_0000.jpg", "images/003.Bird_3/Bird_3_0000.jpg"),
    "cars": ("car_ims/000001.jpg", "car_ims/000006.jpg"),
    "sop": ("bicycle_final/111085122871_0.JPG", "bicycle_final/111085122873_0.JPG"),
    "inshop": (
        "Img/img/WOMEN/Dresses/id_00000001/01_1_front.jpg",
        "Img/img/WOMEN/Dresses/id_00000003/01_1_front.jpg",
    ),
    "market1501": ("bounding_box_train/0001_c1s1_000001_00.jpg", "query/0003_c1s1_000003_00.jpg"),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_published_split_is_read(name: str, make_any: Maker, tmp_path: Path) -> None:
    root = make_any(name, tmp_path, *([(2, 3, 3, 2)] if name in ("cub", "cars") else [(2, 3), (3, 2)]))
    train, test = load(name, root), load(name, root, "test")
    assert (train.classes, test.classes) == CLASSES[name]
    assert train.labels.tolist() == [0, 0, 1, 1, 1]
    assert test.labels.tolist() == ([0, 1, 0, 0, 1] if name == "market1501" else [0, 0, 0, 1, 1])
    assert train.files is not None
    assert test.files is not None
    assert (train.files[0], test.files[0]) == tuple(root / file for file in FIRST[name])
    marks = {"inshop": [True, False, False, True, False], "market1501": [True, True, False, False, False]}
    assert train.is_query is train.is_gallery is None
    if name not in marks:
        assert test.is_query is test.is_gallery is None
    else:
        assert test.is_query is not None
        assert test.is_gallery is not None
        assert test.is_query.tolist() == marks[name]
        assert test.is_gallery.tolist() == [not mark for mark in marks[name]]


@pytest.mark.parametrize(
    ("name", "folder"),
    [("cub", "CUB_200_2011"), ("sop", "Stanford_Online_Products"), ("market1501", "Market-1501-v15.09.15")],
)
def test_the_directory_above_is_accepted(name: str, folder: str, make_any: Maker, tmp_path: Path) -> None:
    root = make_any(name, tmp_path / folder)
    assert load(name, tmp_path).files == load(name, root).files


@pytest.mark.parametrize(("name", "count"), [("cub", 200), ("cars", 196)])
def test_at_full_size_the_first_half_trains_by_number_and_not_by_name(
    name: str, count: int, make_any: Maker, tmp_path: Path
) -> None:
    root = make_any(name, tmp_path, [2] * count)
    train, test = load(name, root), load(name, root, "test")
    assert (len(train.classes), len(test.classes)) == (count // 2, count // 2)
    assert {"cub": "101.Bird_101", "cars": "Make Model 99 Sedan 2012"}[name] == test.classes[0]


def test_classes_of_sop_are_ordered_by_number(make_sop: Maker, tmp_path: Path) -> None:
    root = make_sop(tmp_path, [2] * 11, (2,))
    assert load("sop", root).classes == tuple(str(number) for number in range(1, 12))


def test_the_order_is_that_of_the_list_and_folders_name_classes(make_cub: Maker, tmp_path: Path) -> None:
    root = make_cub(tmp_path)
    (root / "classes.txt").unlink()
    lines = (root / "images.txt").read_text().splitlines()
    (root / "images.txt").write_text("\r\n".join([*reversed(lines), "", ""]))
    train = load("cub", root)
    assert (train.labels.tolist(), train.classes) == ([1, 1, 0, 0, 0], CLASSES["cub"][0])


@pytest.mark.parametrize("kind", [np.float64, np.uint16, np.int32])
def test_classes_of_any_type_of_number_are_read(kind: type, make_cars: Maker, tmp_path: Path) -> None:
    root = make_cars(tmp_path)
    expected = load("cars", root).labels
    rewrite(root, lambda c: [item.__setitem__("class", kind(item["class"])) for item in c["annotations"][0]])
    assert load("cars", root).labels.equal(expected)


@pytest.mark.parametrize("place", [".", "Eval", "Anno"])
@pytest.mark.parametrize("images", ["Img", "."])
def test_list_and_images_are_found_where_people_put_them(
    place: str, images: str, make_inshop: Maker, tmp_path: Path
) -> None:
    root = make_inshop(tmp_path)
    (root / place).mkdir(exist_ok=True)
    (root / "Eval" / LIST).rename(root / place / LIST)
    (root / "Img" / "img").rename(root / images / "img")
    assert len(load("inshop", root)) == 5


def test_names_tell_identity_and_camera(
    make_market1501: Maker, make_image: Callable[..., None], tmp_path: Path
) -> None:
    root = make_market1501(tmp_path, (2,), (2,))
    for folder in ("bounding_box_train", "bounding_box_test", "query"):
        for name in ("-1_c1s1_000401_03.jpg", "0000_c4s2_057256_03.jpg", "._0001_c1s1_000151_01.jpg"):
            make_image(root / folder / name, 1)
        (root / folder / "Thumbs.db").touch()
    for name in ("0007_c12_f0046182.jpg", "0007_c3_f0057671.jpg"):  # as in DukeMTMC-reID
        make_image(root / "bounding_box_train" / name, 1)
    train, test = load("market1501", root), load("market1501", root, "test")
    assert train.cameras is not None
    assert test.cameras is not None
    # Junk is left out, and distractors are in the gallery alone.
    assert (train.classes, train.cameras.tolist()) == (("0001", "0007"), [1, 2, 12, 3])
    assert (test.classes, test.labels.tolist()) == (("0000", "0002"), [1, 0, 1])
    assert test.cameras.tolist() == [1, 4, 2]


# Files that are missing, damaged or disagree

PARTS = {
    "cub": ["images.txt", "image_class_labels.txt", "images"],
    "cars": ["cars_annos.mat", "car_ims"],
    "sop": ["Ebay_train.txt", "Ebay_test.txt"],
    "inshop": [f"Eval/{LIST}"],
    "market1501": ["query"],
}


@pytest.mark.parametrize(("name", "part"), [(name, part) for name in PARTS for part in PARTS[name]])
def test_a_missing_part_is_named_with_where_to_get_it(
    name: str, part: str, make_any: Maker, tmp_path: Path
) -> None:
    root = make_any(name, tmp_path)
    (root / part).rename(root / "elsewhere")
    with pytest.raises(UserError, match=rf"lacks {Path(part).name}.*published.*https?://"):
        load(name, root)


DISAGREE = [
    ("cub", "image_class_labels.txt", "10 4\n", "", r"disagree in the images 10"),
    ("cub", "classes.txt", "4 004.Bird_4\n", "", r"disagree in the classes 4"),
    ("cub", "classes.txt", "4 004", "5 005.B\n4 004", r"disagree in the classes 5"),
    ("cub", "image_class_labels.txt", "3 1\n", "3 2\n", r"folders of 001.Bird_1/Bird_1_0002"),
    ("cub", "image_class_labels.txt", "3 1\n", "2 1\n", r"image_id more than once: 2"),
    ("cub", "image_class_labels.txt", "3 1\n", "3 1.5\n", r"line 3: class_id is '1.5'; .*a whole number"),
    ("cub", "images.txt", "Bird_1_0001", "Bird_1_0000", r"more than once: '001.Bird_1/Bird_1_0000.jpg'"),
    ("sop", "Ebay_train.txt", "image_id ", "id ", r"the header is 'id class_id .*; expected 'image_id"),
    ("sop", "Ebay_train.txt", "4 2 1", "4 b 1", r"line 5: class_id is 'b'; expected a whole number"),
    ("sop", "Ebay_test.txt", " 3 1 ", " 2 1 ", r"class_id is in both Ebay_train.txt and Ebay_test.txt: 2"),
    ("sop", "Ebay_test.txt", "6 3 1 ", "5 3 1 ", r"image_id is in both .*: 5"),
    ("sop", "Ebay_test.txt", "873_0", "871_0", r"path is in both .*111085122871_0.JPG"),
    ("inshop", f"Eval/{LIST}", "10\n", "11\n", r"promises 11 images and lists 10"),
    ("inshop", f"Eval/{LIST}", "10\n", "", r"the header is "),
    ("inshop", f"Eval/{LIST}", "1 train", "1 training", r"evaluation_status training; expected train, query"),
    ("inshop", f"Eval/{LIST}", "id_00000001/02_", "id_00000001/01_", r"more than once: .*/01_1_front.jpg"),
]


@pytest.mark.parametrize(("name", "file", "old", "new", "message"), DISAGREE)
def test_lists_that_disagree_are_refused(
    name: str, file: str, old: str, new: str, message: str, make_any: Maker, tmp_path: Path
) -> None:
    root = make_any(name, tmp_path)
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new, 1) if name == "inshop" else text.replace(old, new))
    with pytest.raises(UserError, match=message):
        load(name, root)


@pytest.mark.parametrize("name", ["photo.jpg", "0001_s1_000151.jpg", "c1s1_000151_01.jpg", "0001_c.png"])
def test_other_names_of_pedestrians_are_refused(
    name: str, make_market1501: Maker, make_image: Callable[..., None], tmp_path: Path
) -> None:
    root = make_market1501(tmp_path)
    make_image(root / "query" / name, 1)
    with pytest.raises(UserError, match=rf"query/{name} does not tell identity and camera.*rename"):
        load("market1501", root, "test")


def test_queries_are_needed(make_market1501: Maker, tmp_path: Path) -> None:
    root = make_market1501(tmp_path)
    for file in (root / "query").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="the test split of market1501 has no query image"):
        load("market1501", root, "test")


CONTENTS = [
    b"",
    b"\xff\xfe1\0 \0a\0",
    b"1 \0\n",
    b"\xe4\n",
    b"9" * 100_000 + b" a\n",
    b"x" * 100_000,
    b"1\rimage_name item_id evaluation_status\r",
    b"1\nimage_name item_id evaluation_status\n" + b"y" * 100_000 + b" a train\n",
]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
@pytest.mark.parametrize(
    ("name", "file"), [("cub", "images.txt"), ("sop", "Ebay_train.txt"), ("inshop", f"Eval/{LIST}")]
)
def test_a_bad_list_is_one_short_error(
    name: str, file: str, content: bytes, make_any: Maker, tmp_path: Path
) -> None:
    root = make_any(name, tmp_path)
    (root / file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(name, root)
    assert len(str(caught.value)) < 2500


def test_a_list_that_is_no_file_is_refused(tmp_path: Path, make_sop: Maker) -> None:
    root = make_sop(tmp_path)
    (root / "Ebay_train.txt").unlink()
    os.mkfifo(root / "Ebay_train.txt")  # nobody ever writes to it
    with pytest.raises(UserError, match=r"Ebay_train.txt is not a file"):
        load("sop", root)


# Cars' annotations


def rewrite(root: Path, change: Callable[[dict[str, Any]], object], *, packed: bool = True) -> None:
    content = {name: value for name, value in loadmat(root / "cars_annos.mat").items() if name[:2] != "__"}
    change(content)
    savemat(root / "cars_annos.mat", content, do_compression=packed)


def set_field(field: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["annotations"][0, 2].__setitem__(field, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("annotations"),
        lambda c: c.pop("class_names"),
        lambda c: c.update(annotations=[1, 2]),
        lambda c: c.update(annotations={"class": 1, "test": 0}),
        lambda c: c.update(class_names=c["class_names"][:, :3]),
        lambda c: c.update(annotations=c["annotations"][:, :8]),
        lambda c: c.update(class_names="Audi"),
        set_field("class", 0),
        set_field("class", 1.5),
        set_field("class", [1, 2]),
        set_field("class", "1"),
        set_field("relative_im_path", 7),
        set_field("relative_im_path", "car_ims/000001.jpg"),
    ],
)
def test_annotations_that_disagree_are_refused(
    change: Callable[[dict[str, Any]], object], make_cars: Maker, tmp_path: Path
) -> None:
    root = make_cars(tmp_path)
    rewrite(root, change)
    with pytest.raises(UserError, match=r"car.*Cars-196 is published"):
        load("cars", root)


def header(version: bytes = b"\0\1IM") -> bytes:
    return b"MATLAB MAT-file".ljust(124) + version


def variable(content: bytes) -> bytes:
    packed = zlib.compress(content)
    return struct.pack("<II", 15, len(packed)) + packed


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<!DOCTYPE html><html>" * 20,
        bytes(4096),
        header(b"\0\2IM") + b"\x89HDF",
        header(),
        header() + b"\x0e\0\0",
        header() + struct.pack("<II", 14, 99),
        header() + struct.pack("<II", 15, 4) + b"junk",
        header() + variable(bytes(1 << 20))[:-4],
        header() + variable(bytes(1 << 17)),  # more than the limit of this test
        header() + variable(bytes(1 << 15)) * 3,
    ],
)
def test_what_is_no_file_of_annotations_is_refused(
    content: bytes, make_cars: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_cars(tmp_path)
    (root / "cars_annos.mat").write_bytes(content)
    monkeypatch.setattr(published, "_CARS_LIMIT", 1 << 16)
    with pytest.raises(UserError, match=r"cars_annos.mat is damaged, or not the original.*fetch it again"):
        load("cars", root)


def test_annotations_that_are_not_packed_are_read_and_damaged_ones_end_nothing(
    make_cars: Maker, tmp_path: Path
) -> None:
    expected = load("cars", make_cars(tmp_path))
    whole = (file := make_cars(tmp_path, packed=False) / "cars_annos.mat").read_bytes()
    found = load("cars", tmp_path)
    assert (found.classes, found.files) == (expected.classes, expected.files)
    for place in (160, 400):
        file.write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
        with pytest.raises(UserError, match="Cars-196 is published"):
            load("cars", tmp_path)


def test_every_flipped_bit_in_the_annotations_is_noticed(make_cars: Maker, tmp_path: Path) -> None:
    root = make_cars(tmp_path)
    file = root / "cars_annos.mat"
    whole = file.read_bytes()
    for place in range(128, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(UserError, match="fetch it again"):
            load("cars", root)
