"""Progress on a terminal and without one."""

from __future__ import annotations

import io
import itertools
import re
from typing import Any

import pytest

from robustmetric.cli.progress import Progress
from robustmetric.cli.terminal import Terminal
from tests.helpers.command import Clock

HOSTILE = "[/b]\x1b[2J"


def on(clock: Clock, **options: Any) -> tuple[Progress, io.StringIO]:
    text = io.StringIO()
    return Progress(Terminal(file=text, width=80, color_system=None, **options), clock), text


@pytest.mark.parametrize("every", [0.5, 7.0, 59.0, 60.0])
def test_without_a_terminal_a_line_is_printed_every_minute(every: float) -> None:
    clock = Clock()
    progress, text = on(clock)
    lines: list[tuple[float, str]] = []
    with progress:
        progress.update("embed", 1, 1)
        progress.update("none", 0, 0)
        for step in range(round(1200 / every) + 1):
            before = len(text.getvalue().splitlines())
            progress.update("ES", min(step * every / 600, 2), 2)
            lines += [(clock.now, line) for line in text.getvalue().splitlines()[before:]]
            clock.now += every
    assert text.getvalue().splitlines()[0] == "embed: done"
    times = [0.0, *(when for when, line in lines if "of 2" in line)]
    assert all(60 <= later - sooner < 60 + every for sooner, later in itertools.pairwise(times))
    assert 1200 - times[-1] < 60 + every
    left = re.fullmatch(r"ES: 0.\d of 2, 0:(\d\d):\d\d left", lines[3][1])
    assert left is not None
    assert int(left[1]) == pytest.approx((1200 - lines[3][0]) / 60, abs=2)


def test_quick_work_gets_one_line_a_stage_and_each_validation_one() -> None:
    clock = Clock()
    progress, text = on(clock)
    for done in (0, 0.25, 0.5, 1, 1.5, 2, 2):
        clock.now += 5
        progress("ES", done, 2)
    progress.decoding("train", 2, 2)
    progress.update("train", 5, 10, "loss 0.183")
    progress.update("train", 6, 10, "loss 0.183, 61% perturbed, R@1 45.9", now=True)
    lines = ["ES: done", "decode train: done", "train: 6 of 10, loss 0.183, 61% perturbed, R@1 45.9"]
    assert text.getvalue().splitlines() == lines


def test_what_was_done_before_says_nothing_of_the_pace() -> None:
    clock = Clock()
    progress, text = on(clock)
    for done in range(1000, 5001, 1000):
        progress.update("embed images", done, 5000)
        clock.now += 60
    assert text.getvalue().splitlines()[1:] == [
        "embed images: 3,000 of 5,000, 0:02:00 left",
        "embed images: 4,000 of 5,000, 0:01:00 left",
        "embed images: done",
    ]


def test_a_terminal_gets_a_bar_for_each_stage_that_does_not_wrap() -> None:
    clock = Clock()
    progress, text = on(clock, force_terminal=True)
    with progress:
        for step in range(3):
            progress.update(HOSTILE, step, 10)
            progress.update("train", 1000 * step, 120_000, "loss 0.183, 61% perturbed, R@1 45.9")
            clock.now += 30
    drawn = text.getvalue()[text.getvalue().rindex("\x1b[2K") :]
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", drawn).splitlines()
    assert [re.sub("[━╸╺ ]+", " ", line.rstrip()) for line in lines if line] == [
        r"[/b]\x1b[2J 2/10 0:04:00",
        "train 2000/120000 loss 0.183, 61% perturbed, R@1 45.9 0:59:00",
    ]
    assert max(map(len, lines)) <= 80
