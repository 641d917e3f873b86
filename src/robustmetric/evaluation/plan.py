"""The plan of an evaluation: how a network is to be attacked and judged, as one value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from numbers import Integral
from typing import Any, get_args

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor, nn

from robustmetric.attacks import SEARCHES, Column, Protocol, RankingAttack, Search, attack, make_search
from robustmetric.attacks.search import Transfer, bind
from robustmetric.evaluation.ers import ERS_ATTACKS
from robustmetric.evaluation.identity import code_of, differences, options_of
from robustmetric.evaluation.schema import Part
from robustmetric.evaluation.suite import WorstCase, make_suite
from robustmetric.perturb import Budget, Norm
from robustmetric.registry import lookup, registry, split_names, unknown
from robustmetric.usercode import file_of, without_folder
from robustmetric.validate import UserError, check_signature, is_number

LEVELS = {"none": 0, "quick": 1, "full": 2}
"""The sets of checks: those of a level and of all below it are run."""

_USUAL_EPS = {"digits": 0.2, "mnist": 77 / 255, "fashion-mnist": 77 / 255}


def usual_eps(data: str) -> float:
    """Return the ε that networks are attacked with on a data set, unless another one is given.

    `data` is the name of a data set; for small grey images it is larger than the 8/255 of all others.

    >>> usual_eps("mnist") == 77 / 255, usual_eps("cub") == 8 / 255
    (True, True)
    """
    return _USUAL_EPS.get(data, 8 / 255)


STAGES = ("embed", "retrieval", "checks")
"""The stages of an evaluation besides its attacks, which are stages by their names."""


class Plan(Part):
    """How an evaluation is done: everything that its scores depend on besides the network and the images.

    Make one with `Plan.make`, which checks all of it once. Attacks and the search are named as texts; objects
    of your own are kept beside their names.

    >>> plan = Plan.make(attacks=["ES", "GTM"], steps=8)
    >>> plan.attacks, plan.search, plan.budget.steps
    (('ES', 'GTM'), 'pgd', 8)
    >>> plan.differences(Plan.make(attacks=["ES", "GTM"], steps=4))
    ['steps was 4, is 8']
    """

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
    seed: int = Field(0, ge=0, lt=2**32, description="starts every random draw")
    batch: int = Field(128, ge=1, description="images that are perturbed together")
    checks: str = Field(
        "quick",
        description="checks of the scores: none (but collapse), quick or full, and others by name",
    )

    _goals: tuple[RankingAttack, ...] | None = PrivateAttr(None)
    _suite: WorstCase | None = PrivateAttr(None)  # if it was given as an object, or is made already
    _search: Search | None = PrivateAttr(None)
    _checks: str | None = PrivateAttr(None)  # with the folders of files
    _options: dict[str, Any] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _pixels_are_in_0_to_1(self) -> Plan:
        if self.norm == "linf" and self.eps > 1:
            raise ValueError("eps is more than 1")
        return self

    @classmethod
    def make(cls, **settings: Any) -> Plan:
        """Make a plan of `settings`, some of its fields, and refuse what cannot be.

        `attacks` may hold texts, such as ``"CA+(w=5)"`` or ``"file.py:Mine"``, and attacks; `search` is a
        text or a search.

        >>> Plan.make(step=8)
        Traceback (most recent call last):
        ...
        robustmetric.UserError: unknown setting 'step' (did you mean 'steps'?); known: alpha, attacks, ...
        """
        for name in settings:
            if name not in cls.model_fields:
                raise UserError(unknown("setting", name, cls.model_fields))
        if settings.get("norm") == "l2" and "eps" not in settings:
            raise UserError(
                "eps is not given, and with the norm l2 there is no usual one: give the length that a "
                "perturbation may have, such as 1.5",
                parameter="eps",
            )
        given = {**{name: field.default for name, field in cls.model_fields.items()}, **settings}
        lookup("protocol", given["protocol"], dict.fromkeys(get_args(Protocol)))
        budget = Budget(eps=given["eps"], alpha=given["alpha"], steps=given["steps"], norm=given["norm"])
        given |= {"eps": float(budget.eps), "alpha": float(budget.alpha), "steps": int(budget.steps)}
        for name, least in (("queries", 1), ("batch", 1), ("seed", 0)):
            given[name] = _whole(name, given[name], least)
        _check_names(given["checks"])
        goals, search = _attacks(given["attacks"], given["protocol"]), _made_search(given["search"])
        _check_norm(search, budget.norm)
        suite = make_suite(given["suite"])
        named = {
            "attacks": tuple(_written(a, goal) for a, goal in zip(given["attacks"], goals, strict=True)),
            "search": _written(given["search"], search),
            "suite": "none" if suite is None else suite.name,
            "checks": ",".join(map(without_folder, split_names(given["checks"]))),
        }
        plan = cls(**{**given, **named})
        plan._goals, plan._suite, plan._checks, plan._search = goals, suite, given["checks"], search
        plan.describe()  # now: the files of the user's own may change
        return plan

    def changed(self, **settings: Any) -> Plan:
        """Return this plan with other `settings`; another protocol has other attacks, which are given then.

        >>> Plan.make(steps=8).changed(eps=0.1).budget
        Budget(eps=0.1, alpha=0.011764705882352941, steps=8, norm='linf')
        """
        own: dict[str, Any] = {
            "attacks": self.goals,
            "search": self.searching,
            "suite": self.worst_case or "none",
            "checks": self._checks or self.checks,
        }
        made = Plan.make(**{**self.model_dump(), **own, **settings})
        # Those of the user's own are written as they were given: with their file.
        kept = {name: getattr(self, name) for name in ("attacks", "search") if name not in settings}
        return made.model_copy(update=kept)

    def __eq__(self, other: object) -> bool:
        """Compare the fields; options that no name tells are in the digest alone."""
        return isinstance(other, Plan) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(tuple(self.model_dump().values()))

    @property
    def budget(self) -> Budget:
        """What a perturbation may cost."""
        return Budget(eps=self.eps, alpha=self.alpha, steps=self.steps, norm=self.norm)

    @property
    def worst_case(self) -> WorstCase | None:
        """The suite, if there is one."""
        if self._suite is None:  # read from a record
            self._suite = make_suite(self.suite)
        return self._suite

    @property
    def goals(self) -> tuple[RankingAttack, ...]:
        """The attacks."""
        if self._goals is None:  # read from a record
            self._goals = tuple(attack(name, protocol=self.protocol) for name in self.attacks)
        return self._goals

    def search_on(self, surrogate: nn.Module | None = None) -> Search:
        """Return the search; one that transfers perturbations takes them from the `surrogate`.

        A search that does not leaves the surrogate to the suite.
        """
        if self.worst_case is not None and not self.transfers and self.searching.network is None:
            surrogate = None
        return bind(self.searching, surrogate)

    @property
    def searching(self) -> Search:
        """The search; one that transfers may not know its surrogate."""
        if self._search is None:  # read from a record
            self._search = _made_search(self.search)
        return self._search

    @cached_property
    def columns(self) -> dict[str, Column]:
        """What the attacks report, by name."""
        return {column.name: column for goal in self.goals for column in goal.columns}

    @property
    def transfers(self) -> bool:
        """Whether the search takes its perturbations from a surrogate that has to be given."""
        return isinstance(self.searching, Transfer) and self.searching.network is None

    @property
    def level(self) -> str:
        """The set of checks: none, quick or full."""
        return split_names(self.checks)[0]

    @property
    def check_names(self) -> list[str]:
        """The checks to run, in their order: those of the set, and those that are named behind it."""
        usual = [
            name
            for name, check in registry("check").items()
            if getattr(check, "level", 3) <= LEVELS[self.level]
            and (self.worst_case is not None or not getattr(check, "suite", False))
        ]
        return list(dict.fromkeys([*usual, *split_names(self._checks or self.checks)[1:]]))

    def draw(self, count: int) -> Tensor:
        """Return the numbers (Q,) of the queries, ascending: drawn from the seed, or all `count` of them."""
        return draw_queries(count, self.queries, self.seed)

    def describe(self) -> dict[str, Any]:
        """Return all that decides about the scores, in JSON's types; options that no name tells included."""
        if self._options is None:
            options = {
                "search": options_of(self.searching),
                "attacks": {
                    goal.name: {**options_of(goal), "columns": [c.name for c in goal.columns]}
                    for goal in self.goals
                },
                "checks": _own_code(self.check_names),
            }
            if self.worst_case is not None:
                options["suite"] = {goal.name: options_of(goal) for goal in self.worst_case.wanted}
            self._options = json.loads(json.dumps(options))
        return {"settings": self.model_dump(mode="json"), "options": dict(self._options or {})}

    @property
    def digest(self) -> str:
        """The SHA-256 of the description: equal for plans that do the same."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: Plan) -> list[str]:
        """List what this plan does otherwise than the `other`; nothing if they do the same."""
        before, now = other.describe(), self.describe()
        # Options that no name tells are said only if the names are the same.
        return differences(before["settings"], now["settings"]) or differences(before, now)


def draw_queries(count: int, queries: int | None, seed: int) -> Tensor:
    """Return the numbers of so many `queries` of `count` images, ascending: drawn from a `seed`; None is all.

    >>> draw_queries(5, None, 0), len(draw_queries(5, 2, 0))
    (tensor([0, 1, 2, 3, 4]), 2)
    """
    if queries is None:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:queries].sort().values


def _whole(name: str, value: Any, least: int) -> int | None:
    most = 2**32 - 1 if name == "seed" else None
    if value is None and name == "queries":
        return None
    if not is_number(value, Integral) or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UserError(f"{name} must be a whole number {allowed}, not {value!r}", parameter=name)
    return int(value)


def _check_names(checks: object) -> None:
    """Refuse a set of checks, or a check behind it, that is not known."""
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


def check_title(name: str) -> str:
    """Return what a check is called in a record: its name, or that of the function of a file.

    >>> check_title("8-bit"), check_title("mine.py:odd(limit=2)")
    ('8-bit', 'odd(limit=2)')
    """
    return name if file_of(name) is None else without_folder(name).partition(".py:")[2]


def _attacks(given: object, protocol: Protocol) -> tuple[RankingAttack, ...]:
    """Make the attacks, and refuse a list that cannot be."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(
            f"attacks is {given!r}; give a list of attacks, such as ['ES', 'GTM']", parameter="attacks"
        )
    goals = tuple(attack(a, protocol=protocol) if isinstance(a, str) else a for a in given)
    if not goals:
        raise UserError(f"no attacks were given; the ERS takes {', '.join(ERS_ATTACKS)}", parameter="attacks")
    if wrong := [a for a in goals if not isinstance(a, RankingAttack)]:
        raise UserError(
            f"{wrong[0]!r} is no attack; give its name, or an object of a RankingAttack", parameter="attacks"
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


def _check_norm(search: Search, norm: Norm) -> None:
    """Refuse a search that cannot keep to a budget of this norm."""
    if norm not in search.norms:
        # Of a transfer it depends on what is in its brackets.
        norms = {name: getattr(kind, "norms", ()) for name, kind in SEARCHES.items()}
        able = [name for name, known in norms.items() if isinstance(known, tuple) and norm in known]
        raise UserError(
            f"the search {search.name!r} has no budget of the norm {norm}; give one that has: "
            f"{', '.join(sorted(able))}",
            parameter="search",
        )


def _own_code(names: Sequence[str]) -> dict[str, str]:
    """Return the digests of the checks that are the user's own."""
    found = {name: code_of(registry("check").find(name)[0]) for name in names}
    return {without_folder(name): code for name, code in found.items() if code is not None}


def _written(given: object, part: RankingAttack | Search) -> str:
    """Write a part of the plan down: in one spelling, or as it was given if it is the user's own.

    The folder of a file is left out: it is another one on another machine.
    """
    if not isinstance(given, str):
        return part.name
    if isinstance(part, Transfer):
        inside = given.strip().removeprefix("transfer").strip().removeprefix("(").removesuffix(")")
        return f"transfer({_written(inside.strip(), part.search)})"
    return part.name if code_of(type(part)) is None else without_folder(given)


def _made_search(given: object) -> Search:
    """Make the search."""
    search = make_search(given) if isinstance(given, str) else given
    if not isinstance(search, Search):
        raise UserError(
            f"{given!r} is no search; give its name, or an object of a Search", parameter="search"
        )
    search.check()
    return search
