"""The images of a training: those it learns from, and those it is validated on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robustmetric import data
from robustmetric.attacks import PGD, Gallery, Queries, attack
from robustmetric.data.cache import Pixels
from robustmetric.data.inputs import load_pixels
from robustmetric.data.pairs import ImageArray, ImageLoader, PairLoader
from robustmetric.evaluation.attack import NetworkView, run_attack
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget, frozen
from robustmetric.training.parts import inputs_of
from robustmetric.training.recipe import Recipe

ROBUST = "R@1/robust"
"""R@1 of a validation under attack, as it is logged."""
_QUERIES = 128  # that are attacked at most
_STEPS = 8  # of the attack; a quarter of ε each, or the recipe's α if that is more


@dataclass(frozen=True, eq=False)
class Images:
    """Some rows (R,) of decoded images, which are not copied."""

    source: Pixels
    rows: NDArray[np.int64]

    @classmethod
    def all_of(cls, source: Pixels) -> Images:
        """Take all rows."""
        return cls(source, np.arange(len(source)))

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        classes = len(self.source.labels[self.rows].unique())
        return f"{len(self):,} images of {classes:,} classes"


@dataclass(frozen=True, eq=False)
class Sets:
    """What a training learns from, what scores its validations, and which images those are."""

    learn: Images
    score: Images
    scored: Literal["validation images", "test images"]

    @property
    def skipped(self) -> list[str]:
        """The files that could not be read."""
        sources = dict.fromkeys((self.learn.source, self.score.source))
        return [str(file) for source in sources for file in source.skipped]

    def origin(self) -> dict[str, dict[str, Any]]:
        """Return number, classes and digests of the images; the names of files do not count."""
        sources = {"training images": self.learn.source, self.scored: self.score.source}
        if self.score.source is self.learn.source:
            del sources[self.scored]
        return {name: _origin(source) for name, source in sources.items()}

    def pairs(self, recipe: Recipe, **worker: Any) -> PairLoader:
        """Return the batches of pairs of a `recipe`; `worker` is who takes them, as a `PairLoader` has it."""
        source, shown = self.learn.source, ("seed", "crop", "flip", "zoom", "jitter")
        return PairLoader(
            source.pixels,
            source.labels,
            rows=self.learn.rows,
            pairs=recipe.batch // 2,
            itself=recipe.reference,
            **{name: getattr(recipe, name) for name in shown},
            **worker,
        )


def _origin(source: Pixels) -> dict[str, Any]:
    labels = hashlib.sha256("\0".join(source.classes).encode())
    labels.update(source.labels.numpy().tobytes())
    counts = {"count": len(source), "classes": len(source.classes)}
    return {**counts, "labels": labels.hexdigest(), "pixels": source.digest}


def load_sets(
    recipe: Recipe,
    cache: Path | None = None,
    *,
    skip_broken: bool = False,
    watch: Callable[[str, int, int], None] | None = None,
    report: Callable[[str], None] = print,
) -> Sets:
    """Decode the images of a training, once; the test images only where no others can choose the weights.

    They are kept in `cache`. With `skip_broken` those that cannot be read are left out. `watch` is told,
    while images are decoded, the split, how many are done and how many there are; `report` gets a sentence
    if nothing can be set apart or a cache is damaged.

    >>> sets = load_sets(Recipe(data="digits", validation=0.1))
    >>> len(sets.learn), len(sets.score), sets.scored
    (900, 100, 'validation images')
    """
    options: dict[str, Any] = {"cache": cache, "skip_broken": skip_broken, "watch": watch, "report": report}
    decode = partial(load_pixels, recipe.data, recipe.root, inputs_of(recipe), **options)
    if not recipe.validation:
        train, test = decode(splits=["train", "test"])
        return Sets(Images.all_of(train), Images.all_of(test), "test images")
    if data.own_validation(recipe.data, recipe.root) is not None:
        train, apart_already = decode(splits=["train", "validation"])
        return Sets(Images.all_of(train), Images.all_of(apart_already), "validation images")
    tested = data.load(recipe.data, recipe.root, "test").classes
    (train,) = decode(splits=["train"])
    whole = set(tested).isdisjoint(train.classes)
    apart = set_apart(train.labels.numpy(), recipe.validation, recipe.seed, whole_classes=whole)
    if apart.any():
        learn, score = (Images(train, np.flatnonzero(rows)) for rows in (~apart, apart))
        return Sets(learn, score, "validation images")
    report(
        "no images can be set apart to choose the weights, for the classes are too few or too small: the "
        "last weights count, and validation scores the test images"
    )
    (test,) = decode(splits=["test"])
    return Sets(Images.all_of(train), Images.all_of(test), "test images")


def set_apart(
    labels: NDArray[np.int64], share: float, seed: int, *, whole_classes: bool
) -> NDArray[np.bool_]:
    """Draw the images (N,) that are not trained on: whole classes if that is possible, else some of each.

    Of classes, or of the images of a class, `share` is set apart, at least two, if at least two remain. Where
    not even two classes of at least two images can be spared, images of each class are drawn; a class that
    cannot spare two stays whole.

    >>> labels = np.repeat(np.arange(5), 4)
    >>> apart = set_apart(labels, 0.1, seed=0, whole_classes=True)
    >>> len(set(labels[apart])), int(apart.sum())
    (2, 8)
    >>> int(set_apart(labels, 0.1, seed=0, whole_classes=False).sum())
    10
    """
    generator = np.random.default_rng(np.random.SeedSequence([seed, 2]))
    names, sizes = np.unique(labels, return_counts=True)
    pairs = names[sizes > 1]  # a class of one image can neither be queried nor learned from
    count = max(2, round(share * len(names)))
    if whole_classes and len(pairs) - count >= 2:
        return np.isin(labels, generator.choice(pairs, count, replace=False))
    apart = np.zeros(len(labels), dtype=np.bool_)
    for name, size in zip(names, sizes, strict=True):
        count = max(2, round(share * size))
        if size - count >= 2:
            apart[generator.choice(np.flatnonzero(labels == name), count, replace=False)] = True
    return apart


class PairData(L.LightningDataModule):
    """Batches of pairs, shared out among the workers, and all images of the validation for each."""

    def __init__(self, sets: Sets, recipe: Recipe) -> None:
        super().__init__()
        self.sets, self.recipe = sets, recipe

    def train_dataloader(self) -> PairLoader:
        """Batches of pairs from where the trainer is, which knows its worker by now."""
        assert self.trainer is not None  # noqa: S101
        trainer = self.trainer
        done = trainer.fit_loop.epoch_loop.batch_progress.current
        return self.sets.pairs(
            self.recipe,
            rank=trainer.global_rank,
            world=trainer.world_size,
            progress=lambda: (trainer.current_epoch, done.ready),
        )

    def val_dataloader(self) -> ImageLoader:
        """The images of the validation in their order."""
        rows, source, recipe = self.sets.score.rows, self.sets.score.source, self.recipe
        return ImageLoader(source.pixels, source.labels, rows=rows, batch=recipe.batch, crop=recipe.crop)


def attacked_rows(images: Images, seed: int) -> NDArray[np.int64]:
    """Draw which of the `images` are attacked: (Q,) positions, each with another of its class."""
    labels = images.source.labels[torch.from_numpy(images.rows)].numpy()
    _, kind, counts = np.unique(labels, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(counts[kind] > 1)
    generator = np.random.default_rng(np.random.SeedSequence([seed, 3]))
    return np.sort(generator.choice(rows, min(_QUERIES, len(rows)), replace=False))


def robust_recall(
    images: Images, recipe: Recipe, model: nn.Module, z: Tensor, labels: Tensor
) -> dict[str, float]:
    """Return R@1 in % of some of the `images` after a few steps of ES within the `recipe`'s ε.

    `z` (N, D) are the embeddings of all, and `labels` (N,) their classes.
    """
    rows = attacked_rows(images, recipe.seed)
    like = next(model.parameters())
    pictures = ImageArray(images.source.pixels, recipe.crop, images.rows[rows])[:].to(like)
    own, z = torch.from_numpy(rows).to(z.device), z.to(like)
    view = NetworkView(model, pictures, Queries(z[own], labels[own], own), Gallery(z, labels))
    budget = Budget(eps=recipe.eps, alpha=max(recipe.alpha, recipe.eps / 4), steps=_STEPS)
    threat = Threat(budget, PGD(), recipe.seed, recipe.batch)
    hits = []
    with frozen(model):
        for numbers in torch.arange(len(rows)).split(recipe.batch):
            found = run_attack(view, attack("ES"), numbers, threat, clean=False)
            hits.append(found.after["ES:R"])
    return {ROBUST: float(torch.cat(hits).mean())}
