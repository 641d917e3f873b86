"""Galleries and queries, and who is nearest, against plain loops: ties, copies, blocks, rounding."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import Gallery, Queries, Target, attack
from robustmetric.gallery import away_from, count_nearer, nearest
from robustmetric.sphere import ROUNDING, at, pair_distance
from robustmetric.squares import distances, square_distance

pytestmark = pytest.mark.kernels


def order(z: Tensor, gallery: Gallery) -> list[int]:
    """All positions, nearest first, ties by position: a plain loop."""
    far, here = [], z.tolist()
    for position, there in enumerate(gallery.z.tolist()):
        square = 0.0
        for a, b in zip(here, there, strict=True):
            square += (a - b) ** 2
        far.append((round(square, 9), position))
    return [position for _, position in sorted(far)]


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


@pytest.mark.parametrize("chunk", [1, 3, 7, 13, 8192])
@pytest.mark.parametrize("apart", [1e-2, 1e-4, 1e-5])
def test_nearest_finds_copies_in_their_order_however_near_they_are(apart: float, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(40, 16, generator=generator, dtype=torch.float64))
    z[[5, 38]] = z[11].clone()
    cut = Gallery(z, torch.zeros(40, dtype=torch.long), chunk=chunk)
    noise = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    near = torch.nn.functional.normalize(z[11] + apart * torch.nn.functional.normalize(noise))
    assert nearest(near, cut, 3).tolist() == [[5, 11, 38]] * 64


def test_a_sample_is_every_nth_image_with_its_label_and_camera() -> None:
    numbers = torch.arange(3100)
    gallery = Gallery(torch.eye(7)[numbers % 7], numbers % 5, cameras=numbers % 11)
    sample = gallery.sample
    kept = [n for n in range(3100) if n % 3 == 0]
    assert sample.z.equal(torch.stack([gallery.z[n] for n in kept]))
    assert sample.labels.tolist() == [n % 5 for n in kept]
    assert sample.cameras is not None
    assert sample.cameras.tolist() == [n % 11 for n in kept]


def test_rows_of_queries_and_targets() -> None:
    queries = Queries(torch.eye(5), torch.arange(5) + 10, torch.tensor([4, 3, 2, 1, -1]))
    some = queries[torch.tensor([3, 0])]
    assert len(some) == 2
    assert torch.equal(some.z, torch.eye(5)[[3, 0]])
    assert some.labels.tolist() == [13, 10]
    assert some.own.tolist() == [1, 4]
    target = Target(torch.arange(6).view(3, 2), torch.arange(12).view(3, 2, 2))
    part = target[torch.tensor([2])]
    assert part.index.tolist() == [[4, 5]]
    assert part.extra is not None
    assert part.extra.tolist() == [[[8, 9], [10, 11]]]
    assert Target(torch.zeros(3, 0))[torch.tensor([1])].extra is None


def test_a_gallery_is_cut_into_blocks_that_cover_it() -> None:
    for chunk in (1, 3, 5, 6, 100):
        cut = Gallery(torch.eye(6), torch.arange(6), chunk=chunk)
        blocks = list(cut.blocks())
        assert [p for b in blocks for p in range(b.start, b.stop)] == list(range(6))
        assert all(b.stop - b.start <= chunk for b in blocks)
        torch.testing.assert_close(cut.square, torch.ones(6))


def test_a_gallery_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"labels have shape \(5,\) for 6 images"):
        Gallery(torch.eye(6), torch.arange(5))
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1, not 0"):
        Gallery(torch.eye(6), torch.arange(6), chunk=0)


def test_a_gallery_of_four_is_refused() -> None:
    with pytest.raises(ValueError, match="the gallery has 4 images; give at least 5, for a top 4 besides"):
        Gallery(torch.eye(4), torch.arange(4))
    assert len(Gallery(torch.eye(5), torch.arange(5))) == 5


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


def test_one_tolerance_tells_what_is_at_its_place() -> None:
    place = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for off, there in ((0.0, True), (0.9 * ROUNDING, True), (1.1 * ROUNDING, False)):
        z = (place + torch.tensor([0.0, off])).requires_grad_()
        assert bool(at(z, place)) is there
        pair_distance(away_from(z, place), place).backward()
        assert z.grad is not None
        assert bool(z.grad.any()) is not there
