"""Searches by name: what is made, what is refused, and what a search says of itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from robustmetric.attacks import APGD, NES, PGD, SPSA, Draws, Problem, Search, Square, Transfer, make_search
from robustmetric.attacks.search import bind
from robustmetric.perturb import Budget

BUDGET = Budget(eps=0.08, alpha=0.03, steps=6)


# What cannot be


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PGD(restarts=0), "restarts must be a whole number of at least 1, not 0"),
        (lambda: PGD(random_start=1), "random_start must be a bool, not 1"),  # type: ignore[arg-type]
        (lambda: NES(samples=0), "samples must be a whole number of at least 1, not 0"),
        (lambda: SPSA(sigma=0), r"sigma must be in \(0, 1\], not 0"),
        (lambda: make_search("pdg"), r"unknown search 'pdg' \(did you mean 'pgd'\?\); known: apgd, nes, pgd"),
        (lambda: make_search("transfer(nse)"), r"unknown search 'nse' \(did you mean 'nes'"),
        (lambda: make_search("transfer(pgd"), "has no closing bracket"),
        (lambda: make_search("transfer(transfer(pgd))"), r"write transfer\(pgd\)"),
        (lambda: bind(make_search("nes"), nn.Flatten()), r"no surrogate: write transfer\(nes\)"),
        (
            lambda: bind(make_search("transfer(nes)"), None),
            r"'transfer\(nes\)' needs a surrogate, the network",
        ),
    ],
)
def test_what_cannot_be_is_rejected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_transfer_is_bound_to_its_surrogate_later() -> None:
    surrogate = nn.Flatten()
    search = make_search("transfer(nes)")
    assert search.network is None
    bound = bind(search, surrogate)
    assert bound == Transfer(search=NES(), surrogate=surrogate)
    assert bind(bound, None) is bind(bound, surrogate) is bound
    with pytest.raises(ValueError, match="it has its own"):
        bind(bound, nn.Flatten())


# Names


@pytest.mark.parametrize(
    ("search", "name"),
    [
        (PGD(), "pgd"),
        (PGD(restarts=4), "pgd(restarts=4)"),
        (PGD(best=True), "pgd(best=True)"),
        (PGD(restarts=2, random_start=True), "pgd(restarts=2, random_start=True)"),
        (NES(), "nes"),
        (NES(samples=7, sigma=0.5), "nes(samples=7, sigma=0.5)"),
        (SPSA(sigma=1e-3), "spsa(sigma=0.001)"),
        (APGD(), "apgd"),
        (APGD(restarts=2, random_start=True), "apgd(restarts=2, random_start=True)"),
        (Square(), "square"),
        (Square(trials=7), "square(trials=7)"),
    ],
)
def test_a_search_is_written_and_read_again(search: Search, name: str) -> None:
    assert search.name == name
    assert make_search(name) == search
    assert eval(repr(search)) == search  # noqa: S307


@pytest.mark.parametrize("text", ["pgd", "nes", "spsa(samples=3)"])
@pytest.mark.parametrize("blanks", ["transfer({})", " transfer( {} ) "])
def test_any_search_may_stand_inside_transfer(text: str, blanks: str) -> None:
    search = make_search(blanks.format(text))
    assert search == Transfer(search=make_search(text))
    assert search.name == f"transfer({text})"
    assert make_search("transfer") == Transfer()


OWN = """
from dataclasses import dataclass
from robustmetric.attacks import Search

@dataclass(frozen=True, kw_only=True)
class Mine(Search):
    far: float = 1.0
    follows_gradient = False

    def minimise(self, problem):
        return (problem.images + self.far * problem.budget.eps).clamp(0, 1)
"""


def test_a_search_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    search = make_search(f"{file}:Mine(far=0.5)")
    assert search.name == "mine(far=0.5)"
    images = torch.rand(3, 1, 2, 2)
    moved = search(Problem(images, lambda x, rows: x.sum((1, 2, 3)), BUDGET, Draws(0, "x", range(3))))
    assert torch.equal(moved, (images + 0.5 * BUDGET.eps).clamp(0, 1))
    carried = make_search(f"transfer({file}:Mine(far=0.5))")
    assert carried.name == "transfer(mine(far=0.5))"
    assert isinstance(carried, Transfer)
    assert carried.search == search
    with pytest.raises(ValueError, match="unexpected keyword argument 'near'; its options: far"):
        make_search(f"{file}:Mine(near=2)")


# What a search says of itself


def test_a_search_says_whether_it_follows_gradients() -> None:
    model, surrogate = nn.Flatten(), nn.Flatten()
    searches = (PGD(), APGD(), NES(), SPSA(), Square())
    assert [s.follows_gradient for s in searches] == [True, True, False, False, False]
    assert [s.differentiates(model) for s in searches] == [True, True, False, False, False]
    carried = Transfer(surrogate=surrogate)
    assert not carried.follows_gradient
    assert (carried.differentiates(surrogate), carried.differentiates(model)) == (True, False)
    assert not Transfer(surrogate=surrogate, search=NES()).differentiates(surrogate)


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("pgd", 6),
        ("pgd(best=True)", 7),
        ("pgd(restarts=3)", 21),
        ("nes(samples=4)", 48),
        ("apgd", 7),
        ("apgd(restarts=3)", 21),
        ("square(trials=9)", 10),
    ],
)
def test_a_search_says_how_often_it_asks(text: str, asks: int) -> None:
    asked = []

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        asked.append(len(rows))
        return x.square().sum((1, 2, 3))

    search = make_search(text)
    search(Problem(torch.full((2, 1, 3, 3), 0.5), objective, BUDGET, Draws(0, "x", range(2))))
    assert search.num_evaluations(BUDGET) == len(asked) == asks
    assert Transfer(surrogate=nn.Flatten(), search=search).num_evaluations(BUDGET) == asks
