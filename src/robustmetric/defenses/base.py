"""What every defense shares: the interface, the passes it counts, the embeddings of its triplets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from robustmetric.destination import sampler_name
from robustmetric.distance import embed
from robustmetric.perturb import Budget, check_images
from robustmetric.triplets import Sampler, Triplets, check_labels, check_margin


class Step(NamedTuple):
    """The loss of a batch, a scalar to call `backward` on, and figures of how it came about."""

    loss: Tensor
    logs: dict[str, float]


class Network:
    """A model as a map from images to the unit sphere that counts the images it computes.

    >>> network = Network(nn.Flatten())
    >>> with torch.no_grad():
    ...     z = network(torch.ones(3, 1, 2, 2))
    >>> network.forward, network.backward
    (3, 0)
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.forward = 0
        self.backward = 0

    def __call__(self, images: Tensor) -> Tensor:
        """Embed (N, C, H, W) images as (N, D); with gradients enabled, a backward pass is counted too."""
        self.forward += len(images)
        self.backward += len(images) if torch.is_grad_enabled() else 0
        return embed(self.model, images)


class Defense(nn.Module):
    """A way to train: from a network, images and labels to a loss.

    A subclass names its `family` and implements `step`. The defense draws its triplets from a generator of
    its own, whose state is part of `state_dict()`: a restored training goes on with the same draws.
    """

    family: ClassVar[str]

    def __init__(self, source: Sampler, *, budget: Budget, margin: float = 0.2, seed: int = 0) -> None:
        super().__init__()
        check_margin(margin)
        self.source = source
        self.budget = budget
        self.margin = margin
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def name(self) -> str:
        """The defense in the paper's notation."""
        return f"{self.family}[{sampler_name(self.source)}]"

    def forward(self, model: nn.Module, images: Tensor, labels: Tensor) -> Step:
        """Give the loss of (N, C, H, W) images in [0, 1] with (N,) labels, and its logs.

        The logs hold means over the triplets (`hardness/source`, `hardness/destination`,
        `hardness/reached`), the parts of the loss (`loss/…`), the share of triplets that were `perturbed`,
        and the images that went `forward` and `backward` through the network, the loss's own backward
        included.
        """
        check_images(images)
        check_labels(labels, len(images))
        network = Network(model)
        loss, logs = self.step(network, images, labels.to(images.device))
        return Step(loss, {**logs, "forward": float(network.forward), "backward": float(network.backward)})

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Compute the loss of a batch that was found valid."""
        raise TypeError(f"{type(self).__name__} must implement step")

    def get_extra_state(self) -> Tensor:
        """Give the state of the generator."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state of the generator."""
        self.generator.set_state(state.cpu())

    def __repr__(self) -> str:
        b = self.budget
        settings = f"eps={b.eps}, alpha={b.alpha}, steps={b.steps}, margin={self.margin}, seed={self.seed}"
        return f"defense({self.name!r}, {settings})"


class Moved(NamedTuple):
    """Triplets that were perturbed: their (A,) rows among the triplets and their (A, 3, C, H, W) images."""

    rows: Tensor
    images: Tensor


def embed_roles(
    network: Network, images: Tensor, triplets: Triplets, moved: Moved, benign: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Embed triplets for the loss: (T, D) for each of a~, p~, n~ and for each `benign` role asked for.

    An image that stands in several places, or that was left as it is, is computed once, where the network
    treats each image on its own. Where it does not, the perturbed triplets make one batch and the benign
    images another.
    """
    positions = triplets.stack()
    if mixes_images(network.model):
        perturbed = images[positions]
        perturbed[moved.rows] = moved.images
        z = network(perturbed.flatten(0, 1))
        where = torch.arange(len(z), device=z.device).view(-1, 3)
        found = {f"{role}~": z.index_select(0, where[:, k]) for k, role in enumerate("apn")}
        if benign:
            z = network(images)
            found |= {role: z.index_select(0, positions[:, "apn".index(role)]) for role in benign}
        return found
    changed = torch.zeros_like(positions, dtype=torch.bool)
    changed[moved.rows] = (moved.images != images[positions[moved.rows]]).flatten(2).any(2)
    needed = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    needed[positions[~changed]] = True
    for role in benign:
        needed[positions[:, "apn".index(role)]] = True
    z = network(torch.cat([images[needed], moved.images[changed[moved.rows]]]))
    place = (needed.cumsum(0) - 1)[positions]
    where = torch.where(changed, (changed.flatten().cumsum(0) - 1).view_as(changed) + needed.sum(), place)
    found = {f"{role}~": z.index_select(0, where[:, k]) for k, role in enumerate("apn")}
    return found | {role: z.index_select(0, place[:, "apn".index(role)]) for role in benign}


_MIXING = re.compile("batch_?norm|drop|stochastic", re.IGNORECASE)


def mixes_images(model: nn.Module) -> bool:
    """Tell whether an image's embedding depends on its batch, or on chance, as the network stands now.

    That is so while a BatchNorm or any kind of dropout is in training mode, and always for a BatchNorm that
    keeps no running statistics.

    >>> mixes_images(nn.BatchNorm2d(3).train()), mixes_images(nn.BatchNorm2d(3).eval())
    (True, False)
    """

    def mixes(module: nn.Module) -> bool:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            return True
        return module.training and _MIXING.search(type(module).__name__) is not None

    return any(mixes(module) for module in model.modules())
