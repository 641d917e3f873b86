"""The suite with surrogates, attackers that know less and balls of L2, and the check for masked gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.errors import UserError
from robustmetric.evaluation import Evaluation, Record, load_arrays
from tests.evaluation.conftest import check_of, make_network
from tests.helpers.networks import Counted

Tiny = Callable[..., Evaluation]
Evaluated = Callable[..., Record]

FEW: dict[str, Any] = {"suite": "worst-case(goals='misrank,shift', steps=4, targets=1, trials=10)"}
FEW |= {"steps": 2, "attacks": ["ES"], "queries": 20}


def make_other(length: int = 5, pixels: int = 36) -> nn.Module:
    """Make a network with embeddings of another length."""
    linear = nn.Linear(pixels, length)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(length, pixels, generator=torch.Generator().manual_seed(1)))
        linear.bias.zero_()
    return nn.Sequential(nn.Flatten(), linear)


def searches(record: Record, goal: str) -> list[str]:
    assert record.suite is not None
    return [a.search for a in record.suite.goals[goal].attacks if a.search is not None]


# Surrogates, and attackers that know less


def test_a_surrogate_is_for_the_suite_alone(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    how: dict[str, Any] = {**FEW, "eps": 16 / 255, "alpha": 4 / 255, "batch": 16, "checks": "quick"}
    model, other = Counted(make_network()), Counted(make_other())
    plain = rm.evaluate(model, images, labels, out=tmp_path / "plain", **how)
    record = rm.evaluate(model, images, labels, surrogate=other, out=tmp_path / "both", **how)
    assert searches(plain, "misrank").count("transfer(apgd)") == 0
    assert searches(record, "misrank").count("transfer(apgd)") == 1
    assert record.scores == plain.scores, "the attacks beside the suite took the surrogate"
    assert record.network.surrogate not in (None, record.network.sha256)
    # An attack more, behind those with gradients, leaves no query better.
    one, two = (load_arrays(tmp_path / name)["suite/shift/worst"] for name in ("plain", "both"))
    assert (two >= one).all()
    assert other.backwards > 0
    assert {check_of(record, name).status for name in ("budget", "masked", "repeat")} == {"pass"}


class Numpy(nn.Module):
    """A network that torch cannot differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = np.random.default_rng(0).normal(size=(36, 8)).astype(np.float32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(x.flatten(1).numpy() @ self.weight))


@pytest.mark.parametrize("search", ["square(trials=5)", "nes(samples=2)", "transfer", "transfer(apgd)"])
def test_without_gradients_of_the_network(search: str, evaluated: Evaluated) -> None:
    surrogate = make_other() if search.startswith("transfer") else None
    record = evaluated(Numpy(), search=search, surrogate=surrogate, checks="quick", **FEW)
    wanted = ["transfer(apgd)", "square(trials=10)"] if surrogate is not None else ["square(trials=10)"]
    assert searches(record, "misrank") == searches(record, "shift") == wanted
    assert record["shift"] > 0
    assert check_of(record, "masked").status == "not run"
    if surrogate is None:
        assert record.suite is not None
        assert all(goal.backward == 0 for goal in record.suite.goals.values())


@pytest.mark.parametrize(
    ("surrogate", "told"),
    [
        (make_other(pixels=64), "(?s)surrogate.*(36|64)"),
        (Numpy(), "surrogate.*gradient|surrogate"),
        ("net", "the surrogate must be a Module, not 'net'"),
    ],
)
def test_a_surrogate_that_does_not_fit_is_refused_before_any_work(
    surrogate: Any, told: str, tiny: Tiny, tmp_path: Path
) -> None:
    model = Counted(make_network())
    with pytest.raises(UserError, match=told):
        tiny(model, surrogate=surrogate, out=tmp_path / "out", **FEW).run()
    assert model.forwards <= 40
    assert not (tmp_path / "out").exists()


def test_a_surrogate_without_transfer_or_suite_is_refused(evaluated: Evaluated) -> None:
    with pytest.raises(UserError, match="takes no surrogate: write transfer"):
        evaluated(surrogate=make_other(), **{**FEW, "suite": "none"})


# Balls of L2


L2: dict[str, Any] = {"norm": "l2", "eps": 1.0, "search": "apgd"}


@pytest.mark.parametrize("checks", ["quick", "full"])
def test_a_suite_in_a_ball_of_l2(checks: str, evaluated: Evaluated, tmp_path: Path) -> None:
    record = evaluated(checks=checks, out=tmp_path / "out", **{**FEW, **L2})
    arrays = load_arrays(tmp_path / "out")
    budget = check_of(record, "budget")
    assert budget.status == "pass"
    for name in ("ES", "suite/misrank", "suite/shift"):
        # Lengths of 36 pixels, rounded in single precision: some multiples of 6e-8.
        assert arrays[f"{name}/change"].max() <= 1 + 1e-6
        assert arrays[f"{name}/outside"].max() <= 0
    assert arrays["suite/shift/change"].min() > 0.5, "the budget is hardly used"
    assert (record.settings.norm, record.settings.eps) == ("l2", 1.0)
    failed = [check.name for check in record.checks if check.status == "fail"]
    assert not failed
    assert record["misrank"] < 50


# Masked gradients


def test_the_check_for_masked_gradients_without_a_suite_or_gradients_is_not_run(evaluated: Evaluated) -> None:
    none = check_of(evaluated(**{**FEW, "suite": "none"}, checks="none,masked"), "masked")
    blind = check_of(evaluated(**FEW, search="square(trials=3)", checks="none,masked"), "masked")
    assert none.status == blind.status == "not run"
