"""The unit sphere: embeddings on it, distances between them, the hardness of a triplet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robustmetric.errors import UserError, describe
from robustmetric.usercode import UserCodeError, own_traceback

ROUNDING = 1e-5
"""Embeddings that are nearer than this are those of one image: see `at`."""


class BrokenEmbeddingsError(UserError):
    """Embeddings, gradients or a loss that are NaN, infinite or zero: the network has diverged or died."""


def embed(model: nn.Module, images: Tensor, *, what: str = "network") -> Tensor:
    """Run a network `model` and return its vectors on the unit sphere: (N, …) `images` to (N, D) embeddings.

    The network may return vectors of any length: they are normalised here, in at least single precision. An
    error of the network is raised as one that names the images; it calls the network `what`.

    >>> embed(nn.Flatten(), torch.tensor([[[[3.0, 4.0]]]]))
    tensor([[0.6000, 0.8000]])
    """
    version = None if images.is_inference() else images._version
    with network_errors(model, images, what):
        z = model(images)
    if version is not None and images._version != version:
        raise UserError(
            "the network changes its input in place, which is the image itself: let it work on a copy, with "
            "x = (x - mean) / std instead of x.sub_(mean).div_(std)"
        )
    count, floats = len(images), isinstance(z, Tensor) and z.is_floating_point()
    if not floats or z.ndim != 2 or len(z) != count:
        raise UserError(
            f"the network returned {describe(z)} for {count} images; it must return floats of shape "
            f"({count}, D), an embedding for each: wrap it in a module that returns these alone, pooled"
        )
    z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
    length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    for bad, told in (
        (
            ~length.isfinite(),
            "hold NaN or infinity: the network has diverged or its weights are damaged; go back to its last "
            "good weights, lower the learning rate or use full precision",
        ),
        (
            length == 0,
            "are zero and have no direction: the network is dead for these images; end it with a linear "
            "layer and not with ReLU, or lower the learning rate",
        ),
    ):
        if bad.any():
            raise BrokenEmbeddingsError(f"{int(bad.sum())} of {count} embeddings {told}")
    unit: Tensor = z / length
    return unit


@contextmanager
def network_errors(model: nn.Module, images: Tensor, what: str = "network") -> Iterator[None]:
    """Raise an error of a `model` on `images` (N, …) as one that names them; it calls the network `what`.

    >>> with network_errors(nn.Flatten(), torch.rand(1, 1, 8, 8)):
    ...     raise ValueError("too small")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the network failed on images of shape (1, 1, 8, 8) and type float32 (ValueError...
    """
    try:
        yield
    except (UserError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if re.search("(allocate|of) memory", str(error)):
            raise
        types = dict.fromkeys(p.dtype for p in model.parameters())
        kind, *kinds = (str(t).removeprefix("torch.") for t in (images.dtype, *types))
        told = (
            f"the {what} failed on images of shape {tuple(images.shape)} and type {kind} "
            f"({type(error).__name__}: {' '.join(str(error).split())}); give images of the size and channels "
            f"that it takes and of the type of its weights ({', '.join(kinds) or 'it has none'}), or a "
            f"network for these{', also for one image alone' if len(images) == 1 else ''}"
        )
        if (own := own_traceback(error)) is not None:
            raise UserCodeError(f"{told}\n{own}") from error
        raise UserError(told, parameter="size") from error


def pair_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the Euclidean distance (T,) of `x` (T, D) to `y` (T, D), row by row.

    Its gradient at zero distance is zero.

    >>> pair_distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    tensor([1.4142])
    """
    distance: Tensor = torch.linalg.vector_norm(x - y, dim=-1)
    return distance


def padded_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the reference's distance (T,) of `x` (T, D) to `y` (T, D): 1e-6 is added to each difference.

    >>> padded_distance(torch.zeros(1, 4), torch.zeros(1, 4))
    tensor([2.0000e-06])
    """
    return F.pairwise_distance(x, y, eps=1e-6)


def reference_shift(z: Tensor, benign: Tensor, offset: Tensor | float = 1e-7) -> Tensor:
    """Return how far the reference sees `z` (T, D) from where it was, `benign` (T, D): (T,).

    As long as an embedding is where it was, which is before the first step of a search, the `offset` (T, D)
    is added to the benign one: the gradient there would be zero. The distance is `padded_distance`.

    >>> z = torch.zeros(1, 4, requires_grad=True)
    >>> reference_shift(z, torch.zeros(1, 4)).sum().backward()
    >>> z.grad
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    # However a batch of another size had rounded it.
    return padded_distance(z, torch.where(at(z, benign)[:, None], z.detach() + offset, benign))


def at(z: Tensor, place: Tensor) -> Tensor:
    """Return which of `z` (…, D) are at their `place` (…, D) but for rounding: (…,).

    Embeddings of one image differ by less than 1e-5 from batch to batch and from processor to processor, and
    a step of any attack moves them by more.

    >>> at(torch.tensor([[1.0, 1e-7], [1.0, 1e-2]]), torch.tensor([1.0, 0.0]))
    tensor([ True, False])
    """
    return pair_distance(z.detach(), place) < ROUNDING


def cross_distance(x: Tensor, y: Tensor | None = None) -> Tensor:
    """Return the Euclidean distance (N, M) of all rows of `x` (N, D) to all of `y` (M, D), by default `x`.

    The matrix product runs in double precision, because in single precision its rounding would swallow
    distances below 1e-3; the result has the type of `x`.

    >>> cross_distance(torch.eye(2))
    tensor([[0.0000, 1.4142],
            [1.4142, 0.0000]])
    """
    wide = wide_dtype(x.device)
    left = x.to(wide)
    right = left if y is None else y.to(wide)
    square = left.square().sum(1, keepdim=True) + right.square().sum(1) - 2 * left @ right.T
    # Squares below 1e-14 are rounding: the points are the same. Their gradient is zero, as in pair_distance.
    apart = square > 1e-14
    if y is None:
        apart.fill_diagonal_(False)
    return torch.where(apart, square.where(apart, torch.ones_like(square)).sqrt(), 0.0).to(x.dtype)


def hardness(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Return the hardness H = d(a, p) − d(a, n) (T,) of triplets, each in [−2, 2].

    `anchor`, `positive` and `negative` are their (T, D) embeddings.

    >>> a, p, n = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[-1.0, 0.0]])
    >>> hardness(a, p, n)
    tensor([-0.5858])
    """
    return pair_distance(anchor, positive) - pair_distance(anchor, negative)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float that a `device` has: double precision, single on Apple's GPUs.

    >>> wide_dtype(torch.device("cpu"))
    torch.float64
    """
    return torch.float32 if device.type == "mps" else torch.float64
