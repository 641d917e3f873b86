"""Runs: what a run's folder holds, what is refused, and that nothing is lost when a disk is full."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from robustmetric.training.module import MetricModule
from robustmetric.training.recipe import Recipe, load_recipe
from robustmetric.training.run import train

# Two steps an epoch, without perturbations: what is tested here is what lies around them.
QUICK: dict[str, Any] = {"defense": "N/A[R]", "batch": 1024, "epochs": 1, "dim": 16, "validation": 0}
WEIGHTS = ("last.safetensors", "best.safetensors")

pytestmark = pytest.mark.slow  # trainings from beginning to end

TINY = """
from torch import nn

def network(dim):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, dim))
"""


def quick(**changes: Any) -> Recipe:
    return load_recipe("digits", {**QUICK, **changes})


def go(
    out: Path, *, resume: bool = False, callbacks: Sequence[L.Callback] = (), **changes: Any
) -> MetricModule:
    """Train, with a network of one layer unless another is asked for."""
    if "model" not in changes:
        tiny = out.parent / "tiny.py"
        tiny.parent.mkdir(parents=True, exist_ok=True)
        tiny.write_text(TINY)
        changes["model"] = f"{tiny}:network"
    return train(
        quick(**changes), out, resume=resume, callbacks=callbacks, progress=False, report=lambda _: None
    )


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MetricModule]:
    """A run of two epochs of 16 steps, which no test changes."""
    out = tmp_path_factory.mktemp("runs") / "new" / "run"
    return out, go(out, model="c2f2", batch=128, epochs=2, dim=32, steps=1, defense="HM[S,LGA]&ICS")


# The folder of a run


def test_metrics(finished: tuple[Path, MetricModule]) -> None:
    found = rows(finished[0])
    columns = list(found[0])
    assert columns[:2] == ["epoch", "step"]
    assert {"hardness/reached", "perturbed", "mAP", "mAP@R", "NMI"} <= set(columns)
    assert all(None not in row and None not in row.values() for row in found), "a row of another length"
    assert [(row["epoch"], row["step"]) for row in found] == [
        ("0", "10"), ("0", "16"), ("1", "20"), ("1", "30"), ("1", "32"),
    ]  # fmt: skip
    scored = [row for row in found if row["R@1"]]
    assert [row["step"] for row in scored] == ["16", "32"]
    assert all(10 < float(row["R@1"]) <= float(row["R@2"]) <= 100 for row in scored)
    for row in found:
        if row not in scored:
            parts = float(row["loss/triplet"]) + float(row["loss/ICS"])
            assert float(row["loss"]) == pytest.approx(parts, rel=1e-4)


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    go(tmp_path / "a", seed=1)
    torch.rand(7)  # what was drawn before does not matter
    go(tmp_path / "b", seed=1)
    go(tmp_path / "c", seed=2)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a["last.safetensors"] == b["last.safetensors"]
    assert a["metrics.csv"] == b["metrics.csv"]
    assert a["last.safetensors"] != c["last.safetensors"]


# A folder that is taken


def test_a_folder_with_a_run_is_refused(finished: tuple[Path, MetricModule]) -> None:
    before = contents(finished[0])
    with pytest.raises(ValueError, match="holds a run already: resume it, or give another folder"):
        go(finished[0], model="c2f2", batch=128, epochs=2, dim=32, steps=1, defense="HM[S,LGA]&ICS")
    assert contents(finished[0]) == before


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    for resume in (False, True):
        with pytest.raises(ValueError, match="is not empty and holds no run: give another folder"):
            go(tmp_path, resume=resume)
    assert contents(tmp_path) == {"thesis.txt": b"precious"}


# Resuming


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lr": 0.01}, "lr was 0.001, is 0.01"),
        ({"seed": 3, "eps": 0.1}, "eps was 0.2, is 0.1, seed was 0, is 3"),
    ],
)
def test_resume_with_another_recipe_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "recipe.yaml").write_text(
        "".join(f"{k}: {v}\n" for k, v in quick().model_dump(mode="json").items() if v is not None)
    )
    before = contents(out)
    with pytest.raises(ValueError, match=rf"holds another run: {told}; resume with its own recipe"):
        go(out, resume=True, model="c2f2", **changes)
    assert contents(out) == before


@pytest.mark.parametrize("rest", ["1", "1,2", "1,2,0.3"])
def test_a_row_cut_short_is_dropped(tmp_path: Path, rest: str) -> None:
    go(tmp_path / "whole", epochs=2)
    go(tmp_path / "parts", epochs=1)
    with (tmp_path / "parts" / "metrics.csv").open("a", newline="") as file:
        file.write(rest)
    go(tmp_path / "parts", epochs=2, resume=True)
    assert contents(tmp_path / "whole")["metrics.csv"] == contents(tmp_path / "parts")["metrics.csv"]


# Networks and weights of one's own
