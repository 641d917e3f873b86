"""What a training says of itself: at its start, now and then, and how long it will take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

import robustmetric as rm
from robustmetric.training.progress import Status, Teller
from robustmetric.training.recipe import load_recipe
from robustmetric.training.run import train
from tests.helpers.command import Clock

QUICK = {"defense": "N/A[R]", "batch": 256, "epochs": 4, "dim": 16, "validate_every": 2}


class Slow(L.Callback):
    """Lets each step take 3 seconds and each validation 20, and a start 500."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.clock.now += 500

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.now += 3

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.ready == 1:
            self.clock.now += 20


def follow(out: Path, *, resume: bool = False, **changes: Any) -> tuple[list[Status], list[str]]:
    """Train with a clock of its own; give what was told and said."""
    clock = Clock(1000)
    told: list[Status] = []
    said: list[str] = []
    train(
        load_recipe("digits", {**QUICK, **changes}),
        out,
        resume=resume,
        progress=False,
        callbacks=[Teller(told.append, said.append, "recipe digits", clock), Slow(clock)],
        report=lambda _: None,
    )
    return told, said


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Status], list[str]]:
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, *follow(out)


@pytest.mark.slow
def test_each_step_and_each_validation_is_told(followed: tuple[Path, list[Status], list[str]]) -> None:
    _, told, _ = followed
    assert [(s.step, s.validated) for s in told] == [
        *((step, False) for step in range(1, 17)), (16, False), (16, True),
        *((step, False) for step in range(17, 33)), (32, False), (32, True),
    ]  # fmt: skip
    assert {status.steps for status in told} == {32}
    assert all(status.loss is not None and status.perturbed == 0 for status in told)
    assert told[0].recall is None
    assert told[17].recall is not None
    assert 10 < told[17].recall <= 100
    assert told[20].recall == told[17].recall


def test_the_time_left_is_that_of_the_whole_training(
    followed: tuple[Path, list[Status], list[str]],
) -> None:
    _, told, _ = followed
    left = [status.left for status in told]
    # How long a validation takes is not known before the first one.
    assert left[:17] == [pytest.approx(3 * (32 - step)) for step in (*range(1, 17), 16)]
    assert left[17:-1] == [pytest.approx(3 * (32 - step) + 20) for step in (16, *range(17, 33), 32)]
    assert left[-1] == 0


@pytest.mark.slow
def test_after_a_resume_the_pace_is_that_of_this_start(
    followed: tuple[Path, list[Status], list[str]], tmp_path: Path
) -> None:
    follow(tmp_path / "run", epochs=2)
    told, said = follow(tmp_path / "run", epochs=4, resume=True)
    assert [s.step for s in told] == [*range(17, 33), 32, 32]
    assert told[0].left == pytest.approx(3 * 15)
    assert "goes on from step 16" in said[2]


def test_what_a_training_begins_with(followed: tuple[Path, list[Status], list[str]]) -> None:
    _, _, said = followed
    assert said == [
        "recipe digits: c2f2, N/A[R], ε = 51/255, α = 12.8/255, η = 8",
        "digits: learns from 900 images of 10 classes, 8×8 pixels; validated on 100 images of 10 classes "
        "(validation images)",
        f"on cpu; {sum(p.numel() for p in rm.model('c2f2', size=8, dim=16).parameters()):,} parameters; "
        "starts at random",
        "32 steps: 4 epochs of 8",
    ]


def test_weights_and_crop_are_said(tmp_path: Path) -> None:
    rm.save_weights(rm.model("c2f2", size=8, dim=16), tmp_path / "w.safetensors")
    changes: dict[str, Any] = {
        "weights": tmp_path / "w.safetensors",
        "validation": 0,
        "resize": 12,
        "crop": 8,
        "epochs": 1,
    }
    _, said = follow(tmp_path / "run", **changes)
    assert "1,000 images of 10 classes, 8×8 pixels; validated on 797 images of 10 classes (test im" in said[1]
    assert said[2].endswith(f"starts with {tmp_path / 'w.safetensors'}")
