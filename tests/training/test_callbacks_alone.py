"""Callbacks by themselves, with a trainer that says no more than the step and what was logged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import robustmetric as rm
from robustmetric.training import Checkpoints, CollapsedError, CollapseGuard, MetricModule
from robustmetric.training.callbacks import MetricsFile
from robustmetric.training.sets import ROBUST
from tests.helpers.command import Clock


def module() -> MetricModule:
    return MetricModule(nn.Linear(2, 1, bias=False), rm.defense("N/A[R]"))


def trainer(step: int, **logged: float) -> Any:
    metrics = {name: torch.tensor(value) for name, value in logged.items()}
    return SimpleNamespace(
        global_step=step, callback_metrics=metrics, is_global_zero=True, sanity_checking=False
    )


def written(file: Path) -> float:
    """The number that the weights of a network were set to."""
    found = nn.Linear(2, 1, bias=False)
    rm.load_weights(found, file)
    return float(found.weight.detach()[0, 0])


def be(network: MetricModule, value: float) -> MetricModule:
    nn.init.constant_(network.model.weight, value)  # type: ignore[arg-type]
    return network


@pytest.mark.parametrize(
    ("scores", "by", "best"),
    [((30, 50, 40), "R@1", 1), ((30, 20, 10), "R@1", 0), ((50, 30, 50), "R@1", 2), ((30, 50, 40), ROBUST, 2)],
)
def test_the_best_weights_are_those_of_the_highest_score_the_later_of_equal_ones(
    scores: tuple[float, ...], by: str, best: int, tmp_path: Path
) -> None:
    keeper, network = Checkpoints(tmp_path, every=10, by=by), module()
    for step, score in enumerate(scores):
        keeper.on_validation_end(trainer(step, **{"R@1": score, ROBUST: step}), be(network, step))
        assert written(tmp_path / "last.safetensors") == step
    assert written(tmp_path / "best.safetensors") == best
    assert keeper.best == {"R@1": scores[best], "step": best, **({ROBUST: best} if by else {})}


@pytest.mark.parametrize(
    ("scores", "count", "undecided"),
    [
        ((100, 100, 100), 40, True),  # a ceiling from the first epoch on
        ((0, 0), 100, True),
        ((95, 100, 97.5), 40, True),  # 97.5 of 40 is [86.8, 99.9]
        ((20, 90, 88), 100, True),  # the best is no better than the last
        ((20, 50, 90), 100, False),
        ((20, 90, 60), 100, False),
        ((96.0, 95.0), 10_000, False),  # many images tell what few do not
        ((96.0, 95.0), 100, True),
        ((90,), 100, False),  # there is nothing to choose from
    ],
)
def test_a_validation_says_whether_it_tells_weights_apart(
    scores: tuple[float, ...], count: int, undecided: bool, tmp_path: Path
) -> None:
    keeper = Checkpoints(tmp_path, every=10)
    for step, score in enumerate(scores):
        resumed = Checkpoints(tmp_path, every=10)
        resumed.load_state_dict(keeper.state_dict())
        keeper = resumed
        keeper.on_validation_end(trainer(step, **{"R@1": score}), module())
    assert keeper.undecided(count) is undecided


def test_the_good_weights_are_of_before_the_spread_shrank(tmp_path: Path) -> None:
    guard, network = CollapseGuard(tmp_path, patience=3), module()
    guard.on_train_start(trainer(0), be(network, 0))
    spreads = [0.5, 0.4, 0.3, 0.2, 0.2, 0.0001, 0.0001]
    for step, spread in enumerate(spreads, 1):
        guard.on_train_batch_end(trainer(step, loss=0.1, spread=spread), be(network, step), None, None, 0)
    with pytest.raises(CollapsedError, match="collapsed at about step 6"):
        guard.on_train_batch_end(trainer(8, loss=0.1, spread=0.0), be(network, 8), None, None, 0)
    assert written(tmp_path / "good.safetensors") == 3


def worker(step: int, together: Callable[[bool], bool], saved: list[int]) -> Any:
    """A trainer in the midst of an epoch."""
    strategy = SimpleNamespace(reduce_boolean_decision=lambda mine, all: together(mine))  # noqa: A006
    return SimpleNamespace(
        global_step=step, is_last_batch=False, strategy=strategy, save_checkpoint=lambda _: saved.append(step)
    )


def test_a_checkpoint_is_written_by_time_as_well(tmp_path: Path) -> None:
    """A step takes four minutes; checkpoints come every 6 steps and, from the last one, after 10 minutes."""
    clock, saved = Clock(100.0), []  # type: ignore[var-annotated]
    keeper = Checkpoints(tmp_path, every=6, minutes=10.0, clock=clock)
    clock.now = 5000.0  # what was before the first step does not count
    keeper.on_train_start(worker(0, bool, saved), module())
    for step in range(1, 12):
        clock.now += 240
        keeper.on_train_batch_end(worker(step, bool, saved), module(), None, None, 0)
    assert saved == [3, 6, 9]


def test_workers_whose_clocks_differ_save_together(tmp_path: Path) -> None:
    """The second one is late at step 3; each of them asks the others as often, or one would wait for ever."""
    barrier, said = threading.Barrier(2, timeout=600), [False, False]
    saved: list[list[int]] = [[], []]
    asked = [0, 0]

    def train(rank: int) -> None:
        def together(mine: bool) -> bool:
            asked[rank] += 1
            said[rank] = mine
            barrier.wait()
            found = any(said)
            barrier.wait()
            return found

        clock = Clock()
        keeper = Checkpoints(tmp_path, every=5, minutes=10.0, clock=clock)
        for step in range(1, 8):
            clock.now += 100 + 100 * rank
            keeper.on_train_batch_end(worker(step, together, saved[rank]), module(), None, None, 0)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(train, rank) for rank in (0, 1)]:
            done.result()
    assert saved == [[3, 5], [3, 5]]
    assert asked[0] == asked[1]


def test_names_of_figures_are_no_formulas(tmp_path: Path) -> None:
    for step in (10, 20):
        table, now = MetricsFile(tmp_path / "metrics.csv"), trainer(step, **{"=1+1": -0.5})
        now.current_epoch = 0
        table.on_train_start(now, module())
        table.on_train_batch_end(now, module(), None, None, 0)
    head, *rows = (tmp_path / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert head.split(",")[-1] == "'=1+1"
    assert "=1+1" not in head.split(",")
    assert [row.split(",")[-1] for row in rows] == ["-0.5", "-0.5"]
