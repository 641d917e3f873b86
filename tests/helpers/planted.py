"""Networks with an adversary inside them: for every query an image in the ball that surely breaks its R@1.

The images (120, 1, 8, 8) are of six classes. Their upper half tells the class and, a little, the single
image; their lower half is grey. The base of all networks is a linear view of the upper half, so contractive
that no perturbation in the ball changes the class of the nearest image: `reach` bounds how far it can move.
What is planted is a trigger in the lower half. How far it is pulled is `a`, 0 at the image and 1 at a corner
of the ball that only the network knows; it opens by a share t, and the code of the query's class is exchanged
for that of another by this share. At t over a half the query finds that other class.

The kinds differ in what hides the way from the image to there. Those that leave no gradient to follow have
their trigger in two blocks, each of one sign, that open bit by bit, so that trying squares can find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

CLASSES, EACH, DETAILS = 6, 20, 8
CONTRAST = 0.25
"""By how much the pattern of its class lightens or darkens the pixels of an image."""

EPS = 0.08
Norm = Literal["linf", "l2"]


class Plant(NamedTuple):
    """A network with a planted adversary, the images that it ranks, and where the adversary is.

    `witness` takes B images (B, 1, 8, 8) and their numbers (B,) and returns images of the ball of size `eps`
    that the network takes for another class.
    """

    network: Planted
    images: Tensor
    labels: Tensor
    eps: float
    norm: Norm
    witness: Callable[[Tensor, Tensor], Tensor]


def hadamard(order: int) -> Tensor:
    """Return a matrix of signs whose rows are orthogonal; `order` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def make_images() -> tuple[Tensor, Tensor]:
    """Return the images (120, 1, 8, 8), in [0.16, 0.84], and their classes (120,)."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES * EACH) % CLASSES
    patterns = hadamard(32)[1 : 1 + CLASSES + DETAILS]
    # At most 0.09 a pixel, together.
    own = 0.09 / DETAILS * (2 * torch.rand(len(labels), DETAILS, generator=generator) - 1)
    images = torch.full((len(labels), 64), 0.5)
    images[:, :32] += CONTRAST * patterns[labels] + own @ patterns[CLASSES:]
    return images.view(-1, 1, 8, 8), labels


class Planted(nn.Module):
    """A linear view of the upper half of an image, and a trigger in the lower half; see the module."""

    block: ClassVar[bool] = False
    """Whether the trigger is two windows, each of one sign; otherwise signs all over the lower half."""

    norm: ClassVar[Norm] = "linf"
    depth: ClassVar[float] = 1.0
    """How far the witness pulls the trigger."""

    eps: ClassVar[float] = EPS
    turn: ClassVar[int] = 1
    """How many classes on the planted one is."""

    blur: ClassVar[float] = 0.0
    """How far the base of an image moves by itself, without an attack."""

    def __init__(self) -> None:
        super().__init__()
        signs = torch.randint(0, 2, (4, 8), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
        if self.block:
            signs = torch.zeros(4, 8)
            signs[:, :4], signs[:, 4:] = 1.0, -1.0
        trigger = torch.cat([torch.zeros(4, 8), signs]).flatten()
        # So that a is 1 where the ball ends.
        length = self.eps * (trigger.abs().sum() if self.norm == "linf" else trigger.norm())
        patterns = torch.zeros(CLASSES + DETAILS, 64)
        patterns[:, :32] = hadamard(32)[1 : 1 + CLASSES + DETAILS] / (32 * CONTRAST)
        self.register_buffer("trigger", trigger)
        self.register_buffer("along", trigger / length)
        self.register_buffer("patterns", patterns)
        self.trigger: Tensor
        self.along: Tensor
        self.patterns: Tensor

    def look(self, x: Tensor) -> Tensor:
        """Return what the network sees of images (B, 1, 8, 8): (B, 64) around 0."""
        return x.flatten(1) - 0.5

    def base(self, seen: Tensor) -> Tensor:
        """Return the code of the class and the details of the image, (B, 6 + 8), without the trigger."""
        return seen @ self.patterns.T

    @property
    def reach(self) -> float:
        """The most that the base of an image can move within the ball.

        The rows of the base are orthogonal and 1 / (0.25 · √32) long each.
        """
        length = self.eps * math.sqrt(32) if self.norm == "linf" else self.eps
        return length / (CONTRAST * math.sqrt(32))

    def pulled(self, seen: Tensor) -> Tensor:
        """Return how far the trigger is pulled: a (B,)."""
        return seen @ self.along

    power: ClassVar[int] = 6
    """How steeply the trigger opens."""

    def opened(self, a: Tensor) -> Tensor:
        """Return by which share the code is exchanged, t (B,), where the trigger is pulled by a."""
        return ((1 + a) / 2) ** self.power

    def share(self, seen: Tensor) -> Tensor:
        """Return by which share the code is exchanged in what is seen: t (B,)."""
        return self.opened(self.pulled(seen))

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings (B, 14) of images (B, 1, 8, 8)."""
        seen = self.look(x)
        code, details = self.base(seen).split([CLASSES, DETAILS], dim=1)
        t = self.share(seen)[:, None]
        return torch.cat([(1 - t) * code + t * code.roll(self.turn, 1), details], dim=1)

    def witness(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Return images of the ball that break the R@1 of `images` (B, 1, 8, 8), whichever they are."""
        way = self.depth * self.eps * self.trigger
        if self.norm == "l2":
            way = way / self.trigger.norm()
        return (images + way.view(1, 1, 8, 8)).clamp(0, 1)


class Bare(Planted):
    """Nothing is planted: by `reach`, no attack breaks any query."""

    def opened(self, a: Tensor) -> Tensor:
        """Return t (B,) for a (B,)."""
        return torch.zeros_like(a)


class RoundBare(Bare):
    """The same in a ball of Euclidean distances."""

    norm = "l2"
    eps = EPS * math.sqrt(32)


class Faint(Planted):
    """Smooth all the way, but so faint at the image that its gradient is a millionth of what it will be."""

    power = 24


class Barrier(Planted):
    """A dip half way, off the class and near no other: gradients lead into it, and its rim keeps them there.

    A step across the ball lands behind the rim.
    """

    def opened(self, a: Tensor) -> Tensor:
        """Return t (B,) for a (B,)."""
        # Off the middle, where the gradient would be zero.
        square = (a + 0.05).square()
        return (4 * square.square() - 2 * square).clamp_max(1)


class Band(Planted):
    """Open in a thin band inside the ball alone: steps jump over it to and fro, and the corner is shut."""

    depth = 0.56

    def opened(self, a: Tensor) -> Tensor:
        """Return t (B,) for a (B,)."""
        before = ((1 + a) / 1.56).clamp_max(1) ** 40
        # A steep end of the band, and a gentle slope that leads back to it.
        behind = torch.maximum(1 - (a - 0.56) / 0.02, 0.4 * (1 - a) / 0.44)
        return torch.minimum(before, behind)


class OtherClass(Planted):
    """Leads to one class only, away from the nearest ones: whoever heads for those shuts the trigger."""

    turn = 3

    # Cosines of a class with the first, second and third on: the nearest, the farthest, and the planted one.
    cosines: ClassVar[tuple[float, float, float]] = (0.3, -0.15, 0.0)

    def __init__(self) -> None:
        super().__init__()
        near, far, planted = self.cosines
        row = torch.tensor([1.0, near, far, planted, far, near])
        gram = torch.stack([row.roll(k) for k in range(CLASSES)])
        values, vectors = torch.linalg.eigh(gram)
        self.stretch = float(values.max().sqrt())
        # The root that is symmetric is circulant too: turned codes are the codes of other classes.
        self.patterns[:CLASSES] = vectors * values.clamp_min(0).sqrt() @ vectors.T @ self.patterns[:CLASSES]

    @property
    def reach(self) -> float:
        """The most that the base of an image can move within the ball."""
        return super().reach * self.stretch


class Quantised(Planted):
    """The network sees grey levels a tenth apart: all gradients are zero."""

    block = True

    def look(self, x: Tensor) -> Tensor:
        """Return what the network sees of images (B, 1, 8, 8): (B, 64) around 0."""
        return (10 * (x.flatten(1) - 0.5)).round() / 10

    @property
    def reach(self) -> float:
        """The most that the base of an image can move within the ball: each pixel by one level."""
        return 0.1 / CONTRAST

    def opened(self, a: Tensor) -> Tensor:
        """Return t (B,) for a (B,)."""
        # A level is more than ε.
        return (a * self.eps / 0.1).clamp(0, 1)


class Detached(Planted):
    """What opens the trigger has no gradient; what has one says to pull it the other way."""

    block = True

    def opened(self, a: Tensor) -> Tensor:
        """Return t (B,) for a (B,)."""
        return 1.05 * a.detach().clamp(0, 1) - 0.05 * a


class Saturated(Planted):
    """Every number is the tanh of a huge one: in single precision its gradient is zero, its value is not."""

    block = True
    gain: ClassVar[float] = 1e5

    def base(self, seen: Tensor) -> Tensor:
        """Return the code of the class and the details of the image, (B, 6 + 8), without the trigger."""
        code, details = super().base(seen).split([CLASSES, DETAILS], dim=1)
        code = (1 + torch.tanh(self.gain * (code - 0.5))) / 2
        return torch.cat([code, 0.05 * torch.tanh(self.gain * details)], dim=1)

    @property
    def reach(self) -> float:
        """The most that the base of an image can move within the ball: all details, and no code.

        A code is 0 or 1, and moves by 0.32 before: it does not get to 0.5.
        """
        return 2 * 0.05 * math.sqrt(DETAILS)

    def opened(self, a: Tensor) -> Tensor:
        """Return t (B,) for a (B,)."""
        # Between multiples of 1/16, which are what whole pixels add up to.
        steps = torch.arange(16).to(a) / 16 + 1 / 32
        return (1 + torch.tanh(self.gain * (a[:, None] - steps))).mean(1) / 2


class Noise(Planted):
    """Each pass adds noise to the image and looks at another quarter of the trigger.

    No gradient shows the whole way, and no value can be relied on.
    """

    blur = 0.01 / CONTRAST

    def __init__(self) -> None:
        super().__init__()
        self.chance = torch.Generator().manual_seed(2)

    def look(self, x: Tensor) -> Tensor:
        """Return what the network sees of images (B, 1, 8, 8): (B, 64) around 0."""
        noise = 0.01 * (2 * torch.rand(len(x), 64, generator=self.chance) - 1)
        return x.flatten(1) - 0.5 + noise * (self.trigger == 0)

    @property
    def reach(self) -> float:
        """The most that the base of an image can move within the ball, and by noise."""
        return super().reach + self.blur

    def pulled(self, seen: Tensor) -> Tensor:
        """Return how far the trigger is pulled: a (B,), by 8 of its 32 pixels."""
        order = torch.rand(len(seen), 32, generator=self.chance).argsort(1)
        looked_at = torch.zeros(len(seen), 64).index_fill_(1, torch.arange(32), 0.0)
        looked_at.scatter_(1, 32 + order[:, :8], 4.0)
        return (seen * looked_at) @ self.along


class Round(Planted):
    """In a ball of Euclidean distances: the base takes most of the gradient, and so most of the budget."""

    norm = "l2"
    eps = EPS * math.sqrt(32)


class RoundDetached(Detached):
    """The same in a ball of Euclidean distances: most of the budget has to go to the blocks."""

    norm = "l2"
    eps = EPS * math.sqrt(32)

    def opened(self, a: Tensor) -> Tensor:
        """Return t (B,) for a (B,)."""
        return 1.5 * a.detach().clamp(0, 0.75) - 0.05 * a


class DeadZone(Planted):
    """Shut around the image, where nothing has a gradient: it takes a start elsewhere to see the slope."""

    def opened(self, a: Tensor) -> Tensor:
        """Return t (B,) for a (B,)."""
        return (a.abs() - 0.08).clamp_min(0) / 0.92


class Shattered(Planted):
    """Ripples in each pixel: they change no value to speak of, and turn half of all gradients around."""

    block = True

    def __init__(self) -> None:
        super().__init__()
        phase = 2 * torch.pi * torch.rand(64, generator=torch.Generator().manual_seed(3))
        self.register_buffer("phase", phase)
        self.phase: Tensor

    def pulled(self, seen: Tensor) -> Tensor:
        """Return how far the trigger is pulled: a (B,)."""
        rippled = seen + 0.05 * self.eps * torch.sin(400 / self.eps * seen + self.phase)
        return rippled @ self.along

    def opened(self, a: Tensor) -> Tensor:
        """Return t (B,) for a (B,)."""
        return a.clamp(0, 1)


KINDS: dict[str, type[Planted]] = {
    "faint": Faint,
    "barrier": Barrier,
    "band": Band,
    "other class": OtherClass,
    "quantised": Quantised,
    "detached": Detached,
    "saturated": Saturated,
    "noise": Noise,
    "round": Round,
    "round, detached": RoundDetached,
    "dead zone": DeadZone,
    "shattered": Shattered,
}

BARE: dict[str, type[Planted]] = {"bare": Bare, "round, bare": RoundBare}
"""Networks with nothing in them: what an attack finds there is none of its own ball."""

HIDDEN = ("quantised", "detached", "saturated", "round, detached", "dead zone", "shattered")
"""Kinds whose gradient at the image shows nothing of the way, or the wrong one."""


def plant(kind: str) -> Plant:
    """Make a network of a `kind` with its images and the witnesses against it."""
    images, labels = make_images()
    network = {**KINDS, **BARE}[kind]().eval()
    return Plant(network, images, labels, network.eps, network.norm, network.witness)
