"""How the learning rate goes: a warm-up, then constant or down along a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def factor(step: int, *, steps: int, warmup: int = 0, schedule: Literal["constant", "cosine"]) -> float:
    """Return what the learning rate is multiplied by in a step, counted from 0, of all `steps`.

    It rises linearly in the first `warmup` steps and reaches 1 in the last of them; the cosine then falls
    to 0 at the end.

    >>> [factor(step, steps=6, warmup=2, schedule="cosine") for step in (0, 1, 2, 4, 6)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))) / 2


def scheduler(
    *, steps: int, warmup: int, schedule: Literal["constant", "cosine"]
) -> Callable[[Optimizer], LambdaLR] | None:
    """Make what `MetricModule` takes as its scheduler; None where the learning rate never changes.

    A warm-up takes a quarter of a short training at most.

    >>> scheduler(steps=10, warmup=0, schedule="constant") is None
    True
    """
    if schedule == "constant" and warmup == 0:
        return None
    warmup = min(warmup, steps // 4)
    # A function, whose settings are not kept in checkpoints: a longer training gets a later end.
    return lambda optimizer: LambdaLR(
        optimizer, lambda step: factor(step, steps=steps, warmup=warmup, schedule=schedule)
    )
