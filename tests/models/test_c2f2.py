from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from robustmetric.models import C2F2


def test_parameters_have_the_protocols_shapes() -> None:
    shapes = {name: tuple(value.shape) for name, value in C2F2().state_dict().items()}
    assert shapes == {
        "conv1.weight": (32, 1, 5, 5),
        "conv1.bias": (32,),
        "conv2.weight": (64, 32, 5, 5),
        "conv2.bias": (64,),
        "fc1.weight": (1024, 3136),
        "fc1.bias": (1024,),
        "fc2.weight": (512, 1024),
        "fc2.bias": (512,),
    }


@pytest.mark.parametrize(("channels", "size", "dim"), [(1, 28, 512), (3, 32, 7), (2, 4, 1)])
def test_forward_is_the_plain_computation(channels: int, size: int, dim: int) -> None:
    torch.manual_seed(0)
    net = C2F2(channels=channels, size=size, dim=dim)
    images = torch.rand(3, channels, size, size)
    w = net.state_dict()

    x = F.conv2d(images, w["conv1.weight"], w["conv1.bias"], padding=2).clamp(min=0)
    x = F.max_pool2d(x, 2)
    x = F.conv2d(x, w["conv2.weight"], w["conv2.bias"], padding=2).clamp(min=0)
    x = F.max_pool2d(x, 2)
    x = (x.reshape(3, -1) @ w["fc1.weight"].T + w["fc1.bias"]).clamp(min=0)
    expected = x @ w["fc2.weight"].T + w["fc2.bias"]

    out = net(images)
    assert out.shape == (3, dim)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_the_embedding_has_both_signs_and_no_unit_length() -> None:
    torch.manual_seed(0)
    out = C2F2()(torch.rand(4, 1, 28, 28))
    assert (out < 0).any()
    assert (out > 0).any()
    assert (out.norm(dim=1) - 1).abs().min() > 0.01


@pytest.mark.parametrize("shape", [(2, 3, 28, 28), (2, 1, 32, 32), (2, 1, 28, 27), (1, 28, 28), (2, 784)])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes \(B, 1, 28, 28\)") as caught:
        C2F2()(torch.rand(shape))
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 30}, "size is 30; two poolings need a positive multiple of 4"),
        ({"size": 0}, "size is 0"),
        ({"size": -4}, "size is -4"),
        ({"dim": 0}, "dim is 0; the embedding needs at least 1"),
        ({"channels": 0}, "channels is 0; it must be at least 1"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        C2F2(**options)
