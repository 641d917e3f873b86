"""The paper's notation: from "HM[S,LGA]&ICS" to a defense; `Defense.name` goes back."""

from __future__ import annotations

import inspect
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from robustmetric.defenses.base import DEFENSES, Defense
from robustmetric.defenses.hardness import HardnessManipulation
from robustmetric.defenses.terms import TermDefense
from robustmetric.destination import DESTINATIONS, Benign, Boosted, Constant, Destination, Gradual, OfMargin
from robustmetric.losses import ROLES, TERMS, SextupletTerm, Term
from robustmetric.perturb import Budget
from robustmetric.registry import Registry, take_apart, unknown
from robustmetric.triplets import SAMPLERS, Sampler, check_margin, check_sampler
from robustmetric.usercode import UserCodeError, file_of, split_options
from robustmetric.validate import UserError, parameters

T = TypeVar("T")

FAMILIES = ("N/A", "EST", "ACT", "HM", "min-max")
"""Those of the paper, which always have brackets."""
GRADUAL = {name: power for power, name in Gradual.NAMES.items()}
LONGEST, DEEPEST = 2000, 50
"""Characters of a name, and brackets within brackets."""


def defense(
    name: str,
    *,
    eps: float = 8 / 255,
    alpha: float = 1 / 255,
    steps: int = 8,
    margin: float = 0.2,
    seed: int = 0,
    reference: bool = False,
) -> Defense:
    """Make a defense from its `name` in the paper's notation.

    - ``N/A[X]`` regular training, ``EST[X]``, ``ACT[X]``; X is a sampler: R, M, S, D or H
    - ``HM[X,destination]`` Hardness Manipulation; ``min-max[X]`` is ``HM[X,2]``
    - destinations: a sampler, a number (``0``, ``-γ/2``), ``LGA``, ``g2``, ``g1/2``, ``gB(M)``; with
      parameters ``LGA(u=2.2)``, ``gB(M,ξ=0.1)``
    - terms behind HM, EST and, without ã, ACT: ``&ICS``, ``&ICS(λ=0.05)``, ``&ICS(γ=0.2)``, and
      ``&L(a,ã,p̃)`` and the like

    γ, λ, ξ, ã may be written gamma, lambda, xi, a~. In each place a part of your own may stand instead, by
    the name it is registered under or as ``file.py:Object``, with options ``(k=2)`` if it has any; a defense
    of your own needs no bracket if it takes no sampler. `eps`, `alpha` and `steps` (ε, α, η) bound the
    perturbations, `margin` is γ, `seed` starts the drawing of triplets.

    With `reference`, S may draw the anchor as its own positive, and EST begins as the published training did;
    the name stays the same. It changes no other part; one of your own has a say in it if it has an option:
    a sampler `itself`, a defense `reference`.

    >>> defense("HM[S,-gamma/2]&ICS(lambda=0.05)", eps=8 / 255, alpha=1 / 255, steps=8).name
    'HM[S,-γ/2]&ICS(λ=0.05)'
    >>> defense("HM[S,LGB]")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown destination 'LGB' (did you mean 'LGA'?); known: D, H, LGA, M, R, S, a ...
        HM[S,LGB]
             ^
    """
    check_margin(margin)
    budget = Budget(eps=eps, alpha=alpha, steps=steps)
    if not isinstance(name, str) or len(name) > LONGEST:
        raise UserError(f"a defense is given by its name, at most {LONGEST} characters, not {name!r:.60}")
    first, *behind = _Part(name, 0, name).split("&")
    family, inside, rest = first.enclosed("[", "]")
    if rest.plain:
        wanted = "only & and a term may stand behind the bracket, such as HM[S,LGA]&ICS"
        rest.fail(wanted + _about_paths(rest))
    head, kind = _family(family, bare=inside is None)
    manipulates = issubclass(kind, HardnessManipulation)
    if behind and not issubclass(kind, TermDefense):
        why = "perturbs nothing" if head == "N/A" else "is derived from none of them"
        behind[0].fail(f"HM, ACT and EST take terms behind &; {head} does not, for it {why}")
    reader = _Reader(margin, reference=reference)
    parts: dict[str, Any] = {}
    names: list[str] = []
    if inside is not None:
        items = inside.split(",")
        minmax = head == "min-max"
        two = manipulates and not minmax
        if len(items) != (2 if two else 1):
            wanted = "a source and a destination, such as [S,LGA]" if two else "one sampler, such as [S]"
            inside.fail(f"{head} takes {wanted}{_about_paths(inside)}")
        parts["source"], text = reader.sampler(items[0])
        names.append(text)
        if manipulates:
            parts["destination"], text = (Constant(2), "2") if minmax else reader.destination(items[1])
            names.append(text)
    terms = [reader.term(part, kind) for part in behind]
    if terms or manipulates:
        parts["terms"] = [term for term, _ in terms]
    head = "HM" if head == "min-max" else head
    if reference and _takes(DEFENSES.find(head)[0], "reference"):
        parts["reference"] = True
    make = partial(DEFENSES.make, head, **parts, budget=budget, margin=margin, seed=seed)
    made = make() if head in FAMILIES else _made(family, make)
    if not hasattr(made, "written"):
        family.fail(
            f"{type(made).__name__}.__init__ must call super().__init__(source, budget=budget, "
            "margin=margin, seed=seed)"
        )
    made.written = "&".join([f"{head}[{','.join(names)}]" if names else head, *(text for _, text in terms)])
    if isinstance(made, TermDefense):
        made.term_kinds = [_kind_of(term, text) for term, text in terms]
    return made


def _family(part: _Part, *, bare: bool) -> tuple[str, type[Any]]:
    """Return the text of the family before the brackets, and its class; of a function that is not known."""
    name = _bare(part, DEFENSES)
    if bare and (name in FAMILIES or (name not in DEFENSES and file_of(part.text) is None)):
        form = "a defense is written FAMILY[…], such as HM[S,LGA]&ICS, N/A[R], EST[R] or ACT[S]"
        part.fail(form if name in ("", *FAMILIES) else f"{form}; {_unknown(part, DEFENSES, name)}")
    text = _written(part, DEFENSES)
    factory, _ = _made(part, partial(DEFENSES.find, text))
    kind = factory.func if isinstance(factory, partial) else factory
    return text, kind if isinstance(kind, type) else Defense


def _kind_of(term: Term, text: str) -> str:
    """Return what a term is logged as: its kind, else the name it was found by."""
    return str(getattr(term, "kind", None) or split_options(text)[0].rpartition(":")[2])


class _Reader:
    """Makes the parts of one defense, each with the text that makes it again."""

    def __init__(self, margin: float, *, reference: bool) -> None:
        self.margin, self.reference = margin, reference
        self.samplers: dict[str, Sampler] = {}

    def sampler(self, part: _Part) -> tuple[Sampler, str]:
        text = _written(part, SAMPLERS)
        # One text is one sampler, whatever it remembers from call to call.
        if text not in self.samplers:
            factory, _ = _made(part, partial(SAMPLERS.find, text))
            is_function = not isinstance(factory, type) and _takes(factory, "generator")
            made: Any = _made(part, lambda: SAMPLERS.bind(text) if is_function else self.make(text, SAMPLERS))
            if isinstance(made, Destination):
                part.fail(f"{text} is a destination; here stands the sampler of the source triplets")
            _made(part, partial(check_sampler, made))
            self.samplers[text] = made
        return self.samplers[text], text

    def destination(self, part: _Part) -> tuple[Destination, str]:
        name = _bare(part, DESTINATIONS, SAMPLERS)
        if name != "gB" and file_of(part.text) is not None:
            text = _written(part, DESTINATIONS)
            factory, _ = _made(part, partial(DESTINATIONS.find, text))
            is_class = isinstance(factory, type) and not issubclass(factory, Destination)
            if is_class or (not isinstance(factory, type) and _takes(factory, "generator")):
                return self.benign(part)
            return _made(part, partial(self.make, text, DESTINATIONS)), text
        _, arguments = part.call()
        if name in GRADUAL:
            make = partial(Gradual, power=GRADUAL[name], margin=self.margin)
            gradual = _with_parameters(make, arguments, {"u": "u"}, name)
            return gradual, gradual.name
        if name == "gB":
            if not arguments:
                part.fail("gB takes a destination to raise, such as gB(M) or gB(M,ξ=0.1)")
            base, text = self.destination(arguments[0])
            known = {"ξ": "xi", "u": "u"}
            raised = _with_parameters(partial(Boosted, base, margin=self.margin), arguments[1:], known, name)
            return raised, f"gB({text}{parameters(lead=',', ξ=raised.xi, u=raised.u)})"
        if name in DESTINATIONS:
            text = _written(part, DESTINATIONS)
            return _made(part, partial(self.make, text, DESTINATIONS)), text
        return self.benign(part) if name in SAMPLERS else self.number(part, name, arguments)

    def benign(self, part: _Part) -> tuple[Destination, str]:
        sampler, text = self.sampler(part)
        return Benign(sampler), text

    def number(self, part: _Part, name: str, arguments: list[_Part]) -> tuple[Destination, str]:
        number = re.fullmatch(rf"([+-]?)({_NUMBER})?(γ?)(?:/({_NUMBER}))?", name)
        if number is None or not (number[2] or number[3]) or float(number[4] or 1) == 0:
            known = [*SAMPLERS, *DESTINATIONS, "a number such as 0, 2 or -γ/2"]
            listed = dict.fromkeys("gB(…)" if text == "gB" else text for text in known)
            part.fail(unknown("destination", name, listed) + _about_paths(part))
        if arguments:
            arguments[0].fail(f"{name} takes no parameters")
        value = float(number[1] + (number[2] or "1")) / float(number[4] or 1)
        made = _made(part, lambda: OfMargin(value, margin=self.margin) if number[3] else Constant(value))
        return made, made.name

    def term(self, part: _Part, family: type[TermDefense]) -> tuple[Term, str]:
        term, text = self.any_term(part)
        _made(part, partial(family.check_roles, term))
        return term, text

    def any_term(self, part: _Part) -> tuple[Term, str]:
        kind = _bare(part, TERMS)
        if file_of(part.text) is None:
            _, arguments = part.call()
            if kind == "L" and arguments:
                kind = f"L({','.join(role.plain for role in arguments[:3])})"
                arguments = arguments[3:]
            if kind in ROLES:
                known = {"λ": "weight", "γ": "margin"}
                term = _with_parameters(partial(SextupletTerm, kind), arguments, known, kind)
                return term, term.name
            if kind not in TERMS:
                part.fail(_unknown(part, TERMS, kind))
        text = _written(part, TERMS)
        return _made(part, partial(TERMS.make, text)), text

    def make(self, text: str, parts: Registry[T]) -> T:
        """Make a part; γ is its margin and, by `reference`, True its `itself`, where they are not given."""
        itself = {"itself": True} if self.reference and _takes(parts.find(text)[0], "itself") else {}
        return parts.make(text, {"margin": self.margin, **itself})


def _written(part: _Part, parts: Registry[T]) -> str:
    """Return the text of a piece in one spelling: NAME(option=value,…), its name known or in a file."""
    text = part.text.strip()
    if (source := file_of(text)) is None:
        name, (_, inside, rest) = _bare(part, parts), part.enclosed("(", ")")
        if name not in parts:
            part.fail(_unknown(part, parts, name))
        if rest.plain:
            rest.fail("nothing may stand behind the bracket of parameters")
        text = name if inside is None else f"{name}({inside.text})"
    elif any(letter in "()[],&" for letter in str(source.file)):
        part.fail(f"the path {source.file} cannot be written here{_about_paths(part)}")
    name, options = _made(part, partial(take_apart, parts.kind, text))
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


def _takes(function: Callable[..., object], parameter: str) -> bool:
    """Return whether a function has a parameter of this name."""
    return parameter in inspect.signature(function).parameters


@dataclass(frozen=True)
class _Part:
    """A piece of a name that knows where it stands, so that an error can point at it."""

    text: str
    start: int
    whole: str

    @property
    def plain(self) -> str:
        """The piece in one spelling: Greek letters, ASCII minus, a tilde behind its letter, no blanks."""
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
        closed, depth = opened, 0
        for closed in range(opened, len(self.text)):
            depth += (self.text[closed] in "([") - (self.text[closed] in ")]")
            if depth == 0:
                break
        if self.text[closed] != end:
            self.part(closed, closed + 1).fail(f"{end} must close what {begin} opens")
        return (
            self.part(0, opened),
            self.part(opened + 1, closed),
            self.part(closed + 1, len(self.text)),
        )

    def call(self) -> tuple[_Part, list[_Part]]:
        """Take `head(a,b)` apart; without brackets there are no arguments."""
        head, inside, rest = self.enclosed("(", ")")
        if rest.plain:
            rest.fail("nothing may stand behind the bracket of parameters")
        return head, [] if inside is None else inside.split(",")

    def fail(self, message: str) -> NoReturn:
        blank = len(self.text) - len(self.text.lstrip())
        before = unicodedata.normalize("NFC", self.whole[: self.start + blank])
        column = sum(1 for letter in before if not unicodedata.combining(letter))
        raise UserError(f"{message}\n    {self.whole}\n    {' ' * column}^")


_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"


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
        _made(part, partial(make, **{known[symbol]: value}))
    return make(**given)


def _made(part: _Part, make: Callable[[], T]) -> T:
    """Make an object; if it refuses its parameters, point at the piece they stand in."""
    try:
        return make()
    except UserCodeError:  # which ends with a traceback of its own
        raise
    except (UserError, OSError) as error:
        part.fail(str(error))
