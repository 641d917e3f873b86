"""Whether two evaluations are the same: digests of networks and lists, versions, and what differs."""

from __future__ import annotations

import hashlib
import inspect
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor, nn

from robustmetric.attacks import Attack, Search, Transfer
from robustmetric.models import weights
from robustmetric.usercode import without_folder


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of a network's state: names, types, shapes and values.

    >>> digest_of(nn.Flatten())[:8]
    'e3b0c442'
    """
    # Buffers that are not saved, such as constants of a normalisation, count as well.
    return weights.digest_of({**dict(model.named_parameters()), **dict(model.named_buffers())})


def digest_of_numbers(numbers: Tensor | None) -> str | None:
    """Return the SHA-256 of whole numbers (N,); None of none.

    >>> digest_of_numbers(None) is None
    True
    """
    return None if numbers is None else hashlib.sha256(numbers.cpu().long().numpy().tobytes()).hexdigest()


def digest_of_names(names: Sequence[str] | None) -> str | None:
    """Return the SHA-256 of a list of names; None of none.

    >>> digest_of_names(["a", "b"])[:8]
    '7e18f737'
    """
    if names is None:
        return None
    return hashlib.sha256("\n".join(names).encode(errors="surrogatepass")).hexdigest()  # of any bytes


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of `packages`; by default of what computes the scores.

    >>> "torch" in versions()
    True
    """
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in packages or ("robustmetric", "torch", "numpy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def options_of(part: object) -> dict[str, Any]:
    """Describe an attack or a search by its class and options; networks in it have digests of their own.

    >>> from robustmetric.attacks import PGD
    >>> options_of(PGD(restarts=2))
    {'class': 'PGD', 'best': 'False', 'random_start': 'False', 'restarts': '2'}
    """
    found: dict[str, Any] = {"class": type(part).__qualname__}
    if (code := code_of(type(part))) is not None:
        found["code"] = code
    for name, value in sorted(getattr(part, "__dict__", {}).items()):
        if isinstance(value, Search):
            found[name] = options_of(value)
        elif isinstance(value, Tensor):
            found[name] = hashlib.sha256(value.detach().cpu().numpy().tobytes()).hexdigest()
        elif not isinstance(value, nn.Module):
            # Without the places in memory that some objects show.
            found[name] = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return found


_NOT_OWN = ("robustmetric", "builtins", "abc", "typing")


def code_of(part: Any) -> str | None:
    """Return the SHA-256 of the source of a class or function of the user's own; None of one of ours.

    A class counts with those that it is derived from. What has no source, as in a console, counts by name.

    >>> code_of(digest_of) is None
    True
    """
    plain = part.func if isinstance(part, partial) else part
    classes = plain.__mro__ if isinstance(plain, type) else (plain,)
    own = [c for c in classes if str(c.__module__).partition(".")[0] not in _NOT_OWN]
    if not own:
        return None
    whole = hashlib.sha256()
    for each in own:
        try:
            whole.update(inspect.getsource(each).encode())
        except (OSError, TypeError):
            whole.update(getattr(each, "__qualname__", repr(each)).encode())
    return whole.hexdigest()


def repeated(names: Iterable[str]) -> str:
    """Return the `names` that stand there more than once, as text.

    >>> repeated(["ES", "CA+", "ES"])
    'ES'
    """
    return ", ".join(sorted(name for name, count in Counter(names).items() if count > 1))


def written(given: object, part: Attack | Search) -> str:
    """Write a part of a plan down: in one spelling, or as it was given if it is the user's own.

    The folder of a file is left out: it is another one on another machine.
    """
    if not isinstance(given, str):
        return part.name
    if isinstance(part, Transfer):
        inside = given.strip().removeprefix("transfer").strip().removeprefix("(").removesuffix(")")
        return f"transfer({written(inside.strip(), part.search)})"
    return part.name if code_of(type(part)) is None else without_folder(given)


def differences(before: Any, now: Any) -> list[str]:
    """Say what two descriptions, of JSON's types, differ in; the same ones in nothing.

    >>> differences({"settings": {"eps": 0.1, "steps": 8}}, {"settings": {"eps": 0.2, "steps": 8}})
    ['eps was 0.1, is 0.2']
    """
    return list(_differences(before, now, ""))


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        yield f"{path.removeprefix('settings.')} was {_short(before)}, is {_short(now)}"


def _short(value: Any) -> str:
    """Write a value down; of a digest its first digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", repr(value))
