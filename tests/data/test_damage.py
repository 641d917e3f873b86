"""Damaged caches as they are met on the command line."""

from __future__ import annotations

import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from robustmetric.data import pairs
from robustmetric.data.stored import Stored, block_digests
from robustmetric.errors import UserError
from tests.helpers.command import command, refused, works
from tests.helpers.runs import make_pictures

SHAPE = (40, 5, 7, 3)
Array = NDArray[np.uint8]


@pytest.fixture
def training(tmp_path: Path) -> list[object]:
    """Return the command of a short training on pictures, without its folder."""
    root = make_pictures(tmp_path / "data", each=4)
    where = ["--data", "folder", "--root", root, "--cache", tmp_path / "cache"]
    settings = ["batch=8", "model=c2f2", "resize=8", "crop=8", "defense=N/A[R]", "dim=8"]
    return ["train", *where, "--epochs", 1, *(part for entry in settings for part in ("--set", entry))]


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


@pytest.mark.slow
def test_a_training_on_a_damaged_cache_says_so_and_makes_it_anew(
    training: list[object], tmp_path: Path
) -> None:
    works(*training, "--out", tmp_path / "first")
    pixels = next((tmp_path / "cache").rglob("*-train-*.npy"))
    flip(pixels, -200)
    said = works(*training, "--out", tmp_path / "second")
    assert re.search(rf"the cache {re.escape(str(pixels))} is damaged: \d+ of its 24 images", said)
    assert "is damaged" not in works(*training, "--out", tmp_path / "third")
    weights = {(tmp_path / run / "last.safetensors").read_bytes() for run in ("first", "second", "third")}
    assert len(weights) == 1


@pytest.mark.slow
def test_an_evaluation_on_a_damaged_cache_says_so(training: list[object], tmp_path: Path) -> None:
    works(*training, "--out", tmp_path / "run")
    evaluation = [
        "evaluate", tmp_path / "run", "--cache", tmp_path / "cache", "--queries", 2, "--steps", 1,
        "--checks", "none", "--out",
    ]  # fmt: skip
    works(*evaluation, tmp_path / "first")
    pixels = next((tmp_path / "cache").rglob("*-test-*.npy"))
    flip(pixels, -200)
    assert f"the cache {pixels} is damaged" in works(*evaluation, tmp_path / "second")
    assert "is damaged" not in works(*evaluation, tmp_path / "third")


def test_a_training_whose_cache_shrinks_is_told(
    training: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pairs.PairLoader._batch

    def cut(
        self: pairs.PairLoader, order: pairs.Order, look: Any, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self.pixels, Stored)
        os.truncate(self.pixels.path, 1000)
        return batch(self, order, look, step)

    with monkeypatch.context() as patch:
        patch.setattr(pairs.PairLoader, "_batch", cut)
        said = refused(*training, "--out", tmp_path / "run")
    assert ".npy became shorter while it was read" in said
    assert "start the same command again" in said
    again = command(*training, "--out", tmp_path / "again")
    assert again.code == 0
    assert "is damaged" in again.out


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Stored, Array]:
    pixels = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
    (tmp_path / "a").write_bytes(b"head" + pixels.tobytes())
    return Stored(tmp_path / "a", SHAPE, 4), pixels


INDICES = [
    0, -1, np.int64(7), slice(None), slice(3, 9), slice(9, 3), slice(None, None, 3), slice(None, None, -1),
    [4, 5, 6, 1], np.array([39, 0, 1, 2, 2, -1]), np.array([], dtype=np.int64), np.arange(40) % 3 == 0,
    (3, slice(1, 4)), (slice(2, 5), slice(1, 4), slice(0, 2)), (np.array([1, 9]), 2, 3, 0), (5, ..., 1),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("positions", [True, False])
def test_pixels_in_a_file_are_indexed_like_an_array(
    index: Any,
    positions: bool,
    stored: tuple[Stored, Array],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not positions:  # as on Windows
        monkeypatch.delattr(os, "preadv")
    file, pixels = stored
    found, expected = file[index], pixels[index]
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)
    assert file.shape == pixels.shape
    assert (file.dtype, file.ndim, file.nbytes, len(file)) == (pixels.dtype, 4, pixels.nbytes, 40)


@pytest.mark.parametrize("index", [40, -41, np.array([40]), np.array([-41]), np.ones(3, dtype=bool)], ids=str)
def test_rows_that_are_not_there_are_refused(index: object, stored: tuple[Stored, Array]) -> None:
    with pytest.raises(IndexError):
        stored[0][index]  # type: ignore[index]


def test_pixels_in_a_file_are_sent_by_their_path(stored: tuple[Stored, Array]) -> None:
    file, pixels = stored
    sent = pickle.dumps(file)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent), pixels)  # noqa: S301 (our own bytes)
    assert np.asarray(file, dtype=np.float32).dtype == np.float32


def test_threads_may_read_at_once(stored: tuple[Stored, Array], monkeypatch: pytest.MonkeyPatch) -> None:
    file, pixels = stored
    monkeypatch.delattr(os, "preadv")
    with ThreadPoolExecutor(8) as pool:
        for row, found in enumerate(pool.map(file.__getitem__, [*range(40)] * 20)):
            assert np.array_equal(found, pixels[row % 40])


def test_blocks_are_found_that_differ(stored: tuple[Stored, Array], tmp_path: Path) -> None:
    file, pixels = stored
    blocks = block_digests(pixels)
    assert file.damaged(blocks) == []
    flip(tmp_path / "a", 4 + 105 * 20)
    assert file.damaged(blocks) == [1]
    os.truncate(tmp_path / "a", 4 + 105 * 40 - 1)
    assert file.damaged(blocks) == [1, 2]
    with pytest.raises(UserError, match="became shorter"):
        file[39]


def test_a_file_in_the_place_of_an_array_gives_the_same_batches(
    stored: tuple[Stored, Array],
) -> None:
    file, pixels = stored
    labels = torch.arange(40) % 5
    first, second = (
        list(pairs.PairLoader(source, labels, pairs=4, seed=0, crop=4, flip=True))
        for source in (file, pixels)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[0], other[0])
    assert torch.equal(pairs.ImageArray(file, 4)[3:9], pairs.ImageArray(pixels, 4)[3:9])
