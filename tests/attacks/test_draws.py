"""Chance a query at a time: streams of their own, distinct positions, each equally likely."""

import numpy as np
import pytest
import torch
from scipy import stats

from robustmetric.attacks import Draws
from robustmetric.attacks.draws import distinct


def test_a_stream_depends_on_seed_purpose_and_number_alone() -> None:
    draws = Draws(3, "QA+", [9, 4, 7])
    first, second = draws.uniform(4), draws.uniform(4)
    for row, number in enumerate([9, 4, 7]):
        alone = Draws(3, "QA+", [number])
        assert torch.equal(alone.uniform(4)[0], first[row])
        assert torch.equal(alone.uniform(4)[0], second[row])
    others = [Draws(3, "QA+", [8]), Draws(2, "QA+", [9]), Draws(3, "QA-", [9]), Draws(3, "QA", [9])]
    seen = [tuple(d.uniform(4)[0].tolist()) for d in others]
    assert len({*seen, tuple(first[0].tolist()), tuple(second[0].tolist())}) == 6


def test_rows_draw_from_their_own_streams_and_leave_the_others_alone() -> None:
    for kind in ("uniform", "normal", "signs"):
        some, alone = Draws(0, "x", range(4)), Draws(0, "x", [2])
        taken = getattr(some, kind)(2, 3, rows=torch.tensor([2, 0]))
        assert taken.shape == (2, 2, 3)
        assert torch.equal(taken[0], getattr(alone, kind)(2, 3)[0])
        fresh = getattr(Draws(0, "x", range(4)), kind)(2, 3)
        after = getattr(some, kind)(2, 3)
        assert torch.equal(after[1], fresh[1])
        assert torch.equal(after[3], fresh[3])
        assert torch.equal(after[2], getattr(alone, kind)(2, 3)[0])


def test_drawing_leaves_the_global_generators_alone() -> None:
    state, kept = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    draws = Draws(0, "x", range(3))
    draws.uniform(5), draws.normal(5), draws.signs(5)
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(np.random.get_state()[1], kept)  # type: ignore[index]


def test_numbers_are_spread_as_they_should_be_within_and_across_streams() -> None:
    draws = Draws(1, "spread", range(400))
    uniform = draws.uniform(50).numpy()
    assert uniform.dtype == np.float64
    assert uniform.min() >= 0
    assert uniform.max() < 1
    normal, signs = draws.normal(50).numpy(), draws.signs(50).numpy()
    for values in (uniform, uniform[:, :1], uniform[:2]):
        assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-3
    for values in (normal, normal[:, :1], normal[:2]):
        assert stats.kstest(values.ravel(), "norm").pvalue > 1e-3
    assert set(np.unique(signs)) == {-1, 1}
    assert abs(signs.mean()) < 3 / np.sqrt(signs.size)
    # Neighbouring queries have nothing to do with each other.
    assert abs(np.corrcoef(uniform[:-1].ravel(), uniform[1:].ravel())[0, 1]) < 4 / np.sqrt(uniform.size)


@pytest.mark.parametrize(("size", "wanted"), [(4, 4), (5, 3), (7, 1), (9, 8), (40, 6)])
def test_distinct_gives_distinct_positions_like_drawing_from_a_shrinking_list(size: int, wanted: int) -> None:
    uniform = Draws(0, f"{size}", range(300)).uniform(wanted)
    uniform[0], uniform[1] = 0, np.nextafter(1, 0)
    found = distinct(uniform, size)
    for row, numbers in zip(found.tolist(), uniform.tolist(), strict=True):
        left = list(range(size))
        for position, number in zip(row, numbers, strict=True):
            assert position == left.pop(int(number * len(left)))
