"""APGD against a plain loop over one image, written from the paper, and who is asked how often."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import APGD, Draws, Problem, make_search
from robustmetric.attacks.apgd import checkpoints
from robustmetric.perturb import Budget, Norm, Objective
from robustmetric.sphere import BrokenEmbeddingsError

pytestmark = pytest.mark.kernels

NORMS: list[Norm] = ["linf", "l2"]
Value = Callable[[Tensor], Tensor]


def images(count: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn[0], drawn[1, 0, :2] = 0.0, 1.0  # at the ends there is less room
    return drawn.to(dtype)


class Hilly:
    """An objective with hills, of another shape for each row: steps that are too long do not help."""

    def __init__(self, count: int = 6) -> None:
        generator = torch.Generator().manual_seed(2)
        self.weight = torch.randn(count, 16, 5, generator=generator, dtype=torch.float64)
        self.asked: list[tuple[list[int], Tensor, Tensor]] = []

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        inner = torch.einsum("bi,bij->bj", x.flatten(1).double(), self.weight[rows])
        value = (3 * inner).sin().sum(1) + 0.05 * inner.square().sum(1)
        self.asked.append((rows.tolist(), x.detach().clone(), value.detach().clone()))
        return value


def budget_of(norm: Norm, steps: int = 25) -> Budget:
    return Budget(eps=0.1 if norm == "linf" else 0.4, alpha=0.5, steps=steps, norm=norm)


def back(x: Tensor, origin: Tensor, eps: float, norm: Norm) -> Tensor:
    """Project one image."""
    if norm == "linf":
        x = torch.minimum(torch.maximum(x, origin - eps), origin + eps)
    else:
        away = x - origin
        length = float(away.square().sum().sqrt())
        x = origin + away * (eps / length) if length > eps else x
    return x.clamp(0, 1)


def one_descent(value: Value, origin: Tensor, begin: Tensor, budget: Budget) -> tuple[float, Tensor, int]:
    """Descend as the paper's algorithm 1 does, for one image; return the best value, its point and halvings.

    The first step has no momentum, and neither has one behind a return to the best point.
    """

    def look(x: Tensor) -> tuple[float, Tensor]:
        leaf = x.clone().requires_grad_()
        found = value(leaf)
        (slope,) = torch.autograd.grad(found, leaf)
        return float(found.detach()), slope

    def along(slope: Tensor) -> Tensor:
        return slope.sign() if budget.norm == "linf" else slope / slope.square().sum().sqrt()

    share, before, looks = Fraction(22, 100), Fraction(0), []
    while share < 1:
        looks.append(math.ceil(share * budget.steps))
        before, share = share, share + max(share - before - Fraction(3, 100), Fraction(6, 100))
    step_size, halvings = 2 * budget.eps, 0
    x = last = back(begin, origin, budget.eps, budget.norm)
    f, slope = look(x)
    best, best_x, best_slope = f, x, slope
    helped, since, old_size, old_best, fresh = 0, 0, step_size, best, True
    for k in range(1, budget.steps + 1):
        ahead = back(x - step_size * along(slope), origin, budget.eps, budget.norm)
        if not fresh:
            ahead = back(x + 0.75 * (ahead - x) + 0.25 * (x - last), origin, budget.eps, budget.norm)
        last, x, fresh = x, ahead, False
        new, slope = look(x)
        helped, f = helped + (new < f), new
        if new < best:
            best, best_x, best_slope = new, x, slope
        if k in looks and k < budget.steps:
            few = helped < 0.75 * (k - since)
            stuck = step_size == old_size and best == old_best
            old_size, old_best, since, helped = step_size, best, k, 0
            if few or stuck:
                step_size, halvings = step_size / 2, halvings + 1
                x, fresh = best_x, True
                f, slope = best, best_slope
    return best, best_x, halvings


def single(hilly: Hilly, row: int) -> Value:
    return lambda x: hilly(x[None], torch.tensor([row]))[0]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("steps", [1, 2, 7, 25, 100])
def test_one_descent_against_a_plain_loop(norm: Norm, steps: int) -> None:
    x, budget, hilly = images(), budget_of(norm, steps), Hilly()
    found = APGD()(Problem(x, hilly, budget, Draws(0, "x", range(6))))
    halved = 0
    for i in range(6):
        value, wanted, halvings = one_descent(single(hilly, i), x[i], x[i], budget)
        # Slopes of about 10 and points that differ by rounding, 1e-16, which hills may double at each step.
        torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-7)
        assert float(hilly(found[i : i + 1], torch.tensor([i]))[0].detach()) == pytest.approx(value, abs=1e-6)
        halved += halvings
    assert halved > 3 or steps < 7


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("random_start", [False, True])
def test_restarts_against_a_plain_loop(norm: Norm, random_start: bool) -> None:
    """A restart begins at random in the budget, with l2 on its rim; the best of all counts."""
    x, budget, hilly = images(), budget_of(norm), Hilly()
    search = APGD(restarts=3, random_start=random_start)
    found = search(Problem(x, hilly, budget, Draws(3, "x", range(6))))
    others = 0
    for i in range(6):
        draws, ends = Draws(3, "x", [i]), []
        for k in range(3):
            begin = x[i]
            if k or random_start:
                if norm == "linf":
                    begin = begin + budget.eps * (2 * draws.uniform(1, 4, 4)[0] - 1)
                else:
                    noise = draws.normal(1, 4, 4)[0].double()
                    begin = begin + budget.eps * noise / noise.square().sum().sqrt()
            ends.append(one_descent(single(hilly, i), x[i], begin, budget)[:2])
        _, wanted = min(ends, key=lambda end: end[0])
        # The direction of a start is normalised in single precision: 1e-7, which hills may make larger.
        torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-9 if norm == "linf" else 1e-4)
        others += not torch.equal(wanted, ends[0][1])
    assert others


def test_checkpoints_are_those_of_the_recurrence() -> None:
    for steps in range(1, 1200):
        share, before, wanted = Fraction(22, 100), Fraction(0), set()
        while share < 1:
            wanted.add(math.ceil(share * steps))
            before, share = share, share + max(share - before - Fraction(3, 100), Fraction(6, 100))
        # The one behind the last step would change nothing.
        assert checkpoints(steps) == sorted(wanted - {steps})
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("text", ["apgd", "apgd(restarts=3)", "apgd(random_start=True)"])
def test_a_row_depends_on_neither_its_batch_nor_the_order(norm: Norm, text: str) -> None:
    x, budget, hilly, search = images(), budget_of(norm, 12), Hilly(), make_search(text)

    def run(batch: list[int]) -> Tensor:
        rows = torch.tensor(batch)
        return search(Problem(x[rows], lambda x, r: hilly(x, rows[r]), budget, Draws(0, "x", batch)))

    whole = run([*range(6)])
    for batch in ([4, 0, 5, 2, 1, 3], [3], [5, 1]):
        torch.testing.assert_close(run(batch), whole[batch], rtol=0, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_stays_in_the_budget_and_returns_the_least_that_it_saw(norm: Norm, dtype: torch.dtype) -> None:
    x, budget, hilly = images(dtype=dtype), budget_of(norm), Hilly()
    kept, state = x.clone(), torch.get_rng_state()
    search = APGD(restarts=2)
    found = search(Problem(x, hilly, budget, Draws(0, "x", range(6))))
    assert torch.equal(x, kept)
    assert torch.equal(state, torch.get_rng_state())
    assert found.dtype == dtype
    # A sum with the origin rounds once; a length has a rounding for each of its 16 pixels.
    slack = 16 * torch.finfo(dtype).eps
    for rows, point, _ in hilly.asked:
        change = (point - x[rows]).flatten(1)
        size = change.abs().amax(1) if norm == "linf" else change.square().sum(1).sqrt()
        assert size.max() <= budget.eps + slack
        assert point.min() >= 0
        assert point.max() <= 1
        assert point.dtype == dtype
    for i in range(6):
        asked = [(float(v[r.index(i)]), p[r.index(i)]) for r, p, v in hilly.asked if i in r]
        assert len(asked) == search.num_evaluations(budget) == 52
        least, point = min(asked, key=lambda pair: pair[0])
        if dtype == torch.float64:
            assert torch.equal(found[i], point)
        reached = float(hilly(found[i : i + 1], torch.tensor([i]))[0])
        assert reached == pytest.approx(least, abs=1e-6)  # values are kept in the precision of pixels


# Who is asked


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("restarts", [1, 3])
def test_a_row_that_has_arrived_is_never_asked_again(norm: Norm, restarts: int) -> None:
    """Row i arrives at its i-th question; row 0 never does."""
    x, hilly, asked = images(), Hilly(), [0] * 6

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        for i in rows.tolist():
            asked[i] += 1
        arrived = torch.tensor([0 < i <= asked[i] for i in rows.tolist()])
        return hilly(x, rows).masked_fill(arrived, -torch.inf)

    found = APGD(restarts=restarts)(Problem(x, objective, budget_of(norm, 8), Draws(0, "x", range(6))))
    assert asked == [9 * restarts, 1, 2, 3, 4, 5]
    for i in range(1, 6):
        turns = [p[r.index(i)] for r, p, _ in hilly.asked if i in r]
        assert torch.equal(found[i], turns[i - 1])  # and there it stays
    assert found.isfinite().all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_row_without_slope_and_momentum_stops(norm: Norm) -> None:
    x, asked = torch.full((3, 1, 2, 2), 0.5, dtype=torch.float64), [0, 0, 0]

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        for i in rows.tolist():
            asked[i] += 1
        total = x.flatten(1).sum(1)
        # The first is flat everywhere, the second behind a step, the third nowhere.
        return torch.where(rows == 0, 0 * total, torch.where(rows == 1, (total - 1.9).clamp_min(0), total))

    found = APGD()(Problem(x, objective, budget_of(norm, 10), Draws(0, "x", range(3))))
    assert asked[0] == 1
    assert 2 < asked[1] < 11  # the momentum takes it on for a while
    assert asked[2] == 11
    assert torch.equal(found[0], x[0])


# What cannot be


def test_broken_gradients_and_inference_mode_are_refused() -> None:
    x, budget = images(), budget_of("linf")

    def run(objective: Objective) -> None:
        APGD()(Problem(x, objective, budget, Draws(0, "x", range(6))))

    with pytest.raises(BrokenEmbeddingsError, match="the gradient of the images holds NaN or infinity"):
        run(lambda x, rows: (0 * x.flatten(1).sum(1)).sqrt())
    with pytest.raises(ValueError, match="the embeddings do not depend on the images"):
        run(lambda x, rows: torch.zeros(len(x)))
    with torch.inference_mode(), pytest.raises(ValueError, match="inference mode leaves no gradient"):
        run(lambda x, rows: x.flatten(1).sum(1))
    with torch.no_grad():
        run(lambda x, rows: x.flatten(1).sum(1))
