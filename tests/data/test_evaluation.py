"""Evaluations and attacks through the command line on images in files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robustmetric import load_record
from robustmetric.data import load, load_pixels
from robustmetric.data.inputs import Inputs
from tests.helpers.command import works

Make = Callable[..., Path]
FEW = ["--queries", "5", "--steps", "2"]


TINY = ("--resize", 12, "--crop", 8, "--dim", 8)  # images, and embeddings


def files_of(root: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("name", ["cub", "folder", "csv"])
def test_an_evaluation_from_beginning_to_end(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    make: Make = request.getfixturevalue(f"make_{name}")
    what: dict[str, Any] = {
        "cub": [2, 2, 2, 4, 4, 4],
        "folder": {"ant": 3, "bee": 3, "cat": 3, "dog": 4, "elk": 4, "fox": 4},
        "csv": [letter for letter in "abcdef" for _ in range(4)],
    }
    root = make(tmp_path / "data", what[name])
    before = files_of(tmp_path / "data")
    out = tmp_path / "out"
    where = ("--data", name, "--root", root, "--cache", tmp_path / "cache", "--out", out)
    assert "no weights were given" in works("evaluate", "--model", "c2f2", *where, *TINY, *FEW)
    assert files_of(tmp_path / "data") == before
    record = load_record(out)
    images = load(name, root, "test")
    assert (record.data.name, record.data.images, record.data.classes) == (name, len(images), 3)
    assert record.data.shape == [3, 8, 8]
    assert (record.queries.count, record.queries.of) == (5, 12)
    assert record.ers is not None
    assert record.settings.eps == 8 / 255
    checks = {check.name: check for check in record.checks}
    # What the network was trained on is not known.
    assert checks["classes"].status == "not run"
    assert checks["budget"].status == "pass"

    # The images are the middle of the resized ones.
    inputs = Inputs(12, 8, 3, "squeeze" if name == "cub" else "pad")
    (test,) = load_pixels(name, root, inputs, ["test"], tmp_path / "cache")
    middle = test.pixels[:, 2:10, 2:10].transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    shape = f"{middle.shape} torch.float32".encode()
    whole = hashlib.sha256(test.labels.to(torch.int64).numpy().tobytes() + shape + middle.tobytes())
    assert record.data.sha256 == whole.hexdigest()
