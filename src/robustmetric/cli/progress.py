"""Progress of long work: one bar on a terminal, else a line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from robustmetric.text import printable

if TYPE_CHECKING:
    from robustmetric.experiments.progress import Pace
    from robustmetric.training.progress import Status

SILENCE = 60.0
"""Seconds after which something is said, where there is no terminal."""

_BAR = 10  # columns that a bar takes at least


class Training:
    """Shows where a training is: a bar of one line on a terminal, else a line at least every minute.

    Without a terminal each validation gets a line too.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[told]}", markup=False),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None
        self.spoke = clock()

    def __call__(self, status: Status) -> None:
        """Show a moment of the training."""
        if self.console.is_terminal:
            self._draw(status)
        elif status.validated or self.clock() - self.spoke >= SILENCE:
            self.spoke = self.clock()
            told = [f"step {status.step:,} of {status.steps:,}", *_figures(status).values()]
            self.console.print(", ".join(told), highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the bar as it is."""
        self.bar.stop()

    def _draw(self, status: Status) -> None:
        if self.task is None:
            self.bar.start()
            self.task = self.bar.add_task("", total=status.steps, told="")
        step = f"step {status.step:,}/{status.steps:,}"
        figures = _figures(status)
        room = self.console.width - cell_len(step) - _BAR - 2
        # What can be read elsewhere goes first where there is no room.
        for less in ("perturbed", "loss", "R@1", "left"):
            told = "  ".join(figures.values())
            if cell_len(told) <= room:
                break
            figures.pop(less, None)
        told = "  ".join(figures.values())
        self.bar.update(self.task, completed=status.step, description=step, told=told)


def _figures(status: Status) -> dict[str, str]:
    """Write the figures that are known."""
    found = {
        "loss": None if status.loss is None else f"loss {status.loss:.3g}",
        "perturbed": None if status.perturbed is None else f"{100 * status.perturbed:.0f} % perturbed",
        "R@1": None if status.recall is None else f"R@1 {status.recall:.1f}",
        "left": None if not status.left else f"{duration(status.left)} left",
    }
    return {name: text for name, text in found.items() if text is not None}


class Decoding:
    """Shows how far the decoding of images is: a bar for each split, or a line at least every minute."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            MofNCompleteColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {}
        self.spoke = 0.0

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, split: str, done: int, total: int) -> None:
        """Show how far a split is."""
        if split not in self.tasks:
            self.bar.start()
            self.tasks[split] = self.bar.add_task(printable(f"decode {split} images"), total=total)
            self._say(f"decode {total:,} {split} images")
        elif done == total or self.clock() - self.spoke >= SILENCE:
            self._say(f"decode {split} images: {done:,} of {total:,}")
        self.bar.update(self.tasks[split], completed=done)
        if done == total:
            self.bar.stop()

    def _say(self, text: str) -> None:
        self.spoke = self.clock()
        if not self.console.is_terminal:
            self.console.print(text, highlight=False)


class Counting:
    """Shows how far work is that is counted: a bar on a terminal, else a line at least every minute.

    `doing` says what is done, such as "embed images". What was done when it is first told does not count for
    the time that is left.
    """

    def __init__(self, console: Console, doing: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.doing, self.clock = console, doing, clock
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None
        self.begun, self.first, self.spoke = 0.0, 0, 0.0

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that so many of all are done."""
        now = self.clock()
        if self.task is None:
            self.begun, self.first, self.spoke = now, done, now
            self.task = self.bar.add_task(self.doing, total=total, left="")
            self.bar.start()
        made, left = done - self.first, ""
        if made and done < total:
            left = f"about {duration((now - self.begun) / made * (total - done))} left"
        self.bar.update(self.task, completed=done, left=left)
        if not self.console.is_terminal and now - self.spoke >= SILENCE:
            self.spoke = now
            told = ", ".join(filter(None, (f"{self.doing}: {done:,} of {total:,}", left)))
            self.console.print(told, highlight=False)


class Making:
    """Shows how far the cells of experiments are: a bar on a terminal, else a line at least every minute.

    `pace` tells the share that is done and the seconds that are left; it is asked from a thread, for cells
    take long.
    """

    def __init__(self, console: Console, pace: Pace) -> None:
        self.console, self.pace = console, pace
        self.bar = Progress(
            TextColumn("cells", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True, name="pace")

    def __enter__(self) -> Making:
        self.bar.start()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.bar.stop()

    def _look(self) -> None:
        task = self.bar.add_task("", total=1.0, left="")
        while not self.over.wait(1.0 if self.console.is_terminal else SILENCE):
            share, left = self.pace.now()
            self.bar.update(task, completed=share, left=f"{duration(left)} left")
            if not self.console.is_terminal:
                self.console.print(f"{100 * share:.0f} % done, {duration(left)} left", highlight=False)


def duration(seconds: float) -> str:
    """Write a time in the unit that suits it.

    >>> duration(0.2), duration(80), duration(100), duration(5000), duration(8000)
    ('1 s', '80 s', '2 min', '83 min', '2 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{round(seconds / 3600)} h"
