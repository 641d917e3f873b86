"""What the worst-case suite leaves of R@1, beside what ES, LTM and GTM of the ERS leave.

    python -m benchmarks.worst RUN … [--root DIR] [--eps 0.3 0.1 …]

attacks test images of each run, drawn with several seeds, within each ε, and prints a Markdown table. ES, LTM
and GTM are those of the strict protocol, PGD with α = 3/255 and 32 steps; `all three` counts a query as right
if it is so under each. The suite has its goal misrank. Its own attacks count alone, without those three.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from torch import Tensor

import robustmetric as rm
from robustmetric.evaluation import Data, Evaluation, Plan, Record, Subject
from robustmetric.training.trained import Run

BESIDE = {"ES": "ES:R", "LTM": "LTM", "GTM": "GTM"}
SUITE = "worst-case(goals='misrank')"


def test_images(run: Run, root: Path | None) -> tuple[Tensor, Tensor]:
    """Return the test images of a run, as its network takes them, and their labels."""
    found = run.inputs.pixels(rm.data.load(run.recipe.data, root or run.recipe.root, split="test"))
    images = run.inputs.images(found)
    return images[slice(None)], found.labels


def evaluated(subject: Subject, eps: float, queries: int, seed: int) -> tuple[Record, float]:
    """Evaluate, and return the record with the R@1 that is left under all three attacks."""
    plan = Plan.make(eps=eps, attacks=[*BESIDE], suite=SUITE, queries=queries, seed=seed, checks="none")
    evaluation = Evaluation(subject, plan)
    record = evaluation.run()
    each = [evaluation.found[name][f"after/{column}"].numpy() for name, column in BESIDE.items()]
    return record, float(np.nanmean(np.min(each, axis=0)))


def main() -> None:
    """Print a row for each run, ε and set of queries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--eps", type=float, nargs="*")
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    print(
        "| network | ε | seed | R@1 | ES | LTM | GTM | all three | suite | passes a query |\n"
        "|---|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for folder in arguments.runs:
        run = rm.load_run(folder)
        subject = Subject(run.network, Data(*test_images(run, arguments.root)))
        for eps in arguments.eps or [run.recipe.eps]:
            for seed in range(arguments.seeds):
                record, least = evaluated(subject, eps, arguments.queries, seed)
                assert record.suite is not None
                goal = record.suite.goals["misrank"]
                figures = [goal.before, *(record[name] for name in BESIDE.values()), least, goal.alone]
                assert goal.value is not None
                assert goal.value <= least + 1e-9, "the suite is weaker"
                told = " | ".join(f"{figure:.1f}" for figure in figures)
                print(
                    f"| {run.recipe.data} {run.recipe.defense} | {255 * eps:.0f}/255 | {seed} | {told} | "
                    f"{goal.forward / goal.queries:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
