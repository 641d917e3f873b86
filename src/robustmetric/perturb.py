"""Perturbations: the budget, the projection, freezing a network, and projected gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from robustmetric.errors import UserError, describe, number, whole
from robustmetric.registry import unknown
from robustmetric.sphere import BrokenEmbeddingsError

Norm = Literal["linf", "l2"]
"""How a perturbation is measured: by its largest pixel, or by its Euclidean length."""


@dataclass(frozen=True)
class Budget:
    """What a perturbation may cost: at most `eps` a pixel, in `steps` steps of `alpha` each.

    With the `norm` l2, `eps` is the length of the whole perturbation of an image instead. A single step is as
    long as the budget allows: FGSM.

    >>> Budget(eps=8 / 255, alpha=1 / 255, steps=8).stride == 1 / 255
    True
    >>> Budget(eps=0.1, alpha=0.01, steps=1).stride
    0.1
    """

    eps: float
    alpha: float
    steps: int
    norm: Norm = "linf"

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise UserError(unknown("norm", self.norm, dict.fromkeys(get_args(Norm))), parameter="norm")
        if self.norm == "l2":
            number("eps", self.eps, 0, why="with the norm l2 it is the length of a perturbation")
        else:
            number("eps", self.eps, 0, 1, why="pixels are in [0, 1], so 8 grey levels are 8/255")
        why = "pixels are in [0, 1], so a grey level is 1/255"
        number("alpha", self.alpha, 0, 1, open_low=True, why=why)
        whole("steps", self.steps, least=1)

    @property
    def stride(self) -> float:
        """The length of a step."""
        return self.eps if self.steps == 1 else self.alpha


def check_images(images: Tensor) -> None:
    """Reject `images` that are not a batch (N, C, H, W) of floating-point numbers in [0, 1].

    >>> check_images(torch.full((1, 1, 2, 2), 255.0))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: pixels are in [255, 255]; they must be in [0, 1]: divide 8-bit images by 255 ...
    """
    if not isinstance(images, Tensor) or not images.is_floating_point():
        raise UserError(
            f"images must be a floating-point tensor, not {describe(images)}: stack a list with torch.stack, "
            "take an array by torch.from_numpy, and divide 8-bit images by 255"
        )
    shape = tuple(images.shape)
    channels_last = len(shape) == 4 and shape[3] in (1, 3) and min(shape[1:3]) > 3
    if len(shape) != 4 or channels_last or images.numel() == 0:
        raise UserError(
            f"images have shape {shape}; they must have shape (N, C, H, W), at least one image: images[None] "
            "adds the axis of a batch, images[:, None] that of channels, permute(0, 3, 1, 2) moves them"
        )
    low, high = (float(v) for v in images.detach().aminmax())
    if not (low >= 0 and high <= 1):
        advice = "divide 8-bit images by 255 and leave the normalisation by mean and deviation to the network"
        if low > -0.01 and high < 1.01:
            advice = "use images.clamp(0, 1), for resizing rounds beyond the ends"
        if low != low:
            advice = "look at how the images were made"
        raise UserError(f"pixels are in [{low:.9g}, {high:.9g}]; they must be in [0, 1]: {advice}")


def project(x: Tensor, origin: Tensor, eps: float, norm: Norm = "linf") -> Tensor:
    """Return `x` (B, …) projected to within `eps` of `origin` (B, …) in a `norm`, and to [0, 1].

    >>> project(torch.tensor([0.9, -0.2]), torch.tensor([0.5, 0.1]), 0.25)
    tensor([0.7500, 0.0000])
    >>> project(torch.tensor([[0.8, 0.9]]), torch.tensor([[0.5, 0.5]]), 0.25, "l2")
    tensor([[0.6500, 0.7000]])
    """
    if norm == "linf":
        return x.clamp(origin - eps, origin + eps).clamp_(0, 1)
    away = x - origin
    length = spread(sizes(away, "l2"), x)
    # The origin is in [0, 1]: what is cut off there only brings pixels nearer to it.
    return torch.where(length > eps, origin + away * (eps / length.clamp_min(1e-30)), x).clamp_(0, 1)


def sizes(change: Tensor, norm: Norm) -> Tensor:
    """Return how large a `change` (B, …) of images is in a `norm`: (B,).

    >>> sizes(torch.tensor([[0.3, -0.4]]), "l2"), sizes(torch.tensor([[0.3, -0.4]]), "linf")
    (tensor([0.5000]), tensor([0.4000]))
    """
    found: Tensor = torch.linalg.vector_norm(change.flatten(1), 2 if norm == "l2" else torch.inf, dim=1)
    return found


def directions(slope: Tensor, norm: Norm) -> Tensor:
    """Return the steps of size 1 in a `norm` along which a function with the `slope` (B, …) rises fastest.

    It is zero where the slope is.

    >>> directions(torch.tensor([[3.0, -4.0]]), "l2"), directions(torch.tensor([[3.0, -4.0]]), "linf")
    (tensor([[ 0.6000, -0.8000]]), tensor([[ 1., -1.]]))
    """
    if norm == "linf":
        return slope.sign()
    # Squares of very small slopes would be lost.
    steepest = spread(sizes(slope, "linf"), slope)
    scaled = slope / torch.where(steepest > 0, steepest, 1.0)
    return scaled / spread(sizes(scaled, "l2"), slope).clamp_min(1)


def spread(values: Tensor, images: Tensor) -> Tensor:
    """Return `values` (B,) with the axes of `images` (B, …), each of the others of length 1.

    >>> spread(torch.ones(2), torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 1, 1, 1])
    """
    return values.view(-1, *[1] * (images.ndim - 1))


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Hold a `model` in evaluation mode, its parameters without gradients; restore each module and parameter.

    Modes are kept module by module, so that a BatchNorm that was frozen in a network in training stays so.

    >>> model = nn.Linear(1, 1).train()
    >>> with frozen(model):
    ...     print(model.training, model.weight.requires_grad)
    False False
    >>> model.training, model.weight.requires_grad
    (True, True)
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for module, _ in modes:
            module.training = False
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a `model`'s parameters and buffers; the CPU if it has none.

    >>> device_of(nn.Flatten())
    device(type='cpu')
    """
    state = (tensor for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
    return next((tensor.device for tensor in state), torch.device("cpu"))


Objective = Callable[[Tensor, Tensor], Tensor]
"""(rows of x as they are now, their (R,) positions in x) to (R,) values, each of its own row alone."""


Gradient = Callable[[Objective, Tensor, Tensor], Tensor]
"""(objective, rows of x as they are now, their positions) to the gradient of each row, or an estimate."""


def pgd(
    x: Tensor,
    objective: Objective,
    budget: Budget,
    *,
    start: Tensor | None = None,
    gradient: Gradient | None = None,
) -> Tensor:
    """Return `x` (T, …) moved to where an `objective` is least, row by row, as far as a `budget` allows.

    Each step goes `budget.stride` against the sign of the gradient of `x`, then back into the budget. A row
    whose gradient is zero everywhere would never move again: it drops out of the computation. The
    descent begins at `x`, or at `start` (T, …) projected into the budget, which is of the norm linf.
    `gradient` replaces differentiation. Call it inside `frozen(model)`.

    >>> x = torch.tensor([[0.5], [0.5]])
    >>> wanted = torch.tensor([[0.52], [0.9]])
    >>> def short(x, rows):
    ...     return (wanted[rows] - x).clamp_min(0).square().sum(1)
    >>> pgd(x, short, Budget(eps=0.1, alpha=0.05, steps=8))
    tensor([[0.5500],
            [0.6000]])
    """
    if gradient is None and torch.is_inference_mode_enabled():
        raise UserError("inference mode leaves no gradient to follow: use torch.no_grad() instead")
    x = x.detach()
    moved = torch.empty_like(x)
    # The rows that still move, packed: where they are and how far they may go.
    rows = torch.arange(len(x), device=x.device)
    point = x if start is None else project(start, x, budget.eps)
    low, high = (x - budget.eps).clamp_(0, 1), (x + budget.eps).clamp_(0, 1)
    for _ in range(budget.steps):
        if len(rows) == 0:
            break
        slope = (gradient or differentiate)(objective, point, rows)
        steepest = steepness(slope)
        # An estimate may be zero by chance: only a gradient that is zero stays so.
        alive = steepest > 0 if gradient is None else torch.ones_like(steepest, dtype=torch.bool)
        if not alive.all():
            moved[rows] = point
            rows, point, slope, low, high = (t[alive] for t in (rows, point, slope, low, high))
        point = point.sub(slope.sign(), alpha=budget.stride).clamp_(low, high)
    moved[rows] = point
    return moved


def steepness(slope: Tensor) -> Tensor:
    """Return the size of the largest entry of each gradient of `slope` (R, …): (R,); reject broken ones.

    >>> steepness(torch.tensor([[0.5, -2.0]]))
    tensor([2.])
    """
    steepest = sizes(slope, "linf")
    if not torch.isfinite(steepest).all():
        raise BrokenEmbeddingsError(
            "the gradient of the images holds NaN or infinity: look for a square root, logarithm or "
            "division in the network whose gradient is infinite, or use full precision"
        )
    return steepest


def differentiate(objective: Objective, point: Tensor, rows: Tensor) -> Tensor:
    """Return the gradient (R, …) of an `objective` at a `point` (R, …), whose `rows` (R,) are positions in x.

    >>> differentiate(lambda x, rows: x.square().sum(1), torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    tensor([[2., 4.]])
    """
    return value_and_slope(objective, point, rows)[1]


def value_and_slope(objective: Objective, point: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value (R,) of an `objective` and its gradient (R, …), as `differentiate` does.

    `point` (R, …) are the `rows` (R,) of x as they are now.

    >>> value_and_slope(lambda x, rows: x.square().sum(1), torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    (tensor([5.]), tensor([[2., 4.]]))
    """
    with torch.enable_grad():
        leaf = point.detach().requires_grad_()
        # A view, because some hooks on the network refuse a leaf as its input.
        value = objective(leaf.view_as(leaf), rows)
        if not value.requires_grad:
            raise UserError(
                "the embeddings do not depend on the images: take no_grad() and detach() out of the network; "
                "requires_grad_(False) freezes parameters and leaves the way to the images open"
            )
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient
