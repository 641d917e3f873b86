"""A run: from a recipe to a folder with a trained network, resumable at any moment."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only

from robustmetric import data
from robustmetric.defenses import defense
from robustmetric.models import load_weights, try_network
from robustmetric.training.callbacks import AtomicCheckpointIO, CollapseGuard, Keeper, MetricsFile, Report
from robustmetric.training.module import MetricModule, random_states, set_random_states
from robustmetric.training.parts import inputs_of, source_of
from robustmetric.training.recipe import Recipe
from robustmetric.training.runs import RunFolder
from robustmetric.training.schedule import scheduler
from robustmetric.training.sets import PairData, Sets, load_sets
from robustmetric.validate import UserError


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

    `out` gets `recipe.yaml` (as resolved), `run.json` (versions, images left out, which images chose the best
    weights), `metrics.csv`, `last.ckpt` (Lightning's checkpoint, every `save_every` steps and on SIGTERM or
    Ctrl-C), `last.safetensors` and `best.safetensors` (by R@1), and `code/`, copies of the Python files that
    the recipe names. A start that fails before its first step leaves nothing in `out`; what can be refused is
    refused before images are decoded, with the network tried on one. A stop that was asked for raises
    `Stopped` when its checkpoint is written; a network that collapses raises `CollapsedError`, with the last
    good weights in `good.safetensors`.

    - `resume`: go on with the run in `out` from its last checkpoint; `recipe` may have other epochs.
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
    machines = machines or Machines()
    run = RunFolder(out)
    if _is_first():
        run.check(recipe, resume)
    if resume and run.exists:
        recipe = run.continued(recipe, report if _is_first() else lambda _: None)
    go_on = run.checkpoint if resume and run.checkpoint.exists() else None
    method = defense(
        recipe.defense,
        eps=recipe.eps,
        alpha=recipe.alpha,
        steps=recipe.steps,
        margin=recipe.margin,
        seed=recipe.seed,
    )
    keeper = Keeper(out, recipe.save_every)
    collapse = CollapseGuard(out, go_on=go_on_after_collapse, report=report)
    with _quiet():
        trainer = _trainer(
            recipe,
            machines,
            logger=[*loggers] or False,
            callbacks=[MetricsFile(run.metrics), collapse, *callbacks, keeper],
            enable_progress_bar=progress,
            default_root_dir=out,
        )
    L.seed_everything(recipe.seed, verbose=False)
    model = _network(recipe, trainer.strategy.root_device, report, resumed=go_on is not None)
    sets = load_sets(recipe, cache, skip_broken=skip_broken, watch=watch, report=report)
    for file in sets.skipped:
        report(f"left out, not readable: {file}")
    module = MetricModule(
        model,
        method,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
        scheduler=scheduler(
            steps=_steps(recipe, len(sets.learn), machines.workers),
            warmup=recipe.warmup,
            schedule=recipe.schedule,
        ),
    )
    module.save_hyperparameters(recipe.model_dump(mode="json"))
    with _quiet(), _nothing_left(run, trainer):
        if _is_first():
            run.begin(recipe, sets.skipped, _choice(sets, keeper), sets.learn.source, report)
        try:
            with _stopping(keeper), _parting():
                trainer.fit(module, datamodule=PairData(sets, recipe), ckpt_path=go_on, weights_only=True)
        finally:
            if _is_first() and keeper.last:
                run.finish(_choice(sets, keeper))
    return module


def checkpoint_step(out: Path) -> int:
    """Return the step that a run goes on from: that of its checkpoint, 0 where there is none.

    >>> checkpoint_step(Path("nowhere"))
    0
    """
    file = RunFolder(out).checkpoint
    return int(torch.load(file, weights_only=True, mmap=True)["global_step"]) if file.exists() else 0


def _is_first() -> bool:
    """Return whether this is the worker that writes."""
    return getattr(rank_zero_only, "rank", 0) == 0


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


def _network(
    recipe: Recipe, device: torch.device, report: Report, *, resumed: bool = False
) -> torch.nn.Module:
    """Make the network, with its weights unless a checkpoint has later ones, and try it on an image."""
    inputs = inputs_of(recipe)
    image = inputs.first(data.load(recipe.data, recipe.root, "train"))
    model = source_of(recipe).build(*inputs.shape(image))
    begins = None if resumed else recipe.weights
    if begins is not None and (kept := load_weights(model, begins)):
        report(f"the last layer of {begins} does not fit; starting with a new one ({', '.join(kept)})")
    states = random_states()
    try_network(model.to(device), inputs.images(image)[:1])
    set_random_states(states)  # the training draws as if nothing had been tried
    return model


def _steps(recipe: Recipe, images: int, workers: int) -> int:
    return recipe.epochs * -(-images // (workers * (recipe.batch // 2)))


def _choice(sets: Sets, keeper: Keeper) -> dict[str, Any]:
    """Say which images choose the best weights, and what came of it so far."""
    known = {"best": keeper.best, "last": keeper.last}
    return {"images": sets.scored, "count": len(sets.score), **{k: v for k, v in known.items() if v}}


@contextmanager
def _nothing_left(run: RunFolder, trainer: L.Trainer) -> Iterator[None]:
    """Empty the folder again if a new run fails before its first step is done."""
    out = run.path
    new, there = not run.exists, out.exists()
    try:
        yield
    except BaseException:
        if new and _is_first() and trainer.global_step == 0:
            with suppress(OSError):  # what went wrong is to be said, not this
                for path in out.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                if not there:
                    out.rmdir()
        raise


@contextmanager
def _parting() -> Iterator[None]:
    """Close the connection between workers that Lightning opens inside, and leaves open.

    A thread of it that ends after Python does aborts the process, when all work is done.
    """
    before = dist.is_available() and dist.is_initialized()
    try:
        yield
    finally:
        if not before and dist.is_available() and dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()


@contextmanager
def _stopping(keeper: Keeper) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a stop at the end of the step; a second one stops at once."""

    def ask(number: int, frame: FrameType | None) -> None:
        if keeper.stop is not None:
            raise KeyboardInterrupt
        keeper.stop = signal.Signals(number).name

    keeper.handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), ask)
    before = {number: signal.signal(number, handler) for number, handler in keeper.handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's advertisements and its advice on DataLoader workers, which are not used, to itself."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "pytorch.utilities.rank_zero")]
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
