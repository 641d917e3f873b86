from __future__ import annotations

import csv
import unicodedata
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import robustmetric as rm
from robustmetric.defenses import AntiCollapse, EmbeddingShifted, HardnessManipulation, Regular
from robustmetric.destination import Benign, Boosted, Constant, Destination, Gradual, OfMargin
from robustmetric.losses import TERMS, SextupletTerm
from robustmetric.triplets import (
    SAMPLERS,
    Batch,
    Distance,
    Hardest,
    Mined,
    Random,
    Sampler,
    Semihard,
    Softhard,
)

PUBLISHED = Path(__file__).parent.parent / "golden" / "published.csv"
Form = Literal["NFC", "NFD"]
thorough = settings(max_examples=150)


def published_names() -> list[str]:
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return sorted({row["defense"] for row in csv.DictReader(file)})


def hm(name: str, margin: float = 0.2) -> HardnessManipulation:
    made = rm.defense(name, margin=margin)
    assert isinstance(made, HardnessManipulation)
    return made


def destination(name: str, margin: float = 0.2) -> Destination:
    return hm(f"HM[S,{name}]", margin).destination


def contents(part: object) -> object:
    """All that a defense or destination is made of, comparable."""
    if isinstance(part, HardnessManipulation):
        return type(part), part.source, part.margin, part.budget, contents(part.destination), part.terms
    if isinstance(part, rm.Defense):
        return type(part), part.source, part.margin, part.budget
    if isinstance(part, Benign):
        return Benign, part.sampler
    if isinstance(part, Boosted):
        return Boosted, contents(part.base), part.xi, part.u, part.margin
    if isinstance(part, Gradual):
        return Gradual, part.power, part.u, part.margin
    assert isinstance(part, Constant)
    return type(part), part.value


# --- names that are known ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", published_names())
def test_a_published_name_is_the_defenses_own(name: str) -> None:
    assert rm.defense(name).name == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("HM[S,-gamma/2]", "HM[S,-γ/2]"),
        ("HM[S,−γ/2]", "HM[S,-γ/2]"),
        ("HM[S,2γ/4]", "HM[S,γ/2]"),
        ("HM[S,0γ]", "HM[S,0γ]"),
        ("HM[S,1/4]", "HM[S,0.25]"),
        ("HM[S,gB(M,xi=0.1)]", "HM[S,gB(M,ξ=0.1)]"),
        ("HM[S,gB(M,u=1,xi=1)]", "HM[S,gB(M,ξ=1.0,u=1.0)]"),
        ("HM[S,LGA(u=2)]", "HM[S,LGA(u=2.0)]"),
        ("HM[S,LGA]&ICS(gamma=.2,lambda=5e-2)", "HM[S,LGA]&ICS(λ=0.05,γ=0.2)"),
        ("HM[S,LGA]&L(a,a~,p~)", "HM[S,LGA]&L(a,\u00e3,p\u0303)"),
        ("HM[S,LGA]&L(p,p~,a,lambda=1)", "HM[S,LGA]&L(p,p\u0303,a,λ=1.0)"),
        ("HM[S,LGA]&L(a,p,n~)&L(a,a~,n~)", "HM[S,LGA]&L(a,p,\u00f1)&L(a,\u00e3,\u00f1)"),
        (
            "  HM [ S , gB( M , xi = 0.1 ) ] & ICS ( lambda = 1 ) & L ( a , a ~ , p~ )\n",
            "HM[S,gB(M,ξ=0.1)]&ICS(λ=1.0)&L(a,\u00e3,p\u0303)",
        ),
        ("\tN/A [R ] ", "N/A[R]"),
        ("min-max[S]", "HM[S,2]"),
        ("min-max[R]&ICS", "HM[R,2]&ICS"),
        ("min−max [ D ]", "HM[D,2]"),
    ],
)
def test_other_spellings_give_the_papers(written: str, name: str) -> None:
    assert rm.defense(written).name == name
    assert rm.defense(name).name == name


# --- what a name is made into -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind"), [("N/A", Regular), ("EST", EmbeddingShifted), ("ACT", AntiCollapse)]
)
@pytest.mark.parametrize(
    ("letter", "sampler"),
    [("R", Random()), ("M", Semihard(margin=0.3)), ("S", Softhard()), ("D", Distance()), ("H", Hardest())],
)
def test_family_and_sampler(family: str, kind: type[rm.Defense], letter: str, sampler: Sampler) -> None:
    made = rm.defense(f"{family}[{letter}]", margin=0.3)
    assert type(made) is kind
    assert made.source == sampler
    assert made.margin == 0.3


@pytest.mark.parametrize("margin", [0.2, 0.3, 1.0])
def test_semihard_takes_the_defenses_margin_wherever_it_stands(margin: float) -> None:
    made = hm("HM[M,gB(M)]", margin=margin)
    assert made.source == Semihard(margin=margin)
    assert isinstance(made.destination, Boosted)
    assert isinstance(made.destination.base, Benign)
    assert made.destination.base.sampler == Semihard(margin=margin)


@pytest.mark.parametrize(
    ("written", "factor"),
    [("-γ/2", -1 / 2), ("γ/3", 1 / 3), ("-γ", -1), ("2γ", 2), ("-3γ/7", -3 / 7), ("1.5γ", 1.5), ("0γ", 0)],
)
@pytest.mark.parametrize("margin", [0.2, 0.3])
def test_fractions_of_the_margin(written: str, factor: float, margin: float) -> None:
    made = destination(written, margin)
    assert isinstance(made, OfMargin)
    assert made.value == pytest.approx(factor * margin, abs=1e-15)


def test_gradual_gives_its_values_at_the_margin_of_the_defense() -> None:
    def values(name: str, margin: float, loss: float) -> list[float]:
        made = destination(name, margin)
        made.update(torch.tensor(loss))
        batch = Batch(torch.zeros(3, 3, dtype=torch.float64), torch.tensor([0, 1, 0]), 8)
        mined = Mined.of(batch, Hardest(), torch.Generator())
        hardness: torch.Tensor = made(mined, generator=torch.Generator())
        return hardness[:1].tolist()

    # ℓ̄ = min(u, ℓ)/u with u = γ unless given
    assert values("LGA", 0.3, 0.15) == pytest.approx([-0.15])
    assert values("g2", 0.3, 0.15) == pytest.approx([-0.3 / 4])
    assert values("g1/2", 0.3, 0.15) == pytest.approx([-0.3 * 0.5**0.5])
    assert values("LGA(u=1.5)", 0.3, 0.15) == pytest.approx([-0.03])
    assert values("gB(0)", 0.3, 0.15) == pytest.approx([0.05])
    assert values("gB(-γ/2,ξ=0.4,u=1.5)", 0.3, 0.15) == pytest.approx([-0.15 + 0.4 * 0.9])
    assert values("gB(gB(0,ξ=1),ξ=0.5)", 0.3, 0.15) == pytest.approx([0.75])


def test_terms_are_chained_in_their_order() -> None:
    made = hm("HM[S,LGA]&ICS(λ=0.05)&L(a,a~,p~)&ICS(γ=0.2)&L(a,p,n,λ=0.25,γ=0)")
    assert made.terms == (
        SextupletTerm("ICS", weight=0.05),
        SextupletTerm("L(a,a~,p~)"),
        SextupletTerm("ICS", margin=0.2),
        SextupletTerm("L(a,p,n)", weight=0.25, margin=0.0),
    )


def test_the_other_arguments_reach_the_defense() -> None:
    for name in ("N/A[R]", "EST[R]", "ACT[S]", "HM[S,LGA]"):
        made = rm.defense(name, eps=0.5, alpha=0.25, steps=3, margin=0.4, seed=7)
        assert made.budget == rm.Budget(eps=0.5, alpha=0.25, steps=3)
        assert made.margin == 0.4
        assert torch.equal(made.generator.get_state(), torch.Generator().manual_seed(7).get_state())


def test_the_papers_values_are_the_default() -> None:
    made = rm.defense("HM[S,LGA]&ICS")
    assert made.budget == rm.Budget(eps=8 / 255, alpha=1 / 255, steps=8)
    assert made.margin == 0.2


# --- names that are generated -----------------------------------------------------------------------------


class Spelling(NamedTuple):
    written: str
    name: str


def either(*written: str) -> st.SearchStrategy[str]:
    return st.sampled_from(written)


BLANK = either("", "", " ", "  ")
GAMMA, LAMBDA, XI = either("γ", "gamma"), either("λ", "lambda"), either("ξ", "xi")
PARAMETER = st.integers(1, 5000).map(lambda k: k / 1000)


def assignment(symbol: str) -> st.SearchStrategy[Spelling | None]:
    """A parameter in one of its spellings, or nothing."""
    letter = {"γ": GAMMA, "λ": LAMBDA, "ξ": XI}.get(symbol, st.just(symbol))
    written = st.builds(
        lambda letter, blank, value: Spelling(f"{letter}{blank}={blank}{value}", f"{symbol}={value!r}"),
        letter,
        BLANK,
        PARAMETER,
    )
    return st.none() | written


def called(head: Spelling, arguments: list[Spelling | None], blank: str) -> Spelling:
    """Write head(…) around what was given."""
    listed = [argument for argument in arguments if argument is not None]
    if not listed:
        return head
    written, names = (list(texts) for texts in zip(*listed, strict=True))
    inside = f"{blank},{blank}".join(written)
    return Spelling(f"{head.written}{blank}({blank}{inside}{blank})", f"{head.name}({','.join(names)})")


@st.composite
def constants(draw: st.DrawFn) -> Spelling:
    value = draw(st.integers(-2000, 2000)) / 1000
    name = str(int(value)) if value == int(value) else repr(value)
    written = draw(either(f"{value}", f"{value:.3f}", f"{value:+.3f}", f"{value:.3f}".replace("-", "−")))
    return Spelling(written, name)


@st.composite
def fractions(draw: st.DrawFn) -> Spelling:
    sign, above, below = draw(either("", "-")), draw(st.integers(1, 10)), draw(st.integers(1, 1000))
    least = Fraction(above, below)
    name = f"{sign}{least.numerator if least.numerator > 1 else ''}γ"
    name += f"/{least.denominator}" if least.denominator > 1 else ""
    letter = draw(GAMMA)
    front = sign.replace("-", draw(either("-", "−")))
    number = "" if above == 1 and draw(st.booleans()) else str(above)
    return Spelling(f"{front}{number}{letter}" + ("" if below == 1 else f"/{below}"), name)


@st.composite
def gradual(draw: st.DrawFn) -> Spelling:
    head = draw(either("LGA", "g2", "g1/2"))
    return called(Spelling(head, head), [draw(assignment("u"))], draw(BLANK))


def boosted(base: st.SearchStrategy[Spelling]) -> st.SearchStrategy[Spelling]:
    return st.builds(
        lambda base, xi, u, blank: called(Spelling("gB", "gB"), [base, xi, u], blank),
        base,
        assignment("ξ"),
        assignment("u"),
        BLANK,
    )


SAMPLER = st.sampled_from("RMSDH").map(lambda letter: Spelling(letter, letter))
DESTINATION = st.recursive(SAMPLER | constants() | fractions() | gradual(), boosted, max_leaves=3)


@st.composite
def terms(draw: st.DrawFn) -> Spelling:
    parameters = [draw(assignment("λ")), draw(assignment("γ"))]
    blank = draw(BLANK)
    roles = draw(st.none() | st.sampled_from(["a,a~,p~", "p,p~,a", "a,a~,n~", "a,p,n~", "a,p,n"]))
    if roles is None:
        return called(Spelling("ICS", "ICS"), parameters, blank)
    form: Form = "NFC" if draw(st.booleans()) else "NFD"
    tilde = roles.replace("~", "\u0303")
    written = draw(either(roles, unicodedata.normalize(form, tilde)))
    spelled = Spelling(written, unicodedata.normalize("NFC", tilde))
    return called(Spelling("L", "L"), [spelled, *parameters], blank)


@st.composite
def names(draw: st.DrawFn) -> Spelling:
    family = draw(either("N/A", "EST", "ACT", "HM", "HM", "HM", "min-max"))
    source, blank = draw(SAMPLER), draw(BLANK)
    written, name = f"{blank}{family}{blank}[{blank}{source.written}{blank}", f"{family}[{source.name}"
    if family == "HM":
        where = draw(DESTINATION)
        written, name = f"{written},{blank}{where.written}{blank}", f"{name},{where.name}"
    if family == "min-max":
        name = f"HM[{source.name},2"
    chain = draw(st.lists(terms(), max_size=3)) if family in ("HM", "min-max") else []
    written = "&".join([f"{written}]{blank}", *(term.written for term in chain)]) + blank
    return Spelling(written, "&".join([f"{name}]", *(term.name for term in chain)]))


@thorough
@given(
    names(),
    st.floats(0, 1),
    st.floats(0, 1, exclude_min=True),
    st.integers(1, 64),
    st.floats(0.01, 0.2),
)
def test_the_representation_can_be_pasted_back(
    spelling: Spelling, eps: float, alpha: float, steps: int, margin: float
) -> None:
    first = rm.defense(spelling.written, eps=eps, alpha=alpha, steps=steps, margin=margin)
    assert first.name == spelling.name
    second = eval(repr(first), {"defense": rm.defense})  # noqa: S307
    assert isinstance(second, rm.Defense)
    assert (second.name, second.budget, second.margin) == (first.name, first.budget, first.margin)
    assert repr(second) == repr(first)
    assert contents(second) == contents(first)


# --- names that are wrong ---------------------------------------------------------------------------------

DESTINATIONS = ("LGA", "g2", "g1/2", "gB(…)", "a number such as 0, 2 or -γ/2", *SAMPLERS)
DEFENSES = ("N/A", "EST", "ACT", "HM")


class Wrong(NamedTuple):
    """A wrong name, its wrong part (or the column of it), what the message says and the names it lists."""

    name: str
    at: str | int
    says: str
    lists: tuple[str, ...] = ()


WRONG = [
    # family
    Wrong("  HMM [S,LGA]", "HMM", "unknown defense 'HMM' (did you mean 'HM'?); known: ", DEFENSES),
    Wrong("[S]", 0, "unknown defense ''; known: ", DEFENSES),
    # sampler
    Wrong("ACT[ s]", "s", "unknown sampler 's' (did you mean 'S'?); known: ", tuple(SAMPLERS)),
    Wrong("N/A[]", len("N/A["), "unknown sampler ''; known: ", tuple(SAMPLERS)),
    Wrong("HM[S&ICS,LGA]", "S&", "unknown sampler 'S&ICS'; known: ", tuple(SAMPLERS)),
    # destination
    Wrong("HM[S,LGB]", "LGB", "unknown destination 'LGB' (did you mean 'LGA'?); known: ", DESTINATIONS),
    Wrong("HM[S,gB(gB(gC))]", "gC", "unknown destination 'gC'", DESTINATIONS),
    Wrong("HM[S,gB(ξ=0.1)]", "ξ", "unknown destination 'ξ=0.1'; known: ", DESTINATIONS),
    Wrong("HM[S,gB]", "gB", "gB takes a destination to raise, such as gB(M) or gB(M,ξ=0.1)"),
    Wrong("HM[S,]", len("HM[S,"), "unknown destination ''; known: ", DESTINATIONS),
    Wrong("HM[S,LGA(u=1)x]", "x]", "nothing may follow the bracket"),
    Wrong("HM[S,0(u=1)]", "u", "0 takes no parameters"),
    Wrong("HM[S,20γ]", "20γ", "a constant destination must be in [-2, 2], not 4.0: the range of hardness"),
    Wrong("HM[S,gB(3)]", "3", "a constant destination must be in [-2, 2], not 3.0: the range of hardness"),
    Wrong("HM[S,1/0.0]", "1/0.0", "unknown destination '1/0.0'; known: ", DESTINATIONS),
    # term
    Wrong("HM[S,LGA]&ICS& ics", "ics", "unknown term 'ics' (did you mean 'ICS'?); known: ", tuple(TERMS)),
    Wrong("HM[S,LGA]&&ICS", len("HM[S,LGA]&"), "unknown term ''; known: ", tuple(TERMS)),
    Wrong("HM[S,LGA]&L(a,p,λ=1)", "L(", "unknown term 'L(a,p,λ=1)'", tuple(TERMS)),
    Wrong("HM[S,LGA]&L", len("HM[S,LGA]&"), "unknown term 'L'", tuple(TERMS)),
    Wrong("HM[S,LGA]&ICS(λ=1)x", "x", "nothing may follow the bracket"),
    Wrong("HM[S,LGA]x", "x", "only & and a term may follow the bracket"),
    # parameter
    Wrong("HM[S,LGA(U=1)]", "U", "unknown parameter of LGA 'U' (did you mean 'u'?); known: u"),
    Wrong("HM[S,gB(M, λ=1)]", "λ", "unknown parameter of gB 'λ'; known: u, ξ"),
    Wrong("HM[S,LGA]&L(a,p,n,n)", "n)", "unknown parameter of L(a,p,n) 'n'; known: γ, λ"),
    Wrong("HM[S,LGA(u)]", "u", "u must be a number, not ''"),
    Wrong("HM[S,gB(M,xi=1=2)]", "xi", "ξ must be a number, not '1=2'"),
    Wrong("HM[S,LGA]&ICS(λ=1,lambda=2)", "lambda", "λ is given twice"),
    Wrong("HM[S,LGA(u=0)]", "u=", "u must be a number above 0, not 0.0: the loss is clipped at u (γ by def"),
    Wrong("HM[S,gB(gB(M,ξ=nan))]", "ξ", "ξ must be a finite number, not nan"),
    Wrong("HM[S,LGA]&ICS(γ=0.2,λ=-1)", "λ", "λ of ICS must be a number of at least 0, not -1.0"),
    # wrong number of items
    Wrong("HM[S]", "S", "HM takes a source and a destination, such as [S,LGA]"),
    Wrong("HM[]&ICS", len("HM["), "HM takes a source and a destination, such as [S,LGA]"),
    Wrong("min-max[S,2]", "S", "min-max takes one sampler, such as [S]"),
    # brackets
    Wrong("HM[S,gB(M]", len("HM[S,gB(M]"), "a bracket is not closed"),
    Wrong("HM[S,LGA]]", len("HM[S,LGA]"), "a bracket closes that was not opened"),
    # no shape at all
    Wrong("", 0, "a defense is written FAMILY[…], such as ", ("HM[S,LGA]&ICS", "N/A[R]", "EST[R]", "ACT[S]")),
    Wrong("HM", "HM", "a defense is written FAMILY[…], such as HM[S,LGA]&ICS"),
    Wrong("&ICS", 0, "a defense is written FAMILY[…], such as HM[S,LGA]&ICS"),
    # terms where their roles do not exist
    Wrong("N/A[R]&ICS", "ICS", "HM, ACT, EST and what is derived from them take terms after &; N/A does not"),
    Wrong("ACT[S]& ICS&ICS", "ICS", "ACT has no a~, which ICS takes; its terms take a, p, n, p~, n~"),
]


def refusal(name: str) -> tuple[str, int]:
    """Return the message for a wrong name and the column its caret points at; check how they are laid out."""
    with pytest.raises(ValueError, match=r".") as error:
        rm.defense(name)
    message, shown, caret = str(error.value).split("\n")
    assert shown == "    " + name
    assert caret.strip() == "^"
    return message, caret.index("^") - 4


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name or "nothing")
def test_a_wrong_name_is_refused_and_pointed_at(wrong: Wrong) -> None:
    message, column = refusal(wrong.name)
    assert message.startswith(wrong.says)
    if wrong.lists:
        listed = message[message.index("known: " if "known: " in message else "such as ") :]
        assert all(known in listed for known in wrong.lists)
    assert column == (wrong.at if isinstance(wrong.at, int) else wrong.name.index(wrong.at))


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("before", ["L(a,\u00e3,p\u0303)", "L(a,\u00e3,\u00f1)&L(p,p\u0303,a)"])
def test_the_caret_stands_under_the_letter_whatever_is_drawn_above_others(form: Form, before: str) -> None:
    name = unicodedata.normalize(form, f"HM[S,LGA]&{before}&XYZ")
    message, column = refusal(name)
    assert message.startswith("unknown term 'XYZ'")
    drawn = [letter for letter in name if not unicodedata.combining(letter)]
    assert column == drawn.index("X")


def attempt(name: str) -> None:
    """Read any text: it gives a defense whose name can be read, or a ValueError that points into it."""
    try:
        made = rm.defense(name)
    except ValueError as error:
        # A name may hold a line break: the caret is on the last line all the same.
        caret = str(error).split("\n")[-1]
        assert caret.strip() == "^"
        assert 4 <= caret.index("^") <= 4 + len(name)
    else:
        again = rm.defense(made.name)
        assert again.name == made.name
        assert contents(again) == contents(made)


LETTERS = "HMNAESTCDRILGBgaupnix/[](),&=.-+~0123456789 \u2212γλξ\u00e3\u00f1\u0303"
WORDS = "HM N/A min-max [ ] ( ) , & = S M LGA g2 gB - / u ξ xi λ lambda γ ICS L( a a~ p~ p\u0303 n 0.5 2"


@thorough
@given(st.text(LETTERS, max_size=24) | st.lists(st.sampled_from(WORDS.split()), max_size=16).map("".join))
def test_any_text_is_a_defense_or_a_value_error(name: str) -> None:
    attempt(name)


@thorough
@given(st.data())
def test_any_slip_of_the_pen_is_a_defense_or_a_value_error(data: st.DataObject) -> None:
    name = data.draw(names()).written
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(name)))
        end = min(len(name), begin + data.draw(st.integers(0, 2)))
        name = name[:begin] + data.draw(st.text(LETTERS, max_size=2)) + name[end:]
    attempt(name)


@pytest.mark.parametrize("written", ["0.0001γ", "γ/1001", "0.3333γ", "0.00001"])
def test_a_name_keeps_the_exact_number(written: str) -> None:
    made = rm.defense(f"HM[S,{written}]")
    assert contents(rm.defense(made.name)) == contents(made)


def test_deep_nesting_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"."):
        rm.defense("HM[S," + "gB(" * 2000 + "M" + ")" * 2000 + "]")


@pytest.mark.parametrize("margin", [3.0, float("nan")])
def test_a_wrong_margin_is_reported_as_such_with_a_multiple_of_it(margin: float) -> None:
    with pytest.raises(ValueError, match=f"^margin must be in .*, not {margin}"):
        rm.defense("HM[S,-γ]", margin=margin)
