"""Callbacks: the collapse guard catches what collapses, the table of metrics takes whatever is logged."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.data.pairs import PairLoader
from robustmetric.training import (
    Checkpoints,
    CollapsedError,
    CollapseGuard,
    MetricModule,
    MetricsFile,
    load_recipe,
    train,
)

SMALL = {"epochs": 3, "steps": 4, "save_every": 1000}


@pytest.mark.slow
@pytest.mark.parametrize("defense", ["HM[S,0]", "min-max[S]"])
def test_a_collapse_is_caught_and_the_good_weights_kept(defense: str, tmp_path: Path) -> None:
    with pytest.raises(CollapsedError) as caught:
        train(load_recipe("digits", {**SMALL, "defense": defense}), tmp_path / "run", progress=False)
    message = str(caught.value)
    step = re.search(
        r"the network collapsed at about step (\d+): its embeddings all point the same way", message
    )
    assert step is not None
    assert 1 <= int(step[1]) <= 28
    assert "What usually helps: a softer destination" in message
    good = rm.model("c2f2", size=8)
    assert rm.load_weights(good, tmp_path / "run" / "good.safetensors") == []
    images = torch.from_numpy(rm.data.load("digits", split="test").pixels).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        spread = 1 - rm.embed(good, images).mean(0).square().sum()
    assert spread > 0.01


@pytest.mark.slow
def test_the_gradual_adversary_does_not_collapse(tmp_path: Path) -> None:
    train(load_recipe("digits", {**SMALL, "defense": "HM[S,LGA]"}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "good.safetensors").exists()


def test_a_network_that_diverges_is_caught(tmp_path: Path) -> None:
    recipe = load_recipe("digits", {**SMALL, "defense": "N/A[S]", "lr": 1e6})
    with pytest.raises(CollapsedError, match=r"the network diverged at step 1: .* embeddings hold NaN"):
        train(recipe, tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "good.safetensors").exists()


# A defense of one's own, with logs of its own


class Bare(rm.Defense):
    """Needs nothing but `step`; logs what nobody knows, and something more from the third step on."""

    def __init__(self, nan_at: int | None = None, spread: float | None = None) -> None:
        nn.Module.__init__(self)
        self.generator = torch.Generator()
        self.nan_at, self.spread, self.steps = nan_at, spread, 0

    @property
    def name(self) -> str:
        return "bare"

    def forward(self, model: nn.Module, images: Tensor, labels: Tensor) -> rm.Step:
        self.steps += 1
        z = rm.embed(model, images)
        loss = z.square().sum() * (torch.nan if self.steps == self.nan_at else 1)
        later = {"later": 7.0} if self.steps > 2 else {}
        if self.spread is not None:
            later["spread"] = self.spread
        none = torch.zeros(0, dtype=torch.long)
        triplets = rm.Triplets(none, none, none)
        return rm.Step(loss, {"mine/weight": float(self.steps), **later}, z, labels, triplets, images)


def fit(folder: Path, defense: rm.Defense, steps: int, resume: bool = False, **guard: Any) -> None:
    digits = rm.data.load("digits")
    assert digits.pixels is not None
    folder.mkdir(exist_ok=True)
    trainer = L.Trainer(
        max_steps=steps,
        callbacks=[
            MetricsFile(folder / "metrics.csv", every=1),
            CollapseGuard(folder, patience=2, **guard),
            Checkpoints(folder, every=1),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    module = MetricModule(rm.model("c2f2", size=8, dim=8), defense)
    pairs = PairLoader(digits.pixels[:64], digits.labels[:64], pairs=8, seed=0)
    trainer.fit(module, pairs, ckpt_path=folder / "last.ckpt" if resume else None, weights_only=True)


def table(folder: Path) -> tuple[list[str], list[dict[str, str]]]:
    with (folder / "metrics.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or ()), list(reader)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_logs_that_nobody_knows_get_columns_of_their_own(tmp_path: Path) -> None:
    fit(tmp_path, Bare(), 5)
    header, rows = table(tmp_path)
    assert header == [*MetricsFile.FIELDS, "mine/weight", "later"]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row["mine/weight"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row["later"] for row in rows] == ["", "", "7", "7", "7"]
    assert all(None not in row.values() and None not in row for row in rows), "a valid table"
    # It goes on: the columns of before stay, also those that are not logged yet.
    fit(tmp_path, Bare(), 7, resume=True)
    header, rows = table(tmp_path)
    assert header == [*MetricsFile.FIELDS, "mine/weight", "later"]
    assert [row["mine/weight"] for row in rows] == ["1", "2", "3", "4", "5", "1", "2"]
    assert [row["later"] for row in rows] == ["", "", "7", "7", "7", "", ""]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_without_a_spread_nan_is_still_caught(tmp_path: Path) -> None:
    with pytest.raises(CollapsedError, match=r"diverged at step 4: the loss is NaN.*step 2, before that"):
        fit(tmp_path, Bare(nan_at=4), 9, go_on=True)
    good = rm.model("c2f2", size=8, dim=8)
    assert rm.load_weights(good, tmp_path / "good.safetensors") == []
    assert all(bool(p.isfinite().all()) for p in good.parameters())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"nan_at": 1}, r"began with it, at step 1: the loss is NaN.*look at the"),
        ({"spread": 0.0}, r"collapsed at about step 1: .* from the first step on"),
        ({"spread": -1e-9}, r"collapsed at about step 1"),
    ],
)
def test_a_failure_from_the_first_step_on_leaves_no_good_weights(
    tmp_path: Path, how: dict[str, Any], told: str
) -> None:
    with pytest.raises(CollapsedError, match=told):
        fit(tmp_path, Bare(**how), 9)
    assert not (tmp_path / "good.safetensors").exists()
