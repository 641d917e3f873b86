"""Two processes, started as a user would: one network, one gradient, each anchor once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import robustmetric as rm
from robustmetric.data.pairs import Batch, PairLoader
from robustmetric.training import MetricModule, load_recipe
from robustmetric.training.sets import set_apart
from tests.helpers.faults import fault
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
machines = rm.training.Machines(accelerator="cpu", devices=2)
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
        timeout=300,
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
        first: Batch = next(iter(loader))
        assert torch.equal(first.images, worker["batch"][0])
        assert torch.equal(first.labels, worker["batch"][1])


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "steps", "told", "again"),
    [
        pytest.param(
            "started",
            10**6,
            "worker 2 of 2 was ended by SIGKILL; there is no checkpoint yet",
            "start the same command again",
            marks=fault("training", "a worker that is killed", "the first one says which, and how to go on"),
        ),
        pytest.param(
            "first",
            1,
            "the first worker has ended; the checkpoint of step ",
            "go on with: robustmetric train --out OUT --resume --accelerator cpu --devices 2",
            marks=fault("training", "the first worker is killed", "the others say so and end"),
        ),
    ],
)
def test_a_worker_that_is_killed_ends_all_with_a_word(
    tmp_path: Path, which: str, steps: int, told: str, again: str
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    options = ["--epochs", 500, "--batch", 256, "--devices", 2, "--accelerator", "cpu", "--steps", steps]
    # In a perturbation without end a worker does not notice by itself that the connection is gone.
    options += ["--defense", "N/A[R]" if steps == 1 else "min-max[S]", "--set", "save_every=1"]
    ready = out / ("last.ckpt" if steps == 1 else "metrics.csv")
    arguments = [sys.executable, "-m", "robustmetric", "train", "--out", out, *options]
    with log.open("w") as file:
        first = subprocess.Popen([*map(str, arguments)], stdout=file, stderr=file)  # noqa: S603
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
        try:
            assert until(ready.exists), log.read_text()
            started = [int(number) for number in children.read_text().split()]
            os.kill(first.pid if which == "first" else started[0], signal.SIGKILL)
            code = first.wait(timeout=60)
            assert until(lambda: not any(map(alive, started)), seconds=60)
        finally:
            first.kill()
    said = log.read_text()
    assert code == (-signal.SIGKILL if which == "first" else 1)
    assert said.count("error: ") == 1
    assert f"error: {told}" in said
    assert again.replace("OUT", str(out)) in said
    assert "Traceback" not in said


def test_the_module_is_lazy_but_there() -> None:
    assert rm.training.MetricModule is MetricModule
