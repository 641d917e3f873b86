"""A query under an attack, step by step, on one network or on several beside each other."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from robustmetric.app.uploads import read_upload
from robustmetric.attacks import PGD, Attack, Draws, Problem, Queries, Search, Target, attack
from robustmetric.data.decode import Channels, Fit
from robustmetric.data.pairs import ImageArray
from robustmetric.errors import UserError, brief, is_number
from robustmetric.evaluation import AttackResult, Data, NetworkView, Subject, Threat, run_attack
from robustmetric.evaluation.attack import embed_all
from robustmetric.evaluation.images import Images
from robustmetric.perturb import Budget, Objective
from robustmetric.registry import lookup
from robustmetric.report.shots import Shot, take_shots
from robustmetric.sphere import embed

MOST_STEPS, MOST_K = 64, 20
SHOWN = 16  # steps of an attack that are kept to be looked at, besides the image as it was
SECONDS = 60.0
ALPHA = 3 / 255

Tell = Callable[[str, int, int], None]
"""Told the network, how many steps are done, of how many."""


@dataclass(frozen=True, eq=False)
class Query:
    """An image that is to be perturbed, as `query` returns it.

    `image` (1, C, H, W) has pixels in [0, 1], and `label` is its class, −1 if that is not known. `number` is
    its place among the images that query; None if it is not one of them.
    """

    image: Tensor
    label: int
    number: int | None = None


@dataclass(frozen=True, eq=False)
class Walk:
    """The way that an attack on a `network` took, as `attack` returns it.

    `shots` show it after some `steps`, the last one included. `objective` has its value after each step, the
    image as it was first. `taken` is the number of steps, of `asked`; fewer are taken where the attack has
    all it wants, and if the time was up: `late`.
    """

    network: str
    shots: tuple[Shot, ...]
    steps: tuple[int, ...]
    objective: tuple[float, ...]
    asked: int
    late: bool

    @property
    def taken(self) -> int:
        """The number of steps."""
        return len(self.objective) - 1

    def at(self, step: int) -> Shot:
        """Return the last shot that was taken by a `step`."""
        return [shot for shot, when in zip(self.shots, self.steps, strict=True) if when <= step][-1]


class _LateError(Exception):
    """The time is up; `point` (1, C, H, W) is how far the search has come."""

    def __init__(self, point: Tensor) -> None:
        super().__init__()
        self.point = point


class _Trace:
    """The points that a search asked about one after the other, and what it was told."""

    def __init__(self, over: Callable[[], bool], tell: Callable[[int], None]) -> None:
        self.over, self.tell = over, tell
        self.points: list[Tensor] = []
        self.values: list[float] = []
        self.late = False

    def watch(self, objective: Objective) -> Objective:
        def watched(x: Tensor, rows: Tensor) -> Tensor:
            if self.over():
                raise _LateError(x.detach().clone())
            value = objective(x, rows)
            self.points.append(x.detach().clone())
            self.values.append(float(value.detach()))
            self.tell(len(self.points))
            return value

        return watched


@dataclass(frozen=True, kw_only=True)
class _Traced(Search):
    """PGD that leaves a trace, and returns the point where it is when the time is up."""

    trace: _Trace

    follows_gradient = True
    keeps_last = True

    def minimise(self, problem: Problem) -> Tensor:
        """Return the perturbed image (1, C, H, W) of a `problem`."""
        try:
            return PGD()(replace(problem, objective=self.trace.watch(problem.objective)))
        except _LateError as late:
            self.trace.late = True
            return late.point


class _Way(NamedTuple):
    """All steps of an attack on a network: points (S, C, H, W) and the objective at each."""

    network: str
    view: NetworkView
    outcome: AttackResult
    points: Tensor
    objective: tuple[float, ...]
    late: bool


class Trial:
    """Attacks single queries on networks that see the same images; the work behind the page of the app.

    `data` has the images that query and those that are ranked, `scenes` by name what each network makes of
    them. `attacks` are those that may be tried, by name. A step is of the size `alpha`, random draws start at
    `seed`, and an attack on a query takes at most about `seconds` on all networks together; `clock` tells
    them. Uploads become squares as `fit` says. Use it inside `frozen` of each network.

    >>> images, labels = torch.rand(12, 1, 4, 4), torch.arange(12) % 3
    >>> trial = Trial.of({"flat": nn.Flatten()}, images, labels)
    >>> (walk,) = trial.attack(trial.query(5), "ES", eps=0.1, steps=4, k=3)
    >>> walk.network, walk.steps, len(walk.objective), len(walk.shots[-1].after)
    ('flat', (0, 1, 2, 3, 4), 5, 3)
    """

    def __init__(
        self,
        data: Data,
        views: Mapping[str, NetworkView],
        attacks: Sequence[Attack],
        *,
        alpha: float = ALPHA,
        seed: int = 0,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
        fit: Fit = "squeeze",
    ) -> None:
        self.data, self.views = data, dict(views)
        self.attacks = {goal.name: goal for goal in attacks}
        self.alpha, self.seed, self.seconds, self.clock = alpha, seed, seconds, clock
        self.fit, self.stopped = fit, threading.Event()

    @classmethod
    def of(
        cls,
        networks: Mapping[str, nn.Module],
        images: Images,
        labels: Tensor,
        attacks: Sequence[str] = ("ES", "misrank"),
        **settings: Any,
    ) -> Trial:
        """Make a trial of `networks` by name that see `images` (N, C, H, W) with `labels` (N,).

        `attacks` are names; `settings` are alpha, seed, seconds, clock and fit.
        """
        data, every = Data(images, labels), torch.arange(len(images))
        views = {
            name: Subject(model, data).view(model, embed_all(model, images, every, 128))
            for name, model in networks.items()
        }
        return cls(data, views, [attack(name) for name in attacks], **settings)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of the images."""
        return tuple(self.data.images[torch.tensor([0])].shape[1:])

    def query(self, number: int) -> Query:
        """Return the image of this `number` as a query."""
        count = len(self.data.images)
        if not (is_number(number, Integral) and 0 <= number < count):
            raise UserError(f"the images have the numbers 0 to {count - 1}; there is no {brief(number)}")
        number = int(number)
        image = self.data.images[torch.tensor([number])]
        return Query(image, int(self.data.labels[number]), number)

    def upload(self, file: Path, label: int = -1) -> Query:
        """Return an image `file` as a query of a class `label`, −1 for none, brought to what images are."""
        channels, height, width = self.shape
        size, images = (height, width), self.data.images
        if isinstance(images, ImageArray):  # of which the middle may be taken
            size = images.pixels.shape[1:3]
        crop = None if size == (height, width) else height
        return Query(read_upload(file, size, crop, cast(Channels, channels), self.fit), label)

    def class_of(self, label: int) -> str:
        """Return what the class of a `label` is called."""
        names = self.data.classes
        return str(label) if names is None else names[label]

    def attack(
        self, query: Query, name: str, *, eps: float, steps: int, k: int, tell: Tell | None = None
    ) -> tuple[Walk, ...]:
        """Attack a `query` on each network by the attack of a `name`; return the ways that it took.

        A pixel changes by at most `eps`, in at most `steps` steps. Kept are the first `k` of the rankings.
        `tell` is told how far it is.
        """
        for what, value, most in (("steps", steps, MOST_STEPS), ("k", k, MOST_K)):
            if not (is_number(value, Integral) and 1 <= value <= most):
                raise UserError(f"{what} must be a whole number from 1 to {most}, not {brief(value)}")
        goal = lookup("attack", name, self.attacks)
        budget = Budget(eps=eps, alpha=self.alpha, steps=int(steps))
        begin, ways = self.clock(), []
        for place, (network, view) in enumerate(self.views.items()):
            left = self.seconds - (self.clock() - begin)
            until = self.clock() + left / (len(self.views) - place)
            ways.append(self._walked(network, *_posed(view, query), goal, budget, until, tell))
        longest = max(len(way.objective) for way in ways) - 1
        shown = shown_steps(longest)
        return tuple(_developed(way, goal, query, shown, int(k), budget.steps) for way in ways)

    def _walked(
        self,
        network: str,
        view: NetworkView,
        number: int,
        goal: Attack,
        budget: Budget,
        until: float,
        tell: Tell | None,
    ) -> _Way:
        """Run an attack on a query of a scene, and keep all steps of it."""
        numbers = torch.tensor([number])
        image, queries = view.batch(numbers)
        with torch.no_grad():
            target = view.aim(goal, queries, Draws(self.seed, goal.drawn_as, [number]))
            before = view.measure(goal, queries.z, target, queries)
        if all(bool(value.isnan().all()) for value in before.values()):
            raise UserError(
                f"{goal.name} is about images of the query's class, and there is none to find: choose "
                "another image, or a class for the upload"
            )

        def told(done: int) -> None:
            if tell is not None:
                tell(network, done, budget.steps)

        trace = _Trace(lambda: self.stopped.is_set() or self.clock() > until, told)
        threat = Threat(budget, _Traced(trace=trace), self.seed)
        outcome = run_attack(view, goal, numbers, threat, index=target.index)
        # The first point is the image, or a little way off. At the last one the query is won, or stuck, if
        # that is what ended it; else there is one more step behind it.
        points, values = [image, *trace.points[1:]], [float(outcome.first), *trace.values[1:]]
        if trace.points and (trace.late or len(trace.points) == budget.steps):
            points, values = [*points, outcome.images], [*values, float(outcome.last)]
        values = [value if math.isfinite(value) else float(outcome.last) for value in values]
        return _Way(network, view, outcome, torch.cat(points), tuple(values), trace.late)


def shown_steps(taken: int) -> tuple[int, ...]:
    """Return which of so many steps, `taken`, are shown: 0, the last, and others evenly between them.

    >>> shown_steps(3), shown_steps(0)
    ((0, 1, 2, 3), (0,))
    >>> len(shown_steps(64)), shown_steps(64)[:4]
    (17, (0, 4, 8, 12))
    """
    count = min(taken, SHOWN)
    return tuple(round(taken * place / max(count, 1)) for place in range(count + 1))


def _posed(view: NetworkView, query: Query) -> tuple[NetworkView, int]:
    """Return the view in which a query can be attacked, and its number there."""
    if query.number is not None:
        return view, query.number
    image = query.image.to(view.device)
    with torch.no_grad():
        z = embed(view.model, image)
    label, nowhere = torch.tensor([query.label], device=z.device), torch.tensor([-1], device=z.device)
    # Nobody knows its camera: all images count.
    gallery = replace(view.gallery, cameras=None)
    ranked = view.images if view.ranked is None else view.ranked
    return NetworkView(view.model, query.image, Queries(z, label, nowhere), gallery, ranked), 0


def _developed(way: _Way, goal: Attack, query: Query, shown: Sequence[int], k: int, asked: int) -> Walk:
    """Return the shots of the steps that are shown, as far as they were taken, with the last one."""
    view, outcome, taken = way.view, way.outcome, len(way.objective) - 1
    steps = (*(step for step in shown if step < taken), taken)
    numbers = torch.full((len(steps),), 0 if query.number is None else query.number)
    points = way.points[list(steps)]
    queries = view.asking(numbers)
    index = outcome.target.index
    with torch.no_grad():
        z = embed(view.model, points)
        z[0], z[-1] = queries.z[0], outcome.z[0] if taken else queries.z[0]
        target = view.aim(goal, queries, Draws(0, "", []), index.expand(len(steps), -1))
        after = view.measure(goal, z, target, queries)
    before = {name: value.expand(len(steps)) for name, value in outcome.before.items()}
    originals = outcome.originals.expand_as(points)
    at_steps = replace(
        outcome,
        images=points,
        z=z,
        target=Target(target.index),
        before=before,
        after=after,
        originals=originals,
    )
    shots = take_shots(view, goal, numbers, at_steps, k)
    return Walk(way.network, tuple(shots), steps, way.objective, asked, way.late)
