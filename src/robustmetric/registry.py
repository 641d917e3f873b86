"""One lookup for every kind of part: a registered name, `name(option=1)`, or `file.py:Object`.

Your own part works like a built-in one wherever a name is taken: register it, or name its file.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from robustmetric.errors import UserError, brief, check_signature
from robustmetric.usercode import file_of, home_of, import_file, neighbours, run_own, split_options

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

KINDS = (
    "sampler", "destination", "term", "defense", "attack", "search", "model", "data set", "logger", "check",
)  # fmt: skip
"""Every kind of part that can be registered."""


class Contract:
    """What parts derive from: the methods in `signatures` must take what they are called with."""

    signatures: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for signature in cls.signatures:
            name, _, parameters = signature.removesuffix(")").partition("(")
            check_signature(f"{cls.__name__}.{name}", getattr(cls, name), f"self, {parameters}")


class Part(Contract):
    """A part of a defense. As text it is what it was made from, else its `name`, else that of its class."""

    name: str = ""
    written: str = ""

    def __str__(self) -> str:
        return self.written or self.name or type(self).__name__


class Registry(dict[str, Callable[..., T]], Generic[T]):
    """The parts of one `kind`: what makes each, by name.

    `expects` is the class that a part must be of; None if a part is a function. The caller supplies the
    options named in `passed`.

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
        super().__init__()
        self.kind, self.expects = kind, expects
        self.passed: tuple[str, ...] = ()

    def register(self, name: str, **fixed: Any) -> Callable[[F], F]:
        """Decorate a class or a function that makes a part, to be found by `name`; `fixed` options are set.

        A name that is taken is an error, unless the same file defines the part again.
        """

        def add(factory: F) -> F:
            before = self.get(name)
            before = before.func if isinstance(before, partial) else before
            # Two copies of a file define the same.
            if before is not None and (home := home_of(before)) != home_of(factory):
                raise UserError(f"the {self.kind} {name!r} is registered already, by {home}: choose another")
            self[name] = partial(factory, **fixed) if fixed else factory
            return factory

        return add

    def find(self, text: str) -> tuple[Callable[..., T], dict[str, Any]]:
        """Return what makes the part that `text` names, and the options in its brackets."""
        if text in self:
            return self[text], {}
        name, options = parse_spec(self.kind, text)
        if (source := file_of(text)) is not None:
            return _from_file(self.kind, *source, self.expects), options
        return lookup(self.kind, name, self), options

    def make(self, text: str, /, offered: Mapping[str, Any] | None = None, **options: Any) -> T:
        """Make the part that `text`, such as ``"name(option=2)"``, names.

        `options` are added to those in the brackets; all must be options of the part. `offered` are defaults
        for the options of these names that the part has.
        """
        factory, given = self.find(text)
        what, expects = f"{self.kind} {text!r}", self.expects or object
        if self.expects is not None and isinstance(factory, expects):
            if given or options:
                raise UserError(f"{what} is an instance and takes no options; name its class")
            return cast("T", factory)
        fixed = getattr(factory, "keywords", {})
        if twice := [name for name in given if name in {*options, *fixed, *self.passed}]:
            raise UserError(f"{what}: {twice[0]} is given already; leave it out")
        if isinstance(factory, type) and not issubclass(factory, expects):
            raise UserError(
                f"{what} is the class {factory.__name__}; it must be derived from {expects.__name__}"
            )
        signature = inspect.signature(factory)
        found = {name: value for name, value in (offered or {}).items() if _accepts(signature, name)}
        found |= {**options, **given}
        try:
            signature.bind(**found)
        except TypeError as error:
            allowed = ", ".join(p for p in signature.parameters if p not in {*self.passed, *fixed})
            name = split_options(text)[0].strip()
            raise UserError(f"{self.kind} {name!r} {error}; its options: {allowed or 'none'}") from None
        if (source := file_of(text)) is None:
            made = factory(**found)
        else:
            with neighbours(source.file.absolute().parent):
                made = run_own(text, partial(factory, **found))
        if not isinstance(made, expects):
            raise UserError(f"{what} made a {type(made).__name__}; it must make a {expects.__name__}")
        return cast("T", made)

    def bind(self, text: str) -> Callable[..., T]:
        """Return the function that `text` names with its options set, for kinds whose parts are functions."""
        factory, given = self.find(text)
        parameters = inspect.signature(factory).parameters.values()
        # What has no default is passed by those who call the function.
        known = [p.name for p in parameters if p.default is not p.empty and p.kind in _BY_NAME]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if wrong := [name for name in given if name not in known and not open_ended]:
            listed = ", ".join(known) or "none"
            raise UserError(f"{self.kind} {text!r} has no option {wrong[0]!r}; its options: {listed}")
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
    ...     def minimise(self, problem):
    ...         return problem.images
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


def unknown(
    kind: str, name: str, known: Mapping[str, object], synonyms: Mapping[str, str] | None = None
) -> str:
    """Return a message that a `name` of a `kind` is unknown, with the nearest and all of `known`.

    `synonyms` are names that others use for some of them, in lower case.

    >>> unknown("sampler", "X", {"R": 0, "M": 1})
    "unknown sampler 'X'; known: M, R"
    """
    meant = (synonyms or {}).get(name.lower(), name.lower())
    nearest = difflib.get_close_matches(meant, [k.lower() for k in known], n=1, cutoff=0.5)
    original = [k for k in known if nearest and k.lower() == nearest[0]]
    hint = f" (did you mean {original[0]!r}?)" if original else ""
    return f"unknown {kind} {brief(name)}{hint}; known: {', '.join(sorted(known))}"


def split_names(text: str) -> list[str]:
    """Split a `text` at each comma that is not in brackets or quotes, without blanks.

    >>> split_names("CA+, SP-QA+(m=2,keep=3)")
    ['CA+', 'SP-QA+(m=2,keep=3)']
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def parse_spec(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """Split `text`, such as ``"name(option=2)"``, into name and options; errors call it a `kind`.

    >>> parse_spec("search", "pgd(restarts=2, best=True)")
    ('pgd', {'restarts': 2, 'best': True})
    """
    name, bracket = split_options(text)
    if not bracket:
        return name.strip(), {}
    if not bracket.rstrip().endswith(")"):
        raise UserError(f"{kind} {brief(text)} has no closing bracket; write NAME(option=value, ...)")
    try:
        call = ast.parse(f"part{bracket.strip()}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        options = {option.arg: ast.literal_eval(option.value) for option in call.keywords}
        if None in options or len(options) < len(call.keywords):
            raise ValueError
        return name.strip(), cast("dict[str, Any]", options)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise UserError(
            f"{kind} {brief(text)}: options must be option=value, each once and a number, True, False or a "
            "quoted text; write NAME(option=value, ...)"
        ) from None


def changed_options(part: Any, *but: str) -> dict[str, Any]:
    """Return the options of a dataclass, `part`, that differ from their defaults, without `but`."""
    options = {f.name: f.default for f in fields(part) if f.name not in but}
    return {name: value for name, usual in options.items() if (value := getattr(part, name)) != usual}


def with_options(name: str, options: dict[str, Any], comma: str = ",") -> str:
    """Return a `name` with `options`, a `comma` between them, in the bracket at its end if it has one.

    >>> with_options("SP-QA+", {"m": 2, "xi": 0.5}), with_options("gB(M)", {"u": 1.0})
    ('SP-QA+(m=2,xi=0.5)', 'gB(M,u=1.0)')
    """
    given = comma.join(f"{key}={value!r}" for key, value in options.items())
    if not given:
        return name
    return f"{name[:-1]}{comma}{given})" if name.endswith(")") else f"{name}({given})"


def with_symbols(name: str, **given: float | None) -> str:
    """Return a `name` with the numbers that are `given`.

    >>> with_symbols("ICS", λ=0.5, γ=None)
    'ICS(λ=0.5)'
    """
    return with_options(name, {symbol: float(v) for symbol, v in given.items() if v is not None})


def _from_file(kind: str, file: Path, name: str, expects: type[Any] | None) -> Any:
    """Import a Python file of the user's, once, and return the object of that name in it."""
    module = import_file(kind, file)
    if not hasattr(module, name):
        defined = (n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__)
        public = dict.fromkeys(n for n in defined if not n.startswith("_"))
        raise UserError(f"{file}: {unknown('name', name, public)}; write FILE.py:NAME for the {kind}")
    found = getattr(module, name)
    if not callable(found) and not (expects is not None and isinstance(found, expects)):
        raise UserError(
            f"{name!r} of {file} is a {type(found).__name__}; the {kind} must be a class or a function"
        )
    return found


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _accepts(signature: inspect.Signature, option: str) -> bool:
    known = signature.parameters
    if option in known:
        return known[option].kind in _BY_NAME
    return any(p.kind is p.VAR_KEYWORD for p in known.values())
