"""The paper's notation, read and written: from "HM[S,LGA]&ICS" to a defense and back."""

from __future__ import annotations

import inspect
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn, TypeVar

from robustmetric.destination import DESTINATIONS, Benign, Boosted, Constant, Destination, Gradual, OfMargin
from robustmetric.errors import UserError, describe
from robustmetric.losses import ROLES, TERMS, SextupletTerm, Term
from robustmetric.registry import Part, Registry, parse_spec, registry, unknown, with_options
from robustmetric.triplets import SAMPLERS, Sampler
from robustmetric.usercode import UserCodeError, file_of

T = TypeVar("T")
P = TypeVar("P", bound=Part)

DEFENSES: Registry[Any] = registry("defense")
FAMILIES = ("N/A", "EST", "ACT", "HM", "min-max")
"""Those of the paper, which always have brackets."""
LONGEST, DEEPEST = 2000, 50
"""Characters of a name, and brackets within brackets."""


def write_name(
    head: str, source: Part | None = None, destination: Part | None = None, terms: Sequence[Part] = ()
) -> str:
    """Return the name of a defense of the family `head` with these parts.

    >>> write_name("HM", SAMPLERS["S"](), Gradual(), [SextupletTerm()])
    'HM[S,LGA]&ICS'
    """
    inside = ",".join(str(part) for part in (source, destination) if part is not None)
    return "&".join([f"{head}[{inside}]" if inside else head, *map(str, terms)])


def read_defense(name: str, *, margin: float, reference: bool, **settings: Any) -> Any:
    """Return the defense that a `name` in the paper's notation describes.

    `margin`, `reference` and the `settings` are those of `robustmetric.defense`.
    """
    if not isinstance(name, str) or len(name) > LONGEST:
        raise UserError(f"a defense is given by its name, at most {LONGEST} characters, not {describe(name)}")
    first, *after = _Piece(name, 0, name).split("&")
    family, items = first.call("[]", "only & and a term may follow the bracket, such as HM[S,LGA]&ICS")
    head, kind = _family(family, bare=items is None)
    takes = getattr(kind, "takes", ("source",))  # a function that makes a defense has none
    if after and "terms" not in takes:
        after[0].fail(f"HM, ACT, EST and what is derived from them take terms after &; {head} does not")
    reader, parts = _Reader(margin, reference=reference), dict[str, Any]()
    if items is not None:
        two = "destination" in takes and head != "min-max"
        if len(items) != 1 + two:
            wanted = "a source and a destination, such as [S,LGA]" if two else "one sampler, such as [S]"
            items[0].fail(f"{head} takes {wanted}", path=True)
        parts["source"] = reader.sampler(items[0])
        if "destination" in takes:
            parts["destination"] = reader.destination(items[1]) if two else Constant(2)
    if after:
        parts["terms"] = [reader.term(piece, kind) for piece in after]
    head = "HM" if head == "min-max" else head
    written = write_name(head, **parts)
    with nullcontext() if head in FAMILIES else family.blamed():
        made = DEFENSES.make(head, **parts, margin=margin, **settings)
    if not hasattr(made, "written"):
        call = "super().__init__(source, budget=budget, margin=margin, seed=seed)"
        family.fail(f"{type(made).__name__}.__init__ must call {call}")
    made.written = written
    if reference and hasattr(made, "reference"):
        made.reference = True
    return made


def _family(piece: _Piece, *, bare: bool) -> tuple[str, Any]:
    """Return the text of the family before the brackets, and the class or function that makes it."""
    name = piece.name(DEFENSES)
    if bare and (name in FAMILIES or (name not in DEFENSES and file_of(piece.text) is None)):
        form = "a defense is written FAMILY[…], such as HM[S,LGA]&ICS, N/A[R], EST[R] or ACT[S]"
        known = name in ("", *FAMILIES)
        piece.fail(form if known else f"{form}; {unknown('defense', name, DEFENSES)}", path=not known)
    text = piece.spec(DEFENSES)
    with piece.blamed():
        factory, _ = DEFENSES.find(text)
    return text, factory.func if isinstance(factory, partial) else factory


class _Reader:
    """Makes the parts of one defense; γ is their `margin` unless they have their own."""

    def __init__(self, margin: float, *, reference: bool) -> None:
        self.margin, self.reference = margin, reference
        self.samplers: dict[str, Sampler] = {}

    def make(self, piece: _Piece, parts: Registry[P]) -> P:
        """Make a registered part or one of a file; with `reference` its `itself` is True."""
        text = piece.spec(parts)
        with piece.blamed():
            itself = self.reference and "itself" in inspect.signature(parts.find(text)[0]).parameters
            made = parts.make(text, {"margin": self.margin, **({"itself": True} if itself else {})})
        object.__setattr__(made, "written", text)  # a sampler may be frozen
        return made

    def sampler(self, piece: _Piece) -> Sampler:
        text = piece.spec(SAMPLERS)
        # One text is one sampler, whatever it remembers from call to call: HM[X,X] perturbs nothing.
        if text not in self.samplers:
            self.samplers[text] = self.make(piece, SAMPLERS)
        return self.samplers[text]

    def destination(self, piece: _Piece) -> Destination:
        name = piece.name(DESTINATIONS, SAMPLERS)
        if name in Gradual.NAMES.values():
            gradual = partial(DESTINATIONS[name], margin=self.margin)
            return _with_symbols(gradual, piece.arguments, {"u": "u"}, name)
        if name == "gB":
            if not piece.arguments:
                piece.fail("gB takes a destination to raise, such as gB(M) or gB(M,ξ=0.1)")
            base, *symbols = piece.arguments
            boosted = partial(Boosted, self.destination(base), margin=self.margin)
            return _with_symbols(boosted, symbols, {"ξ": "xi", "u": "u"}, name)
        sampler = name in SAMPLERS
        if file_of(piece.text) is not None:
            text = piece.spec(DESTINATIONS)
            with piece.blamed():
                factory, _ = DESTINATIONS.find(text)
            sampler = isinstance(factory, type) and issubclass(factory, Sampler)
        elif not sampler and name not in DESTINATIONS:
            return self.number(piece, name)
        if sampler and name not in DESTINATIONS:
            return Benign(self.sampler(piece))
        return self.make(piece, DESTINATIONS)

    def number(self, piece: _Piece, name: str) -> Destination:
        number = re.fullmatch(rf"([+-]?)({_NUMBER})?(γ?)(?:/({_NUMBER}))?", name)
        if number is None or not (number[2] or number[3]) or float(number[4] or 1) == 0:
            known = [*SAMPLERS, *DESTINATIONS, "a number such as 0, 2 or -γ/2"]
            listed = dict.fromkeys("gB(…)" if text == "gB" else text for text in known)
            piece.fail(unknown("destination", name, listed), path=True)
        if piece.arguments:
            piece.arguments[0].fail(f"{name} takes no parameters")
        value = float(number[1] + (number[2] or "1")) / float(number[4] or 1)
        with piece.blamed():
            return OfMargin(value, margin=self.margin) if number[3] else Constant(value)

    def term(self, piece: _Piece, family: Any) -> Term:
        kind, symbols = piece.name(TERMS), piece.arguments if file_of(piece.text) is None else []
        if kind == "L" and symbols:
            kind, symbols = f"L({','.join(role.plain for role in symbols[:3])})", symbols[3:]
        if kind in ROLES:
            known = {"λ": "weight", "γ": "margin"}
            made: Term = _with_symbols(partial(SextupletTerm, kind), symbols, known, kind)
        elif kind in TERMS or file_of(piece.text) is not None:
            made = self.make(piece, TERMS)
        else:
            piece.fail(unknown("term", kind, TERMS), path=True)
        with piece.blamed():
            family.check_roles(made)
        return made


_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"


def _with_symbols(make: Callable[..., T], pieces: list[_Piece], known: dict[str, str], owner: str) -> T:
    """Make an object with the `symbol=number` pieces as its keyword arguments."""
    given: dict[str, float] = {}
    for piece in pieces:
        symbol, _, text = piece.plain.partition("=")
        if symbol not in known:
            piece.fail(f"{unknown(f'parameter of {owner}', symbol, known)}; written {next(iter(known))}=0.1")
        if known[symbol] in given:
            piece.fail(f"{symbol} is given twice")
        try:
            given[known[symbol]] = float(text)
        except ValueError:
            piece.fail(f"{symbol} must be a number, not {text!r}")
        with piece.blamed():
            made = make(**given)
    return made if given else make()


@dataclass(frozen=True)
class _Piece:
    """A piece of a name that knows where it stands, so that an error can point at it."""

    text: str
    start: int
    whole: str

    @property
    def plain(self) -> str:
        """The piece in one spelling: Greek letters, ASCII minus, a tilde after its letter, no blanks."""
        text = unicodedata.normalize("NFD", self.text).replace("\u0303", "~").replace("−", "-")
        for word, letter in (("gamma", "γ"), ("lambda", "λ"), ("xi", "ξ")):
            text = re.sub(rf"(?<![A-Za-z]){word}(?![A-Za-z])", letter, text)
        return "".join(text.split())

    def cut(self, begin: int, end: int) -> _Piece:
        return _Piece(self.text[begin:end], self.start + begin, self.whole)

    def split(self, separator: str) -> list[_Piece]:
        """Split where the separator stands outside all brackets."""
        pieces, depth, begin = [], 0, 0
        for i, letter in enumerate(self.text):
            depth += (letter in "([") - (letter in ")]")
            if depth < 0:
                self.cut(i, i + 1).fail("a bracket closes that was not opened")
            if depth > DEEPEST:
                self.cut(i, i + 1).fail(f"brackets are nested deeper than {DEEPEST} times")
            if letter == separator and depth == 0:
                pieces.append(self.cut(begin, i))
                begin = i + 1
        if depth:
            self.cut(len(self.text), len(self.text)).fail("a bracket is not closed")
        return [*pieces, self.cut(begin, len(self.text))]

    def call(self, brackets: str, after: str) -> tuple[_Piece, list[_Piece] | None]:
        """Split `head(a,b)` into head and arguments, None without brackets; nothing may come `after`."""
        opened = self.text.find(brackets[0])
        if opened < 0:
            return self, None
        depths = accumulate((letter in "([") - (letter in ")]") for letter in self.text[opened:])
        closed = opened + list(depths).index(0)  # brackets are balanced: `split` has looked
        if self.text[closed] != brackets[1]:
            self.cut(closed, closed + 1).fail(f"{brackets[1]} must close what {brackets[0]} opens")
        rest = self.cut(closed + 1, len(self.text))
        if rest.plain:
            rest.fail(after, path=True)
        return self.cut(0, opened), self.cut(opened + 1, closed).split(",")

    @property
    def arguments(self) -> list[_Piece]:
        """What is in the bracket of parameters."""
        return self.call("()", "nothing may follow the bracket of parameters")[1] or []

    def name(self, *known: Registry[Any]) -> str:
        """Return the name before the bracket of parameters: as it stands if it is known, else `plain`."""
        head = self.cut(0, len(self.text.partition("(")[0]))
        name = unicodedata.normalize("NFC", head.text.strip())
        return name if any(name in parts for parts in known) else head.plain

    def spec(self, parts: Registry[Any]) -> str:
        """Return the piece in one spelling: NAME(option=value,…), its name known or in a file."""
        text = self.text.strip()
        if (source := file_of(text)) is None:
            name = self.name(parts)
            if name not in parts:
                self.fail(unknown(parts.kind, name, parts), path=True)
            text = name + (f"({','.join(piece.text for piece in self.arguments)})" if self.arguments else "")
        elif any(letter in "()[],&" for letter in str(source.file)):
            self.fail(f"the path {source.file} cannot be written here", path=True)
        with self.blamed():
            name, options = parse_spec(parts.kind, text)
        return with_options(name, options)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Point at this piece in an error that it causes; the user's own code ends with its traceback."""
        try:
            yield
        except UserCodeError:
            raise
        except (UserError, OSError) as error:
            self.fail(str(error))

    def fail(self, message: str, *, path: bool = False) -> NoReturn:
        """Raise an error that points at the piece; the cause may be a `path` with brackets."""
        if path and ".py" in self.whole:
            message += ": a path in a defense's name is without brackets, commas and &"
        blank = len(self.text) - len(self.text.lstrip())
        before = unicodedata.normalize("NFC", self.whole[: self.start + blank])
        column = sum(1 for letter in before if not unicodedata.combining(letter))
        raise UserError(f"{message}\n    {self.whole}\n    {' ' * column}^")
