"""The paper's notation: from "HM[S,LGA]&ICS" to a defense; `Defense.name` goes back."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

from robustmetric.defenses.act import AntiCollapse
from robustmetric.defenses.base import Defense
from robustmetric.defenses.est import EmbeddingShifted
from robustmetric.defenses.hardness import HardnessManipulation
from robustmetric.defenses.regular import Regular
from robustmetric.destination import Benign, Boosted, Constant, Destination, Gradual, OfMargin
from robustmetric.losses import TERMS, SextupletTerm
from robustmetric.perturb import Budget
from robustmetric.registry import unknown
from robustmetric.triplets import SAMPLERS, Sampler, Semihard, check_margin
from robustmetric.validate import UserError

T = TypeVar("T")

FAMILIES: dict[str, type[Defense]] = {
    "N/A": Regular,
    "EST": EmbeddingShifted,
    "ACT": AntiCollapse,
    "HM": HardnessManipulation,
    "min-max": HardnessManipulation,
}
GRADUAL = {name: power for power, name in Gradual.NAMES.items()}
_DESTINATIONS = dict.fromkeys([*SAMPLERS, *GRADUAL, "gB(…)", "a number such as 0, 2 or -γ/2"])


def defense(
    name: str,
    *,
    eps: float = 8 / 255,
    alpha: float = 1 / 255,
    steps: int = 8,
    margin: float = 0.2,
    seed: int = 0,
) -> Defense:
    """Make a defense from its name in the paper's notation.

    - ``N/A[X]`` regular training, ``EST[X]``, ``ACT[X]``; X is a sampler: R, M, S, D or H
    - ``HM[X,destination]`` Hardness Manipulation; ``min-max[X]`` is ``HM[X,2]``
    - destinations: a sampler, a number (``0``, ``-γ/2``), ``LGA``, ``g2``, ``g1/2``, ``gB(M)``; with
      parameters ``LGA(u=2.2)``, ``gB(M,ξ=0.1)``
    - terms behind HM: ``&ICS``, ``&ICS(λ=0.05)``, ``&ICS(γ=0.2)``, and ``&L(a,ã,p̃)`` and the like

    γ, λ, ξ, ã may be written gamma, lambda, xi, a~. `eps`, `alpha` and `steps` (ε, α, η) bound the
    perturbations, `margin` is γ, `seed` starts the drawing of triplets.

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
    if not isinstance(name, str) or len(name) > 500:
        raise UserError(f"a defense is given by its name, at most 500 characters, not {name!r:.60}")
    first, *behind = _Part(name, 0, name).split("&")
    family, inside, rest = first.enclosed("[", "]")
    if inside is None:
        first.fail("a defense is written FAMILY[…], such as HM[S,LGA]&ICS, N/A[R], EST[R] or ACT[S]")
    kind = family.lookup("defense", FAMILIES)
    if rest.plain:
        rest.fail("only & and a term may stand behind the bracket, such as HM[S,LGA]&ICS")
    items = inside.split(",")
    minmax = family.plain == "min-max"
    count = 2 if family.plain == "HM" else 1
    if len(items) != count:
        wanted = "a source and a destination, such as [S,LGA]" if count == 2 else "one sampler, such as [S]"
        inside.fail(f"{family.plain} takes {wanted}")
    source = _sampler(items[0], margin)
    if kind is not HardnessManipulation:
        if behind:
            behind[0].fail(
                "only HM takes terms behind &: they need a perturbed anchor, positive and negative"
            )
        return kind(source, budget=budget, margin=margin, seed=seed)
    destination = Constant(2) if minmax else _destination(items[1], margin)
    terms = [_term(part) for part in behind]
    return HardnessManipulation(source, destination, terms, budget=budget, margin=margin, seed=seed)


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

    def lookup(self, kind: str, known: Mapping[str, type[Defense]]) -> type[Defense]:
        if self.plain not in known:
            self.fail(unknown(kind, self.plain, known))
        return known[self.plain]

    def fail(self, message: str) -> NoReturn:
        blank = len(self.text) - len(self.text.lstrip())
        before = unicodedata.normalize("NFC", self.whole[: self.start + blank])
        column = sum(1 for letter in before if not unicodedata.combining(letter))
        raise UserError(f"{message}\n    {self.whole}\n    {' ' * column}^")


def _sampler(part: _Part, margin: float) -> Sampler:
    letter = part.plain
    if letter not in SAMPLERS:
        part.fail(unknown("sampler", letter, SAMPLERS))
    return Semihard(margin=margin) if letter == "M" else SAMPLERS[letter]()


_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"


def _destination(part: _Part, margin: float) -> Destination:
    head, arguments = part.call()
    name = head.plain
    if name in GRADUAL:
        return _with_parameters(
            partial(Gradual, power=GRADUAL[name], margin=margin), arguments, {"u": "u"}, name
        )
    if name == "gB":
        if not arguments:
            part.fail("gB takes a destination to raise, such as gB(M) or gB(M,ξ=0.1)")
        base = _destination(arguments[0], margin)
        known = {"ξ": "xi", "u": "u"}
        return _with_parameters(partial(Boosted, base, margin=margin), arguments[1:], known, name)
    number = re.fullmatch(rf"([+-]?)({_NUMBER})?(γ?)(?:/({_NUMBER}))?", name)
    is_number = number is not None and (number[2] or number[3]) and float(number[4] or 1) != 0
    if name not in SAMPLERS and not is_number:
        part.fail(unknown("destination", name, _DESTINATIONS))
    if arguments:
        arguments[0].fail(f"{name} takes no parameters")
    if number is None or name in SAMPLERS:
        return Benign(_sampler(part, margin))
    value = float(number[1] + (number[2] or "1")) / float(number[4] or 1)
    return _made(part, lambda: OfMargin(value, margin=margin) if number[3] else Constant(value))


def _term(part: _Part) -> SextupletTerm:
    head, arguments = part.call()
    kind = head.plain
    if kind == "L" and arguments:
        kind = f"L({','.join(role.plain for role in arguments[:3])})"
        arguments = arguments[3:]
    if kind not in TERMS:
        part.fail(unknown("term", kind, TERMS))
    return _with_parameters(partial(SextupletTerm, kind), arguments, {"λ": "weight", "γ": "margin"}, kind)


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
    except ValueError as error:
        part.fail(str(error))
