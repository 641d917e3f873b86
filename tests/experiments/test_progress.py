"""How far cells are, and how long the rest takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from robustmetric.experiments.cells import Cell, Job, Scale
from robustmetric.experiments.estimate import Cost, estimate
from robustmetric.experiments.outcome import evaluation_of
from robustmetric.experiments.progress import Pace, share_done
from tests.helpers.command import Clock

COST = Cost(train=30.0, evaluate=10.0, steps=100, pieces=9)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(Cell("digits", "HM[S,LGA]", 8), Scale(queries=8), tmp_path / "cell")


def log(job: Job, step: int) -> None:
    (job.folder / "run").mkdir(parents=True, exist_ok=True)
    (job.folder / "run" / "metrics.csv").write_text(f"step,loss\n{step},0.1\n")


def test_the_share_of_a_training_is_that_of_its_steps(job: Job) -> None:
    assert share_done(job, COST) == 0
    log(job, 50)
    assert share_done(job, COST) == pytest.approx(0.75 * 0.5)
    log(job, 100)
    assert share_done(job, COST) < 0.75


def test_the_share_of_an_evaluation_is_that_of_its_pieces(job: Job) -> None:
    parts = evaluation_of(job.folder, job.scale) / "parts"
    parts.mkdir(parents=True)
    for number in range(3):
        (parts / str(number)).touch()
    assert share_done(job, COST) == pytest.approx(0.75 + 0.25 * 3 / 9)


def test_the_time_left_follows_the_pace_of_this_start(job: Job) -> None:
    log(job, 50)  # by an earlier start: 15 of 40 seconds
    clock = Clock()
    pace = Pace({job: COST}, clock=clock)
    assert pace.now() == pytest.approx((15 / 40, 25))  # as foretold
    clock.now = 20.0
    log(job, 75)  # 7.5 of the foretold seconds took 20
    share, left = pace.now()
    assert share == pytest.approx(22.5 / 40, rel=0.02)
    assert left == pytest.approx(17.5 * 20 / 7.5, rel=0.05)
    pace.ended(job)
    assert pace.now() == (1.0, 0.0)


def test_workers_share_what_was_foretold(tmp_path: Path) -> None:
    jobs = [Job(Cell("digits", "N/A[R]"), Scale(), tmp_path / str(number)) for number in range(4)]
    assert Pace({job: Cost(10.0) for job in jobs}, 2, clock=Clock()).now() == (0.0, 20.0)


def test_each_kind_is_timed_once_and_more_steps_cost_more() -> None:
    """No times are asserted, but what they are multiplied with."""
    cells = [Cell("digits", "N/A[R]", None, seed) for seed in (0, 1)] + [Cell("digits", "ACT[R]", 4)]
    scale = Scale(epochs=2, queries=8, steps=1, changes={"batch": 250, "dim": 16})
    costs = estimate(cells, scale)
    assert costs[cells[0]] is costs[cells[1]]
    assert costs[cells[0]].steps == 2 * 8
    assert costs[cells[0]].pieces == 9
    assert all(cost.train > 0 and cost.evaluate > 0 for cost in costs.values())
