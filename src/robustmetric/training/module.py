"""The training as a Lightning module: a network, a defense, an optimiser, and validation by retrieval."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from robustmetric import data
from robustmetric.defenses import Defense
from robustmetric.errors import UserError
from robustmetric.models import load_weights, try_network
from robustmetric.perturb import device_of, frozen
from robustmetric.retrieval import retrieval_scores
from robustmetric.sphere import embed
from robustmetric.training.parts import inputs_of, source_of, thaws
from robustmetric.training.recipe import Recipe, bare

SCORES = ("R@1", "R@2", "mAP", "mAP@R", "NMI")
"""What a validation measures."""

More = Callable[[nn.Module, Tensor, Tensor], Mapping[str, float]]
"""Further scores of a validation, of the network, all embeddings (N, D) and their labels (N,)."""

_FEW = 4  # images that a network is tried on

RESERVED = {"loss", "lr", "step", "epoch", *SCORES}
"""What the training logs itself, beside what a defense does."""


class MetricModule(L.LightningModule):
    """Trains `model` with `defense`; for a Trainer of your own.

    Training batches are (images, labels) as the defense takes them; validation batches are (images, labels)
    whose embeddings are collected and scored together. Each step draws its triplets from `seed`, the step and
    the worker, so that a resumed training draws the same. Logged are the learning rate, the defense's figures
    and, after validation, R@1, R@2, mAP, mAP@R and NMI in percent; steps count from 1.

    Adam with `lr` and `weight_decay` optimises, unless an `optimizer` is made of the parameters that learn. A
    `scheduler` is made of the optimiser, and takes a step in each step of the training. What `more` returns
    of the network, the embeddings and the labels is logged with the scores of a validation.

    >>> import robustmetric as rm
    >>> module = MetricModule(rm.model("c2f2"), rm.defense("HM[S,LGA]&ICS"), lr=1e-3)
    >>> type(module.configure_optimizers()).__name__
    'Adam'
    >>> from functools import partial
    >>> sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    >>> decay = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.999)
    >>> module = MetricModule(rm.model("c2f2"), rm.defense("N/A[S]"), optimizer=sgd, scheduler=decay)
    """

    def __init__(
        self,
        model: nn.Module,
        defense: Defense,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        seed: int = 0,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        more: More | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.defense = defense
        self.lr, self.weight_decay, self.seed = lr, weight_decay, seed
        self.optimizer, self.scheduler, self.more = optimizer, scheduler, more
        self._found: list[tuple[Tensor, Tensor]] = []

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimiser of the parameters that learn, with its scheduler if there is one."""
        learn = learning(self.model)
        if self.optimizer is None:
            optimizer: Optimizer = torch.optim.Adam(learn, lr=self.lr, weight_decay=self.weight_decay)
        else:
            optimizer = self.optimizer(learn)
        if self.scheduler is None:
            return optimizer
        scheduler = self.scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Take the defense's loss on a batch."""
        mixed = np.random.SeedSequence([self.seed, self.global_step, self.global_rank])
        self.defense.generator.manual_seed(int(mixed.generate_state(1)[0]))
        images, labels = batch
        step = self.defense(self.model, images, labels)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        if taken := sorted(RESERVED & step.logs.keys()):
            raise UserError(
                f"{type(self.defense).__name__}.step logged {', '.join(taken)}, which the training logs "
                "itself: give it another name"
            )
        logs = {**step.logs, "loss": step.loss.item(), "lr": float(rate)}
        for name, value in logs.items():
            self.log(name, value, prog_bar=name in ("loss", "hardness/reached", "perturbed"))
        self._log_step(self.global_step + 1)
        return step.loss

    def _log_step(self, step: int) -> None:
        """Pass loggers the number of steps done, where Lightning itself would count from 0."""
        if self.trainer.state.fn == "fit":
            self.log_dict({"step": float(step), "epoch": float(self.current_epoch)}, rank_zero_only=True)

    def on_validation_epoch_start(self) -> None:
        """Begin to collect embeddings."""
        self._found = []

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Embed a batch of the images that validate."""
        images, labels = batch
        self._found.append((embed(self.model, images), labels))

    def on_validation_epoch_end(self) -> None:
        """Score all embeddings."""
        z, labels = (torch.cat(parts) for parts in zip(*self._found, strict=True))
        self._found = []
        if self.trainer.sanity_checking:
            return
        scores = retrieval_scores(z, labels)
        if self.more is not None:
            with torch.inference_mode(False), torch.enable_grad():
                scores |= self.more(self.model, z.clone(), labels.clone())
        self.log_dict({name: value for name, value in scores.items() if name != "R@1"}, rank_zero_only=True)
        self.log("R@1", scores["R@1"], prog_bar=True, rank_zero_only=True)
        self._log_step(self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random states, of all workers, which Lightning does not."""
        states: list[Any] = [random_states()]
        if self.trainer.world_size > 1:
            states = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(states, random_states())
        checkpoint["random_states"] = states
        checkpoint["defense"] = self.defense.name

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reject another training's checkpoint; take up the random states, to be set when training begins."""
        states = checkpoint.get("random_states", [])
        self._random_states = states[self.global_rank] if self.global_rank < len(states) else None
        made_with = checkpoint.get("defense", self.defense.name)
        # A run's own copy of a file is the same file, wherever the run lies.
        if bare({"defense": made_with}) != bare({"defense": self.defense.name}):
            raise UserError(
                f"the checkpoint is of a training with {made_with}, this one uses {self.defense.name}: "
                "resume with the same defense, or begin a new run"
            )

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Set the random states of the checkpoint at the very last moment before going on."""
        if (states := getattr(self, "_random_states", None)) is not None:
            set_random_states(states)
            self._random_states = None


def scheduler(
    *, steps: int, warmup: int, schedule: Literal["constant", "cosine"]
) -> Callable[[Optimizer], LRScheduler] | None:
    """Make what `MetricModule` takes as its scheduler; None where the learning rate never changes.

    The rate rises linearly in the first `warmup` steps, a quarter of all `steps` at most, and reaches 1 in
    the last of them; a cosine then falls to 0 at the end.
    """
    if schedule == "constant" and warmup == 0:
        return None
    warmup = min(warmup, steps // 4)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant":
            return 1.0
        return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))) / 2

    # A function's settings are not kept in checkpoints: a longer training gets a later end.
    return lambda optimizer: LambdaLR(optimizer, factor)


def learning(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a `model` that learn; one without any is refused.

    >>> learning(nn.Flatten())
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the network has no parameters that learn: ...
    """
    found = [p for p in model.parameters() if p.requires_grad]
    if not found:
        raise UserError(
            "the network has no parameters that learn: give one with layers that have weights, and leave "
            "requires_grad on for some of them",
            parameter="model",
        )
    return found


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators as plain data."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],  # type: ignore[union-attr]
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Bring the global generators back to the `states` that `random_states` returned.

    >>> states = random_states()
    >>> drawn = torch.rand(1)
    >>> set_random_states(states)
    >>> bool(torch.rand(1) == drawn)
    True
    """
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["cpu"].cpu())
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])


def make_network(
    recipe: Recipe, device: torch.device, report: Callable[[str], None] = print, *, resumed: bool = False
) -> nn.Module:
    """Make the network of a `recipe` on a `device`, and refuse one that cannot learn from images.

    It is tried on a few images before all are decoded. It has the recipe's weights unless it is `resumed`,
    for a checkpoint has later ones. `report` gets what the user should know about the weights.
    """
    inputs = inputs_of(recipe)
    images = data.load(recipe.data, recipe.root, "train")
    first = inputs.first(images)
    model = source_of(recipe).build(*inputs.shape(first))
    if not resumed and recipe.weights is not None:
        load_weights(model, recipe.weights, report=report)
    elif not resumed and recipe.model.startswith("resnet"):
        report(
            f"{recipe.model} starts from random weights: the published figures need those of ImageNet; give "
            "--weights FILE, such as torchvision's"
        )
    if thaws(recipe):
        report("BatchNorm is not frozen: reference trains EST so, whatever freeze_bn says")
    learning(model)
    states = random_states()
    one = inputs.images(first)[:1]
    try_network(model.to(device), one)
    rows = torch.linspace(0, len(images) - 1, _FEW).long().tolist()[1:]
    few = [one]
    for row in rows:
        try:
            few.append(inputs.images(inputs.first(images.take([row])))[:1])
        except (UserError, OSError):  # decoding all of them will say so
            continue
    check_apart(model, torch.cat([image for image in few if image.shape == one.shape]))
    set_random_states(states)  # the training draws as if nothing had been tried
    return model


def check_apart(model: nn.Module, images: Tensor) -> None:
    """Reject a `model` that gives all `images` (N, C, H, W) one embedding, or one that depends on the batch.

    In evaluation mode, that is: in training BatchNorm does mix a batch.
    """
    images = images.to(device_of(model))
    different = bool((images != images[:1]).any())
    with frozen(model), torch.no_grad():
        alone = torch.cat([embed(model, image[None]) for image in images])
        apart = float((embed(model, images) - alone).abs().max())
    if apart > 1e-4:
        raise UserError(
            f"an image's embedding depends on the batch it is in, also in evaluation mode (by {apart:.2g}): "
            "let the network treat each image by itself",
            parameter="model",
        )
    if different and bool((alone == alone[:1]).all()):
        raise UserError(
            f"the network gives {len(images)} different images the same embedding: look at its layers and at "
            "its initial weights",
            parameter="model",
        )
