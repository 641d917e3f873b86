"""Networks with masked gradients: an evaluation says that its scores are not to be trusted."""

from typing import Any

import pytest

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
@pytest.mark.parametrize("seed", range(3))
def test_an_honest_network_is_not(evaluated: Evaluated, seed: int) -> None:
    """None of what tells any masked network tells it."""
    record = evaluated(make_network(seed), checks="full", **FEW)
    told = {name for masked in MASKED.values() for name in (*masked.quick, *masked.full)}
    assert told <= {check.name for check in record.checks}
    assert not alarms(record) & told
