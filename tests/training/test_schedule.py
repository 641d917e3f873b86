"""Learning rates, gradient clipping, and optimisers of one's own."""

from __future__ import annotations

import csv
import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import robustmetric as rm
from robustmetric.data.pairs import PairLoader
from robustmetric.training.module import MetricModule, scheduler
from robustmetric.training.recipe import load_recipe
from robustmetric.training.run import train

QUICK = {"defense": "N/A[R]", "batch": 256, "dim": 16, "validation": 0, "epochs": 2}


@given(
    steps=st.integers(4, 60),
    warmup=st.integers(0, 80),
    schedule=st.sampled_from(["constant", "cosine"]),
)
def test_it_rises_to_one_and_stays_or_falls_to_zero(steps: int, warmup: int, schedule: Any) -> None:
    make = scheduler(steps=steps, warmup=warmup, schedule=schedule)
    if make is None:
        assert (warmup, schedule) == (0, "constant")
        return
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    decay, rates = make(optimizer), []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        decay.step()
    warmup = min(warmup, steps // 4)
    rest = rates[warmup:]
    assert rates[:warmup] == [pytest.approx((k + 1) / warmup) for k in range(warmup)]
    assert rest[0] == 1
    assert rest == sorted(rest, reverse=True)
    assert rest[-1] == pytest.approx(1 if schedule == "constant" else 0)


class Rates(L.Callback):
    """Notes the learning rate of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.slow
def test_the_learning_rate_of_a_recipe(tmp_path: Path) -> None:
    spy = Rates()
    recipe = load_recipe("digits", {**QUICK, "lr": 0.01, "schedule": "cosine", "warmup": 4})
    train(recipe, tmp_path / "run", progress=False, callbacks=[spy])
    falling = [0.005 * (1 + math.cos(math.pi * k / 12)) for k in range(12)]
    assert spy.rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, *falling])
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        logged = {int(row["step"]): float(row["lr"]) for row in csv.DictReader(file) if row["lr"]}
    assert logged == {10: pytest.approx(spy.rates[9], rel=1e-5)}


def fit(module: MetricModule, folder: Path, steps: int = 3) -> None:
    digits = rm.data.load("digits")
    assert digits.pixels is not None
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_progress_bar=False, default_root_dir=folder,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, PairLoader(digits.pixels, digits.labels, pairs=32, seed=0))


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_an_optimiser_and_a_scheduler_of_ones_own(tmp_path: Path) -> None:
    def make(**options: Any) -> MetricModule:
        torch.manual_seed(2)
        return MetricModule(rm.model("c2f2", size=8, dim=8), rm.defense("N/A[R]"), **options)

    module = make(
        optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1),
    )
    fit(module, tmp_path)
    bare = make()
    sgd = torch.optim.SGD(bare.model.parameters(), lr=0.5, momentum=0.9)
    decay = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.1)
    digits = rm.data.load("digits")
    assert digits.pixels is not None
    for step, (images, labels) in enumerate(PairLoader(digits.pixels, digits.labels, pairs=32, seed=0)):
        if step == 3:
            break
        from numpy.random import SeedSequence

        bare.defense.generator.manual_seed(int(SeedSequence([0, step, 0]).generate_state(1)[0]))
        sgd.zero_grad()
        bare.defense(bare.model, images, labels).loss.backward()
        sgd.step()
        decay.step()
    mine, other = module.model.state_dict(), bare.model.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert isinstance(make().configure_optimizers(), torch.optim.Adam)
