"""Attacks on rankings: what a perturbed image aims at; `search` is how it gets there."""

from __future__ import annotations

from typing import Any

from robustmetric.attacks.apgd import APGD
from robustmetric.attacks.base import ATTACKS, Attack, Protocol, Target
from robustmetric.attacks.columns import COSINE, DISTANCE, PERCENT, Column, Unit
from robustmetric.attacks.draws import Draws, choose
from robustmetric.attacks.goals import Demote, Misrank, Promote, Shift, Translocate
from robustmetric.attacks.plain import (
    EmbeddingShift,
    GreedyTop1Misranking,
    GreedyTop1Translocation,
    LearningToMisrank,
    TargetedMismatch,
)
from robustmetric.attacks.ranks import CandidateAttack, QueryAttack, SemanticsPreservingQueryAttack
from robustmetric.attacks.search import NES, PGD, SEARCHES, SPSA, Problem, Search, Transfer, make_search
from robustmetric.attacks.square import Square
from robustmetric.gallery import Gallery, Queries, hit_at_1, nearest
from robustmetric.usercode import file_of

__all__ = [
    "APGD",
    "ATTACKS",
    "COSINE",
    "DISTANCE",
    "NES",
    "PERCENT",
    "PGD",
    "SEARCHES",
    "SPSA",
    "Attack",
    "CandidateAttack",
    "Column",
    "Demote",
    "Draws",
    "EmbeddingShift",
    "Gallery",
    "GreedyTop1Misranking",
    "GreedyTop1Translocation",
    "LearningToMisrank",
    "Misrank",
    "Problem",
    "Promote",
    "Protocol",
    "Queries",
    "QueryAttack",
    "Search",
    "SemanticsPreservingQueryAttack",
    "Shift",
    "Square",
    "Target",
    "TargetedMismatch",
    "Transfer",
    "Translocate",
    "Unit",
    "attack",
    "choose",
    "hit_at_1",
    "make_search",
    "nearest",
]


def attack(name: str, /, *, protocol: str = "strict", **options: Any) -> Attack:
    """Make an attack by its name, with its options in brackets or as arguments.

    `name` is the paper's, one that was registered, or ``"file.py:Mine(option=1)"``. `protocol` is `strict`,
    by the definitions, or `reference`, as published figures were made. `options` are those of the attack.

    >>> attack("CA+(w=5)")
    CandidateAttack(protocol='strict', sign='+', w=5)
    >>> attack("LMT")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown attack 'LMT' (did you mean 'LTM'?); known: CA+, CA-, ES, GTM, ...
    """
    # The paper writes a minus; a file's name stays as it is.
    plain = name if file_of(name) else name.replace("−", "-")
    return ATTACKS.make(plain, {"protocol": protocol}, **options)
