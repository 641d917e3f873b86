from __future__ import annotations

import pytest

from robustmetric.registry import lookup, parameters, unknown

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
