"""Rank hinges against their definition, written out and differentiated by torch."""

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import Gallery, Queries
from robustmetric.attacks.margin import rank_hinge

pytestmark = pytest.mark.kernels


def by_loop(z: Tensor, index: list[int], weights: list[float], gallery: Gallery, own: int | None) -> Tensor:
    """One query's hinges, an image at a time; only the query itself and the target are left out."""
    total = z.new_zeros(())
    for place, weight in zip(index, weights, strict=True):
        goal = (z - gallery.z[place]).norm()
        hinges = []
        for k, image in enumerate(gallery.z):
            if own is not None and k in (own, place):
                continue
            gap = goal - (z - image).norm()
            hinges.append((gap if weight > 0 else -gap).clamp_min(0))
        count = len(gallery) - (0 if own is None else 1 + (own >= 0))
        total = total + abs(weight) * torch.stack(hinges).sum() / count
    return total


@pytest.mark.parametrize("weights", [[1.0], [-1.0], [0.5, 0.5], [-0.5, -0.5, 2.0]])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 8192])
def test_value_and_gradient(
    weights: list[float], strict: bool, chunk: int, gallery: Gallery, queries: Queries, moved: Tensor
) -> None:
    cut = Gallery(gallery.z, gallery.labels, chunk=chunk)
    generator = torch.Generator().manual_seed(7)
    index = torch.stack([torch.randperm(20, generator=generator)[: len(weights)] for _ in moved])
    # A target that is the query itself would be left out once, and counted twice.
    index += (index == queries.own[:, None]).long() * 20
    z = moved.clone().requires_grad_()
    found = rank_hinge(z, index, weights, cut, queries if strict else None)
    (slope,) = torch.autograd.grad(found.sum(), z)
    for i, row in enumerate(moved):
        alone = row.clone().requires_grad_()
        wanted = by_loop(alone, index[i].tolist(), weights, gallery, int(queries.own[i]) if strict else None)
        (way,) = torch.autograd.grad(wanted, alone)
        torch.testing.assert_close(found[i], wanted, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(slope[i], way, rtol=1e-6, atol=1e-7)


def test_the_hinge_of_a_target_at_the_query_has_no_pull_of_its_own(gallery: Gallery) -> None:
    z = gallery.z[:3].clone().requires_grad_()
    (slope,) = torch.autograd.grad(rank_hinge(z, torch.arange(3)[:, None], [1.0], gallery, None).sum(), z)
    assert not slope.any()
