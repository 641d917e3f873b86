"""What the worst-case suite costs: against the network's bare passes, and against no query dropping out.

    python -m benchmarks.suite [RUN …]

attacks 256 queries of Fashion-MNIST's 10,000 test images (or of scikit-learn's digits) for each goal, with
the networks of runs, or with a C2F2 after 50 steps of plain training. The bare passes are the forward passes
and input gradients that the attacks need, in the batches they need them in, and nothing else. Times are
medians of programs run in turns.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from torch import nn

import robustmetric as rm
from benchmarks.attacks import Passes, bare, load, plain_network, seconds
from robustmetric.attacks import PGD, Gallery, Queries
from robustmetric.evaluation import NetworkView, Threat
from robustmetric.evaluation.attack import embed_all
from robustmetric.evaluation.suite import WorstCase, run_ensemble
from robustmetric.perturb import Budget, frozen


def measure(title: str, model: nn.Module, root: Path, queries: int, turns: int) -> None:
    """Print a line for each goal and one for all."""
    name, images, labels = load(root)
    passes, suite = Passes(model), WorstCase()
    budget = Budget(eps=77 / 255, alpha=3 / 255, steps=suite.steps)
    numbers = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:queries].sort().values
    print(f"{title}: gallery of {len(images)} ({name}), {queries} queries, {suite.name}", flush=True)
    print(
        "| goal | over the bare passes | passes a query | of those without dropping out |\n|---|---|---|---|"
    )
    ours_all, bare_all, spent_all, whole_all = [0.0] * turns, [0.0] * turns, 0, 0
    with frozen(passes):
        z = embed_all(model, images, torch.arange(len(images)), 128)
        view = NetworkView(passes, images, Queries(z, labels, torch.arange(len(z))), Gallery(z, labels))
        for goal in suite.wanted:
            attempts = suite.attempts(goal)
            run = partial(run_ensemble, view, goal, attempts, numbers, Threat(budget, PGD()))
            passes.noted = []
            spent = int(run()["forward"].sum())
            noted = list(passes.noted)
            ours, naked = [], []
            for turn in range(turns):
                ours.append(seconds(run))
                naked.append(seconds(partial(bare, model, images[:128], noted)))
                ours_all[turn] += ours[-1]
                bare_all[turn] += naked[-1]
            ratio = statistics.median(o / n for o, n in zip(ours, naked, strict=True))
            whole = queries * sum(attempt.passes(budget) for attempt in attempts)
            spent_all, whole_all = spent_all + spent, whole_all + whole
            print(
                f"| {goal.name} | {ratio:.2f} | {spent / queries:.1f} | {100 * spent / whole:.1f} % |",
                flush=True,
            )
    ratio = statistics.median(o / n for o, n in zip(ours_all, bare_all, strict=True))
    share = 100 * spent_all / whole_all
    print(f"| all | {ratio:.2f} | {spent_all / queries:.1f} | {share:.1f} % |", flush=True)


def main() -> None:
    """Measure each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--root", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--queries", type=int, default=256)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    given = (arguments.root, arguments.queries, arguments.turns)
    for folder in arguments.runs:
        measure(folder.name, rm.load_run(folder).network, *given)
    if not arguments.runs:
        _, images, labels = load(arguments.root)
        measure("C2F2 after 50 steps", plain_network(images, labels), *given)


if __name__ == "__main__":
    main()
