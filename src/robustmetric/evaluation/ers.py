"""The Empirical Robustness Score: ten scores under attack as one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from robustmetric.attacks import Column, Protocol, attack
from robustmetric.errors import UserError

Values = NDArray[np.float64]

ERS_ATTACKS = ("CA+", "CA-", "QA+", "QA-", "TMA", "ES", "LTM", "GTM", "GTT")
"""The attacks of the Empirical Robustness Score, in the paper's order."""

_ATTACK_OF = {column: name for name in ERS_ATTACKS for column in attack(name).columns}

COLUMNS: dict[str, Column] = {column.name: column for column in _ATTACK_OF}
"""The ten scores in the paper's order. Ranks and shares are in %, TMA is a cosine, ES:D a distance."""


def terms(scores: Mapping[str, float | Values], *, protocol: Protocol = "strict") -> dict[str, Values]:
    """Return the ten terms of the ERS from `scores` by column, each at most 100 if nothing moves.

    The `protocol` strict keeps them in [0, 100].

    >>> {k: float(v) for k, v in terms(dict.fromkeys(COLUMNS, 60.0) | {"TMA": 0.75, "ES:D": 1.5}).items()}
    {'CA+': 100.0, 'CA-': 40.0, 'QA+': 100.0, 'QA-': 40.0, 'TMA': 25.0, 'ES:D': 25.0, 'ES:R': 60.0, ...}
    """
    if missing := [name for name in COLUMNS if name not in scores]:
        raise UserError(
            f"the ERS needs all ten scores; missing: {', '.join(missing)}: run the attacks "
            f"{', '.join(dict.fromkeys(_ATTACK_OF[COLUMNS[name]] for name in missing))} as well"
        )
    values = {
        name: column.term(np.asarray(scores[name], float))
        for name, column in COLUMNS.items()
        if column.term is not None
    }
    return {n: v.clip(0, 100) for n, v in values.items()} if protocol == "strict" else values


def ers(scores: Mapping[str, float], *, protocol: Protocol = "strict") -> float:
    """Return the Empirical Robustness Score of `scores` by column; higher is more robust.

    It is the mean of the ten terms, which the `protocol` strict keeps in [0, 100].

    >>> vulnerable = {"CA+": 0.0, "CA-": 100.0, "QA+": 0.0, "QA-": 99.9, "TMA": 0.883, "ES:D": 1.762}
    >>> round(ers(vulnerable | {"ES:R": 0.0, "LTM": 0.0, "GTM": 14.1, "GTT": 0.0}), 1)
    3.8
    """
    return float(np.mean(list(terms(scores, protocol=protocol).values())))
