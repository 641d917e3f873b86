"""Networks that note what is asked of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Counted(nn.Module):
    """A network that counts the images that go through it, and those that a gradient comes back of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.forwards = self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += len(x)
        z: Tensor = self.inner(_Back.apply(x, self))  # type: ignore[no-untyped-call]
        return z


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counted: Counted) -> Tensor:
        ctx.counted = counted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.counted.backwards += len(grads[0])
        return grads[0], None
