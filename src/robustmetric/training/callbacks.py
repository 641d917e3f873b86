"""Callbacks: checkpoints and weights, the metrics file, the collapse guard, and progress."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor, nn

from robustmetric.data.pairs import ImageArray
from robustmetric.evaluation.intervals import exact_interval
from robustmetric.files import write_atomically
from robustmetric.models import save_weights
from robustmetric.sphere import BrokenEmbeddingsError
from robustmetric.text import spreadsheet_text
from robustmetric.training.folder import RunFolder, read_rows
from robustmetric.training.module import SCORES, MetricModule
from robustmetric.training.recipe import bare
from robustmetric.training.sets import ROBUST, PairData
from robustmetric.training.stops import CollapsedError, Report, Signals, Stopped, saving
from robustmetric.usercode import file_of


class Checkpoints(L.Callback):
    """Saves checkpoints at intervals and before a stop, and the weights of the last and the best validation.

    They go to the run's `folder`. Between two checkpoints are at most `every` steps and `minutes` by the
    `clock`, which ModelCheckpoint does not combine; an epoch's last one is saved after its validation. The
    best weights have the highest score `by`, in %. `signals` say when to stop.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        signals: Signals | None = None,
        *,
        minutes: float = 10.0,
        by: str = "R@1",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.every, self.minutes = RunFolder(folder), every, minutes
        self.signals, self.by, self.clock = signals or Signals(), by, clock
        self.saved = clock()
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.least: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return score and step of the best validation so far, of the last, and of the lowest."""
        return {"best": self.best, "last": self.last, "least": self.least}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best, the last and the lowest validation."""
        self.best, self.last, self.least = (state_dict[name] for name in ("best", "last", "least"))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals back from Lightning, whose handler would stop without a checkpoint."""
        if self.signals.active:
            self.signals.take()
        self.signals.stepping = True
        self.saved = self.clock()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Save between two steps."""
        if not trainer.is_last_batch:
            self._save_or_stop(trainer, trainer.global_step % self.every == 0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save at the end of an epoch, after its validation."""
        self._save_or_stop(trainer, True)

    def _save_or_stop(self, trainer: L.Trainer, due: bool) -> None:
        # All workers must agree, or some would wait for the others for ever; their clocks do not.
        asked = self.signals.name
        late = self.clock() - self.saved >= 60 * self.minutes
        agree = trainer.strategy.reduce_boolean_decision
        if not (due or agree(late or asked is not None, all=False)):
            return
        stop = agree(asked is not None, all=False)
        self._save(trainer)
        if stop:
            raise Stopped(asked or "SIGINT")  # another worker was told to stop

    def _save(self, trainer: L.Trainer) -> None:
        with self.signals.saved():
            trainer.save_checkpoint(self.run.checkpoint)
            self.saved = self.clock()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the weights of this validation, and of the best one."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        _save_weights(_model(pl_module), self.run.last)
        found = trainer.callback_metrics
        scores = {name: float(found[name]) for name in {"R@1": 0, self.by: 0}}
        self.last = {**scores, "step": trainer.global_step}
        if self.last[self.by] < self.least.get(self.by, math.inf):
            self.least = self.last
        # Of equal ones the later has learned longer, and few images often give equal ones.
        if self.last[self.by] >= self.best.get(self.by, -math.inf):
            self.best = self.last
            _save_weights(_model(pl_module), self.run.best)

    def undecided(self, count: int) -> bool:
        """Return whether validations of `count` queries do not tell the best weights from others.

        The others are the last, or, where the best are the last, those with the lowest score. They are not
        told apart if the 95 % intervals overlap.
        """
        other = self.least if self.best["step"] == self.last["step"] else self.last
        if other["step"] == self.best["step"]:
            return False  # there are no others
        best, less = (exact_interval(round(one[self.by] * count / 100), count) for one in (self.best, other))
        return best[0] <= less[1]

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the end, so that a finished run is known as such."""
        self._save(trainer)
        if trainer.is_global_zero:
            _save_weights(_model(pl_module), self.run.last)


class CollapseGuard(L.Callback):
    """Watches the spread of embeddings, keeps the last good weights and stops a training that collapsed.

    The network counts as collapsed when its spread (one minus the mean cosine) has been below 0.01, and below
    a tenth of what it began with, for `patience` steps; below a millionth it is none at all. A defense that
    logs no spread is not watched for that. A loss or embeddings that are not finite always count.
    `good.safetensors` in the run's `folder` gets the last good weights, of every `patience` steps. With
    `go_on`, `report` gets what would be raised, once.
    """

    NONE = 1e-6
    """A spread that is rounding alone."""

    def __init__(
        self, folder: Path, *, patience: int = 20, go_on: bool = False, report: Report = print
    ) -> None:
        self.run, self.patience = RunFolder(folder), patience
        self.go_on, self.report = go_on, report
        self.begun: float | None = None
        self.narrow = 0
        self.told = False
        self.well = False  # there was a good step
        self._good: tuple[int, dict[str, Tensor]] = (0, {})

    def state_dict(self) -> dict[str, Any]:
        """Return what the guard has seen."""
        return {name: getattr(self, name) for name in ("begun", "narrow", "told", "well")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what it had seen."""
        for name in ("begun", "narrow", "told", "well"):
            setattr(self, name, state_dict[name])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the initial weights, which are good if the first step is."""
        self._keep(trainer.global_step, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Look at the loss and the spread of the step."""
        found, step = trainer.callback_metrics, trainer.global_step
        loss = float(found.get("loss", 0.0))
        if not math.isfinite(loss):
            self._diverged(trainer, "the loss is " + ("NaN" if math.isnan(loss) else "infinite"))
        spread = float(found["spread"]) if "spread" in found else None
        if spread is not None:
            self.begun = spread if self.begun is None else self.begun
            least = max(self.NONE, min(0.01, 0.1 * self.begun))
            self.narrow = 0 if spread >= least else self.narrow + 1
        if self.narrow == 0:
            self.well = True
            if step % self.patience == 0:
                self._keep(step, pl_module)
        if self.narrow >= self.patience and not self.told:
            self.told = True
            self._tell(
                trainer,
                f"the network collapsed at about step {step - self.patience + 1}: its embeddings all point "
                f"the same way (spread {spread:.1e}, it began with {self.begun:.1e})",
            )

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Recognise a network that has diverged."""
        if isinstance(exception, BrokenEmbeddingsError):
            self._diverged(trainer, str(exception))

    def _diverged(self, trainer: L.Trainer, what: str) -> None:
        self.go_on = False  # there is nothing left to go on with
        if self.well:
            self._tell(trainer, f"the network diverged at step {trainer.global_step}: {what}")
        raise CollapsedError(
            f"the training began with it, at step {trainer.global_step}: {what}. There are no good weights: "
            "look at the initial weights, at the images, and at the learning rate"
        )

    def _keep(self, step: int, module: L.LightningModule) -> None:
        weights = _model(module).state_dict().items()
        self._good = step, {name: value.detach().cpu().clone() for name, value in weights}

    def _tell(self, trainer: L.Trainer, what: str) -> None:
        step, weights = self._good
        kept = "They did so from the first step on: look at the network and its weights."
        if self.well:
            kept = f"The weights of step {step}, before that, are in {self.run.good}."
            if trainer.is_global_zero:
                _save_weights(weights, self.run.good)
        message = (
            f"{what}. {kept} What usually helps: a softer destination (LGA, -γ/2), fewer or smaller steps "
            "(steps, alpha, eps), the sampler S or R for the source, a lower learning rate"
        )
        if not self.go_on:
            raise CollapsedError(message)
        self.report(f"{message}. Training continues")


class MetricsFile(L.Callback):
    """Writes `path`, a CSV table with a row for each `every`-th step and each validation.

    It stays whole when a training is killed and resumed, and gets a column for whatever else is logged;
    CSVLogger deletes the table that is there.
    """

    FIELDS = (
        "epoch", "step", "loss", "loss/triplet", "loss/ICS", "hardness/source", "hardness/destination",
        "hardness/reached", "perturbed", "spread", "triplets", "anchors", "images/forward", "images/backward",
        "lr", *SCORES,
    )  # fmt: skip

    def __init__(self, path: Path, every: int = 10) -> None:
        self.path, self.every = path, every
        self.fields = list(self.FIELDS)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the file, or drop the rows after the checkpoint that the training resumes from."""
        if trainer.is_global_zero:
            rows = [row for row in read_rows(self.path) if int(row["step"]) <= trainer.global_step]
            self.fields = list(dict.fromkeys([*self.FIELDS, *(rows[0] if rows else ())]))
            self._rewrite(rows)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Write the figures of every n-th step, n being `every`."""
        if trainer.is_global_zero and trainer.global_step % self.every == 0:
            found = trainer.callback_metrics
            self._add(trainer, {name: found[name] for name in found if name not in (*SCORES, ROBUST)})

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the scores."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            found = trainer.callback_metrics
            self._add(trainer, {name: found[name] for name in (*SCORES, ROBUST) if name in found})

    def _add(self, trainer: L.Trainer, values: dict[str, Tensor]) -> None:
        row = {spreadsheet_text(name): f"{float(value):.6g}" for name, value in values.items()}
        row |= {"epoch": str(trainer.current_epoch), "step": str(trainer.global_step)}
        if new := [name for name in row if name not in self.fields]:
            self.fields += new
            self._rewrite(read_rows(self.path))
        with saving(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.fields).writerow(row)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Write the whole table, with every column that is known by now."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.fields)
        writer.writeheader()
        writer.writerows(rows)
        with saving(self.path):
            write_atomically(self.path, lambda file: file.write(text.getvalue().encode()))


class ShowProgress(L.Callback):
    """Says what a training begins with, and shows where it is after each step and each validation.

    `update` is called with a stage, the steps done and all steps, a note with the last figures, and `now`
    after a validation.
    """

    def __init__(self, update: Callable[..., None], say: Callable[[str], None], title: str) -> None:
        self.update, self.say, self.title = update, say, title

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what is about to happen."""
        if trainer.is_global_zero:
            for line in start_lines(self.title, trainer, pl_module):
                self.say(line)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """Show a step."""
        self._show(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show a validation."""
        self._show(trainer, now=True)

    def _show(self, trainer: L.Trainer, *, now: bool = False) -> None:
        if trainer.is_global_zero:
            found = trainer.callback_metrics
            shown = {"loss": "loss {:.3g}", "perturbed": "{:.0%} perturbed", "R@1": "R@1 {:.1f}"}
            note = ", ".join(text.format(float(found[name])) for name, text in shown.items() if name in found)
            steps = (trainer.max_epochs or 1) * int(trainer.num_training_batches)
            self.update("train", trainer.global_step, steps, note, now=now)


def start_lines(title: str, trainer: L.Trainer, module: L.LightningModule) -> list[str]:
    """Say what a training of `train` begins with, in a few lines."""
    images: Any = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(images, PairData)  # noqa: S101
    recipe, sets = images.recipe, images.sets
    height, width = ImageArray(sets.learn.source.pixels[:1], recipe.crop)[:].shape[2:]
    workers = f"{trainer.world_size} workers on {module.device.type}" if trainer.world_size > 1 else ""
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    named = bare(recipe.model_dump())
    begins = "random weights" if file_of(recipe.model) is None else f"the weights of {named['model']}"
    if recipe.weights is not None:
        begins = f"weights of {recipe.weights}"
    if trainer.global_step:
        begins = f"resumes at step {trainer.global_step:,}"
    batches, epochs = int(trainer.num_training_batches), trainer.max_epochs or 1
    return [
        f"{title}: {named['model']}, {named['defense']}, ε = {255 * recipe.eps:.3g}/255, "
        f"α = {255 * recipe.alpha:.3g}/255, η = {recipe.steps}{', reference' if recipe.reference else ''}",
        f"{named['data']}: learns from {sets.learn}, {height}×{width} pixels; validated on {sets.score} "
        f"({sets.scored})",
        f"on {workers or module.device}; {count:,} parameters; {begins}",
        f"{batches * epochs:,} steps: {epochs:,} {'epoch' if epochs == 1 else 'epochs'} of {batches:,}",
    ]


def _model(module: L.LightningModule) -> nn.Module:
    assert isinstance(module, MetricModule)  # noqa: S101
    return module.model


def _save_weights(weights: nn.Module | dict[str, Tensor], path: Path) -> None:
    with saving(path):
        save_weights(weights, path)
