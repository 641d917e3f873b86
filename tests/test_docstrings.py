"""Docstrings describe every parameter of what the package offers, and of parts to derive from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import CheckpointIO
from pydantic import BaseModel

import robustmetric
from robustmetric.attacks import Attack, Search
from robustmetric.destination import Destination
from robustmetric.losses import Term
from robustmetric.triplets import Sampler

LIGHTNING = (Callback, CheckpointIO, LightningModule)  # a trainer calls them
PARTS = (Attack, Search, Sampler, Destination, Term)  # which users derive their own from
OFFERED = {name: getattr(robustmetric, name) for name in robustmetric.__all__}
PUBLIC = {**OFFERED, **{part.__name__: part for part in PARTS}}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("args", "kwargs")]


def names(text: str | None, parameter: str) -> bool:
    """Whether a docstring has a parameter in backticks, as an entry of `Args:` or, in prose, as `parameter=`.

    An example uses a parameter and does not say what it is.
    """
    prose = re.sub(r"^\s*>>> .*?(?=^\s*$|\Z)", "", text or "", flags=re.MULTILINE | re.DOTALL)
    return (
        re.search(rf"`\**{parameter}\b|^\s*\**{parameter}:|\b{parameter}=", prose, re.MULTILINE) is not None
    )


def missing(text: str | None, wanted: list[str]) -> list[str]:
    return [parameter for parameter in wanted if not names(text, parameter)]


def own_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "robustmetric"]


def undescribed(kind: type) -> list[str]:
    """The parameters of a constructor that neither the class nor one that it inherits them from describes."""
    if issubclass(kind, BaseException):
        return []
    if issubclass(kind, BaseModel):
        fields = {field.alias or name: field for name, field in kind.model_fields.items()}
        return [n for n, field in fields.items() if not (field.description or names(kind.__doc__, n))]
    text = "\n".join(base.__doc__ or "" for base in own_bases(kind))
    return missing(text, parameters(kind))


def methods(kind: type) -> Iterator[tuple[str, FunctionType, list[str]]]:
    """The public methods that a class defines, with their parameters that are in no base class's method."""
    for name, value in vars(kind).items():
        method = getattr(value, "__func__", value)
        if (
            (name.startswith("_") and name != "__call__")
            or not inspect.isfunction(method)
            or method.__module__ != kind.__module__
        ):
            continue
        inherited = {
            parameter
            for base in kind.__mro__[1:]
            if inspect.isfunction(above := getattr(base, name, None))
            for parameter in parameters(above)
        }
        first = 0 if isinstance(value, staticmethod) else 1
        yield name, method, [p for p in parameters(method)[first:] if p not in inherited]


def test_every_parameter_is_described() -> None:
    wanting = {name: missing(function.__doc__, parameters(function)) for name, function in FUNCTIONS.items()}
    for name, kind in CLASSES.items():
        wanting[name] = undescribed(kind)
        if not issubclass(kind, LIGHTNING):  # Lightning describes what its trainer passes
            for method, function, named in methods(kind):
                checked = getattr(kind, method.removeprefix("checked_"), None)  # which it calls
                told = "\n".join(str(one.__doc__) for one in (function, kind, checked))
                wanting[f"{name}.{method}"] = missing(told, named)
    assert len(wanting) > 40
    assert not {name: unnamed for name, unnamed in wanting.items() if unnamed}


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("Return the length of `rows` (N,).", True),
        ("Return ``**rows`` as they are.", True),
        ("Return them.\n\n    Args:\n        rows: (N,) positions.", True),
        ("Take `rows=None` for all.", True),
        ("Take them.\n\n>>> take(rows=[1])\nTaken(rows=[1])\n", False),
        ("Take them.\n\n>>> take(rows=[1])\n\nOr leave out `rows`.", True),
        ("Return the rows of `arrows`.", False),
        ("Return the rows: all of them.", False),
        (None, False),
    ],
)
def test_a_parameter_is_found(text: str | None, described: bool) -> None:
    assert names(text, "rows") == described
