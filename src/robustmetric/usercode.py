"""Code of the user's own: the files that parts are taken from, and errors in them told as theirs."""

from __future__ import annotations

import hashlib
import importlib
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from robustmetric.errors import UserError
from robustmetric.trust import check, digest_of

_MODULE = "robustmetric_user"

OWN = re.compile(r"\A(\s*)(.+?\.py)(?=:(\w+)\s*(?:\(.*\))?\s*\Z)", re.DOTALL)
"""What a text that names an object of a file begins with: blanks and the path, which may have any letters."""


class UserCodeError(UserError):
    """Code of the user's own that failed: the message ends with its traceback."""


class SentTraceError(Exception):
    """Stands for where another process failed, as text: a traceback cannot be sent."""


class Source(NamedTuple):
    """A Python `file` and the `name` of an object in it.

    >>> Source(Path("mine.py"), "Small").name
    'Small'
    """

    file: Path
    name: str


def own_file(text: str) -> re.Match[str] | None:
    """Match the path of a `text` that names an object of a file; a text in the options of another names none.

    >>> own_file("mine.py:Small(width=8)")[2], own_file("suite(goals='mine.py:Own(k=1)',steps=8)")
    ('mine.py', None)
    """
    found = OWN.match(text)
    if found is None:
        return None
    depth, quote = 0, ""
    for letter in text[found.end(3) :].strip()[:-1]:  # the bracket of its options is closed at the end
        if letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return None
    return found


def file_of(text: str) -> Source | None:
    """Return the file and the object that `text`, such as ``file.py:Object(option=1)``, names, if it does.

    >>> file_of("nets/mine.py:Small(width=8)")
    Source(file=PosixPath('nets/mine.py'), name='Small')
    >>> file_of("resnet18") is None
    True
    """
    found = own_file(text)
    return None if found is None else Source(Path(found[2]).expanduser(), found[3])


def split_options(text: str) -> tuple[str, str]:
    """Split `text` before the bracket of its options; brackets in the path of a file are none.

    >>> split_options("runs (new)/mine.py:Small(width=8)"), split_options("resnet18")
    (('runs (new)/mine.py:Small', '(width=8)'), ('resnet18', ''))
    """
    found = own_file(text)
    behind = text.find("(", 0 if found is None else found.end())
    return (text, "") if behind < 0 else (text[:behind], text[behind:])


def without_folder(text: str) -> str:
    """Return `text`, where it names an object of a file, without the folder that the file is in.

    >>> without_folder("nets/mine.py:Small(width=8)"), without_folder("resnet18")
    ('mine.py:Small(width=8)', 'resnet18')
    """
    found = own_file(text)
    return text if found is None else f"{Path(found[2]).name}{text[found.end() :]}"


_IMPORTED: dict[Path, tuple[str, ModuleType]] = {}


def own_traceback(error: BaseException) -> str | None:
    """Return the traceback of an `error` from a user's own file on; None if it did not pass through one.

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
    """Return the sentence for an `error` in a user's own code, with its traceback; None if it is elsewhere.

    >>> own_failure(ValueError("elsewhere")) is None
    True
    """
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
    check(path, content)
    digest = digest_of(content)
    if path in _IMPORTED and _IMPORTED[path][0] == digest:
        return _IMPORTED[path][1]
    key = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    module = ModuleType(f"{_MODULE}_{path.stem}_{key}")
    module.__file__ = str(path)
    # As an import would do it: the file may import its neighbours, and its classes know their module.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[module.__name__] = module
    _IMPORTED[path] = (digest, module)
    try:
        # From its text and never from compiled bytes, which may be of another text.
        with neighbours(path.parent):
            run_own(str(file), lambda: exec(compile(content, str(path), "exec"), vars(module)))  # noqa: S102
    except BaseException:
        del _IMPORTED[path], sys.modules[module.__name__]
        raise
    return module


@contextmanager
def neighbours(folder: Path) -> Iterator[None]:
    """Let imports find what is in a `folder` first, also where another has modules of the same names.

    >>> with neighbours(Path.cwd()):
    ...     sys.path[0] == str(Path.cwd())
    True
    """
    beside = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        file = getattr(module, "__file__", None)
        if top not in beside or top in sys.stdlib_module_names or top.startswith("__") or not file:
            continue
        place = Path(file)
        own = place == folder / f"{top}.py" or place.is_relative_to(folder / top)
        # What is installed stays: others hold parts of it.
        if not own and "site-packages" not in place.parts and top != "robustmetric":
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # the folder may be younger than what is known of it
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def run_own(what: str, code: Callable[[], Any]) -> Any:
    """Run `code` of the user's; whatever it raises is told once, with its own traceback, as `what` failing.

    >>> run_own("mine.py:half", lambda: 4 / 2)
    2.0
    """
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
    # Where code of the user's failed is known only here.
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
