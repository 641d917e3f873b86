"""A small gallery with everything in it that could be counted wrongly, and queries of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from robustmetric.attacks import Gallery, Queries


def unit(z: Tensor) -> Tensor:
    return torch.nn.functional.normalize(z)


def make_gallery() -> Gallery:
    """40 images in 6 classes, in double precision.

    The first 14 are corners of a cube: all their squared distances are 0, 1, 2, 3 or 4, without rounding.
    Images 20 and 21 are copies in one class, 22 and 23 across classes, and 24, 25 and 39 three of a kind.
    Class 5 has the image 13 alone.
    """
    generator = torch.Generator().manual_seed(4)
    corners = torch.tensor([[1 - 2 * (i >> b & 1) for b in range(4)] for i in range(14)]).double() / 2
    z = torch.cat([corners, unit(torch.randn(26, 4, generator=generator, dtype=torch.float64))])
    labels = torch.randint(0, 5, (40,), generator=generator)
    labels[13] = 5
    for copy, original, label in [(21, 20, 1), (23, 22, 3), (25, 24, 2), (39, 24, 4)]:
        z[copy] = z[original]
        labels[copy] = label
    labels[[20, 22, 24]] = torch.tensor([1, 0, 2])
    return Gallery(z, labels)


def make_queries(gallery: Gallery) -> Queries:
    """12 images of the gallery and 6 others, the last of a class that is not in it.

    Among the others, one is a copy of image 3, one of image 24, and one of the corner that is not in the
    gallery.
    """
    inside = torch.tensor([20, 21, 22, 23, 24, 39, 13, 0, 5, 17, 30, 36])
    generator = torch.Generator().manual_seed(5)
    others = unit(torch.randn(6, 4, generator=generator, dtype=torch.float64))
    others[0], others[1], others[2] = gallery.z[3], gallery.z[24], torch.full((4,), -0.5)
    labels = torch.tensor([int(gallery.labels[3]), 3, 0, 1, 5, 9])
    return Queries(
        torch.cat([gallery.z[inside], others]),
        torch.cat([gallery.labels[inside], labels]),
        torch.cat([inside, torch.full((6,), -1)]),
    )


def make_moved(queries: Queries) -> Tensor:
    """Where the queries' embeddings are after a perturbation: nowhere in particular, so without ties."""
    generator = torch.Generator().manual_seed(6)
    noise = torch.randn(queries.z.shape, generator=generator, dtype=torch.float64)
    return unit(queries.z + 0.4 * noise)


def make_tied(queries: Queries, gallery: Gallery, moved: Tensor) -> Tensor:
    """Embeddings with ties: the benign ones, the gallery's own, its corners, and some between two corners."""
    z = moved.clone()
    z[::3] = queries.z[::3]
    z[1] = gallery.z[24]
    z[4] = gallery.z[22]
    z[7], z[8], z[10] = gallery.z[2], gallery.z[9], gallery.z[11]
    z[13] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    z[14] = torch.tensor([0.0, 0.6, 0.8, 0.0])
    z[16] = torch.tensor([0.0, 0.0, 0.0, -1.0])
    return z


def make_seen(gallery: Gallery) -> Gallery:
    """The gallery, taken by three cameras with numbers of any kind; one took all of class 3.

    Copies in one class are of one camera.
    """
    cameras = torch.tensor([-7, 0, 10**12])[torch.arange(40) * 7 % 3]
    cameras[gallery.labels == 3] = 4
    cameras[[21, 25]] = cameras[[20, 24]]
    return Gallery(gallery.z, gallery.labels, cameras=cameras)


def make_asked(queries: Queries, seen: Gallery) -> Queries:
    """The queries with their cameras: those of the gallery their own, of the others one that is not there."""
    assert seen.cameras is not None
    inside = queries.own >= 0
    cameras = torch.where(inside, seen.cameras[queries.own], torch.tensor([0, 4, 99, -7, 0, 0]).repeat(3))
    return Queries(queries.z, queries.labels, queries.own, cameras)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is computed."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.size = max(self.size, made.numel())
        return made


def order(z: Tensor, gallery: Gallery) -> list[int]:
    """All positions, nearest first, ties by position: a plain loop."""
    far, here = [], z.tolist()
    for position, there in enumerate(gallery.z.tolist()):
        square = 0.0
        for a, b in zip(here, there, strict=True):
            square += (a - b) ** 2
        far.append((round(square, 9), position))
    return [position for _, position in sorted(far)]
