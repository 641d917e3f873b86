"""Distances on the sphere against norms in double precision, their gradients, and what embed refuses."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from robustmetric.sphere import cross_distance, embed, hardness, pair_distance, wide_dtype

pytestmark = pytest.mark.kernels


def sphere(n: int, dim: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, dim, generator=g, dtype=torch.float64)
    return z.div(z.square().sum(1, keepdim=True).sqrt()).to(dtype)


def loop_distance(x: Tensor, y: Tensor) -> Tensor:
    """All distances one by one, computed in double precision."""
    rows = [[float(torch.linalg.vector_norm(a.double() - b.double())) for b in y] for a in x]
    return torch.tensor(rows, dtype=x.dtype)


def as_input(z: Tensor) -> Tensor:
    return z.clone().requires_grad_()


def gradient(z: Tensor) -> Tensor:
    assert z.grad is not None
    return z.grad


# --- Values.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 2, 64, 512])
def test_cross_distance_equals_the_loop(dim: int, dtype: torch.dtype) -> None:
    x, y = sphere(13, dim, 0, dtype), sphere(9, dim, 1, dtype)
    found = cross_distance(x, y)
    assert found.dtype == dtype
    assert found.shape == (13, 9)
    torch.testing.assert_close(found, loop_distance(x, y), atol=1e-6, rtol=0)
    torch.testing.assert_close(cross_distance(x), loop_distance(x, x), atol=1e-6, rtol=0)


def test_cross_distance_of_longer_vectors() -> None:
    """The vectors need not be of length 1."""
    x, y = 3 * sphere(5, 8, 2), 0.5 * sphere(6, 8, 3)
    torch.testing.assert_close(cross_distance(x, y), loop_distance(x, y), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dim", [2, 64, 512])
def test_cross_distance_is_symmetric_with_a_zero_diagonal(dim: int) -> None:
    z = sphere(40, dim, 4)
    dist = cross_distance(z)
    assert torch.equal(dist, dist.T)
    assert torch.equal(dist.diagonal(), torch.zeros(40))
    assert (dist + torch.eye(40) > 0).all()
    again = cross_distance(z, z.clone())
    assert torch.equal(again.diagonal(), torch.zeros(40))


@pytest.mark.parametrize("apart", [1e-1, 1e-2, 1e-3, 1e-4])
def test_nearly_equal_points(apart: float) -> None:
    """Single precision alone would lose distances below 1e-3 in the rounding of the squares."""
    x = sphere(8, 512, 5)
    y = nn.functional.normalize(x + apart * sphere(8, 512, 6), dim=1)
    truth = loop_distance(x, y).diagonal()
    assert ((truth > apart / 2) & (truth < 2 * apart)).all()
    torch.testing.assert_close(cross_distance(x, y).diagonal(), truth, rtol=0.01, atol=0)
    torch.testing.assert_close(pair_distance(x, y), truth, rtol=0.01, atol=0)


def test_copies_and_opposites() -> None:
    z = sphere(6, 64, 7)
    assert torch.equal(cross_distance(z, z.clone()).diagonal(), torch.zeros(6))
    torch.testing.assert_close(cross_distance(z, -z).diagonal(), torch.full((6,), 2.0), atol=1e-6, rtol=0)
    assert torch.equal(pair_distance(z, z.clone()), torch.zeros(6))
    torch.testing.assert_close(pair_distance(z, -z), torch.full((6,), 2.0), atol=1e-6, rtol=0)


def test_pair_distance_and_hardness_equal_the_loop() -> None:
    a, p, n = sphere(11, 32, 8), sphere(11, 32, 9), sphere(11, 32, 10)
    near, far = loop_distance(a, p).diagonal(), loop_distance(a, n).diagonal()
    torch.testing.assert_close(pair_distance(a, p), near, atol=1e-6, rtol=0)
    torch.testing.assert_close(hardness(a, p, n), near - far, atol=1e-6, rtol=0)


def test_hardness_spans_its_range() -> None:
    z = sphere(3, 16, 11)
    torch.testing.assert_close(hardness(z, -z, z), torch.full((3,), 2.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(hardness(z, z, -z), torch.full((3,), -2.0), atol=1e-6, rtol=0)


def test_wide_dtype() -> None:
    assert wide_dtype(torch.device("cpu")) == torch.float64
    assert wide_dtype(torch.device("cuda")) == torch.float64
    assert wide_dtype(torch.device("mps")) == torch.float32


# --- Gradients.


def test_gradients_equal_finite_differences() -> None:
    x, y, w = (as_input(sphere(5, 3, seed, torch.float64)) for seed in (12, 13, 14))
    assert torch.autograd.gradcheck(pair_distance, (x, y))
    assert torch.autograd.gradcheck(cross_distance, (x, y))
    assert torch.autograd.gradcheck(cross_distance, (x,))  # with the zeros of its diagonal
    assert torch.autograd.gradcheck(hardness, (x, y, w))


def test_gradients_at_identical_points_are_zero() -> None:
    for distance in (pair_distance, cross_distance):
        x, y = as_input(sphere(1, 8, 15)), as_input(sphere(1, 8, 15))
        distance(x, y).sum().backward()
        assert torch.equal(gradient(x), torch.zeros(1, 8))
        assert torch.equal(gradient(y), torch.zeros(1, 8))


def test_gradient_of_hardness_with_a_copy_as_positive() -> None:
    """Only the negative pulls."""
    a, p, n = as_input(sphere(3, 8, 17)), as_input(sphere(3, 8, 17)), sphere(3, 8, 18)
    hardness(a, p, n).sum().backward()
    alone = as_input(sphere(3, 8, 17))
    (-pair_distance(alone, n)).sum().backward()
    assert torch.equal(gradient(a), gradient(alone))
    assert torch.equal(gradient(p), torch.zeros(3, 8))
    assert gradient(a).abs().sum() > 0


def test_gradients_beside_a_copy() -> None:
    """A copy at the end of the batch pulls the others as any image does, but not its original."""
    z = sphere(6, 8, 19, torch.float64)
    with_copy, without, pulled = as_input(torch.cat([z, z[:1]])), as_input(z), as_input(z)
    cross_distance(with_copy).tril().sum().backward()
    cross_distance(without).tril().sum().backward()
    pair_distance(z[:1], pulled).sum().backward()
    torch.testing.assert_close(gradient(with_copy)[:6], gradient(without) + gradient(pulled))
    assert torch.equal(gradient(pulled)[0], torch.zeros(8, dtype=torch.float64))


# --- embed.


class Returns(nn.Module):
    """A network with a fixed answer."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, images: Tensor) -> object:
        return self.answer


def test_embed_normalises() -> None:
    images = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(20)) * 7
    z = embed(nn.Flatten(), images)
    wanted = torch.stack([v / v.square().sum().sqrt() for v in images.flatten(1)])
    torch.testing.assert_close(z, wanted, atol=1e-6, rtol=0)
    assert embed(nn.Flatten(), images.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_embed_normalises_half_precision_in_single(dtype: torch.dtype) -> None:
    """In half precision itself the square of 300 is infinite, and lengths are off by 1e-3."""
    g = torch.Generator().manual_seed(21)
    images = (300 + 300 * torch.rand(5, 1, 8, 8, generator=g)).to(dtype)
    z = embed(nn.Flatten(), images)
    assert z.dtype == torch.float32
    rows = images.flatten(1).double()
    wanted = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    torch.testing.assert_close(z.double(), wanted, atol=1e-6, rtol=0)


def test_embed_of_a_half_precision_network() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8)).to(torch.bfloat16)
    images = torch.rand(4, 1, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    z = embed(network, images)
    assert z.dtype == torch.float32
    torch.testing.assert_close(torch.linalg.vector_norm(z, dim=1), torch.ones(4), atol=1e-6, rtol=0)
    z[:, 0].sum().backward()
    assert gradient(images).abs().sum() > 0


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ((torch.ones(3, 2), torch.ones(3)), ["a tuple", "3 images", "(3, D)", "wrap it in a module"]),
        (None, ["None"]),
        (torch.ones(3, 2, 4, 4), ["(3, 2, 4, 4)", "3 images", "(3, D)"]),
        (torch.ones(3), ["(3,)"]),
        (torch.ones(2, 5), ["(2, 5)"]),
        (torch.ones(3, 2).long(), ["int64", "floats"]),
        (torch.ones(3, 2).bool(), ["bool", "floats"]),
        (
            torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [torch.nan, torch.nan]]),
            ["2 of 3 embeddings", "NaN or infinity", "last good weights", "lower the learning rate"],
        ),
        (
            torch.tensor([[1.0, -torch.inf], [0.0, 1.0], [1.0, 1.0]]),
            ["1 of 3 embeddings", "NaN or infinity", "full precision"],
        ),
    ],
)
def test_embed_refuses(answer: object, parts: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        embed(Returns(answer), torch.ones(3, 1, 4, 4))
    assert all(part in str(error.value) for part in parts)


def test_embed_refuses_vectors_without_direction() -> None:
    message = "1 of 2 embeddings are zero and have no direction: the network is dead for these images"
    with pytest.raises(ValueError, match=message):
        embed(nn.Flatten(), torch.tensor([[[[1.0, 2.0]]], [[[0.0, 0.0]]]]))


def test_a_point_has_no_distance_to_itself_in_single_precision_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("robustmetric.sphere.wide_dtype", lambda device: torch.float32)
    z = torch.nn.functional.normalize(torch.randn(40, 512, generator=torch.Generator().manual_seed(0)))
    z.requires_grad_()
    dist = cross_distance(z)
    assert torch.equal(dist.diagonal(), torch.zeros(40))
    dist.sum().backward()
    assert z.grad is not None
    assert z.grad.abs().max() < 80
