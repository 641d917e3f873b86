"""What goes out of a run without the paths of the machine that it was made on: recipe, run.json, records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from robustmetric.errors import UserError, brief, fraction
from robustmetric.evaluation import Record
from robustmetric.training.recipe import Recipe, bare, make_recipe
from robustmetric.usercode import without_folder

_ABSOLUTE = re.compile(r"[/\\~]|[A-Za-z]:[/\\]")
_QUOTED = re.compile(r"""(['"])([^'"]*[/\\][^'"]*)\1""")
_FILES = ("files", "skipped")
"""Entries of run.json that list files."""


def file_name(path: str) -> str:
    r"""Return the last part of a `path`, of whichever system.

    >>> file_name("/home/me/birds/"), file_name("C:\\Users\\me\\a.png"), file_name("/")
    ('birds', 'a.png', '.')
    """
    return PureWindowsPath(path).name or "."


def bare_command(words: Sequence[object]) -> list[str]:
    """Return the `words` of a command line with files and folders by their names alone.

    >>> bare_command(["train", "--root", "/home/me/birds", "--defense", "N/A[S]", "--set", "alpha=1/255"])
    ['train', '--root', 'birds', '--defense', 'N/A[S]', '--set', 'alpha=1/255']
    """
    found, option = [], ""
    for word in map(str, words):
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            found.append(option + equals + (_bare_value(option, value) if equals else ""))
        else:
            found.append(_bare_value(option, word))
            option = ""
    return found


def _bare_value(option: str, text: str) -> str:
    """Return the value of an option without folders."""
    key, equals, value = text.partition("=")
    if option == "--set" and equals:
        return f"{key}={_bare_value(f'--{key}', value)}"
    if option == "--defense":
        return _unquoted(bare({"defense": text})["defense"])
    if (option == "--model" and text.startswith("timm:")) or isinstance(fraction(text), float):
        return text
    short = _unquoted(without_folder(text))
    return short if short != text or not re.search(r"[/\\]", text) else file_name(text)


def _unquoted(text: str) -> str:
    """Return a text with the paths that stand in it in quotes, in options, by their names alone."""
    return _QUOTED.sub(lambda found: f"{found[1]}{file_name(found[2])}{found[1]}", text)


def bare_recipe(recipe: Recipe) -> Recipe:
    """Return a `recipe` without the folders of images and of first weights; its Python files stay.

    Options of a network or a defense that name a path are refused: without it they would mean another thing.

    >>> bare_recipe(Recipe(data="folder", root="/home/me/birds", weights="/home/me/resnet18.pth")).weights
    PosixPath('resnet18.pth')
    """
    entries = recipe.model_dump()
    for key in ("model", "defense"):
        if _unquoted(entries[key]) != entries[key]:
            raise UserError(
                f"the {key} {brief(bare(entries)[key])} names a path of this machine in its options, which "
                "cannot be given away: train with one that needs no such file"
            )
    entries["data"] = _unquoted(entries["data"])
    first = entries["weights"]
    return make_recipe({**entries, "root": None, "weights": None if first is None else Path(first.name)})


def bare_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a run.json, `about` a run, with files and folders by their names alone.

    >>> bare_about({"skipped": ["birds/wren/3.jpg"], "origin": {"files": ["/home/me/nets.py"], "workers": 1}})
    {'skipped': ['3.jpg'], 'origin': {'files': ['nets.py'], 'workers': 1}}
    """
    return {key: _bared(value, key) for key, value in about.items()}


def _bared(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {inner: _bared(entry, inner) for inner, entry in value.items()}
    if isinstance(value, list):
        return bare_command(value) if key == "command" else [_bared(entry, key) for entry in value]
    if isinstance(value, str) and (key in _FILES or _ABSOLUTE.match(value)):
        return file_name(value)
    return value


def bare_record(record: Record) -> Record:
    """Return a `record` with the images that were left out by their names alone, and the digest that fits.

    The digest is made anew in any case: a record of before has fewer entries than will be written.
    """
    names = [file_name(file) for file in record.data.skipped]
    return record.model_copy(update={"data": record.data.model_copy(update={"skipped": names})}).sealed()
