"""The Python files that a recipe names: where they are, what they import from beside them, and copies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from robustmetric.errors import UserError, brief
from robustmetric.files import write_atomically
from robustmetric.text import printable
from robustmetric.trust import admit, digests_of, neighbours, own, remember
from robustmetric.usercode import OWN

_SEVERAL = re.compile(r"(\s*)([^\[\],&()\s][^\[\],&()]*?\.py)(?=:\w)")

_CERTAIN = re.compile(r"""(?:^|[\[,&(])\s*([^\[\],&()'":\s][^\[\],&()'":\n]*\.py)(?=:\w)""")

_READINGS = re.compile(r"(?=\.py:\w+\s*(?:\(.*\))?\s*\Z)", re.DOTALL)
"""Where the path may end in a text that names one file; if there are several places, the first counts."""

_NAMED = {"model": OWN, "data": OWN, "defense": _SEVERAL}
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

    A file that is not there, and is there from the working directory, stays as it is. A defense names its
    files from the working directory where their whole path could not be told from the rest of its name.

    >>> files_beside({"model": "code/nets.py:small"}, Path("/runs/a"))
    {'model': '/runs/a/code/nets.py:small'}
    """

    def place(file: Path) -> Path:
        beside = (folder / file).absolute()
        return beside if beside.is_file() or not file.is_file() else file

    placed = rename_files(entries, place)
    if _can_be_read("defense", entries, place):
        return placed
    return {**placed, "defense": rename_files(entries, lambda file: _near(place(file)))["defense"]}


def _near(file: Path) -> Path:
    """Return a file in the working directory by its path from there."""
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


def _can_be_read(key: str, entries: Mapping[str, Any], place: Callable[[Path], Path]) -> bool:
    """Return whether the files of an entry are found again in its text once they are in another place."""
    if not isinstance(entries.get(key), str):
        return True
    one = {key: entries[key]}
    placed = rename_files(one, place)
    expected = list(dict.fromkeys(map(place, named_files(one))))
    return named_files(placed) == expected and _is_certain(key, placed[key])


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


def admit_files(
    entries: Mapping[str, Any], source: Path, given: Mapping[str, Any], *, trust: bool = False
) -> None:
    """Refuse `entries` that were read from a file `source` if they name code that the user does not trust.

    What is `given` comes from the user, and so do the files that it names. With `trust` the files of the
    entries are trusted from now on.

    >>> admit_files({"model": "c2f2"}, Path("recipe.yaml"), {"model": "mine.py:Net"})
    """
    own(named_files(given))
    if not trust:
        _check_readable(entries, source)
    admit(source, named_files(entries), trust=trust)


def _check_readable(entries: Mapping[str, Any], source: Path) -> None:
    """Refuse texts of which it is not certain that the files found in them are all that they name."""
    for key in _NAMED:
        text = str(entries.get(key, ""))
        if not _is_certain(key, text):
            raise UserError(
                f"{printable(str(source))}: it cannot be told which files the {key} {printable(brief(text))} "
                "names; write paths without brackets, quotes, commas, colons and &, or read all of its code "
                "and run the same command with --trust (in Python, trust=True)"
            )


def _is_certain(key: str, text: str) -> bool:
    """Return whether the files found in the text of an entry are all that it names, however it is read."""
    if _NAMED[key] is OWN:
        return len(_READINGS.findall(text)) <= 1
    certain = [Path(path).expanduser() for path in _CERTAIN.findall(text)]
    certain = certain if len(certain) == text.count(".py:") else []
    return list(dict.fromkeys(certain)) == named_files({key: text})


def check_place(entries: Mapping[str, Any], folder: Path) -> None:
    """Refuse a `folder` for copies of the files that `entries` name if its path cannot be written in them.

    >>> check_place({"model": "nets.py:small"}, Path("runs (new)"))
    """
    copied = bare(entries)

    def place(file: Path) -> Path:
        return folder.absolute() / file

    for key in _NAMED:
        near = key == "defense" and _can_be_read(key, copied, lambda file: _near(place(file)))
        if not near and _can_be_read(key, copied, Path) and not _can_be_read(key, copied, place):
            raise UserError(
                f"{printable(str(folder.absolute()))} cannot hold the files of the {key} "
                f"{printable(brief(copied[key]))}: their path would stand in its text, where brackets, "
                "quotes, commas, colons and & mean something else; give a folder without these",
                parameter="out",
            )


def remember_files(entries: Mapping[str, Any], folder: Path) -> bool:
    """Trust from now on the files in a `folder` that the `entries` of a recipe name.

    Return whether that could be written down.

    >>> remember_files({"model": "c2f2"}, Path.cwd())
    True
    """
    return remember(digests_of(folder / file for file in named_files(entries)).values())


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


def _copy(file: Path, target: Path) -> None:
    content = file.read_bytes()
    write_atomically(target, lambda copy: copy.write(content))
