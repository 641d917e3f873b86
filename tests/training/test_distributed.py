"""Two processes, started as a user would: one network, one gradient, each anchor once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

import robustmetric as rm
from robustmetric.data.pairs import PairLoader
from robustmetric.locks import LOCK
from robustmetric.training import load_recipe
from robustmetric.training.sets import set_apart
from tests.helpers.command import refused
from tests.helpers.processes import alive, needs_proc, until

CHANGES = {"epochs": 1, "steps": 2, "batch": 128, "save_every": 4}

SCRIPT = """
import sys
from pathlib import Path
import lightning as L
import torch
import robustmetric as rm

torch.set_num_threads(1)
out = Path(sys.argv[1])

class Spy(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 0:
            self.begin = {k: v.clone() for k, v in module.model.state_dict().items()}
            self.batch = [t.clone() for t in batch]
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 0:
            self.gradients = [p.grad.clone() for p in module.model.parameters()]
    def on_fit_end(self, trainer, module):
        follows = module.defense.state_dict()["destination.previous_loss"]
        kept = {"begin": self.begin, "batch": self.batch, "gradients": self.gradients, "follows": follows}
        torch.save({**kept, "end": module.model.state_dict()}, out.parent / f"rank{trainer.global_rank}.pt")

recipe = rm.training.load_recipe("digits", CHANGES)
machines = rm.training.Machines(device="cpu", devices=2)
rm.training.train(recipe, out, machines=machines, callbacks=[Spy()], progress=False)
"""


@pytest.mark.slow
def test_two_workers_train_as_one(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(SCRIPT.replace("CHANGES", repr(CHANGES)))
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))

    # The same network on both workers, at the beginning and at the end.
    for moment in ("begin", "end"):
        assert all(torch.equal(one[moment][name], two[moment][name]) for name in one[moment])
    assert any(not torch.equal(one["begin"][name], one["end"][name]) for name in one["begin"])
    assert torch.equal(one["follows"], two["follows"])

    # The gradient that both took a step along is the mean of the two half batches' gradients.
    recipe = load_recipe("digits", CHANGES)
    gradients = []
    for rank, worker in enumerate((one, two)):
        model = rm.model("c2f2", size=8)
        model.load_state_dict(worker["begin"])
        defense = rm.defense(recipe.defense, eps=recipe.eps, alpha=recipe.alpha, steps=recipe.steps)
        seed = np.random.SeedSequence([recipe.seed, 0, rank]).generate_state(1)[0]
        defense.generator.manual_seed(int(seed))
        defense(model, *worker["batch"]).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for mine, other, averaged in zip(*gradients, one["gradients"], strict=True):
        assert mine is not None
        assert other is not None
        mean = (mine + other) / 2
        assert (mean - averaged).norm() <= 1e-5 * averaged.norm()

    # Each worker had its own part of the epoch, and both have set the same images apart.
    images = rm.data.load("digits")
    assert images.pixels is not None
    rows = np.flatnonzero(~set_apart(images.labels.numpy(), 0.1, recipe.seed, whole_classes=False))
    for rank, worker in enumerate((one, two)):
        loader = PairLoader(images.pixels, images.labels, rows=rows, pairs=64, seed=0, rank=rank, world=2)
        for mine, other in zip(next(iter(loader)), worker["batch"], strict=True):
            assert torch.equal(mine, other)


ARGUMENTS = ("--epochs", 500, "--batch", 256, "--devices", 2, "--device", "cpu", "--steps", 1)


def start(out: Path, log: Path, *more: object) -> subprocess.Popen[bytes]:
    """Start a training with two workers in a session of its own, as a terminal does."""
    arguments = ["-m", "robustmetric", "train", "--out", out, *ARGUMENTS, *more]
    with log.open("w") as file:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, *map(str, arguments)],
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def started_by(process: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in children.read_text().split()]


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("which", ["started", "first"])
def test_a_worker_that_is_killed_ends_all(tmp_path: Path, which: str) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    first = start(out, log, "--defense", "N/A[R]", "--set", "save_every=1")
    try:
        assert until((out / "last.ckpt").exists), log.read_text()
        started = started_by(first)
        os.kill(first.pid if which == "first" else started[0], signal.SIGKILL)
        code = first.wait(timeout=600)
        assert until(lambda: not any(map(alive, started)))
    finally:
        first.kill()
    said = log.read_text()
    assert "Traceback" not in said
    if (
        which == "started" and code == 1
    ):  # Lightning kills the first one, too, where it does not notice by itself
        assert (
            "error: the connection to another worker was lost; resume with: robustmetric train --out" in said
        )
    else:
        assert code == -signal.SIGKILL


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_two_signals_while_workers_start_end_all(tmp_path: Path, number: signal.Signals, code: int) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    first = start(out, log, "--defense", "N/A[R]")
    try:
        assert until(lambda: first.poll() is not None or bool(started_by(first))), log.read_text()
        started = started_by(first)
        for _ in range(2):
            os.kill(first.pid, number)
        assert first.wait(timeout=600) == code, log.read_text()
        assert until(lambda: not any(map(alive, started)))
    finally:
        first.kill()
    said = log.read_text()
    assert f"stopped by {number.name}" in said
    assert "start the same command again" in said
    assert "Traceback" not in said
    assert not out.exists()


def start_node(rank: int, port: int, log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    """Start a command as a machine of two; a program on each of them is what they share with real ones."""
    where = {"NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with log.open("w") as file:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "robustmetric", "train", *map(str, arguments)],
            stdout=file,
            stderr=file,
            env={**os.environ, **where, "OMP_NUM_THREADS": "1"},
        )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
def test_two_machines_train_as_two_workers_of_one_also_if_one_is_killed(tmp_path: Path) -> None:
    out, alone = tmp_path / "run", tmp_path / "alone"
    recipe = ["--steps", 1, "--batch", 128, "--epochs", 2, "--set", "dim=16", "--set", "save_every=1"]
    one = [*recipe, "--device", "cpu"]
    logs = [tmp_path / f"log{rank}" for rank in (0, 1)]
    two = ["--device", "cpu", "--devices", 1, "--nodes", 2, "--out", out]

    port = free_port()
    nodes = [start_node(rank, port, logs[rank], *recipe, *two) for rank in (0, 1)]
    try:
        assert until((out / "last.ckpt").exists), [log.read_text() for log in logs]
        assert f"by process {nodes[0].pid} " in (out / LOCK).read_text()
        nodes[1].kill()
        assert nodes[0].wait(timeout=600) == 1
    finally:
        for node in nodes:
            node.kill()
    said = logs[0].read_text()
    assert said.count("error: the connection to another worker was lost; resume with: ") == 1, said
    assert f"resume with: robustmetric train --out {out} --resume --device cpu --nodes 2" in said
    assert "Traceback" not in said

    port = free_port()
    nodes = [start_node(rank, port, logs[rank], "--resume", *two) for rank in (0, 1)]
    try:
        assert [node.wait(timeout=600) for node in nodes] == [0, 0], [log.read_text() for log in logs]
    finally:
        for node in nodes:
            node.kill()
    assert "resumes at step" in logs[0].read_text()
    assert logs[1].read_text() == ""
    assert not (out / LOCK).exists()

    # The same network and the same figures as of two workers on one machine, never interrupted.
    done = start_node(0, free_port(), logs[0], *one, "--devices", 2, "--out", alone)
    assert done.wait(timeout=600) == 0, logs[0].read_text()
    for name in ("last.safetensors", "metrics.csv"):
        assert (out / name).read_bytes() == (alone / name).read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in alone.iterdir()}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "and MASTER_ADDR, MASTER_PORT is not set: give"),
        ({"NODE_RANK": "2"}, "NODE_RANK must be a whole number from 0 to 1, not 2"),
        ({"NODE_RANK": "x"}, "'x'"),
    ],
)
def test_machines_that_cannot_find_each_other_are_refused(
    environment: dict[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    usual = {"NODE_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in {**usual, **environment}.items():
        monkeypatch.setenv(name, value)
    assert told in refused("train", "--nodes", 2, "--device", "cpu", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
