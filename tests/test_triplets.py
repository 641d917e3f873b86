"""The samplers against plain loops: which images each may draw, and how often."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.triplets import (
    SAMPLERS,
    Batch,
    Distance,
    Hardest,
    Mined,
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


def test_order_of_table_1(golden: dict[str, NDArray[np.generic]], golden_network: nn.Sequential) -> None:
    with torch.no_grad():
        z = rm.embed(golden_network.eval(), torch.tensor(golden["gallery/images"]) / 255)
    e = mean_hardness(z, golden["gallery/labels"].astype(np.int64))
    assert e["R"] < e["M"] < e["S"] < e["H"]
    assert abs(e["D"] - e["H"]) < 0.1 * (e["H"] - e["S"])


# --- Errors.


@pytest.mark.parametrize(
    ("labels", "count", "says"),
    [
        (torch.tensor([0.0, 0.0, 1.0]), 3, "integers of shape (3,), .* not float32"),
        (torch.tensor([True, False]), 2, "integers of shape (2,), .* not bool"),
        ([0, 0, 1], 3, "integers of shape (3,), .* not a list"),
        (torch.tensor([0, 0, 1]), 4, "integers of shape (4,), .* not int64 of shape (3,)"),
        (torch.tensor([7, 7, 7, 7]), 4, "4 images of one class give no triplet"),
        (torch.tensor([3, 1, 2, 0]), 4, "4 images of as many classes give no triplet"),
        (torch.tensor([], dtype=torch.long), 0, "the batch is empty"),
    ],
)
def test_labels_refused(labels: Tensor, count: int, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        Batch.of(torch.zeros(count, DIM), labels)


def test_embeddings_and_margins_refused() -> None:
    with pytest.raises(ValueError, match="embeddings hold NaN or infinity"):
        Batch.of(torch.full((8, 8), torch.inf), torch.tensor(PAIRS))
    with pytest.raises(ValueError, match=r"margin must be in \(0, 2\], not 2.5"):
        Semihard(margin=2.5)


def test_a_batch_of_embeddings() -> None:
    z = nn.functional.normalize(torch.randn(8, 5), dim=1).requires_grad_()
    batch = Batch.of(z, torch.tensor(PAIRS))
    assert torch.equal(batch.distances, rm.cross_distance(z.detach()))
    assert not batch.distances.requires_grad
    assert batch.dim == 5
    mined = Mined.of(batch, Hardest(), torch.Generator())
    for (a, p, n), hardness in zip(mined.triplets.stack().tolist(), mined.hardness.tolist(), strict=True):
        assert hardness == pytest.approx((z[a] - z[p]).norm().item() - (z[a] - z[n]).norm().item(), abs=1e-6)


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
