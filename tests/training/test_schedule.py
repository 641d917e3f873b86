"""Learning rates: by steps, and as a recipe asks for them."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robustmetric.training.module import scheduler
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


@pytest.mark.slow
def test_the_learning_rate_of_a_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("digits", {**QUICK, "lr": 0.01, "schedule": "cosine", "warmup": 4})
    train(recipe, tmp_path / "run", progress=False)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        logged = {int(row["step"]): float(row["lr"]) for row in csv.DictReader(file) if row["lr"]}
    # After four steps of warm-up, the sixth of twelve along half a cosine.
    assert logged == {10: pytest.approx(0.005 * (1 + math.cos(math.pi * 5 / 12)), rel=1e-5)}
