"""ResNet-18 and ResNet-50 with torchvision's parameter names, so that its published weights load."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustmetric.errors import UserError, whole
from robustmetric.registry import register

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalize(nn.Module):
    """Pixel normalisation as a layer, so that an attack works in [0, 1]: ``(images - mean) / std``.

    Images ``(B, C, H, W)``, with ``C`` the length of `mean` and `std`. Nothing of it is in the state dict.

    >>> Normalize([0.5], [0.25])(torch.ones(1, 1, 1, 1)).item()
    2.0
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(s > 0 for s in std):
            raise UserError(
                f"mean is {tuple(mean)} and std is {tuple(std)};"
                " both need one number a channel, and every std must be above 0"
            )
        dtype = torch.get_default_dtype()  # also where the numbers are integers
        self.register_buffer("mean", torch.tensor(mean, dtype=dtype).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=dtype).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Normalise `images` ``(B, C, H, W)``; the shape stays."""
        channels = len(self.mean)
        if images.ndim != 4 or images.shape[1] != channels:
            raise UserError(
                f"images have shape {tuple(images.shape)}; this network takes (B, {channels}, H, W):"
                f" convert the images to {channels} channels"
            )
        # Integers would be promoted without a word, 255 times too large.
        if not images.is_floating_point():
            raise UserError(f"images are {images.dtype}; give floating-point images in [0, 1]: images / 255")
        return (images - self.mean) / self.std


class BasicBlock(nn.Module):
    """The block of ResNet-18: two 3×3 convolutions, ``(B, inputs, H, W)`` to ``(B, width, H/s, W/s)``."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block computes to its input."""
        y = _relu(self.bn1(self.conv1(x)))
        return _relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1×1, 3×3 (with the stride) and 1×1 convolutions, ``4·width`` channels out."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block computes to its input."""
        y = _relu(self.bn1(self.conv1(x)))
        y = _relu(self.bn2(self.conv2(y)))
        return _relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """A residual network; create it with `resnet18` or `resnet50`.

    Images ``(B, 3, H, W)`` in [0, 1] of any size, to embeddings ``(B, dim)`` that are not normalised.
    `depths` are the numbers of `block` in its four stages, `dim` is the length of the embeddings, and `mean`
    and `std` normalise the pixels. With `freeze_bn` BatchNorm keeps its running statistics whatever the mode;
    its scale and shift learn.

    >>> ResNet(BasicBlock, (1, 1, 1, 1), dim=8)(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        dim: int = 512,
        freeze_bn: bool = False,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        if len(mean) != 3:
            raise UserError(f"mean is {tuple(mean)}; a ResNet takes 3 channels, so give 3 numbers")
        self.freeze_bn = freeze_bn
        self.normalize = Normalize(mean, std)
        self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.fc = nn.Linear(512 * block.expansion, whole("dim", dim, 1))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.train()  # a frozen BatchNorm is frozen from the start

    def forward(self, images: Tensor) -> Tensor:
        """Embed `images` ``(B, 3, H, W)`` as ``(B, dim)``."""
        x = _relu(self.bn1(self.conv1(self.normalize(images))))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        embeddings: Tensor = self.fc(x.mean(dim=(2, 3)))
        return embeddings

    def train(self, mode: bool = True) -> ResNet:
        """Set the mode of every module, except that a frozen BatchNorm stays in evaluation mode."""
        super().train(mode)
        if self.freeze_bn:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
                    module.eval()
        return self


resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
"""Create a ResNet-18: images ``(B, 3, H, W)`` in [0, 1] to embeddings ``(B, dim)``, randomly initialised."""

resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
"""Create a ResNet-50: images ``(B, 3, H, W)`` in [0, 1] to embeddings ``(B, dim)``, randomly initialised."""

register("model", "resnet18", block=BasicBlock, depths=(2, 2, 2, 2))(ResNet)
register("model", "resnet50", block=Bottleneck, depths=(3, 4, 6, 3))(ResNet)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Create a convolution that changes the size by its stride only; BatchNorm follows, so no bias."""
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Create what a block adds its result to: the input itself (empty), or brought to the new shape."""
    if stride == 1 and inputs == outputs:
        return nn.Sequential()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], inputs: int, width: int, depth: int, *, stride: int
) -> nn.Sequential:
    """Create the blocks of one width; the first one has the stride."""
    rest = [block(width * block.expansion, width, 1) for _ in range(depth - 1)]
    return nn.Sequential(block(inputs, width, stride), *rest)


def _relu(x: Tensor) -> Tensor:
    # In place: neither BatchNorm nor a sum needs its own result in the backward pass.
    return F.relu(x, inplace=True)
