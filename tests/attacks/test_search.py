"""Searches: PGD, its restarts, NES and SPSA against plain loops; within budget, each query by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.attacks import (
    ATTACKS,
    NES,
    PGD,
    SPSA,
    Attack,
    Draws,
    Gallery,
    Problem,
    Queries,
    Search,
    Transfer,
    attack,
    make_search,
)
from robustmetric.perturb import Budget, Objective, frozen
from robustmetric.sphere import embed

pytestmark = pytest.mark.kernels

BUDGET = Budget(eps=0.08, alpha=0.03, steps=6)
SEARCHES = [
    "pgd",
    "pgd(restarts=3)",
    "pgd(best=True)",
    "pgd(random_start=True)",
    "nes(samples=3)",
    "spsa(samples=3)",
    "apgd(restarts=2)",
    "square(trials=9)",
]
LABELS = torch.arange(24) % 4


class Smooth(nn.Module):
    """A small network in double precision, without kinks."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.one = nn.Parameter(torch.randn(25, 12, generator=generator, dtype=torch.float64) / 3)
        self.two = nn.Parameter(torch.randn(12, 5, generator=generator, dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(images.flatten(1).to(self.one) @ self.one + 0.3) @ self.two


class Numpy(nn.Module):
    """The same network computed without torch: there is nothing to differentiate."""

    def __init__(self) -> None:
        super().__init__()
        network = Smooth()
        self.weights = network.one.detach().numpy(), network.two.detach().numpy()

    def forward(self, images: Tensor) -> Tensor:
        one, two = self.weights
        return torch.from_numpy(np.tanh(images.flatten(1).numpy() @ one + 0.3) @ two)


def pixels(dtype: torch.dtype = torch.float64) -> Tensor:
    images = torch.rand(24, 1, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    images[0], images[1, 0, :2] = 0.0, 1.0  # at the ends there is less room
    return images.to(dtype)


class Task:
    """An attack on the first ten images of a gallery, for any part of them."""

    def __init__(self, which: Attack, network: nn.Module, seed: int = 0) -> None:
        self.which, self.network, self.seed = which, network, seed
        self.images = pixels()
        with torch.no_grad():
            z = embed(network, self.images)
        self.gallery = Gallery(z, LABELS)
        self.queries = Queries(z[:10], LABELS[:10], torch.arange(10))
        index = which.select(self.queries, self.gallery, draws=self.draws("target", range(10)))
        self.target = which.aim(index, self.queries, self.gallery)

    def draws(self, purpose: str, numbers: range | list[int]) -> Draws:
        return Draws(self.seed, purpose, numbers)

    def goal(self, batch: Tensor) -> Objective:
        target, queries = self.target[batch], self.queries[batch]

        def objective(images: Tensor, rows: Tensor) -> Tensor:
            z = embed(self.network, images)
            return self.which.objective(z, target[rows], queries[rows], self.gallery)

        return objective

    def run(self, search: Search, batch: Tensor | None = None, budget: Budget = BUDGET) -> Tensor:
        batch = torch.arange(10) if batch is None else batch
        images, numbers = self.images[batch], batch.tolist()
        draws = self.draws("search", numbers)
        start = self.which.start(images, draws=draws)
        return search(Problem(images, self.goal(batch), budget, draws, start))

    def value(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self.goal(torch.arange(10))(images, torch.arange(10))


def within(moved: Tensor, images: Tensor, eps: float = BUDGET.eps) -> bool:
    return bool((moved - images).abs().max() <= eps + 1e-12 and moved.min() >= 0 and moved.max() <= 1)


# Any attack with any search


@pytest.mark.parametrize("name", [*ATTACKS, "CA+(w=3)", "QA-(m=2)"])
@pytest.mark.parametrize("protocol", ["strict", "reference"])
def test_every_attack_with_every_search_stays_in_the_budget(name: str, protocol: str) -> None:
    network, other = Smooth(), Smooth(seed=1)
    state = {k: v.clone() for k, v in network.state_dict().items()}
    rng = torch.get_rng_state()
    searches = [make_search(text) for text in SEARCHES]
    for search in [*searches, Transfer(surrogate=other), Transfer(surrogate=other, search=NES(samples=2))]:
        task = Task(attack(name, protocol=protocol), search.network or network)
        kept = task.images.clone()
        with frozen(task.network):
            moved = task.run(search, budget=Budget(eps=0.08, alpha=0.05, steps=2))
        assert moved.shape == (10, 1, 5, 5)
        assert moved.dtype == torch.float64
        assert not moved.requires_grad
        assert within(moved, task.images[:10]), search.name
        assert not torch.equal(moved, task.images[:10]), search.name
        assert torch.equal(task.images, kept)
    assert all(torch.equal(v, state[k]) for k, v in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize("name", ["CA+", "QA-", "ES", "LTM", "SP-QA+"])
@pytest.mark.parametrize("text", SEARCHES)
def test_a_query_s_perturbation_does_not_depend_on_its_batch(name: str, text: str) -> None:
    task, search = Task(attack(name), Smooth()), make_search(text)
    with frozen(task.network):
        whole = task.run(search)
        mixed = torch.tensor([7, 2, 9, 0, 4, 1, 8, 6, 3, 5])
        torch.testing.assert_close(task.run(search, mixed), whole[mixed], rtol=0, atol=1e-9)
        for part in ([3], [9, 5, 6]):
            found = task.run(search, torch.tensor(part))
            torch.testing.assert_close(found, whole[part], rtol=0, atol=1e-9)
        # And it does depend on the query's number, where chance decides more than where to begin.
        other = search(
            Problem(task.images[:1], task.goal(torch.tensor([0])), BUDGET, task.draws("search", [5]))
        )
    if "samples" in text:
        assert not torch.equal(other, whole[:1])


# PGD


@pytest.mark.parametrize("name", ["ES", "LTM", "GTM"])
@pytest.mark.parametrize("restarts", [1, 3])
def test_best_keeps_the_lowest_point_of_every_query_s_way(name: str, restarts: int) -> None:
    task = Task(attack(name), Smooth())
    images, rows = task.images[:10], torch.arange(10)
    goal, way = task.goal(rows), []

    def noted(x: Tensor, rows: Tensor) -> Tensor:
        value = goal(x, rows)
        way.append((x.detach().clone(), value.detach().clone(), rows.clone()))
        return value

    coarse = Budget(eps=0.08, alpha=0.05, steps=9)
    start = task.which.start(images, draws=task.draws("search", range(10)))
    search = PGD(restarts=restarts, best=True)
    with frozen(task.network):
        found = search(Problem(images, noted, coarse, task.draws("search", range(10)), start))
        reached = goal(found, rows)
        last = replace(search, best=False)
        plain = goal(last(Problem(images, goal, coarse, task.draws("search", range(10)), start)), rows)
    for i in range(10):
        points = [(float(v[k]), x[k]) for x, v, r in way for k in range(len(r)) if int(r[k]) == i]
        value, point = min(points, key=lambda p: p[0])
        assert float(reached[i]) == pytest.approx(value, abs=1e-12)
        assert torch.equal(found[i], point)
    assert (reached <= plain + 1e-12).all()
    assert name == "ES" or (reached < plain - 1e-6).any()


# Without gradients


class Scripted(Draws):
    """Directions that the test knows too: (query, direction) by turns."""

    def __init__(self, ways: Tensor) -> None:
        self.ways, self.turn = ways, [0] * len(ways)

    def _next(self, rows: Tensor | None) -> Tensor:
        drawn = []
        for i in range(len(self.ways)) if rows is None else rows.tolist():
            drawn.append(self.ways[i, self.turn[i]])
            self.turn[i] += 1
        return torch.stack(drawn)

    def normal(self, *shape: int, rows: Tensor | None = None) -> Tensor:
        assert shape == (1, 5, 5)
        return self._next(rows)

    def signs(self, *shape: int, rows: Tensor | None = None) -> Tensor:
        return self._next(rows).sign()


@pytest.mark.parametrize("kind", [NES, SPSA])
@pytest.mark.parametrize("sigma", [0.01, 0.3])
def test_by_trial_against_a_plain_loop(kind: type[NES] | type[SPSA], sigma: float) -> None:
    samples, steps = 4, 3
    budget = Budget(eps=0.08, alpha=0.03, steps=steps)
    ways = torch.randn(5, samples * steps, 1, 5, 5, generator=torch.Generator().manual_seed(2)).double()
    images = pixels()[:5]
    network = Smooth()
    with torch.no_grad():
        wanted = network(pixels()[10:15])

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        value: Tensor = (network(x) - wanted[rows]).square().sum(1)
        return value

    found = kind(samples=samples, sigma=sigma)(Problem(images, objective, budget, Scripted(ways)))
    for i in range(5):
        x = images[i : i + 1]
        for step in range(steps):
            slope = torch.zeros_like(x)
            for s in range(samples):
                way = ways[i, step * samples + s]
                way = way.sign() if kind is SPSA else way
                with torch.no_grad():
                    ahead = objective((x + sigma * way).clamp(0, 1), torch.tensor([i]))
                    behind = objective((x - sigma * way).clamp(0, 1), torch.tensor([i]))
                slope += (ahead - behind).item() / (2 * sigma) * way / samples
            x = torch.minimum(torch.maximum(x - 0.03 * slope.sign(), images[i] - 0.08), images[i] + 0.08)
            x = x.clamp(0, 1)
        torch.testing.assert_close(found[i], x[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("text", ["nes(samples=20)", "spsa(samples=20)"])
@pytest.mark.parametrize("name", ["CA+", "QA-", "TMA", "ES", "LTM", "GTM"])
def test_by_trial_lowers_the_objective_of_a_network_without_gradients(name: str, text: str) -> None:
    task = Task(attack(name), Numpy())
    moved = task.run(make_search(text))
    before, after = task.value(task.images[:10]), task.value(moved)
    assert (after < before - 1e-3).float().mean() >= 0.7
    assert after.mean() < before.mean() - 0.01
    with pytest.raises(rm.UserError, match="numpy"):
        task.run(PGD())


# On another network


def test_transfer_searches_on_the_surrogate() -> None:
    surrogate = Smooth(seed=1)
    assert PGD().network is None
    assert NES().network is None
    for inner in (PGD(), PGD(restarts=2), SPSA(samples=3)):
        search = Transfer(surrogate=surrogate, search=inner)
        assert search.network is surrogate
        assert search.name == f"transfer({inner.name})"
        task = Task(attack("TMA"), surrogate)
        with frozen(surrogate):
            assert torch.equal(task.run(search), task.run(inner))
    assert Transfer(surrogate=surrogate).search == PGD()
