from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustmetric.models import ResNet, resnet18, resnet50
from robustmetric.models.resnet import BasicBlock, Bottleneck

pytestmark = pytest.mark.kernels


def randomise_batch_norm(net: nn.Module) -> None:
    """Fresh BatchNorm is nearly the identity; random numbers make a mistake in it visible."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)


def plain_resnet(w: Mapping[str, Tensor], images: Tensor, *, depths: list[int], convs: int) -> Tensor:
    """The forward pass written out from a state dict; ``convs`` is 2 for ResNet-18, 3 for ResNet-50."""

    def bn(x: Tensor, name: str) -> Tensor:
        scale = w[f"{name}.weight"] / (w[f"{name}.running_var"] + 1e-5).sqrt()
        shift = w[f"{name}.bias"] - w[f"{name}.running_mean"] * scale
        return x * scale[:, None, None] + shift[:, None, None]

    mean = torch.tensor([0.485, 0.456, 0.406]).reshape(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).reshape(1, 3, 1, 1)
    x = F.conv2d((images - mean) / std, w["conv1.weight"], stride=2, padding=3)
    x = F.max_pool2d(bn(x, "bn1").clamp(min=0), kernel_size=3, stride=2, padding=1)
    for stage, depth in enumerate(depths, start=1):
        for index in range(depth):
            block = f"layer{stage}.{index}"
            stride = 2 if stage > 1 and index == 0 else 1
            strided = 1 if convs == 2 else 2  # the convolution with the stride: always the first 3×3
            y = x
            for i in range(1, convs + 1):
                kernel = w[f"{block}.conv{i}.weight"]
                step = stride if i == strided else 1
                y = bn(F.conv2d(y, kernel, stride=step, padding=kernel.shape[-1] // 2), f"{block}.bn{i}")
                y = y.clamp(min=0) if i < convs else y
            if f"{block}.downsample.0.weight" in w:
                x = bn(F.conv2d(x, w[f"{block}.downsample.0.weight"], stride=stride), f"{block}.downsample.1")
            x = (x + y).clamp(min=0)
    return F.adaptive_avg_pool2d(x, 1).flatten(1) @ w["fc.weight"].T + w["fc.bias"]


@pytest.fixture(scope="module")
def net18() -> ResNet:
    torch.manual_seed(0)
    net = resnet18(dim=16)
    randomise_batch_norm(net)
    return net.eval()


@pytest.mark.parametrize(
    ("make", "parameters", "tensors"), [(resnet18, 11_689_512, 122), (resnet50, 25_557_032, 320)]
)
def test_counts_are_torchvisions(make: Any, parameters: int, tensors: int) -> None:
    net = make(dim=1000)
    assert (sum(p.numel() for p in net.parameters()), len(net.state_dict())) == (parameters, tensors)


@pytest.mark.parametrize("size", [(33, 47), (7, 5)])
def test_resnet18_is_the_plain_computation(net18: ResNet, size: tuple[int, int]) -> None:
    images = torch.rand(2, 3, *size)
    with torch.no_grad():
        expected = plain_resnet(net18.state_dict(), images, depths=[2, 2, 2, 2], convs=2)
        torch.testing.assert_close(net18(images), expected, atol=1e-4, rtol=1e-4)


def test_resnet50_is_the_plain_computation() -> None:
    torch.manual_seed(1)
    net = resnet50(dim=8)
    randomise_batch_norm(net)
    net.eval().double()  # the sums are long: in double precision only a mistake can be seen
    images = torch.rand(1, 3, 40, 33, dtype=torch.float64)
    with torch.no_grad():
        expected = plain_resnet(net.state_dict(), images, depths=[3, 4, 6, 3], convs=3)
        torch.testing.assert_close(net(images), expected, atol=1e-6, rtol=1e-6)


def test_convolutions_start_with_fan_out_and_batch_norm_as_the_identity() -> None:
    torch.manual_seed(0)
    net = resnet18()
    w = net.state_dict()
    for name, fan_out in [("conv1", 64 * 49), ("layer2.0.conv1", 128 * 9), ("layer4.0.downsample.0", 512)]:
        weight = w[f"{name}.weight"]
        assert weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.03)
        assert abs(weight.mean().item()) < 0.03 * weight.std().item() + 1e-4
    assert (w["layer3.1.bn2.weight"] == 1).all()
    assert (w["layer3.1.bn2.bias"] == 0).all()


def running(net: nn.Module) -> dict[str, Tensor]:
    return {n: b.clone() for n, b in net.named_buffers() if "running" in n or "tracked" in n}


def shallow(block: type[BasicBlock] | type[Bottleneck] = BasicBlock, *, freeze_bn: bool) -> ResNet:
    return ResNet(block, (1, 1, 1, 1), dim=4, freeze_bn=freeze_bn)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_frozen_batch_norm_keeps_its_statistics_and_learns_its_scale(
    block: type[BasicBlock] | type[Bottleneck],
) -> None:
    net = shallow(block, freeze_bn=True)
    for _ in range(2):  # as created, and after train() is called
        before = running(net)
        net(torch.rand(2, 3, 32, 32)).square().sum().backward()
        after = running(net)
        assert all(torch.equal(before[name], after[name]) for name in before)
        net.eval()
        assert net.train() is net
    assert net.training
    assert net.layer1.training
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert not module.training
            assert module.weight.requires_grad
            assert module.weight.grad is not None
            assert module.weight.grad.abs().sum() > 0
            assert module.bias.grad is not None


def test_batch_norm_learns_its_statistics_otherwise() -> None:
    net = shallow(freeze_bn=False)
    assert net.bn1.training
    before = running(net)
    net(torch.rand(2, 3, 32, 32))
    after = running(net)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert not net.eval().bn1.training


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (3, 32, 32), (2, 32, 32, 3)])
def test_images_of_another_shape_are_refused(net18: ResNet, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes \(B, 3, H, W\)") as caught:
        net18(torch.rand(shape))
    assert str(shape) in str(caught.value)


def test_integer_images_are_refused(net18: ResNet) -> None:
    with pytest.raises(ValueError, match=r"images are torch.uint8; .* images / 255"):
        net18(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="dim must be a whole number"):
        resnet18(dim=0)
    with pytest.raises(ValueError, match=r"mean is \(0.5,\); a ResNet takes 3 channels"):
        resnet18(mean=(0.5,), std=(0.5,))
    with pytest.raises(ValueError, match="one number a channel"):
        resnet18(std=(0.5,))
    with pytest.raises(ValueError, match="every std must be above 0"):
        resnet18(std=(0.2, 0.0, 0.2))
