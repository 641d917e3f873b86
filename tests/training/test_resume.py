"""Trainings that are killed at any moment and resumed: as if nothing had happened.

This file is also the program that the tests start (see tests/helpers/processes.py).
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from robustmetric import data
from robustmetric.training import Stopped
from robustmetric.training.callbacks import Checkpoints
from robustmetric.training.recipe import load_recipe
from robustmetric.training.run import train
from tests.helpers.processes import at_call, die, forked, needs_fork, run_program

pytestmark = pytest.mark.slow  # trainings that are killed and resumed

Plan = tuple[str, float]  # what ends the attempt, and when; ("none", 0) lets it finish

DROPOUT = """
from torch import nn

def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 32)
    )
"""


# The program: attempts in processes of their own


class Death(L.Callback):
    """Kills its process as planned, counted from the beginning of the training."""

    def __init__(self, kind: str, number: float) -> None:
        self.kind, self.number = kind, number

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module: Any = pl_module
        save, fsync, replace = torch.save, os.fsync, Path.replace

        def half_a_file(content: Any, file: Any) -> None:
            whole = io.BytesIO()
            save(content, whole)
            file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
            file.flush()
            die()

        def renamed(draft: Path, final: Path) -> None:
            replace(draft, final)
            die()

        def wait_and_die() -> None:
            time.sleep(self.number)
            die()

        adam: Any = sys.modules["torch.optim.adam"]
        if self.kind == "time":
            threading.Thread(target=wait_and_die, daemon=True).start()
        elif self.kind == "forward":  # of the network: most are in PGD
            module.model.forward = at_call(self.number, lambda *_: die(), module.model.forward)
        elif self.kind == "adam":  # in the optimiser's step, where it changes the parameters
            adam.adam = at_call(self.number, lambda *_, **__: die(), adam.adam)
        elif self.kind == "half":  # half of a checkpoint is written
            torch.save = at_call(self.number, half_a_file, save)
        elif self.kind == "fsync":
            os.fsync = at_call(self.number, lambda _: die(), fsync)
        elif self.kind == "rename":  # a file has just been put in its place
            replacing: Any = at_call(self.number, renamed, replace)
            Path.replace = lambda draft, final: replacing(draft, final)  # type: ignore[method-assign, assignment]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.kind in ("SIGTERM", "SIGINT") and trainer.global_step == self.number:
            print("ready", flush=True)
            keeper = next(c for c in trainer.callbacks if isinstance(c, Checkpoints))  # type: ignore[attr-defined]
            for _ in range(3000):
                if keeper.signals.name is not None:
                    return
                time.sleep(0.01)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._in_validation("before validation")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._in_validation("after validation")

    def _in_validation(self, kind: str) -> None:
        if self.kind == kind:
            self.number -= 1
            if self.number == 0:
                die()


def attempt(out: Path, changes: dict[str, Any], plan: Plan) -> str:
    """Train in a new process until it ends or is killed; say how it ended."""

    def act() -> None:
        recipe = load_recipe("digits", changes)
        try:
            train(recipe, out, resume=True, progress=False, callbacks=[Death(*plan)], report=lambda _: None)
            print("finished")
        except Stopped as stop:
            print(f"stopped by {stop}")

    def hear(line: str, child: int) -> bool:
        if line == "ready\n":
            os.kill(child, signal.Signals[plan[0]])
        return line == "ready\n"

    code, text = forked(act, hear)
    return "killed" if code == -signal.SIGKILL else text.strip()


def checkpoint_step(out: Path) -> int:
    """Read the checkpoint as a whole and say at which step it was made; 0 if there is none yet."""
    path = out / "last.ckpt"
    return int(torch.load(path, weights_only=True)["global_step"]) if path.exists() else 0


def program(order: dict[str, Any]) -> dict[str, Any]:
    """Make a training as it should be, then the planned ones, each in a folder of its own."""
    torch.set_num_threads(1)
    # What each attempt would read and import again, and what does not depend on how the last one ended.
    data.load = functools.cache(data.load)
    for split in ("train", "test"):
        data.load("digits", None, split)
    importlib.import_module("torch._dynamo")
    folder, changes = Path(order["folder"]), order["changes"]
    begin = time.monotonic()
    ends = [(attempt(folder / "whole", changes, ("none", 0)), 0)]
    took = time.monotonic() - begin
    number = 0

    def go(kind: str, moment: float) -> None:
        nonlocal number
        out = folder / f"run{number}"
        changed = {**changes, "epochs": int(moment)} if kind == "epochs" else changes
        ends.append((attempt(out, changed, (kind, moment)), checkpoint_step(out)))
        number += ends[-1][0] == "finished" and kind != "epochs"

    for kind, moment in order["plans"]:
        go(kind, moment)
    rng = random.Random(order["seed"])  # noqa: S311
    while sum(end == "killed" for end, _ in ends) < order["kills"] and len(ends) < 3 * order["kills"]:
        go("time", rng.uniform(0.02, 0.4) * took)
    go("none", 0)
    return {"ends": ends}


# The tests


def run(
    folder: Path, plans: Sequence[Plan] = (), *, kills: int = 0, **changes: Any
) -> tuple[list[str], list[int]]:
    """Run the program; give how each attempt ended and the step of the checkpoint it left behind.

    After the planned attempts come others that die at random moments, until there were so many kills.
    """
    changes = {"epochs": 2, "steps": 2, "save_every": 3, "validation": 0, **changes}
    order = {"folder": str(folder), "changes": changes, "plans": plans, "kills": kills, "seed": 3}
    ends = run_program(__file__, order)["ends"]
    assert ends[0][0] == ends[-1][0] == "finished", ends
    return [end for end, _ in ends[1:-1]], [step for _, step in ends[1:]]


def contents(out: Path) -> dict[str, bytes]:
    return {
        name: (out / name).read_bytes() for name in ("last.safetensors", "best.safetensors", "metrics.csv")
    }


def assert_as_uninterrupted(folder: Path) -> None:
    whole = contents(folder / "whole")
    runs = list(folder.glob("run*"))
    assert runs
    for out in runs:
        assert contents(out) == whole, f"{out.name} differs from the uninterrupted run"


@pytest.fixture
def dropout(tmp_path: Path) -> str:
    """A small network that draws from torch's global generator in each training step."""
    file = tmp_path / "mine.py"
    file.write_text(DROPOUT)
    return f"{file}:network"


@needs_fork
def test_killed_at_20_random_moments(tmp_path: Path, dropout: str) -> None:
    ends, _ = run(tmp_path, kills=20, model=dropout)
    assert set(ends) <= {"killed", "finished"}, ends
    assert ends.count("killed") == 20
    assert_as_uninterrupted(tmp_path)


@needs_fork
def test_killed_in_pgd_in_adam_and_in_saving(tmp_path: Path, dropout: str) -> None:
    plans: list[Plan] = [
        ("forward", 2),  # in the first step, before any checkpoint
        ("forward", 19),
        ("adam", 5),
        ("half", 2),
        ("fsync", 3),  # 1 and 2 write metrics.csv, then come two for each checkpoint
        ("fsync", 4),
        ("rename", 2),  # 1 is metrics.csv
        ("half", 1),
        ("before validation", 1),
        ("after validation", 1),
        ("forward", 23),
        ("adam", 6),
        ("half", 1),
        ("fsync", 5),
        ("half", 2),
        ("after validation", 1),
    ]
    ends, steps = run(tmp_path, plans, model=dropout)
    assert ends == ["killed"] * len(plans), (ends, steps)
    assert steps == sorted(steps), "a checkpoint was replaced by an older one"
    assert_as_uninterrupted(tmp_path)


@needs_fork
def test_killed_with_a_schedule_and_images_set_apart(tmp_path: Path, dropout: str) -> None:
    # An epoch is 15 steps here, and the learning rate is another in each of them.
    plans: list[Plan] = [("adam", 5), ("half", 2), ("after validation", 1), ("adam", 6), ("forward", 20)]
    settings: dict[str, Any] = {"validation": 0.1, "schedule": "cosine", "warmup": 4, "clip": 0.5}
    ends, steps = run(tmp_path, plans, model=dropout, **settings)
    assert ends == ["killed"] * len(plans), (ends, steps)
    assert steps[-1] == 30
    assert_as_uninterrupted(tmp_path)


@needs_fork
def test_a_checkpoint_at_the_end_of_an_epoch(tmp_path: Path, dropout: str) -> None:
    # An epoch is 16 steps: some of these end when, or just after, a checkpoint falls on its last one.
    plans: list[Plan] = [
        ("SIGTERM", 15),
        ("SIGTERM", 19),
        ("before validation", 1),
        ("SIGTERM", 31),
        ("before validation", 1),
        ("after validation", 1),
    ]
    ends, steps = run(tmp_path, plans, model=dropout, save_every=16)
    assert ends[:3] == ["stopped by SIGTERM", "stopped by SIGTERM", "killed"], (ends, steps)
    assert set(ends) <= {"stopped by SIGTERM", "killed", "finished"}, (ends, steps)
    assert max(steps) == 32, "more steps than two epochs have"
    assert_as_uninterrupted(tmp_path)


@needs_fork
def test_a_signal_stops_after_saving_and_epochs_can_be_added(tmp_path: Path, dropout: str) -> None:
    plans: list[Plan] = [("SIGTERM", 4), ("SIGINT", 10), ("epochs", 1), ("SIGTERM", 19), ("epochs", 2)]
    ends, steps = run(tmp_path, plans, model=dropout, epochs=3, save_every=100)
    assert ends == ["stopped by SIGTERM", "stopped by SIGINT", "finished", "stopped by SIGTERM", "finished"]
    # The step in which the signal came is finished and saved.
    assert steps == [5, 11, 16, 20, 32, 48]
    assert_as_uninterrupted(tmp_path)


if __name__ == "__main__":
    print(json.dumps(program(json.loads(sys.argv[1]))))
