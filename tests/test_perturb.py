"""PGD against a plain loop, the budget, and a network that comes back as it was."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from robustmetric.perturb import Budget, frozen, pgd, project


def test_one_step_is_as_long_as_the_budget() -> None:
    x = torch.full((1, 3), 0.5)
    moved = pgd(x, lambda x, rows: x.sum(1), Budget(eps=0.2, alpha=0.01, steps=1))
    torch.testing.assert_close(moved, torch.full((1, 3), 0.3))
    moved = pgd(x, lambda x, rows: x.sum(1), Budget(eps=0.2, alpha=0.01, steps=2))
    torch.testing.assert_close(moved, torch.full((1, 3), 0.48))


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
@settings(deadline=None, max_examples=150)
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


def test_frozen_computes_no_gradient_of_parameters() -> None:
    model = Mixed()
    x = torch.rand(3, 4)
    with frozen(model):
        pgd(x, lambda x, rows: model(x).sum(1), Budget(eps=0.1, alpha=0.1, steps=2))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model.norm.running_mean, torch.zeros(4))  # type: ignore[arg-type]


def test_works_while_gradients_are_switched_off() -> None:
    with torch.no_grad():
        moved = pgd(torch.full((1, 1), 0.5), lambda x, rows: x.sum(1), Budget(eps=0.1, alpha=0.1, steps=2))
    assert moved.item() == pytest.approx(0.4)
    assert not moved.requires_grad
