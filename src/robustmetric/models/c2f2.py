"""C2F2: the small network for 28×28 images, two convolutions and two fully connected layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustmetric.errors import UserError, whole
from robustmetric.registry import register


@register("model", "c2f2")
class C2F2(nn.Module):
    """Two 5×5 convolutions and two fully connected layers, for small images.

    Images ``(B, channels, size, size)`` in [0, 1], taken as they are, to embeddings ``(B, dim)`` that are
    not normalised. `channels` and `size` are those of the images, `dim` is the length of the embeddings.

    >>> import torch
    >>> C2F2()(torch.rand(3, 1, 28, 28)).shape
    torch.Size([3, 512])
    """

    def __init__(self, *, channels: int = 1, size: int = 28, dim: int = 512) -> None:
        super().__init__()
        if whole("size", size, 4) % 4:
            raise UserError(f"size is {size}; two poolings need a multiple of 4", parameter="size")
        whole("channels", channels, 1)
        self.channels, self.size = channels, size
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=5, padding=2)
        self.fc1 = nn.Linear(64 * (size // 4) ** 2, 1024)
        self.fc2 = nn.Linear(1024, whole("dim", dim, 1))
        for conv in (self.conv1, self.conv2):  # pooling takes a third of the time otherwise
            conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Embed `images` ``(B, channels, size, size)`` as ``(B, dim)``."""
        if images.ndim != 4 or images.shape[1:] != (self.channels, self.size, self.size):
            raise UserError(
                f"images have shape {tuple(images.shape)}; this C2F2 takes (B, {self.channels}, {self.size},"
                f" {self.size}): resize the images, or create it with their channels and size"
            )
        # The largest of a window is the same before and after ReLU; afterwards there is a quarter to do.
        x = self.conv1(images).contiguous(memory_format=torch.channels_last)
        x = F.relu(F.max_pool2d(x, 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        embeddings: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return embeddings
