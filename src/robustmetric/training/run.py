"""A run: from a recipe to a folder with a trained network, resumable at any moment."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from robustmetric.data.cache import ChangedError
from robustmetric.errors import UserError
from robustmetric.files import check_writable, remedy
from robustmetric.locks import LOCK, locked
from robustmetric.training.callbacks import CollapseGuard, Keeper, MetricsFile
from robustmetric.training.checkpoint import AtomicCheckpointIO, Reached, reached, unfit, while_restoring
from robustmetric.training.module import MetricModule
from robustmetric.training.network import make_network
from robustmetric.training.origins import code_of, images_of
from robustmetric.training.parts import defense_of, steps_of
from robustmetric.training.recipe import Recipe
from robustmetric.training.robust import ROBUST, attacked_rows, robust_recall
from robustmetric.training.runs import RunFolder
from robustmetric.training.schedule import scheduler
from robustmetric.training.sets import PairData, Sets, load_sets
from robustmetric.training.stops import (
    CollapsedError,
    CutShortError,
    Report,
    Signals,
    Stopped,
    stopping,
    unsaved,
)
from robustmetric.training.workers import is_first, number_worker, together


@dataclass(frozen=True)
class Machines:
    """What to train on: `devices` workers on each of `nodes` machines; `accelerator` as Lightning has it.

    >>> Machines(devices=2, nodes=4).workers
    8
    """

    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        most = {"devices": max(8, os.cpu_count() or 1), "nodes": 10_000}
        for name, value in (("devices", self.devices), ("nodes", self.nodes)):
            if not 1 <= value <= most[name]:
                raise UserError(f"{name} must be 1 to {most[name]:,} here, not {value}", parameter=name)

    @property
    def workers(self) -> int:
        """The number of all workers."""
        return self.devices * self.nodes


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    machines: Machines | None = None,
    cache: Path | None = None,
    skip_broken: bool = False,
    callbacks: Sequence[L.Callback] = (),
    loggers: Sequence[Any] = (),
    progress: bool = True,
    go_on_after_collapse: bool = False,
    watch: Callable[[str, int, int], None] | None = None,
    report: Report = print,
) -> MetricModule:
    """Train as a `recipe` says, write to `out` all that explains and continues the run; return the module.

    `out` gets `recipe.yaml` (as resolved), `run.json` (versions, images left out, which images chose the
    best weights), `metrics.csv`, `last.ckpt` (Lightning's checkpoint, every `save_every` steps or
    `save_minutes`, and on SIGTERM or Ctrl-C), `last.safetensors` and `best.safetensors` (by R@1), and
    `code/`, copies of the Python files that the recipe names. A start that fails before its first step
    leaves nothing in `out`; what can be refused is refused before images are decoded, with the network
    tried on a few. A stop that was asked for raises `Stopped` when its checkpoint is written; a network
    that collapses raises `CollapsedError`, with the last good weights in `good.safetensors`; a disk that
    is full, or a worker that is killed, a `CutShortError`. Nobody else can train in `out` meanwhile.

    - `resume`: go on with the run in `out` from its last checkpoint; `recipe` may have other epochs and
      another root; images, the run's copies of files and the number of workers must be those it began with.
    - `machines`: what to train on, by default one worker on the best device available.
    - `cache`: where decoded images are kept, by default ``~/.cache/robustmetric``.
    - `skip_broken`: leave out images that cannot be read.
    - `callbacks`, `loggers`: more of Lightning's, besides those of the run.
    - `progress`: show Lightning's progress bar.
    - `go_on_after_collapse`: report a collapse and train on.
    - `watch`: is told, while images are decoded, the split, how many are done and how many there are.
    - `report`: is called with each message for the user.

    >>> import tempfile
    >>> from robustmetric.training import load_recipe
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recipe = load_recipe("digits", {"epochs": 1, "steps": 1, "batch": 512})
    ...     module = train(recipe, Path(folder, "run"), progress=False)
    ...     sorted(path.name for path in Path(folder, "run").glob("*.safetensors"))
    ['best.safetensors', 'last.safetensors']
    """
    run = RunFolder(out)
    hold = nullcontext()
    machines = machines or Machines()
    number_worker(machines.devices, machines.nodes)
    if not is_first():
        report = _nothing
    else:
        check_writable(run.path)
        hold = locked(run.path, "a training", report)  # type: ignore[assignment]
    with hold:
        return _train(
            recipe,
            run,
            resume=resume,
            machines=machines,
            cache=cache,
            skip_broken=skip_broken,
            callbacks=callbacks,
            loggers=loggers,
            progress=progress,
            go_on_after_collapse=go_on_after_collapse,
            watch=watch,
            report=report,
        )


def _train(
    recipe: Recipe,
    run: RunFolder,
    *,
    resume: bool,
    machines: Machines,
    cache: Path | None,
    skip_broken: bool,
    callbacks: Sequence[L.Callback],
    loggers: Sequence[Any],
    progress: bool,
    go_on_after_collapse: bool,
    watch: Callable[[str, int, int], None] | None,
    report: Report,
) -> MetricModule:
    """Train in a folder that is this program's own."""
    if is_first():
        run.check(recipe, resume)
    again = resume and run.exists
    if again:
        if is_first():
            run.check_origin({"workers": machines.workers, "code": code_of(run.code)})
        recipe = run.continued(recipe, report)
    so_far = reached(run.checkpoint) if again else Reached(0, 0, 0)
    _check_epochs(run, recipe.epochs, so_far, report)
    go_on = run.checkpoint if again and run.checkpoint.exists() else None
    method = defense_of(recipe)
    signals = Signals()
    robust = recipe.validate_by == "robust"
    by = ROBUST if robust else "R@1"
    keeper = Keeper(run.path, recipe.save_every, signals, minutes=recipe.save_minutes, by=by)
    collapse = CollapseGuard(run.path, go_on=go_on_after_collapse, report=report)
    with _quiet():
        trainer = _trainer(
            recipe,
            machines,
            logger=[*loggers] or False,
            callbacks=[MetricsFile(run.metrics, report=report), collapse, *callbacks, keeper],
            enable_progress_bar=progress,
            default_root_dir=run.path,
        )
    L.seed_everything(recipe.seed, verbose=False)
    model = make_network(recipe, trainer.strategy.root_device, report, resumed=go_on is not None)
    sets = load_sets(recipe, cache, skip_broken=skip_broken, watch=watch, report=report)
    for file in sets.skipped:
        report(f"left out, not readable: {file}")
    origin = {"workers": machines.workers, "images": images_of(sets)} if is_first() else {}
    if again:
        run.check_origin(origin)
    module = MetricModule(
        model,
        method,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
        scheduler=scheduler(
            steps=steps_of(recipe, len(sets.learn), machines.workers),
            warmup=recipe.warmup,
            schedule=recipe.schedule,
        ),
        more=partial(robust_recall, sets.score, recipe) if robust else None,
    )
    module.save_hyperparameters(recipe.model_dump(mode="json"))
    with _quiet(), _nothing_left(run, trainer), _resumable(run):
        if is_first():
            run.begin(recipe, sets.skipped, _choice(sets, keeper, recipe), sets.learn.source, origin, report)
        try:
            with stopping(signals), together(trainer, signals):
                trainer.fit(module, datamodule=PairData(sets, recipe), ckpt_path=go_on, weights_only=True)
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            if go_on is None or isinstance(error, UserError) or not while_restoring(error):
                raise
            raise unfit(go_on, error) from error
        finally:
            if is_first() and keeper.last:
                run.finish(_choice(sets, keeper, recipe))
        if "weights" in _choice(sets, keeper, recipe):
            other = "" if robust else ", or choose by R@1 under attack (--set validate_by=robust)"
            report(
                f"R@1 of the {sets.scored} does not tell the best weights from others, for their 95 % "
                f"intervals overlap: the last ones count; set more images apart (--validation){other}"
            )
    return module


def _nothing(_: str) -> None:
    """Leave it to the first worker to say."""


def checkpoint_step(out: Path) -> int:
    """Return the step that a run in `out` goes on from: that of its checkpoint, 0 where there is none.

    >>> checkpoint_step(Path("nowhere"))
    0
    """
    return reached(RunFolder(out).checkpoint).step


def _check_epochs(run: RunFolder, epochs: int, so_far: Reached, say: Report) -> None:
    """Refuse fewer epochs than a run has, before anything is written."""
    if epochs < so_far.begun:
        done = f"has done {so_far.done} epochs"
        if so_far.done < so_far.begun:
            done = f"is in its epoch {so_far.begun}"
        raise UserError(
            f"the run in {run.path} {done}, and epochs={epochs} is fewer: give at least {so_far.begun}",
            parameter="epochs",
        )
    if so_far.done == epochs:
        say(f"the run in {run.path} has done its {epochs} epochs: nothing is left to do; give more epochs")


@contextmanager
def _resumable(run: RunFolder) -> Iterator[None]:
    """Add to what ended a training before its time what there is to go on from."""

    def standing() -> str:
        step = reached(run.checkpoint).step
        return f"the checkpoint of step {step} is whole" if step else "there is no checkpoint yet"

    try:
        yield
    except (CutShortError, ChangedError) as error:
        raise CutShortError(f"{error}; {standing()}") from error
    except OSError as error:  # of a logger, such as Lightning's
        file = Path(str(error.filename or run.path)).absolute()
        if remedy(error) is None or not file.is_relative_to(run.path.absolute()):
            raise
        raise CutShortError(f"{unsaved(file, error)}; {standing()}") from error
    except Stopped as stopped:
        if stopped.left is None:
            raise
        anew = "" if run.checkpoint.exists() else ": it begins anew"
        raise Stopped(str(stopped), f"{stopped.left}; {standing()}{anew}") from None


def _trainer(recipe: Recipe, machines: Machines, **options: Any) -> L.Trainer:
    try:
        return L.Trainer(
            accelerator=machines.accelerator,
            devices=machines.devices,
            num_nodes=machines.nodes,
            strategy="ddp" if machines.workers > 1 else "auto",
            precision=recipe.precision,
            max_epochs=recipe.epochs,
            gradient_clip_val=recipe.clip,
            check_val_every_n_epoch=recipe.validate_every,
            num_sanity_val_steps=0,
            log_every_n_steps=10,
            use_distributed_sampler=False,
            plugins=[AtomicCheckpointIO()],
            enable_checkpointing=False,
            enable_model_summary=False,
            **options,
        )
    except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
        raise UserError(
            f"cannot train on {machines.devices} × {machines.accelerator} with precision {recipe.precision}: "
            f"{' '.join(str(error).split())}; give another accelerator, number of devices or precision",
            parameter="accelerator",
        ) from error


def _choice(sets: Sets, keeper: Keeper, recipe: Recipe) -> dict[str, Any]:
    """Say which images choose the best weights, by which score, and what came of it so far."""
    robust = keeper.by == ROBUST
    count = len(attacked_rows(sets.score, recipe.seed)) if robust else len(sets.score)
    choice: dict[str, Any] = {"images": sets.scored, "count": count, "by": keeper.by}
    choice |= {name: one for name, one in (("best", keeper.best), ("last", keeper.last)) if one}
    chosen = sets.scored == "validation images" and not recipe.reference
    if chosen and keeper.best and keeper.undecided(count):
        choice["weights"] = "last"
    return choice


@contextmanager
def _nothing_left(run: RunFolder, trainer: L.Trainer) -> Iterator[None]:
    """Empty the folder again if a new run fails before its first step is done, or in it."""
    new = not run.exists
    try:
        yield
    except BaseException as error:
        steps = 1 if isinstance(error, CollapsedError) and not run.good.exists() else 0
        failed = not isinstance(error, Stopped) and trainer.global_step <= steps
        if new and is_first() and failed:
            with suppress(OSError):  # what went wrong is to be said, not this
                for path in run.path.iterdir():
                    if path.name != LOCK:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's advertisements, who connects, and its advice on DataLoader workers to itself."""
    parts = ("pytorch", "pytorch.utilities.rank_zero", "fabric.utilities.distributed")
    loggers = [logging.getLogger(f"lightning.{part}") for part in parts]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
