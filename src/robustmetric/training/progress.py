"""Where a training is: what it begins with, its figures, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L

from robustmetric.data.pairs import ImageArray
from robustmetric.training.code import bare
from robustmetric.training.sets import PairData
from robustmetric.usercode import file_of


@dataclass(frozen=True)
class Status:
    """A moment of a training: `step` of all `steps`, the last figures, and the seconds that are `left`.

    R@1 is that of the last validation, in percent; `validated` says that it is new.
    """

    step: int
    steps: int
    loss: float | None = None
    perturbed: float | None = None
    recall: float | None = None
    left: float | None = None
    validated: bool = False


class Teller(L.Callback):
    """Says what a training begins with, and tells `show` where it is after each step and each validation.

    The time left is that of the whole training, its validations included, at the pace of this start.
    """

    def __init__(
        self,
        show: Callable[[Status], None],
        say: Callable[[str], None],
        title: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.show, self.say, self.title, self.clock = show, say, title, clock
        self.first = self.steps = 0
        self.begun = self.validating = 0.0
        self.since: float | None = None  # when the current validation began
        self.validations = self.to_validate = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count, and say what is about to happen."""
        epochs = trainer.max_epochs or 1
        self.first, self.steps = trainer.global_step, epochs * int(trainer.num_training_batches)
        every = trainer.check_val_every_n_epoch or 1
        self.to_validate = epochs // every - trainer.current_epoch // every
        self.begun = self.clock()
        if trainer.is_global_zero:
            for line in start_lines(self.title, trainer, pl_module):
                self.say(line)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell of a step."""
        self._tell(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the time of the validation."""
        self.since = self.clock()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Tell that the training is still there."""
        if not trainer.sanity_checking:
            self._tell(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell of a validation."""
        if trainer.sanity_checking:
            return
        self.validating, self.since = self._validating(), None
        self.validations += 1
        self._tell(trainer, validated=True)

    def _tell(self, trainer: L.Trainer, *, validated: bool = False) -> None:
        if not trainer.is_global_zero:
            return
        found = trainer.callback_metrics
        loss, perturbed, recall = (
            float(found[name]) if name in found else None for name in ("loss", "perturbed", "R@1")
        )
        left = self._left(trainer)
        self.show(Status(trainer.global_step, self.steps, loss, perturbed, recall, left, validated))

    def _left(self, trainer: L.Trainer) -> float | None:
        """Return the seconds left, as soon as a step has been done."""
        done = trainer.global_step - self.first
        if done == 0:
            return None
        a_step = (self.clock() - self.begun - self._validating()) / done
        a_validation = self.validating / max(1, self.validations)
        to_validate = self.to_validate - self.validations
        return a_step * (self.steps - trainer.global_step) + a_validation * to_validate

    def _validating(self) -> float:
        """Return the seconds that validations took so far."""
        return self.validating + (0.0 if self.since is None else self.clock() - self.since)


def start_lines(title: str, trainer: L.Trainer, module: L.LightningModule) -> list[str]:
    """Say what a training of `train` begins with, in a few lines."""
    images: Any = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(images, PairData)  # noqa: S101
    recipe, sets = images.recipe, images.sets
    height, width = ImageArray(sets.learn.source.pixels[:1], recipe.crop)[:].shape[2:]
    workers = f"{trainer.world_size} workers on {module.device.type}" if trainer.world_size > 1 else ""
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    named = bare(recipe.model_dump())
    begins = "starts at random" if file_of(recipe.model) is None else f"starts as {named['model']} makes it"
    if recipe.weights is not None:
        begins = f"starts with {recipe.weights}"
    if trainer.global_step:
        begins = f"goes on from step {trainer.global_step:,}"
    batches = int(trainer.num_training_batches)
    return [
        f"{title}: {named['model']}, {named['defense']}, ε = {255 * recipe.eps:.3g}/255, "
        f"α = {255 * recipe.alpha:.3g}/255, η = {recipe.steps}{', reference' if recipe.reference else ''}",
        f"{named['data']}: learns from {sets.learn}, {height}×{width} pixels; validated on {sets.score} "
        f"({sets.scored})",
        f"on {workers or module.device}; {count:,} parameters; {begins}",
        f"{batches * (trainer.max_epochs or 1):,} steps: {trainer.max_epochs:,} "
        f"{'epoch' if trainer.max_epochs == 1 else 'epochs'} of {batches:,}",
    ]
