"""Galleries and queries, and who is nearest, against plain loops: ties, copies, blocks, rounding."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import Gallery, Queries, attack
from robustmetric.gallery import count_mates, count_nearer, nearest
from robustmetric.squares import distances, square_distance
from tests.helpers.crowd import Largest, order

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("chunk", [1, 7, 13, 8192])
@pytest.mark.parametrize("wanted", [1, 3, 12])
def test_nearest_with_ties_against_a_plain_loop(
    wanted: int, chunk: int, gallery: Gallery, queries: Queries, tied: Tensor
) -> None:
    cut = Gallery(gallery.z, gallery.labels, chunk=chunk)
    without = torch.arange(len(tied)) * 2 - 1
    asking = replace(queries, own=without)
    found = nearest(tied, cut, wanted)
    some = nearest(tied, cut, wanted, asking)
    other = nearest(tied, cut, wanted, asking, other_than=queries.labels)
    for i, z in enumerate(tied):
        near = order(z, gallery)
        assert found[i].tolist() == near[:wanted]
        assert some[i].tolist() == [p for p in near if p != without[i]][:wanted]
        near = [p for p in near if p != without[i] and gallery.labels[p] != queries.labels[i]]
        assert other[i].tolist() == near[:wanted]


def test_a_gallery_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"labels must be a tensor of integers of shape \(6,\)"):
        Gallery(torch.eye(6), torch.arange(5))
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1, not 0"):
        Gallery(torch.eye(6), torch.arange(6), chunk=0)
    with pytest.raises(ValueError, match="the gallery has 4 images; give at least 5, for a top 4 besides"):
        Gallery(torch.eye(4), torch.arange(4))


@pytest.mark.parametrize("chunk", [1, 7, 8192])
def test_counting_and_ranks_against_a_plain_loop(
    chunk: int, gallery: Gallery, queries: Queries, tied: Tensor
) -> None:
    cut = Gallery(gallery.z, gallery.labels, chunk=chunk)
    candidate = torch.arange(len(tied)) % len(gallery)
    level = square_distance(tied, gallery.z[candidate])
    nearer, same = count_nearer(tied, level, cut, queries, candidate)
    rank = attack("QA+").rank(tied, level, queries, candidate, cut)  # type: ignore[attr-defined]
    for i, row in enumerate(distances(tied, gallery.z).tolist()):
        left = [d for k, d in enumerate(row) if k not in (int(queries.own[i]), int(candidate[i]))]
        assert int(nearer[i]) == sum(d < level[i] for d in left)
        assert int(same[i]) == sum(d == level[i] for d in left)
        middle = (sum(d < level[i] for d in left) + sum(d == level[i] for d in left) / 2) / len(left)
        assert float(rank[i]) == pytest.approx(100 * middle)


def test_counting_mates_takes_little_memory_for_many_queries() -> None:
    """Neither a number nor a bool for each query and image."""
    size = 20_000
    numbers = torch.arange(size)
    many = Queries(torch.zeros(size, 1), numbers % 10, numbers, numbers % 3)
    cut = Gallery(torch.zeros(size, 1), numbers % 10, cameras=numbers % 3)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        mates = count_mates(many, cut)
    assert largest.size <= 2 * size
    assert mates[:30].tolist() == [
        sum(n % 10 == q % 10 and n % 3 != q % 3 for n in range(size)) for q in range(30)
    ]
