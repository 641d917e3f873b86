"""Attacks by name: what is made, what is refused and in which words, and what is written can be read."""

import dataclasses

import pytest
import torch

from robustmetric.attacks import (
    ATTACKS,
    CandidateAttack,
    EmbeddingShift,
    Gallery,
    GreedyTop1Misranking,
    GreedyTop1Translocation,
    LearningToMisrank,
    Queries,
    QueryAttack,
    RankingAttack,
    SemanticsPreservingQueryAttack,
    Target,
    TargetedMismatch,
    attack,
)

# All that a pasted `repr` may name.
CLASSES: dict[str, type[RankingAttack]] = {
    c.__name__: c
    for c in (
        CandidateAttack,
        EmbeddingShift,
        GreedyTop1Misranking,
        GreedyTop1Translocation,
        LearningToMisrank,
        QueryAttack,
        SemanticsPreservingQueryAttack,
        TargetedMismatch,
    )
}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("CA+", CandidateAttack(sign="+")),
        ("CA-", CandidateAttack(sign="-")),
        ("QA+", QueryAttack(sign="+")),
        ("QA-", QueryAttack(sign="-")),
        ("TMA", TargetedMismatch()),
        ("ES", EmbeddingShift()),
        ("LTM", LearningToMisrank()),
        ("GTM", GreedyTop1Misranking()),
        ("GTT", GreedyTop1Translocation()),
        ("SP-QA+", SemanticsPreservingQueryAttack(sign="+")),
        ("SP-QA-", SemanticsPreservingQueryAttack(sign="-")),
        ("CA−", CandidateAttack(sign="-")),  # as the paper writes it
        ("SP-QA−(m=2)", SemanticsPreservingQueryAttack(sign="-", m=2)),
        ("CA+(w=5)", CandidateAttack(sign="+", w=5)),
        ("CA- ( w = 5 )", CandidateAttack(sign="-", w=5)),
        ("QA+()", QueryAttack(sign="+")),
        ("SP-QA+(m=2, keep=3, xi=0.5)", SemanticsPreservingQueryAttack(sign="+", m=2, keep=3, xi=0.5)),
    ],
)
@pytest.mark.parametrize("protocol", ["strict", "reference"])
def test_a_name_makes_its_attack(name: str, wanted: RankingAttack, protocol: str) -> None:
    assert attack(name, protocol=protocol) == dataclasses.replace(wanted, protocol=protocol)  # type: ignore[arg-type]
    assert attack(name).protocol == "strict"


@pytest.mark.parametrize("name", ["CA+(w=5)", "QA-(m=2)", "SP-QA+(m=4)", *ATTACKS])
def test_an_attack_has_the_name_that_makes_it(name: str) -> None:
    assert attack(name).name == name


def test_options_may_come_as_arguments() -> None:
    assert attack("CA+", w=5) == attack("CA+(w=5)")
    assert attack("SP-QA-", xi=2, keep=1) == attack("SP-QA-(xi=2, keep=1)")


@pytest.mark.parametrize("name", [*ATTACKS, "CA-(w=5)", "QA+(m=2)", "SP-QA-(m=2, keep=3, xi=0.5)"])
@pytest.mark.parametrize("protocol", ["strict", "reference"])
def test_what_is_printed_can_be_pasted_back(name: str, protocol: str) -> None:
    made = attack(name, protocol=protocol)
    assert eval(repr(made), dict(CLASSES)) == made  # noqa: S307
    assert hash(eval(repr(made), dict(CLASSES))) == hash(made)  # noqa: S307
    other = attack(name, protocol="reference" if protocol == "strict" else "strict")
    assert made != other


@pytest.mark.parametrize(
    ("sign", "xi", "weight"), [("+", None, 1), ("-", None, 100), ("+", 0, 0), ("-", 0, 0), ("-", 2.5, 2.5)]
)
def test_the_weight_of_sp_qa_is_that_of_the_earlier_work_unless_given(
    sign: str, xi: float | None, weight: float
) -> None:
    assert SemanticsPreservingQueryAttack(sign=sign, xi=xi).weight == weight


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "GTN",
            {},
            r"unknown attack 'GTN' \(did you mean 'GT[MT]'\?\); known: CA\+, CA-, ES, GTM, GTT, LTM, QA",
        ),
        ("SPQA+", {}, r"unknown attack 'SPQA\+' \(did you mean 'SP-QA\+'\?\)"),
        ("FGSM", {}, r"unknown attack 'FGSM'( \(did you mean '\w+'\?\))?; known: CA\+"),
        ("CA+(w=2", {}, r"attack 'CA\+\(w=2' has no closing bracket; write NAME\(option=value, \.\.\.\)"),
        ("CA+(5)", {}, r"attack 'CA\+\(5\)': '5' must be option=value"),
        ("CA+(w=0)", {}, "w must be a whole number of at least 1, not 0"),
        ("CA+", {"w": -1}, "w must be a whole number of at least 1, not -1"),
        ("CA-(w=1.5)", {}, "w must be a whole number of at least 1, not 1.5"),
        ("QA+(m=0)", {}, "m must be a whole number of at least 1, not 0"),
        ("QA+", {"m": "2"}, "m must be a whole number of at least 1, not '2'"),
        ("QA+(w=2)", {}, r"attack 'QA\+' got an unexpected keyword argument 'w'; its options: m"),
        ("LTM(w=2)", {}, "attack 'LTM' got an unexpected keyword argument 'w'; its options: none"),
        ("SP-QA+(keep=0)", {}, "keep must be a whole number of at least 1, not 0"),
        ("SP-QA+(xi=-1)", {}, "xi must be a number of at least 0, not -1"),
        ("SP-QA+", {"xi": float("inf")}, "xi must be a number of at least 0, not inf"),
        ("ES", {"protocol": "strikt"}, r"unknown protocol 'strikt' \(did you mean 'strict'\?\); known: ref"),
        ("CA+", {"protocol": "paper"}, "unknown protocol 'paper'"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attack(name, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [CandidateAttack, QueryAttack, SemanticsPreservingQueryAttack])
def test_a_sign_is_plus_or_minus(kind: type[CandidateAttack]) -> None:
    with pytest.raises(ValueError, match=r"unknown sign '\*'; known: \+, -"):
        kind(sign="*")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_has_no_state(name: str) -> None:
    made = attack(name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.protocol = "reference"  # type: ignore[misc]


def test_rows_of_queries_and_targets() -> None:
    queries = Queries(torch.eye(5), torch.arange(5) + 10, torch.tensor([4, 3, 2, 1, -1]))
    some = queries[torch.tensor([3, 0])]
    assert len(some) == 2
    assert torch.equal(some.z, torch.eye(5)[[3, 0]])
    assert some.labels.tolist() == [13, 10]
    assert some.own.tolist() == [1, 4]
    target = Target(torch.arange(6).view(3, 2), torch.arange(12).view(3, 2, 2))
    part = target[torch.tensor([2])]
    assert part.index.tolist() == [[4, 5]]
    assert part.extra is not None
    assert part.extra.tolist() == [[[8, 9], [10, 11]]]
    assert Target(torch.zeros(3, 0))[torch.tensor([1])].extra is None


def test_a_gallery_is_cut_into_blocks_that_cover_it() -> None:
    for chunk in (1, 3, 5, 6, 100):
        cut = Gallery(torch.eye(6), torch.arange(6), chunk=chunk)
        blocks = list(cut.blocks())
        assert [p for b in blocks for p in range(b.start, b.stop)] == list(range(6))
        assert all(b.stop - b.start <= chunk for b in blocks)
        torch.testing.assert_close(cut.square, torch.ones(6))


@pytest.mark.parametrize("name", ["CA+(sign='-')", "CA+(w=2, w=3)", "CA+(protocol='reference')"])
def test_an_option_is_given_once(name: str) -> None:
    with pytest.raises(ValueError, match=r"is given already; leave it out"):
        attack(name)


def test_a_name_tells_options_apart() -> None:
    names = [attack(f"SP-QA+{o}").name for o in ("", "(m=2)", "(keep=3)", "(xi=0.5)", "(m=2,keep=3,xi=0.5)")]
    assert names == ["SP-QA+", "SP-QA+(m=2)", "SP-QA+(keep=3)", "SP-QA+(xi=0.5)", "SP-QA+(m=2,keep=3,xi=0.5)"]
    assert all(attack(n).name == n for n in names)


def test_a_gallery_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"labels have shape \(5,\) for 6 images"):
        Gallery(torch.eye(6), torch.arange(5))
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1, not 0"):
        Gallery(torch.eye(6), torch.arange(6), chunk=0)
