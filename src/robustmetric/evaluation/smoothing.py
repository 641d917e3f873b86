"""Randomised smoothing: a network averaged over noise, and how far an image's ranking is certain.

h(x) is the embedding on the unit sphere, and g(x) = E h(x + δ) with δ ~ N(0, σ²I) the smoothed network,
which ranks by the direction of g(x). Of two images of a gallery with vectors v_p and v_n on the unit sphere,
p is the nearer one if ⟨g(x), v_p − v_n⟩ > 0, that is if m(x) = E ⟨h(x + δ), w⟩ > 0 with w the direction of
v_p − v_n.

How far. s = ⟨h, w⟩ is in [−1, 1], so (1 + s)/2 is in [0, 1]. By the lemma of Neyman and Pearson the mean of
such a function, moved by at most r, is least if the function is that of a half-space (Cohen et al.,
"Certified Adversarial Robustness via Randomized Smoothing", ICML 2019; Salman et al., NeurIPS 2019). So
within r of x

    m ≥ 2Φ(Φ⁻¹((1 + m(x))/2) − r/σ) − 1,  which is positive as long as  r < σ Φ⁻¹((1 + m(x))/2).

This is the setting of RetrievalGuard (Wu, Zhang and Huang, "RetrievalGuard: Provably Robust 1-Nearest
Neighbor Image Retrieval", ICML 2022, arXiv 2206.11225). There g is bounded as a whole: ‖g(x) − g(x')‖ is at
most 2(2Φ(r/2σ) − 1), which must be less than half of what n is farther than p. That difference is at most 2m,
because it is 2⟨g, v_p − v_n⟩ over the sum of both distances, so the radius there is at most 2σΦ⁻¹(1/2 + m/4).
Φ⁻¹ is convex above 1/2: the radius here is never the smaller one.

This knows the mean of s alone. Its distribution says more: `robustmetric.evaluation.band` has that bound. A
pair's radius is the larger one of both (`robustmetric.evaluation.radius`), each with half of the probability
of an error.

How sure. m is not known: it is estimated by n samples h_1 … h_n with mean ĝ. Two bounds hold together with
probability 1 − α, each with 1 − α/2; for a radius α is the half that is left to the mean:

- ‖ĝ − g‖ ≤ (1 + √(2 ln(2/α)))/√n, for all pairs at once. Its expectation is at most 1/√n, since vectors of
  length 1 have a variance of at most 1; one sample changes it by at most 2/n, and McDiarmid's inequality
  says P(‖ĝ − g‖ ≥ 1/√n + t) ≤ exp(−nt²/2).
- m ≥ m̂ − √(2V ln(2K/(α/2))/n) − 14 ln(2K/(α/2))/(3(n − 1)) for each of K pairs, with V the sample variance
  of s: the empirical Bernstein bound of Maurer and Pontil (COLT 2009, theorem 4) for values in a range of 2.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from robustmetric.attacks.draws import Draws
from robustmetric.distance import embed
from robustmetric.evaluation.band import Band
from robustmetric.perturb import device_of
from robustmetric.validate import UserError, is_number

MOST_SIGMA = 10
"""Noise beyond this leaves nothing of pixels in [0, 1]."""

_COPY = 1e-12  # vectors of the gallery that are nearer have no direction but that of rounding
_RIVALS = 4096  # images that are compared at once
_CHUNK = 256  # noisy images at once


def mean_error(samples: int, alpha: float) -> float:
    """Return how far the mean of `samples` unit vectors is from their expectation, but for `alpha`/2.

    >>> round(mean_error(1000, 0.001), 4)
    0.1549
    """
    return (1 + math.sqrt(2 * math.log(2 / alpha))) / math.sqrt(samples)


def pair_error(variance: Tensor, samples: int, alpha: float) -> Tensor:
    """Return how far the means of K values in [−1, 1] are above their expectations, but for `alpha`/2 in all.

    `variance` (K,) is that of the `samples` of each, with samples − 1 as divisor; so is the result.

    >>> pair_error(torch.zeros(2), 1001, 0.001)
    tensor([0.0419, 0.0419])
    """
    log = math.log(2 * max(1, variance.numel()) / (alpha / 2))
    return (2 * log / samples * variance).sqrt() + 7 * 2 * log / (3 * (samples - 1))


def lower_bound(mean: Tensor, variance: Tensor, samples: int, alpha: float) -> Tensor:
    """Return lower bounds (K,) of the expectations of K margins, which hold together but for `alpha`.

    `mean` and `variance` (K,) are those of `samples` values in [−1, 1], the products of one and the same unit
    vector with K others.

    >>> lower_bound(torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.5]), 1001, 0.001)
    tensor([0.9581, 0.3633])
    """
    return mean - pair_error(variance, samples, alpha).clamp_max(mean_error(samples, alpha))


def certified_radius(low: Tensor, sigma: float) -> Tensor:
    """Return within which distances the margins stay positive that are at least `low` (…,) at noise `sigma`.

    It is 0 where that is not known to be positive.

    >>> certified_radius(torch.tensor([0.6827, 0.0, -0.5]), 0.25)
    tensor([0.2500, 0.0000, 0.0000])
    """
    radius: Tensor = sigma * torch.special.ndtri((1 + low.clamp_min(0)) / 2)
    return radius


def largest_radius(sigma: float, samples: int, alpha: float, rivals: int = 1) -> float:
    """Return the radius of an image that all `samples` agree on: with so many, no other has a larger one.

    The noise is `sigma`, a bound fails with probability `alpha`, and there are so many `rivals`.

    >>> round(largest_radius(0.25, 1000, 0.001, rivals=100), 4)
    0.5312
    """
    ones = torch.ones(rivals, dtype=torch.float64)
    by_mean = float(certified_radius(lower_bound(ones, 0 * ones, samples, alpha / 2)[:1], sigma))
    return max(by_mean, sigma * Band.of(samples, rivals, alpha / 2).limit)


def least_samples(alpha: float) -> int:
    """Return how many samples it takes to certify anything but for a probability of `alpha`.

    >>> least_samples(0.001), least_samples(0.1)
    (15, 8)
    """
    samples = 2
    while largest_radius(1.0, samples, alpha) <= 0:
        samples += 1
    return samples


@dataclass(frozen=True)
class Moments:
    """What is kept of `count` embeddings on the unit sphere: their sum `total` (D,) and their products.

    `square` (D, D) is the sum of the products of each with itself; both are in double precision.

    >>> seen = Moments.of([torch.eye(2)])
    >>> seen.mean, seen.count
    (tensor([0.5000, 0.5000], dtype=torch.float64), 2)
    >>> mean, variance = seen.margins(torch.tensor([1.0, 0.0]).double(), torch.tensor([[-1.0, 0.0]]).double())
    >>> float(mean), float(variance)
    (0.5, 0.5)
    """

    count: int
    total: Tensor
    square: Tensor

    @classmethod
    def of(cls, parts: Iterable[Tensor]) -> Moments:
        """Sum embeddings that come in `parts` (B, D), of which there is at least one."""
        count, total, square = 0, torch.zeros(()), torch.zeros(())
        for part in parts:
            z = exact(part)
            count, total, square = count + len(z), total + z.sum(0), square + z.T @ z
        return cls(count, total, square)

    @property
    def mean(self) -> Tensor:
        """The mean (D,)."""
        return self.total / self.count

    def margins(self, anchor: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance (K,) of the products with the directions from K `rivals` to an `anchor`.

        The anchor (D,) and the rivals (K, D) are on the unit sphere; a copy of the anchor has margin 0.
        """
        scatter = self.square - self.count * self.mean.outer(self.mean)
        found = []
        for some in rivals.split(_RIVALS):
            way = directions(anchor, some)
            spread = ((way @ scatter) * way).sum(1).clamp_min(0) / max(1, self.count - 1)
            found.append(torch.stack([way @ self.mean, spread]))
        mean, variance = torch.cat(found, dim=1)
        return mean, variance


def mean_of(parts: Iterable[Tensor]) -> Tensor:
    """Return the mean (D,) of embeddings that come in `parts` (B, D), of which there is at least one.

    >>> mean_of([torch.eye(2)])
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    count, total = 0, torch.zeros(())
    for part in parts:
        count, total = count + len(part), total + exact(part).sum(0)
    return total / count


def directions(anchor: Tensor, rivals: Tensor) -> Tensor:
    """Return the directions (K, D) from K `rivals` (K, D) to an `anchor` (D,): zero for a copy of it.

    >>> directions(torch.tensor([1.0, 0.0]), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    tensor([[1., 0.],
            [0., 0.]])
    """
    way = anchor - rivals
    length = torch.linalg.vector_norm(way, dim=1, keepdim=True)
    return torch.where(length > _COPY, way / length.clamp_min(_COPY), 0.0)


def exact(z: Tensor) -> Tensor:
    """Return embeddings (B, D) of length 1 in double precision too.

    >>> exact(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]], dtype=torch.float64)
    """
    z = z.detach().cpu().double()
    unit: Tensor = z / torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return unit


def noisy_embeddings(
    model: nn.Module, image: Tensor, *, sigma: float, draws: Draws, samples: int, batch: int
) -> Iterator[Tensor]:
    """Yield embeddings (B, D) of an `image` (C, H, W) with noise, `batch` at a time, `samples` in all.

    `draws` are those of this one image. The noise of deviation `sigma` is added to the pixels, which may then
    be outside [0, 1]: the network `model` sees them as they are. Call it inside `frozen(model)`.

    >>> draws, image = Draws(0, "noise", [0]), torch.full((1, 2, 2), 0.5)
    >>> parts = noisy_embeddings(nn.Flatten(), image, sigma=0.1, draws=draws, samples=5, batch=3)
    >>> [part.shape for part in parts]
    [torch.Size([3, 4]), torch.Size([2, 4])]
    """
    image = image.detach().to(device_of(model))
    for begin in range(0, samples, batch):
        noise = draws.normal(min(batch, samples - begin), *image.shape)[0].to(image)
        with torch.no_grad():
            yield embed(model, image + sigma * noise)


class Smoothed(nn.Module):
    """A network averaged over noise: images (N, C, H, W) to the means (N, D) of their embeddings.

    `model` is any network. To each image the same `samples` tensors of normal noise of deviation `sigma` are
    added, drawn from the `seed`; the mean of the embeddings, which are on the unit sphere, is returned. So it
    is a function of the images alone, with a gradient: `rm.evaluate`, every attack and every search take it
    for a network. No more than `chunk` noisy images are held at once, also for the gradient, which then costs
    another pass. Pixels may leave [0, 1] with the noise.

    >>> import robustmetric as rm
    >>> smoothed = Smoothed(rm.model("c2f2", size=8, dim=16), sigma=0.1, samples=8)
    >>> smoothed(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 16])
    """

    def __init__(
        self, model: nn.Module, sigma: float, samples: int = 32, seed: int = 0, *, chunk: int = _CHUNK
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise UserError(f"the network must be a torch.nn.Module, not a {type(model).__name__}")
        self.model, self.sigma = model, check_sigma(sigma)
        self.samples, self.chunk = check_whole("samples", samples), check_whole("chunk", chunk)
        self.seed = check_whole("seed", seed, 0)
        self._noise: Tensor | None = None
        # They decide what the network returns: its digest has them.
        self.register_buffer("level", torch.tensor([self.sigma], dtype=torch.float32), persistent=False)
        self.register_buffer("draw", torch.tensor([self.samples, self.seed]), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the means (N, D) of the embeddings of `images` (N, C, H, W) with noise."""
        noise, rows = self.noise(images), max(1, min(len(images), self.chunk))
        step = max(1, self.chunk // rows)
        again = torch.is_grad_enabled() and len(images) * self.samples > self.chunk
        means = []
        for some in images.split(rows):
            total = torch.zeros((), device=images.device)
            for part in noise.split(step):
                if again:  # held as images alone, and embedded once more for the gradient
                    total = total + checkpoint(self._sum, some, part, use_reentrant=False)
                else:
                    total = total + self._sum(some, part)
            means.append(total / self.samples)
        return torch.cat(means)

    def noise(self, images: Tensor) -> Tensor:
        """Return the noise (samples, C, H, W) for `images` (N, C, H, W) of this size, of deviation 1."""
        shape = images.shape[1:]
        if self._noise is None or self._noise.shape[1:] != shape:
            check_noise(self.samples, tuple(shape))
            self._noise = Draws(self.seed, "smoothed", [0]).normal(self.samples, *shape)[0]
        if (self._noise.device, self._noise.dtype) != (images.device, images.dtype):
            self._noise = self._noise.to(images)
        return self._noise

    def _sum(self, images: Tensor, noise: Tensor) -> Tensor:
        noisy = (images[:, None] + self.sigma * noise).flatten(0, 1)
        return embed(self.model, noisy).view(len(images), len(noise), -1).sum(1)


def check_sigma(sigma: float) -> float:
    """Return the deviation `sigma` of the noise; refuse one that cannot be.

    >>> check_sigma(0)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: sigma must be in (0, 10], not 0: it is the deviation of noise on pixels in [0, 1]
    """
    if not (is_number(sigma) and 0 < sigma <= MOST_SIGMA):
        raise UserError(
            f"sigma must be in (0, {MOST_SIGMA}], not {sigma!r}: it is the deviation of noise on pixels in "
            "[0, 1]",
            parameter="sigma",
        )
    return float(sigma)


def check_whole(name: str, value: int, least: int = 1) -> int:
    """Return a `value` called `name` that is a whole number of at least `least`; refuse another.

    >>> check_whole("samples", 0)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: samples must be a whole number of at least 1, not 0
    """
    if not (is_number(value, Integral) and value >= least):
        raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}", parameter=name)
    return int(value)


def check_noise(samples: int, shape: tuple[int, ...], name: str = "samples") -> None:
    """Refuse more `samples` of noise for images of a `shape` (C, H, W) than the free memory holds.

    `name` is what the number is called.

    >>> check_noise(16, (3, 224, 224))
    """
    needed, free = 4 * samples * math.prod(shape), free_memory()
    if free is not None and needed > free:
        fits = free // (4 * math.prod(shape))
        raise UserError(
            f"{name} is {samples:,}: noise for images of shape {tuple(shape)} would take "
            f"{needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free: give at most "
            f"{fits:,}",
            parameter=name,
        )


def check_samples(samples: int, dim: int) -> None:
    """Refuse more `samples` than the free memory holds, as embeddings of length `dim`.

    >>> check_samples(1000, 512)
    """
    each, free = 4 * dim + 16, free_memory()  # and products with a direction
    if free is not None and samples * each > free:
        raise UserError(
            f"samples is {samples:,}: the embeddings of length {dim:,} of one query would take "
            f"{samples * each / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free: give at "
            f"most {free // each:,}",
            parameter="samples",
        )


def free_memory() -> int | None:
    """Return how many bytes of memory are free, None where the system does not tell.

    >>> free_memory() != 0
    True
    """
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
