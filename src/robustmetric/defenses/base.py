"""What every defense shares: the interface, the passes it counts, the embeddings of its triplets."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from robustmetric.destination import sampler_name
from robustmetric.distance import embed
from robustmetric.perturb import Budget, check_images
from robustmetric.triplets import Sampler, Triplets, check_classes, check_labels, check_margin, find_anchors
from robustmetric.validate import UserError, is_number


@dataclass(frozen=True, eq=False)
class Step:
    """The loss of a batch, a scalar to call `backward` on, figures of how it came about, and what it saw.

    What it saw is a batch again, to take any other loss on: `embeddings` (M, D) with their gradient, `labels`
    (M,), `triplets` as positions in it, and `images` (M, C, H, W), perturbed and without a gradient. For HM
    and ACT it holds the anchor, positive and negative of one triplet behind the other, M = 3T; for EST the N
    images of the batch, moved; for N/A those as they are.

    >>> import robustmetric as rm
    >>> images, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 0, 1, 1])
    >>> step = rm.defense("HM[S,LGA]", steps=2)(rm.model("c2f2", size=8, dim=16), images, labels)
    >>> step.embeddings.shape, step.labels.tolist(), step.triplets.negative.tolist()
    (torch.Size([6, 16]), [0, 0, 1, 1, 1, 0], [2, 5])
    """

    loss: Tensor
    logs: dict[str, float]
    embeddings: Tensor
    labels: Tensor
    triplets: Triplets
    computed: Tensor
    """The images (S, C, H, W) that the network computed for the loss, each once."""
    rows: Tensor | None = None
    """Which of them (M,) the embeddings are of; without, all in their order."""

    @cached_property
    def images(self) -> Tensor:
        """The images (M, C, H, W) of the embeddings; they are put together when first asked for."""
        return self.computed if self.rows is None else self.computed[self.rows]


class Network:
    """A model as a map from images to the unit sphere that counts the images it computes.

    >>> network = Network(nn.Flatten())
    >>> with torch.no_grad():
    ...     z = network(torch.ones(3, 1, 2, 2))
    >>> network.forwards, network.backwards
    (3, 0)
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"the network must be a torch.nn.Module, not a {type(model).__name__}")
        self.model = model
        self.forwards = 0
        self.backwards = 0

    def __call__(self, images: Tensor, *, learn: bool = False) -> Tensor:
        """Embed (N, C, H, W) images as (N, D); with gradients enabled, a backward pass is counted too.

        Only what the network is to `learn` from goes through DistributedDataParallel: its workers wait for
        each other in every pass, and perturbations take each worker another number of passes.
        """
        self.forwards += len(images)
        self.backwards += len(images) if torch.is_grad_enabled() else 0
        model = self.model
        if isinstance(model, nn.parallel.DistributedDataParallel) and not learn:
            model = model.get_submodule("module")
        return embed(model, images)


class Defense(nn.Module):
    """A way to train: from a network, images and labels to a loss.

    A subclass names its `family` and implements `step`. The defense draws its triplets from a generator of
    its own, whose state is part of `state_dict()`: a restored training goes on with the same draws.
    """

    family: ClassVar[str] = "?"
    __call__: Callable[..., Step]

    def __init__(self, source: Sampler, *, budget: Budget, margin: float = 0.2, seed: int = 0) -> None:
        super().__init__()
        check_margin(margin)
        if not (is_number(seed, Integral) and seed >= 0):
            raise UserError(f"seed must be a whole number of at least 0, not {seed!r}")
        self.source = source
        self.budget = budget
        self.margin = margin
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self._warned = False

    @property
    def name(self) -> str:
        """The defense in the paper's notation."""
        return f"{self.family}[{sampler_name(self.source)}]"

    def forward(self, model: nn.Module, images: Tensor, labels: Tensor) -> Step:
        """Return the loss of (N, C, H, W) images in [0, 1] with (N,) labels, and its logs.

        The logs hold means over the triplets (`hardness/source` and `hardness/destination` as mined,
        `hardness/reached` as the loss sees it; NaN where a defense has none), the parts of the loss
        (`loss/…`), the share of triplets that were `perturbed` (of images for EST), how many `triplets` and
        `anchors` the batch has, and how many images went forward and backward through the network
        (`images/forward`, `images/backward`), the loss's own backward included. `spread` is one minus the
        mean cosine of the batch's embeddings, near 0 when the network has collapsed. No gradient flows back
        into the images. The first batch in which less than a quarter of the images can be anchors is warned
        of.
        """
        check_images(images)
        check_labels(labels, len(images))
        check_classes(labels)
        anchors = len(find_anchors(labels))
        if 4 * anchors < len(labels) and not self._warned:
            self._warned = True
            warnings.warn(
                f"only {anchors} of the {len(labels)} images share their class with another of the batch; "
                "the rest are no anchors: draw pairs, as robustmetric.data.pairs.PairLoader does, or larger "
                "batches",
                stacklevel=4,  # forward, two frames of nn.Module, and the caller
            )
        network = Network(model)
        step = self.step(network, images.detach(), labels.to(images.device))
        counts = {
            "triplets": len(step.triplets.anchor),
            "anchors": anchors,
            "images/forward": network.forwards,
            "images/backward": network.backwards,
        }
        return replace(step, logs={**step.logs, **{name: float(count) for name, count in counts.items()}})

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Compute the loss of a batch that was found valid."""
        raise TypeError(f"{type(self).__name__} must implement step")

    def get_extra_state(self) -> Tensor:
        """Return the state of the generator."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state of the generator."""
        self.generator.set_state(state.cpu())

    def __repr__(self) -> str:
        b = self.budget
        settings = f"eps={b.eps}, alpha={b.alpha}, steps={b.steps}, margin={self.margin}, seed={self.seed}"
        return f"defense({self.name!r}, {settings})"


def spread(dist: Tensor) -> float:
    """One minus the mean cosine of different images, from their (N, N) distances on the unit sphere.

    >>> round(spread(torch.tensor([[0.0, 2**0.5], [2**0.5, 0.0]])), 6)
    1.0
    """
    count = len(dist)
    return dist.square().sum().item() / (2 * count * (count - 1))


class Moved(NamedTuple):
    """Triplets that were perturbed: (A,) rows among the triplets, ascending, and (A, 3, C, H, W) images."""

    rows: Tensor
    images: Tensor


class Embedded(NamedTuple):
    """What a loss on triplets sees.

    The (T, D) embeddings of each role, the images (S, C, H, W) that the network computed for them, and at
    which of these (T, 3) the perturbed triplets are.
    """

    role: dict[str, Tensor]
    computed: Tensor
    where: Tensor

    def step(self, loss: Tensor, logs: dict[str, float], source: Triplets, labels: Tensor) -> Step:
        """Make the step of a loss: its batch is the perturbed triplets, one behind the other."""
        flat = torch.arange(self.where.numel(), device=self.where.device).view_as(self.where)
        return Step(
            loss,
            logs,
            torch.stack([self.role[name] for name in ("a~", "p~", "n~")], dim=1).flatten(0, 1),
            labels[source.stack().flatten()],
            Triplets(*flat.unbind(1)),
            self.computed,
            self.where.flatten(),
        )


def embed_roles(
    network: Network, images: Tensor, triplets: Triplets, moved: Moved, benign: Iterable[str] = ()
) -> Embedded:
    """Embed triplets for the loss: (T, D) for each of a~, p~, n~ and for each `benign` role asked for.

    An image that stands in several places, or that was left as it is, is computed once, where the network
    treats each image on its own. Where it does not, the perturbed triplets make one batch and the benign
    images another.
    """
    positions = triplets.stack()
    if mixes_images(network.model):
        perturbed = images[positions]
        perturbed[moved.rows] = moved.images
        computed = perturbed.flatten(0, 1)
        where = torch.arange(len(computed), device=images.device).view_as(positions)
        z = network(computed, learn=True)
        # DistributedDataParallel saw a pass already; in another it would write over the BatchNorm's buffers,
        # which the gradient of the first still needs. It waits for the gradients of both all the same.
        z_benign, place = network(images) if benign else z, positions
    else:
        changed = torch.zeros_like(positions, dtype=torch.bool)
        changed[moved.rows] = (moved.images != images[positions[moved.rows]]).flatten(2).any(2)
        needed = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        needed[positions[~changed]] = True
        for role in benign:
            needed[positions[:, "apn".index(role)]] = True
        computed = torch.cat([images[needed], moved.images[changed[moved.rows]]])
        place = (needed.cumsum(0) - 1)[positions]
        where = torch.where(changed, (changed.flatten().cumsum(0) - 1).view_as(changed) + needed.sum(), place)
        z = z_benign = network(computed, learn=True)
    found = {f"{role}~": z.index_select(0, where[:, k]) for k, role in enumerate("apn")}
    found |= {role: z_benign.index_select(0, place[:, "apn".index(role)]) for role in benign}
    return Embedded(found, computed, where)


def mean_over_workers(value: Tensor) -> Tensor:
    """Average a scalar over the workers of a distributed training; alone, give it as it is.

    >>> mean_over_workers(torch.tensor(0.5))
    tensor(0.5000)
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    mean = value.clone()
    torch.distributed.all_reduce(mean)
    return mean / torch.distributed.get_world_size()


_MIXING = re.compile("batch_?norm|drop|stochastic|rrelu", re.IGNORECASE)


def mixes_images(model: nn.Module) -> bool:
    """Tell whether an image's embedding depends on its batch, or on chance, as the network stands now.

    That is so while a BatchNorm or any kind of dropout is in training mode, and always for a BatchNorm that
    keeps no running statistics. Modules are told by their names; a dropout of probability 0 does nothing.

    >>> mixes_images(nn.BatchNorm2d(3).train()), mixes_images(nn.BatchNorm2d(3).eval())
    (True, False)
    """

    def mixes(module: nn.Module) -> bool:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            return True
        if not module.training:
            return False
        if isinstance(module, nn.MultiheadAttention):
            return bool(module.dropout)
        if _MIXING.search(type(module).__name__) is None:
            return False
        return bool(getattr(module, "p", getattr(module, "drop_prob", 1)))

    return any(mixes(module) for module in model.modules())
