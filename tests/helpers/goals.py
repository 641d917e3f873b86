"""The goals misrank, shift, promote, demote and translocate by plain loops: a query, an image at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from robustmetric.attacks import Attack, Demote, Draws, Gallery, Promote, Queries, Translocate
from robustmetric.attacks.goals import TRIED, Misrank

GOALS = [
    "misrank",
    "misrank(by='margin')",
    "misrank(by=1)",
    "misrank(by=2)",
    "misrank(by=9)",  # more than there are
    "misrank(tau=0.5)",
    "misrank(side='candidate')",
    "shift",
    "promote",
    "promote(by='hinge')",
    "promote(by='margin')",
    "promote(k=1)",
    "promote(k=9,by='margin')",
    "promote(side='candidate')",
    "promote(k=9,side='candidate')",
    "demote",
    "demote(by='distance')",
    "demote(by='hinge')",
    "demote(k=7)",
    "demote(side='candidate')",
    "demote(k=7,side='candidate')",
    "translocate",
    "translocate(by='distance')",
    "translocate(by='hinge')",
    "translocate(k=9)",
]
"""Every goal, with every objective, on both sides and with more places than usual."""

Placed = Promote | Demote | Translocate
Vector = list[float]


def square(x: Vector, y: Vector) -> float:
    """Squared distance; what differs by less than a billionth is tied."""
    return round(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)), 9)


def counts(own: int, label: int, camera: int | None, g: Gallery) -> list[int]:
    """List what counts for a query: not itself, and nothing of its class from its camera."""
    found = []
    for place in range(len(g)):
        hidden = (
            camera is not None
            and g.cameras is not None
            and int(g.labels[place]) == label
            and int(g.cameras[place]) == camera
        )
        if place != own and not hidden:
            found.append(place)
    return found


def counted(row: int, q: Queries, g: Gallery) -> list[int]:
    """List what counts for a query."""
    camera = None if q.cameras is None else int(q.cameras[row])
    return counts(int(q.own[row]), int(q.labels[row]), camera, g)


def ranking(place: int, g: Gallery) -> list[int]:
    """List what counts for an image of the gallery as a query, nearest first."""
    camera = None if g.cameras is None else int(g.cameras[place])
    z = g.z[place].tolist()
    left = counts(place, int(g.labels[place]), camera, g)
    return [p for _, p in sorted((square(z, g.z[p].tolist()), p) for p in left)]


def first_without(place: int, candidate: int, g: Gallery) -> int:
    """Find the first in the ranking of an image that is not the candidate."""
    return next(p for p in ranking(place, g) if p != candidate)


def ranked(which: Placed, row: int, target: int, q: Queries, g: Gallery) -> list[int]:
    """List the images that a target is ranked among: by camera for translocate alone."""
    if isinstance(which, Translocate):
        return [p for p in counted(row, q, g) if p != target]
    return [p for p in range(len(g)) if p not in (int(q.own[row]), target)]


def places(which: Placed, g: Gallery) -> int:
    return math.ceil(len(g) / 100) if which.k is None else which.k


def far(x: Tensor, y: Tensor) -> Tensor:
    """Measure a distance, without a gradient where it is none but for rounding."""
    distance: Tensor = torch.linalg.vector_norm(x - y)
    return distance if distance > 1e-5 else distance.detach()


def softmin(values: list[Tensor], tau: float) -> Tensor:
    return -tau * torch.stack([(-value / tau).exp() for value in values]).sum().log()


def objective(which: Attack, z: Tensor, row: int, index: list[int], q: Queries, g: Gallery) -> Tensor:
    """One query's objective."""
    own, label = int(q.own[row]), int(q.labels[row])
    if which.name == "shift":
        return -far(z, q.z[row])
    if isinstance(which, Misrank):
        if which.side == "candidate":
            asked, _ = index
            return far(z, g.z[asked]) - far(g.z[asked], g.z[first_without(asked, own, g)])
        mates = [far(z, g.z[p]) for p in counted(row, q, g) if int(g.labels[p]) == label]
        others = [far(z, g.z[p]) for p in range(len(g)) if int(g.labels[p]) != label]
        if not mates or not others:
            return 0 * z.sum()
        if which.how == "smooth":
            return softmin(others, which.tau) - softmin(mates, which.tau)
        if which.how == "margin":
            return min(others) - min(mates)
        kind = int(g.labels[index[0]])
        return min(far(z, g.z[p]) for p in range(len(g)) if int(g.labels[p]) == kind) - min(mates)
    assert isinstance(which, Placed)
    (target,) = index
    sign, k = (1 if isinstance(which, Promote) else -1), places(which, g)
    dist = far(z, g.z[target])
    if which.side == "candidate":
        level = sorted(far(g.z[target], g.z[p]) for p in range(len(g)) if p not in (own, target))[k - 1]
        return sign * (dist - level)
    if which.how == "distance":
        return sign * dist
    if which.how == "margin":
        return sign * (dist - sorted(far(z, g.z[p]) for p in ranked(which, row, target, q, g))[k - 1])
    hinges = [(sign * (dist - far(z, g.z[p]))).clamp_min(0) for p in range(len(g)) if p not in (own, target)]
    return torch.stack(hinges).sum() / len(hinges)


def measure(which: Attack, z: Vector, row: int, index: list[int], q: Queries, g: Gallery) -> float:
    """One query's column."""
    own, label, images = int(q.own[row]), int(q.labels[row]), g.z.tolist()
    if which.name == "shift":
        return math.dist(z, q.z[row].tolist())
    if isinstance(which, Misrank):
        if which.side == "query":
            order = sorted((square(z, images[p]), p) for p in counted(row, q, g))
            kinds = [int(g.labels[p]) for _, p in order]
            return 100.0 * (kinds[0] == label) if label in kinds else math.nan
        asked, _ = index
        kinds = [int(g.labels[p]) for p in ranking(asked, g)]
        if int(g.labels[asked]) not in kinds:
            return math.nan
        others = [(square(images[asked], images[p]), p, int(g.labels[p])) for p in ranking(asked, g)]
        others = [entry for entry in others if entry[1] != own]
        # A candidate that is not in the gallery comes behind it.
        others.append((square(images[asked], z), own if own >= 0 else len(g), label))
        return 100.0 * (min(others)[2] == int(g.labels[asked]))
    assert isinstance(which, Placed)
    (target,) = index
    level = square(z, images[target])
    if which.side == "candidate":
        away = [square(images[target], images[p]) for p in range(len(g)) if p not in (own, target)]
    else:
        away = [square(z, images[p]) for p in ranked(which, row, target, q, g)]
    middle = sum(d < level for d in away) + sum(d == level for d in away) / 2
    inside = middle <= places(which, g) - 1
    return 100.0 * (inside != isinstance(which, Demote))


def select(which: Attack, row: int, q: Queries, g: Gallery, draws: Draws) -> list[int]:
    """What one query aims at; `draws` are its own."""
    own, label, z = int(q.own[row]), int(q.labels[row]), q.z[row].tolist()
    order = [p for _, p in sorted((square(z, x), p) for p, x in enumerate(g.z.tolist())) if p != own]
    if which.name == "shift":
        return []
    if isinstance(which, Misrank):
        wrong = [p for p in order if int(g.labels[p]) != label]
        if which.side == "candidate":
            near = wrong[:TRIED]
            fit = [p for p in near if int(g.labels[first_without(p, own, g)]) == int(g.labels[p])]
            asked = (fit or near)[0]
            return [asked, first_without(asked, own, g)]
        if isinstance(which.how, str):
            return []
        firsts: dict[int, int] = {}
        for p in wrong:
            firsts.setdefault(int(g.labels[p]), p)
        return [[*firsts.values()][: which.how][-1]]
    assert isinstance(which, Placed)
    if isinstance(which, Translocate):
        return [next(p for p in order if p in counted(row, q, g))]
    if isinstance(which, Promote):
        left = [p for p in range(len(g)) if p != own]
        return [left[int(float(draws.uniform(1)[0, 0]) * len(left))]]
    if which.side == "query":
        k = places(which, g)
        return [order[int(float(draws.uniform(1)[0, 0]) * k)]]
    numbers = draws.uniform(TRIED)[0].tolist()
    pool = [p for _, p in sorted(zip(numbers, order, strict=False))]
    images = g.z.tolist()
    for p in pool:
        away = [square(images[p], images[o]) for o in range(len(g)) if o not in (own, p)]
        level = square(images[p], z)
        if sum(d < level for d in away) + sum(d == level for d in away) / 2 <= places(which, g) - 1:
            return [p]
    return [pool[0]]


def aimed(which: Attack, queries: Queries, gallery: Gallery, seed: int = 0) -> Tensor:
    return which.select(queries, gallery, draws=Draws(seed, which.drawn_as, range(len(queries))))
