"""Destination hardness: how hard Hardness Manipulation makes each triplet."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor, nn

from robustmetric.registry import parameters
from robustmetric.triplets import Sampler, Triplets, check_margin
from robustmetric.validate import UserError, is_number


class Destination(nn.Module):
    """Returns the hardness (T,) that each source triplet of a batch is to reach.

    A subclass implements `forward` and, if it follows the loss, `update`; what it must remember is a buffer,
    so that it is saved and restored with the training.
    """

    @property
    def name(self) -> str:
        """The destination as it is written in a defense's name."""
        return type(self).__name__

    def forward(
        self,
        dist: Tensor,
        labels: Tensor,
        source: Triplets,
        *,
        sampler: Sampler,
        generator: torch.Generator,
        dim: int | None = None,
    ) -> Tensor:
        """Return the destination (T,) of the `source` triplets that `sampler` drew from `dist` and `labels`."""
        raise TypeError(f"{type(self).__name__} must implement forward")

    def update(self, loss: Tensor) -> None:
        """Take note of the adversarial triplet loss of this iteration."""

    def extra_repr(self) -> str:
        """Show the name."""
        return self.name


class Benign(Destination):
    """The hardness of a benign triplet with the same anchor, drawn by a sampler.

    The sampler of the source triplets gives the source's own hardness: HM[X,X] perturbs no image.

    >>> from robustmetric.triplets import Semihard
    >>> Benign(Semihard()).name
    'M'
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.sampler = sampler

    @property
    def name(self) -> str:
        """The sampler's letter."""
        return sampler_name(self.sampler)

    def forward(
        self,
        dist: Tensor,
        labels: Tensor,
        source: Triplets,
        *,
        sampler: Sampler,
        generator: torch.Generator,
        dim: int | None = None,
    ) -> Tensor:
        """Draw the benign triplets and give their hardness (T,)."""
        if sampler == self.sampler:
            return source.hardness(dist)
        drawn = self.sampler(dist, labels, generator=generator, dim=dim)
        if not torch.equal(drawn.anchor, source.anchor):
            raise UserError(
                f"the samplers {sampler_name(sampler)} and {self.name} drew triplets of other anchors; a "
                "destination needs the anchors of its source, in their order"
            )
        return drawn.hardness(dist)


class Constant(Destination):
    """The same hardness for every triplet; 2, the largest there is, makes HM min-max training.

    >>> Constant(2).name
    '2'
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        if not (is_number(value) and -2 <= value <= 2):
            raise UserError(
                f"a constant destination must be in [-2, 2], the range of hardness, not {value!r}"
            )
        self.value = float(value)

    @property
    def name(self) -> str:
        """The number."""
        return str(int(self.value)) if self.value.is_integer() else repr(self.value)

    def forward(
        self,
        dist: Tensor,
        labels: Tensor,
        source: Triplets,
        *,
        sampler: Sampler,
        generator: torch.Generator,
        dim: int | None = None,
    ) -> Tensor:
        """Return the constant as (T,)."""
        return dist.new_full(source.anchor.shape, self.value)


class OfMargin(Constant):
    """A multiple of the margin γ for every triplet, such as −γ/2.

    >>> OfMargin(-0.5, margin=0.2).name, OfMargin(-0.5, margin=0.2).value
    ('-γ/2', -0.1)
    """

    def __init__(self, factor: float, *, margin: float = 0.2) -> None:
        check_margin(margin)
        super().__init__(factor * margin)
        self.factor = factor

    @property
    def name(self) -> str:
        """The multiple, as a fraction of γ."""
        part = Fraction(self.factor).limit_denominator(1000)
        if float(part) != self.factor:
            return f"{self.factor!r}γ"
        above = {1: "γ", -1: "-γ"}.get(part.numerator, f"{part.numerator}γ")
        return above if part.denominator == 1 else f"{above}/{part.denominator}"


class FollowsLoss(Destination):
    """A destination that moves with ℓ̄ = min(u, ℓ)/u, ℓ the loss of the previous iteration; at first ℓ̄ = 1.

    ℓ is the buffer `previous_loss`: part of the state that is saved with the training. `u` defaults to γ.
    """

    previous_loss: Tensor

    def __init__(self, *, margin: float, u: float | None) -> None:
        super().__init__()
        check_margin(margin)
        if u is not None and not (is_number(u) and u > 0):
            raise UserError(f"u must be a positive number, not {u}: the loss is clipped at u (γ by default)")
        self.margin = margin
        self.u = u
        self.register_buffer("previous_loss", torch.tensor(math.inf))

    def relative_loss(self) -> Tensor:
        """Return ℓ̄, a scalar in [0, 1]."""
        u = self.margin if self.u is None else self.u
        return self.previous_loss.clamp_max(u) / u

    def update(self, loss: Tensor) -> None:
        """Remember the loss for the next iteration."""
        self.previous_loss.copy_(loss.detach())


class Boosted(FollowsLoss):
    """gB: another destination, raised by ξ·(1 − ℓ̄) as the loss falls.

    >>> from robustmetric.triplets import Semihard
    >>> Boosted(Benign(Semihard()), xi=0.1).name
    'gB(M,ξ=0.1)'
    """

    def __init__(
        self, base: Destination, *, xi: float | None = None, margin: float = 0.2, u: float | None = None
    ) -> None:
        super().__init__(margin=margin, u=u)
        if xi is not None and not is_number(xi):
            raise UserError(f"ξ must be a finite number, not {xi} (0.1 by default)")
        self.base = base
        self.xi = xi

    @property
    def name(self) -> str:
        """GB with its base and what was given of ξ and u."""
        return f"gB({self.base.name}{parameters(ξ=self.xi, u=self.u, lead=',')})"

    def forward(
        self,
        dist: Tensor,
        labels: Tensor,
        source: Triplets,
        *,
        sampler: Sampler,
        generator: torch.Generator,
        dim: int | None = None,
    ) -> Tensor:
        """Return the raised destination (T,)."""
        base: Tensor = self.base(dist, labels, source, sampler=sampler, generator=generator, dim=dim)
        shift = (0.1 if self.xi is None else self.xi) * (1 - self.relative_loss())
        return base + shift.to(base)

    def update(self, loss: Tensor) -> None:
        """Remember the loss for the next iteration, here and in the base."""
        super().update(loss)
        self.base.update(loss)


class Gradual(FollowsLoss):
    """LGA and its powers: −γ·ℓ̄^power, from −γ while the loss is high to 0 as it falls.

    >>> Gradual().name, Gradual(power=2).name, Gradual(power=0.5).name, Gradual(u=2.2).name
    ('LGA', 'g2', 'g1/2', 'LGA(u=2.2)')
    """

    NAMES: ClassVar[dict[float, str]] = {1.0: "LGA", 2.0: "g2", 0.5: "g1/2"}

    def __init__(self, *, power: float = 1.0, margin: float = 0.2, u: float | None = None) -> None:
        super().__init__(margin=margin, u=u)
        if power not in self.NAMES:
            raise UserError(f"power must be one of 1 (LGA), 2 (g2) and 0.5 (g1/2), not {power}")
        self.power = float(power)

    @property
    def name(self) -> str:
        """LGA, g2 or g1/2 with what was given of u."""
        listed = parameters(u=self.u)
        return self.NAMES[self.power] + (f"({listed})" if listed else "")

    def forward(
        self,
        dist: Tensor,
        labels: Tensor,
        source: Triplets,
        *,
        sampler: Sampler,
        generator: torch.Generator,
        dim: int | None = None,
    ) -> Tensor:
        """Return the destination, the same for all triplets, as (T,)."""
        value = -self.margin * self.relative_loss() ** self.power
        return value.to(dist).expand(source.anchor.shape)


def sampler_name(sampler: Sampler) -> str:
    """Return a sampler's letter, or the name of its class if it has none.

    >>> from robustmetric.triplets import Softhard
    >>> sampler_name(Softhard())
    'S'
    """
    return str(getattr(sampler, "letter", type(sampler).__name__))
