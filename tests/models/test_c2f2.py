from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from robustmetric.models import C2F2, load_weights, save_weights
from robustmetric.models.weights import digest_of

pytestmark = pytest.mark.kernels

Plain = dict[str, Tensor]


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


def pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


def plainly(w: Mapping[str, Tensor], images: Tensor, pool: Callable[[Tensor], Tensor] = pooled) -> Tensor:
    """The embeddings by the layers as they are written in papers, every tensor in the order of its axes."""
    x = pool(F.relu(F.conv2d(images, w["conv1.weight"], w["conv1.bias"], padding=2)))
    x = pool(F.relu(F.conv2d(x, w["conv2.weight"], w["conv2.bias"], padding=2)))
    x = F.relu(x.reshape(len(x), -1) @ w["fc1.weight"].T + w["fc1.bias"])
    return x @ w["fc2.weight"].T + w["fc2.bias"]


def state(net: C2F2, dtype: torch.dtype = torch.float32) -> Plain:
    """Copies of a network's tensors in the order of their axes."""
    return {n: v.to(dtype).clone(memory_format=torch.contiguous_format) for n, v in net.state_dict().items()}


def whole_numbers(channels: int, size: int) -> C2F2:
    """A network whose weights are −1, 0 and 1, few of a sum other than 0: its sums are exact in any order."""
    torch.manual_seed(0)
    net = C2F2(channels=channels, size=size, dim=4)
    few = {"conv1": 6, "conv2": 12, "fc1": 4, "fc2": 16}
    with torch.no_grad():
        for name, p in net.named_parameters():
            share = few[name.partition(".")[0]] / p[0].numel() if p.ndim > 1 else 1.0
            p.copy_(torch.randint(-1, 2, p.shape) * (torch.rand(p.shape) < share))
    return net


def gradients(out: Tensor, images: Tensor, w: Mapping[str, Tensor]) -> list[Tensor]:
    """The gradients of a sum of embeddings with weights 1, 2, … by the images and by every parameter."""
    along = torch.arange(1, out.shape[1] + 1, dtype=out.dtype)
    return list(torch.autograd.grad((out * along).sum(), [images, *w.values()]))


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (1, 8), (3, 8)])
def test_gradients_are_those_of_the_plain_computation_also_in_ties(channels: int, size: int) -> None:
    """In a black image, and a white one, all of a window are equal: the first of them has the gradient.

    All is in whole numbers below 2²⁴, which single precision holds: the order of sums changes nothing, and
    results are equal, not close.
    """
    net = whole_numbers(channels, size)
    images = torch.randint(0, 2, (4, channels, size, size)).float()
    images[0], images[1], images[2, :, 2:] = 0, 1, 0
    # As large as any sum on the way can become: nothing cancels, and windows are summed up.
    most = {n: v.abs().requires_grad_() for n, v in state(net, torch.float64).items()}
    ones = torch.ones_like(images, dtype=torch.float64, requires_grad=True)
    out = plainly(most, ones, lambda x: 4 * F.avg_pool2d(x, 2))
    assert max(float(v.detach().max()) for v in [out, *gradients(out, ones, most)]) < 2**24

    plain = {n: v.requires_grad_() for n, v in state(net).items()}
    expected = plainly(plain, images.requires_grad_())
    out = net(images)
    assert torch.equal(out, expected)
    own = dict(net.named_parameters())
    wanted, found = gradients(expected, images, plain), gradients(out, images, own)
    for name, one, other in zip(["images", *plain], wanted, found, strict=True):
        assert torch.equal(one, other), name
    assert (wanted[0][0] != 0).any(), "the black image has a gradient to compare"
    assert list(own) == list(plain)


def test_weights_are_the_same_in_every_order_of_memory(tmp_path: Path) -> None:
    """Saved, digested and loaded: the file is the same, and the network computes in its own order."""
    torch.manual_seed(0)
    net, other = C2F2(size=8, dim=4), C2F2(size=8, dim=4)
    for p in other.parameters():
        p.data = p.data.contiguous()
    assert not net.conv2.weight.is_contiguous()
    assert other.conv2.weight.is_contiguous()
    other.load_state_dict(net.state_dict())
    assert digest_of(net.state_dict()) == digest_of(other.state_dict()) == digest_of(state(net))
    files = [tmp_path / f"{name}.safetensors" for name in ("net", "other")]
    for one, file in zip((net, other), files, strict=True):
        save_weights(one, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    torch.save(other.state_dict(), tmp_path / "other.pt")
    images = torch.rand(3, 1, 8, 8)
    for file in (*files, tmp_path / "other.pt"):
        loaded = C2F2(size=8, dim=4)
        assert load_weights(loaded, file) == []
        assert loaded.conv2.weight.stride() == net.conv2.weight.stride()
        assert torch.equal(loaded(images), net(images))


@pytest.mark.parametrize("shape", [(2, 3, 28, 28), (2, 1, 32, 32), (2, 1, 28, 27), (1, 28, 28), (2, 784)])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes \(B, 1, 28, 28\)") as caught:
        C2F2()(torch.rand(shape))
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 30}, "size is 30; two poolings need a multiple of 4"),
        ({"size": 0}, "size must be a whole number of at least 4, not 0"),
        ({"dim": 0}, "dim must be"),
        ({"channels": 0}, "channels must be"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        C2F2(**options)
