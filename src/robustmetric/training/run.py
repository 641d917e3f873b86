"""A run: from a recipe to a folder with a trained network, resumable at any moment."""

from __future__ import annotations

import json
import logging
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import lightning.pytorch.loggers
from lightning.fabric.utilities.rank_zero import rank_zero_only

from robustmetric import models
from robustmetric.data.cache import Pixels
from robustmetric.data.pairs import ImageLoader, PairLoader
from robustmetric.defenses import defense
from robustmetric.files import is_draft, write_atomically
from robustmetric.registry import lookup
from robustmetric.training.callbacks import AtomicCheckpointIO, CollapseGuard, Keeper, MetricsFile, Report
from robustmetric.training.inputs import make_model, pixels
from robustmetric.training.module import MetricModule
from robustmetric.training.recipe import Recipe, dump_recipe, load_recipe


@dataclass(frozen=True)
class Machines:
    """What to train on: how many workers on how many machines, of which kind."""

    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    machines: Machines | None = None,
    cache: Path | None = None,
    skip_broken: bool = False,
    callbacks: list[L.Callback] | None = None,
    loggers: list[Any] | None = None,
    progress: bool = True,
    go_on_after_collapse: bool = False,
    watch: Callable[[str, int, int], None] | None = None,
    report: Report = print,
) -> MetricModule:
    """Train as a recipe says and leave in `out` all that explains and continues the run.

    `out` gets `recipe.yaml` (as resolved), `run.json` (versions, images left out), `metrics.csv`, `last.ckpt`
    (Lightning's checkpoint, every `save_every` steps and on SIGTERM or Ctrl-C), `last.safetensors` and
    `best.safetensors` (by R@1). With `resume`, a run goes on from its last checkpoint. Decoded images are
    kept in `cache`. A stop that was asked for raises `Stopped` when its checkpoint is written; a network that
    collapses raises `CollapsedError`, with the last good weights in `good.safetensors`, unless told to go on.
    """
    machines = machines or Machines()
    _check_folder(recipe, out, resume)
    train_set, test_set = pixels(recipe, cache, skip_broken=skip_broken, watch=watch)
    images = PairData(train_set, test_set, recipe)
    skipped = [str(file) for part in (images.train_set, images.test_set) for file in part.skipped]
    for file in skipped:
        report(f"left out, not readable: {file}")
    L.seed_everything(recipe.seed, verbose=False)
    model = make_model(recipe, images.train_set)
    if recipe.weights is not None and (kept := models.load_weights(model, recipe.weights)):
        report(
            f"the last layer of {recipe.weights} does not fit; starting with a new one ({', '.join(kept)})"
        )
    method = defense(
        recipe.defense,
        eps=recipe.eps,
        alpha=recipe.alpha,
        steps=recipe.eta,
        margin=recipe.margin,
        seed=recipe.seed,
    )
    module = MetricModule(model, method, lr=recipe.lr, weight_decay=recipe.weight_decay, seed=recipe.seed)
    collapse = CollapseGuard(out, go_on=go_on_after_collapse, report=report)
    keeper = Keeper(out, recipe.save_every)
    workers = machines.devices * machines.nodes
    with _quiet():
        trainer = L.Trainer(
            accelerator=machines.accelerator,
            devices=machines.devices,
            num_nodes=machines.nodes,
            strategy="ddp" if workers > 1 else "auto",
            precision=recipe.precision,
            max_epochs=recipe.epochs,
            check_val_every_n_epoch=recipe.validate_every,
            num_sanity_val_steps=0,
            log_every_n_steps=10,
            use_distributed_sampler=False,
            logger=loggers or False,
            callbacks=[MetricsFile(out / "metrics.csv"), collapse, *(callbacks or []), keeper],
            plugins=[AtomicCheckpointIO()],
            enable_checkpointing=False,
            enable_progress_bar=progress,
            enable_model_summary=False,
            default_root_dir=out,
        )
        checkpoint = out / "last.ckpt"
        go_on = checkpoint if resume and checkpoint.exists() else None
        _begin(recipe, out, skipped)
        with _stopping(keeper):
            trainer.fit(module, datamodule=images, ckpt_path=go_on, weights_only=True)
    return module


class PairData(L.LightningDataModule):
    """The training set as batches of pairs, shared out among the workers, and the whole test set for each."""

    def __init__(self, train_set: Pixels, test_set: Pixels, recipe: Recipe) -> None:
        super().__init__()
        self.train_set, self.test_set, self.recipe = train_set, test_set, recipe

    def train_dataloader(self) -> PairLoader:
        """Batches of pairs from where the trainer is, which knows its worker by now."""
        assert self.trainer is not None  # noqa: S101
        trainer, recipe = self.trainer, self.recipe
        done = trainer.fit_loop.epoch_loop.batch_progress.current
        return PairLoader(
            self.train_set.pixels,
            self.train_set.labels,
            pairs=recipe.batch // 2,
            seed=recipe.seed,
            crop=recipe.crop,
            flip=recipe.flip,
            rank=trainer.global_rank,
            world=trainer.world_size,
            progress=lambda: (trainer.current_epoch, done.ready),
        )

    def val_dataloader(self) -> ImageLoader:
        """The test set in its order."""
        test, recipe = self.test_set, self.recipe
        return ImageLoader(test.pixels, test.labels, batch=recipe.batch, crop=recipe.crop)


def make_logger(name: str, out: Path) -> Any:
    """Make one of Lightning's loggers by its name, writing into the run's folder.

    >>> make_logger("tensorbord", Path("."))
    Traceback (most recent call last):
    ...
    ValueError: unknown logger 'tensorbord' (did you mean 'tensorboard'?); known: csv, tensorboard, wandb
    """
    kinds = {"csv": "CSVLogger", "tensorboard": "TensorBoardLogger", "wandb": "WandbLogger"}
    kind = getattr(lightning.pytorch.loggers, lookup("logger", name, kinds))
    try:
        return kind(save_dir=out, name=name)
    except ModuleNotFoundError as error:
        raise ValueError(f"the logger {name} needs a package that is not installed: {error}") from None


def _check_folder(recipe: Recipe, out: Path, resume: bool) -> None:
    """Refuse a folder that holds another run, or anything else."""
    if getattr(rank_zero_only, "rank", 0) != 0:
        return
    kept = out / "recipe.yaml"
    if kept.exists():
        before = load_recipe(kept)
        differing = [
            k for k in Recipe.model_fields if k != "epochs" and getattr(before, k) != getattr(recipe, k)
        ]
        if not resume:
            raise ValueError(f"{out} holds a run already: continue it with --resume, or give another --out")
        if differing:
            told = ", ".join(f"{k} was {getattr(before, k)!r}, is {getattr(recipe, k)!r}" for k in differing)
            raise ValueError(
                f"{out} holds another run: {told}; resume with its own recipe or give another --out"
            )
    elif out.exists() and (not out.is_dir() or any(not is_draft(path) for path in out.iterdir())):
        raise ValueError(f"{out} is not empty and holds no run: give another --out")


def _begin(recipe: Recipe, out: Path, skipped: list[str]) -> None:
    """Write down what is about to happen."""
    if getattr(rank_zero_only, "rank", 0) != 0:
        return
    out.mkdir(parents=True, exist_ok=True)
    for rest in filter(is_draft, out.iterdir()):
        rest.unlink()
    write_atomically(out / "recipe.yaml", lambda file: file.write(dump_recipe(recipe).encode()))
    about = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("robustmetric", "torch", "lightning", "numpy", "pillow"):
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            about[package] = "not installed"
    file = out / "run.json"
    starts = [*_earlier_starts(file), {"command": sys.argv[1:], **about}]
    text = json.dumps({"seed": recipe.seed, "skipped": skipped, "starts": starts}, indent=1)
    write_atomically(file, lambda f: f.write(text.encode()))


def _earlier_starts(file: Path) -> list[Any]:
    """Read how the run was started before; a file that does not say so is no reason not to go on."""
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["starts"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


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
