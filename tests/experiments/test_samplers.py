"""Table 1: mean, variances and histogram of the hardness, against plain loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, variance

import pytest
import torch

from robustmetric.data.pairs import PairLoader
from robustmetric.experiments.samplers import DEFINED, DRAWN, EDGES, measure_samplers
from robustmetric.models import save_weights
from robustmetric.sphere import embed
from robustmetric.training.module import make_network
from robustmetric.training.recipe import Recipe, make_recipe
from robustmetric.training.sets import load_sets
from robustmetric.triplets import Batch, Distance, Hardest, Mined, Random, Semihard, Softhard

RECIPE = make_recipe({"data": "digits", "dim": 16, "validation": 0, "batch": 100, "reference": True})


SMALL = RECIPE.model_copy(update={"batch": 16})
CPU = torch.device("cpu")


def embedded(recipe: Recipe, batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The embeddings and labels of the first batches of a training, of which each is less than an epoch."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = make_network(recipe, CPU).eval()
    images = load_sets(recipe).learn.source
    pairs = recipe.batch // 2
    loader = PairLoader(images.pixels, images.labels, pairs=pairs, seed=recipe.seed, itself=True)
    for _, (pictures, labels) in zip(range(batches), loader, strict=False):
        with torch.no_grad():
            yield embed(model, pictures), labels


def moments(found: list[list[float]]) -> dict[str, float]:
    """Mean and variance of the lists' means, and the mean of their variances."""
    means = [fmean(some) for some in found]
    return {"mean": fmean(means), "variance": variance(means), "variance_within": fmean(map(variance, found))}


def hardest_by_loops(batches: int) -> list[list[float]]:
    """The hardness of H's triplets, which are not drawn, in the first batches of the training."""
    found: list[list[float]] = []
    for vectors, labels in embedded(RECIPE, batches):
        z = vectors.double()
        found.append([])
        for a in range(0, len(z), 2):
            nearest = min(
                math.dist(z[a].tolist(), z[n].tolist()) for n in range(len(z)) if labels[n] != labels[a]
            )
            found[-1].append(math.dist(z[a].tolist(), z[a + 1].tolist()) - nearest)
    return found


def test_the_variance_is_that_of_the_means_of_batches() -> None:
    found = measure_samplers(RECIPE, 3, CPU)["H"]
    wanted = moments(hardest_by_loops(3))
    # Distances are computed in single precision: a hardness is off by about 1e-7 of distances of 1.
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    assert 0 < 100 * wanted["variance"] < wanted["variance_within"] < 1, "they are told apart"
    assert sum(found["counts"]) == 150


def test_one_batch_has_no_variance_of_means() -> None:
    found = measure_samplers(RECIPE, 1, CPU)
    assert {one["variance"] for one in found.values()} == {None}
    assert all(one["variance_within"] > 0 for one in found.values())


def test_histograms_count_each_triplet_where_it_is() -> None:
    found = measure_samplers(RECIPE, 22, CPU)
    for one in found.values():
        middles = (EDGES[1:] + EDGES[:-1]) / 2
        assert sum(one["counts"]) == 22 * 50
        about = sum(c * m for c, m in zip(one["counts"], middles, strict=True)) / (22 * 50)
        assert about == pytest.approx(one["mean"], abs=EDGES[1] - EDGES[0])


def softhard_by_loops(batches: int) -> tuple[dict[bool, list[list[float]]], int]:
    """The hardness of both kinds of S, by whether an anchor may be its own positive, and how often one is.

    R and M draw one number for each anchor before S, D one after it. S draws two, for positive and negative:
    with u it takes the candidate in the place u · (number of candidates), rounded down.
    """
    generator = torch.Generator().manual_seed(SMALL.seed)
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    alone = 0

    def numbers(count: int) -> list[float]:
        return torch.rand(count, generator=generator, dtype=torch.float64).tolist()

    for vectors, labels in embedded(SMALL, batches):
        z, anchors = vectors.double().tolist(), range(0, len(labels), 2)
        _, _, first, second, _ = (numbers(len(anchors)) for _ in range(5))
        for itself, of in found.items():
            of.append([])
            for a, u, v in zip(anchors, first, second, strict=True):
                d = [math.dist(z[a], other) for other in z]
                same = [i for i in range(len(z)) if labels[i] == labels[a] and i != a]
                others = [i for i in range(len(z)) if labels[i] != labels[a]]
                nearest, farthest = min(d[n] for n in others), max(d[p] for p in same)
                kin = sorted([*same, a]) if itself else same
                positives = [p for p in same if d[p] > nearest] or kin
                negatives = [n for n in others if d[n] < farthest] or others
                p, n = positives[int(u * len(positives))], negatives[int(v * len(negatives))]
                alone += p == a
                of[-1].append(d[p] - d[n])
    return found, alone


def test_both_kinds_of_s_are_measured() -> None:
    found = measure_samplers(SMALL, 5, CPU)
    loops, alone = softhard_by_loops(5)
    assert alone > 0, "an anchor is its own positive somewhere, or both were the same"
    for name, itself in (("S", True), (DEFINED, False)):
        wanted = moments(loops[itself])
        # As above: distances in single precision.
        assert {key: found[name][key] for key in wanted} == pytest.approx(wanted, abs=1e-6)
        assert sum(found[name]["counts"]) == 5 * 8
    assert abs(found["S"]["mean"] - found[DEFINED]["mean"]) > 1e-3


def test_the_letters_are_drawn_as_if_they_were_alone() -> None:
    """S by its definition takes no random number from the others, in no batch."""
    generator = torch.Generator().manual_seed(SMALL.seed)
    five = (Random(), Semihard(SMALL.margin), Softhard(itself=True), Distance(), Hardest())
    samplers = {sampler.name: sampler for sampler in five}
    drawn: dict[str, list[float]] = {letter: [] for letter in samplers}
    for vectors, labels in embedded(SMALL, 5):
        batch = Batch.of(vectors, labels)
        for letter, sampler in samplers.items():
            drawn[letter].append(float(Mined.of(batch, sampler, generator).hardness.double().numpy().mean()))
    found = measure_samplers(SMALL, 5, CPU)
    assert tuple(found) == DRAWN
    for letter, means in drawn.items():
        # The mean of means in another order of sums: rounding of double precision.
        assert found[letter]["mean"] == pytest.approx(sum(means) / 5, abs=1e-12), letter


def test_without_the_reference_both_kinds_of_s_are_one() -> None:
    found = measure_samplers(SMALL.model_copy(update={"reference": False}), 5, CPU)
    assert found["S"] == found[DEFINED]


def test_the_weights_of_a_run_are_measured(tmp_path: Path) -> None:
    """Not those that a training begins with, whether they are kept in single or in half precision."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        weights = {name: value.half() for name, value in make_network(SMALL, CPU).state_dict().items()}
    found = []
    for kept in (weights, {name: value.float() for name, value in weights.items()}):
        save_weights(kept, tmp_path / "last.safetensors")
        begins = SMALL.model_copy(update={"weights": tmp_path / "last.safetensors"})
        found.append(measure_samplers(begins, 3, CPU))
    assert found[0] == found[1] != measure_samplers(SMALL, 3, CPU)
