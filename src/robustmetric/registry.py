"""Names and numbers: look a part up with an error that helps, write parameters, tell what is a number."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")

_SHOWN = 5  # of many items


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


def call(kind: str, text: str, known: Mapping[str, Callable[..., T]], **options: Any) -> T:
    """Make a part from a text such as ``"name(option=2)"``; further options may come as arguments.

    >>> call("search", "PGD(restarts=2)", {"PGD": dict}, steps=8)
    {'steps': 8, 'restarts': 2}
    """
    name, bracket, rest = text.partition("(")
    factory = lookup(kind, name.strip(), known)
    fixed = {*options, *getattr(factory, "keywords", ())}
    if bracket:
        if not rest.endswith(")"):
            raise ValueError(f"{kind} {text!r} has no closing bracket; write NAME(option=value, ...)")
        for part in filter(None, re.split(r"\s*,\s*", rest[:-1].strip())):
            key, _, value = (piece.strip() for piece in part.partition("="))
            if key in fixed or key in options:
                raise ValueError(f"{kind} {text!r}: {key} is given already; leave it out")
            try:
                options[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                raise ValueError(
                    f"{kind} {text!r}: {part!r} must be option=number; write NAME(option=value, ...)"
                ) from None
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        allowed = ", ".join(p for p in inspect.signature(factory).parameters if p not in fixed)
        raise ValueError(f"{kind} {name!r} {error}; its options: {allowed or 'none'}") from None
    except ValueError:  # builtins have no signature
        pass
    return factory(**options)


def parameters(lead: str = "", **given: float | None) -> str:
    """Write the parameters that were given, as they stand in a defense's name.

    >>> parameters(λ=0.05, γ=None), parameters(lead=",", ξ=0.1)
    ('λ=0.05', ',ξ=0.1')
    """
    text = ",".join(f"{name}={float(value)!r}" for name, value in given.items() if value is not None)
    return lead + text if text else ""


def fraction(value: object) -> object:
    """Read '8/255' or '0.1' as a number; give back anything else for the check that follows.

    >>> fraction("51/255"), fraction("0.1"), fraction("much")
    (0.2, 0.1, 'much')
    """
    if not isinstance(value, str):
        return value
    parts = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(?:/\s*(\d+\.?\d*|\.\d+)\s*)?", value)
    if parts is None or (parts[2] and not float(parts[2])):
        return value
    return float(parts[1]) / float(parts[2] or 1)


def is_number(value: Any, kind: type = Real) -> bool:
    """Tell whether a value is a finite number (numpy's included) and not a truth value.

    >>> from numbers import Integral
    >>> is_number(0.5), is_number(2.0, kind=Integral), is_number(True), is_number("8"), is_number(math.nan)
    (True, False, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not isinstance(value, kind):
        return False
    return math.isfinite(value)


def shorten(items: Sequence[object]) -> str:
    """Write the first few of many items.

    >>> shorten([1, 2, 3]), shorten(range(12))
    ('1, 2, 3', '0, 1, 2, 3, 4 and 7 more')
    """
    text = ", ".join(str(item) for item in items[:_SHOWN])
    return f"{text} and {len(items) - _SHOWN} more" if len(items) > _SHOWN else text
