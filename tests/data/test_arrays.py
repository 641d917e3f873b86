"""Digits, and MNIST and Fashion-MNIST from idx files: names, packing, headers, and the real one."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from robustmetric.data import arrays, load
from robustmetric.data.arrays import CLASSES, DEBIAN, read_idx
from robustmetric.errors import UserError

Maker = Callable[..., Path]
LABELS = (7, 2, 2, 7, 9)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_both_splits_are_read_under_all_common_names(
    name: str, mark: str, packed: bool, make_idx: Maker, tmp_path: Path
) -> None:
    make_idx(tmp_path, LABELS, mark=mark, packed=packed)
    make_idx(tmp_path, (0, 0), split="test", mark=mark, packed=packed)
    train, test = load(name, tmp_path), load(name, tmp_path, "test")
    assert train.pixels is not None
    expected = np.random.default_rng(5).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    assert np.array_equal(train.pixels, expected[..., None])
    # Only classes that are there count, by number.
    assert train.labels.tolist() == [1, 0, 0, 1, 2]
    assert train.classes == (("2", "7", "9") if name == "mnist" else ("Pullover", "Sneaker", "Ankle boot"))
    assert (len(test), test.classes) == (2, ("0",) if name == "mnist" else ("T-shirt/top",))
    torch.from_numpy(train.pixels)  # warns if it could not be written to


def test_a_plain_file_that_kept_its_gz_name_is_read(make_idx: Maker, tmp_path: Path) -> None:
    make_idx(tmp_path, LABELS, packed=False)
    for path in list(tmp_path.iterdir()):
        path.rename(f"{path}.gz")
    assert len(load("mnist", tmp_path)) == 5


def test_missing_files_and_roots_are_named(
    make_idx: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_idx(tmp_path, LABELS)
    with pytest.raises(UserError, match=r"lacks t10k-images-idx3-ubyte \(or t10k-images.idx3.*published at"):
        load("mnist", tmp_path, "test")
    monkeypatch.setattr(arrays, "DEBIAN", tmp_path)
    assert len(load("fashion-mnist")) == 5
    monkeypatch.setattr(arrays, "DEBIAN", tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"fashion-mnist needs a root: .*dataset-fashion-mnist"):
        load("fashion-mnist")


def repacked(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda content: gzip.compress(change(gzip.decompress(content)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (repacked(lambda b: b[:-1]), r"header promises 5 × 28 × 28 bytes, and 3919 follow"),
        (repacked(lambda b: b + b"\0"), r"promises 5 × 28 × 28 bytes, and more follow"),
        (repacked(lambda b: b[:10]), r"is no idx file of bytes with 3 dimensions"),
        (repacked(lambda b: b""), r"is no idx file"),
        (repacked(lambda b: b"\0\0\x08\x01" + b[4:]), r"is no idx file"),
        (repacked(lambda b: struct.pack(">4I", 0x803, 5, 14, 56) + b[16:]), r"shape \(5, 14, 56\)"),
        (repacked(lambda b: struct.pack(">4I", 0x803, 4, 28, 28) + b[16:-784]), r"and 5 labels"),
        (lambda b: b[: len(b) // 2], "damaged or truncated gzip file"),
        (lambda b: b[:-8] + bytes(8), "damaged or truncated gzip file"),
        (lambda b: b[:100] + b"\xff" * 50 + b[150:], "damaged or truncated gzip file"),
    ],
)
def test_a_damaged_file_is_refused(
    change: Callable[[bytes], bytes], message: str, make_idx: Maker, tmp_path: Path
) -> None:
    file = make_idx(tmp_path, LABELS) / "train-images-idx3-ubyte.gz"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        load("mnist", tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(file, "wb") as stream:
        stream.write(struct.pack(">4I", 0x803, 1 << 20, 1 << 10, 1 << 10))
        for _ in range(64):
            stream.write(bytes(1 << 20))
    monkeypatch.setattr(arrays, "LIMIT", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"train-images.* promises 1048576 × 1024 × 1024 bytes"):
            read_idx(file, 3)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((0, 0, 10), "holds the label 10; mnist's labels are 0 to 9"),
        ((1, 2, 3), r"no class in the train split of mnist has two images \(3 "),
        ((), r"no class in the train split of mnist has two images \(0 "),
    ],
)
def test_labels_that_make_no_data_set_are_refused(
    labels: tuple[int, ...], message: str, make_idx: Maker, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        load("mnist", make_idx(tmp_path, labels))


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist() -> None:
    for split, each in (("train", 6000), ("test", 1000)):
        images = load("fashion-mnist", split=split)  # type: ignore[arg-type]
        assert images.pixels is not None
        assert images.pixels.shape == (10 * each, 28, 28, 1)
        assert images.classes == CLASSES["fashion-mnist"]
        assert torch.bincount(images.labels).tolist() == [each] * 10
        if split == "train":  # the first image is an ankle boot, and its corners are empty
            assert images.classes[images.labels[0]] == "Ankle boot"
            assert (images.pixels[0, 0, 0, 0], images.pixels[0].max()) == (0, 255)
