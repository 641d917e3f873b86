"""The embeddings of triplets before and after their perturbation, each image computed once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robustmetric.defenses.base import Network, Step
from robustmetric.triplets import Mined, Triplets


class PerturbedTriplets(NamedTuple):
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

    def step(self, loss: Tensor, logs: dict[str, float], mined: Mined) -> Step:
        """Return the step of a `loss` with its `logs`; its batch is the perturbed triplets in turn."""
        flat = torch.arange(self.where.numel(), device=self.where.device).view_as(self.where)
        return Step(
            loss,
            logs,
            torch.stack([self.role[name] for name in ("a~", "p~", "n~")], dim=1).flatten(0, 1),
            mined.batch.labels[mined.triplets.stack().flatten()],
            Triplets(*flat.unbind(1)),
            self.computed,
            self.where.flatten(),
        )


def embed_roles(
    network: Network,
    images: Tensor,
    triplets: Triplets,
    perturbed: PerturbedTriplets,
    benign: Iterable[str] = (),
) -> Embedded:
    """Embed triplets for the loss: (T, D) for each of a~, p~, n~ and for each `benign` role asked for.

    `triplets` are positions in the (N, C, H, W) `images`; those that were `perturbed` take their place.

    An image that stands in several places, or that was left as it is, is computed once, where the network
    treats each image on its own. Where it does not, the perturbed triplets make one batch and the benign
    images another.
    """
    positions = triplets.stack()
    if mixes_images(network.model):
        whole = images[positions]
        whole[perturbed.rows] = perturbed.images
        computed = whole.flatten(0, 1)
        where = torch.arange(len(computed), device=images.device).view_as(positions)
        z = network(computed, learn=True)
        # DistributedDataParallel saw a pass already; in another it would write over the BatchNorm's buffers,
        # which the gradient of the first still needs. It waits for the gradients of both all the same.
        z_benign, place = network(images) if benign else z, positions
    else:
        changed = torch.zeros_like(positions, dtype=torch.bool)
        changed[perturbed.rows] = (perturbed.images != images[positions[perturbed.rows]]).flatten(2).any(2)
        needed = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        needed[positions[~changed]] = True
        for role in benign:
            needed[positions[:, "apn".index(role)]] = True
        computed = torch.cat([images[needed], perturbed.images[changed[perturbed.rows]]])
        place = (needed.cumsum(0) - 1)[positions]
        where = torch.where(changed, (changed.flatten().cumsum(0) - 1).view_as(changed) + needed.sum(), place)
        z = z_benign = network(computed, learn=True)
    found = {f"{role}~": z.index_select(0, where[:, k]) for k, role in enumerate("apn")}
    found |= {role: z_benign.index_select(0, place[:, "apn".index(role)]) for role in benign}
    return Embedded(found, computed, where)


def benign_roles(
    network: Network, images: Tensor, triplets: Triplets, moved: Tensor, z: Tensor, benign: Iterable[str]
) -> dict[str, Tensor]:
    """Embed the `benign` roles of triplets in a batch that was moved as a whole: (T, D) for each of them.

    `triplets` are positions in the (N, C, H, W) `images`, which became `moved` with embeddings `z` (N, D)
    for the loss. An image that was left as it is, or that has none of the roles, is not computed
    again where the network treats each image on its own.
    """
    where = {role: triplets["apn".index(role)] for role in benign}
    if not where:
        return {}
    place = torch.arange(len(images), device=images.device)
    if mixes_images(network.model):
        found = network(images)  # past DistributedDataParallel, as in `embed_roles`
    else:
        needed = torch.zeros_like(place, dtype=torch.bool)
        needed[torch.cat(list(where.values()))] = True
        needed &= (moved != images).flatten(1).any(1)
        place = torch.where(needed, needed.cumsum(0) - 1 + len(images), place)
        found = torch.cat([z, network(images[needed])]) if needed.any() else z
    return {role: found.index_select(0, place[at]) for role, at in where.items()}


_MIXING = re.compile("batch_?norm|drop|stochastic|rrelu", re.IGNORECASE)


def mixes_images(model: nn.Module) -> bool:
    """Return whether an image's embedding depends on its batch, or on chance, as the `model` stands now.

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
