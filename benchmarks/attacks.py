"""What the nine attacks cost: against the network's bare passes, and against a loop over the queries.

Attacks 128 queries of Fashion-MNIST's 10,000 test images (or of scikit-learn's digits) with C2F2 and 32
steps. The bare passes are the forward passes and input gradients that the attacks need, and nothing else. The
loop is the same written for one query at a time, on some of the queries. Times are medians of programs run in
turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import robustmetric as rm
from robustmetric.attacks import PGD, Attack, Gallery, Queries
from robustmetric.data.pairs import ImageArray
from robustmetric.evaluation import ERS_ATTACKS, AttackResult, NetworkView, run_attack
from robustmetric.evaluation.attack import embed_all
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget, frozen
from robustmetric.sphere import pair_distance

BUDGET = Budget(eps=77 / 255, alpha=3 / 255, steps=32)


class Passes(nn.Module):
    """A network that notes each batch it computes: how large, and whether the input needs a gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.noted: list[tuple[int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Note the batch and compute it."""
        self.noted.append((len(x), x.requires_grad))
        z: Tensor = self.model(x)
        return z


def bare(model: nn.Module, images: Tensor, noted: list[tuple[int, bool]]) -> None:
    """Do the noted passes and nothing else."""
    for size, moves in noted:
        x = images[:size]
        if not moves:
            with torch.no_grad():
                model(x)
            continue
        leaf = x.detach().requires_grad_()
        z = model(leaf.view_as(leaf))
        torch.autograd.grad(z, leaf, torch.ones_like(z))


def loop(
    model: nn.Module, attack: Attack, view: NetworkView, images: Tensor, outcome: AttackResult
) -> Tensor:
    """Attack one query after the other, with the targets of `outcome`: (B,) objectives."""
    found = []
    z, labels = view.gallery.z, view.gallery.labels
    for i in range(len(images)):
        x, target = images[i : i + 1], outcome.target.index[i]
        own, label = int(view.queries.own[i]), int(view.queries.labels[i])
        others = torch.ones(len(z), dtype=torch.bool)
        others[own] = False
        moved = x.clone()
        if attack.name == "ES":
            moved = moved + 1e-4  # a start of its own: its objectives differ from the batch
        for step in range(BUDGET.steps + 1):
            moved = moved.detach().requires_grad_()
            value = objective(attack.name, F.normalize(model(moved)), z, labels, target, own, label, others)
            if step == BUDGET.steps:
                break
            (gradient,) = torch.autograd.grad(value, moved)
            moved = moved - BUDGET.alpha * gradient.sign()
            moved = (x + (moved - x).clamp(-BUDGET.eps, BUDGET.eps)).clamp(0, 1)
        found.append(value.detach())
    return torch.stack(found)


def objective(
    name: str, e: Tensor, z: Tensor, labels: Tensor, target: Tensor, own: int, label: int, others: Tensor
) -> Tensor:
    """Write an attack's objective for one query, as its definition reads."""
    if name == "TMA":
        return 1 - (e[0] * z[target[0]]).sum()
    if name == "ES":
        return -pair_distance(e, z[own : own + 1])[0]
    if name == "GTM":
        return pair_distance(e, z[target])[0]
    if name.startswith("CA"):
        rest = others.clone()
        rest[target[0]] = False
        q = z[target[0]]
        gap = pair_distance(e, q[None]) - torch.cdist(q[None], z[rest])[0]
        return (gap if name == "CA+" else -gap).clamp_min(0).mean()
    dist = torch.cdist(e, z)[0]
    if name == "LTM":
        return (dist[labels != label].max() - dist[(labels == label) & others].min()).clamp_min(0)
    rest = others.clone()
    rest[target[0]] = False
    gap = dist[target[0]] - dist[rest]
    return (gap if name == "QA+" else -gap).clamp_min(0).mean()


def seconds(program: Callable[[], object]) -> float:
    """Time a program once."""
    begin = time.perf_counter()
    program()
    return time.perf_counter() - begin


def load(root: Path) -> tuple[str, Tensor, Tensor]:
    """Return name, images and labels of the test set."""
    try:
        found = rm.data.load("fashion-mnist", root, "test")
    except FileNotFoundError:
        found = rm.data.load("digits", None, "test")
    assert found.pixels is not None
    images = ImageArray(found.pixels)[slice(None)]
    if images.shape[-1] != 28:
        images = F.interpolate(images, size=(28, 28), mode="bilinear").clamp(0, 1)
    return found.name, images, found.labels


def plain_network(images: Tensor, labels: Tensor) -> nn.Module:
    """Return a C2F2 after 50 steps of training without a defense."""
    model = rm.model("c2f2")
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    defense = rm.defense("N/A[S]")
    for _ in range(50):
        part = torch.randperm(len(images))[:112]
        loss = defense(model, images[part], labels[part]).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


def main() -> None:
    """Print a line for each attack and one for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--looped", type=int, default=4, help="queries that the loop is timed on")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    name, images, labels = load(arguments.root)
    model = plain_network(images, labels)
    with frozen(model):
        z = embed_all(model, images, torch.arange(len(images)), 128)
    passes = Passes(model)
    view = NetworkView(passes, images, Queries(z, labels, torch.arange(len(z))), Gallery(z, labels))
    numbers = torch.arange(128)
    print(f"C2F2, gallery of {len(images)} ({name}), 128 queries, 32 steps", flush=True)
    ours_all, bare_all, loop_all = [0.0] * arguments.turns, [0.0] * arguments.turns, 0.0
    with frozen(passes):
        for attack in map(rm.attack, ERS_ATTACKS):
            passes.noted = []
            run = partial(run_attack, view, attack, numbers, Threat(BUDGET, PGD()))
            outcome = run()
            noted = list(passes.noted)
            ours, naked = [], []
            for turn in range(arguments.turns):
                ours.append(seconds(run))
                naked.append(seconds(partial(bare, model, images[:128], noted)))
                ours_all[turn] += ours[-1]
                bare_all[turn] += naked[-1]
            few = images[: arguments.looped]
            begin = time.perf_counter()
            reached = loop(model, attack, view, few, outcome)
            slow = (time.perf_counter() - begin) * len(numbers) / len(few)
            loop_all += slow
            ratio = statistics.median(o / n for o, n in zip(ours, naked, strict=True))
            gap = float((reached - outcome.last[: len(few)]).abs().max())
            print(
                f"{attack.name:<5} {ratio:5.2f}x the bare passes   "
                f"loop {slow / statistics.median(ours):5.1f}x as long   objectives within {gap:.3f}",
                flush=True,
            )
    ratio = statistics.median(o / n for o, n in zip(ours_all, bare_all, strict=True))
    print(
        f"all   {ratio:5.2f}x the bare passes   loop {loop_all / statistics.median(ours_all):5.1f}x as long",
        flush=True,
    )


if __name__ == "__main__":
    main()
