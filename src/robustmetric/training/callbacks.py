"""Callbacks: checkpoints that survive anything, a metrics file, and the collapse guard."""

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

from robustmetric.evaluation.intervals import exact_interval
from robustmetric.files import write_atomically
from robustmetric.models import save_weights
from robustmetric.sphere import BrokenEmbeddingsError
from robustmetric.text import spreadsheet_text
from robustmetric.training.module import SCORES, MetricModule
from robustmetric.training.robust import ROBUST
from robustmetric.training.runs import RunFolder
from robustmetric.training.stops import CollapsedError, Report, Signals, Stopped, saving
from robustmetric.training.table import kept_rows


class Keeper(L.Callback):
    """Writes a checkpoint at intervals and when told to stop, and weights at each validation.

    `folder` is that of the run; between two checkpoints are `every` steps and `minutes` by the `clock`, which
    counts seconds, at most. `signals` say when to stop. The best weights are those with the highest score
    called `by`, a share of queries in %.
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
        self.signals, self.by, self.clock = signals, by, clock
        self.saved = clock()
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.least: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return score and step of the best validation so far, of the last, and of the lowest."""
        return {"best": self.best, "last": self.last, "least": self.least}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best, the last and the lowest validation."""
        self.best, self.last = state_dict["best"], state_dict["last"]
        self.least = state_dict.get("least", self.last)  # checkpoints of before have none

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals back, for Lightning's own handler would stop before the checkpoint is written."""
        if self.signals is not None:
            self.signals.take()
        self.saved = self.clock()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save at the end of a step, where nothing is half done; an epoch's last waits for validation."""
        if not trainer.is_last_batch:
            self._save_or_stop(trainer, trainer.global_step % self.every == 0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save at the end of an epoch, validation included."""
        self._save_or_stop(trainer, True)

    def _save_or_stop(self, trainer: L.Trainer, due: bool) -> None:
        # All workers must agree, or some would wait for the others for ever; their clocks do not.
        asked = None if self.signals is None else self.signals.stop
        late = self.clock() - self.saved >= 60 * self.minutes
        due = due or trainer.strategy.reduce_boolean_decision(late or asked is not None, all=False)
        if not due:
            return
        stop = trainer.strategy.reduce_boolean_decision(asked is not None, all=False)
        self._save(trainer)
        if stop:
            raise Stopped(asked or "another worker was told to stop")

    def _save(self, trainer: L.Trainer) -> None:
        if self.signals is not None:
            self.signals.busy = True
        try:
            trainer.save_checkpoint(self.run.checkpoint)
            self.saved = self.clock()
        finally:
            if self.signals is not None:
                self.signals.busy = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the weights of this validation, and of the best one."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, MetricModule)  # noqa: S101
        _save_weights(pl_module.model, self.run.last)
        found = trainer.callback_metrics
        self.last = {name: float(found[name]) for name in {"R@1": 0, self.by: 0}} | {
            "step": trainer.global_step
        }
        if self.last[self.by] < self.least.get(self.by, math.inf):
            self.least = self.last
        # Of equal ones the later has learned longer, and few images often give equal ones.
        if self.last[self.by] >= self.best.get(self.by, -math.inf):
            self.best = self.last
            _save_weights(pl_module.model, self.run.best)

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
            assert isinstance(pl_module, MetricModule)  # noqa: S101
            _save_weights(pl_module.model, self.run.last)


class CollapseGuard(L.Callback):
    """Watches the spread of embeddings, keeps the last good weights and says what happened.

    The network counts as collapsed when its spread (one minus the mean cosine) has been below 0.01, and below
    a tenth of what it began with, for `patience` steps; below a millionth it is none at all. A defense that
    logs no spread is not watched for that. A network that has diverged to NaN is caught in any case.
    `good.safetensors` in the run's `folder` gets the weights of the last of every `patience` steps at which
    all was well, if there was one. With `go_on`, `report` gets what would be raised, once.
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
        self.well = False  # there was a step at which all was well
        self._good: tuple[int, dict[str, Tensor]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what the guard has seen."""
        return {"begun": self.begun, "narrow": self.narrow, "told": self.told, "well": self.well}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what it had seen."""
        self.begun, self.narrow, self.told = (state_dict[key] for key in ("begun", "narrow", "told"))
        self.well = state_dict.get("well", True)  # a checkpoint of before was written when all was well

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the weights that the training begins with, which are good if its first step is."""
        self._keep(trainer.global_step, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the loss and the spread of the step."""
        found, step = trainer.callback_metrics, trainer.global_step
        loss = float(found["loss"]) if "loss" in found else 0.0
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
                f"the network collapsed at about step {step - self.patience + 1}: its "
                f"embeddings all point the same way (spread {spread:.1e}, it began with {self.begun:.1e})",
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
            "look at the weights that it begins with, at the images, and at the learning rate"
        )

    def _keep(self, step: int, module: L.LightningModule) -> None:
        assert isinstance(module, MetricModule)  # noqa: S101
        self._good = (
            step,
            {name: value.detach().cpu().clone() for name, value in module.model.state_dict().items()},
        )

    def _tell(self, trainer: L.Trainer, what: str) -> None:
        assert self._good is not None  # noqa: S101
        step, weights = self._good
        kept = "They did so from the first step on: look at the network and its weights."
        if self.well:
            kept = f"The weights of step {step}, when all was well, are in {self.run.good}."
            if trainer.is_global_zero:
                _save_weights(weights, self.run.good)
        message = (
            f"{what}. {kept} What usually helps: a "
            "softer destination (LGA, -γ/2), fewer or smaller steps (steps, alpha, eps), the sampler S or "
            "R for the source, a lower learning rate"
        )
        if not self.go_on:
            raise CollapsedError(message)
        self.report(f"{message}. Training continues")


class MetricsFile(L.Callback):
    """Writes `path`, a table: a row for each `every`-th step and each validation.

    The columns of `FIELDS` come first; whatever else is logged gets a column behind them. `report` is told of
    a table that cannot be gone on with.
    """

    FIELDS = (
        "epoch", "step", "loss", "loss/triplet", "loss/ICS", "hardness/source", "hardness/destination",
        "hardness/reached", "perturbed", "spread", "triplets", "anchors", "images/forward", "images/backward",
        "lr", *SCORES,
    )  # fmt: skip

    def __init__(self, path: Path, every: int = 10, report: Report = print) -> None:
        self.path, self.every, self.report = path, every, report
        self.fields = list(self.FIELDS)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the file, or drop the rows behind the checkpoint that the training goes on from."""
        if trainer.is_global_zero:
            rows = kept_rows(self.path, trainer.global_step, self.report)
            self.fields = list(dict.fromkeys([*self.FIELDS, *(rows[0] if rows else ())]))
            self._rewrite(rows)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the figures of every n-th step, n being `every`."""
        if trainer.is_global_zero and trainer.global_step % self.every == 0:
            self._add(
                trainer,
                {k: v for k, v in trainer.callback_metrics.items() if k not in (*SCORES, ROBUST)},
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the scores."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            found = trainer.callback_metrics
            self._add(trainer, {name: found[name] for name in (*SCORES, ROBUST) if name in found})

    def _add(self, trainer: L.Trainer, values: dict[str, Tensor]) -> None:
        row = {spreadsheet_text(name): f"{float(value):.6g}" for name, value in values.items()}
        row |= {"epoch": str(trainer.current_epoch), "step": str(trainer.global_step)}
        if new := [name for name in row if name not in self.fields]:
            rows = kept_rows(self.path, trainer.global_step, self.report)
            self.fields += new
            self._rewrite(rows)
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


def _save_weights(weights: nn.Module | dict[str, Tensor], path: Path) -> None:
    with saving(path):
        save_weights(weights, path)
