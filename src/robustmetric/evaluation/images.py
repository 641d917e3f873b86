"""The images of an evaluation: any that are indexed like a tensor, and what a first look at them finds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from robustmetric.perturb import check_images


class Images(Protocol):
    """N images in [0, 1]: a tensor (N, C, H, W), or anything that is indexed like one.

    >>> class Grey:
    ...     def __len__(self):
    ...         return 10
    ...     def __getitem__(self, index):
    ...         return torch.full((len(index), 1, 8, 8), 0.5)
    >>> Joined(Grey(), torch.zeros(2, 1, 8, 8))[torch.tensor([0, 11])].mean((1, 2, 3))
    tensor([0.5000, 0.0000])
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor, /) -> Tensor: ...


class Joined:
    """Queries and gallery one behind the other, without a copy of either."""

    def __init__(self, first: Images, second: Images) -> None:
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, index: Tensor) -> Tensor:
        ours = index < len(self.first)
        parts = [self.first[index[ours]]] if ours.any() else []
        if not ours.all():
            parts.append(self.second[index[~ours] - len(self.first)])
        return torch.cat(parts)


@dataclass(frozen=True)
class Fingerprint:
    """What a first pass over all images finds: their shape, a digest, and which are copies of another.

    `copies` are pairs of positions within the gallery, `shared` are queries and their copies in a gallery of
    its own.

    >>> images = torch.tensor([0.0, 0.5, 0.0])[:, None, None, None].expand(3, 1, 2, 2)
    >>> Fingerprint.of(images, torch.arange(3), None, torch.full((3,), -1)).copies
    [(0, 2)]
    """

    shape: list[int]
    sha256: str
    copies: list[tuple[int, int]]
    shared: list[tuple[int, int]]

    @classmethod
    def of(
        cls, images: Images, labels: Tensor, gallery: tuple[Images, Tensor] | None, own: Tensor
    ) -> Fingerprint:
        """Look at all images once, and refuse those that are not in [0, 1]; `own` is where queries may be."""
        whole = hashlib.sha256()
        shape: list[int] = []
        keys: list[list[bytes]] = []
        for some, classes in [(images, labels)] + ([gallery] if gallery else []):
            keys.append([])
            whole.update(classes.cpu().to(torch.int64).numpy().tobytes())
            for part in torch.arange(len(some)).split(256):
                batch = some[part]
                check_images(batch)
                shape = shape or list(batch.shape[1:])
                whole.update(f"{tuple(batch.shape)} {batch.dtype}".encode())
                content = batch.detach().cpu().to(torch.float32).contiguous().numpy()
                whole.update(content.tobytes())
                keys[-1] += [hashlib.blake2b(image, digest_size=16).digest() for image in content]
        first: dict[bytes, int] = {}
        copies = [
            (first[key], place) for place, key in enumerate(keys[-1]) if first.setdefault(key, place) != place
        ]
        # Those that are known to be in there do not find themselves; copies of them are the gallery's.
        shared = [
            (n, first[key])
            for n, (key, place) in enumerate(zip(keys[0], own.tolist(), strict=True))
            if gallery and place < 0 and key in first
        ]
        return cls(shape, whole.hexdigest(), copies, shared)
