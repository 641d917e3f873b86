"""Networks with masked gradients: an evaluation says that its scores are not to be trusted."""

from typing import Any

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import Transfer
from robustmetric.evaluation import Record
from tests.evaluation.conftest import Evaluated, make_network
from tests.helpers.masked import MASKED

# A large part of the ten, and few queries; eight is the fewest that `eps-1` judges.
FEW: dict[str, Any] = {"attacks": ["CA+", "ES", "LTM", "GTM"], "queries": 16}
AGAINST_CHANCE = {"dithered", "shaken"}


def alarms(record: Record) -> set[str]:
    return {check.name for check in record.checks if check.status in ("warn", "fail")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MASKED)
def test_a_masked_network_is_told(evaluated: Evaluated, kind: str) -> None:
    mask, quick, full = MASKED[kind]
    assert alarms(evaluated(mask(make_network()), checks="quick", **FEW)) >= {*quick}
    found = alarms(evaluated(mask(make_network()), checks="full", **FEW))
    assert found >= {*quick, *full}


@pytest.mark.slow
def test_the_ers_of_a_masked_network_is_not_valid(evaluated: Evaluated) -> None:
    record = evaluated(MASKED["rounded"].mask(make_network()), steps=2, queries=8, checks="quick")
    assert {"gradient", "noise"} <= {check.name for check in record.checks if check.status == "fail"}
    assert record.ers is not None
    assert not record.ers.valid
    assert {"gradient", "noise"} <= {*record.ers.why.split()}
    assert f"not valid: {record.ers.why}" in str(record)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_honest_network_is_not(evaluated: Evaluated, seed: int) -> None:
    """None of what tells any masked network tells it."""
    record = evaluated(make_network(seed), checks="full", **FEW)
    told = {name for masked in MASKED.values() for name in (*masked.quick, *masked.full)}
    assert told <= {check.name for check in record.checks}
    assert not alarms(record) & told


@pytest.mark.parametrize("kind", [kind for kind in MASKED if kind not in AGAINST_CHANCE])
def test_a_mask_hides_and_does_not_protect(evaluated: Evaluated, kind: str) -> None:
    """What is found on the network without its mask moves the masked one, and its own gradient does not."""
    network = make_network()
    masked = MASKED[kind].mask(network)
    own, carried = (
        evaluated(masked, attacks=["ES"], search=search) for search in ("pgd", Transfer(surrogate=network))
    )
    assert carried["ES:D"] > 1.5 * own["ES:D"]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["negated", "misled"])
def test_a_turned_gradient_changes_no_value(images: Tensor, kind: str) -> None:
    network = make_network()
    # What is added and taken away again leaves a unit of rounding.
    torch.testing.assert_close(MASKED[kind].mask(network)(images), network(images), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["honest", *MASKED])
def test_the_suite_tells_what_squares_find_and_gradients_do_not(evaluated: Evaluated, kind: str) -> None:
    """Noise hides no gradient: it is told by `repeat`."""
    network = make_network() if kind == "honest" else MASKED[kind].mask(make_network())
    # A ball in which nearly all of the honest network's queries are lost.
    record = evaluated(
        network, eps=40 / 255, attacks=["TMA"], suite="worst-case(goals='misrank')", checks="none,masked"
    )
    told = alarms(record) & {"masked"}
    assert bool(told) == (kind not in {"honest", *AGAINST_CHANCE})
