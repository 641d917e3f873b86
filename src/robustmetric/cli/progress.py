"""Progress of long work: a bar for each stage on a terminal, else a line at least every minute."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich import progress as bars
from rich.console import Console
from rich.table import Column

from robustmetric.text import printable

SILENCE = 60.0
"""Seconds after which a line is printed where there is no terminal."""


class Progress:
    """Shows how far each stage of the work is, and how long the stage will still take.

    Work that was done when a stage was first shown does not count towards its pace. A Progress can be called
    in place of `update`, as `evaluation.job.Progress`.

    >>> with Progress(Console(width=80)) as progress:
    ...     progress.update("embed", 1, 2)
    ...     progress.update("embed", 2, 2, note="no duplicates")
    embed: done, no duplicates
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.bars = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[note]}", markup=False),
            bars.TimeRemainingColumn(),
            console=console,
            expand=True,
            disable=not console.is_terminal,
            get_time=clock,
            speed_estimate_period=3600,
        )
        self.tasks: dict[str, bars.TaskID] = {}
        self.spoke = clock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def update(self, stage: str, done: float, total: int, note: str = "", *, now: bool = False) -> None:
        """Show that `done` of all pieces of a `stage` are done, with a `note`.

        A piece that is not finished counts by its share. `now` prints a line even if one was printed lately.
        """
        if total == 0:
            return
        before = -1.0
        if stage in self.tasks:
            before = self._task(stage).completed
            self.bars.update(self.tasks[stage], completed=done, total=total, note=printable(note))
        else:
            self.bars.start()
            named = printable(stage)
            self.tasks[stage] = self.bars.add_task(named, total=total, completed=done, note=printable(note))  # type: ignore[arg-type]
        if self.console.is_terminal:
            return
        finished = done == total != before
        if finished or now or self.clock() - self.spoke >= SILENCE:
            self.spoke = self.clock()
            left = "" if done >= total else bars.TimeRemainingColumn().render(self._task(stage)).plain
            how_far = "done" if finished else f"{done:,.{int(done % 1 > 0)}f} of {total:,}"
            told = [f"{stage}: {how_far}", note, f"{left} left" if left.strip("-:") else ""]
            self.say(", ".join(filter(None, told)))

    __call__ = update

    def decoding(self, split: str, done: int, total: int) -> None:
        """Show how many images of a `split` are decoded: the `watch` of whatever loads images."""
        self.update(f"decode {split}", done, total)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def _task(self, stage: str) -> bars.Task:
        return self.bars.tasks[list(self.tasks).index(stage)]
