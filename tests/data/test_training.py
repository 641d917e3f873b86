"""Two steps of training through the command line on every layout of data."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import refused, works

pytestmark = pytest.mark.slow  # trainings from beginning to end

Make = Callable[..., Path]


def arguments(tmp_path: Path, name: str, root: Path) -> tuple[object, ...]:
    settings = ("--epochs", 1, "--steps", 1, "--batch", 8, "--set", "resize=36", "--set", "crop=32")
    places = ("--root", root, "--cache", tmp_path / "cache", "--out", tmp_path / "run")
    return ("train", "--data", name, "--model", "c2f2", *places, *settings)


@pytest.mark.parametrize("name", ["cub", "cars", "sop", "inshop", "market1501", "folder", "csv"])
def test_every_layout_can_be_trained_on(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    make: Make = request.getfixturevalue(f"make_{name}")
    counts: dict[str, tuple[Any, ...]] = {
        "cub": ([2, 2, 2, 2, 3, 3],),
        "cars": ([2, 2, 2, 2, 3, 3],),
        "sop": ([3, 3, 2], [3, 3]),
        "inshop": ([3, 3, 2], [3, 3]),
        "market1501": ([3, 3, 2], [3, 3]),
        "folder": ({"ant": 3, "bee": 3, "cat": 2, "dog": 3, "elk": 3},),
        "csv": (["a"] * 3 + ["b"] * 3 + ["c"] * 2 + ["d"] * 3 + ["e"] * 3,),
    }
    root = make(tmp_path / "data", *counts[name])
    looks = ("--set", "flip=true", "--set", "zoom=0.5", "--set", "jitter=0.3")
    works(*arguments(tmp_path, name, root), *looks)
    run = tmp_path / "run"
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert int(rows[-1]["step"]) == 2
    assert 0 <= float(rows[-1]["R@1"]) <= 100
    about = json.loads((run / "run.json").read_text())
    assert about["recipe"]["seed"] == 0
    assert about["recipe"]["fit"] == ("pad" if name in ("folder", "csv") else "squeeze")
    assert about["skipped"] == []
    assert len(about["starts"]) == 1
    assert (run / "last.safetensors").exists()


def test_broken_images_are_listed_and_left_out_on_request(tmp_path: Path, make_folder: Make) -> None:
    root = make_folder(tmp_path / "data", {"ant": 5, "bee": 4, "cat": 3, "dog": 3})
    broken = sorted((root / "ant").iterdir())[0]
    broken.write_bytes(b"")
    train = arguments(tmp_path, "folder", root)
    assert str(broken) in refused(*train)
    said = works(*train, "--skip-broken")
    assert "left out, not readable" in said
    assert broken.name in said.replace("\n", "")
