"""Validation by R@1 under a short attack, and what counts where validation does not tell weights apart."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import robustmetric as rm
from robustmetric.training import load_recipe, train
from robustmetric.training.sets import ROBUST, attacked_rows, load_sets, robust_recall

QUICK = {"defense": "N/A[R]", "batch": 256, "epochs": 3, "dim": 16}


def test_it_is_r_at_1_of_the_attack_es() -> None:
    recipe = load_recipe("digits", {"eps": 0.2, "alpha": 0.001, "seed": 4})
    sets = load_sets(recipe)
    images = torch.from_numpy(sets.score.source.pixels[sets.score.rows]).permute(0, 3, 1, 2) / 255
    labels = sets.score.source.labels[torch.from_numpy(sets.score.rows)]
    torch.manual_seed(1)
    network = rm.model("c2f2", size=8, dim=16)
    with torch.no_grad():
        z = rm.embed(network.eval(), images)
    found = robust_recall(sets.score, recipe, network, z, labels)
    plan = rm.Plan.make(eps=0.2, alpha=0.05, steps=8, seed=4, attacks=["ES"], checks="none")
    record = rm.evaluate(network, images, labels, plan=plan)
    assert found == {ROBUST: pytest.approx(record["ES:R"])}
    assert record["ES:R"] < record["R@1"] - 10
    assert found == robust_recall(sets.score, recipe, network, z, labels)


def test_a_few_queries_are_drawn_of_those_that_have_an_answer() -> None:
    images = load_sets(load_recipe("digits", {"validation": 0})).score
    rows = attacked_rows(images, seed=1)
    assert len(rows) == 128 == len(set(rows.tolist()))
    assert rows.tolist() == attacked_rows(images, seed=1).tolist() != attacked_rows(images, seed=2).tolist()
    images.source.labels[:] = torch.arange(len(images)).clamp(max=len(images) - 5)  # five of one class
    assert attacked_rows(images, seed=1).tolist() == [*range(len(images) - 5, len(images))]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_training_is_the_same_and_chooses_by_it(precision: str, tmp_path: Path) -> None:
    scores: dict[str, list[dict[str, str]]] = {}
    for by in ("plain", "robust"):
        recipe = load_recipe("digits", {**QUICK, "precision": precision, "validate_by": by})
        train(recipe, tmp_path / by, progress=False)
        with (tmp_path / by / "metrics.csv").open(newline="") as file:
            scores[by] = [row for row in csv.DictReader(file) if row["R@1"]]
    one, other = (load_file(tmp_path / by / "last.safetensors") for by in scores)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    robust = [float(row.pop(ROBUST)) for row in scores["robust"]]
    assert scores["robust"] == scores["plain"]
    assert all(0 <= low <= float(row["R@1"]) for low, row in zip(robust, scores["plain"], strict=True))
    choice = json.loads((tmp_path / "robust" / "run.json").read_text())["choice"]
    assert (choice["by"], choice["count"], choice["best"][ROBUST]) == (ROBUST, 100, max(robust))
