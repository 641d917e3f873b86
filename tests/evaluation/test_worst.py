"""The worst case in a record: what it is made of, what it must not depend on, and how it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import robustmetric as rm
from robustmetric.attacks import Column
from robustmetric.evaluation import Record, load_arrays, load_record
from tests.evaluation.conftest import Evaluated

SUITE = "worst-case(steps=6, targets=2, trials=20)"
FEW: dict[str, Any] = {"suite": "worst-case(goals='misrank,shift', steps=3, targets=1, trials=5)"}
FEW |= {"steps": 2, "attacks": ["ES"], "batch": 4}
BESIDE = {"misrank": ["ES:R", "LTM", "GTM"], "translocate": ["GTT"], "shift": ["ES:D"]}


@pytest.fixture(scope="module")
def written(evaluated: Evaluated, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Path]:
    out = tmp_path_factory.mktemp("worst") / "out"
    return evaluated(suite=SUITE, checks="quick", out=out), out


# What it is


@pytest.mark.slow
def test_each_score_is_the_mean_of_the_worst_of_every_part(written: tuple[Record, Path]) -> None:
    record, out = written
    arrays = {name: value.numpy() for name, value in load_arrays(out).items()}
    assert record.suite is not None
    assert len(record.suite.goals) == 8
    differs = False
    for name, goal in record.suite.goals.items():
        alone, before, by = (arrays[f"suite/{name}/{part}"] for part in ("worst", "before", "by"))
        assert len(alone) == goal.queries == 40
        parts = {c: arrays[f"{c.partition(':')[0]}/after/{c}"] for c in BESIDE.get(name, ())}
        worst, broke = [], dict.fromkeys(range(-1, len(goal.attacks) + 1), 0)
        ways = len([attempt for attempt in goal.attacks if attempt.search is not None])
        for query in range(40):
            values = [alone[query], *(part[query] for part in parts.values())]
            worst.append(min(values) if goal.better == "higher" else max(values))
            # The suite comes first, then the others in their order.
            first = values.index(worst[-1])
            broke[int(by[query]) if first == 0 else ways + first - 1] += 1
            assert alone[query] <= before[query] if goal.better == "higher" else alone[query] >= before[query]
        assert goal.value == pytest.approx(np.mean(worst), abs=1e-9)
        assert goal.alone == pytest.approx(alone.mean(), abs=1e-9)
        assert goal.before == pytest.approx(before.mean(), abs=1e-9)
        assert goal.low is not None
        assert goal.high is not None
        assert goal.value is not None
        assert goal.low <= goal.value <= goal.high
        # Who broke what adds up.
        shares = [attempt.broke for attempt in goal.attacks if attempt.attack != "before"]
        assert shares == pytest.approx([2.5 * broke[k] for k in range(len(shares))])
        end = {"higher": 0.0, "lower": 100.0}[goal.better or ""]
        lost = 100.0 if name == "shift" else 100 * float(np.mean(np.array(worst) == end))
        assert sum(attempt.broke or 0 for attempt in goal.attacks) == pytest.approx(lost)
        assert [attempt.attack for attempt in goal.attacks if attempt.search is None] == [
            *(["before"] if name != "shift" else []),
            *parts,
        ]
        assert sum(attempt.forward for attempt in goal.attacks) == goal.forward
        assert sum(attempt.backward for attempt in goal.attacks) == goal.backward
        differs |= goal.value != goal.alone
    assert differs, "no attack beside the suite counts, and nothing of this is seen"


@pytest.mark.slow
def test_attacks_by_the_reference_are_not_counted(evaluated: Evaluated) -> None:
    record = evaluated(suite=SUITE, protocol="reference")
    assert record.suite is not None
    for goal in record.suite.goals.values():
        assert goal.value == goal.alone
        assert [attempt.attack for attempt in goal.attacks if attempt.search is None] in ([], ["before"])


def test_the_goal_itself_among_the_attacks_counts(evaluated: Evaluated, tmp_path: Path) -> None:
    how = {"suite": "worst-case(goals='promote', steps=1, trials=1, restarts=0)", "eps": 24 / 255}
    record = evaluated(attacks=["promote", "promote(by='hinge')"], out=tmp_path / "out", **how)
    assert record.suite is not None
    goal, arrays = record.suite.goals["promote"], load_arrays(tmp_path / "out")
    parts = [
        "suite/promote/worst",
        "promote/after/promote",
        *[f"{n}/after/{n}" for n in ["promote(by='hinge')"]],
    ]
    worst = torch.stack([arrays[name] for name in parts]).amax(0)
    assert record["promote"] == record.scores["promote"].value, "the attack's own"
    assert goal.value == pytest.approx(float(worst.mean()))
    assert float(worst.mean()) > (goal.alone or 0)


# What it does not depend on: for workers and interruptions see test_job.py


# Records


def test_a_record_with_a_suite_is_read_as_it_was_written(written: tuple[Record, Path]) -> None:
    record, out = written
    assert load_record(out) == record
    assert record.settings.suite == SUITE
    assert record.suite is not None
    arrays = load_arrays(out)
    for name, goal in record.suite.goals.items():
        assert record[name] == goal.value
        assert {key for key in arrays if key.startswith(f"suite/{name}/")} == {
            f"suite/{name}/{part}" for part in ("before", "worst", "by", "change", "outside")
        }
        assert (arrays[f"suite/{name}/change"] <= 16 / 255 + 1e-6).all()
        assert ((arrays[f"suite/{name}/change"] > 0) == (arrays[f"suite/{name}/by"] >= 0)).all()
    assert record.goal_column("shift") == Column("shift", "lower", rm.attacks.DISTANCE)
    assert record.goal_column("misrank").heading == "misrank ↑"
    with pytest.raises(KeyError, match="'ES' was no goal of a suite"):
        record.goal_column("ES")
    with pytest.raises(KeyError, match=r"'misrnk' was not measured; measured: misrank, .*R@1"):
        record["misrnk"]
    line = next(line for line in str(record).splitlines() if line.startswith("worst case: "))
    assert f"misrank {record['misrank']:.1f}  translocate" in line
    assert f"shift {record['shift']:.3f}" in line
