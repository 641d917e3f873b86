"""Table 1: mean, variance and histogram of the hardness, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from robustmetric.data.pairs import PairLoader
from robustmetric.distance import embed
from robustmetric.experiments.samplers import EDGES, measure_samplers
from robustmetric.training.network import make_network
from robustmetric.training.recipe import make_recipe
from robustmetric.training.sets import load_sets

RECIPE = make_recipe({"data": "digits", "dim": 16, "validation": 0, "batch": 100, "reference": True})


def hardest_by_loops(batches: int) -> list[list[float]]:
    """The hardness of H's triplets, which are not drawn, in the first batches of the training."""
    with torch.random.fork_rng():
        torch.manual_seed(RECIPE.seed)
        model = make_network(RECIPE, torch.device("cpu")).eval()
    images = load_sets(RECIPE).learn.source
    found: list[list[float]] = []
    loader = PairLoader(images.pixels, images.labels, pairs=50, seed=RECIPE.seed, itself=True)
    for pictures, labels in loader:
        with torch.no_grad():
            z = embed(model, pictures).double()
        found.append([])
        for a in range(0, len(z), 2):
            nearest = min(
                math.dist(z[a].tolist(), z[n].tolist()) for n in range(len(z)) if labels[n] != labels[a]
            )
            found[-1].append(math.dist(z[a].tolist(), z[a + 1].tolist()) - nearest)
        if len(found) == batches:
            break
    return found


def test_mean_and_variance_are_those_of_each_batch_averaged() -> None:
    """They also go on with the next epoch when one is over: 20 batches of 50 triplets are one."""
    loops = hardest_by_loops(2)
    found = measure_samplers(RECIPE, 2, torch.device("cpu"))["H"]
    means = [sum(batch) / len(batch) for batch in loops]
    variances = [
        sum((h - mean) ** 2 for h in batch) / (len(batch) - 1)
        for batch, mean in zip(loops, means, strict=True)
    ]
    # Distances are computed in single precision: a hardness is off by about 1e-7 of distances of 1.
    assert found["mean"] == pytest.approx(sum(means) / 2, abs=1e-5)
    assert found["variance"] == pytest.approx(sum(variances) / 2, abs=1e-5)
    assert sum(found["counts"]) == 100


def test_histograms_count_each_triplet_where_it_is() -> None:
    found = measure_samplers(RECIPE, 22, torch.device("cpu"))
    for one in found.values():
        middles = (EDGES[1:] + EDGES[:-1]) / 2
        assert sum(one["counts"]) == 22 * 50
        about = sum(c * m for c, m in zip(one["counts"], middles, strict=True)) / (22 * 50)
        assert about == pytest.approx(one["mean"], abs=EDGES[1] - EDGES[0])


def test_the_published_training_draws_easier_triplets_by_s() -> None:
    """S draws the anchor itself where no positive is beyond the nearest negative, and that is easy."""
    small = RECIPE.model_copy(update={"batch": 16, "reference": False})
    by_reference = small.model_copy(update={"reference": True})
    plain, published = (
        measure_samplers(recipe, 40, torch.device("cpu"))["S"] for recipe in (small, by_reference)
    )
    assert published["mean"] < plain["mean"]
