"""Table 1: how hard the triplets are that each sampler draws, at the start of a training or after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robustmetric.perturb import frozen
from robustmetric.sphere import embed
from robustmetric.training.module import make_network
from robustmetric.training.recipe import Recipe
from robustmetric.training.sets import load_sets
from robustmetric.triplets import Batch, Distance, Hardest, Mined, Random, Sampler, Semihard, Softhard

EDGES = np.linspace(-2, 2, 401)
"""The edges of the histograms' bins: hardness is in [−2, 2]."""
DEFINED = "S(itself=False)"
"""S by its definition: the anchor is never its own positive, which the S of the published training allows."""
DRAWN = ("R", "M", "S", DEFINED, "D", "H")
"""What is measured: the paper's samplers by their letters, and both kinds of S."""
STATISTICS = ("mean", "variance", "variance_within", "counts")
"""What is measured of each."""


def measure_samplers(
    recipe: Recipe,
    batches: int,
    device: torch.device,
    *,
    cache: Path | None = None,
    skip_broken: bool = False,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Return the `STATISTICS` of the hardness that each sampler draws from `batches` batches.

    The network, images and batches are those that a training with the `recipe` begins with: a trained network
    if the recipe's weights are a run's. Images are kept in `cache`, and with `skip_broken` those that cannot
    be read are left out. The network computes on `device`. S is as the recipe's `reference` has it, `DEFINED`
    is S by its definition; both draw with the same random numbers, so that they differ only where an anchor
    may be its own positive. `mean` and `variance` are those of the means of batches, as in Table 1; a single
    batch has no variance (None). `variance_within` is the mean of the variances within batches, and `counts`
    (400,) is the histogram of all triplets over `EDGES`. `report` is told of what goes on.

    >>> found = measure_samplers(Recipe(data="digits", validation=0, batch=250), 2, torch.device("cpu"))
    >>> found["H"]["mean"] > found["R"]["mean"], sum(found["R"]["counts"])
    (True, 250)
    """
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = make_network(recipe, device, report)
    sets = load_sets(recipe, cache, skip_broken=skip_broken, report=report)
    loader = sets.pairs(recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    samplers: dict[str, Sampler] = {
        "R": Random(),
        "M": Semihard(recipe.margin),
        "S": Softhard(itself=recipe.reference),
        "D": Distance(),
        "H": Hardest(),
    }
    drawn: dict[str, list[np.ndarray[Any, np.dtype[np.float64]]]] = {name: [] for name in DRAWN}

    def draw(name: str, sampler: Sampler, batch: Batch, generator: torch.Generator) -> None:
        drawn[name].append(Mined.of(batch, sampler, generator).hardness.double().cpu().numpy())

    with frozen(model), torch.no_grad():
        while len(drawn["R"]) < batches:
            for images, labels in loader:
                batch = Batch.of(embed(model, images.to(device)), labels.to(device))
                for letter, sampler in samplers.items():
                    if letter == "S":  # a copy of the generator: the others draw as if this were not there
                        draw(DEFINED, Softhard(), batch, generator.clone_state())
                    draw(letter, sampler, batch, generator)
                if len(drawn["R"]) == batches:
                    break
    return {name: _statistics(found) for name, found in drawn.items()}


def _statistics(found: list[np.ndarray[Any, np.dtype[np.float64]]]) -> dict[str, Any]:
    means = [hardness.mean() for hardness in found]
    variance = float(np.var(means, ddof=1)) if len(means) > 1 else None
    within = float(np.mean([hardness.var(ddof=1) for hardness in found]))
    counts, _ = np.histogram(np.concatenate(found), EDGES)
    return dict(zip(STATISTICS, (float(np.mean(means)), variance, within, counts.tolist()), strict=True))
