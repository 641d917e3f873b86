"""Market-1501 and its like in their original layout: identities, cameras, junk and distractors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from robustmetric.data import load

Maker = Callable[..., Path]


def test_names_tell_identity_and_camera(make_market1501: Maker, tmp_path: Path) -> None:
    root = make_market1501(tmp_path, (2, 3), (3, 2))
    train, test = load("market1501", root), load("market1501", root, "test")
    assert (train.classes, test.classes) == (("0001", "0002"), ("0003", "0004"))
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 0, 1, 1, 1], [0, 1, 0, 0, 1])
    assert train.cameras is not None
    assert train.cameras.tolist() == [1, 2, 1, 2, 3]
    assert test.cameras is not None
    assert test.cameras.tolist() == [1, 1, 2, 3, 2]
    assert (train.is_query, train.is_gallery) == (None, None)
    assert test.is_query is not None
    assert test.is_query.tolist() == [True, True, False, False, False]
    assert test.is_gallery is not None
    assert test.is_gallery.tolist() == [False, False, True, True, True]
    assert test.files is not None
    assert test.files[0] == root / "query" / "0003_c1s1_000003_00.jpg"


def test_junk_is_left_out_and_distractors_are_in_the_gallery_alone(
    make_market1501: Maker, make_image: Callable[..., None], tmp_path: Path
) -> None:
    root = make_market1501(tmp_path)
    for folder in ("bounding_box_train", "bounding_box_test", "query"):
        for name in ("-1_c1s1_000401_03.jpg", "0000_c4s2_057256_03.jpg", "._0001_c1s1_000151_01.jpg"):
            make_image(root / folder / name, 1)
        (root / folder / "Thumbs.db").touch()
    assert load("market1501", root).classes == ("0001", "0002")
    test = load("market1501", root, "test")
    assert test.classes == ("0000", "0003", "0004")
    assert test.labels.tolist() == [1, 2, 0, 1, 1, 2]
    assert test.is_query is not None
    assert test.is_query.tolist() == [True, True, False, False, False, False]


def test_names_of_duke_are_read(
    make_market1501: Maker, make_image: Callable[..., None], tmp_path: Path
) -> None:
    root = make_market1501(tmp_path, (), (2,))
    for name in ("0007_c12_f0046182.jpg", "0007_c3_f0057671.jpg"):
        make_image(root / "bounding_box_train" / name, 1)
    train = load("market1501", root)
    assert train.classes == ("0007",)
    assert train.cameras is not None
    assert train.cameras.tolist() == [12, 3]


def test_all_keeps_cameras_and_queries(make_market1501: Maker, tmp_path: Path) -> None:
    everything = load("market1501", make_market1501(tmp_path, (2,), (2,)), "all")
    assert everything.cameras is not None
    assert everything.cameras.tolist() == [1, 2, 1, 2]
    assert everything.is_query is not None
    assert everything.is_query.tolist() == [True, True, True, False]
    assert everything.is_gallery is not None
    assert everything.is_gallery.tolist() == [True, True, False, True]


def test_the_directory_above_is_accepted(make_market1501: Maker, tmp_path: Path) -> None:
    root = make_market1501(tmp_path / "Market-1501-v15.09.15")
    assert load("market1501", tmp_path).files == load("market1501", root).files


def test_a_missing_part_is_named(make_market1501: Maker, tmp_path: Path) -> None:
    root = make_market1501(tmp_path)
    for file in (root / "query").iterdir():
        file.unlink()
    (root / "query").rmdir()
    with pytest.raises(FileNotFoundError, match="lacks query of market1501; give the directory that holds"):
        load("market1501", root)


@pytest.mark.parametrize("name", ["photo.jpg", "0001_s1_000151.jpg", "c1s1_000151_01.jpg", "0001_c.png"])
def test_other_names_are_refused(
    name: str, make_market1501: Maker, make_image: Callable[..., None], tmp_path: Path
) -> None:
    root = make_market1501(tmp_path)
    make_image(root / "query" / name, 1)
    message = (
        rf"1 images in .*query do not tell identity and camera by a name such as 0002_c1s1.*: {name}; rename"
    )
    with pytest.raises(ValueError, match=message):
        load("market1501", root, "test")


def test_queries_are_needed(make_market1501: Maker, tmp_path: Path) -> None:
    root = make_market1501(tmp_path)
    for file in (root / "query").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="the test split of market1501 has no query image"):
        load("market1501", root, "test")
