"""What a training says of itself: at its start, and after each step and validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from robustmetric.training.callbacks import ShowProgress
from robustmetric.training.recipe import load_recipe
from robustmetric.training.run import train

QUICK = {"defense": "N/A[R]", "batch": 256, "epochs": 4, "dim": 16, "validate_every": 2}


@pytest.mark.slow
def test_each_step_and_each_validation_is_shown(tmp_path: Path) -> None:
    shown: list[tuple[Any, ...]] = []
    said: list[str] = []

    def update(*where: Any, now: bool) -> None:
        shown.append((*where, now))

    def go(epochs: int) -> None:
        shown.clear()
        said.clear()
        recipe = load_recipe("digits", {**QUICK, "epochs": epochs})
        show = ShowProgress(update, said.append, "recipe digits")
        how: dict[str, Any] = {"resume": True, "progress": False, "report": lambda _: None}
        train(recipe, tmp_path / "run", callbacks=[show], **how)

    go(2)
    assert [(stage, step, steps) for stage, step, steps, _, now in shown if not now] == [
        ("train", step, 16) for step in range(1, 17)
    ]
    assert [(step, now) for _, step, _, _, now in shown][-1] == (16, True)
    assert "loss" in shown[0][3]
    assert "R@1" in shown[-1][3]
    assert [number in line for number, line in zip(("c2f2", "900", "cpu", "16"), said, strict=True)] == [
        True
    ] * 4
    go(4)
    assert [step for _, step, _, _, now in shown if not now] == [*range(17, 33)]
    assert "resumes at step 16" in said[2]
