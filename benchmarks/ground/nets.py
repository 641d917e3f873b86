"""The networks of the evidence that the package does not have, made for `--model FILE:NAME`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robustmetric.models import IMAGENET_MEAN, IMAGENET_STD, Normalize


def conv_bn(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution without bias, and its BatchNorm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


def small(dim: int = 128) -> nn.Module:
    """Return three convolutions with BatchNorm, and a linear layer, for images (N, 3, H, W)."""
    blocks = [
        nn.Sequential(*conv_bn(inputs, outputs), nn.ReLU(), nn.MaxPool2d(2))
        for inputs, outputs in ((3, 32), (32, 64), (64, 128))
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128 * 16, dim))


class Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *conv_bn(inputs, outputs, stride=stride), nn.ReLU(), *conv_bn(outputs, outputs)
        )
        same = stride == 1 and inputs == outputs
        self.side = nn.Identity() if same else nn.Sequential(*conv_bn(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return torch.relu(self.main(x) + self.side(x))


def resnet8(dim: int = 128) -> nn.Module:
    """Return a ResNet of eight layers for images (N, 3, 32, 32)."""
    return nn.Sequential(
        *conv_bn(3, 16), nn.ReLU(), Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, dim),
    )  # fmt: skip


class Inverted(nn.Module):
    """A block of MobileNetV2, with torchvision's names."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = inputs * expand
        wide = [] if expand == 1 else [nn.Sequential(*conv_bn(inputs, inner, 1), nn.ReLU6())]
        deep = nn.Sequential(*conv_bn(inner, inner, 3, stride, groups=inner), nn.ReLU6())
        self.conv = nn.Sequential(*wide, deep, *conv_bn(inner, outputs, 1))
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        z: Tensor = self.conv(x)
        return x + z if self.same else z


class MobileNetV2(nn.Module):
    """MobileNetV2 with a linear layer to `dim` numbers; its weights for ImageNet have torchvision's names."""

    def __init__(self, dim: int = 128) -> None:
        super().__init__()
        self.normalize = Normalize(IMAGENET_MEAN, IMAGENET_STD)
        layers: list[nn.Module] = [nn.Sequential(*conv_bn(3, 32, stride=2), nn.ReLU6())]
        inputs = 32
        plan = (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        )
        for expand, outputs, count, stride in plan:
            for k in range(count):
                layers.append(Inverted(inputs, outputs, stride if k == 0 else 1, expand))
                inputs = outputs
        layers.append(nn.Sequential(*conv_bn(inputs, 1280, 1), nn.ReLU6()))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(1280, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) in [0, 1] to (N, dim)."""
        z: Tensor = self.head(self.features(self.normalize(x)).mean((2, 3)))
        return z
