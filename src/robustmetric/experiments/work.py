"""The work of one cell: train and evaluate, or measure the samplers; it goes on where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from robustmetric.data.inputs import load_pixels, relative_files
from robustmetric.evaluation.data import Subject, data_by_marks
from robustmetric.evaluation.evaluate import Evaluation
from robustmetric.evaluation.record import Record
from robustmetric.experiments.cells import Cell, Job, Samplers
from robustmetric.experiments.outcome import (
    Outcome,
    evaluation_of,
    read_outcome,
    read_result,
    run_of,
    write_result,
)
from robustmetric.experiments.samplers import measure_samplers
from robustmetric.text import printable
from robustmetric.training.checkpoint import reached
from robustmetric.training.folder import RunFolder
from robustmetric.training.recipe import named_files
from robustmetric.training.run import Machines, is_first, train
from robustmetric.training.stops import CollapsedError
from robustmetric.training.trained import load_run

Report = Callable[[str], None]


def make(job: Job, report: Report = print) -> Outcome | None:
    """Make the cell of a `job`, as far as it is not made yet, and return what it came to.

    Whatever stopped it before, a signal or a power cut, it goes on from its last checkpoint or from the
    finished pieces of its evaluation. `report` is told in lines what happens. A worker of a training that is
    not the first returns None.
    """
    task, scale, folder = job.task, job.scale, job.folder
    if (done := read_outcome(task, scale, folder)) is not None:
        return done
    if is_first() and read_result(folder) is None:
        write_result(task, scale, folder)
    if isinstance(task, Samplers):
        with _timed(job, "measure"):
            found = measure_samplers(
                scale.recipe(task),
                scale.batches,
                scale.device,
                cache=scale.cache,
                skip_broken=scale.skip_broken,
                report=report,
            )
        write_result(task, scale, folder, hardness=found, weights=scale.weights)
        return read_outcome(task, scale, folder)
    with _timed(job, "train"):
        diverged = _train(job, task, report)
    if not is_first():
        return None
    if diverged is None:
        with _timed(job, "evaluate"):
            record = _evaluate(job, task, report)
        write_result(task, scale, folder, records={evaluation_of(folder, scale).name: record.sha256})
    else:
        write_result(task, scale, folder, collapsed=diverged)
    return read_outcome(task, scale, folder)


def _train(job: Job, task: Cell, report: Report) -> str | None:
    """Train to the end, past a collapse as published; return how the network diverged, if it did."""
    scale, run, recipe = job.scale, run_of(job.folder), job.scale.recipe(task)
    if run.last.is_file() and reached(run.checkpoint).done == recipe.epochs:
        return None
    try:
        train(
            recipe,
            run.path,
            resume=True,
            machines=Machines(device=scale.accelerator, devices=scale.workers(task.data)),
            cache=scale.cache,
            skip_broken=scale.skip_broken,
            progress=False,
            go_on_after_collapse=True,
            report=report,
        )
    except CollapsedError as error:
        return str(error).partition(". ")[0]
    return None


def _evaluate(job: Job, task: Cell, report: Report) -> Record:
    """Evaluate the last weights of the cell's run on the test images."""
    scale = job.scale
    own = bool(named_files(scale.recipe(task).model_dump()))  # the user named the code of this cell
    folder = RunFolder(run_of(job.folder).path, trust=own)
    run, recipe = load_run(folder.path, "last", trust=own), folder.recipe()
    (pixels,) = load_pixels(
        recipe.data,
        recipe.root,
        run.inputs,
        ["test"],
        scale.cache,
        skip_broken=scale.skip_broken,
        report=report,
    )
    data = data_by_marks(pixels, run.inputs.crop, relative_files(pixels, recipe.root))
    trained = folder.train_classes()
    subject = Subject(
        run.network.to(scale.device),
        replace(data, name=task.data, skipped=[printable(str(file)) for file in pixels.skipped]),
        train_classes=None if trained is None else [printable(name) for name in trained],
        name=folder.name,
        weights=run.chosen,
    )
    return Evaluation(subject, scale.plan(task), evaluation_of(job.folder, scale), report=report).run()


@contextmanager
def _timed(job: Job, what: str) -> Iterator[None]:
    """Write down how long the inside took, if it came to its end."""
    begun = time.monotonic()
    yield
    if is_first():
        write_result(job.task, job.scale, job.folder, seconds={what: time.monotonic() - begun})
