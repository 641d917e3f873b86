"""What each attack aims at: targets against plain loops, whatever the batch."""

from itertools import pairwise, permutations

import pytest
import torch
from scipy import stats
from torch import Tensor

from robustmetric.attacks import ATTACKS, Attack, Draws, Gallery, Queries, attack
from tests.helpers.crowd import order
from tests.helpers.goals import GOALS

pytestmark = pytest.mark.kernels

EVERY = [
    *dict.fromkeys([*ATTACKS, *GOALS]),
    "CA+(w=3)",
    "CA-(w=3)",
    "QA+(m=3)",
    "QA-(m=3)",
    "SP-QA+(m=3, keep=2)",
]
RANDOM = ["CA+", "CA+(w=3)", "QA+", "QA+(m=3)", "TMA", "SP-QA+", "SP-QA+(m=3)"]
NEAR = ["CA-", "CA-(w=3)", "QA-", "QA-(m=3)", "SP-QA-", "SP-QA-(m=3)"]


def count(name: str) -> int:
    return 3 if "=3" in name else 1


def select(which: Attack, queries: Queries, gallery: Gallery, seed: int = 0) -> Tensor:
    return which.select(queries, gallery, draws=Draws(seed, "test", range(len(queries))))


def many(one: Queries, copies: int) -> Queries:
    """The first query, so many times over."""
    return one[torch.zeros(copies, dtype=torch.long)]


# Targets, strict


@pytest.mark.parametrize("name", RANDOM)
def test_strict_targets_at_random_are_distinct_and_never_the_query(
    name: str, gallery: Gallery, queries: Queries
) -> None:
    which = attack(name)
    seen: set[int] = set()
    for seed in range(30):
        for i, row in enumerate(select(which, queries, gallery, seed)[:, : count(name)].tolist()):
            assert len(set(row)) == count(name)
            assert int(queries.own[i]) not in row
            assert all(0 <= position < 40 for position in row)
            seen.update(row)
    assert seen == set(range(40))


@pytest.mark.parametrize(
    ("name", "own"), [("CA+(w=2)", -1), ("QA+(m=2)", 0), ("CA+(w=2)", 3), ("QA+(m=2)", 5)]
)
def test_strict_targets_at_random_are_uniform(name: str, own: int) -> None:
    cut = Gallery(torch.eye(6), torch.tensor([0, 0, 1, 1, 2, 2]))
    one = Queries(torch.eye(6)[:1], torch.tensor([0]), torch.tensor([own]))
    found = [tuple(row) for row in select(attack(name), many(one, 4000), cut).tolist()]
    allowed = list(permutations([p for p in range(6) if p != own], 2))
    counts = [found.count(p) for p in allowed]
    assert sum(counts) == 4000
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize(("size", "share"), [(100, 1), (101, 2), (400, 4)])
def test_strict_targets_nearby_are_drawn_from_the_nearest_1_percent(name: str, size: int, share: int) -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.nn.functional.normalize(torch.randn(size, 5, generator=generator, dtype=torch.float64))
    z[2] = z[1]  # a copy of the query
    cut = Gallery(z, torch.arange(size) % 3)
    wanted = count(name)
    pool_size = max(wanted, share)
    for own in (1, -1):
        one = Queries(z[1:2], torch.tensor([0]), torch.tensor([own]))
        found = select(attack(name), many(one, 900), cut)[:, :wanted]
        pool = [p for p in order(z[1], cut) if p != own][:pool_size]
        assert pool[0] == (2 if own == 1 else 1)
        rows = [tuple(row) for row in found.tolist()]
        counts = [rows.count(p) for p in permutations(pool, wanted)]
        assert sum(counts) == 900
        assert len(counts) == 1 or stats.chisquare(counts).pvalue > 1e-3


def test_strict_gtm_aims_at_the_nearest_image_of_another_class(gallery: Gallery, queries: Queries) -> None:
    found = select(attack("GTM"), queries, gallery)
    assert found.shape == (18, 1)
    other_top = 0
    for i, z in enumerate(queries.z):
        near = [p for p in order(z, gallery) if p != queries.own[i]]
        wanted = next(p for p in near if gallery.labels[p] != queries.labels[i])
        assert found[i].item() == wanted
        other_top += wanted != near[0]
    assert other_top > 3  # else the top-1 would do
    # Copies across classes: each is the other's target.
    assert found[2].item() == 23
    assert found[3].item() == 22


def test_strict_gtt_aims_at_the_first_image_but_the_query_itself(gallery: Gallery, queries: Queries) -> None:
    found = select(attack("GTT"), queries, gallery)[:, 0].tolist()
    for i, z in enumerate(queries.z):
        assert found[i] == next(p for p in order(z, gallery) if p != queries.own[i])
    # A query is left out by its index: its copy is the first, and for one outside so is its image.
    assert found[:6] == [21, 20, 23, 22, 25, 24]
    assert found[12:14] == [3, 24]


@pytest.mark.parametrize("sign", "+-")
@pytest.mark.parametrize("protocol", ["strict", "reference"])
@pytest.mark.parametrize(("size", "m", "keep"), [(8, 1, 5), (40, 30, 8), (300, 3, 5)])
def test_what_sp_qa_moves_is_never_what_it_keeps(
    sign: str, protocol: str, size: int, m: int, keep: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    z = torch.nn.functional.normalize(torch.randn(size, 4, generator=generator, dtype=torch.float64))
    cut, own = Gallery(z, torch.arange(size) % 2), torch.arange(8)
    asked = Queries(z[:8], cut.labels[:8], own.where(own % 3 > 0, -1) if protocol == "strict" else own)
    for seed in range(4):
        found = select(attack(f"SP-QA{sign}", protocol=protocol, m=m, keep=keep), asked, cut, seed)
        for i, row in enumerate(found.tolist()):
            others = [p for p in order(z[i], cut) if p != asked.own[i] and p not in row[:m]]
            assert row[m:] == others[:keep]


# Targets, as the reference has them


@pytest.mark.parametrize("name", ["CA+", "QA+", "TMA"])
def test_reference_targets_at_random_may_be_the_query(name: str) -> None:
    cut = Gallery(torch.eye(6), torch.tensor([0, 0, 1, 1, 2, 2]))
    one = Queries(torch.eye(6)[3:4], torch.tensor([1]), torch.tensor([3]))
    found = select(attack(name, protocol="reference"), many(one, 3000), cut)[:, 0]
    assert stats.chisquare(found.bincount(minlength=6).numpy()).pvalue > 1e-3


def test_reference_takes_the_image_nearest_to_the_benign_query_for_the_query(
    gallery: Gallery, queries: Queries
) -> None:
    gtt = select(attack("GTT", protocol="reference"), queries, gallery)[:, 0].tolist()
    near = select(attack("CA-(w=3)", protocol="reference"), queries, gallery).tolist()
    kept = select(attack("SP-QA+", protocol="reference"), queries, gallery).tolist()
    for i, z in enumerate(queries.z):
        ranking = order(z, gallery)
        assert gtt[i] == ranking[1]
        assert set(near[i]) <= set(ranking[1:4])
        assert kept[i][1:] == [p for p in ranking[1:] if p != kept[i][0]][:5]
    # The query 21 has its copy 20 for itself, and aims at itself; so does 39, for 24 and 25 come first.
    assert gtt[1] == 21
    assert gtt[5] == 25


def test_reference_gtm_takes_a_position_among_other_classes_for_one_in_the_gallery(
    gallery: Gallery, queries: Queries
) -> None:
    found = select(attack("GTM", protocol="reference"), queries, gallery)[:, 0].tolist()
    for i, z in enumerate(queries.z):
        ranking = order(z, gallery)
        first = gallery.labels[ranking[1]]
        left = [p for p in range(40) if gallery.labels[p] != first]
        wanted = next(p for p in ranking[1:] if gallery.labels[p] != first)
        assert found[i] == left.index(wanted)


# Independence


@pytest.mark.parametrize(
    "which",
    [*map(attack, EVERY), *(attack(name, protocol="reference") for name in [*RANDOM, *NEAR, "GTM", "GTT"])],
)
def test_a_target_depends_on_nothing_but_the_query(which: Attack, gallery: Gallery, queries: Queries) -> None:
    numbers = torch.arange(100, 118)

    def found(rows: Tensor, chunk: int) -> Tensor:
        cut = Gallery(gallery.z, gallery.labels, chunk=chunk)
        return which.select(queries[rows], cut, draws=Draws(7, which.name, numbers[rows].tolist()))

    whole = found(torch.arange(18), 8192)
    assert torch.equal(found(torch.arange(18), 7), whole)
    mixed = torch.randperm(18, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found(mixed, 8192), whole[mixed])
    for begin, end in pairwise([0, 1, 12, 18]):
        rows = torch.arange(begin, end)
        assert torch.equal(found(rows, 7), whole[rows])


# What cannot be


@pytest.mark.parametrize(("name", "letter"), [("CA+", "w"), ("CA-", "w"), ("QA+", "m"), ("QA-", "m")])
@pytest.mark.parametrize("protocol", ["strict", "reference"])
def test_more_targets_than_images_are_refused(
    name: str, letter: str, protocol: str, gallery: Gallery, queries: Queries
) -> None:
    most = attack(name, protocol=protocol, **{letter: 38})
    assert select(most, queries, gallery).shape == (18, 38)
    message = f"{letter} is 39, too many for a gallery of 40 images; give at most 38"
    with pytest.raises(ValueError, match=message):
        select(attack(name, protocol=protocol, **{letter: 39}), queries, gallery)


def test_more_images_to_keep_and_to_lower_than_there_are_are_refused(
    gallery: Gallery, queries: Queries
) -> None:
    assert select(attack("SP-QA-(m=30, keep=8)"), queries, gallery).shape == (18, 38)
    message = "m is 31 and keep is 8, too many for a gallery of 40 images; give at most 38"
    with pytest.raises(ValueError, match=message):
        select(attack("SP-QA-(m=31, keep=8)"), queries, gallery)
    attack("promote", k=38).check_fits(40)
    with pytest.raises(ValueError, match="k is 38, too many for a gallery of 39 images; give at most 37"):
        attack("promote", k=38).check_fits(39)
