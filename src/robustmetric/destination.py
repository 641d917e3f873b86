"""Destination hardness: how hard Hardness Manipulation makes each triplet."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor, nn

from robustmetric.errors import UserError, describe, instance, number
from robustmetric.registry import Part, Registry, registry, with_symbols
from robustmetric.triplets import Mined, Sampler, check_margin


class Destination(Part, nn.Module):
    """The hardness (T,) that the source triplets of a batch should reach.

    A subclass implements `hardness` and, if it follows the loss, `update`; its state is in buffers, so that
    it is saved and restored with the training. It is found by a name in ``HM[S,name]`` once it is registered
    with ``robustmetric.register("destination", name)``.

    >>> class Halfway(Destination):
    ...     def hardness(self, mined, *, generator):
    ...         return mined.hardness / 2
    """

    signatures = ("hardness(mined, *, generator)",)

    def __init__(self) -> None:  # a module would take any options
        super().__init__()

    def hardness(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the hardness (T,) that `mined` triplets should reach; draw with the `generator` alone."""
        name = type(self).__name__
        raise UserError(f"the destination {name} must implement hardness(mined, *, generator)")

    def forward(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the `hardness` of the `mined` triplets with the `generator`; reject all but (T,) numbers."""
        wanted = self.hardness(mined, generator=generator)
        who, shape = f"{type(self).__name__}.hardness", mined.hardness.shape
        if not isinstance(wanted, Tensor) or not wanted.is_floating_point() or wanted.shape != shape:
            raise UserError(
                f"{who} returned {describe(wanted)} for {len(mined.hardness)} triplets; it must return a "
                f"floating-point tensor of shape {tuple(shape)}, the hardness that each should reach"
            )
        if not torch.isfinite(wanted).all():
            raise UserError(f"{who} returned NaN or infinity; it must return numbers")
        return wanted.detach()

    def update(self, loss: Tensor) -> None:
        """Receive the adversarial triplet `loss` of this iteration, a scalar."""


DESTINATIONS: Registry[Destination] = registry("destination", Destination)
"""The destinations that are written by a name; a sampler and a number are destinations too."""


class Benign(Destination):
    """The hardness of a benign triplet with the same anchor, drawn by a `sampler`.

    For the sampler of the source triplets it is the source's own hardness: HM[X,X] perturbs no image.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.sampler = instance("sampler", sampler, Sampler)
        self.name = str(sampler)

    def hardness(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the hardness (T,) of the benign triplets, drawn with the `generator`."""
        if mined.sampler is self.sampler or mined.sampler == self.sampler:
            return mined.hardness
        drawn = self.sampler(mined.batch, generator=generator)
        if not torch.equal(drawn.anchor, mined.triplets.anchor):
            one, other = (type(sampler).__name__ for sampler in (mined.sampler, self.sampler))
            raise UserError(
                f"the samplers {one} and {other} drew triplets of other anchors; a destination needs the "
                "anchors of its source, in their order"
            )
        return drawn.hardness(mined.batch.distances)


class Constant(Destination):
    """The same hardness, `value`, for every triplet; 2, the largest possible, makes HM min-max training."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = number("a constant destination", value, -2, 2, why="the range of hardness")
        self.name = str(int(self.value)) if self.value.is_integer() else repr(self.value)

    def hardness(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the constant as (T,)."""
        return torch.full_like(mined.hardness, self.value)


class OfMargin(Constant):
    """A multiple of γ for every triplet, such as −γ/2: `factor` times the `margin`."""

    def __init__(self, factor: float, *, margin: float = 0.2) -> None:
        super().__init__(factor * check_margin(margin))
        part = Fraction(factor).limit_denominator(1000)
        above = {1: "γ", -1: "-γ"}.get(part.numerator, f"{part.numerator}γ")
        exact = above if part.denominator == 1 else f"{above}/{part.denominator}"
        self.name = exact if float(part) == factor else f"{factor!r}γ"


class FollowsLoss(Destination):
    """A destination that moves with ℓ̄ = min(u, ℓ)/u, ℓ the loss of the previous iteration; at first ℓ̄ = 1.

    ℓ is the buffer `previous_loss`: part of the state that is saved with the training. `margin` is γ, and
    `u` is γ unless given.

    >>> destination = Gradual(margin=0.2)
    >>> destination.update(torch.tensor(0.1))
    >>> destination.relative_loss()
    tensor(0.5000)
    """

    previous_loss: Tensor

    def __init__(self, *, margin: float, u: float | None) -> None:
        super().__init__()
        self.margin = check_margin(margin)
        if u is not None:
            u = number("u", u, 0, open_low=True, why="the loss is clipped at u (γ by default)")
        self.u = u
        self.register_buffer("previous_loss", torch.tensor(math.inf))

    def relative_loss(self) -> Tensor:
        """Return ℓ̄, a scalar in [0, 1]."""
        u = self.margin if self.u is None else self.u
        return self.previous_loss.clamp_max(u) / u

    def update(self, loss: Tensor) -> None:
        """Remember the `loss`, a scalar, for the next iteration."""
        self.previous_loss.copy_(loss.detach())


@DESTINATIONS.register("gB")
class Boosted(FollowsLoss):
    """gB: another destination, `base`, raised by ξ·(1 − ℓ̄) as the loss falls; `xi` is ξ, 0.1 unless given."""

    def __init__(
        self, base: Destination, *, xi: float | None = None, margin: float = 0.2, u: float | None = None
    ) -> None:
        super().__init__(margin=margin, u=u)
        self.base = instance("base", base, Destination)
        self.xi = None if xi is None else number("ξ", xi)
        self.name = with_symbols(f"gB({base})", ξ=self.xi, u=self.u)

    def hardness(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the raised destination (T,) of the `mined` triplets."""
        base: Tensor = self.base(mined, generator=generator)
        shift = (0.1 if self.xi is None else self.xi) * (1 - self.relative_loss())
        return base + shift.to(base)

    def update(self, loss: Tensor) -> None:
        """Remember the `loss`, a scalar, for the next iteration, here and in the base."""
        super().update(loss)
        self.base.update(loss)


@DESTINATIONS.register("LGA")
@DESTINATIONS.register("g2", power=2.0)
@DESTINATIONS.register("g1/2", power=0.5)
class Gradual(FollowsLoss):
    """LGA and its powers: −γ·ℓ̄ to the `power` 1, 2 or 0.5, from −γ at a high loss to 0 as it falls."""

    NAMES: ClassVar[dict[float, str]] = {1.0: "LGA", 2.0: "g2", 0.5: "g1/2"}

    def __init__(self, *, power: float = 1.0, margin: float = 0.2, u: float | None = None) -> None:
        super().__init__(margin=margin, u=u)
        if power not in self.NAMES:
            raise UserError(f"power must be one of 1 (LGA), 2 (g2) and 0.5 (g1/2), not {describe(power)}")
        self.power = float(power)
        self.name = with_symbols(self.NAMES[power], u=self.u)

    def hardness(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the destination, the same for all triplets, as (T,)."""
        value = -self.margin * self.relative_loss() ** self.power
        return value.to(mined.hardness).expand(mined.hardness.shape)
