"""A run: from a recipe to a folder with a trained network, resumable at any moment."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only

from robustmetric.errors import UserError, whole
from robustmetric.files import check_writable
from robustmetric.locks import LOCK, locked
from robustmetric.training.callbacks import Checkpoints, CollapseGuard, MetricsFile
from robustmetric.training.checkpoint import Reached, SealedCheckpointIO, reached
from robustmetric.training.folder import RunFolder
from robustmetric.training.module import MetricModule, make_network, scheduler
from robustmetric.training.parts import defense_of, steps_of
from robustmetric.training.recipe import Recipe
from robustmetric.training.sets import ROBUST, PairData, Sets, attacked_rows, load_sets, robust_recall
from robustmetric.training.stops import CollapsedError, CutShortError, Left, Report, Signals, Stopped

_LOST = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe", "socket")


@dataclass(frozen=True)
class Machines:
    """What to train on: `devices` workers on each of `nodes` machines; `device` is auto, cpu, cuda or mps.

    >>> Machines(devices=2, nodes=4).workers
    8
    """

    device: str = "auto"
    devices: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        whole("devices", self.devices, 1, max(8, os.cpu_count() or 1))
        whole("nodes", self.nodes, 1, 10_000)

    @property
    def workers(self) -> int:
        """The number of all workers."""
        return self.devices * self.nodes

    def trainer(self, recipe: Recipe, **options: Any) -> L.Trainer:
        """Make Lightning's trainer for a `recipe`, with more `options` of it."""
        try:
            trainer = L.Trainer(
                accelerator=self.device,
                devices=self.devices,
                num_nodes=self.nodes,
                strategy="ddp" if self.workers > 1 else "auto",
                precision=recipe.precision,
                max_epochs=recipe.epochs,
                gradient_clip_val=recipe.clip,
                check_val_every_n_epoch=recipe.validate_every,
                num_sanity_val_steps=0,
                log_every_n_steps=10,
                use_distributed_sampler=False,
                plugins=[SealedCheckpointIO()],
                enable_checkpointing=False,
                enable_model_summary=False,
                **options,
            )
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
            raise UserError(
                f"cannot train on {self.devices} × {self.device} with precision {recipe.precision}: "
                f"{' '.join(str(error).split())}; give another device, number of devices or precision",
                parameter="device",
            ) from error
        found: Any = getattr(trainer.strategy, "cluster_environment", None)
        if self.nodes > 1 and type(found).__name__ == "LightningEnvironment":
            wanted = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
            if missing := [name for name in wanted if not os.environ.get(name)]:
                raise UserError(
                    f"{self.nodes} machines need {', '.join(wanted)}, and {', '.join(missing)} is not set: "
                    "give them to the command on each machine, or start it by torchrun or srun",
                    parameter="nodes",
                )
            whole("NODE_RANK", trainer.node_rank, 0, self.nodes - 1)
        return trainer


def is_first() -> bool:
    """Return whether this is the worker that writes.

    >>> is_first()
    True
    """
    return getattr(rank_zero_only, "rank", 0) == 0


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
    """Train with a `recipe`, write to the folder `out` all that explains and continues the run.

    What can be refused is refused before images are decoded, and a start that fails before its first step
    leaves nothing in `out`. A signal raises `Stopped`, a network that collapses `CollapsedError`, with the
    last good weights in `good.safetensors`, a full disk or a lost worker `CutShortError`.

    - `resume`: continue the run in `out` from its last checkpoint; `recipe` may have other epochs and
      another root; images, code and number of workers must be those it began with.
    - `machines`: what to train on, by default one worker on the best device available.
    - `cache`: where decoded images are kept, by default ``~/.cache/robustmetric``.
    - `skip_broken`: leave out images that cannot be read.
    - `callbacks`, `loggers`: more of Lightning's.
    - `progress`: show Lightning's progress bar.
    - `go_on_after_collapse`: report a collapse and train on.
    - `watch`: called with split, done and total while images are decoded.
    - `report`: called with each message for the user.

    >>> import tempfile
    >>> from robustmetric.training import load_recipe
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recipe = load_recipe("digits", {"epochs": 1, "steps": 1, "batch": 512})
    ...     module = train(recipe, Path(folder, "run"), progress=False)
    ...     sorted(path.name for path in Path(folder, "run").glob("*.safetensors"))
    ['best.safetensors', 'last.safetensors']
    """
    run, machines, signals = RunFolder(out), machines or Machines(), Signals()
    by = ROBUST if recipe.validate_by == "robust" else "R@1"
    keeper = Checkpoints(run.path, recipe.save_every, signals, minutes=recipe.save_minutes, by=by)
    guard = CollapseGuard(run.path, go_on=go_on_after_collapse, report=report)
    with _quiet(), ExitStack() as held:
        trainer = machines.trainer(
            recipe,
            logger=[*loggers] or False,
            callbacks=[MetricsFile(run.metrics), guard, *callbacks, keeper],
            enable_progress_bar=progress,
            default_root_dir=run.path,
        )
        if trainer.is_global_zero:
            check_writable(run.path)
            held.enter_context(locked(run.path, "a training", report))
            run.check(recipe, resume)
        else:
            report = guard.report = _nothing
        new, so_far = not (resume and run.exists), Reached()
        if not new:
            recipe, so_far = run.continued(recipe), reached(run.checkpoint)
            run.check_origin({"workers": machines.workers})
        _check_epochs(run, recipe.epochs, so_far, report)
        resumed = so_far.step > 0
        method = defense_of(recipe)
        L.seed_everything(recipe.seed, verbose=False)
        model = make_network(recipe, trainer.strategy.root_device, report, resumed=resumed)
        sets = load_sets(recipe, cache, skip_broken=skip_broken, watch=watch, report=report)
        for file in sets.skipped:
            report(f"left out, not readable: {file}")
        steps = steps_of(recipe, len(sets.learn), machines.workers)
        module = MetricModule(
            model,
            method,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            seed=recipe.seed,
            scheduler=scheduler(steps=steps, warmup=recipe.warmup, schedule=recipe.schedule),
            more=partial(robust_recall, sets.score, recipe) if by == ROBUST else None,
        )
        module.save_hyperparameters(recipe.model_dump(mode="json"))
        with signals, _ended(run, trainer, signals, new):
            if trainer.is_global_zero:
                origin = {"workers": machines.workers, "images": sets.origin()}
                run.check_origin(origin)
                choice = _choice(sets, keeper, recipe)
                shape = sets.learn.source.pixels.shape[1:]
                run.begin(recipe, choice, skipped=sets.skipped, shape=shape, origin=origin)
            try:
                checkpoint = run.checkpoint if resumed else None
                trainer.fit(
                    module, datamodule=PairData(sets, recipe), ckpt_path=checkpoint, weights_only=True
                )
            finally:
                if trainer.is_global_zero and keeper.last:
                    run.finish(_choice(sets, keeper, recipe))
    if "weights" in _choice(sets, keeper, recipe):
        other = "" if by == ROBUST else ", or choose by R@1 under attack (--set validate_by=robust)"
        report(
            f"R@1 of the {sets.scored} does not tell the best weights from others, for their 95 % "
            f"intervals overlap: the last ones count; set more images apart (--validation){other}"
        )
    return module


def _nothing(_: str) -> None:
    """Leave it to the first worker to say."""


def _check_epochs(run: RunFolder, epochs: int, so_far: Reached, report: Report) -> None:
    if epochs < so_far.begun:
        raise UserError(
            f"the run in {run.path} is in epoch {so_far.begun}, and epochs={epochs} is fewer: give at least "
            f"{so_far.begun}",
            parameter="epochs",
        )
    if so_far.done == epochs:
        report(f"the run in {run.path} has done its {epochs} epochs: nothing is left to do; give more epochs")


def _choice(sets: Sets, keeper: Checkpoints, recipe: Recipe) -> dict[str, Any]:
    """Say which images choose the best weights, by which score, and what came of it so far."""
    count = len(attacked_rows(sets.score, recipe.seed)) if keeper.by == ROBUST else len(sets.score)
    choice: dict[str, Any] = {"images": sets.scored, "count": count, "by": keeper.by}
    choice |= {name: one for name, one in (("best", keeper.best), ("last", keeper.last)) if one}
    chosen = sets.scored == "validation images" and not recipe.reference
    if chosen and keeper.best and keeper.undecided(count):
        choice["weights"] = "last"
    return choice


@contextmanager
def _ended(run: RunFolder, trainer: L.Trainer, signals: Signals, new: bool) -> Iterator[None]:
    """Say why the training inside ended, end the workers of this one, and tidy up a start that failed."""
    failed = True
    try:
        yield
        failed = False
    except BaseException as error:
        steps = 1 if isinstance(error, CollapsedError) and not run.good.exists() else 0
        failed = not isinstance(error, Stopped)
        if new and failed and trainer.is_global_zero and trainer.global_step <= steps:
            with suppress(OSError):  # what went wrong is to be said, not this
                for path in run.path.iterdir():
                    if path.name != LOCK:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
        lost = trainer.world_size > 1 and any(word in str(error).lower() for word in _LOST)
        if isinstance(error, Left) or (lost and signals.name):
            raise Stopped(signals.name or "SIGINT", saved=False) from None
        if lost and isinstance(error, RuntimeError | ConnectionError):
            raise CutShortError("the connection to another worker was lost") from error
        raise
    finally:
        started = getattr(trainer.strategy.launcher, "procs", [])
        for process in started if failed else ():
            process.kill()
        started.clear()  # Lightning would kill this worker, too, when it sees them end
        # A thread of Lightning's connection that ends after Python does aborts the process.
        if trainer.world_size > 1 and dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Lightning's advertisements, who connects, and its advice on DataLoader workers."""
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
