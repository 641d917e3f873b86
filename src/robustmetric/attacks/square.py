"""Random squares: a search that uses values alone, so that gradients cannot mislead it.

Andriushchenko et al., "Square Attack: a Query-Efficient Black-box Adversarial Attack via Random Search",
ECCV 2020; here for objectives of single queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.attacks.draws import Draws
from robustmetric.attacks.search import SEARCHES, Lowest, Problem, Search
from robustmetric.errors import whole
from robustmetric.perturb import Budget, Norm, project, sizes, spread

FIRST = 0.8
"""The share of an image that the first squares cover."""

HALVED = (5, 20, 50, 100, 200, 400, 800, 1600, 3200)
"""After so many trials the squares cover half as much: numbers, so that more trials continue from fewer."""


def side(trial: int, height: int, width: int) -> int:
    """Return the side of the square of a `trial`, counted from 0, in images of `height` times `width`.

    >>> [side(trial, 28, 28) for trial in (0, 5, 100, 1000)]
    [25, 18, 6, 2]
    """
    share = FIRST / 2 ** sum(trial >= after for after in HALVED)
    return max(1, min(round(math.sqrt(share * height * width)), height, width))


@SEARCHES.register("square")
@dataclass(frozen=True, kw_only=True)
class Square(Search):
    """Random search by squares: each trial sets a square of the perturbation anew, unless that does harm.

    There are so many `trials`. With the norm linf a square has ±ε in each channel; with l2 it gets what is
    left of the budget, and what another square had. Squares shrink with the trials; η and α play no part.
    Only values are used, so that masked gradients do not matter. A query that is where it is wanted drops out
    at once.

    >>> from robustmetric.attacks import make_search
    >>> make_search("square(trials=500)").num_evaluations(Budget(eps=0.1, alpha=0.1, steps=1))
    501
    """

    trials: int = 200

    follows_gradient = False
    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")

    def __post_init__(self) -> None:
        whole("trials", self.trials, 1)

    def num_evaluations(self, budget: Budget) -> int:
        """Return the evaluations within a `budget`: at the start, and in each trial."""
        return self.trials + 1

    @torch.no_grad()
    def minimise(self, problem: Problem) -> Tensor:
        """Return the perturbed images (B, C, H, W) of a `problem`; its start plays no part."""
        images, budget, draws = problem.images, problem.budget, problem.draws
        lowest = Lowest(images)
        rows = torch.arange(len(images), device=images.device)
        begin, vary = (_stripes, _set_square) if budget.norm == "linf" else (_tiles, _move_square)
        change = begin(images, budget.eps, draws)
        for trial in range(-1, self.trials):
            rows = rows[lowest.value[rows] > -torch.inf]
            if len(rows) == 0:
                break
            around = images[rows]
            tried = change[rows]
            if trial >= 0:
                tried = vary(tried, side(trial, *images.shape[2:]), budget.eps, draws, rows)
            point = project(around + tried, around, budget.eps, budget.norm)
            value = problem.objective(point, rows)
            # As good will do: on a plateau the next squares begin elsewhere.
            stays = value <= lowest.value[rows]
            lowest.keep(point, value, rows)
            change[rows[stays]] = tried[stays]
        return lowest.point


def _stripes(images: Tensor, eps: float, draws: Draws) -> Tensor:
    """Begin with a column of ±ε at each place and channel: (B, C, H, W)."""
    signs = draws.signs(images.shape[1], 1, images.shape[3]).to(images)
    return (eps * signs).expand_as(images).contiguous()


def _set_square(change: Tensor, length: int, eps: float, draws: Draws, rows: Tensor) -> Tensor:
    """Set one square of each perturbation (R, C, H, W) to ±ε in each channel."""
    signs = draws.signs(change.shape[1], 1, 1, rows=rows).to(change)
    return torch.where(_window(change, length, draws, rows)[2], eps * signs, change)


def _window(change: Tensor, length: int, draws: Draws, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a square for each perturbation: how far each line and column is in, and the mask (R, 1, H, W)."""
    height, width = change.shape[2:]
    room = torch.tensor([height - length + 1, width - length + 1], dtype=torch.float64)
    corner = (draws.uniform(2, rows=rows) * room).long().to(change.device)
    down = torch.arange(height, device=change.device) - corner[:, :1]
    right = torch.arange(width, device=change.device) - corner[:, 1:]
    inside = ((down >= 0) & (down < length))[:, :, None] & ((right >= 0) & (right < length))[:, None]
    return down, right, inside[:, None]


def _bump(height: int, width: int) -> Tensor:
    """Return a hill (height, width) that rises in rings towards its middle."""
    half = max(height, width) // 2
    down = (torch.arange(height, dtype=torch.float64) - (height - 1) / 2).abs() * half / max(1, height / 2)
    right = (torch.arange(width, dtype=torch.float64) - (width - 1) / 2).abs() * half / max(1, width / 2)
    ring = (half - torch.maximum(down[:, None], right)).clamp_min(0).floor()
    rises = torch.tensor([1 / (half + 1 - k) ** 2 for k in range(half + 1)], dtype=torch.float64).cumsum(0)
    return rises[ring.long()]


def _pattern(length: int) -> Tensor:
    """Return what a square of norm l2 is filled with: two hills side by side, of opposite sign and norm 1."""
    if length == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    left = length // 2
    whole = torch.cat([_bump(length, left), -_bump(length, length - left)], dim=1)
    return whole / whole.square().sum().sqrt()


def _tiles(images: Tensor, eps: float, draws: Draws) -> Tensor:
    """Begin with a chessboard of patterns of random sign that uses up the budget: (B, C, H, W)."""
    count, channels, height, width = images.shape
    length = max(1, min(height, width) // 5)
    pattern = _pattern(length).to(images)
    lines, columns = -(-height // length), -(-width // length)
    signs = draws.signs(channels, lines, columns).to(images)
    whole = torch.einsum("bcij,hw->bcihjw", signs, pattern)
    change = whole.reshape(count, channels, lines * length, columns * length)[..., :height, :width]
    change = change.contiguous()
    return change * spread(eps / sizes(change, "l2").clamp_min(1e-30), change)


def _move_square(change: Tensor, length: int, eps: float, draws: Draws, rows: Tensor) -> Tensor:
    """Take the budget that one square of each perturbation has, and what is unused, for another square."""
    down, right, inside = _window(change, length, draws, rows)
    _, _, taken = _window(change, length, draws, rows)
    signs = draws.signs(change.shape[1] + 1, 1, 1, rows=rows).to(change)
    pattern = _pattern(length).to(change)
    i, j = down.clamp(0, length - 1)[:, :, None], right.clamp(0, length - 1)[:, None]
    # The two hills lie next to each other, or one above the other.
    turned = spread(signs[:, -1, 0, 0] > 0, change[:, 0])
    laid = torch.where(turned, pattern[j, i], pattern[i, j])[:, None] * signs[:, :-1]
    here, there = change * inside, change * taken
    free = (eps**2 - sizes(change, "l2").square()).clamp_min(0) / change.shape[1]
    either = (change * (inside | taken)).square().sum((2, 3))
    allowed = (either + free[:, None]).sqrt()[..., None, None]
    # What is there already stays a part of what comes, unless they cancel: the rest would be rounding.
    was = _norms(here)
    mixed = (here / torch.where(was > 0, was, 1.0) + laid) * inside
    size = _norms(mixed)
    filled = torch.where(size > 1e-3, mixed / size.clamp_min(1e-3), laid)
    return torch.where(inside, filled * allowed, change - there)


def _norms(change: Tensor) -> Tensor:
    """Return the length of each channel: (R, C, 1, 1)."""
    found: Tensor = torch.linalg.vector_norm(change, dim=(2, 3), keepdim=True)
    return found
