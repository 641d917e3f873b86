"""Attacks on rankings: what a perturbed image aims at; `search` is how it gets there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from robustmetric.attacks.base import (
    Draws,
    Gallery,
    Protocol,
    Queries,
    RankingAttack,
    Target,
    choose,
    hit_at_1,
    nearest,
)
from robustmetric.attacks.candidate import CandidateAttack
from robustmetric.attacks.columns import COSINE, DISTANCE, PERCENT, Column, Unit
from robustmetric.attacks.mismatch import TargetedMismatch
from robustmetric.attacks.misrank import GreedyTop1Misranking, LearningToMisrank
from robustmetric.attacks.query import QueryAttack, SemanticsPreservingQueryAttack
from robustmetric.attacks.search import NES, PGD, SEARCHES, SPSA, Search, Transfer, make_search
from robustmetric.attacks.shift import EmbeddingShift
from robustmetric.attacks.translocation import GreedyTop1Translocation
from robustmetric.registry import Registry, registry

__all__ = [
    "ATTACKS",
    "COSINE",
    "DISTANCE",
    "NES",
    "PERCENT",
    "PGD",
    "SEARCHES",
    "SPSA",
    "CandidateAttack",
    "Column",
    "Draws",
    "EmbeddingShift",
    "Gallery",
    "GreedyTop1Misranking",
    "GreedyTop1Translocation",
    "LearningToMisrank",
    "Protocol",
    "Queries",
    "QueryAttack",
    "RankingAttack",
    "Search",
    "SemanticsPreservingQueryAttack",
    "Target",
    "TargetedMismatch",
    "Transfer",
    "Unit",
    "attack",
    "choose",
    "hit_at_1",
    "make_search",
    "nearest",
]

ATTACKS: Registry[RankingAttack] = registry("attack", RankingAttack)
_BUILT_IN: dict[str, Callable[..., RankingAttack]] = {
    "CA+": partial(CandidateAttack, sign="+"),
    "CA-": partial(CandidateAttack, sign="-"),
    "QA+": partial(QueryAttack, sign="+"),
    "QA-": partial(QueryAttack, sign="-"),
    "TMA": TargetedMismatch,
    "ES": EmbeddingShift,
    "LTM": LearningToMisrank,
    "GTM": GreedyTop1Misranking,
    "GTT": GreedyTop1Translocation,
    "SP-QA+": partial(SemanticsPreservingQueryAttack, sign="+"),
    "SP-QA-": partial(SemanticsPreservingQueryAttack, sign="-"),
}
for _name, _factory in _BUILT_IN.items():
    ATTACKS.register(_name)(_factory)


def attack(name: str, /, *, protocol: str = "strict", **options: Any) -> RankingAttack:
    """Make an attack by the paper's name, with its options in brackets or as arguments.

    >>> attack("CA+(w=5)")
    CandidateAttack(protocol='strict', sign='+', w=5)
    >>> attack("LMT")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown attack 'LMT' (did you mean 'LTM'?); known: CA+, CA-, ES, GTM, ...
    """
    return ATTACKS.make(name.replace("−", "-"), {"protocol": protocol}, **options)
