"""Networks whose gradients are masked: what they answer is as easily changed, but the gradient hides how.

Each is made of an honest network, and says which checks have to warn or fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Through(nn.Module):
    """A network behind or before something else."""

    def __init__(
        self,
        inner: nn.Module,
        before: Callable[[Tensor], Tensor] = lambda x: x,
        after: Callable[[Tensor], Tensor] = lambda z: z,
    ) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


class ByClass(nn.Module):
    """Tells the class by what has no gradient, and images of a class apart by what has one.

    `middle` (K, P) are the mean images of the classes, of P pixels.
    """

    def __init__(self, middle: Tensor) -> None:
        super().__init__()
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        nearest = torch.cdist((flat.detach() * 255).round() / 255, self.middle).argmin(1)
        return torch.cat([10 * F.one_hot(nearest, len(self.middle)), flat], dim=1)


def rounded(x: Tensor) -> Tensor:
    """Round images to 8 bits: flat for a gradient."""
    return (x * 255).round() / 255


def saturated(z: Tensor) -> Tensor:
    """Drive embeddings to −1 and 1, where the slope of tanh is no number of single precision."""
    return torch.tanh(1e4 * z)


def negated(x: Tensor) -> Tensor:
    """Leave images as they are, with a gradient of the wrong sign."""
    return 2 * x.detach() - x


def shattered(x: Tensor) -> Tensor:
    """Add ripples of a quarter of a grey level, whose slope is ten times that of the image."""
    return x + 1e-3 * torch.sin(1e4 * x)


def misled(x: Tensor) -> Tensor:
    """Leave images as they are, with the gradient of those upside down."""
    turned = x.flip(2, 3)
    return x.detach() + turned - turned.detach()


def resampled(x: Tensor) -> Tensor:
    """Put each pixel to the nearest of 32 even parts of the image's range: flat between them."""
    low, high = x.flatten(1).aminmax(dim=1)
    low, width = low[:, None, None, None], (high - low)[:, None, None, None].clamp_min(1e-6)
    return low.detach() + width.detach() * torch.floor(32 * (x - low) / width).clamp_max(31) / 31


def dithered() -> Callable[[Tensor], Tensor]:
    """Return what adds noise to images, other noise at each pass."""
    generator = torch.Generator().manual_seed(0)
    return lambda x: x + 0.02 * torch.randn(x.shape, generator=generator)


def shaken() -> Callable[[Tensor], Tensor]:
    """Return what moves each batch by a pixel, another way at each pass."""
    generator = torch.Generator().manual_seed(0)

    def shake(x: Tensor) -> Tensor:
        by = torch.randint(-1, 2, (2,), generator=generator).tolist()
        return x.roll((by[0], by[1]), (2, 3))

    return shake


class Masked(NamedTuple):
    """How an honest network's gradients are masked, and what must warn or fail.

    `mask` makes the network of an honest one; `quick` are checks of the quick set, `full` those that only the
    full set has.
    """

    mask: Callable[[nn.Module], nn.Module]
    quick: tuple[str, ...]
    full: tuple[str, ...]


_LEADS_NOWHERE = ("eps-1", "black-box")

MASKED: dict[str, Masked] = {
    "rounded": Masked(lambda net: Through(net, before=rounded), ("gradient", "noise"), _LEADS_NOWHERE),
    "resampled": Masked(lambda net: Through(net, before=resampled), ("gradient", "noise"), _LEADS_NOWHERE),
    "saturated": Masked(lambda net: Through(net, after=saturated), ("gradient", "noise"), _LEADS_NOWHERE),
    "negated": Masked(lambda net: Through(net, before=negated), ("noise",), (*_LEADS_NOWHERE, "eps-sweep")),
    "misled": Masked(lambda net: Through(net, before=misled), ("noise",), _LEADS_NOWHERE),
    "shattered": Masked(lambda net: Through(net, before=shattered), ("noise",), _LEADS_NOWHERE),
    "dithered": Masked(lambda net: Through(net, before=dithered()), ("repeat", "seed"), ()),
    "shaken": Masked(lambda net: Through(net, before=shaken()), ("repeat", "seed"), ()),
}
