"""The samplers against plain loops: which images each may draw, and how often."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare
from sklearn.datasets import load_digits
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.labels import check_classes, check_labels
from robustmetric.triplets import (
    SAMPLERS,
    Batch,
    Distance,
    Hardest,
    Mined,
    Random,
    Sampler,
    Semihard,
    Softhard,
    Triplets,
    find_anchors,
)

pytestmark = pytest.mark.kernels

LETTERS = "RMSDH"
DRAWS = 1500
DIM = 4  # small, so that D is not all but certain of the nearest negative

# --- Plain-loop oracles: distances as lists of lists, one anchor and one image at a time.

Chances = dict[int, dict[tuple[int, int], float]]
K = TypeVar("K", bound=Hashable)


def anchors_and_partners(labels: list[int]) -> dict[int, list[int]]:
    """Each anchor with the images that may be its partner."""
    couples = list(itertools.zip_longest(labels[0::2], labels[1::2]))
    if all(first == second for first, second in couples):
        return {2 * k: [2 * k + 1] for k in range(len(couples))}
    found = {}
    for a in range(len(labels)):
        mates = [i for i in range(len(labels)) if i != a and labels[i] == labels[a]]
        if mates:
            found[a] = mates
    return found


def even(images: list[int]) -> dict[int, float]:
    return {i: 1 / len(images) for i in images}


def weighted(distances: dict[int, float], dim: int) -> dict[int, float]:
    """D's chances: w = d^(2−D)·(1−d²/4)^(−(D−3)/2); a copy of the anchor, or else its opposite, has all."""
    for end, least in ((0.0, 2), (2.0, 3)):  # where w is infinite; the first the more so
        ends = [i for i, d in distances.items() if d == end]
        if ends and dim > least:
            return even(ends)
    w = {}
    for i, d in distances.items():
        w[i] = Decimal(d) ** (2 - dim) if dim != 2 else Decimal(1)
        if dim != 3:
            w[i] *= (1 - Decimal(d) ** 2 / 4) ** (Decimal(3 - dim) / 2)
    total = sum(w.values())
    return {i: float(value / total) for i, value in w.items()}


def oracle(
    letter: str,
    dist: list[list[float]],
    labels: list[int],
    *,
    dim: int,
    margin: float,
    itself: bool = False,
) -> Chances:
    """For each anchor the chance of each (positive, negative) it may get; S may fall back on the anchor."""
    chances: Chances = {}
    for a, partners in anchors_and_partners(labels).items():
        mates = [i for i in range(len(labels)) if i != a and labels[i] == labels[a]]
        others = [i for i in range(len(labels)) if labels[i] != labels[a]]
        row = dist[a]
        chances[a] = {}
        positives = even(partners)
        if letter == "S":
            nearest = min(row[n] for n in others)
            positives = even([p for p in mates if row[p] > nearest] or ([*mates, a] if itself else mates))
        for p, chance in positives.items():
            if letter == "R":
                negatives = even(others)
            elif letter == "M":
                negatives = even([n for n in others if row[p] < row[n] < row[p] + margin] or others)
            elif letter == "S":
                farthest = max(row[i] for i in mates)
                negatives = even([n for n in others if row[n] < farthest] or others)
            elif letter == "D":
                negatives = weighted({n: row[n] for n in others}, dim)
            else:
                first = others[0]
                for n in others:
                    if row[n] < row[first]:
                        first = n
                negatives = {first: 1.0}
            for n, share in negatives.items():
                chances[a][p, n] = chance * share
    return chances


def marginal(chances: Mapping[tuple[int, int], float], side: int) -> dict[int, float]:
    total: dict[int, float] = {}
    for couple, chance in chances.items():
        total[couple[side]] = total.get(couple[side], 0.0) + chance
    return total


# --- Batches.


def of_points(labels: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Distances of random points on the sphere, each class around a centre of its own."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(max(labels) + 1, 4, generator=g)
    z = 0.3 * (centres[labels] + torch.randn(len(labels), 4, generator=g))
    z[:, 0] += 2
    return rm.cross_distance(nn.functional.normalize(z, dim=1)), torch.tensor(labels)


def of_quarters(labels: list[int], seed: int, *, lowest: int = 1) -> tuple[Tensor, Tensor]:
    """Distances that are multiples of 1/4: many ties; with `lowest=0` some images are copies of others."""
    g = torch.Generator().manual_seed(seed)
    n = len(labels)
    half = torch.randint(lowest, 6, (n, n), generator=g).triu(1) / 4
    return half + half.T, torch.tensor(labels)


def of_two(labels: list[int], same: float, other: float) -> tuple[Tensor, Tensor]:
    """One distance within the classes and one between them."""
    y = torch.tensor(labels)
    dist = torch.where(y[:, None] == y, same, other)
    return dist.fill_diagonal_(0.0), y


PAIRS = [0, 0, 1, 1, 2, 2, 3, 3]
SHARED = [0, 0, 1, 1, 0, 0, 2, 2, 1, 1]  # classes 0 and 1 have two pairs each
LOOSE = [0, 1, 0, 2, 1, 0, 3]  # no pairs; classes 2 and 3 have a single image
UNEVEN = [0, 0, 0, 1, 1, 2, 2, 2, 2]

# The seeds were chosen for M and S to have, at most anchors, several images to draw but not all.
BATCHES: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "pairs": lambda: of_points(PAIRS, 57),
    "a class in several pairs": lambda: of_points(SHARED, 97),
    "no order": lambda: of_points(LOOSE, 83),
    "uneven classes": lambda: of_points(UNEVEN, 98),
    "ties in pairs": lambda: of_quarters(SHARED, 23),
    "ties without order": lambda: of_quarters(LOOSE, 98),
    "copies": lambda: of_quarters(UNEVEN, 82, lowest=0),
    "classes far apart": lambda: of_two(SHARED, 0.25, 1.5),
    "classes inside out": lambda: of_two(UNEVEN, 1.5, 0.25),
    "all as far": lambda: of_two(LOOSE, 1.0, 1.0),
}
TIED = ("ties in pairs", "ties without order", "copies")

# Half a unit makes the ends of M's band fall on distances of the batches with ties, without rounding.
MARGIN = {name: 0.5 if name in TIED else 0.2 for name in BATCHES}


def make(letter: str, margin: float = 0.2) -> Sampler:
    return Semihard(margin=margin) if letter == "M" else SAMPLERS[letter]()


def agrees(seen: Mapping[K, int], chances: Mapping[K, float]) -> None:
    """Whether what was drawn may come from these chances: nothing else drawn, and χ² not in its tail."""
    draws = sum(seen.values())
    assert set(seen) <= {key for key, chance in chances.items() if chance > 0}
    rare = [key for key, chance in chances.items() if chance * draws < 5]
    cells = [[key] for key in chances if key not in rare] + ([rare] if rare else [])
    cells.sort(key=lambda keys: sum(chances[key] for key in keys))
    if len(cells) > 1 and draws * sum(chances[key] for key in cells[0]) < 5:
        cells[:2] = [cells[0] + cells[1]]
    found = [sum(seen.get(key, 0) for key in keys) for keys in cells]
    expected = [draws * sum(chances[key] for key in keys) for keys in cells]
    assert min(expected) >= 5
    if len(cells) > 1:
        assert chisquare(found, expected).pvalue > 1e-4


def draw(
    sampler: Sampler, dist: Tensor, labels: Tensor, *, dim: int, seed: int, draws: int = DRAWS
) -> NDArray[np.int64]:
    """The triplets (draws, anchors, 3) of many draws from one generator."""
    g = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        stacked = [sampler(Batch(dist, labels, dim), generator=g).stack() for _ in range(draws)]
    drawn: NDArray[np.int64] = torch.stack(stacked).numpy()
    return drawn


def follows(drawn: NDArray[np.int64], chances: Chances) -> None:
    """Whether many draws agree with the oracle: positives, negatives, both, and one anchor with the next."""
    assert (drawn[:, :, 0] == np.array(list(chances))).all()
    for k, expected in enumerate(chances.values()):
        couples = [(int(p), int(n)) for p, n in drawn[:, k, 1:]]
        agrees(Counter(p for p, _ in couples), marginal(expected, 0))
        agrees(Counter(n for _, n in couples), marginal(expected, 1))
        agrees(Counter(couples), expected)
    listed = list(chances.values())
    for k in range(len(listed) - 1):
        here, there = marginal(listed[k], 1), marginal(listed[k + 1], 1)
        both = {(i, j): here[i] * there[j] for i in here for j in there}
        agrees(Counter((int(i), int(j)) for i, j in drawn[:, k : k + 2, 2]), both)


# --- What the samplers draw.


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("letter", LETTERS)
def test_draws_as_the_table_says(letter: str, batch: str) -> None:
    dist, labels = BATCHES[batch]()
    chances = oracle(letter, dist.tolist(), labels.tolist(), dim=DIM, margin=MARGIN[batch])
    follows(draw(make(letter, MARGIN[batch]), dist, labels, dim=DIM, seed=11), chances)


@pytest.mark.parametrize("batch", BATCHES)
def test_s_may_fall_back_on_the_anchor_by_the_reference(batch: str) -> None:
    dist, labels = BATCHES[batch]()
    chances = oracle("S", dist.tolist(), labels.tolist(), dim=DIM, margin=0.2, itself=True)
    follows(draw(Softhard(itself=True), dist, labels, dim=DIM, seed=11), chances)


def test_batches_reach_what_they_are_for() -> None:
    """The batches do hold ties, copies, and bands and sets that are empty or not."""

    def choices(letter: str, batch: str) -> list[tuple[int, int]]:
        """For each anchor and positive: how many negatives it may get, and how many there are."""
        dist, labels = BATCHES[batch]()
        y = labels.tolist()
        chances = oracle(letter, dist.tolist(), y, dim=DIM, margin=MARGIN[batch])
        return [
            (sum(p == q for q, _ in c), len(y) - y.count(y[a]))
            for a, c in chances.items()
            for p in marginal(c, 0)
        ]

    for batch in ("classes far apart", "classes inside out", "all as far"):  # M's band is empty
        assert all(found == there for found, there in choices("M", batch))
    for batch in ("classes far apart", "all as far"):  # S finds neither harder positives nor harder negatives
        dist, labels = BATCHES[batch]()
        same = labels[:, None] == labels
        assert dist.masked_fill(~same, 0).amax() <= dist.masked_fill(same, torch.inf).amin()
    for batch in list(BATCHES)[:7]:
        for letter in "MS":
            assert any(1 < found < there for found, there in choices(letter, batch))
    for batch in TIED:
        dist, labels = BATCHES[batch]()
        same = labels[:, None] == labels
        of_others = dist.masked_fill(same, torch.inf)
        assert ((of_others == of_others.amin(1, keepdim=True)).sum(1) > 1).any()  # H must take the first
        of_mates = dist.masked_fill(~same, torch.nan).fill_diagonal_(torch.nan)
        for end in (of_mates, of_mates + 0.5):  # negatives at both ends of M's band
            assert (end[:, :, None] == of_others[:, None]).any()
        assert (of_others == of_mates.nan_to_num(0).amax(1, keepdim=True)).any()  # and at the end of S's
    dist, _ = BATCHES["copies"]()
    assert (dist == 0).sum() > len(dist)


HAND = [
    [0.00, 0.50, 0.25, 0.50, 0.75, 1.00],
    [0.50, 0.00, 1.00, 1.00, 1.00, 1.00],
    [0.25, 1.00, 0.00, 0.75, 0.50, 0.25],
    [0.50, 1.00, 0.75, 0.00, 0.50, 0.75],
    [0.75, 1.00, 0.50, 0.50, 0.00, 0.25],
    [1.00, 1.00, 0.25, 0.75, 0.25, 0.00],
]


@pytest.mark.parametrize(
    ("letter", "positives", "negatives"),
    [
        ("R", {0: {1}, 2: {3}, 4: {5}}, {0: {2, 3, 4, 5}, 2: {0, 1, 4, 5}, 4: {0, 1, 2, 3}}),
        # 0: beyond 0.5 and below 1, both ends out; 2: beyond 0.75 and below 1.25; 4: beyond 0.25, below 0.75.
        ("M", {0: {1}, 2: {3}, 4: {5}}, {0: {4}, 2: {1}, 4: {2, 3}}),
        # 0: within 0.5, the end out; 2: within 0.75; 4: nothing within 0.25, so any.
        ("S", {0: {1}, 2: {3}, 4: {5}}, {0: {2}, 2: {0, 4, 5}, 4: {0, 1, 2, 3}}),
        # Of two as near the first: 2 has 0 and 5 at 0.25, 4 has 2 and 3 at 0.5.
        ("H", {0: {1}, 2: {3}, 4: {5}}, {0: {2}, 2: {0}, 4: {2}}),
    ],
)
def test_sets_by_hand(letter: str, positives: dict[int, set[int]], negatives: dict[int, set[int]]) -> None:
    """The oracle and the sampler against sets found by eye."""
    labels = [0, 0, 1, 1, 2, 2]
    chances = oracle(letter, HAND, labels, dim=DIM, margin=0.5)
    assert {a: set(marginal(c, 0)) for a, c in chances.items()} == positives
    assert {a: set(marginal(c, 1)) for a, c in chances.items()} == negatives
    drawn = draw(make(letter, 0.5), torch.tensor(HAND), torch.tensor(labels), dim=DIM, seed=0, draws=100)
    for k, a in enumerate(positives):
        assert set(drawn[:, k, 0]) == {a}
        assert set(drawn[:, k, 1]) == positives[a]
        assert set(drawn[:, k, 2]) == negatives[a]


def test_margin_of_m_is_gamma() -> None:
    assert Semihard().margin == 0.2
    assert Semihard(margin=0.3) != Semihard()
    assert "".join(SAMPLERS) == LETTERS
    assert [kind().name for kind in (Random, Semihard, Softhard, Distance, Hardest)] == list(LETTERS)


@pytest.mark.parametrize("dim", [2, 3, 64, 512])
def test_chances_of_d(dim: int) -> None:
    g = torch.Generator().manual_seed(dim)
    half = (1.3 + 0.2 * torch.rand(6, 6, generator=g)).triu(1)
    dist, labels = half + half.T, torch.tensor([0, 0, 1, 1, 2, 2])
    chances = oracle("D", dist.tolist(), labels.tolist(), dim=dim, margin=0.2)
    follows(draw(Distance(), dist, labels, dim=dim, seed=1), chances)


@pytest.mark.parametrize("ends", [(0.0, 0.0), (np.pi, np.pi), (0.0, np.pi)])
@pytest.mark.parametrize("dim", [2, 3, 64, 512])
def test_chances_of_d_at_the_ends(dim: int, ends: tuple[float, float]) -> None:
    """A copy of the anchor has all the chances (D > 2), failing that its opposite (D > 3); none is NaN."""
    angles = torch.tensor([0.0, 0.5, 1.0, 1.8, 2.0, 1.2, *ends], dtype=torch.float64)
    z = torch.zeros(8, dim, dtype=torch.float64)
    z[:, 0], z[:, 1] = angles.cos(), angles.sin()
    dist, labels = rm.cross_distance(z.float()), torch.tensor(PAIRS)
    assert dist[0, 6:].tolist() == [2.0 if angle else 0.0 for angle in ends]
    drawn = draw(Distance(), dist, labels, dim=dim, seed=2, draws=600)
    expected = oracle("D", dist.tolist(), labels.tolist(), dim=dim, margin=0.2)
    seen = Counter(drawn[:, 0, 2].tolist())
    chances = marginal(expected[0], 1)
    if dim == 2:  # an opposite has no chance at all, and need only be very rare
        assert sum(seen.pop(n, 0) for n in (6, 7) if chances[n] == 0) <= 3
    agrees(seen, chances)
    for a, _, n in drawn.reshape(-1, 3):
        assert labels[a] != labels[n]


# --- Any layout.


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[list[float]]]:
    """A layout with a pair and two classes, and distances in quarters from 0 to 2."""
    some = st.lists(st.integers(0, 3), min_size=3, max_size=11)
    pairs = st.lists(st.integers(0, 3), min_size=2, max_size=6).map(lambda y: [c for c in y for _ in (0, 1)])
    labels = draw(st.one_of(some, pairs).filter(lambda y: len(set(y)) > 1 and max(Counter(y).values()) > 1))
    n = len(labels)
    steps = iter(draw(st.lists(st.integers(0, 8), min_size=n * (n - 1) // 2, max_size=n * (n - 1) // 2)))
    dist = [[0.0] * n for _ in labels]
    for i, j in itertools.combinations(range(n), 2):
        dist[i][j] = dist[j][i] = next(steps) / 4
    return labels, dist


@given(batch=batches(), letter=st.sampled_from(LETTERS), seed=st.integers(0, 2**31), dim=st.integers(2, 600))
@settings(max_examples=300)
def test_any_layout(batch: tuple[list[int], list[list[float]]], letter: str, seed: int, dim: int) -> None:
    labels, dist = batch
    g = torch.Generator().manual_seed(seed)
    drawn = make(letter, 0.5)(Batch(torch.tensor(dist), torch.tensor(labels), dim), generator=g)
    assert isinstance(drawn, Triplets)
    triplets = drawn.stack().tolist()
    assert [a for a, _, _ in triplets] == list(anchors_and_partners(labels))
    assert find_anchors(torch.tensor(labels)).tolist() == list(anchors_and_partners(labels))
    for a, p, n in triplets:
        assert p != a
        assert labels[p] == labels[a]
        assert labels[n] != labels[a]
    sets = "R" if letter == "D" else letter  # D may draw any of another class, some all but never
    allowed = oracle(sets, dist, labels, dim=dim, margin=0.5)
    assert all((p, n) in allowed[a] for a, p, n in triplets)


@pytest.mark.parametrize("seed", range(20))
def test_h_equals_the_loop(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 6, (20,), generator=g).repeat_interleave(2)
    for labels in (pairs, torch.randint(0, 6, (37,), generator=g)):
        for dist, _ in (of_quarters(labels.tolist(), seed, lowest=0), of_points(labels.tolist(), seed)):
            drawn = Hardest()(Batch(dist, labels, DIM), generator=g)
            wanted = oracle("H", dist.tolist(), labels.tolist(), dim=DIM, margin=0.2)
            assert drawn.anchor.tolist() == list(wanted)
            assert drawn.negative.tolist() == [next(iter(c))[1] for c in wanted.values()]
            assert all((p, n) in wanted[a] for a, p, n in drawn.stack().tolist())
            hardness = [dist[a, p].item() - dist[a, n].item() for a, p, n in drawn.stack().tolist()]
            assert drawn.hardness(dist).tolist() == pytest.approx(hardness, abs=1e-6)


@pytest.mark.parametrize("number", [0.0, 0.25, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("letter", LETTERS)
def test_random_numbers_at_the_ends(letter: str, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least and the greatest random number, and those between two images, still draw an allowed one."""
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.full(size, number, dtype=torch.float64))
    for name, batch in BATCHES.items():
        dist, labels = batch()
        for order in (torch.arange(len(labels)), torch.arange(len(labels)).flip(0)):
            d, y = dist[order][:, order], labels[order]
            drawn = make(letter, MARGIN[name])(Batch(d, y, DIM), generator=torch.Generator())
            sets = "R" if letter == "D" else letter  # D may draw any of another class, some all but never
            allowed = oracle(sets, d.tolist(), y.tolist(), dim=DIM, margin=MARGIN[name])
            assert all((p, n) in allowed[a] for a, p, n in drawn.stack().tolist())


@pytest.mark.parametrize("labels", [SHARED, LOOSE, UNEVEN])
@pytest.mark.parametrize("letter", LETTERS)
def test_only_the_generator_decides(letter: str, labels: list[int]) -> None:
    """The same seed draws the same, another something else, and torch's own generator stays as it was."""
    dist, y = of_points(labels, 8)
    before = torch.get_rng_state()

    def drawn(seed: int) -> list[list[int]]:
        g = torch.Generator().manual_seed(seed)
        rows = [make(letter)(Batch(dist, y, DIM), generator=g).stack() for _ in range(20)]
        listed: list[list[int]] = torch.cat(rows).tolist()
        return listed

    first = drawn(0)
    torch.rand(3, generator=torch.Generator().manual_seed(5))
    assert drawn(0) == first
    if not (letter == "H" and labels == SHARED):
        assert drawn(1) != first
    assert torch.equal(torch.get_rng_state(), before)


def test_labels_of_any_integer_type() -> None:
    dist, labels = of_points(SHARED, 9)

    def drawn(labels: Tensor) -> Tensor:
        return Softhard()(Batch(dist, labels, DIM), generator=torch.Generator().manual_seed(0)).stack()

    for kind in (torch.int32, torch.uint8, torch.int16):
        assert torch.equal(drawn(labels.to(kind)), drawn(labels))
    assert torch.equal(drawn(torch.tensor([-5, 10**12, 7, 3])[labels]), drawn(labels))


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (torch.tensor([True, False]), "torch.bool"),
        (torch.tensor([1.0, 0.0]), "torch.float32"),
        (torch.tensor([1j, 0]), "torch.complex64"),
        (np.array([1, 0]), "ndarray"),
        ([1, 0], "list"),
    ],
)
def test_labels_that_are_no_integers_are_refused(labels: Tensor, found: str) -> None:
    message = rf"^labels must be a tensor of integers, not {found}: use torch\.as_tensor\(labels\)\.long\(\)$"
    with pytest.raises(ValueError, match=message):
        check_labels(labels, 2)
    check_labels(torch.as_tensor(labels).real.long(), 2)


# --- Table 1: how hard the triplets are on average, and how much that varies.


def mean_hardness(z: Tensor, labels: NDArray[np.int64], *, batches: int = 60) -> dict[str, float]:
    """E[H] of each sampler over batches of 56 pairs: an anchor and another image of its class."""
    rng, g = np.random.default_rng(0), torch.Generator().manual_seed(0)
    mates = {c: np.flatnonzero(labels == c) for c in np.unique(labels)}
    total = dict.fromkeys(LETTERS, 0.0)
    for _ in range(batches):
        batch: list[int] = []
        for a in rng.permutation(len(labels))[:56]:
            same = mates[labels[a]]
            batch += [int(a), int(rng.choice(same[same != a]))]
        seen = Batch.of(z[batch], torch.tensor(labels[batch]))
        for letter in LETTERS:
            drawn = SAMPLERS[letter]()(seen, generator=g)
            total[letter] += drawn.hardness(seen.distances).mean().item() / batches
    return total


def in_order(e: Mapping[str, float]) -> None:
    """R < M < S < D ≈ H."""
    assert e["R"] < e["M"] < e["S"] < e["H"]
    assert abs(e["D"] - e["H"]) < 0.1 * (e["H"] - e["S"])


def test_order_of_table_1(golden: dict[str, NDArray[np.generic]], golden_network: nn.Sequential) -> None:
    with torch.no_grad():
        z = rm.embed(golden_network.eval(), torch.tensor(golden["gallery/images"]) / 255)
    in_order(mean_hardness(z, golden["gallery/labels"].astype(np.int64)))


def test_order_of_table_1_untrained(golden: dict[str, NDArray[np.generic]]) -> None:
    """The mean over four networks: before training R and M are so near that some have them reversed."""
    images, labels = torch.tensor(golden["gallery/images"]) / 255, golden["gallery/labels"].astype(np.int64)
    e = dict.fromkeys(LETTERS, 0.0)
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            z = rm.embed(rm.model("c2f2"), images)
        for letter, mean in mean_hardness(z, labels, batches=20).items():
            e[letter] += mean / 4
    in_order(e)


class Moments(NamedTuple):
    """Of hardness: mean, variance and the latter's error, and how often the anchor is its own positive."""

    mean: float
    variance: float
    error: float
    alone: float


def moments(batches: list[Batch], *, itself: bool) -> Moments:
    """What S's triplets must have, by a plain loop over all that it may draw."""
    cells = []  # for each anchor: chance, hardness, and whether it is its own positive
    for batch in batches:
        dist = batch.distances.tolist()
        chances = oracle("S", dist, batch.labels.tolist(), dim=batch.dim, margin=0.2, itself=itself)
        for a, couples in chances.items():
            cells.append([(c, dist[a][p] - dist[a][n], float(a == p)) for (p, n), c in couples.items()])
    count = len(cells)
    mean = sum(c * h for cell in cells for c, h, _ in cell) / count
    squares = [sum(c * (h - mean) ** 2 for c, h, _ in cell) for cell in cells]
    fourth = [sum(c * (h - mean) ** 4 for c, h, _ in cell) for cell in cells]
    # Anchors draw independently: the variance of a mean of n is the sum of theirs over n².
    own = sum(f - s**2 for f, s in zip(fourth, squares, strict=True))
    alone = sum(c * same for cell in cells for c, _, same in cell) / count
    return Moments(mean, sum(squares) / count, math.sqrt(own) / count, alone)


@pytest.mark.slow
def test_s_varies_from_triplet_to_triplet_as_the_reference_s_does(
    golden: dict[str, NDArray[np.generic]],
) -> None:
    """400 classes of real images: each an image of Fashion-MNIST, of which a batch has two views."""
    images = torch.tensor(golden["gallery/images"]) / 255
    shifts = list(itertools.product(range(-2, 3), repeat=2))
    torch.manual_seed(0)
    model, g = rm.model("c2f2"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        z = torch.stack([rm.embed(model, images.roll(shift, (2, 3))) for shift in shifts], dim=1)
    batches = []
    for _ in range(20):
        classes = torch.randperm(len(z), generator=g)[:56]
        views = torch.stack([torch.randperm(len(shifts), generator=g)[:2] for _ in classes])
        pairs = z[classes[:, None], views].flatten(0, 1)
        batches.append(Batch.of(pairs, classes.repeat_interleave(2)))
    expected = {itself: moments(batches, itself=itself) for itself in (False, True)}
    for itself, wanted in expected.items():
        mined = [Mined.of(batch, Softhard(itself=itself), g) for batch in batches]
        found = torch.cat([m.hardness for m in mined]).double()
        assert abs(float(found.var(correction=0)) - wanted.variance) < 5 * wanted.error
        alone = torch.cat([m.triplets.anchor == m.triplets.positive for m in mined]).double()
        # Each is a coin at the most: the error of their mean is at most 1/(2√n).
        assert abs(float(alone.mean()) - wanted.alone) <= (5 * 0.5 / math.sqrt(len(alone)) if itself else 0)
    assert expected[True].alone > 0.1
    # By more than chance could make of it: the reference's variance is another one.
    apart = expected[True].variance - expected[False].variance
    assert apart > 10 * math.hypot(expected[True].error, expected[False].error)


def test_order_of_table_1_on_digits() -> None:
    """M comes after R as soon as a few steps have spread the classes over more than M's band.

    On digits an untrained network puts all images within about γ. M then is R without the negatives that are
    nearer than the partner, hence easier than R: the rest of the order holds already.
    """
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    labels: NDArray[np.int64] = digits.target.astype(np.int64)
    torch.manual_seed(0)
    model = rm.model("c2f2", size=8)
    with torch.no_grad():
        e = mean_hardness(rm.embed(model, images), labels)
    assert e["R"] < e["S"] < e["H"]
    assert e["M"] < e["S"]
    assert abs(e["D"] - e["H"]) < 0.1 * (e["H"] - e["S"])

    optimizer, g = torch.optim.Adam(model.parameters(), lr=1e-3), torch.Generator().manual_seed(1)
    for _ in range(5):
        batch = torch.randperm(len(images), generator=g)[:112]
        z = rm.embed(model, images[batch])
        drawn = Random()(Batch.of(z, torch.tensor(labels)[batch]), generator=g)
        loss = (rm.hardness(z[drawn.anchor], z[drawn.positive], z[drawn.negative]) + 0.2).clamp_min(0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        in_order(mean_hardness(rm.embed(model, images), labels))


# --- Errors.


def check(labels: Tensor, count: int) -> None:
    check_labels(labels, count)
    check_classes(labels)


@pytest.mark.parametrize(
    ("labels", "count", "parts"),
    [
        (torch.tensor([0.0, 0.0, 1.0]), 3, ["integers", "torch.float32", ".long()"]),
        (torch.tensor([0j, 0j, 1j]), 3, ["integers", "torch.complex64", ".long()"]),
        ([0, 0, 1], 3, ["integers", "list", "torch.as_tensor(labels).long()"]),
        (torch.tensor([0, 0, 1]), 4, ["(3,)", "4 images", "shape (4,)", "one class for each image"]),
        (torch.tensor([[0], [0], [1]]), 3, ["(3, 1)", "3 images", "shape (3,)", "one class for each image"]),
        (torch.tensor([7, 7, 7, 7]), 4, ["all 4 images", "class 7", "negative", "two classes"]),
        (torch.tensor([3, 1, 2, 0]), 4, ["no two of the 4 images", "positive", "two images of some class"]),
        (torch.tensor([5]), 1, ["all 1 images", "class 5"]),
        (torch.tensor([], dtype=torch.long), 0, ["empty", "at least two images of one class"]),
    ],
)
def test_labels_refused(labels: Tensor, count: int, parts: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        check(labels, count)
    assert all(part in str(error.value) for part in parts)
    with pytest.raises(ValueError, match=re.escape(str(error.value))):  # a batch says the same
        Batch.of(torch.zeros(count, DIM), labels)


def test_a_batch_of_embeddings() -> None:
    z = nn.functional.normalize(torch.randn(8, 5), dim=1).requires_grad_()
    batch = Batch.of(z, torch.tensor(PAIRS))
    assert torch.equal(batch.distances, rm.cross_distance(z.detach()))
    assert not batch.distances.requires_grad
    assert batch.dim == 5
    mined = Mined.of(batch, Hardest(), torch.Generator())
    for (a, p, n), hardness in zip(mined.triplets.stack().tolist(), mined.hardness.tolist(), strict=True):
        assert hardness == pytest.approx((z[a] - z[p]).norm().item() - (z[a] - z[n]).norm().item(), abs=1e-6)


def test_labels_accepted() -> None:
    """The smallest batch there is: a pair and one of another class."""
    labels = torch.tensor([1, 0, 1])
    check_labels(labels, 3)
    for letter in LETTERS:
        drawn = make(letter)(Batch(torch.ones(3, 3), labels, DIM), generator=torch.Generator())
        assert drawn.stack().tolist() == [[0, 2, 1], [2, 0, 1]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_embeddings_must_be_finite(value: float) -> None:
    z = torch.eye(8)
    z[0, 3] = value
    with pytest.raises(ValueError, match="embeddings hold NaN or infinity"):
        Batch.of(z, torch.tensor(PAIRS))


@pytest.mark.parametrize("margin", [0, -0.2, 2.5, float("nan"), "0.2", True])
def test_a_margin_must_fit_the_sphere(margin: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"margin must be in (0, 2], not {margin!r}")):
        Semihard(margin=margin)


# --- A sampler of one's own: what it must return.


def t(*positions: float) -> Tensor:
    return torch.tensor(positions)


class Mine(Sampler):
    """Returns what it was made with."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        drawn: Triplets = self.returned
        return drawn


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "must be a Triplets, not None"),
        ((t(0), t(1), t(2)), "must be a Triplets, not a tuple"),
        (Triplets([0], t(1), t(2)), "anchor: a list"),  # type: ignore[arg-type]
        (Triplets(t(0), t(1.0), t(2)), "positive: float32 of shape (1,)"),
        (Triplets(t(0)[0], t(1), t(2)), "anchor: int64 of shape ()"),
        (Triplets(t(0)[:0], t(1)[:0], t(2)[:0]), "T at least 1"),
        (
            Triplets(t(0, 2), t(1, 3), t(2)),
            "negative: int64 of shape (1,); each must be int64 of one shape (T,)",
        ),
        (Triplets(t(0), t(1), t(8)), "positions from 0 to 8; they must be from 0 to 7"),
        (Triplets(t(-1), t(1), t(2)), "positions from -1 to 2"),
        (Triplets(t(0, 2), t(1, 2), t(2, 0)), "an anchor as its own positive; it must be another image: tri"),
        (Triplets(t(0), t(3), t(2)), "a positive of another class than its anchor"),
        (
            Triplets(t(0, 4), t(1, 5), t(2, 5)),
            "a negative of its anchor's class; it must be of another class: triplet 1 is [4, 5, 5]",
        ),
    ],
)
def test_a_sampler_must_return_triplets_of_its_batch(returned: Any, says: str) -> None:
    with pytest.raises(rm.UserError, match=r"Mine\.draw") as error:
        Mine(returned)(Batch(*of_points(PAIRS, 1), DIM), generator=torch.Generator())
    assert says in str(error.value)


def test_an_anchor_is_its_own_positive_only_if_the_sampler_says_that_it_may() -> None:
    batch, sampler = Batch.of(torch.eye(4), torch.tensor([0, 0, 1, 1])), Mine(Triplets(t(0), t(0), t(2)))
    with pytest.raises(ValueError, match=r"Mine\.draw returned an anchor as its own positive"):
        sampler(batch, generator=torch.Generator())
    sampler.itself = True
    assert sampler(batch, generator=torch.Generator()).positive.tolist() == [0]
    with pytest.raises(ValueError, match="itself must be a bool, not 1"):
        Softhard(itself=1)  # type: ignore[arg-type]


def test_a_sampler_must_implement_draw() -> None:
    with pytest.raises(rm.UserError, match=r"Before\.draw takes .*must take \(self, batch, \*, generator"):

        class Before(Sampler):
            def draw(self, dist: Tensor, labels: Tensor) -> Triplets:  # type: ignore[override]
                return Triplets(dist, dist, dist)

    class Silent(Sampler):
        pass

    with pytest.raises(rm.UserError, match="Silent must implement draw"):
        Silent()(Batch(*of_points(PAIRS, 1), DIM), generator=torch.Generator())
