"""The YAML of a recipe: a flat map of single values, of bounded size, whatever else YAML can say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from robustmetric.errors import UserError, brief
from robustmetric.text import printable

LARGEST = 1_000_000
"""Bytes of a file."""
LONGEST = 4096
"""Characters of a value."""

_PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float")}


def read_file(path: Path) -> dict[str, Any]:
    """Return the entries of a YAML file `path`.

    >>> read_file(Path("nowhere.yaml"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no recipe file nowhere.yaml
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe file {path}")
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise UserError(f"{path} is larger than {LARGEST:,} bytes: this is no recipe")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: this is no text in UTF-8 ({error.reason}); save it as UTF-8"
        ) from None
    return read_entries(text, str(path))


def read_entries(text: str, where: str) -> dict[str, Any]:
    r"""Return the entries of a YAML `text`; `where` it comes from is said in errors.

    >>> read_entries("epochs: 8\nflip: yes", "mine.yaml")
    {'epochs': 8, 'flip': True}
    >>> read_entries("epochs: &a [*a]", "mine.yaml")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: mine.yaml, line 1: 'epochs' has an anchor or a tag; write the value alone
    """
    events = _events(text, where)
    entries: dict[str, Any] = {}
    key: str | None = None
    first = next(events, None)
    if first is None:
        raise _refused(where, 0, "there is nothing in it; write entries such as 'epochs: 8'")
    if not isinstance(first, yaml.MappingStartEvent):
        raise _error(where, first, "entries such as 'epochs: 8' belong here, one in each line")
    _check_bare(first, where, "the recipe")
    for event in events:
        if isinstance(event, yaml.MappingEndEvent):
            break
        if key is None:
            value = _value(event, where, "the name of an entry")
            key = str(event.value)  # type: ignore[attr-defined]
            if not isinstance(value, str):
                raise _error(where, event, f"{brief(key)} is no name of an entry")
            if key in entries:
                raise _error(where, event, f"{brief(key)} is given twice; leave one of them out")
        else:
            entries[key] = _value(event, where, brief(key))
            key = None
    for event in events:  # there is nothing behind it
        raise _error(where, event, "a second document begins; a recipe is one")
    return entries


def read_value(text: str, where: str) -> Any:
    """Return the value that a YAML `text` is; `where` it comes from is said in errors.

    >>> read_value("64", "--set dim"), read_value("", "--set dim")
    (64, None)
    """
    events = _events(text, where)
    event = next(events, None)
    if event is None:
        return None
    value = _value(event, where, "the value")
    for more in events:
        raise _error(where, more, "this is more than one value")
    return value


def _events(text: str, where: str) -> Iterator[yaml.Event]:
    """Parse a text, no further than it is asked for, without the events that only frame it."""
    frame = (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if not isinstance(event, frame):
                yield event
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _refused(where, mark.line if mark else 0, f"this is not YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        raise _refused(where, line, f"the character {error.character:#x} cannot stand in YAML") from None
    except (ValueError, OverflowError, RecursionError) as error:  # of escapes that are no character
        raise _refused(where, 0, f"this is not YAML: {error}") from None


def _value(event: yaml.Event, where: str, what: str) -> Any:
    """Return the value of a scalar; anything else is refused."""
    _check_bare(event, where, what)
    if not isinstance(event, yaml.ScalarEvent):
        raise _error(where, event, f"{what} is a list or a map; write a single value")
    text = event.value
    if len(text) > LONGEST:
        raise _error(where, event, f"{what} has {len(text):,} characters, {LONGEST:,} are the most")
    node = yaml.ScalarNode("", text)
    resolver = yaml.SafeLoader("")
    node.tag = resolver.resolve(yaml.ScalarNode, text, event.implicit)  # type: ignore[no-untyped-call]
    try:
        text.encode()
        if "\0" in text:
            raise ValueError("it has a NUL character")
        # Dates and the like stay texts: folders are called so.
        return resolver.construct_object(node) if node.tag in _PLAIN else text
    except (ValueError, OverflowError, yaml.YAMLError) as error:
        raise _error(where, event, f"{what} is {brief(text)}, which cannot be read: {error}") from None


def _check_bare(event: yaml.Event, where: str, what: str) -> None:
    if isinstance(event, yaml.AliasEvent):
        raise _error(where, event, f"{what} is an alias; write the value itself")
    if getattr(event, "anchor", None) is not None or getattr(event, "tag", None) is not None:
        raise _error(where, event, f"{what} has an anchor or a tag; write the value alone")


def _error(where: str, event: yaml.Event, problem: str) -> UserError:
    return _refused(where, event.start_mark.line if event.start_mark else 0, problem)


def _refused(where: str, line: int, problem: str) -> UserError:
    place = where if where.startswith("--") else f"{where}, line {line + 1}"
    return UserError(printable(f"{place}: {problem}"))
