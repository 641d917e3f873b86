"""Destination hardness: how hard Hardness Manipulation makes each triplet."""

from __future__ import annotations

import math
from contextlib import suppress
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor, nn

from robustmetric.registry import Registry, registry
from robustmetric.triplets import Mined, Sampler, check_margin, check_sampler, draw_triplets
from robustmetric.validate import UserError, called, check_signature, is_number, parameters


class Destination(nn.Module):
    """The hardness (T,) that each source triplet of a batch is to reach.

    A subclass implements `forward` and, if it follows the loss, `update`; what it must remember is a buffer,
    so that it is saved and restored with the training. It is found by a name in ``HM[S,name]`` once it is
    registered with ``robustmetric.register("destination", name)``.

    >>> class Halfway(Destination):
    ...     def forward(self, mined, *, generator):
    ...         return mined.hardness / 2
    >>> Halfway()
    Halfway(Halfway)
    """

    def __init__(self) -> None:  # a module would take any options
        super().__init__()

    @property
    def name(self) -> str:
        """The destination as it is written in a defense's name."""
        return type(self).__name__

    def forward(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the destination (T,) of the `mined` triplets; all chance comes from the `generator`."""
        raise UserError(f"the destination {type(self).__name__} must implement forward(mined, *, generator)")

    def update(self, loss: Tensor) -> None:
        """Receive the adversarial triplet `loss` of this iteration, a scalar."""

    def extra_repr(self) -> str:
        """Show the name."""
        return self.name


DESTINATIONS: Registry[Destination] = registry("destination", Destination)
"""The destinations that are written by a name; a sampler and a number are destinations too."""


def check_destination(destination: object) -> None:
    """Refuse a `destination` that is none or cannot be called as one.

    >>> check_destination("LGA")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: a destination is a Destination, not 'LGA': rm.defense() makes it from a name ...
    """
    if not isinstance(destination, Destination):
        raise UserError(
            f"a destination is a Destination, not {destination!r}: rm.defense() makes it from a name such as "
            "HM[S,LGA]"
        )
    check_signature(f"{type(destination).__name__}.forward", destination.forward, "mined, *, generator")


def destination_hardness(destination: Destination, mined: Mined, *, generator: torch.Generator) -> Tensor:
    """Return the hardness (T,) that a `destination` wants of `mined` triplets, drawn with the `generator`.

    A destination that does not return a number for each triplet is refused.

    >>> from robustmetric.triplets import Batch, Hardest
    >>> batch, generator = Batch.of(torch.eye(4), torch.tensor([0, 0, 1, 1])), torch.Generator()
    >>> destination_hardness(Constant(2), Mined.of(batch, Hardest(), generator), generator=generator)
    tensor([2., 2.])
    """
    wanted = destination(mined, generator=generator)
    who, count = f"{type(destination).__name__}.forward", len(mined.hardness)
    if not isinstance(wanted, Tensor) or not wanted.is_floating_point() or wanted.shape != (count,):
        found = f"a {type(wanted).__name__}"
        if isinstance(wanted, Tensor):
            found = f"{wanted.dtype} of shape {tuple(wanted.shape)}"
        raise UserError(
            f"{who} returned {found} for {count} triplets; it must return a floating-point tensor of shape "
            f"({count},), the hardness that each is to reach"
        )
    finite = torch.isfinite(wanted)
    if not finite.all():
        raise UserError(
            f"the destination {destination.name} holds NaN or infinity for {int((~finite).sum())} of "
            f"{len(wanted)} triplets; {who} must return numbers"
        )
    return wanted.detach()


class Benign(Destination):
    """The hardness of a benign triplet with the same anchor, drawn by a `sampler`.

    For the sampler of the source triplets it is the source's own hardness: HM[X,X] perturbs no image.

    >>> from robustmetric.triplets import Semihard
    >>> Benign(Semihard()).name
    'M'
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        check_sampler(sampler)
        self.sampler = sampler

    @property
    def name(self) -> str:
        """The sampler's letter."""
        return sampler_name(self.sampler)

    def forward(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the hardness (T,) of the benign triplets, drawn with the `generator`."""
        if same_sampler(mined.sampler, self.sampler):
            return mined.hardness
        drawn = draw_triplets(self.sampler, mined.batch, generator=generator)
        if not torch.equal(drawn.anchor, mined.triplets.anchor):
            raise UserError(
                f"the samplers {sampler_name(mined.sampler)} and {self.name} drew triplets of other anchors; "
                "a destination needs the anchors of its source, in their order"
            )
        return drawn.hardness(mined.batch.distances)


class Constant(Destination):
    """The same hardness, `value`, for every triplet; 2, the largest possible, makes HM min-max training.

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

    def forward(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the constant as (T,)."""
        return torch.full_like(mined.hardness, self.value)


class OfMargin(Constant):
    """A multiple of γ for every triplet, such as −γ/2: `factor` times the `margin`.

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

    ℓ is the buffer `previous_loss`: part of the state that is saved with the training. `margin` is γ, and
    `u` is γ unless given.

    >>> destination = FollowsLoss(margin=0.2, u=None)
    >>> destination.update(torch.tensor(0.1))
    >>> destination.relative_loss()
    tensor(0.5000)
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
        """Remember the `loss`, a scalar, for the next iteration."""
        self.previous_loss.copy_(loss.detach())


@DESTINATIONS.register("gB")
class Boosted(FollowsLoss):
    """gB: another destination, `base`, raised by ξ·(1 − ℓ̄) as the loss falls; `xi` is ξ, 0.1 unless given.

    >>> from robustmetric.triplets import Semihard
    >>> Boosted(Benign(Semihard()), xi=0.1).name
    'gB(M,ξ=0.1)'
    """

    def __init__(
        self, base: Destination, *, xi: float | None = None, margin: float = 0.2, u: float | None = None
    ) -> None:
        super().__init__(margin=margin, u=u)
        check_destination(base)
        if xi is not None and not is_number(xi):
            raise UserError(f"ξ must be a finite number, not {xi} (0.1 by default)")
        self.base = base
        self.xi = xi

    @property
    def name(self) -> str:
        """The name gB with its base and what was given of ξ and u."""
        return f"gB({self.base.name}{parameters(ξ=self.xi, u=self.u, lead=',')})"

    def forward(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the raised destination (T,) of the `mined` triplets."""
        base = destination_hardness(self.base, mined, generator=generator)
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
    """LGA and its powers: −γ·ℓ̄ to the `power` 1, 2 or 0.5, from −γ at a high loss to 0 as it falls.

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

    def forward(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
        """Return the destination, the same for all triplets, as (T,)."""
        value = -self.margin * self.relative_loss() ** self.power
        return value.to(mined.hardness).expand(mined.hardness.shape)


def sampler_name(sampler: object) -> str:
    """Return the letter of a `sampler`, or what else it is called: its own name or that of its class.

    >>> from robustmetric.triplets import Softhard
    >>> sampler_name(Softhard())
    'S'
    """
    return str(getattr(sampler, "letter", None) or getattr(sampler, "name", None) or called(sampler))


def same_sampler(one: object, other: object) -> bool:
    """Return whether samplers `one` and `other` draw alike: equal, or of one class with the same options.

    >>> from robustmetric.triplets import Semihard, Softhard
    >>> same_sampler(Semihard(margin=0.2), Semihard()), same_sampler(Semihard(), Softhard())
    (True, False)
    """
    try:
        return _alike(one, other)
    except Exception:  # an equality of somebody else's, or an object that shows nothing of itself
        return False


def _alike(one: object, other: object) -> bool:
    """Compare two objects, with tensors and objects without an equality of their own in them."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(_alike(x, y) for x, y in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if type(one).__eq__ is not object.__eq__:
        # That of a dataclass with a tensor in it raises.
        with suppress(Exception):
            return bool(one == other)
    # All that a copy would be made of, which a function refuses to show.
    return _alike(one.__reduce_ex__(2), other.__reduce_ex__(2))
