"""What an attack reports: each column's name, its unit, which way is robust, and its term of the ERS."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from robustmetric.errors import UserError, instance


@dataclass(frozen=True)
class Unit:
    """What a column's values are measured in.

    `name` follows a value. `points` is what a change of 1 is worth in points of 100, in which changes
    of any column are compared. `digits` are shown after the decimal point.

    >>> COSINE
    Unit(name='cosine', points=100, digits=3)
    """

    name: str
    points: float
    digits: int


PERCENT = Unit("%", 1, 1)
"""Shares and ranks, from 0 to 100."""

COSINE = Unit("cosine", 100, 3)
"""The cosine of two embeddings: 1 where they are the same."""

DISTANCE = Unit("distance", 50, 3)
"""A distance on the unit sphere, at most 2."""


@dataclass(frozen=True)
class Column:
    """A value that an attack reports for each query; its mean is a score.

    `name` is that of records and tables. `better` says whether a higher or a lower value is the more robust
    one; None if it says nothing of the network alone. `unit` is what it is measured in. `term` returns the
    column's term of the ERS for a value, a number or an array; None if it has none. If it is `conclusive`, an
    attack with ε = 1 should leave little of that term. `success_value` is the value of a query that is where
    the attack wants it: a search leaves it alone. None if there is always more to gain.

    >>> column = Column("TMA", "lower", COSINE, from_cosine)
    >>> column.arrow, column.show(0.9), column.show(None), column.term(0.75)
    ('↓', '0.900', '-', 25.0)
    """

    name: str
    better: Literal["higher", "lower"] | None
    unit: Unit = PERCENT
    term: Callable[[Any], Any] | None = None
    conclusive: bool = True
    success_value: float | None = None

    def __post_init__(self) -> None:
        instance("the name of a column", self.name or None, str)
        where = f"of the column {self.name}"
        if self.better not in ("higher", "lower", None):
            raise UserError(f"better {where} must be 'higher', 'lower' or None, not {self.better!r}")
        instance(f"unit {where}", self.unit, Unit, why="such as PERCENT, COSINE or DISTANCE")
        if self.term is not None and not callable(self.term):
            raise UserError(f"term {where} must be a function, not {self.term!r}")

    @property
    def arrow(self) -> str:
        """The arrow that points to where the network is more robust; empty if neither way does."""
        return "" if self.better is None else {"higher": "↑", "lower": "↓"}[self.better]

    @property
    def heading(self) -> str:
        """The name with the arrow, as it stands above a table.

        >>> Column("CA-", "lower").heading, Column("SP-QA+:keep", None).heading
        ('CA− ↓', 'SP-QA+:keep')
        """
        return f"{re.sub('(?<=[CQ]A)-', '−', self.name)} {self.arrow}".rstrip()

    def show(self, value: float | None) -> str:
        """Return the `value` as text with the digits of its unit, "-" if there is none or it is NaN."""
        return "-" if value is None or math.isnan(value) else f"{value:.{self.unit.digits}f}"


# The terms of the ERS: 100 where an attack moves nothing, 0 where it reaches all it wants. Functions with a
# name, so that a column can be sent to another process.


def from_share(value: Any) -> Any:
    """Return the term of a `value` that is the share of queries with their answer kept, in %.

    >>> from_share(60.0)
    60.0
    """
    return value


def from_raised_rank(value: Any) -> Any:
    """Return the term of a `value` that is a rank in %, which an attack brings from about 50 to 0.

    >>> from_raised_rank(20.0)
    40.0
    """
    return 2 * value


def from_lowered_rank(value: Any) -> Any:
    """Return the term of a `value` that is a rank in %, which an attack brings from about 0 to 100.

    >>> from_lowered_rank(20.0)
    80.0
    """
    return 100 - value


def from_cosine(value: Any) -> Any:
    """Return the term of a `value` that is a cosine, which an attack brings to 1.

    >>> from_cosine(0.75)
    25.0
    """
    return 100 * (1 - value)


def from_distance(value: Any) -> Any:
    """Return the term of a `value` that is a distance, which an attack brings to 2.

    >>> from_distance(1.5)
    25.0
    """
    return 50 * (2 - value)
