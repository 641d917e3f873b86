"""The paper's notation, read and written: from "HM[S,LGA]&ICS" to a defense and back."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn, TypeVar

from robustmetric.destination import DESTINATIONS, Benign, Boosted, Constant, Destination, Gradual, OfMargin
from robustmetric.errors import UserError, describe
from robustmetric.losses import ROLES, TERMS, SextupletTerm, Term
from robustmetric.registry import Registry, parse_spec, registry, signature_of, unknown
from robustmetric.triplets import SAMPLERS, Sampler
from robustmetric.usercode import UserCodeError, file_of, split_options

T = TypeVar("T")

DEFENSES: Registry[Any] = registry("defense")
FAMILIES = ("N/A", "EST", "ACT", "HM", "min-max")
"""Those of the paper, which always have brackets."""
LONGEST, DEEPEST = 2000, 50
"""Characters of a name, and brackets within brackets."""


# --- writing ----------------------------------------------------------------------------------------------


def write_name(head: str, parts: Mapping[str, Any], texts: Mapping[int, str] | None = None) -> str:
    """Return the name of a defense of the family `head` with a source, a destination and terms in `parts`.

    `texts` are those of parts that were made from a text, by their id.

    >>> write_name("HM", {"source": SAMPLERS["S"](), "destination": Gradual(), "terms": [SextupletTerm()]})
    'HM[S,LGA]&ICS'
    """
    given = (parts.get("source"), parts.get("destination"))
    inside = ",".join(name_of(part, texts) for part in given if part is not None)
    terms = (name_of(term, texts) for term in parts.get("terms", ()))
    return "&".join([f"{head}[{inside}]" if inside else head, *terms])


def name_of(part: object, texts: Mapping[int, str] | None = None) -> str:
    """Return the name of a `part` of a defense: its text in `texts`, by its id, else the paper's.

    A part of your own that was not made from a text goes by its class.

    >>> name_of(Boosted(OfMargin(-0.5), xi=0.1)), name_of(SextupletTerm("L(a,a~,n~)", weight=0.1))
    ('gB(-γ/2,ξ=0.1)', 'L(a,ã,ñ,λ=0.1)')
    """
    if texts and id(part) in texts:
        return texts[id(part)]
    if isinstance(part, Benign):
        return name_of(part.sampler, texts)
    if isinstance(part, OfMargin):
        return _multiple(part.factor)
    if isinstance(part, Constant):
        return str(int(part.value)) if part.value.is_integer() else repr(part.value)
    if isinstance(part, Gradual):
        return _with_options(Gradual.NAMES[part.power], u=part.u)
    if isinstance(part, Boosted):
        return _with_options(f"gB({name_of(part.base, texts)})", ξ=part.xi, u=part.u)
    if isinstance(part, SextupletTerm):
        kind = unicodedata.normalize("NFC", part.kind.replace("~", "\u0303"))
        return _with_options(kind, λ=part.weight, γ=part.margin)
    return str(getattr(part, "name", "") or type(part).__name__)


def _with_options(name: str, **given: float | None) -> str:
    """Return a `name` with the options that are `given`, in its bracket if it has one already."""
    options = ",".join(f"{key}={float(value)!r}" for key, value in given.items() if value is not None)
    if not options:
        return name
    return f"{name[:-1]},{options})" if name.endswith(")") else f"{name}({options})"


def _multiple(factor: float) -> str:
    """Return a multiple of γ, as a fraction if that is exact."""
    part = Fraction(factor).limit_denominator(1000)
    if float(part) != factor:
        return f"{factor!r}γ"
    above = {1: "γ", -1: "-γ"}.get(part.numerator, f"{part.numerator}γ")
    return above if part.denominator == 1 else f"{above}/{part.denominator}"


# --- reading ----------------------------------------------------------------------------------------------


def read_defense(name: str, *, margin: float, reference: bool, **settings: Any) -> Any:
    """Return the defense that a `name` in the paper's notation describes.

    `margin`, `reference` and the `settings` are those of `robustmetric.defense`.
    """
    if not isinstance(name, str) or len(name) > LONGEST:
        raise UserError(f"a defense is given by its name, at most {LONGEST} characters, not {describe(name)}")
    first, *after = _Part(name, 0, name).split("&")
    family, inside, rest = first.enclosed("[", "]")
    if rest.plain:
        wanted = "only & and a term may follow the bracket, such as HM[S,LGA]&ICS"
        rest.fail(wanted + _about_paths(rest))
    head, kind = _family(family, bare=inside is None)
    takes = getattr(kind, "takes", ("source",))  # a function that makes a defense has none
    if after and "terms" not in takes:
        why = "perturbs nothing" if head == "N/A" else "is derived from none of them"
        after[0].fail(f"HM, ACT and EST take terms after &; {head} does not, for it {why}")
    reader = _Reader(margin, reference=reference)
    parts: dict[str, Any] = {}
    if inside is not None:
        items = inside.split(",")
        two = "destination" in takes and head != "min-max"
        if len(items) != (2 if two else 1):
            wanted = "a source and a destination, such as [S,LGA]" if two else "one sampler, such as [S]"
            inside.fail(f"{head} takes {wanted}{_about_paths(inside)}")
        parts["source"] = reader.sampler(items[0])
        if "destination" in takes:
            parts["destination"] = reader.destination(items[1]) if two else Constant(2)
    if after:
        parts["terms"] = [reader.term(part, kind) for part in after]
    head = "HM" if head == "min-max" else head
    written = write_name(head, parts, reader.texts)
    if reference and "reference" in signature_of(DEFENSES.find(head)[0]).parameters:
        parts["reference"] = True
    with nullcontext() if head in FAMILIES else family.blamed():
        made = DEFENSES.make(head, **parts, margin=margin, **settings)
    if not hasattr(made, "written"):
        family.fail(
            f"{type(made).__name__}.__init__ must call super().__init__(source, budget=budget, "
            "margin=margin, seed=seed)"
        )
    made.written = written
    if after:
        made.term_kinds = [reader.kind_of(term) for term in parts["terms"]]
    return made


def _family(part: _Part, *, bare: bool) -> tuple[str, Any]:
    """Return the text of the family before the brackets, and the class or function that makes it."""
    name = _bare(part, DEFENSES)
    if bare and (name in FAMILIES or (name not in DEFENSES and file_of(part.text) is None)):
        form = "a defense is written FAMILY[…], such as HM[S,LGA]&ICS, N/A[R], EST[R] or ACT[S]"
        part.fail(form if name in ("", *FAMILIES) else f"{form}; {_unknown(part, DEFENSES, name)}")
    text = _written(part, DEFENSES)
    with part.blamed():
        factory, _ = DEFENSES.find(text)
    return text, factory.func if isinstance(factory, partial) else factory


class _Reader:
    """Makes the parts of one defense; `texts` are those of the parts that cannot name themselves, by id."""

    def __init__(self, margin: float, *, reference: bool) -> None:
        self.margin, self.reference = margin, reference
        self.texts: dict[int, str] = {}
        self.samplers: dict[str, Sampler] = {}

    def make(self, part: _Part, parts: Registry[T]) -> T:
        """Make a part; γ is its margin and, with `reference`, True its `itself`, unless they are given."""
        text = _written(part, parts)
        with part.blamed():
            itself = self.reference and "itself" in signature_of(parts.find(text)[0]).parameters
            made = parts.make(text, {"margin": self.margin, **({"itself": True} if itself else {})})
        self.texts[id(made)] = text
        return made

    def sampler(self, part: _Part) -> Sampler:
        text = _written(part, SAMPLERS)
        # One text is one sampler, whatever it remembers from call to call: HM[X,X] perturbs nothing.
        if text not in self.samplers:
            self.samplers[text] = self.make(part, SAMPLERS)
        return self.samplers[text]

    def destination(self, part: _Part) -> Destination:
        name = _bare(part, DESTINATIONS, SAMPLERS)
        if name != "gB" and file_of(part.text) is not None:
            text = _written(part, DESTINATIONS)
            with part.blamed():
                factory, _ = DESTINATIONS.find(text)
            if isinstance(factory, type) and issubclass(factory, Sampler):
                return Benign(self.sampler(part))
            return self.make(part, DESTINATIONS)
        _, arguments = part.call()
        powers = {name: power for power, name in Gradual.NAMES.items()}
        if name in powers:
            gradual = partial(Gradual, power=powers[name], margin=self.margin)
            return _with_parameters(gradual, arguments, {"u": "u"}, name)
        if name == "gB":
            if not arguments:
                part.fail("gB takes a destination to raise, such as gB(M) or gB(M,ξ=0.1)")
            boosted = partial(Boosted, self.destination(arguments[0]), margin=self.margin)
            return _with_parameters(boosted, arguments[1:], {"ξ": "xi", "u": "u"}, name)
        if name in DESTINATIONS:
            return self.make(part, DESTINATIONS)
        if name in SAMPLERS:
            return Benign(self.sampler(part))
        return self.number(part, name, arguments)

    def number(self, part: _Part, name: str, arguments: list[_Part]) -> Destination:
        number = re.fullmatch(rf"([+-]?)({_NUMBER})?(γ?)(?:/({_NUMBER}))?", name)
        if number is None or not (number[2] or number[3]) or float(number[4] or 1) == 0:
            known = [*SAMPLERS, *DESTINATIONS, "a number such as 0, 2 or -γ/2"]
            listed = dict.fromkeys("gB(…)" if text == "gB" else text for text in known)
            part.fail(unknown("destination", name, listed) + _about_paths(part))
        if arguments:
            arguments[0].fail(f"{name} takes no parameters")
        value = float(number[1] + (number[2] or "1")) / float(number[4] or 1)
        with part.blamed():
            return OfMargin(value, margin=self.margin) if number[3] else Constant(value)

    def term(self, part: _Part, family: Any) -> Term:
        made = self.any_term(part)
        with part.blamed():
            family.check_roles(made)
        return made

    def kind_of(self, term: Term) -> str:
        """Return what a term is logged as: its kind, else the name that it was found by."""
        found_by = split_options(self.texts.get(id(term), ""))[0].rpartition(":")[2]
        return str(getattr(term, "kind", "") or found_by)

    def any_term(self, part: _Part) -> Term:
        if file_of(part.text) is None:
            kind = _bare(part, TERMS)
            _, arguments = part.call()
            if kind == "L" and arguments:
                kind = f"L({','.join(role.plain for role in arguments[:3])})"
                arguments = arguments[3:]
            if kind in ROLES:
                known = {"λ": "weight", "γ": "margin"}
                return _with_parameters(partial(SextupletTerm, kind), arguments, known, kind)
            if kind not in TERMS:
                part.fail(_unknown(part, TERMS, kind))
        return self.make(part, TERMS)


def _written(part: _Part, parts: Registry[T]) -> str:
    """Return the text of a piece in one spelling: NAME(option=value,…), its name known or in a file."""
    text = part.text.strip()
    if (source := file_of(text)) is None:
        name, (_, inside, rest) = _bare(part, parts), part.enclosed("(", ")")
        if name not in parts:
            part.fail(_unknown(part, parts, name))
        if rest.plain:
            rest.fail(_AFTER)
        text = name if inside is None else f"{name}({inside.text})"
    elif any(letter in "()[],&" for letter in str(source.file)):
        part.fail(f"the path {source.file} cannot be written here{_about_paths(part)}")
    with part.blamed():
        name, options = parse_spec(parts.kind, text)
    listed = ",".join(f"{key}={value!r}" for key, value in options.items())
    return f"{name}({listed})" if listed else name


def _bare(part: _Part, *known: Registry[Any]) -> str:
    """Return the name before a piece's bracket of parameters: as it stands if it is known, else `plain`."""
    head = part.part(0, len(part.text.partition("(")[0]))
    name = unicodedata.normalize("NFC", head.text.strip())
    return name if any(name in parts for parts in known) else head.plain


def _unknown(part: _Part, parts: Registry[T], name: str) -> str:
    return unknown(parts.kind, name, parts) + _about_paths(part)


def _about_paths(part: _Part) -> str:
    return ": a path in a defense's name is without brackets, commas and &" if ".py" in part.whole else ""


_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_AFTER = "nothing may follow the bracket of parameters"


def _with_parameters(make: Callable[..., T], parts: list[_Part], known: dict[str, str], owner: str) -> T:
    """Make an object with the `symbol=number` pieces as its keyword arguments."""
    given: dict[str, float] = {}
    for part in parts:
        symbol, _, text = part.plain.partition("=")
        if symbol not in known:
            part.fail(f"{unknown(f'parameter of {owner}', symbol, known)}; written {next(iter(known))}=0.1")
        if known[symbol] in given:
            part.fail(f"{symbol} is given twice")
        try:
            value = float(text)
        except ValueError:
            part.fail(f"{symbol} must be a number, not {text!r}")
        given[known[symbol]] = value
        with part.blamed():
            make(**{known[symbol]: value})
    return make(**given)


@dataclass(frozen=True)
class _Part:
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

    def part(self, begin: int, end: int) -> _Part:
        return _Part(self.text[begin:end], self.start + begin, self.whole)

    def split(self, separator: str) -> list[_Part]:
        """Split where the separator stands outside all brackets."""
        parts, depth, begin = [], 0, 0
        for i, letter in enumerate(self.text):
            depth += (letter in "([") - (letter in ")]")
            if depth < 0:
                self.part(i, i + 1).fail("a bracket closes that was not opened")
            if depth > DEEPEST:
                self.part(i, i + 1).fail(f"brackets are nested deeper than {DEEPEST} times")
            if letter == separator and depth == 0:
                parts.append(self.part(begin, i))
                begin = i + 1
        if depth:
            self.part(len(self.text), len(self.text)).fail("a bracket is not closed")
        return [*parts, self.part(begin, len(self.text))]

    def enclosed(self, begin: str, end: str) -> tuple[_Part, _Part | None, _Part]:
        """Take `head[inside]rest` apart; without brackets there is no inside."""
        opened = self.text.find(begin)
        if opened < 0:
            return self, None, self.part(len(self.text), len(self.text))
        depths = accumulate((letter in "([") - (letter in ")]") for letter in self.text[opened:])
        closed = opened + list(depths).index(0)  # brackets are balanced: `split` has looked
        if self.text[closed] != end:
            self.part(closed, closed + 1).fail(f"{end} must close what {begin} opens")
        rest = self.part(closed + 1, len(self.text))
        return self.part(0, opened), self.part(opened + 1, closed), rest

    def call(self) -> tuple[_Part, list[_Part]]:
        """Take `head(a,b)` apart; without brackets there are no arguments."""
        head, inside, rest = self.enclosed("(", ")")
        if rest.plain:
            rest.fail(_AFTER)
        return head, [] if inside is None else inside.split(",")

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Point at this piece in an error that it causes; the user's own code ends with its traceback."""
        try:
            yield
        except UserCodeError:
            raise
        except (UserError, OSError) as error:
            self.fail(str(error))

    def fail(self, message: str) -> NoReturn:
        blank = len(self.text) - len(self.text.lstrip())
        before = unicodedata.normalize("NFC", self.whole[: self.start + blank])
        column = sum(1 for letter in before if not unicodedata.combining(letter))
        raise UserError(f"{message}\n    {self.whole}\n    {' ' * column}^")
