"""What a run began with, as digests: its images, its copies of the user's files, its workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from robustmetric.data.cache import Pixels
from robustmetric.training.sets import Sets
from robustmetric.trust import digest_of


def images_of(sets: Sets) -> dict[str, dict[str, Any]]:
    """Return number, classes and digests of the images of a training, those that score it included.

    >>> from robustmetric.training.recipe import Recipe
    >>> from robustmetric.training.sets import load_sets
    >>> images_of(load_sets(Recipe(data="digits")))["training images"]["count"]
    1000
    """
    sources = {"training images": sets.learn.source}
    if sets.score.source is not sets.learn.source:
        sources[sets.scored] = sets.score.source
    return {name: _images(source) for name, source in sources.items()}


def code_of(folder: Path) -> dict[str, str]:
    """Return the digest of each Python file in a `folder`, by its path there.

    >>> code_of(Path("nowhere"))
    {}
    """
    files = sorted(folder.rglob("*.py"))
    return {file.relative_to(folder).as_posix(): digest_of(file.read_bytes()) for file in files}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say, in a few words each, what of `now` is not what it was `before`; what either lacks is passed over.

    >>> differences({"workers": 2}, {"workers": 1})
    ['the number of workers was 2, is 1: give --devices 2 (times --nodes)']
    """
    found: list[str] = []
    for name, compare in {"workers": _workers, "code": _code, "images": _of_images}.items():
        was, is_now = before.get(name), now.get(name)
        if was is not None and is_now is not None and was != is_now:
            found += compare(was, is_now)
    return found


def _workers(was: object, now: object) -> Iterator[str]:
    yield f"the number of workers was {was}, is {now}: give --devices {was} (times --nodes)"


def _code(was: object, now: object) -> Iterator[str]:
    assert isinstance(now, dict)  # noqa: S101
    was = was if isinstance(was, dict) else {}
    for name in sorted(was.keys() | now.keys()):
        if name not in now:
            yield f"its copy code/{name} is gone: restore it"
        elif name not in was:
            yield f"code/{name} was added to its copies: remove it"
        elif was[name] != now[name]:
            yield f"its copy code/{name} was changed: restore it"


def _of_images(was: object, now: object) -> Iterator[str]:
    assert isinstance(now, dict)  # noqa: S101
    was = was if isinstance(was, dict) else {}
    for name, new in now.items():
        old = was.get(name)
        if not isinstance(old, dict) or old == new:
            continue
        counts = [f"{one.get('count')} of {one.get('classes')} classes" for one in (old, new)]
        if counts[0] != counts[1]:
            yield f"the {name} were {counts[0]}, are {counts[1]}: restore them"
        elif old.get("labels") != new["labels"]:
            yield f"of the {name}, {counts[0]}, some are in other classes: restore them"
        else:
            yield f"of the {name}, {counts[0]}, some have other pixels: restore them"


def _images(source: Pixels) -> dict[str, Any]:
    # The names of files do not count: a training does not depend on them.
    labels = hashlib.sha256("\0".join(source.classes).encode())
    labels.update(source.labels.numpy().tobytes())
    return {
        "count": len(source),
        "classes": len(source.classes),
        "labels": labels.hexdigest(),
        "pixels": source.digest,
    }
