"""The Python files that a recipe names: where they are, what they import from beside them, and copies."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from robustmetric.files import write_atomically

_ONE = re.compile(r"(\s*)(.+\.py)(?=:\w+\s*(?:\(.*\))?\s*$)", re.DOTALL)
_SEVERAL = re.compile(r"(\s*)([^\[\],&()\s][^\[\],&()]*?\.py)(?=:\w)")

_NAMED = {"model": _ONE, "data": _ONE, "defense": _SEVERAL}
"""The entries of a recipe that may name files: a network and a data set one, a defense one for each part."""


def rename_files(entries: Mapping[str, Any], change: Callable[[Path], Path]) -> dict[str, Any]:
    """Return the entries of a recipe with each Python file that they name changed.

    >>> rename_files({"model": "nets/a.py:Net(depth=2)", "dim": 8}, lambda file: Path(file.name))
    {'model': 'a.py:Net(depth=2)', 'dim': 8}
    >>> rename_files({"defense": "HM[b.py:Mine,LGA]&c.py:Term"}, lambda file: "code" / file)
    {'defense': 'HM[code/b.py:Mine,LGA]&code/c.py:Term'}
    """
    changed = dict(entries)
    for key, pattern in _NAMED.items():
        if isinstance(text := entries.get(key), str):
            changed[key] = pattern.sub(lambda found: f"{found[1]}{change(Path(found[2]).expanduser())}", text)
    return changed


def bare(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a recipe with files by their names alone, wherever they are.

    >>> bare({"model": "/home/me/nets.py:small"})
    {'model': 'nets.py:small'}
    """
    return rename_files(entries, lambda file: Path(file.name))


def files_beside(entries: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the entries of a recipe with its files in the folder that the recipe was read from.

    A file that is not there, and is there from the working directory, stays as it is.

    >>> files_beside({"model": "code/nets.py:small"}, Path("/runs/a"))
    {'model': '/runs/a/code/nets.py:small'}
    """

    def place(file: Path) -> Path:
        beside = (folder / file).absolute()
        return beside if beside.is_file() or not file.is_file() else file

    return rename_files(entries, place)


def named_files(entries: Mapping[str, Any]) -> list[Path]:
    """Return the Python files that a recipe names, each once.

    >>> named_files({"model": "c2f2", "defense": "HM[b.py:Mine,b.py:Other]"})
    [PosixPath('b.py')]
    """
    found: dict[Path, None] = {}

    def note(file: Path) -> Path:
        found[file] = None
        return file

    rename_files(entries, note)
    return list(found)


def copy_files(entries: Mapping[str, Any], folder: Path, code: str) -> dict[str, Any]:
    """Copy the files that a recipe names into ``folder/code``, with what they import from beside them.

    The entries that come back name the copies, relative to the folder. Files of one directory stay together;
    those of another go to a directory of their own, so that no two with the same name meet.
    """
    homes: dict[Path, Path] = {}
    copies: dict[Path, Path] = {}
    for file in named_files(entries):
        home = file.absolute().parent
        place = homes.setdefault(home, Path(code, str(len(homes) + 1)) if homes else Path(code))
        copies[file] = place / file.name
        for part in neighbours(file.absolute()):
            target = folder / place / part.relative_to(home)
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy(part, target)
    return rename_files(entries, lambda file: copies[file])


def neighbours(file: Path) -> list[Path]:
    """Return a Python file and all that it imports from its own directory, directly or through others.

    A package is taken whole. What is installed, or comes with Python, is not beside the file.
    """
    home, found, ahead = file.parent, dict[Path, None](), [file]
    while ahead:
        path = ahead.pop()
        if path in found:
            continue
        found[path] = None
        for name in sorted(set(_imported(path)) - sys.stdlib_module_names - {"robustmetric"}):
            if (module := home / f"{name}.py").is_file():
                ahead.append(module)
            elif (home / name).is_dir():
                ahead += sorted((home / name).rglob("*.py"))
    return list(found)


def _imported(file: Path) -> Iterator[str]:
    """Name the packages and modules that a file imports, wherever in it."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:  # importing it will say so, if it ever is
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _copy(file: Path, target: Path) -> None:
    content = file.read_bytes()
    write_atomically(target, lambda copy: copy.write(content))
