"""Whether two evaluations are the same: digests, options, and what differs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from robustmetric.attacks import NES, PGD, Transfer, attack
from robustmetric.evaluation.identity import code_of, differences, digest_of, options_of, versions
from robustmetric.registry import registry


def test_a_digest_tells_shapes_apart() -> None:
    wide, tall = nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)
    tall.load_state_dict({"weight": wide.weight.detach().reshape(2, 3)})
    assert digest_of(wide) != digest_of(tall)


def test_a_digest_is_of_parameters_and_buffers_in_any_order() -> None:
    class Net(nn.Module):
        def __init__(self, names: str, constant: float) -> None:
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.full((2,), float(ord(name)))))
            self.register_buffer("mean", torch.tensor([constant]), persistent=False)

    assert digest_of(Net("ab", 0.5)) == digest_of(Net("ba", 0.5))
    assert digest_of(Net("ab", 0.5)) != digest_of(Net("ab", 0.25)), "a buffer that is not saved counts"
    assert digest_of(Net("ab", 0.5)) != digest_of(Net("abc", 0.5))
    assert digest_of(Net("ab", 0.5).double()) != digest_of(Net("ab", 0.5))
    assert len(digest_of(Net("ab", 0.5).bfloat16())) == 64


def test_versions_name_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*versions()} == {"python", "machine", "robustmetric", "torch", "numpy", "scikit-learn"}

    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr("robustmetric.evaluation.identity.version", missing)
    assert versions()["torch"] == "not installed"


def test_options_are_of_the_class_and_all_plain_values() -> None:
    assert options_of(NES(samples=3)) == {"class": "NES", "samples": "3", "sigma": "0.01"}
    few, many = (options_of(attack(f"SP-QA+(keep={keep})")) for keep in (3, 9))
    assert {name for name in few if few[name] != many[name]} == {"keep"}


def test_a_search_in_another_is_described_and_its_network_left_out() -> None:
    network = nn.Linear(2, 2)
    first, second = (options_of(Transfer(surrogate=network, search=PGD(restarts=k))) for k in (1, 2))
    assert "surrogate" not in first, "it has a digest of its own"
    assert first["search"] == options_of(PGD())
    assert second["search"]["restarts"] == "2"


@dataclass
class Odd:
    """A part with options of any kind."""

    weights: Any
    k: int | None = None


def test_options_of_any_kind_are_told_apart() -> None:
    kinds = [torch.zeros(2), torch.ones(2), torch.zeros(3), print, len, {"a": 1}, {"a": 2}, "a", None]
    found = [options_of(Odd(kind)) for kind in kinds]
    assert all(found.count(each) == 1 for each in found)
    assert found == [options_of(Odd(kind)) for kind in kinds]
    # A network has a digest of its own.
    assert options_of(Odd(nn.Flatten())).keys() == {"class", "code", "k"}
    assert options_of(Odd(object())) == options_of(Odd(object())), "a place in memory is no option"


def test_code_is_told_by_its_text(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    digests = []
    for body in ("return 1", "return 2", "return 1"):
        file.write_text(f"class Base:\n    def step(self):\n        {body}\n\nclass Mine(Base):\n    pass\n")
        digests.append(code_of(registry("check").find(f"{file}:Mine")[0]))
    assert digests[0] == digests[2] != digests[1]
    assert code_of(options_of) is None


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {}, []),
        ({"settings": {"eps": 1, "steps": 2}}, {"settings": {"eps": 3, "steps": 2}}, ["eps was 1, is 3"]),
        ({"a": {"b": 1}}, {"a": {}}, ["a.b was 1, is None"]),
        ({"b": 1, "a": [1]}, {"b": 2, "a": [2]}, ["a was [1], is [2]", "b was 1, is 2"]),
        ({"d": "a" * 64}, {"d": "b" * 64}, [f"d was '{'a' * 12}', is '{'b' * 12}'"]),
    ],
)
def test_differences_are_named_by_their_place(before: Any, now: Any, told: list[str]) -> None:
    assert differences(before, now) == told
