"""How an objective is minimised: by gradients, by trial, or on another network."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from robustmetric.attacks.base import is_floats
from robustmetric.attacks.draws import Draws
from robustmetric.errors import UserError, describe, instance, number, whole
from robustmetric.perturb import Budget, Norm, Objective, directions, pgd
from robustmetric.registry import Contract, Registry, changed_options, registry, with_options


@dataclass(frozen=True, eq=False)
class Problem:
    """What a search minimises: an `objective` over perturbations of `images` (B, C, H, W) within a `budget`.

    The objective takes images (R, C, H, W) and the rows (R,) of the batch that they are, and returns (R,)
    values, −∞ with a zero gradient where a query is where it is wanted: nothing is lower, and the search for
    it can end. Random numbers come from `draws`. The search begins at `start` (B, C, H, W), None for the
    images themselves.
    """

    images: Tensor
    objective: Objective
    budget: Budget
    draws: Draws
    start: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Search(Contract, ABC):
    """Looks for the perturbation that minimises an objective; any attack works with any search.

    A new search is a class that says whether it follows gradients and has the method `minimise`. One that
    supports budgets of other norms than linf names them in `norms`.

    >>> class Still(Search):
    ...     follows_gradient = False
    ...     def minimise(self, problem):
    ...         return problem.images
    >>> Still().name
    'still'
    """

    signatures = ("minimise(problem)",)
    norms: ClassVar[tuple[Norm, ...]] = ("linf",)
    follows_gradient: ClassVar[bool]
    """Whether it follows gradients of the network under attack: white-box, and not by trial."""
    keeps_last: ClassVar[bool] = False
    """Whether what it returns is the end of one descent, and not the best of several points."""
    network: ClassVar[nn.Module | None] = None
    """The network that perturbations are searched on, if it is not the one under attack."""

    @property
    def name(self) -> str:
        """The search as it is written on the command line."""
        return with_options(type(self).__name__.lower(), changed_options(self), ", ")

    def differentiates(self, model: nn.Module) -> bool:
        """Return whether gradients of this network, `model`, are needed."""
        return self.follows_gradient

    def num_evaluations(self, budget: Budget) -> int:
        """Return how often it evaluates the objective within a `budget`, as far as can be said."""
        return budget.steps

    @abstractmethod
    def minimise(self, problem: Problem) -> Tensor:
        """Return the perturbed images (B, C, H, W) of a `problem`, within its budget."""

    def __call__(self, problem: Problem) -> Tensor:
        """Solve a `problem` by `minimise`: return the perturbed images (B, C, H, W), without a gradient.

        >>> lower = lambda x, rows: x.sum((1, 2, 3))
        >>> budget = Budget(eps=0.25, alpha=0.25, steps=1)
        >>> PGD()(Problem(torch.ones(1, 1, 1, 2), lower, budget, Draws(0, "x", [0])))
        tensor([[[[0.7500, 0.7500]]]])
        """
        if problem.budget.norm not in self.norms:
            raise UserError(
                f"{self.name} supports budgets of {' and '.join(self.norms)} alone, not of "
                f"{problem.budget.norm}: search with apgd or square",
                parameter="norm",
            )
        moved, shape = self.minimise(problem), problem.images.shape
        floats = is_floats(moved, shape)
        if not floats or not moved.isfinite().all():
            broken = " with NaN or infinity" if floats else ""
            raise UserError(
                f"{type(self).__name__}.minimise returned {describe(moved)}{broken}; it must return finite "
                f"floats of shape {tuple(shape)}, as the images"
            )
        return moved.detach()

    def check(self) -> None:
        """Reject a search without a name, or that does not say whether it follows gradients."""
        who = type(self).__name__
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"{who}.name is {describe(self.name)}; it must be a text")
        instance(f"{who}.follows_gradient", getattr(self, "follows_gradient", None), bool)


class Lowest:
    """The lowest point that a search has seen of each of its `images` (B, C, H, W), and its value (B,).

    >>> lowest = Lowest(torch.zeros(2, 1, 1, 1))
    >>> lowest.keep(torch.ones(1, 1, 1, 1), torch.tensor([-1.0]), torch.tensor([1]))
    >>> lowest.point.flatten(), lowest.value
    (tensor([0., 1.]), tensor([inf, -1.]))
    """

    def __init__(self, images: Tensor) -> None:
        single = torch.promote_types(images.dtype, torch.float32)
        self.point = images.clone()
        self.value = torch.full((len(images),), torch.inf, dtype=single, device=images.device)

    def keep(self, point: Tensor, value: Tensor, rows: Tensor) -> None:
        """Keep a `point` (R, C, H, W) of some `rows` (R,) where its `value` (R,) is lower than before."""
        better = value < self.value[rows]
        self.point[rows[better]], self.value[rows[better]] = point[better], value[better].to(self.value)

    def watch(self, objective: Objective) -> Objective:
        """Return the `objective`, keeping every point that it is evaluated at."""

        def watched(x: Tensor, rows: Tensor) -> Tensor:
            value = objective(x, rows)
            self.keep(x.detach(), value.detach(), rows)
            return value

        return watched


def random_start(images: Tensor, budget: Budget, draws: Draws, rows: Tensor | None = None) -> Tensor:
    """Return a point at random in the `budget` around each of `images` (R, C, H, W).

    With the norm l2 it is on the rim. Numbers come from the `draws` of the `rows` (R,), by default of all.

    >>> images = torch.full((1, 1, 8, 8), 0.5)
    >>> r = random_start(images, Budget(eps=0.1, alpha=0.1, steps=1), Draws(0, "x", [0])) - images
    >>> 0.08 < float(r.abs().max()) <= 0.1
    True
    """
    if budget.norm == "l2":
        noise = directions(draws.normal(*images.shape[1:], rows=rows), "l2")
    else:
        noise = 2 * draws.uniform(*images.shape[1:], rows=rows) - 1
    return images + budget.eps * noise.to(images)


SEARCHES: Registry[Search] = registry("search", Search)


@SEARCHES.register("pgd")
@dataclass(frozen=True, kw_only=True)
class PGD(Search):
    """Projected gradient descent: signs of gradients, fixed steps, from the image itself.

    With `restarts` the search is repeated from random points of the budget and each query keeps the
    perturbation with the lowest objective; with `random_start` the first one begins at random as well. With
    `best` a query keeps the lowest point on its way, and not the last.

    >>> make_search("pgd(restarts=2)")
    PGD(restarts=2, random_start=False, best=False)
    """

    restarts: int = 1
    random_start: bool = False
    best: bool = False

    follows_gradient = True

    def __post_init__(self) -> None:
        whole("restarts", self.restarts, 1)
        instance("random_start", self.random_start, bool)
        instance("best", self.best, bool)

    @property
    def keeps_last(self) -> bool:  # type: ignore[override]
        """Whether what it returns is the end of one descent, and not the best of several points."""
        return self.restarts == 1 and not self.best

    def num_evaluations(self, budget: Budget) -> int:
        """Return the evaluations within a `budget`: one a step, and at the end of some descents."""
        return self.restarts * (budget.steps + (not self.keeps_last))

    def minimise(self, problem: Problem) -> Tensor:
        """Return the perturbed images (B, C, H, W) of a `problem`."""
        images, objective, budget = problem.images, problem.objective, problem.budget
        rows, start = torch.arange(len(images), device=images.device), problem.start
        lowest = Lowest(images)
        for k in range(self.restarts):
            if k or self.random_start:
                start = random_start(images, budget, problem.draws)
            found = pgd(images, lowest.watch(objective) if self.best else objective, budget, start=start)
            if self.keeps_last:
                return found
            with torch.no_grad():
                lowest.keep(found, objective(found, rows), rows)
        return lowest.point


# Stands for −∞ where values are subtracted: far below any objective on the unit sphere.
_LOW = -1e3


@dataclass(frozen=True, kw_only=True)
class _ByTrial(Search):
    """PGD with gradients that are estimated from values at random points: nothing is differentiated."""

    directions: ClassVar[str]  # the method of `Draws` for them

    samples: int = 50
    sigma: float = 0.01

    follows_gradient = False

    def __post_init__(self) -> None:
        whole("samples", self.samples, 1)
        number("sigma", self.sigma, 0, 1, open_low=True, why="it is a distance in pixels of [0, 1]")

    def num_evaluations(self, budget: Budget) -> int:
        """Return the evaluations within a `budget`: two points for each direction, at each step."""
        return 2 * self.samples * budget.steps

    def minimise(self, problem: Problem) -> Tensor:
        """Return the perturbed images (B, C, H, W) of a `problem`."""

        def estimate(objective: Objective, point: Tensor, rows: Tensor) -> Tensor:
            slope = torch.zeros_like(point)
            for _ in range(self.samples):
                direction = draw(*point.shape[1:], rows=rows).to(point)
                ahead, behind = (
                    objective((point + s * self.sigma * direction).clamp_(0, 1), rows).clamp_min(_LOW)
                    for s in (1, -1)
                )
                slope += (ahead - behind)[:, None, None, None].to(slope) * direction
            return slope / (2 * self.sigma * self.samples)

        draw = getattr(problem.draws, self.directions)
        with torch.no_grad():
            images, objective, budget = problem.images, problem.objective, problem.budget
            return pgd(images, objective, budget, start=problem.start, gradient=estimate)


@SEARCHES.register("nes")
@dataclass(frozen=True, kw_only=True)
class NES(_ByTrial):
    """Natural evolution strategies: the gradient from `samples` pairs of points along normal directions.

    Their distance scales with `sigma`. Black-box: only values are used. Ilyas et al., "Black-box
    Adversarial Attacks with Limited Queries and Information", ICML 2018.

    >>> make_search("nes")
    NES(samples=50, sigma=0.01)
    """

    directions = "normal"


@SEARCHES.register("spsa")
@dataclass(frozen=True, kw_only=True)
class SPSA(_ByTrial):
    """Simultaneous perturbation: the gradient from `samples` pairs of points along random signs.

    The points are `sigma` away in each pixel. Black-box: only values are used. Uesato et al., "Adversarial
    Risk and the Dangers of Evaluating Against Weak Attacks", ICML 2018.

    >>> make_search("spsa(samples=10)").name
    'spsa(samples=10)'
    """

    directions = "signs"


@SEARCHES.register("transfer")
@dataclass(frozen=True, kw_only=True)
class Transfer(Search):
    """Run a `search` on another network, the `surrogate`, and hope that the perturbation carries over.

    The surrogate may be bound later: see `bind`.

    >>> make_search("transfer(nes(samples=5))")
    Transfer(search=NES(samples=5, sigma=0.01), surrogate=None)
    """

    search: Search = PGD()
    surrogate: nn.Module | None = None

    follows_gradient = False

    @property
    def norms(self) -> tuple[Norm, ...]:  # type: ignore[override]
        """Those of what searches on the surrogate."""
        return self.search.norms

    @property
    def name(self) -> str:
        """The search as it is written on the command line."""
        return f"transfer({self.search.name})"

    @property
    def network(self) -> nn.Module | None:  # type: ignore[override]
        """The surrogate."""
        return self.surrogate

    def differentiates(self, model: nn.Module) -> bool:
        """Return whether gradients of `model` are needed: of the surrogate, by what searches on it."""
        return model is self.surrogate and self.search.differentiates(model)

    def num_evaluations(self, budget: Budget) -> int:
        """Return the evaluations within a `budget`, of the search on the surrogate."""
        return self.search.num_evaluations(budget)

    def minimise(self, problem: Problem) -> Tensor:
        """Return the perturbed images (B, C, H, W) of a `problem`."""
        return self.search(problem)


def bind(search: Search, surrogate: nn.Module | None) -> Search:
    """Return a `search` with the `surrogate` that it transfers from; reject one too many, or none.

    >>> bind(make_search("transfer"), nn.Flatten()).network
    Flatten(start_dim=1, end_dim=-1)
    """
    waits = isinstance(search, Transfer) and search.surrogate is None
    if waits and surrogate is not None:
        return replace(search, surrogate=surrogate)  # type: ignore[call-arg]
    if waits or (surrogate is not None and search.network is not surrogate):
        told = "needs a surrogate, the network that is searched on: give one"
        if not waits:
            other = f"write transfer({search.name}), or " if search.network is None else "it has its own: "
            told = f"takes no surrogate: {other}leave the surrogate out"
        raise UserError(f"search {search.name!r} {told}", parameter="surrogate")
    return search


def make_search(name: str) -> Search:
    """Make a search by its name, with its options in brackets.

    `name` is that of a registered search, or ``"file.py:Mine(option=1)"``; either may stand in the brackets
    of ``"transfer(nes)"``, and PGD does if there are none.

    >>> make_search("pgd")
    PGD(restarts=1, random_start=False, best=False)
    """
    found = re.fullmatch(r"\s*transfer\s*(?:\((.*)\))?\s*", name, re.DOTALL)
    if found is None:
        return SEARCHES.make(name)
    inner = make_search((found[1] or "").strip() or "pgd")
    if isinstance(inner, Transfer):
        raise UserError(f"search {name!r}: transfer cannot stand in its own brackets; write {inner.name}")
    return Transfer(search=inner)
