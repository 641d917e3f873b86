"""MNIST and Fashion-MNIST from idx files: names, packing, headers, and the real one where it is present."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from robustmetric.data import idx as idx_module
from robustmetric.data import load
from robustmetric.data.idx import CLOTHES, DEBIAN, read_idx

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
    assert train.files is None
    assert train.pixels is not None
    assert train.pixels.shape == (5, 28, 28, 1)
    assert train.pixels.dtype == np.uint8
    expected = np.random.default_rng(5).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    assert (train.pixels[..., 0] == expected).all()
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


def test_a_missing_file_is_named_with_all_its_names(make_idx: Maker, tmp_path: Path) -> None:
    make_idx(tmp_path, LABELS)
    with pytest.raises(FileNotFoundError) as caught:
        load("mnist", tmp_path, "test")
    assert "lacks t10k-images-idx3-ubyte (or t10k-images.idx3-ubyte; either may end in .gz)" in str(
        caught.value
    )
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match="lacks train-labels-idx1-ubyte"):
        load("mnist", tmp_path)


def images(tmp_path: Path, packed: bool) -> Path:
    return tmp_path / f"train-images-idx3-ubyte{'.gz' if packed else ''}"


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change what is in a file, inside its packing."""
    content = path.read_bytes()
    packed = path.suffix == ".gz"
    changed = change(gzip.decompress(content) if packed else content)
    path.write_bytes(gzip.compress(changed) if packed else changed)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], r"is truncated: its header promises 5 × 28 × 28 = 3920 bytes, 3919 follow"),
        (lambda b: b[:16], r"is truncated: .*3920 bytes, 0 follow"),
        (lambda b: b[:10], r"is truncated: it ends inside its header"),
        (lambda b: b"", r"is not an idx file .*: it starts with nothing, expected 00000803"),
        (lambda b: b + b"\0", r"goes on after the 5 × 28 × 28 = 3920 bytes that its header promises"),
        (lambda b: b"\0\0\x08\x01" + b[4:], r"is not an idx file of bytes with 3 dimensions: .*00000801"),
        (lambda b: b"\0\0\x0d\x03" + b[4:], r"it starts with 00000d03, expected 00000803"),
        (lambda b: b"<!DOCTYPE html>", r"it starts with 3c21444f, expected 00000803"),
        # A header that promises more than any memory holds is not believed.
        (
            lambda b: b[:4] + b"\xff" * 12 + b[16:],
            r"is damaged: its header promises 4294967295 × .*more than",
        ),
        (
            lambda b: struct.pack(">4I", 0x803, 5, 14, 56) + b[16:],
            r"holds images of 14 × 56 pixels; mnist's are 28",
        ),
        (
            lambda b: struct.pack(">4I", 0x803, 4, 28, 28) + b[16 : 16 + 4 * 784],
            r"holds 4 images and .*train-labels-idx1-ubyte.* 5 labels; take both files from one source",
        ),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    change: Callable[[bytes], bytes], message: str, packed: bool, make_idx: Maker, tmp_path: Path
) -> None:
    make_idx(tmp_path, LABELS, packed=packed)
    rewrite(images(tmp_path, packed), change)
    with pytest.raises(ValueError, match=message) as caught:
        load("mnist", tmp_path)
    assert str(images(tmp_path, packed)) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b[:-4],
        lambda b: b[:5],
        lambda b: b[:-8] + bytes(8),
        lambda b: b[:100] + b"\xff" * 50 + b[150:],
        lambda b: b + b"more",
    ],
)
def test_damaged_packing_is_told_from_damaged_content(
    change: Callable[[bytes], bytes], make_idx: Maker, tmp_path: Path
) -> None:
    make_idx(tmp_path, LABELS)
    path = images(tmp_path, True)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(
        ValueError, match=r"images-idx3-ubyte\.gz is a damaged or truncated gzip file .*again"
    ):
        load("mnist", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_labels_above_nine_are_refused(name: str, make_idx: Maker, tmp_path: Path) -> None:
    make_idx(tmp_path, (0, 0, 10))
    with pytest.raises(ValueError, match=f"holds the label 10; {name}'s labels are 0 to 9"):
        load(name, tmp_path)


@pytest.mark.parametrize("labels", [(), (1,), (1, 2, 3)])
def test_idx_files_where_no_class_has_two_images_are_refused(
    labels: tuple[int, ...], make_idx: Maker, tmp_path: Path
) -> None:
    make_idx(tmp_path, labels)
    with pytest.raises(
        ValueError, match=rf"no class in the train split of mnist has two images \({len(labels)} "
    ):
        load("mnist", tmp_path)


def test_fashion_mnist_is_found_where_debian_puts_it(
    make_idx: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idx_module, "DEBIAN", make_idx(tmp_path, LABELS))
    assert len(load("fashion-mnist")) == 5
    monkeypatch.setattr(idx_module, "DEBIAN", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"fashion-mnist needs a root: .*dataset-fashion-mnist"):
        load("fashion-mnist")


def test_one_dimension_and_another_are_not_confused(make_idx: Maker, tmp_path: Path) -> None:
    make_idx(tmp_path, LABELS, packed=False)
    assert read_idx(tmp_path / "train-labels-idx1-ubyte", 1).tolist() == list(LABELS)
    with pytest.raises(ValueError, match="expected 00000803"):
        read_idx(tmp_path / "train-labels-idx1-ubyte", 3)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist() -> None:
    train, test = load("fashion-mnist"), load("fashion-mnist", split="test")
    assert train.pixels is not None
    assert test.pixels is not None
    assert (train.pixels.shape, test.pixels.shape) == ((60000, 28, 28, 1), (10000, 28, 28, 1))
    assert train.classes == test.classes == CLOTHES
    assert torch.bincount(train.labels).tolist() == [6000] * 10
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    # The first training image is an ankle boot, and its corners are empty.
    assert train.classes[train.labels[0]] == "Ankle boot"
    assert train.pixels[0, 0, 0, 0] == 0
    assert train.pixels[0].max() == 255
