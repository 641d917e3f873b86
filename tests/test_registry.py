from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from robustmetric.registry import call, fraction, lookup, parameters, unknown

KNOWN = {"resnet18": 18, "resnet50": 50, "C2F2": 2, "nothing": 0}


@pytest.mark.parametrize("name", KNOWN)
def test_lookup_gives_the_value_even_if_it_is_zero(name: str) -> None:
    assert lookup("model", name, KNOWN) == KNOWN[name]


def test_lookup_gives_the_very_object() -> None:
    part = object()
    assert lookup("part", "a", {"a": part}) is part


def test_lookup_of_an_unknown_name_raises_what_unknown_says() -> None:
    with pytest.raises(ValueError, match="unknown model") as error:
        lookup("model", "resnet19", KNOWN)
    assert str(error.value) == unknown("model", "resnet19", KNOWN)


def test_lookup_tells_capitals_apart() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'c2f2' \(did you mean 'C2F2'\?\)"):
        lookup("model", "c2f2", KNOWN)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resnet19", " (did you mean 'resnet18'?)"),
        ("RESNET50", " (did you mean 'resnet50'?)"),
        ("c2f3", " (did you mean 'C2F2'?)"),
        ("noting", " (did you mean 'nothing'?)"),
        ("vgg", ""),
        ("", ""),
    ],
)
def test_unknown_names_the_value_the_nearest_and_all_in_order(name: str, hint: str) -> None:
    known = "C2F2, nothing, resnet18, resnet50"
    assert unknown("model", name, KNOWN) == f"unknown model {name!r}{hint}; known: {known}"


def test_unknown_does_not_need_anything_to_be_known() -> None:
    assert unknown("model", "x", {}) == "unknown model 'x'; known: "


def test_parameters_are_written_as_floats_in_the_order_given() -> None:
    assert parameters(λ=1, γ=0.25) == "λ=1.0,γ=0.25"
    assert parameters(γ=0.25, λ=1) == "γ=0.25,λ=1.0"


def test_parameters_leave_out_what_was_not_given_but_not_zero() -> None:
    assert parameters(λ=None, γ=0.0) == "γ=0.0"


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-7, 2.2, -0.5])
def test_parameters_lose_no_digit(value: float) -> None:
    symbol, _, text = parameters(u=value).partition("=")
    assert symbol == "u"
    assert float(text) == value


def test_parameters_put_the_lead_only_before_something() -> None:
    assert parameters(",", ξ=0.1, u=None) == ",ξ=0.1"
    assert parameters(lead=",", ξ=None, u=None) == ""
    assert parameters() == ""


@dataclass(frozen=True, kw_only=True)
class Part:
    size: int = 1
    on: bool = False
    rate: float = 0.5
    protocol: str = "strict"


PARTS: dict[str, Callable[..., Part]] = {"part": Part, "Part+": partial(Part, on=True)}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("part", Part()),
        ("part()", Part()),
        ("part( )", Part()),
        ("part(size=3)", Part(size=3)),
        ("part(size=-3)", Part(size=-3)),
        ("part (  size = 3 ,rate=1e-3)", Part(size=3, rate=0.001)),
        ("part(on=True)", Part(on=True)),
        ("part(protocol='x')", Part(protocol="x")),
        ("Part+", Part(on=True)),
        ("Part+(size=2)", Part(size=2, on=True)),
    ],
)
def test_call_makes_a_part_from_its_text(text: str, wanted: Part) -> None:
    assert call("part", text, PARTS) == wanted


def test_call_adds_the_options_that_come_as_arguments() -> None:
    assert call("part", "part(size=3)", PARTS, rate=0.25) == Part(size=3, rate=0.25)
    assert call("part", "part", PARTS, size=3, on=True) == Part(size=3, on=True)


def test_call_takes_what_has_no_signature() -> None:
    assert call("part", "dict(a=1)", {"dict": dict}, b=2) == {"a": 1, "b": 2}


def test_call_does_not_run_what_stands_in_the_brackets() -> None:
    with pytest.raises(ValueError, match="must be option=number"):
        call("part", "part(size=__import__('os').getpid())", PARTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prt", r"^unknown part 'prt' \(did you mean 'part'\?\); known: Part\+, part$"),
        ("prt(size=2)", r"^unknown part 'prt' \(did you mean 'part'\?\); known: Part\+, part$"),
        ("part(size=2", r"^part 'part\(size=2' has no closing bracket; write NAME\(option=value, \.\.\.\)$"),
        ("part(", r"^part 'part\(' has no closing bracket; write"),
        ("part(2)", r"^part 'part\(2\)': '2' must be option=number; write NAME\(option=value, \.\.\.\)$"),
        ("part(size=)", "'size=' must be option=number"),
        ("part(size=two)", "'size=two' must be option=number"),
        (
            "part(sise=2)",
            r"^part 'part' got an unexpected keyword argument 'sise'; its options: size, on, rate, protocol$",
        ),
    ],
)
def test_call_refuses_in_words_that_help(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call("part", text, PARTS)


def test_call_says_that_there_are_no_options() -> None:
    with pytest.raises(ValueError, match="its options: none"):
        call("part", "none(a=1)", {"none": lambda: 0})


def test_call_lets_the_part_refuse_a_value_in_its_own_words() -> None:
    def picky(size: int) -> int:
        raise TypeError(f"not {size}")

    with pytest.raises(TypeError, match="not 2"):
        call("part", "picky(size=2)", {"picky": picky})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", 8 / 255),
        (" 8 / 255 ", 8 / 255),
        ("0.5/2", 0.25),
        (".5/.25", 2.0),
        ("1.", 1.0),
        ("0", 0.0),
        ("0/255", 0.0),
        ("0.031", 0.031),
        ("77/255", 77 / 255),
    ],
)
def test_fraction_reads_a_number_or_two(text: str, value: float) -> None:
    found = fraction(text)
    assert isinstance(found, float)
    assert found == value


@pytest.mark.parametrize(
    "value",
    ["8/0", "8/0.0", "8/255/3", "1.2.3/4", "/255", "8/", "", " ", "-1", "-8/255", "much", "8 255", "nan",
     "inf", 0.1, 1, None, True, [0.1]],
)  # fmt: skip
def test_fraction_gives_back_what_it_cannot_read(value: object) -> None:
    assert fraction(value) is value
