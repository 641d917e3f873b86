"""The attacks of a goal in turn: against each of them alone, with more of everything, and by what they cost.

Networks and images are of double precision: queries are attacked in other batches than alone, and rounding
of 1e-16 turns no sign of a gradient here. Where values are no shares, 1e-9 is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robustmetric.evaluation import Evaluation, run_attack
from robustmetric.evaluation.suite import BEFORE, GOALS, WorstCase, run_ensemble
from tests.evaluation.conftest import make_network
from tests.helpers.networks import Counted

Tiny = Callable[..., Evaluation]
Prepared = Callable[..., Evaluation]

SMALL: dict[str, Any] = {"steps": 6, "trials": 20, "targets": 2, "restarts": 2}


@pytest.fixture
def prepared(tiny: Tiny, images: Tensor) -> Prepared:
    """Embed the small world for a suite of one goal; nothing is attacked yet."""

    def prepare(goal: str, model: nn.Module | None = None, **changes: Any) -> Evaluation:
        options = {**SMALL, **{k: changes.pop(k) for k in [*changes] if k in SMALL}}
        suite = WorstCase(goals=[goal], **options)
        model = make_network() if model is None else model
        settings = {"images": images.double(), "attacks": ["ES"], "suite": suite, **changes}
        evaluation = tiny(model.double(), **settings)
        with evaluation.subject.frozen():
            evaluation.embed()
        return evaluation

    return prepare


def ensemble(evaluation: Evaluation, numbers: Tensor | None = None, batch: int = 16) -> dict[str, Tensor]:
    """Attack for the goal of an evaluation that is prepared."""
    suite = evaluation.plan.suite
    assert suite is not None
    (goal,) = suite.wanted
    with evaluation.subject.frozen():
        return run_ensemble(
            evaluation.view,
            goal,
            evaluation.attempts[goal.name],
            torch.arange(40) if numbers is None else numbers,
            replace(evaluation.suite_threat, batch=batch),
            surrogate=evaluation.other,
        )


def alone(evaluation: Evaluation) -> Tensor:
    """Run each attack of the goal by itself on all queries: (W, 40) values of the goal's column."""
    suite = evaluation.plan.suite
    assert suite is not None
    found = []
    with evaluation.subject.frozen():
        for way in evaluation.attempts[suite.wanted[0].name]:
            outcome = run_attack(
                evaluation.view,
                way.attack,
                torch.arange(40),
                replace(evaluation.suite_threat, search=way.search),
                purpose=way.purpose,
                surrogate=evaluation.other if way.search.network is not None else None,
            )
            found.append(outcome.after[way.attack.columns[0].name].double())
    return torch.stack(found)


def worse(goal: str, one: Tensor, other: Tensor) -> Tensor:
    """Return where one value of a goal is worse than another, by more than rounding."""
    higher = goal.startswith(("misrank", "translocate"))
    return (other - one if higher else one - other) > 1e-9


def make_other() -> nn.Module:
    """Make a surrogate with shorter embeddings."""
    network = nn.Linear(36, 5).double()
    with torch.no_grad():
        network.weight.copy_(torch.randn(5, 36, generator=torch.Generator().manual_seed(1)))
        network.bias.zero_()
    return nn.Sequential(nn.Flatten(), network)


# Against each attack alone


@pytest.mark.parametrize("transfer", [False, True])
@pytest.mark.parametrize("goal", [*GOALS, "promote(k=10)", "demote(k=3)"])
def test_a_query_is_lost_to_the_first_attack_that_breaks_it_alone(
    goal: str, transfer: bool, prepared: Prepared
) -> None:
    evaluation = prepared(goal, surrogate=make_other() if transfer else None)
    found, values = ensemble(evaluation), alone(evaluation)
    for query in range(40):
        before = float(found["before"][query])
        worst, by = before, BEFORE
        for k, value in enumerate(values[:, query].tolist()):
            lost = goal != "shift" and worst == (0.0 if goal[0] in "mt" else 100.0)
            if not lost and bool(worse(goal, torch.tensor(value), torch.tensor(worst))):
                worst, by = value, k
        assert float(found["worst"][query]) == pytest.approx(worst, abs=1e-9)
        if goal != "shift":  # of two attacks that reach the same distance, either is the first
            assert int(found["by"][query]) == by, query
        # At most the value of every part, exactly.
        assert not worse(goal, values[:, query], found["worst"][query]).any()
    assert (found["by"] >= 0).any()


def test_more_than_the_first_attack_breaks_something(prepared: Prepared) -> None:
    """Or the test above would see nothing."""
    assert {*ensemble(prepared("misrank"))["by"].tolist()} >= {-1, 0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["misrank", "promote", "shift", "demote(side='candidate')"])
def test_neither_order_nor_batch_nor_company_matters(goal: str, prepared: Prepared) -> None:
    evaluation = prepared(goal)
    whole = ensemble(evaluation)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:30]
    for batch in (7, 30):
        part = ensemble(evaluation, order, batch)
        assert torch.equal(part["number"], order)
        for name in ("before", "worst", "change", "outside"):
            torch.testing.assert_close(part[name], whole[name][order], rtol=0, atol=1e-9, msg=name)
        assert torch.equal(part["by"], whole["by"][order])


def test_queries_without_an_answer_are_left_alone(prepared: Prepared, labels: Tensor) -> None:
    single = labels.clone()
    single[[3, 20]] = torch.tensor([50, 51])
    model = Counted(make_network())
    evaluation = prepared("misrank", model, labels=single)
    found = ensemble(evaluation)
    assert found["before"].isnan().nonzero()[:, 0].tolist() == [3, 20]
    assert found["worst"].isnan().nonzero()[:, 0].tolist() == [3, 20]
    assert found["by"][[3, 20]].tolist() == [BEFORE, BEFORE]
    count = model.forwards
    assert ensemble(evaluation, torch.tensor([3, 20]))["forward"].sum() == 0
    assert model.forwards == count


# More of everything


class Wavy(nn.Module):
    """A network whose gradients lead to the next wave only, so that it matters where a search begins."""

    def __init__(self, waves: float) -> None:
        super().__init__()
        self.inner, self.waves = make_network(), waves

    def forward(self, x: Tensor) -> Tensor:
        linear, last = self.inner[1], self.inner[3]
        z: Tensor = last((self.waves * linear(x.flatten(1))).sin())
        return z


def assert_never_better(goal: str, found: Sequence[dict[str, Tensor]]) -> None:
    for less, more in pairwise(found):
        better = worse(goal, less["worst"], more["worst"])
        assert not better.any(), better.nonzero()[:, 0]
    assert worse(goal, found[-1]["worst"], found[0]["worst"]).any(), "more of it changed nothing"


@pytest.mark.parametrize("goal", ["misrank", "promote", "shift", "promote(side='candidate')"])
@pytest.mark.parametrize(("option", "values"), [("restarts", [0, 1, 4]), ("trials", [1, 6, 40, 100])])
def test_more_never_leaves_a_query_better(
    option: str, values: list[Any], goal: str, prepared: Prepared
) -> None:
    changes: dict[str, Any] = {"eps": 24 / 255, "steps": 3, "trials": 1, "targets": 0, "restarts": 1}
    model: nn.Module | None = None
    if option == "trials":  # as the only attack: others would have broken the query before
        changes["search"] = "square"
    elif option == "restarts":
        model, changes["eps"] = (Wavy(5), 16 / 255) if goal == "misrank" else (Wavy(12), 24 / 255)
    assert_never_better(goal, [ensemble(prepared(goal, model, **{**changes, option: v})) for v in values])


def test_more_targets_never_leave_a_query_better(prepared: Prepared) -> None:
    how = {"restarts": 0, "steps": 3, "trials": 1, "eps": 16 / 255}
    found = [ensemble(prepared("misrank", Wavy(5), targets=targets, **how)) for targets in (0, 1, 4)]
    assert_never_better("misrank", found)


# What it costs


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["misrank", "promote", "shift", "misrank(side='candidate')"])
def test_passes_are_counted(goal: str, prepared: Prepared) -> None:
    model = Counted(make_network())
    evaluation = prepared(goal, model)
    model.forwards = model.backwards = 0
    found = ensemble(evaluation)
    assert found["forward"].sum() == model.forwards
    assert found["backward"].sum() == model.backwards
    assert 0 < model.backwards < model.forwards
    for query in range(0, 40, 5):
        model.forwards = 0
        part = ensemble(evaluation, torch.tensor([query]))
        assert part["forward"].sum() == model.forwards
        if int(part["by"]) >= 0 and goal != "shift":
            assert part["forward"][0, int(part["by"]) + 1 :].sum() == 0, "a lost query was attacked again"
            assert part["forward"][0, int(part["by"])] > 0
