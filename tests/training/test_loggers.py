"""Loggers: the same steps as metrics.csv, one curve over all starts, the recipe as hyper-parameters."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from robustmetric.errors import UserError
from robustmetric.training.checkpoint import reached
from robustmetric.training.loggers import make_logger
from robustmetric.training.recipe import Recipe, load_recipe
from robustmetric.training.run import train

events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

QUICK = {"defense": "N/A[R]", "batch": 128, "dim": 16, "save_every": 7}


class Stop(L.Callback):
    """Ends the training at a step as if the power had gone."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("no power")


def go(out: Path, *, stop: int = -1, **changes: Any) -> None:
    """Train with a logger, as the command line does."""
    train(
        load_recipe("digits", {**QUICK, "epochs": 2, **changes}),
        out,
        resume=True,
        progress=False,
        callbacks=[Stop(stop)],
        loggers=[make_logger("tensorboard", out, reached(out / "last.ckpt").step)],
    )


def curves(out: Path) -> dict[str, list[tuple[int, float]]]:
    found = events.EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as rows:
        return list(csv.DictReader(rows))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    go(out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("column", ["loss", "lr", "spread", "R@1", "mAP"])
def test_steps_count_as_in_metrics_csv(column: str, whole: Path) -> None:
    rows = [(int(row["step"]), float(row[column])) for row in table(whole / "metrics.csv") if row[column]]
    assert [step for step, _ in rows] == ([15, 30] if column in ("R@1", "mAP") else [10, 20, 30])
    found = curves(whole)[column]
    assert [step for step, _ in found] == [step for step, _ in rows]
    assert [value for _, value in found] == pytest.approx([value for _, value in rows], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [4, 12, 20, 24])
def test_one_curve_over_all_starts(stop: int, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "parts"
    with pytest.raises(RuntimeError, match="no power"):
        go(out, stop=stop)
    go(out)
    assert curves(out) == curves(whole)
    assert [path.name for path in (out / "tensorboard").iterdir() if path.is_dir()] == []


def test_the_recipe_is_there(whole: Path) -> None:
    text = (whole / "tensorboard" / "hparams.yaml").read_text(encoding="utf-8")
    assert all(f"{key}:" in text for key in Recipe.model_fields)
    found = events.EventAccumulator(str(whole / "tensorboard"))
    found.Reload()
    content = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"N/A[R]" in content
    assert "hp_metric" not in curves(whole)


OWN = """
from lightning.pytorch.loggers import CSVLogger

class Mine(CSVLogger):
    def __init__(self, out, step, flag=False):
        super().__init__(out, name="mine", version="")
        self.known = (str(out), step, flag)

class Alone(CSVLogger):
    def __init__(self):
        super().__init__("nowhere")

def number():
    return 7
"""


def test_loggers_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    made: Any = make_logger(f"{tmp_path}/own.py:Mine(flag=True)", tmp_path / "run", 7)
    assert made.known == (str(tmp_path / "run"), 7, True)
    assert type(make_logger(f"{tmp_path}/own.py:Alone", tmp_path / "run")).__name__ == "Alone"
    for name, told in {
        "number": "made a int; it must make a Logger",
        "Mine(step=3)": "step is given already; leave it out",
    }.items():
        with pytest.raises(UserError, match=told):
            make_logger(f"{tmp_path}/own.py:{name}", tmp_path / "run")
