"""The plan of an evaluation: how a network is attacked and judged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from robustmetric.attacks import Attack, Column, Protocol, Search, Transfer, attack, make_search
from robustmetric.attacks.search import bind
from robustmetric.errors import UserError, check_signature, instance
from robustmetric.evaluation.document import FrozenModel, validated
from robustmetric.evaluation.ers import ERS_ATTACKS
from robustmetric.evaluation.identity import code_of, differences, options_of, repeated, written
from robustmetric.evaluation.suite import WorstCase, make_suite
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget, Norm
from robustmetric.registry import lookup, registry, split_names
from robustmetric.usercode import file_of, without_folder

LEVELS = {"none": 0, "quick": 1, "full": 2}
"""The sets of checks: those of a level and of all below it are run."""

STAGES = ("embed", "retrieval", "checks")
"""The stages of an evaluation besides its attacks, which are stages by their names."""

_USUAL_EPS = {"digits": 0.2, "mnist": 77 / 255, "fashion-mnist": 77 / 255}


def usual_eps(data: str) -> float:
    """Return the default ε of a data set by its name: larger for small grey images than the usual 8/255.

    >>> usual_eps("mnist") == 77 / 255, usual_eps("cub") == 8 / 255
    (True, True)
    """
    return _USUAL_EPS.get(data, 8 / 255)


class Settings(FrozenModel):
    """The settings of an evaluation, as a record has them: everything but the network and the images."""

    protocol: Protocol = Field("strict", description="protocol: strict, or reference as in papers")
    eps: float = Field(8 / 255, ge=0, description="ε, the largest change of a pixel, such as 8/255")
    norm: Norm = Field("linf", description="norm of a change: linf, its largest pixel, or l2")
    alpha: float = Field(3 / 255, gt=0, le=1, description="α, the size of a step")
    steps: int = Field(32, ge=1, description="η, the number of steps")
    search: str = Field("pgd", description="search: pgd, apgd, nes(samples=50), spsa, square, transfer(nes)")
    attacks: tuple[str, ...] = Field(ERS_ATTACKS, description="the attacks, such as CA+,QA-(m=5),SP-QA+")
    suite: str = Field("none", description="a suite of strong attacks: worst-case, with its options, or none")
    queries: int | None = Field(None, ge=1, description="number of images that are attacked; null for all")
    seed: int = Field(0, ge=0, lt=2**32, description="random seed")
    batch: int = Field(128, ge=1, description="number of images that are perturbed together")
    checks: str = Field("quick", description="checks: none, quick or full, and others by name")

    @property
    def budget(self) -> Budget:
        """The budget of a perturbation."""
        return Budget(eps=self.eps, alpha=self.alpha, steps=self.steps, norm=self.norm)


P = TypeVar("P", bound="Plan | SearchPlan")
S = TypeVar("S", bound="SearchPlan")

DEFAULTS: Mapping[str, Any] = {name: field.default for name, field in Settings.model_fields.items()}


@dataclass(frozen=True, eq=False)
class Plan:
    """How a network is attacked and judged; `Plan.make` makes one of settings and checks them once.

    `settings` has everything by name, as a record keeps it; the `attacks`, the search of the `threat` and the
    `suite` are made. `checks` are a set of checks and further ones, where files of your own have their
    folders. `options` tell what no name does, such as the digest of your own code.

    >>> plan = Plan.make(attacks=["ES", "GTM"], steps=8)
    >>> plan.settings.attacks, plan.settings.search, plan.threat.budget.steps
    (('ES', 'GTM'), 'pgd', 8)
    """

    settings: Settings
    checks: tuple[str, ...]
    threat: Threat
    attacks: tuple[Attack, ...]
    suite: WorstCase | None
    options: Mapping[str, Any]

    @classmethod
    def make(cls, **settings: Any) -> Plan:
        """Make a plan of some of the `Settings`.

        `attacks` may hold names, such as ``"CA+(w=5)"`` or ``"file.py:Mine"``, and attacks; `search` is a
        name or a search.

        >>> Plan.make(step=8)
        Traceback (most recent call last):
        ...
        robustmetric.UserError: unknown setting 'step' (did you mean 'steps'?); known: alpha, attacks, ...
        """
        if settings.get("norm") == "l2" and "eps" not in settings:
            told = "eps is not given, and with the norm l2 there is no usual one"
            raise UserError(f"{told}: give the length, such as 1.5", parameter="eps")
        parts = {name: settings.get(name, DEFAULTS[name]) for name in ("attacks", "search", "suite")}
        plain = validated(Settings, "setting", {n: v for n, v in settings.items() if n not in parts})
        attacks, checks = make_attacks(parts["attacks"], plain.protocol), parse_checks(plain.checks)
        search, suite = search_of(parts["search"], plain.norm), make_suite(parts["suite"])
        names = {
            "attacks": tuple(written(a, made) for a, made in zip(parts["attacks"], attacks, strict=True)),
            "search": written(parts["search"], search),
            "suite": "none" if suite is None else suite.name,
            "checks": ",".join(map(without_folder, checks)),
        }
        codes = {name: code_of(registry("check").find(name)[0]) for name in _chosen(checks, suite)}
        options: dict[str, Any] = {
            "search": options_of(search),
            "attacks": {a.name: {**options_of(a), "columns": [c.name for c in a.columns]} for a in attacks},
            "checks": {without_folder(name): code for name, code in codes.items() if code is not None},
        }
        if suite is not None:
            options["suite"] = {goal.name: options_of(goal) for goal in suite.wanted}
        threat = Threat(plain.budget, search, plain.seed, plain.batch)
        made = plain.model_copy(update=names)
        return cls(made, checks, threat, attacks, suite, json.loads(json.dumps(options)))

    def changed(self, **settings: Any) -> Plan:
        """Return this plan with other `settings`; its attacks and its search stay as they were made.

        >>> Plan.make(steps=8).changed(eps=0.1).threat.budget
        Budget(eps=0.1, alpha=0.011764705882352941, steps=8, norm='linf')
        """
        parts = {"attacks": self.attacks, "search": self.threat.search, "suite": self.suite}
        usual = {**self.settings.model_dump(), **parts, "checks": ",".join(self.checks)}
        made = Plan.make(**{**usual, **settings})
        names = {name: getattr(self.settings, name) for name in parts if name not in settings}
        return replace(made, settings=made.settings.model_copy(update=names))

    def search_on(self, surrogate: nn.Module | None = None) -> Search:
        """Return the search; one that transfers perturbations takes them from the `surrogate`."""
        if self.suite is not None and not self.transfers and self.threat.search.network is None:
            surrogate = None  # which is the suite's
        return bind(self.threat.search, surrogate)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """What the attacks report, by name."""
        return {column.name: column for goal in self.attacks for column in goal.columns}

    @property
    def goals(self) -> tuple[Attack, ...]:
        """The goals of the suite."""
        return () if self.suite is None else self.suite.wanted

    @property
    def transfers(self) -> bool:
        """Whether the search takes its perturbations from a surrogate that has to be given."""
        return isinstance(self.threat.search, Transfer) and self.threat.search.surrogate is None

    @property
    def level(self) -> str:
        """The set of checks: none, quick or full."""
        return self.checks[0]

    @property
    def check_names(self) -> list[str]:
        """The checks to run, in their order: those of the set, then others by name."""
        return _chosen(self.checks, self.suite)

    def draw(self, count: int) -> Tensor:
        """Return the numbers (Q,) of the queries, ascending: drawn from the seed, or all `count` of them."""
        return draw_queries(count, self.settings.queries, self.threat.seed)

    def describe(self) -> dict[str, Any]:
        """Return all that decides the scores, in JSON's types."""
        return {"settings": self.settings.model_dump(mode="json"), "options": self.options}

    def differences(self, other: Plan) -> list[str]:
        """List what this plan does otherwise than the `other`; nothing if they do the same."""
        before, now = other.describe(), self.describe()
        # Options that no name tells matter only if the names are the same.
        return differences(before["settings"], now["settings"]) or differences(before, now)


def plan_of(kind: type[P], plan: P | None, settings: dict[str, Any]) -> P:
    """Return the `plan`, of this `kind`, or one that is made of the `settings`; reject both together."""
    if plan is None:
        return kind.make(**settings)  # type: ignore[return-value]
    instance("plan", plan, kind, why=f"make it by {kind.__name__}.make")
    if settings:
        raise UserError(f"a plan and {', '.join(settings)} are given; give the plan alone, or its settings")
    return plan


def draw_queries(count: int, queries: int | None, seed: int) -> Tensor:
    """Return the numbers of so many `queries` of `count` images, ascending: drawn from a `seed`; None is all.

    >>> draw_queries(5, None, 0), len(draw_queries(5, 2, 0))
    (tensor([0, 1, 2, 3, 4]), 2)
    """
    if queries is None:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:queries].sort().values


def check_title(name: str) -> str:
    """Return the name of a check in a record: its own, or that of the function of a file.

    >>> check_title("8-bit"), check_title("mine.py:odd(limit=2)")
    ('8-bit', 'odd(limit=2)')
    """
    return name if file_of(name) is None else without_folder(name).partition(".py:")[2]


def parse_checks(checks: str) -> tuple[str, ...]:
    """Split a text of `checks`, a set and further ones; refuse those that are not known."""
    first, *further = split_names(checks) or [""]
    lookup("set of checks", first, LEVELS)
    for name in further:
        check_signature(f"the check {name}", registry("check").bind(name), "findings")
    names = [*registry("check"), *(name for name in dict.fromkeys(further) if file_of(name) is not None)]
    if twice := repeated(map(check_title, names)):
        raise UserError(f"two checks are called {twice}: give one of them another name", parameter="checks")
    return first, *further


def _chosen(checks: Sequence[str], suite: WorstCase | None) -> list[str]:
    level, *further = checks
    usual = [
        name
        for name, check in registry("check").items()
        if getattr(check, "level", 3) <= LEVELS[level]
        and (suite is not None or not getattr(check, "suite", False))
    ]
    return list(dict.fromkeys([*usual, *further]))


def make_attacks(given: object, protocol: Protocol) -> tuple[Attack, ...]:
    """Make the attacks of a plan, and refuse a list that cannot be."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        told = f"attacks is {given!r}; give a list of attacks, such as ['ES', 'GTM']"
        raise UserError(told, parameter="attacks")
    goals = tuple(attack(a, protocol=protocol) if isinstance(a, str) else a for a in given)
    if not goals:
        raise UserError(f"no attacks were given; the ERS takes {', '.join(ERS_ATTACKS)}", parameter="attacks")
    for goal in goals:
        instance("an attack", goal, Attack, why="give its name, or an Attack instance").check()  # type: ignore[type-abstract]
        if goal.protocol != protocol:
            told = f"{goal.name} follows another protocol than {protocol}; the two are never mixed"
            raise UserError(told, parameter="protocol")
    names = [goal.name for goal in goals]
    if taken := {*STAGES} & {*names}:
        raise UserError(f"an attack cannot be called {', '.join(taken)}: give it another name")
    if twice := repeated(names):
        raise UserError(f"an attack was given twice: {twice}", parameter="attacks")
    if twice := repeated(column.name for goal in goals for column in goal.columns):
        raise UserError(f"two attacks report {twice}: give one of them another name for it")
    return goals


def search_of(given: object, norm: Norm) -> Search:
    """Return a search, as it is given or of its name; reject one without a budget of the `norm`."""
    search = make_search(given) if isinstance(given, str) else given
    search = instance("search", search, Search, why="give its name, or an instance")  # type: ignore[type-abstract]
    search.check()
    if norm not in search.norms:
        told = f"the search {search.name!r} has no budget of the norm {norm}; give one that has: apgd, square"
        raise UserError(told, parameter="search")
    return search


class SearchPlan(FrozenModel):
    """A plan that a document keeps as its settings, with the search that it names."""

    norm: ClassVar[Norm] = "linf"

    search: str
    attack: bool

    @classmethod
    def make(cls: type[S], **settings: Any) -> S:
        """Make a plan of `settings`, some of its fields, and refuse what cannot be."""
        given = settings.get("search", cls.model_fields["search"].default)
        search = search_of(given, cls.norm)
        if isinstance(search, Transfer):
            told = f"search {search.name!r} perturbs another network: give one that does not, such as apgd"
            raise UserError(told, parameter="search")
        plan = validated(cls, "setting", {**settings, "search": written(given, search)})
        vars(plan)["searching"] = search  # whose name tells neither the folder of a file nor all options
        return plan

    @cached_property
    def searching(self) -> Search:
        """The search."""
        return make_search(self.search)

    def describe(self) -> dict[str, Any]:
        """Return all that decides the scores, in JSON's types."""
        options = options_of(self.searching) if self.attack else None
        return {"settings": self.model_dump(mode="json"), "options": options}
