"""PGD against a plain loop, the budget, its norms, and a network that comes back as it was."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from robustmetric.perturb import (
    Budget,
    Objective,
    check_images,
    differentiate,
    directions,
    frozen,
    pgd,
    project,
    sizes,
    spread,
    steepness,
    value_and_slope,
)
from robustmetric.sphere import BrokenEmbeddingsError

pytestmark = pytest.mark.kernels


@given(
    rows=st.integers(1, 5),
    shape=st.sampled_from([(1, 2, 2), (3, 4, 5), (3, 1, 3, 3)]),
    eps=st.floats(0, 1),
    alpha=st.floats(1e-3, 1),
    steps=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**31),
    offset=st.booleans(),
)
@settings(max_examples=150)
def test_stays_in_the_budget_and_equals_a_plain_loop(
    rows: int,
    shape: tuple[int, ...],
    eps: float,
    alpha: float,
    steps: int,
    dtype: torch.dtype,
    seed: int,
    offset: bool,
) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, *shape, generator=g).to(dtype)
    slope = torch.randn(rows, *shape, generator=g).to(dtype)
    goal = torch.randn(rows, generator=g).to(dtype)
    start = (x + torch.randn(rows, *shape, generator=g)).to(dtype) if offset else None
    budget = Budget(eps=eps, alpha=alpha, steps=steps)
    seen: list[int] = []

    def objective(x: Tensor, active: Tensor) -> Tensor:
        seen.append(len(active))
        return (goal[active] - (slope[active] * x).flatten(1).sum(1)).clamp_min(0).square()

    before = (x.clone(), torch.get_rng_state())
    moved = pgd(x, objective, budget, start=start)
    assert torch.equal(x, before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert moved.dtype == dtype
    # The bounds x ± ε are rounded once to the images' type; pixels never leave [0, 1].
    assert (moved - x).abs().double().max() <= eps + torch.finfo(dtype).eps
    assert moved.min() >= 0
    assert moved.max() <= 1
    assert seen == sorted(seen, reverse=True)
    assert len(seen) <= steps
    assert torch.equal(moved, pgd(x, objective, budget, start=start))

    for i in range(rows):
        point = x[[i]] if start is None else project(start[[i]], x[[i]], eps)
        for _ in range(steps):
            point = point.detach().requires_grad_()
            value = (goal[i] - (slope[[i]] * point).flatten(1).sum(1)).clamp_min(0).square()
            (gradient,) = torch.autograd.grad(value.sum(), point)
            step = eps if steps == 1 else alpha
            low, high = (x[[i]] - eps).clamp(0, 1), (x[[i]] + eps).clamp(0, 1)
            point = torch.minimum(torch.maximum(point - step * gradient.sign(), low), high)
        if dtype in (torch.float32, torch.float64):
            torch.testing.assert_close(moved[i], point.detach()[0])


def test_a_row_without_gradient_is_computed_once() -> None:
    x, goal = torch.full((3, 1), 0.5), torch.tensor([0.4, 0.55, 0.9])
    active: list[list[int]] = []

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        active.append(rows.tolist())
        return (goal[rows] - x.squeeze(1)).clamp_min(0).square()

    moved = pgd(x, objective, Budget(eps=1, alpha=0.1, steps=8))
    assert active == [[0, 1, 2], [1, 2], [2], [2], [2]]
    torch.testing.assert_close(moved.squeeze(1), torch.tensor([0.5, 0.6, 0.9]))


class Mixed(nn.Module):
    """A network with every kind of mode and flag in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout()
        self.two = nn.Linear(4, 2)
        self.train()
        self.norm.eval()
        self.one.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.two(self.drop(self.norm(self.one(x.flatten(1)))))
        return z


def state(model: nn.Module) -> tuple[list[bool], list[bool]]:
    return [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_frozen_restores_each_module_and_parameter(error: type[BaseException] | None) -> None:
    model = Mixed()
    before = state(model)
    assert len(set(before[0])) == len(set(before[1])) == 2

    def work() -> None:
        with frozen(model):
            assert not any(m.training for m in model.modules())
            assert not any(p.requires_grad for p in model.parameters())
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(error):
            work()
    assert state(model) == before


def test_a_gradient_of_one_s_own_replaces_differentiation() -> None:
    """It is given the objective, the points and their positions; only its sign counts."""
    x = torch.full((3, 2), 0.5)
    slopes = torch.tensor([[1.0, -100.0], [0.0, 0.0], [-1e-6, 0.0]])
    seen: list[tuple[bool, list[int], list[float]]] = []

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        raise AssertionError("nobody asked")

    def gradient(given: Objective, point: Tensor, rows: Tensor) -> Tensor:
        seen.append((given is objective, rows.tolist(), point[:, 0].tolist()))
        return slopes[rows]

    moved = pgd(x, objective, Budget(eps=0.25, alpha=0.125, steps=3), gradient=gradient)
    assert moved.tolist() == [[0.25, 0.75], [0.5, 0.5], [0.75, 0.5]]
    # The row without a slope stays in: the next estimate may be another.
    assert seen == [
        (True, [0, 1, 2], [0.5, 0.5, 0.5]),
        (True, [0, 1, 2], [0.375, 0.5, 0.625]),
        (True, [0, 1, 2], [0.25, 0.5, 0.75]),
    ]
    assert x.eq(0.5).all()


def test_inference_mode_is_refused_only_where_something_is_differentiated() -> None:
    x, budget = torch.full((1, 1), 0.5), Budget(eps=0.1, alpha=0.1, steps=2)
    with torch.inference_mode():
        with pytest.raises(
            ValueError, match=r"inference mode leaves no gradient to follow: use torch\.no_grad"
        ):
            pgd(x, lambda x, rows: x.sum(1), budget)
        moved = pgd(x, lambda x, rows: x.sum(1), budget, gradient=lambda _, x, rows: torch.ones_like(x))
    assert moved.item() == pytest.approx(0.4)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_refused_wherever_it_comes_from(wrong: float) -> None:
    x, budget = torch.full((2, 1), 0.5), Budget(eps=0.1, alpha=0.1, steps=2)
    slope = torch.tensor([[1.0], [wrong]])
    with pytest.raises(BrokenEmbeddingsError, match="the gradient of the images holds NaN or infinity"):
        pgd(x, lambda x, rows: x.sum(1), budget, gradient=lambda _, x, rows: slope)


def test_differentiate_refuses_a_value_without_a_way_to_the_images() -> None:
    for objective in (lambda x, rows: x.detach().sum(1), lambda x, rows: torch.zeros(len(x))):
        with pytest.raises(ValueError, match="the embeddings do not depend on the images: take no_grad"):
            differentiate(objective, torch.rand(2, 3), torch.arange(2))


SHAPE = "they must have shape (N, C, H, W)"


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(2, 28, 32, 3), f"(2, 28, 32, 3); {SHAPE}"),
        (torch.rand(3, 8, 8), f"(3, 8, 8); {SHAPE}"),
        (torch.rand(8, 1, 8, 4, 4), f"(8, 1, 8, 4, 4); {SHAPE}"),
        (torch.rand(8, 1, 0, 4), f"(8, 1, 0, 4); {SHAPE}"),
        (np.zeros((2, 1, 8, 8), np.uint8), "not an array, uint8 of shape (2, 1, 8, 8)"),
        ([torch.rand(1, 8, 8)], "not a list"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "not uint8 of shape (2, 1, 8, 8)"),
        (torch.full((1, 1, 2, 2), math.nan), "pixels are in [nan, nan]"),
        (torch.tensor([[[[0, math.inf]]]]), "pixels are in [0, inf]"),
        (torch.full((1, 1, 2, 2), 1.001), "they must be in [0, 1]: use images.clamp(0, 1)"),
        (torch.full((1, 1, 2, 2), 1.02), "they must be in [0, 1]: divide 8-bit images by 255"),
    ],
)
def test_images_are_refused_with_what_helps(images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_images(images)


# Norms


@given(
    shape=st.sampled_from([(1,), (3, 2, 2), (1, 5, 4)]),
    eps=st.one_of(st.just(0.0), st.floats(1e-3, 3)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_norms_against_plain_loops(shape: tuple[int, ...], eps: float, dtype: torch.dtype, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    origin = torch.rand(4, *shape, generator=g, dtype=torch.float64).to(dtype)
    x = (origin + torch.randn(4, *shape, generator=g, dtype=torch.float64)).to(dtype)
    x[0] = origin[0]
    kept = x.clone()
    change = x - origin
    # A length has a rounding for each of 20 pixels at most.
    slack = 20 * torch.finfo(dtype).eps
    for norm in ("linf", "l2"):
        found, size, way = project(x, origin, eps, norm), sizes(change, norm), directions(change, norm)
        assert found.dtype == size.dtype == way.dtype == dtype
        for i in range(4):
            flat, start = change[i].flatten().tolist(), origin[i].flatten().tolist()
            length = math.sqrt(sum(c * c for c in flat)) if norm == "l2" else max(abs(c) for c in flat)
            assert float(size[i]) == pytest.approx(length, rel=slack)
            if norm == "linf":
                held = [min(max(c, -eps), eps) for c in flat]
                unit = [float((c > 0) - (c < 0)) for c in flat]
            else:
                held = [c * min(1, eps / length) if length else 0.0 for c in flat]
                unit = [c / length if length else 0.0 for c in flat]
            wanted = [min(max(s + h, 0), 1) for s, h in zip(start, held, strict=True)]
            assert found[i].flatten().tolist() == pytest.approx(wanted, abs=4 * slack)
            assert way[i].flatten().tolist() == pytest.approx(unit, abs=slack)
        assert (sizes(found - origin, norm) <= eps + 4 * slack).all()
    assert torch.equal(x, kept)
    assert spread(sizes(change, "l2"), x).shape == (4, *[1] * len(shape))


@pytest.mark.parametrize("slope", [1e-44, 1e-38, 1e-30, 1e-12, 1.0, 1e30, 1e37])
def test_a_direction_has_length_1_however_small_the_slope(slope: float) -> None:
    """Squares of such numbers are no float32, and the last few bits of the smallest are all it has."""
    way = torch.tensor([[3.0, -4.0, 0.0], [0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]) * slope
    exact = way[0].double() / way[0].double().norm()
    found = directions(way, "l2")
    torch.testing.assert_close(found[0].double(), exact, rtol=0, atol=1e-6)
    assert found[1:].tolist() == [[0, 0, 0], [0, 1, 0]]
    assert directions(way, "linf").tolist() == [[1, -1, 0], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"norm": "l1"}, r"unknown norm 'l1'.*; known: l2, linf"),
        ({"eps": 1.5}, r"eps must be in \[0, 1\], not 1.5: pixels are in \[0, 1\], so 8 grey levels are"),
        ({"eps": -0.1, "norm": "l2"}, "eps must be a number of at least 0, not -0.1: with the norm l2"),
        ({"eps": math.nan, "norm": "l2"}, "eps must be a number of at least 0, not nan"),
        ({"alpha": 2.0, "norm": "l2"}, r"alpha must be in \(0, 1\], not 2.0"),
        ({"steps": 0, "norm": "l2"}, "steps must be a whole number of at least 1, not 0"),
    ],
)  # fmt: skip
def test_a_budget_refuses_what_cannot_be(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget(**{"eps": 0.1, "alpha": 0.1, "steps": 2, **given})  # type: ignore[arg-type]


def test_value_and_slope_are_those_of_each_row() -> None:
    point = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    seen = []

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        seen.append((x.requires_grad, rows.tolist()))
        return (x.square().sum(1) * (rows + 1)).masked_fill(rows == 4, -torch.inf)

    with torch.no_grad():
        value, slope = value_and_slope(objective, point, torch.tensor([4, 1]))
    assert value.tolist() == [-math.inf, 20.0]
    # Where a row has arrived, there is no slope.
    assert slope.tolist() == [[0.0, 0.0], [12.0, -4.0]]
    assert seen == [(True, [4, 1])]
    assert not any(t.requires_grad for t in (value, slope, point))
    assert steepness(slope).tolist() == [0.0, 12.0]


def test_pgd_leaves_a_row_where_it_has_arrived() -> None:
    """Minus infinity is as low as can be: the row stays where it is, and is asked no more."""
    x, asked = torch.full((3, 2), 0.5), []

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        asked.append(rows.tolist())
        return x.sum(1).masked_fill(x[:, 0].detach() < torch.tensor([0.45, 0.25, 0.0])[rows], -torch.inf)

    moved = pgd(x, objective, Budget(eps=0.5, alpha=0.1, steps=4))
    assert asked == [[0, 1, 2], [0, 1, 2], [1, 2], [1, 2]]
    torch.testing.assert_close(moved[:, 0], torch.tensor([0.4, 0.2, 0.1]))
