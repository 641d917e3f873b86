"""Which images choose the weights: set apart from the training images, never read by the training."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import robustmetric as rm
from robustmetric.retrieval import retrieval_scores
from robustmetric.training.folder import RunFolder
from robustmetric.training.recipe import Recipe, load_recipe, make_recipe
from robustmetric.training.run import train
from robustmetric.training.sets import load_sets, set_apart
from tests.helpers.runs import make_pictures


def tiny(root: Path, **changes: Any) -> Recipe:
    """A recipe for these pictures, without perturbations."""
    entries = {"data": "folder", "root": root, "model": "c2f2", "dim": 8, "defense": "N/A[R]", "batch": 8}
    return make_recipe({**entries, "epochs": 1, "resize": 8, **changes})


def quick(**changes: Any) -> Recipe:
    return load_recipe("digits", {"defense": "N/A[R]", "batch": 1024, "epochs": 1, "dim": 16, **changes})


# Which are set apart


@given(
    labels=st.lists(st.integers(0, 12), min_size=1, max_size=150),
    share=st.floats(0.01, 0.5),
    seed=st.integers(0, 100),
)
@settings(max_examples=300)
def test_whole_classes_or_some_images_of_each(labels: list[int], share: float, seed: int) -> None:
    counts = Counter(labels)
    array = np.array(labels)
    apart = set_apart(array, share, seed, whole_classes=True)
    taken = Counter(array[apart].tolist())
    several = [name for name, count in counts.items() if count > 1]
    wanted = max(2, round(share * len(counts)))
    if len(several) - wanted >= 2:
        assert len(taken) == wanted
        assert all(taken[name] == counts[name] >= 2 for name in taken)
    else:
        assert np.array_equal(apart, set_apart(array, share, seed, whole_classes=False))
    images = Counter(array[set_apart(array, share, seed, whole_classes=False)].tolist())
    for name, count in counts.items():
        part = max(2, round(share * count))
        assert images[name] == (part if count - part >= 2 else 0)


# Sets


def test_classes_of_the_training_where_the_test_has_others(tmp_path: Path) -> None:
    sets = load_sets(tiny(make_pictures(tmp_path / "data"), validation=0.4), tmp_path / "cache")
    assert sets.scored == "validation images"
    assert (len(sets.learn), len(sets.score)) == (12, 6)
    labels = sets.learn.source.labels
    assert set(labels[sets.learn.rows].tolist()).isdisjoint(labels[sets.score.rows].tolist())
    assert sets.learn.source.classes == tuple(f"class{k:02}" for k in range(6))


def test_without_validation_the_test_images_score(tmp_path: Path) -> None:
    sets = load_sets(tiny(make_pictures(tmp_path / "data"), validation=0), tmp_path / "cache")
    assert sets.scored == "test images"
    assert (len(sets.learn), len(sets.score)) == (18, 18)
    assert sets.score.source.classes[0] == "class06"


def test_where_nothing_can_be_set_apart_it_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    root = make_pictures(tmp_path / "data", classes=6, each=2)
    train(tiny(root), tmp_path / "run", cache=tmp_path / "cache", progress=False, report=said.append)
    assert [line for line in said if line.startswith("no images can be set apart")] == said
    assert len(said) == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["choice"]["images"] == "test images"
    assert RunFolder(tmp_path / "run").weights().chosen == "last weights"


# A training


class Spy(L.Callback):
    """Notes the images of all training batches, and the network at each validation."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self.scores: list[dict[str, float]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.seen |= {image.numpy().tobytes() for image in batch[0]}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.scores.append({k: float(v) for k, v in trainer.callback_metrics.items() if k in ("R@1", "mAP")})


def test_the_training_learns_from_the_others_and_is_scored_on_these(tmp_path: Path) -> None:
    spy, recipe = Spy(), quick(epochs=2, validation=0.1)
    module = train(recipe, tmp_path / "run", progress=False, callbacks=[spy])
    sets = load_sets(recipe)
    images = torch.from_numpy(sets.learn.source.pixels[:].copy()).permute(0, 3, 1, 2).float() / 255
    apart = {images[row].numpy().tobytes() for row in sets.score.rows}
    learned = {images[row].numpy().tobytes() for row in sets.learn.rows}
    assert spy.seen == learned
    assert not spy.seen & (apart - learned)
    with torch.no_grad():
        z = rm.embed(module.model.eval(), images[torch.from_numpy(sets.score.rows)])
    expected = retrieval_scores(z, sets.learn.source.labels[sets.score.rows])
    for name, value in spy.scores[-1].items():
        assert value == pytest.approx(expected[name], abs=1e-3)
