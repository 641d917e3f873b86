"""Two workers: they do not wait for each other in PGD, learn the same, and follow one loss."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import robustmetric as rm

WORKER = """
import copy, json, os, sys
from datetime import timedelta
import torch
from torch import nn
import torch.distributed as dist
import robustmetric as rm

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(minutes=10))
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 8))
model = nn.parallel.DistributedDataParallel(net)
passes = []
model.register_forward_pre_hook(lambda *_: passes.append(1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
defense = rm.defense(sys.argv[1], eps=0.2, alpha=0.03, steps=6, seed=rank)
labels = torch.arange(6).repeat_interleave(2)
logs = []
for i in range(6):
    generator = torch.Generator().manual_seed(100 * rank + i)
    images = torch.rand(12, 1, 8, 8, generator=generator)
    alone, twin = copy.deepcopy(net), copy.deepcopy(defense)
    step = defense(model, images, labels)
    optimiser.zero_grad()
    step.loss.backward()
    twin(alone, images, labels).loss.backward()
    for p, q in zip(net.parameters(), alone.parameters()):
        mean = q.grad.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(p.grad, mean / 2, atol=1e-6, rtol=1e-4)
    optimiser.step()
    logs.append((step.logs["loss/triplet"], step.logs["hardness/destination"], step.logs["images/forward"]))
weights = [p.detach().flatten().tolist() for p in model.parameters()]
with open(f"{sys.argv[2]}/{rank}.json", "w") as file:
    json.dump({"weights": weights, "logs": logs, "passes": len(passes)}, file)
dist.barrier()
dist.destroy_process_group()
# DistributedDataParallel keeps threads of gloo alive; one that ends after Python aborts the process.
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HM[S,LGA]&ICS", "HM[S,gB(M)]"])
def test_two_workers_train_one_network(name: str, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(  # noqa: S603
        [*launch, str(script), name, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one["weights"] == two["weights"]
    # Each step goes through DistributedDataParallel once, or it spoils the buffers of its own gradient.
    assert one["passes"] == two["passes"] == 6
    # Unequal numbers of passes, which would have made the workers wait for each other for ever.
    assert [forward for _, _, forward in one["logs"]] != [forward for _, _, forward in two["logs"]]
    if name == "HM[S,LGA]&ICS":
        for step in range(5):
            mean = (one["logs"][step][0] + two["logs"][step][0]) / 2
            for worker in (one, two):
                assert worker["logs"][step + 1][1] == pytest.approx(-min(0.2, mean), abs=1e-6)


class Wrapped(nn.parallel.DistributedDataParallel):
    """Stands for the real one, without workers: it counts the passes, and those that are learned from."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.passes, self.learned = 0, 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.passes += 1
        self.learned += self.training and torch.is_grad_enabled()
        return self.module(*inputs, **kwargs)


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "N/A[R]",
        "EST[R]",
        "EST[R]&ICS",
        "ACT[S]",
        "ACT[S]&L(a,p,n)",
        "HM[S,LGA]",
        "HM[S,LGA]&ICS&L(a,p,n)",
    ],
)
def test_the_loss_alone_goes_through_the_wrapper(name: str, mixes: bool) -> None:
    """Once a step: that is where the workers' gradients meet, and perturbations take as long as they take."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(1)] if mixes else []
    network = nn.Sequential(*norm, nn.Flatten(), nn.Linear(9, 4)).train()
    model = Wrapped(network)
    labels = torch.arange(4).repeat_interleave(2)
    defense = rm.defense(name, eps=0.2, alpha=0.05, steps=3)
    for done in (1, 2):
        step = defense(model, torch.rand(8, 1, 3, 3), labels)
        assert (model.passes, model.learned) == (done, done)
        (slope,) = torch.autograd.grad(step.loss, [*network.parameters()][-2])
        assert slope.any()
