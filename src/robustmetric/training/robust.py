"""R@1 under a short attack: a validation that tells robust weights from others."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robustmetric.attacks import PGD, Gallery, Queries, attack
from robustmetric.data.pairs import ImageArray
from robustmetric.evaluation.attack import NetworkView, run_attack
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget, frozen
from robustmetric.training.recipe import Recipe
from robustmetric.training.sets import Images

ROBUST = "R@1/robust"
"""The score, as it is logged."""
QUERIES = 128
"""Queries that are attacked at most."""
STEPS = 8
"""Steps of the attack; a quarter of ε each, or the recipe's α if that is more."""


def attacked_rows(images: Images, seed: int) -> NDArray[np.int64]:
    """Draw which of the `images` are attacked: (Q,) positions, among those that have another of their class.

    >>> from robustmetric.training.sets import load_sets
    >>> len(attacked_rows(load_sets(Recipe(data="digits")).score, seed=0))
    100
    """
    labels = images.source.labels[torch.from_numpy(images.rows)].numpy()
    _, kind, counts = np.unique(labels, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(counts[kind] > 1)
    generator = np.random.default_rng(np.random.SeedSequence([seed, 3]))
    return np.sort(generator.choice(rows, min(QUERIES, len(rows)), replace=False))


def robust_recall(
    images: Images, recipe: Recipe, model: nn.Module, z: Tensor, labels: Tensor
) -> dict[str, float]:
    """Return R@1 in % of some of the `images` after a few steps of ES within the `recipe`'s ε.

    `z` (N, D) are the embeddings of all, and `labels` (N,) their classes. The same weights give the same.
    """
    rows = attacked_rows(images, recipe.seed)
    like = next(model.parameters())
    pictures = ImageArray(images.source.pixels, recipe.crop, images.rows[rows])[:].to(like)
    own, z = torch.from_numpy(rows).to(z.device), z.to(like)
    view = NetworkView(model, pictures, Queries(z[own], labels[own], own), Gallery(z, labels))
    budget = Budget(eps=recipe.eps, alpha=max(recipe.alpha, recipe.eps / 4), steps=STEPS)
    threat = Threat(budget, PGD(), recipe.seed, recipe.batch)
    hits = []
    with frozen(model):
        for numbers in torch.arange(len(rows)).split(recipe.batch):
            found = run_attack(view, attack("ES"), numbers, threat, clean=False)
            hits.append(found.after["ES:R"])
    return {ROBUST: float(torch.cat(hits).mean())}
