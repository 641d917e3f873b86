"""Randomised smoothing: a network averaged over noise, and embeddings with noise."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from robustmetric.attacks.draws import Draws
from robustmetric.errors import UserError, instance, number, whole
from robustmetric.perturb import device_of
from robustmetric.sphere import embed

MOST_SIGMA = 10
"""Noise beyond this leaves nothing of pixels in [0, 1]."""

_CHUNK = 256  # noisy images at once


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
        self.model = instance("the network", model, nn.Module, why="give a torch.nn.Module")
        why = "it is the deviation of noise on pixels in [0, 1]"
        self.sigma = number("sigma", sigma, 0, MOST_SIGMA, open_low=True, why=why)
        self.samples, self.chunk = whole("samples", samples, 1), whole("chunk", chunk, 1)
        self.seed = whole("seed", seed)
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


def check_noise(samples: int, shape: tuple[int, ...], name: str = "samples") -> None:
    """Reject more `samples`, called `name`, of noise for images of a `shape` than fit in the free memory."""
    check_memory(name, samples, 4 * math.prod(shape), f"noise for images of shape {tuple(shape)}")


def check_memory(name: str, count: int, each: int, what: str) -> None:
    """Reject a `count`, called `name`, of so many bytes `each` that is too much for the free memory."""
    free = free_memory()
    if free is not None and count * each > free:
        told = f"{name} is {count:,}: {what} would take {count * each / 2**30:,.1f} GiB of memory, and"
        most = f"{free / 2**30:,.1f} GiB are free: give at most {free // each:,}"
        raise UserError(f"{told} {most}", parameter=name)


def free_memory() -> int | None:
    """Return how many bytes of memory are free, None where the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
