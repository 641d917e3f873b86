"""The work of one cell: train and evaluate, or measure the samplers; what was stopped is resumed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback

from robustmetric.data.inputs import load_pixels, relative_files
from robustmetric.errors import UserError
from robustmetric.evaluation.data import Subject, data_by_marks
from robustmetric.evaluation.evaluate import Evaluation
from robustmetric.evaluation.job import Progress
from robustmetric.evaluation.record import Record
from robustmetric.experiments.cells import Cell, Job
from robustmetric.experiments.outcome import Outcome, evaluation_of, read_outcome, run_of, write_result
from robustmetric.experiments.samplers import measure_samplers
from robustmetric.files import save
from robustmetric.text import printable
from robustmetric.training.checkpoint import reached
from robustmetric.training.folder import RunFolder
from robustmetric.training.recipe import dump_recipe, named_files
from robustmetric.training.run import Machines, train
from robustmetric.training.stops import CollapsedError
from robustmetric.training.trained import load_run

Report = Callable[[str], None]


class KilledError(UserError):
    """A training that something ended from outside: made again, its cell resumes."""


def make(job: Job, report: Report = print, watch: Progress | None = None) -> Outcome | None:
    """Make the cell of a `job`, as far as it is not made yet, and return its outcome.

    A training resumes from its last checkpoint, an evaluation from its finished pieces. `report` is called
    with messages, `watch` with how far each stage is.
    """
    task, scale, folder = job.task, job.scale, job.folder
    if (done := read_outcome(task, scale, folder)) is not None:
        return done
    write_result(task, scale, folder)
    if not isinstance(task, Cell):
        options: dict[str, Any] = {"cache": scale.cache, "skip_broken": scale.skip_broken, "report": report}
        found = measure_samplers(scale.recipe(task), scale.batches, scale.torch_device, **options)
        write_result(task, scale, folder, hardness=found, weights=scale.weights)
    elif diverged := _train(job, report, watch):
        write_result(task, scale, folder, collapsed=diverged)
    else:
        record = _evaluate(job, task, report, watch)
        write_result(task, scale, folder, records={evaluation_of(folder, scale).name: record.sha256})
    return read_outcome(task, scale, folder)


def _train(job: Job, report: Report, watch: Progress | None) -> str | None:
    """Train to the end, past a collapse as published; return how the network diverged, if it did."""
    scale, run, recipe = job.scale, run_of(job.folder), job.scale.recipe(job.task)
    if run.last.is_file() and reached(run.checkpoint).done == recipe.epochs:
        return None
    try:
        if job.workers > 1:
            _train_apart(job)
        else:
            train(
                recipe,
                run.path,
                resume=True,
                machines=Machines(device=scale.device),
                cache=scale.cache,
                skip_broken=scale.skip_broken,
                callbacks=[LambdaCallback(on_train_batch_end=partial(_tell, watch))] if watch else [],
                progress=False,
                go_on_after_collapse=True,
                watch=watch and partial(_decoding, watch),
                report=report,
            )
    except CollapsedError as error:
        return str(error).partition(". ")[0]
    return None


def _tell(watch: Progress, trainer: L.Trainer, *_: object) -> None:
    watch("train", trainer.global_step, int(trainer.estimated_stepping_batches))


def _decoding(watch: Progress, split: str, done: int, count: int) -> None:
    watch(f"decode {split}", done, count)


def _train_apart(job: Job) -> None:
    """Train with several workers in a program of its own, of which Lightning starts copies."""
    scale, recipe = job.scale, job.folder / "recipe.yaml"
    save(recipe, dump_recipe(scale.recipe(job.task)))
    command = ["train", "--recipe", recipe, "--trust", "--out", run_of(job.folder).path, "--resume"]
    command += ["--devices", job.workers, "--device", scale.device, "--after-collapse", "continue"]
    command += ["--cache", scale.cache] if scale.cache else []
    command += ["--skip-broken"] if scale.skip_broken else []
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "robustmetric", *map(str, command)],
        stdout=subprocess.DEVNULL if multiprocessing.parent_process() else None,
        stderr=subprocess.PIPE,
        text=True,
        env={"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // job.workers)), **os.environ},
        start_new_session=True,  # a terminal's Ctrl-C comes from here
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    try:
        _, said = process.communicate()
    except BaseException:
        process.terminate()
        process.communicate()  # a full pipe would keep it from ending
        raise
    code, told = process.returncode, " ".join(said.split()).rpartition("error: ")[2]
    if code < 0 or code - 128 in (signal.SIGINT, signal.SIGTERM):
        raise KilledError(f"its training was ended from outside (code {code}): run the same command again")
    if "the network diverged" in told:
        raise CollapsedError(told)
    if code:
        raise UserError(told)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _evaluate(job: Job, task: Cell, report: Report, watch: Progress | None) -> Record:
    """Evaluate the last weights of the cell's run on the test images."""
    scale = job.scale
    own = bool(named_files(scale.recipe(task).model_dump()))  # the user named the code of this cell
    folder = RunFolder(run_of(job.folder).path, trust=own)
    run, recipe = load_run(folder.path, "last", trust=own), folder.recipe()
    options: dict[str, Any] = {"skip_broken": scale.skip_broken, "report": report}
    (pixels,) = load_pixels(recipe.data, recipe.root, run.inputs, ["test"], scale.cache, **options)
    data = data_by_marks(pixels, run.inputs.crop, relative_files(pixels, recipe.root))
    trained = folder.train_classes()
    subject = Subject(
        run.network.to(scale.torch_device),
        replace(data, name=task.data, skipped=[printable(str(file)) for file in pixels.skipped]),
        train_classes=None if trained is None else [printable(name) for name in trained],
        name=folder.name,
        weights=run.chosen,
    )
    return Evaluation(subject, scale.plan(task), evaluation_of(job.folder, scale), watch, report).run()
