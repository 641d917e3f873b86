"""Signals: a stop at the end of the step, at once, while a checkpoint is written, and before the training."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from robustmetric.training import stops
from robustmetric.training.callbacks import Checkpoints
from tests.helpers.command import command, works
from tests.helpers.processes import until
from tests.training.conftest import QUICK


@contextmanager
def sent(ready: Path, *numbers: signal.Signals) -> Iterator[None]:
    """Send this process signals, one after the other, once a file is there."""

    def send() -> None:
        if until(lambda: ready.exists() or over.is_set()) and not over.is_set():
            for number in numbers:
                time.sleep(0.3)
                os.kill(os.getpid(), number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    over = threading.Event()
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_last_checkpoint_counts_when_a_second_signal_leaves_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    def endless(keeper: Checkpoints, trainer: L.Trainer, *_: Any) -> None:
        while trainer.global_step == 3:
            (tmp_path / "ready").touch()
            time.sleep(0.01)

    arguments = ("train", *QUICK[:-1], "save_every=2", "--epochs", 1)
    with monkeypatch.context() as patched, sent(tmp_path / "ready", number, number):
        patched.setattr(Checkpoints, "on_train_batch_start", endless)
        said = command(*arguments, "--out", tmp_path / "run")
    assert said.code == code
    assert "Traceback" not in said.out + said.err
    resume = f"robustmetric train --out {tmp_path / 'run'} --resume"
    assert f"stopped by {number.name} within a step; resume with: {resume}" in said.out
    assert not (tmp_path / "run" / ".lock").exists()
    assert "resumes at step 2" in works("train", "--out", tmp_path / "run", "--resume")
    works(*arguments, "--out", tmp_path / "whole")
    for name in ("last.safetensors", "metrics.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_checkpoint_that_is_being_written_is_finished_first() -> None:
    signals, written = stops.Signals(), []
    signals.stepping = True

    def write() -> None:
        with signals, signals.saved():
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
            written.append(True)

    with pytest.raises(stops.Left):
        write()
    assert written == [True]
    assert signals.name == "SIGTERM"


def test_a_signal_before_the_first_step_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(stops.Left), stops.Signals():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_trains_without_signals() -> None:
    failed = []

    def work() -> None:
        try:
            with stops.Signals():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
