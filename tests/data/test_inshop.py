"""In-Shop Clothes Retrieval in its original layout, and a list that disagrees with itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from robustmetric.data import load

Maker = Callable[..., Path]

LIST = "list_eval_partition.txt"


def test_the_list_is_the_split(make_inshop: Maker, tmp_path: Path) -> None:
    root = make_inshop(tmp_path, (2, 3), (3, 2))
    train, test = load("inshop", root), load("inshop", root, "test")
    assert train.classes == ("id_00000001", "id_00000002")
    assert test.classes == ("id_00000003", "id_00000004")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 0, 1, 1, 1], [0, 0, 0, 1, 1])
    assert (train.is_query, train.is_gallery, test.cameras) == (None, None, None)
    assert test.is_query is not None
    assert test.is_query.tolist() == [True, False, False, True, False]
    assert test.is_gallery is not None
    assert test.is_gallery.tolist() == [False, True, True, False, True]
    assert test.files is not None
    assert test.files[0] == root / "Img/img/WOMEN/Dresses/id_00000003/01_1_front.jpg"


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


def test_a_missing_list_is_named(make_inshop: Maker, tmp_path: Path) -> None:
    root = make_inshop(tmp_path)
    (root / "Eval" / LIST).unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks {LIST} of inshop; give .*DeepFashion"):
        load("inshop", root)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("10\n", "11\n", r"promises 11 images and lists 10; fetch it again\. In-Shop"),
        ("10\n", "", r"line 1: the number of images is 'image_name.*; expected a whole number"),
        (
            "image_name",
            "image",
            "the header is 'image item_id evaluation_status'; expected 'image_name item_id",
        ),
        ("1 train", "1 training", "line 3: evaluation_status is 'training'; expected train, query, gallery"),
        ("id_00000001 train", "train", "line 3: '.* train' is not 'image_name item_id evaluation_status'"),
        ("id_00000001/02_", "id_00000001/01_", "lists images more than once: .*/01_1_front.jpg; list each"),
    ],
)
def test_a_list_that_disagrees_is_refused(
    old: str, new: str, message: str, make_inshop: Maker, tmp_path: Path
) -> None:
    file = make_inshop(tmp_path) / "Eval" / LIST
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as caught:
        load("inshop", tmp_path)
    assert str(file) in str(caught.value)
