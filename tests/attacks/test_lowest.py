"""Where a search begins at random, and searches that are told that a query has arrived."""

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import Draws, Problem, make_search
from robustmetric.attacks.search import random_start
from robustmetric.perturb import Budget, Norm

BUDGET = Budget(eps=0.2, alpha=0.05, steps=6)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_starts_are_a_query_s_own(norm: Norm, dtype: torch.dtype) -> None:
    images = torch.full((6, 1, 20, 20), 0.5, dtype=dtype)
    budget = Budget(eps=0.25, alpha=0.1, steps=1, norm=norm)
    found = random_start(images, budget, Draws(0, "x", range(6)))
    some = random_start(images[[4, 1]], budget, Draws(0, "x", range(6)), torch.tensor([4, 1]))
    assert torch.equal(some, found[[4, 1]])
    assert found.dtype == dtype
    away = (found - images).flatten(1)
    if norm == "l2":
        # 400 squares are rounded, and so are the pixels.
        torch.testing.assert_close(away.norm(dim=1), torch.full((6,), 0.25, dtype=dtype), rtol=0, atol=1e-5)
        assert (away.abs().amax(1) < 0.1).all()
    else:
        assert (away.abs() <= 0.25 + 1e-7).all()
        # Of 400 uniform numbers none is beyond 95 % with a chance of 0.95^400, a billionth.
        assert (away.amax(1) > 0.95 * 0.25).all()
        assert (away.amin(1) < -0.95 * 0.25).all()
    # The mean of all 2,400 is off by less than five of its deviations.
    deviation = 0.25 / 3**0.5 if norm == "linf" else 0.25 / 20
    assert abs(float(away.mean())) < 5 * deviation / 2400**0.5
    assert away.unique(dim=0).shape[0] == 6


# Queries that have arrived


class Pool:
    """A plane with a pool: within it a query has arrived."""

    def __init__(self, limit: float) -> None:
        self.limit, self.asked = limit, 0

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        self.asked += len(rows)
        total = x.flatten(1).sum(1)
        return total.masked_fill(total.detach() < self.limit, -torch.inf)


@pytest.mark.parametrize(
    "text",
    [
        "pgd",
        "pgd(best=True)",
        "pgd(restarts=2)",
        "nes(samples=20)",
        "spsa(samples=20)",
        "apgd",
        "square(trials=30)",
    ],
)
@pytest.mark.parametrize("limit", [-1.0, 6.5, 7.9, 100.0])
def test_every_search_takes_minus_infinity(text: str, limit: float) -> None:
    """With 16 pixels of 0.5: out of reach, on the way, in a step, and from the beginning."""
    images, pool = torch.full((3, 1, 4, 4), 0.5), Pool(limit)
    found = make_search(text)(Problem(images, pool, BUDGET, Draws(0, "x", range(3))))
    assert found.isfinite().all()
    assert (found - images).abs().max() <= 0.2 + 1e-6
    total = found.flatten(1).sum(1)
    if limit == -1.0:
        assert (total < 8).all()
    else:
        assert (total < limit).all()
    if limit == 100.0 and "restarts" not in text:
        assert pool.asked == {"pgd": 3, "pgd(best=True)": 6, "apgd": 3, "square(trials=30)": 3}.get(text, 720)
