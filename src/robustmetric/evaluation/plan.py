"""The plan of an evaluation: how a network is attacked and judged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import torch
from pydantic import Field
from torch import Tensor, nn

from robustmetric.attacks import (
    Attack,
    Column,
    Protocol,
    Search,
    Transfer,
    attack,
    make_search,
)
from robustmetric.attacks.search import bind
from robustmetric.errors import UserError, check_signature, instance, whole
from robustmetric.evaluation.document import FrozenModel, validated
from robustmetric.evaluation.ers import ERS_ATTACKS
from robustmetric.evaluation.identity import code_of, differences, options_of
from robustmetric.evaluation.suite import WorstCase, make_suite
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget, Norm
from robustmetric.registry import lookup, registry, split_names, unknown
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

    protocol: Protocol = Field(
        "strict", description="protocol: strict, or reference for what published figures were made with"
    )
    eps: float = Field(
        8 / 255,
        ge=0,
        description="ε, the largest change of a pixel in [0, 1], such as 8/255; with the norm l2 of an image",
    )
    norm: Norm = Field(
        "linf", description="how a change is measured: linf, by its largest pixel, or l2, by its length"
    )
    alpha: float = Field(3 / 255, gt=0, le=1, description="α, the size of a step")
    steps: int = Field(32, ge=1, description="η, the number of steps")
    search: str = Field(
        "pgd",
        description="how perturbations are searched for: pgd, apgd, nes(samples=50), spsa, square, transfer, "
        "transfer(nes)",
    )
    attacks: tuple[str, ...] = Field(ERS_ATTACKS, description="the attacks, such as CA+,QA-(m=5),SP-QA+")
    suite: str = Field(
        "none", description="a suite of strong attacks to run as well: worst-case, with its options, or none"
    )
    queries: int | None = Field(
        None, ge=1, description="number of images that are attacked, drawn from the seed; null for all"
    )
    seed: int = Field(0, ge=0, lt=2**32, description="random seed")
    batch: int = Field(128, ge=1, description="number of images that are perturbed together")
    checks: str = Field(
        "quick",
        description="checks of the scores: none (but collapse), quick or full, and others by name",
    )

    @property
    def budget(self) -> Budget:
        """The budget of a perturbation."""
        return Budget(eps=self.eps, alpha=self.alpha, steps=self.steps, norm=self.norm)


P = TypeVar("P")

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {n: field.default for n, field in Settings.model_fields.items()}
)


@dataclass(frozen=True, eq=False)
class Plan:
    """How a network is attacked and judged; `Plan.make` makes one of settings and checks them once.

    `settings` has everything by name, as a record keeps it; the `attacks`, the search of the `threat` and the
    `suite` are made. `given` are the settings as they were given: names may be objects there, and files of
    your own have their folders. `options` tell what no name does, such as the digest of your own code.

    >>> plan = Plan.make(attacks=["ES", "GTM"], steps=8)
    >>> plan.settings.attacks, plan.settings.search, plan.threat.budget.steps
    (('ES', 'GTM'), 'pgd', 8)
    >>> plan.differences(Plan.make(attacks=["ES", "GTM"], steps=4))
    ['steps was 4, is 8']
    """

    settings: Settings
    given: Mapping[str, Any]
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
        for name in settings:
            if name not in DEFAULTS:
                raise UserError(unknown("setting", name, DEFAULTS))
        if settings.get("norm") == "l2" and "eps" not in settings:
            raise UserError(
                "eps is not given, and with the norm l2 there is no usual one: give the length that a "
                "perturbation may have, such as 1.5",
                parameter="eps",
            )
        given = {**DEFAULTS, **settings}
        protocol, checks = given["protocol"], given["checks"]
        lookup("protocol", protocol, dict.fromkeys(get_args(Protocol)))
        budget = Budget(**{name: given[name] for name in ("eps", "alpha", "steps", "norm")})
        seed, batch = whole("seed", given["seed"], 0, 2**32 - 1), whole("batch", given["batch"], 1)
        _check_names(checks)
        attacks, search, suite = (
            _attacks(given["attacks"], protocol),
            _search(given["search"]),
            make_suite(given["suite"]),
        )
        _check_norm(search, budget.norm)
        named = {
            "eps": float(budget.eps),
            "alpha": float(budget.alpha),
            "attacks": tuple(written(a, made) for a, made in zip(given["attacks"], attacks, strict=True)),
            "search": written(given["search"], search),
            "suite": "none" if suite is None else suite.name,
            "checks": ",".join(map(without_folder, split_names(checks))),
        }
        if given["queries"] is not None:
            named["queries"] = whole("queries", given["queries"], 1)
        made = validated(Settings, "setting", {**given, **named})
        options = {
            "search": options_of(search),
            "attacks": {a.name: {**options_of(a), "columns": [c.name for c in a.columns]} for a in attacks},
            "checks": _own_code(_check_names_of(checks, suite)),
        }
        if suite is not None:
            options["suite"] = {goal.name: options_of(goal) for goal in suite.wanted}
        threat = Threat(budget, search, seed, batch)
        return cls(made, settings, threat, attacks, suite, json.loads(json.dumps(options)))

    def changed(self, **settings: Any) -> Plan:
        """Return this plan with other `settings`.

        >>> Plan.make(steps=8).changed(eps=0.1).threat.budget
        Budget(eps=0.1, alpha=0.011764705882352941, steps=8, norm='linf')
        """
        if "protocol" in settings:  # attacks follow it
            return Plan.make(**{**self.given, **settings})
        # The objects that were made, and their names: files of the user's own may change.
        kept = {"attacks": self.attacks, "search": self.threat.search, "suite": self.suite}
        made = Plan.make(**{**self.given, **kept, **settings})
        names = {name: getattr(self.settings, name) for name in kept if name not in settings}
        return replace(
            made, given={**self.given, **settings}, settings=made.settings.model_copy(update=names)
        )

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
    def transfers(self) -> bool:
        """Whether the search takes its perturbations from a surrogate that has to be given."""
        return isinstance(self.threat.search, Transfer) and self.threat.search.surrogate is None

    @property
    def level(self) -> str:
        """The set of checks: none, quick or full."""
        return split_names(self.settings.checks)[0]

    @property
    def check_names(self) -> list[str]:
        """The checks to run, in their order: those of the set, then others by name."""
        return _check_names_of(self.given.get("checks", DEFAULTS["checks"]), self.suite)

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
        made: P = kind.make(**settings)  # type: ignore[attr-defined]
        return made
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


def _check_names(checks: object) -> None:
    """Refuse a set of checks, or a further check, that is not known."""
    if not isinstance(checks, str):
        raise UserError(
            f"checks must be a text such as 'none', 'quick', 'full' or 'quick,NAME', not {checks!r}",
            parameter="checks",
        )
    first, *further = split_names(checks) or [""]
    lookup("set of checks", first, LEVELS)
    for name in further:
        check_signature(f"the check {name}", registry("check").bind(name), "findings")
    names = [*registry("check"), *(name for name in dict.fromkeys(further) if file_of(name) is not None)]
    titles = [check_title(name) for name in names]
    if twice := {title for title in titles if titles.count(title) > 1}:
        raise UserError(
            f"two checks are called {', '.join(sorted(twice))}: give one of them another name",
            parameter="checks",
        )


def _check_names_of(checks: str, suite: WorstCase | None) -> list[str]:
    level, *further = split_names(checks)
    usual = [
        name
        for name, check in registry("check").items()
        if getattr(check, "level", 3) <= LEVELS[level]
        and (suite is not None or not getattr(check, "suite", False))
    ]
    return list(dict.fromkeys([*usual, *further]))


def _attacks(given: object, protocol: Protocol) -> tuple[Attack, ...]:
    """Make the attacks, and refuse a list that cannot be."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(
            f"attacks is {given!r}; give a list of attacks, such as ['ES', 'GTM']", parameter="attacks"
        )
    goals = tuple(attack(a, protocol=protocol) if isinstance(a, str) else a for a in given)
    if not goals:
        raise UserError(f"no attacks were given; the ERS takes {', '.join(ERS_ATTACKS)}", parameter="attacks")
    if wrong := [a for a in goals if not isinstance(a, Attack)]:
        raise UserError(
            f"{wrong[0]!r} is no attack; give its name, or an Attack instance", parameter="attacks"
        )
    for goal in goals:
        goal.check()
    names = [a.name for a in goals]
    if taken := {*STAGES} & {*names}:
        raise UserError(f"an attack cannot be called {', '.join(taken)}: give it another name")
    if twice := {n for n in names if names.count(n) > 1}:
        raise UserError(f"an attack was given twice: {', '.join(sorted(twice))}", parameter="attacks")
    if other := [a.name for a in goals if a.protocol != protocol]:
        raise UserError(
            f"{', '.join(other)} follows another protocol than {protocol}; the two are never mixed",
            parameter="protocol",
        )
    columns = [column.name for a in goals for column in a.columns]
    if twice := {n for n in columns if columns.count(n) > 1}:
        told = ", ".join(sorted(twice))
        raise UserError(f"two attacks report {told}: give one of them another name for it")
    return goals


def _search(given: object) -> Search:
    search = make_search(given) if isinstance(given, str) else given
    if not isinstance(search, Search):
        raise UserError(f"{given!r} is no search; give its name, or a Search instance", parameter="search")
    search.check()
    return search


def _check_norm(search: Search, norm: Norm) -> None:
    """Refuse a search that cannot keep to a budget of this norm."""
    if norm not in search.norms:
        raise UserError(
            f"the search {search.name!r} has no budget of the norm {norm}; give one that has: apgd, square",
            parameter="search",
        )


def _own_code(names: Sequence[str]) -> dict[str, str]:
    """Return the digests of the checks that are the user's own."""
    found = {name: code_of(registry("check").find(name)[0]) for name in names}
    return {without_folder(name): code for name, code in found.items() if code is not None}


def written(given: object, part: Attack | Search) -> str:
    """Write a part of the plan down: in one spelling, or as it was given if it is the user's own.

    The folder of a file is left out: it is another one on another machine.
    """
    if not isinstance(given, str):
        return part.name
    if isinstance(part, Transfer):
        inside = given.strip().removeprefix("transfer").strip().removeprefix("(").removesuffix(")")
        return f"transfer({written(inside.strip(), part.search)})"
    return part.name if code_of(type(part)) is None else without_folder(given)
