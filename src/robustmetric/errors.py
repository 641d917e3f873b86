"""What a value must be: numbers, and the error that says what the user can fix."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

_SHOWN = 5  # of many items

T = TypeVar("T")


class UserError(ValueError):
    """An error that the user can fix: it names the value, what is allowed and what to do next.

    `parameter` is the name of the argument to change, where there is one: the command line shows its flag
    after the message. It prints the error in one line, without a traceback.

    >>> raise UserError("eps must be in [0, 1], not 8: pixels are in [0, 1]")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: eps must be in [0, 1], not 8: pixels are in [0, 1]
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


UserError.__module__ = "robustmetric"  # where it is public


def fraction(value: object) -> object:
    """Read a `value` such as '8/255' or '1e-3' as a number; return anything else for the check that follows.

    >>> fraction("51/255"), fraction("1e-3"), fraction("much")
    (0.2, 0.001, 'much')
    """
    if not isinstance(value, str):
        return value
    parts = _FRACTION.fullmatch(value)
    if parts is None or (parts[2] and not float(parts[2])):
        return value
    found = float(parts[1]) / float(parts[2] or 1)
    return found if math.isfinite(found) else value  # too large to be a number: said as it was written


_NUMBER = r"((?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
_FRACTION = re.compile(rf"\s*{_NUMBER}\s*(?:/\s*{_NUMBER}\s*)?")


def is_number(value: Any, kind: type = Real) -> bool:
    """Return whether `value` is a finite number of this `kind` (numpy's included) and not a bool.

    >>> is_number(0.5), is_number(2.0, kind=Integral), is_number(True), is_number("8"), is_number(math.nan)
    (True, False, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not isinstance(value, kind):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return kind is not Real


def whole(name: str, value: Any, least: int = 0, most: int | None = None, *, why: str = "") -> int:
    """Return `value` as an int; reject all but whole numbers from `least` to `most`.

    `name` is the argument and `why` the reason or advice that ends the message.

    >>> whole("samples", 0, least=1)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: samples must be a whole number of at least 1, not 0
    """
    if is_number(value, Integral) and least <= value and (most is None or value <= most):
        return int(value)
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise _wrong(name, value, f"a whole number {allowed}", why)


def number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    why: str = "",
) -> float:
    """Return `value` as a float; reject all but finite numbers from `low` to `high`.

    With `open_low` or `open_high`, that end is excluded. `name` is the argument and `why` the reason or
    advice that ends the message.

    >>> number("alpha", 2, 0, 1, open_low=True, why="pixels are in [0, 1]")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: alpha must be in (0, 1], not 2: pixels are in [0, 1]
    """
    above = is_number(value) and (low < value or (low == value and not open_low))
    if above and (value < high or (value == high and not open_high)):
        return float(value)
    if math.isfinite(high):
        left, right = "(" if open_low else "[", ")" if open_high else "]"
        allowed = f"in {left}{low}, {high}{right}"
    elif math.isfinite(low):
        allowed = f"a number above {low}" if open_low else f"a number of at least {low}"
    else:
        allowed = "a finite number"
    raise _wrong(name, value, allowed, why)


def instance(name: str, value: object, kind: type[T], *, why: str = "") -> T:
    """Return `value`; reject all but an instance of `kind`.

    `name` is the argument, or what returned the value; `why` the reason or advice that ends the message.

    >>> instance("source", "S", dict)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: source must be a dict, not 'S'
    """
    if isinstance(value, kind):
        return value
    raise _wrong(name, value, a(kind.__name__), why)


def _wrong(name: str, value: object, allowed: str, why: str) -> UserError:
    text = f"{name} must be {allowed}, not {describe(value)}{why and f': {why}'}"
    return UserError(text, parameter=name if name.isidentifier() else None)


def a(noun: str) -> str:
    """Return `noun` with its indefinite article.

    >>> a("list"), a("int")
    ('a list', 'an int')
    """
    return f"{'an' if noun[:1] in 'aeiouAEIOU' else 'a'} {noun}"


def describe(value: object) -> str:
    """Return what a wrong `value` is called in an error.

    >>> describe(None), describe([1, 2]), describe("LGA"), describe(0.5), describe(dict)
    ('None', 'a list', "'LGA'", '0.5', 'the class dict')
    >>> import numpy as np
    >>> describe(np.zeros((3, 2)))
    'an array, float64 of shape (3, 2)'

    A tensor is float32 of shape (3, 2).
    """
    if value is None or isinstance(value, str | Real):
        return brief(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape, dtype = getattr(value, "shape", None), str(getattr(value, "dtype", ""))
    if shape is not None and dtype:
        kind = "" if dtype.startswith("torch.") else "an array, "
        return f"{kind}{dtype.removeprefix('torch.')} of shape {tuple(shape)}"
    return a(type(value).__name__)


def shorten(items: Sequence[object]) -> str:
    """Return the first few of many `items` as text.

    >>> shorten([1, 2, 3]), shorten(range(12))
    ('1, 2, 3', '0, 1, 2, 3, 4 and 7 more')
    """
    text = ", ".join(str(item) for item in items[:_SHOWN])
    return f"{text} and {len(items) - _SHOWN} more" if len(items) > _SHOWN else text


def brief(value: object, most: int = 80) -> str:
    """Return a `value` as it is written in Python, its middle left out beyond `most` characters.

    >>> brief("c2f2"), brief("9" * 10**6, most=12)
    ("'c2f2'", "'9999 … 9999'")
    """
    # The repr of a long number or text is long to make, too.
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return f"a number of about {value.bit_length() * 3 // 10} digits"
    if isinstance(value, str) and len(value) > most:
        value = value[:most] + value[-most:]
    text = repr(value)
    half = (most - 2) // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def check_signature(who: str, method: Callable[..., Any], written: str) -> None:
    """Reject a `method` that cannot be called as its contract says.

    `who` is its name in the message, `written` its parameters, such as ``"batch, *, generator"``.

    >>> check_signature("Mine.step", lambda images: 0, "network, images, labels")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: Mine.step takes (images); it must take (network, images, labels)
    """
    positional, _, keywords = (part.strip(", ") for part in written.partition("*"))
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # some of C have none
        return
    try:
        signature.bind(*positional.split(","), **{name.strip(): None for name in keywords.split(",") if name})
    except TypeError:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        taken = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise UserError(f"{who} takes {taken}; it must take ({written})") from None
