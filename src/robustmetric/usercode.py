"""The user's own code: the files that parts are taken from, and errors in them told as theirs."""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from robustmetric.errors import UserError, shorten
from robustmetric.text import printable

_MODULE = "robustmetric_user"

# A path may have any letters, but x(y='file.py:Object') names no file.
OWN = re.compile(
    r"""\A(\s*)(?!(?:(?!\.py:)[^/(])*\([^/]*=[^/]*['"])(.+?\.py)(?=:(\w+)\s*(?:\(.*\))?\s*\Z)""", re.DOTALL
)
"""What a text that names an object of a file begins with: blanks and the path."""


class UserCodeError(UserError):
    """The user's own code failed: the message ends with its traceback."""


class UntrustedError(UserError):
    """Code that a run or a recipe brings along, without `trust`."""


class Source(NamedTuple):
    """A Python `file` and the `name` of an object in it."""

    file: Path
    name: str


def file_of(text: str) -> Source | None:
    """Return the file and the object that `text`, such as ``file.py:Object(option=1)``, names, if it does.

    >>> file_of("nets/mine.py:Small(width=8)")
    Source(file=PosixPath('nets/mine.py'), name='Small')
    >>> file_of("resnet18") is file_of("suite(goals='mine.py:Own(k=1)')") is None
    True
    """
    found = OWN.match(text)
    return None if found is None else Source(Path(found[2]).expanduser(), found[3])


def split_options(text: str) -> tuple[str, str]:
    """Split `text` before the bracket of its options; brackets in the path of a file do not count.

    >>> split_options("runs (new)/mine.py:Small(width=8)"), split_options("resnet18")
    (('runs (new)/mine.py:Small', '(width=8)'), ('resnet18', ''))
    """
    found = OWN.match(text)
    bracket = text.find("(", 0 if found is None else found.end())
    return (text, "") if bracket < 0 else (text[:bracket], text[bracket:])


def without_folder(text: str) -> str:
    """Return `text`, where it names an object of a file, without the folder of the file.

    >>> without_folder("nets/mine.py:Small(width=8)"), without_folder("resnet18")
    ('mine.py:Small(width=8)', 'resnet18')
    """
    found = OWN.match(text)
    return text if found is None else f"{Path(found[2]).name}{text[found.end() :]}"


def imported_files(file: Path) -> list[Path]:
    """Return a Python `file` and all that it imports from its own folder, directly or through others.

    A package is taken whole. What is installed, or comes with Python, does not count.
    """
    found, ahead = dict[Path, None](), [file]
    while ahead:
        path = ahead.pop()
        if path in found:
            continue
        found[path] = None
        for name in sorted(set(_imports(path)) - sys.stdlib_module_names - {"robustmetric"}):
            if (module := file.parent / f"{name}.py").is_file():
                ahead.append(module)
            elif (file.parent / name).is_dir():
                ahead += sorted((file.parent / name).rglob("*.py"))
    return list(found)


def _imports(file: Path) -> Iterator[str]:
    """Name the packages and modules that a file imports, wherever in it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (FileNotFoundError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # importing it will say so
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def files_below(folder: Path) -> list[Path]:
    """Return all files in a `folder` of code, sorted; compiled ones, which are never run, left out."""
    return sorted(f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)


def digest_of(files: Iterable[Path], folder: Path) -> str:
    """Return one SHA-256 of the contents of `files` and of their paths in the `folder`."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(
            f"{os.path.relpath(file, folder)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()


def untrusted(source: Path, files: Iterable[Path], folder: Path) -> UntrustedError:
    """Return the refusal of code, the `files` in a `folder`, that a file or run `source` brings along."""
    there = [file for file in files if file.is_file()]
    return UntrustedError(
        printable(
            f"{source} brings code that would run with all your rights: {shorten(there)} (sha256 "
            f"{digest_of(there, folder)}); read it, and run the same command with --trust (in Python, "
            "trust=True)"
        )
    )


_IMPORTED: dict[Path, tuple[bytes, ModuleType]] = {}


def own_traceback(error: BaseException) -> str | None:
    """Return the traceback of an `error` from the user's own file on; None if it did not pass through one.

    >>> own_traceback(ValueError("elsewhere")) is None
    True
    """
    frames = traceback.extract_tb(error.__traceback__)
    first = next((k for k, f in enumerate(frames) if Path(f.filename) in _IMPORTED), None)
    if first is None and not isinstance(error, SyntaxError):
        return None
    lines = traceback.format_list(frames[first:]) if first is not None else []
    lines += traceback.format_exception_only(error)
    return "Traceback (most recent call last):\n" + "".join(lines).rstrip()


def own_failure(error: BaseException) -> str | None:
    """Return the sentence for an `error` in the user's own code, with its traceback; None for others."""
    own = None if isinstance(error, UserError) else own_traceback(error)
    return None if own is None else f"your own code failed, with:\n{own}"


def import_file(kind: str, file: Path) -> ModuleType:
    """Import a Python `file` of the user's, once as long as it stays the same, to take a `kind` of part from.

    >>> import_file("attack", Path("nowhere.py"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no file nowhere.py to take the attack from
    """
    path = file.absolute()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file} to take the {kind} from")
    content = path.read_bytes()
    if path in _IMPORTED and _IMPORTED[path][0] == content:
        return _IMPORTED[path][1]
    key = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    module = ModuleType(f"{_MODULE}_{path.stem}_{key}")
    module.__file__ = str(path)
    # As an import would do it: the file may import its neighbours, and its classes know their module.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[module.__name__] = module
    _IMPORTED[path] = (content, module)
    try:
        with neighbours(path.parent):
            run_own(str(file), lambda: exec(compile(content, str(path), "exec"), vars(module)))  # noqa: S102
    except BaseException:
        del _IMPORTED[path], sys.modules[module.__name__]
        raise
    return module


@contextmanager
def neighbours(folder: Path) -> Iterator[None]:
    """Let imports find what is in a `folder` first, even if modules of these names are imported already."""
    beside = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    for name, module in list(sys.modules.items()):
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        if top not in beside or top in sys.stdlib_module_names or top.startswith("__") or not file:
            continue
        place = Path(file)
        own = place == folder / f"{top}.py" or place.is_relative_to(folder / top)
        # What is installed stays: others hold parts of it.
        if not own and "site-packages" not in place.parts and top != "robustmetric":
            del sys.modules[name]
    before, sys.pycache_prefix = sys.pycache_prefix, os.devnull  # compiled bytes may be of another text
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # the folder may be younger than what is known of it
    try:
        yield
    finally:
        sys.pycache_prefix = before
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def run_own(what: str, code: Callable[[], Any]) -> Any:
    """Run `code` of the user's; what it raises is told once, with its own traceback, as `what` failing."""
    try:
        return code()
    except UserError:
        raise
    except Exception as error:
        own = own_traceback(error)
        told = f"{what} failed with {type(error).__name__}: {error}"
        raise UserCodeError(told if own is None else f"{told}\n{own}") from error


def sendable(error: Exception) -> Exception:
    """Return an exception that arrives in another process as the `error` that it was, or that tells of it.

    >>> sendable(UserError("no such folder"))
    UserError('no such folder')
    """
    # Where the user's code failed is known only here.
    if (own := own_failure(error)) is not None:
        return UserError(own)
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301 (our own bytes)
            return error
    except Exception as problem:
        if isinstance(error, UserError):  # of a class that cannot be sent, as those of a user's file
            return UserError(str(error), parameter=error.parameter)
        return RuntimeError(f"{type(error).__name__}: {error} ({type(problem).__name__} in sending it)")
    return RuntimeError(f"{type(error).__name__}: {error}")


def home_of(part: Any) -> str:
    """Return where a class or function `part` is defined: a module, or a file of the user's by its name.

    >>> home_of(run_own)
    'robustmetric.usercode.run_own'
    """
    name = getattr(part, "__qualname__", type(part).__qualname__)
    own = re.fullmatch(rf"{_MODULE}_(\w+)_[0-9a-f]{{8}}", str(part.__module__))
    return f"{part.__module__}.{name}" if own is None else f"{own[1]}.py:{name}"
