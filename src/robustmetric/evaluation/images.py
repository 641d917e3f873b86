"""Images: any that are indexed like a tensor."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Images(Protocol):
    """N images in [0, 1]: a tensor (N, C, H, W), or anything that is indexed like one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor, /) -> Tensor: ...


class Joined:
    """Images of two sets in turn, without a copy of either."""

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
