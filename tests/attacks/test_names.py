"""Attacks by name: what is made, what is refused and in which words, and what is written can be read."""

import dataclasses
from pathlib import Path

import pytest

from robustmetric.attacks import (
    ATTACKS,
    Attack,
    CandidateAttack,
    Demote,
    EmbeddingShift,
    GreedyTop1Misranking,
    GreedyTop1Translocation,
    LearningToMisrank,
    Misrank,
    Promote,
    QueryAttack,
    SemanticsPreservingQueryAttack,
    Shift,
    TargetedMismatch,
    Translocate,
    attack,
)
from tests.helpers.goals import GOALS


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("CA+", CandidateAttack(sign="+")),
        ("QA+", QueryAttack(sign="+")),
        ("TMA", TargetedMismatch()),
        ("ES", EmbeddingShift()),
        ("LTM", LearningToMisrank()),
        ("GTM", GreedyTop1Misranking()),
        ("GTT", GreedyTop1Translocation()),
        ("SP-QA+", SemanticsPreservingQueryAttack(sign="+")),
        ("CA−", CandidateAttack(sign="-")),  # as the paper writes it
        ("SP-QA−(m=2)", SemanticsPreservingQueryAttack(sign="-", m=2)),
        ("CA+(w=5)", CandidateAttack(sign="+", w=5)),
        ("CA- ( w = 5 )", CandidateAttack(sign="-", w=5)),
        ("SP-QA+(m=2, keep=3, xi=0.5)", SemanticsPreservingQueryAttack(sign="+", m=2, keep=3, xi=0.5)),
        ("misrank", Misrank()),
        ("misrank(by=2, tau=0.1)", Misrank(by=2, tau=0.1)),
        ("shift", Shift()),
        ("promote", Promote(k=4)),
        ("demote", Demote(k=None)),
        ("demote(k=7, side='candidate')", Demote(k=7, side="candidate")),
        ("translocate", Translocate(k=4)),
    ],
)
def test_a_name_makes_its_attack(name: str, wanted: Attack) -> None:
    assert attack(name) == wanted
    assert attack(name, protocol="reference") == dataclasses.replace(wanted, protocol="reference")


def test_an_attack_has_the_name_that_makes_it() -> None:
    names = ["CA+(w=5)", "QA-(m=2)", "SP-QA+(m=2,keep=3,xi=0.5)", *ATTACKS, *GOALS]
    assert [attack(name).name for name in names] == names


def test_what_is_printed_can_be_pasted_back() -> None:
    for name in [*ATTACKS, *GOALS, "CA-(w=5)", "QA+(m=2)", "SP-QA-(m=2, keep=3, xi=0.5)"]:
        strict, reference = attack(name), attack(name, protocol="reference")
        assert strict != reference
        for made in (strict, reference):
            again = eval(repr(made), {type(made).__name__: type(made)})  # noqa: S307
            assert again == made
            assert hash(again) == hash(made)


@pytest.mark.parametrize(
    ("sign", "xi", "weight"), [("+", None, 1), ("-", None, 100), ("+", 0, 0), ("-", 0, 0), ("-", 2.5, 2.5)]
)
def test_the_weight_of_sp_qa_is_that_of_the_earlier_work_unless_given(
    sign: str, xi: float | None, weight: float
) -> None:
    weights = SemanticsPreservingQueryAttack(sign=sign, xi=xi, keep=2).weights
    assert weights == [1.0 if sign == "+" else -1.0, weight / 2, weight / 2]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("GTN", {}, r"unknown attack 'GTN' \(did you mean 'GT[MT]'\?\); known: CA\+, CA-, ES, GTM"),
        ("CA+(w=0)", {}, "w must be a whole number of at least 1, not 0"),
        ("QA+(w=2)", {}, r"attack 'QA\+' got an unexpected keyword argument 'w'; its options: protocol, m"),
        ("SP-QA+(xi=-1)", {}, "xi must be a number of at least 0, not -1"),
        ("ES", {"protocol": "strikt"}, r"unknown protocol 'strikt' \(did you mean 'strict'\?\); known: ref"),
        ("CA+(sign='-')", {}, r"is given already; leave it out"),
        ("CA+(w=2, w=3)", {}, "options must be option=value, each once"),
    ],
)
def test_what_cannot_be_is_rejected(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attack(name, **options)  # type: ignore[arg-type]


OWN = """
from dataclasses import dataclass
import torch
from robustmetric.attacks import Column, Attack

class Plain(Attack):
    name = "plain"
    columns = (Column("plain", "higher"),)

    def select(self, queries, gallery, *, draws):
        return queries.own[:, None]

    def objective(self, z, target, queries, gallery):
        return -z.sum(1)

    def measure(self, z, target, queries, gallery):
        return {"plain": z.sum(1)}

@dataclass(frozen=True, kw_only=True)
class Mine(Plain):
    k: int = 1

class Fixed(Plain):
    def __init__(self):
        pass
"""


@pytest.mark.parametrize("folder", ["own", "a−b"])
def test_an_attack_of_a_file(folder: str, tmp_path: Path) -> None:
    file = tmp_path / folder / "own.py"
    file.parent.mkdir()
    file.write_text(OWN)
    made = attack(f"{file}:Mine(k=2)", protocol="reference")
    assert repr(made) == "Mine(protocol='reference', k=2)"
    assert attack(f"{file}:Plain").protocol == "strict"
    # One that takes no protocol has that of the class.
    assert attack(f"{file}:Fixed", protocol="reference").protocol == "strict"
    with pytest.raises(ValueError, match="unexpected keyword argument 'w'; its options: protocol, k"):
        attack(f"{file}:Mine(w=2)")
    with pytest.raises(ValueError, match=r"unknown name 'Mien' \(did you mean 'Mine'"):
        attack(f"{file}:Mien")
