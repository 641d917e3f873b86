"""Signals: a stop at the end of the step, of one that takes too long, and at once."""

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
from robustmetric.training.callbacks import Keeper
from tests.helpers.command import Said, command, works
from tests.helpers.processes import until
from tests.training.conftest import QUICK

ENDLESS = ("--defense", "min-max[S]", "--batch", 512, "--epochs", 2, "--steps", 10**6)


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
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number, handler in before.items():
            signal.signal(number, handler)
    assert found == {**before, signal.SIGINT: signal.default_int_handler}, "handlers are not given back"


def stopped(out: Path, *numbers: signal.Signals) -> Said:
    with sent(out / "metrics.csv", *numbers):
        said = command("train", *ENDLESS, "--out", out)
    assert "Traceback" not in said.out + said.err
    assert f"go on with: robustmetric train --out {out} --resume" in said.out
    return said


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
    ],
)
def test_one_signal_leaves_a_step_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr(stops, "PATIENCE", 0.2)
    said = stopped(tmp_path / "run", number)
    assert said.code == code
    assert f"stopped by {number.name} (the step took longer than 0.2 s and was left" in said.out
    assert "there is no checkpoint yet: it begins anew" in said.out
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    said = stopped(tmp_path / "run", signal.SIGINT, signal.SIGINT)
    assert said.code == 130
    assert "stopped at once" in said.out


@pytest.mark.slow
def test_the_last_checkpoint_stands_when_a_step_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(keeper: Keeper, trainer: L.Trainer, *_: Any) -> None:
        while trainer.global_step == 3:
            (tmp_path / "ready").touch()
            time.sleep(0.01)

    arguments = ("train", *QUICK[:-1], "save_every=2", "--epochs", 1)
    with monkeypatch.context() as patched, sent(tmp_path / "ready", signal.SIGTERM):
        patched.setattr(stops, "PATIENCE", 0.2)
        patched.setattr(Keeper, "on_train_batch_start", endless)
        said = command(*arguments, "--out", tmp_path / "run")
    assert said.code == 143
    assert "the checkpoint of step 2 is whole" in said.out
    assert "goes on from step 2" in works("train", "--out", tmp_path / "run", "--resume")
    works(*arguments, "--out", tmp_path / "whole")
    for name in ("last.safetensors", "metrics.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_nothing_is_left_while_a_checkpoint_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "PATIENCE", 0.05)
    signals = stops.Signals()
    signals.busy = True
    with stops.stopping(signals):
        signal.raise_signal(signal.SIGTERM)
        assert until(lambda: signals.left is not None)
        time.sleep(0.1)  # it is heard, and nothing is raised
        signals.busy = False
        with pytest.raises(stops.Left):
            time.sleep(60)


def test_a_second_signal_waits_for_the_checkpoint_too() -> None:
    signals = stops.Signals()
    signals.busy = True
    with stops.stopping(signals):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert signals.left == "stopped at once"
        signals.busy = False
        with pytest.raises(stops.Left):
            time.sleep(60)


def test_nothing_is_sent_when_the_training_has_ended() -> None:
    signals = stops.Signals()
    with stops.stopping(signals):
        pass
    signals.leave("too late")
    assert signals.left is None


def test_another_thread_trains_without_signals() -> None:
    signals, failed = stops.Signals(), []

    def work() -> None:
        try:
            with stops.stopping(signals):
                signals.leave("nobody hears it")
        except BaseException as error:
            failed.append(error)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_stop_before_the_training_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("robustmetric.training.run.load_sets", interrupted)
    said = command("train", *QUICK, "--epochs", 1, "--out", tmp_path / "run")
    assert said.code == 130
    assert "the same command starts it again" in said.out
    assert not (tmp_path / "run").exists()
