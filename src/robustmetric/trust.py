"""Code that a file brings along is run only if the user trusts it: by the digest of each file.

A store in the user's data folder, outside of any run, holds the digests of what the user trusts.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from robustmetric.errors import UserError
from robustmetric.text import printable

_SHOWN = 20  # files in a message
_EMPTY = hashlib.sha256(b"").hexdigest()


class UntrustedError(UserError):
    """Code that did not come from the user, and that the user has not said to trust."""


@dataclass
class Known:
    """What this process knows of code that files brought along; it is sent to the workers that it starts.

    `digests` are those of contents that may run. `files` were named by a file. `folders` are those that they
    are in: what is imported from there is checked too, unless the value is True, which trusts all of it.
    """

    digests: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    folders: dict[str, bool] = field(default_factory=dict)

    def share(self) -> None:
        """Know the same in this process, which another one has started."""
        known.digests |= self.digests
        known.files |= self.files
        for folder, whole in self.folders.items():
            _guard(folder, whole=whole)


known = Known()
"""Of this process."""


def store() -> Path | None:
    """Return the file that holds the digests of what the user trusts; None if there is no home for it.

    >>> store().name
    'trusted'
    """
    given = os.environ.get("XDG_DATA_HOME", "")
    try:
        data = Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        return None
    return data / "robustmetric" / "trusted"


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of a file's `content`.

    >>> digest_of(b"")[:8]
    'e3b0c442'
    """
    return hashlib.sha256(content).hexdigest()


def is_trusted(digest: str) -> bool:
    """Return whether a file with this `digest` may run, because of this process or of the store.

    >>> is_trusted(digest_of(b"import nothing_known"))
    False
    """
    return digest == _EMPTY or digest in known.digests or digest in _stored()


def remember(digests: Iterable[str]) -> bool:
    """Trust contents by their `digests`, now and from now on; return whether the store could be written.

    >>> remember([digest_of(b"my = 1")]), is_trusted(digest_of(b"my = 1"))
    (True, True)
    """
    given = set(digests)
    known.digests |= given
    new = sorted(given - _stored() - {_EMPTY})
    if not new:
        return True
    path = store()
    if path is None:
        return False
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # A line of its own, also behind one that a full disk has cut, in one step.
            text = "\n" + "\n".join(new) + "\n"
            return os.write(file, text.encode()) == len(text)
        finally:
            os.close(file)
    except OSError:
        return False


def _stored() -> set[str]:
    path = store()
    try:
        text = "" if path is None else path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return set()
    return {line for line in text.split("\n") if re.fullmatch("[0-9a-f]{64}", line)}


def neighbours(file: Path) -> list[Path]:
    """Return a Python `file` and all that it imports from its own directory, directly or through others.

    A package is taken whole. What is installed, or comes with Python, is not beside the file.

    >>> neighbours(Path("nowhere/net.py"))
    [PosixPath('nowhere/net.py')]
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
    except (FileNotFoundError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # importing it will say so, if it ever is
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def digests_of(files: Iterable[Path]) -> dict[Path, str]:
    """Return the digest of each of some `files` that is there, and of what they import from beside them.

    >>> digests_of([Path("nowhere/net.py")])
    {}
    """
    parts = dict.fromkeys(part for file in files for part in neighbours(file.absolute()))
    return {part: digest_of(part.read_bytes()) for part in parts if part.is_file()}


def own(files: Sequence[Path]) -> None:
    """Let Python `files` that the user named run, with what they import, in this process.

    >>> own([])
    """
    known.digests.update(digests_of(files).values())


def admit(source: Path, files: Sequence[Path], *, trust: bool) -> None:
    """Let Python `files` that a file `source` names run, if the user trusts their contents.

    With `trust` they, and all that they import from beside them, are trusted from now on. What they import
    is checked once more when it is imported, wherever the import stands.

    >>> admit(Path("recipe.yaml"), [], trust=False)
    """
    found = digests_of(files)
    if trust:
        remember(found.values())
    unknown = {path: digest for path, digest in found.items() if not is_trusted(digest)}
    if unknown:
        raise _untrusted(f"{source} brings code", unknown)
    for file in files:
        known.files.add(os.path.realpath(file))
        for parent in (os.path.abspath(file.parent), os.path.realpath(file.parent)):  # noqa: PTH100
            _guard(parent, whole=trust)


def check(path: Path, content: bytes) -> None:
    """Refuse to run the `content` of a file `path` that another file named, unless the user trusts it.

    >>> check(Path("mine.py"), b"named by nobody but me")
    """
    real = os.path.realpath(path)
    if real in known.files:
        _check(path, content)
    elif str(Path(real).parent) in known.folders:
        own([path])  # the user named it, beside what a file named


def _check(path: Path, content: bytes) -> None:
    folder = _guarded(path)
    digest = digest_of(content)
    if folder is not None and known.folders[folder]:
        remember([digest])
    elif not is_trusted(digest):
        raise _untrusted("code that is trusted imports more", {path: digest})


def _untrusted(what: str, files: dict[Path, str]) -> UntrustedError:
    lines = [f"    {digest}  {path}" for path, digest in list(files.items())[:_SHOWN]]
    if len(files) > _SHOWN:
        lines.append(f"    and {len(files) - _SHOWN} files more")
    told = [
        f"{what} that did not come from you and would run with all your rights:",
        *lines,
        "read it; if you trust it, run the same command with --trust (in Python, trust=True): it is then "
        "trusted as long as it stays the same",
    ]
    return UntrustedError(printable("\n".join(told)))


def _guard(folder: str, *, whole: bool) -> None:
    known.folders[folder] = whole or known.folders.get(folder, False)
    if not any(isinstance(finder, _Guard) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Guard())


def _guarded(path: Path) -> str | None:
    """Return the folder of foreign code that a file is in, if it is in one."""
    # A link in the folder leads out of it, and one elsewhere into it.
    for place in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):  # noqa: PTH100
        for folder in place.parents:
            if str(folder) in known.folders:
                return str(folder)
    return None


class _Guard(MetaPathFinder):
    """Lets imports take from folders of foreign code what is trusted, from its text alone."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return the module as Python would find it, if it is in such a folder."""
        if name in sys.builtin_module_names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not spec.has_location or spec.origin is None:
            return None
        file = Path(spec.origin)
        if _guarded(file) is None:
            return None
        content = file.read_bytes()
        _check(file, content)
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader, spec.cached = _FromText(name, spec.origin, content), None
        return spec


class _FromText(SourceFileLoader):
    """Runs the very text that was checked, and never compiled bytes beside it."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self.content = content

    def get_code(self, fullname: str) -> CodeType:
        """Compile the text."""
        code: CodeType = compile(self.content, self.path, "exec", dont_inherit=True)
        return code
