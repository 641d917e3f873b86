"""Names and numbers: look a part up with an error that helps, write parameters, tell what is a number."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")


def lookup(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Return ``known[name]``; an unknown name raises a ValueError with the nearest and all known names.

    >>> lookup("model", "resnet19", {"resnet18": 18, "resnet50": 50, "c2f2": 2})
    Traceback (most recent call last):
    ...
    ValueError: unknown model 'resnet19' (did you mean 'resnet18'?); known: c2f2, resnet18, resnet50
    """
    if name in known:
        return known[name]
    raise ValueError(unknown(kind, name, known))


def unknown(kind: str, name: str, known: Mapping[str, object]) -> str:
    """Say that a name is not known, which one is nearest and which there are.

    >>> unknown("sampler", "X", {"R": 0, "M": 1})
    "unknown sampler 'X'; known: M, R"
    """
    nearest = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.5)
    original = [k for k in known if nearest and k.lower() == nearest[0]]
    hint = f" (did you mean {original[0]!r}?)" if original else ""
    return f"unknown {kind} {name!r}{hint}; known: {', '.join(sorted(known))}"


def parameters(lead: str = "", **given: float | None) -> str:
    """Write the parameters that were given, as they stand in a defense's name.

    >>> parameters(λ=0.05, γ=None), parameters(lead=",", ξ=0.1)
    ('λ=0.05', ',ξ=0.1')
    """
    text = ",".join(f"{name}={float(value)!r}" for name, value in given.items() if value is not None)
    return lead + text if text else ""


def is_number(value: Any, kind: type = Real) -> bool:
    """Tell whether a value is a finite number (numpy's included) and not a truth value.

    >>> from numbers import Integral
    >>> is_number(0.5), is_number(2.0, kind=Integral), is_number(True), is_number("8"), is_number(math.nan)
    (True, False, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not isinstance(value, kind):
        return False
    return math.isfinite(value)
