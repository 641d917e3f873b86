"""One lookup for every kind of part: a registered name, `name(option=1)`, or `file.py:Object`.

A part of your own works like a built-in one wherever a name is taken: register it, or name its file.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from robustmetric.validate import UserError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

KINDS = (
    "sampler", "destination", "term", "defense", "attack", "search", "model", "data set", "logger", "check",
)  # fmt: skip
"""Every kind of part that can be registered."""


class UserCodeError(UserError):
    """Code of the user's own that failed: the message ends with its traceback."""


class Registry(Mapping[str, Callable[..., T]], Generic[T]):
    """The parts of one `kind`: what makes each, by name.

    `expects` is the class that a part must be of; None if a part is a function of its own.

    >>> shapes = Registry("shape", dict)
    >>> @shapes.register("square")
    ... def square(*, side=1):
    ...     return {"side": side}
    >>> shapes.make("square(side=2)")
    {'side': 2}
    >>> shapes.make("squire")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown shape 'squire' (did you mean 'square'?); known: square
    """

    def __init__(self, kind: str, expects: type[Any] | None = None) -> None:
        self.kind, self.expects = kind, expects
        self._known: dict[str, Callable[..., T]] = {}

    def __getitem__(self, name: str) -> Callable[..., T]:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def register(self, name: str, **fixed: Any) -> Callable[[F], F]:
        """Decorate a class or a function that makes a part, to be found by `name`; `fixed` options are set.

        A name that is taken is refused, unless it is the same file that defines the part again.
        """

        def add(factory: F) -> F:
            before = self._known.get(name)
            if before is not None and _home(before) != _home(factory):
                raise UserError(
                    f"the {self.kind} {name!r} is registered already, by {_home(before)}: choose another name"
                )
            self._known[name] = partial(factory, **fixed) if fixed else factory
            return factory

        return add

    def find(self, text: str) -> tuple[Callable[..., T], dict[str, Any]]:
        """Return what makes the part that `text` names, and the options in its brackets."""
        if text in self._known:
            return self._known[text], {}
        name, options = take_apart(self.kind, text)
        if (source := file_of(name)) is not None:
            return _from_file(self.kind, *source, self.expects), options
        return lookup(self.kind, name, self._known), options

    def make(self, text: str, /, offered: Mapping[str, Any] | None = None, **options: Any) -> T:
        """Make the part that `text`, such as ``"name(option=2)"``, names.

        `options` come beside those in the brackets; all must be options of the part. What is `offered` is the
        default of an option of that name, and left out where the part has none.
        """
        factory, given = self.find(text)
        if self.expects is not None and isinstance(factory, self.expects):
            if given or options:
                raise UserError(f"{self.kind} {text!r} is made already and takes no options: name its class")
            made: T = factory
            return made
        fixed = getattr(factory, "keywords", {})
        if twice := [name for name in given if name in options or name in fixed]:
            raise UserError(f"{self.kind} {text!r}: {twice[0]} is given already; leave it out")
        whole = {**{k: v for k, v in (offered or {}).items() if _accepts(factory, k)}, **options, **given}
        _check_options(self.kind, text, factory, whole)
        if (source := file_of(text)) is None:
            made = factory(**whole)
        else:
            with _neighbours(source.file.absolute().parent):
                made = _run(text, partial(factory, **whole))
        if self.expects is not None and not isinstance(made, self.expects):
            raise UserError(
                f"{self.kind} {text!r} made a {type(made).__name__}; it must make a {self.expects.__name__}"
            )
        return made

    def bind(self, text: str) -> Callable[..., T]:
        """Return the function that `text` names with its options set, for kinds whose parts are functions."""
        factory, given = self.find(text)
        parameters = inspect.signature(factory).parameters.values()
        # What has no default is passed by those who call the function.
        known = [p.name for p in parameters if p.default is not p.empty and _accepts(factory, p.name)]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name in given:
            if name not in known and not open_ended:
                raise UserError(
                    f"{self.kind} {text!r} has no option {name!r}; its options: {', '.join(known) or 'none'}"
                )
        return partial(factory, **given) if given else factory


_REGISTRIES: dict[str, Registry[Any]] = {kind: Registry(kind) for kind in KINDS}


def registry(kind: str, expects: type[Any] | None = None) -> Registry[Any]:
    """Return the registry of a `kind`; the module that defines the kind says what it `expects`.

    >>> registry("search").kind
    'search'
    >>> registry("atack")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown kind of part 'atack' (did you mean 'attack'?); known: attack, ...
    """
    found = lookup("kind of part", kind, _REGISTRIES)
    found.expects = expects or found.expects
    return found


def register(kind: str, name: str, **fixed: Any) -> Callable[[F], F]:
    """Decorate a class or a function so that its `kind` of part is found by `name` everywhere.

    `fixed` options are set and can no longer be given.

    >>> import robustmetric as rm
    >>> @rm.register("search", "still")
    ... class Still(rm.attacks.Search):
    ...     follows_gradient = False
    ...     def __call__(self, images, objective, budget, *, draws, start=None):
    ...         return images
    >>> rm.attacks.make_search("still")
    Still()
    """
    return registry(kind).register(name, **fixed)


def lookup(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Return ``known[name]``; an unknown `name` of a `kind` raises an error with the nearest and all known.

    >>> lookup("model", "resnet19", {"resnet18": 18, "resnet50": 50, "c2f2": 2})
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown model 'resnet19' (did you mean 'resnet18'?); known: c2f2, resnet18, ...
    """
    if name in known:
        return known[name]
    raise UserError(unknown(kind, name, known))


def unknown(kind: str, name: str, known: Mapping[str, object]) -> str:
    """Return a message that a `name` of a `kind` is unknown, with the nearest and all of `known`.

    >>> unknown("sampler", "X", {"R": 0, "M": 1})
    "unknown sampler 'X'; known: M, R"
    """
    nearest = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.5)
    original = [k for k in known if nearest and k.lower() == nearest[0]]
    hint = f" (did you mean {original[0]!r}?)" if original else ""
    return f"unknown {kind} {name!r}{hint}; known: {', '.join(sorted(known))}"


def split_names(text: str, separator: str = ",") -> list[str]:
    """Split a `text` at each `separator` that is not in brackets or quotes, without blanks.

    >>> split_names("CA+, SP-QA+(m=2,keep=3)")
    ['CA+', 'SP-QA+(m=2,keep=3)']
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == separator and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def take_apart(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """Split `text`, such as ``"name(option=2)"``, into name and options; errors call it a `kind`.

    >>> take_apart("search", "pgd(restarts=2, best=True)")
    ('pgd', {'restarts': 2, 'best': True})
    """
    name, bracket, inside = text.partition("(")
    if not bracket:
        return name.strip(), {}
    if not inside.rstrip().endswith(")"):
        raise UserError(f"{kind} {text!r} has no closing bracket; write NAME(option=value, ...)")
    options: dict[str, Any] = {}
    for part in split_names(inside.rstrip()[:-1]):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key in options:
            raise UserError(f"{kind} {text!r}: {key} is given already; leave it out")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise UserError(
                f"{kind} {text!r}: {part!r} must be option=value, a number, True, False or a quoted text; "
                "write NAME(option=value, ...)"
            ) from None
    return name.strip(), options


class Source(NamedTuple):
    """A Python `file` and the `name` of an object in it.

    >>> Source(Path("mine.py"), "Small").name
    'Small'
    """

    file: Path
    name: str


def file_of(text: str) -> Source | None:
    """Return the file and the object that `text`, such as ``file.py:Object(option=1)``, names, if it does.

    >>> file_of("nets/mine.py:Small(width=8)")
    Source(file=PosixPath('nets/mine.py'), name='Small')
    >>> file_of("resnet18") is None
    True
    """
    found = re.fullmatch(r"\s*(.+\.py):(\w+)\s*(?:\(.*\))?\s*", text, re.DOTALL)
    return None if found is None else Source(Path(found[1]).expanduser(), found[2])


def without_folder(text: str) -> str:
    """Return `text`, where it names an object of a file, without the folder that the file is in.

    >>> without_folder("nets/mine.py:Small(width=8)"), without_folder("resnet18")
    ('mine.py:Small(width=8)', 'resnet18')
    """
    source = file_of(text)
    return text if source is None else f"{source.file.name}:{text.rpartition('.py:')[2]}"


def _from_file(kind: str, file: Path, name: str, expects: type[Any] | None) -> Any:
    """Import a Python file of the user's, once, and return the object of that name in it."""
    module = _import(kind, file)
    if not hasattr(module, name):
        public = {n: v for n, v in vars(module).items() if not n.startswith("_") and _defined_in(v, module)}
        raise UserError(f"{file}: {unknown('name', name, public)}; write FILE.py:NAME for the {kind}")
    found = getattr(module, name)
    if not callable(found) and not (expects is not None and isinstance(found, expects)):
        raise UserError(
            f"{name!r} of {file} is a {type(found).__name__}; the {kind} must be a class or a function"
        )
    return found


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


def _import(kind: str, file: Path) -> ModuleType:
    path = file.absolute()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file} to take the {kind} from")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if path in _IMPORTED and _IMPORTED[path][0] == digest:
        return _IMPORTED[path][1]
    key = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    module = ModuleType(f"robustmetric_user_{path.stem}_{key}")
    module.__file__ = str(path)
    # As an import would do it: the file may import its neighbours, and its classes know their module.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[module.__name__] = module
    _IMPORTED[path] = (digest, module)
    try:
        # From its text and never from compiled bytes, which may be of another text.
        with _neighbours(path.parent):
            _run(str(file), lambda: exec(compile(content, str(path), "exec"), vars(module)))  # noqa: S102
    except BaseException:
        del _IMPORTED[path], sys.modules[module.__name__]
        raise
    return module


@contextmanager
def _neighbours(folder: Path) -> Iterator[None]:
    """Let imports find what is in this folder first, also where another has modules of the same names."""
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


def _run(what: str, code: Callable[[], Any]) -> Any:
    """Run code of the user's; whatever it raises is told once, with its own traceback."""
    try:
        return code()
    except UserError:
        raise
    except Exception as error:
        if (own := own_traceback(error)) is None:
            own = "".join(traceback.format_exception_only(error)).rstrip()
        raise UserCodeError(f"{what} failed with {type(error).__name__}: {error}\n{own}") from error


def _home(factory: Callable[..., Any]) -> str:
    """Say where a part is defined."""
    plain = factory.func if isinstance(factory, partial) else factory
    return f"{plain.__module__}.{getattr(plain, '__qualname__', type(plain).__qualname__)}"


def _defined_in(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _accepts(factory: Callable[..., Any], option: str) -> bool:
    """Return whether a part has an option of this name."""
    try:
        known = inspect.signature(factory).parameters
    except ValueError:  # builtins have no signature
        return True
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if option in known:
        return known[option].kind in kinds
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())


def _check_options(kind: str, text: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # builtins have no signature
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        fixed = getattr(factory, "keywords", {})
        allowed = ", ".join(p for p in signature.parameters if p not in fixed)
        name = text.partition("(")[0].strip()
        raise UserError(f"{kind} {name!r} {error}; its options: {allowed or 'none'}") from None
