"""Square against a plain loop over one image, its squares, its budget in both norms, and who is asked."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from robustmetric.attacks import Draws, Problem, Square
from robustmetric.attacks.square import side
from robustmetric.perturb import Budget, Norm

pytestmark = pytest.mark.kernels

NORMS: list[Norm] = ["linf", "l2"]
SHAPE = (3, 9, 7)


def images(count: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn[0], drawn[1, 0, :4] = 0.0, 1.0  # at the ends there is less room
    return drawn.to(dtype)


class Numpy:
    """An objective that is computed by numpy, of another shape for each row, and what it was asked."""

    def __init__(self, count: int = 5) -> None:
        generator = np.random.default_rng(2)
        self.weight = generator.standard_normal((count, math.prod(SHAPE), 4))
        self.asked: list[tuple[list[int], Tensor, Tensor]] = []

    def one(self, x: np.ndarray, row: int) -> float:
        inner = x.reshape(-1) @ self.weight[row]
        return float(np.sin(inner).sum() + 0.05 * (inner**2).sum())

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        # Summed row by row, so that a row's value is the same in every batch.
        found = [self.one(p, i) for p, i in zip(x.double().numpy(), rows.tolist(), strict=True)]
        value = torch.tensor(found, dtype=torch.float64)
        self.asked.append((rows.tolist(), x.clone(), value))
        return value


def budget_of(norm: Norm) -> Budget:
    return Budget(eps=0.1 if norm == "linf" else 0.5, alpha=0.5, steps=3, norm=norm)


@pytest.mark.parametrize("trials", [1, 7, 60])
def test_linf_against_a_plain_loop(trials: int) -> None:
    x, objective, eps = images(), Numpy(), 0.1
    found = Square(trials=trials)(Problem(x, objective, budget_of("linf"), Draws(4, "x", range(5))))
    channels, height, width = SHAPE
    taken = 0
    for i in range(5):
        image, draws = x[i].numpy(), Draws(4, "x", [i])
        signs = draws.signs(channels, 1, width)[0].tolist()
        change = np.zeros(SHAPE)
        for c in range(channels):
            for line in range(height):
                for column in range(width):
                    change[c, line, column] = eps * signs[c][0][column]
        best, least = np.clip(image + change, 0, 1), math.inf
        for trial in range(-1, trials):
            tried = change.copy()
            if trial >= 0:
                length = side(trial, height, width)
                filling = draws.signs(channels, 1, 1)[0, :, 0, 0].tolist()
                down, right = draws.uniform(2)[0].tolist()
                top, left = int(down * (height - length + 1)), int(right * (width - length + 1))
                for c in range(channels):
                    tried[c, top : top + length, left : left + length] = eps * filling[c]
            point = np.clip(image + tried, 0, 1)
            value = objective.one(point, i)
            if value < least:
                change, best, least = tried, point, value
                taken += trial >= 0
        np.testing.assert_allclose(found[i].numpy(), best, rtol=0, atol=1e-12)
    assert taken >= (5 if trials > 1 else 1)


def test_squares_shrink_by_half_their_area() -> None:
    for height, width in ((28, 28), (9, 7), (1, 5), (224, 160)):
        area = 0.8 * height * width
        for trial in [*range(120), 399, 400, 799, 800, 1599, 1600, 3199, 3200, 10**6]:
            halved = 0
            for after in (5, 20, 50, 100, 200, 400, 800, 1600, 3200):
                if trial >= after:
                    halved += 1
            wanted = round((area / 2**halved) ** 0.5)
            assert side(trial, height, width) == max(1, min(wanted, height, width))
    assert [side(t, 28, 28) for t in (0, 4, 5, 19, 20, 10**6)] == [25, 25, 18, 18, 13, 1]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_stays_in_the_budget_and_returns_the_least_that_it_saw(norm: Norm, dtype: torch.dtype) -> None:
    x, objective, budget = images(dtype=dtype), Numpy(), budget_of(norm)
    kept, state = x.clone(), torch.get_rng_state()
    found = Square(trials=120)(Problem(x, objective, budget, Draws(0, "x", range(5))))
    assert torch.equal(x, kept)
    assert torch.equal(state, torch.get_rng_state())
    assert found.dtype == dtype
    assert [rows for rows, _, _ in objective.asked] == [[*range(5)]] * 121
    # The origin's sum rounds once; a length has a rounding for each of its 189 pixels.
    slack = 189 * torch.finfo(dtype).eps
    for _, point, _ in objective.asked:
        change = (point - x).flatten(1)
        size = change.abs().amax(1) if norm == "linf" else change.square().sum(1).sqrt()
        assert size.max() <= budget.eps + slack
        assert point.min() >= 0
        assert point.max() <= 1
    values = torch.stack([value for _, _, value in objective.asked])
    reached = objective(found, torch.arange(5))
    torch.testing.assert_close(reached, values.amin(0), rtol=0, atol=1e-6)  # kept in the pixels' precision
    assert (reached < values[0] - 0.1).all()


@pytest.mark.parametrize("shape", [(3, 9, 7), (1, 4, 4), (1, 28, 28)])
def test_l2_uses_the_whole_budget_where_pixels_have_room(shape: tuple[int, int, int]) -> None:
    """Each trial, also of single pixels that were set before: what cancels would leave budget unused."""
    x, points = torch.full((4, *shape), 0.5, dtype=torch.float64), []
    way = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        points.append(x.clone())
        return (way[rows] * x).sum((1, 2, 3))

    eps = 0.4
    budget = Budget(eps=eps, alpha=0.5, steps=1, norm="l2")
    Square(trials=400)(Problem(x, objective, budget, Draws(0, "x", range(4))))
    sizes = torch.stack([(point - x).flatten(1).square().sum(1).sqrt() for point in points])
    # Squares that are taken away and given again sum up to ε² but for rounding, 1e-16 in each trial.
    torch.testing.assert_close(sizes, torch.full_like(sizes, eps), rtol=0, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_a_row_depends_on_neither_its_batch_nor_the_order(norm: Norm) -> None:
    x, objective = images(), Numpy()

    def run(batch: list[int]) -> Tensor:
        rows = torch.tensor(batch)
        draws = Draws(0, "x", batch)
        return Square(trials=40)(Problem(x[rows], lambda x, r: objective(x, rows[r]), budget_of(norm), draws))

    whole = run([*range(5)])
    for batch in ([4, 0, 2, 1, 3], [3], [4, 1]):
        torch.testing.assert_close(run(batch), whole[batch], rtol=0, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_a_row_that_has_arrived_is_never_asked_again(norm: Norm) -> None:
    """Row i arrives at its i-th question, row 0 never; the others are what they are without it."""
    x, objective, asked = images(), Numpy(), [0] * 5

    def arriving(x: Tensor, rows: Tensor) -> Tensor:
        for i in rows.tolist():
            asked[i] += 1
        return objective(x, rows).masked_fill(
            torch.tensor([0 < i <= asked[i] for i in rows.tolist()]), -torch.inf
        )

    found = Square(trials=9)(Problem(x, arriving, budget_of(norm), Draws(0, "x", range(5))))
    assert asked == [10, 1, 2, 3, 4]
    for i in range(1, 5):
        assert torch.equal(found[i], [p[r.index(i)] for r, p, _ in objective.asked if i in r][i - 1])
    plain = Square(trials=9)(Problem(x, Numpy(), budget_of(norm), Draws(0, "x", range(5))))
    assert torch.equal(found[0], plain[0])
