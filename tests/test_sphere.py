"""Distances on the sphere against norms in double precision, their gradients, and what embed refuses."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from robustmetric.sphere import cross_distance, embed, hardness, pair_distance

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


def test_pair_distance_and_hardness_equal_the_loop() -> None:
    a, p, n = sphere(11, 32, 8), sphere(11, 32, 9), sphere(11, 32, 10)
    near, far = loop_distance(a, p).diagonal(), loop_distance(a, n).diagonal()
    torch.testing.assert_close(pair_distance(a, p), near, atol=1e-6, rtol=0)
    torch.testing.assert_close(hardness(a, p, n), near - far, atol=1e-6, rtol=0)


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


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ((torch.ones(3, 2), torch.ones(3)), ["a tuple", "3 images", "(3, D)", "wrap it in a module"]),
        (None, ["None"]),
        (torch.ones(3, 2, 4, 4), ["(3, 2, 4, 4)", "3 images", "(3, D)"]),
        (torch.ones(3), ["(3,)"]),
        (
            torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 0.0]]),
            ["1 of 3 embeddings are zero"],
        ),
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
