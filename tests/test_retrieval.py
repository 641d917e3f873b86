"""Ranks and scores against plain loops that sort everything, against pytorch-metric-learning, and memory."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor
from torch.nn import functional as F

from robustmetric import retrieval, squares
from robustmetric.retrieval import (
    Ranking,
    distances,
    nmi,
    places_by_keys,
    places_of_one,
    rank,
    retrieval_scores,
)
from robustmetric.squares import keys_of

pytestmark = pytest.mark.kernels


@dataclass
class Plain:
    """What the loop finds for one query."""

    first: int
    precision: float
    precision_at_r: float


def by_loop(
    gallery: Tensor,
    labels: list[int],
    queries: Tensor,
    query_labels: list[int],
    own: list[int],
    cameras: tuple[list[int], list[int]] | None = None,
) -> dict[int, Plain]:
    """Sort the whole gallery for each query, and walk down the ranking; cameras of gallery and queries."""
    found = {}
    for q, label in enumerate(query_labels):
        square = [float(x) for x in distances(queries[q : q + 1], gallery)[0]]
        others = [i for i in range(len(labels)) if i != own[q]]
        if cameras is not None:
            others = [i for i in others if labels[i] != label or cameras[0][i] != cameras[1][q]]
        hits = [labels[i] == label for i in sorted(others, key=lambda i: (square[i], i))]
        if not any(hits):
            continue
        relevant = sum(hits)
        precision = precision_at_r = 0.0
        for place, hit in enumerate(hits, 1):
            if hit:
                precision += sum(hits[:place]) / place / relevant
                precision_at_r += sum(hits[:place]) / place / relevant if place <= relevant else 0
        found[q] = Plain(hits.index(True) + 1, precision, precision_at_r)
    return found


def check(found: Ranking, expected: dict[int, Plain], asked: int) -> None:
    assert found.query.tolist() == list(expected)
    assert found.left_out == asked - len(expected)
    assert found.first.tolist() == [plain.first for plain in expected.values()]
    assert found.average_precision.tolist() == pytest.approx([p.precision for p in expected.values()])
    at_r = [p.precision_at_r for p in expected.values()]
    assert found.average_precision_at_r.tolist() == pytest.approx(at_r)


def same(left: Ranking, right: Ranking) -> bool:
    names = ("query", "first", "average_precision", "average_precision_at_r")
    return left.left_out == right.left_out and all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in names
    )


def smallest(*args: Any, **more: Any) -> int:
    """Return the smallest budget, as the error states it."""
    with pytest.raises(ValueError, match=r"memory=1 bytes cannot rank .* it takes at least \d+") as caught:
        rank(*args, **more, memory=1)
    stated = re.search(r"at least (\d+)", str(caught.value))
    assert stated is not None
    return int(stated[1])


def embeddings(count: int, seed: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "ties":  # few places, so that most distances are equal
        return torch.eye(4)[torch.randint(4, (count,), generator=generator)]
    z = torch.randn(count, 5, generator=generator)
    if kind == "copies":
        z[count // 2 :] = z[torch.randint(count // 2, (count - count // 2,), generator=generator)]
    return 50 * z if kind == "long" else F.normalize(z)


kinds = st.sampled_from(["sphere", "long", "copies", "ties"])
types = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])


cameras_of = st.sampled_from([-3, 0, 1, 7, 10**12])


@given(
    st.lists(st.tuples(st.integers(0, 5), cameras_of), min_size=4, max_size=40),
    st.booleans(),
    st.integers(0, 2**31),
    kinds,
    types,
)
@settings(max_examples=120)
def test_leave_one_out_is_that_of_a_loop(
    images: list[tuple[int, int]], by_camera: bool, seed: int, kind: str, dtype: torch.dtype
) -> None:
    # A class seen by two cameras at least, an image alone in its class, and a class with one camera.
    images = [*images, (images[0][0], images[0][1] + 1), (77, 0), (78, 5), (78, 5)]
    labels, seen = [label for label, _ in images], [camera for _, camera in images]
    z = embeddings(len(labels), seed, kind).to(dtype)
    own = list(range(len(labels)))
    expected = by_loop(z, labels, z, labels, own, (seen, seen) if by_camera else None)
    assert ({*own[-3:]} & {*expected}) == ({*()} if by_camera else {*own[-2:]})
    cameras = torch.tensor(seen) if by_camera else None
    check(rank(z, torch.tensor(labels), cameras=cameras), expected, len(labels))
    if by_camera:
        return
    scores = retrieval_scores(z, torch.tensor(labels), ks=(1, 2, 5), nmi=False)
    assert list(scores) == ["R@1", "R@2", "R@5", "mAP", "mAP@R"]
    for k in (1, 2, 5):
        assert scores[f"R@{k}"] == 100 * sum(p.first <= k for p in expected.values()) / len(expected)
    assert scores["mAP"] == pytest.approx(100 * np.mean([p.precision for p in expected.values()]))
    assert scores["mAP@R"] == pytest.approx(100 * np.mean([p.precision_at_r for p in expected.values()]))


@given(
    st.lists(st.tuples(st.integers(0, 4), cameras_of), min_size=2, max_size=30),
    st.lists(st.tuples(st.integers(0, 6), cameras_of, st.integers(-1, 29)), min_size=1, max_size=30),
    st.booleans(),
    st.integers(0, 2**31),
    kinds,
)
@settings(max_examples=120)
def test_queries_of_a_gallery_are_those_of_a_loop(
    images: list[tuple[int, int]], asked: list[tuple[int, int, int]], by_camera: bool, seed: int, kind: str
) -> None:
    labels, cameras = [label for label, _ in images], [camera for _, camera in images]
    # The first query has an answer, and a camera that took no image of the gallery.
    query_labels = [labels[0], *(label for label, _, _ in asked)]
    query_cameras = [99, *(camera for _, camera, _ in asked)]
    own = [-1, *(min(place, len(labels) - 1) for _, _, place in asked)]
    z = embeddings(len(labels) + len(own), seed, kind)
    gallery, queries = z[: len(labels)], z[len(labels) :]
    more: dict[str, Any] = {
        "cameras": torch.tensor(cameras),
        "query_cameras": torch.tensor(query_cameras),
    }
    for places in (own, [-1] * len(own)):
        found = rank(
            gallery,
            torch.tensor(labels),
            queries,
            torch.tensor(query_labels),
            own=None if max(places) < 0 else torch.tensor(places),
            **(more if by_camera else {}),
        )
        seen = (cameras, query_cameras) if by_camera else None
        check(found, by_loop(gallery, labels, queries, query_labels, places, seen), len(own))


@pytest.mark.parametrize("kind", ["sphere", "copies", "ties"])
@pytest.mark.parametrize("classes", ["equal", "unbalanced", "unbalanced, by camera"])
def test_the_budget_does_not_change_the_ranking(
    kind: str, classes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 300
    labels, seen = torch.arange(count) % 30, torch.arange(count) // 7 % 3
    if classes != "equal":  # half of all images in one class, and some alone in theirs
        labels = torch.where(torch.arange(count) % 2 == 0, 0, torch.arange(count) % 90)
        labels[-4:] = torch.arange(100, 104)
    by_camera = "camera" in classes
    z, own = embeddings(count, 0, kind), torch.arange(count)
    more: dict[str, Any] = {"cameras": seen} if by_camera else {}
    apart: dict[str, Any] = {"own": own, **more} | ({"query_cameras": seen} if by_camera else {})
    whole = rank(z, labels, **more)
    names, cameras = labels.tolist(), (seen.tolist(), seen.tolist()) if by_camera else None
    check(whole, by_loop(z, names, z, names, own.tolist(), cameras), count)
    least = smallest(z, labels, **more)
    for memory in (least, 2 * least, 4 * least):
        assert same(rank(z, labels, **more, memory=memory), whole)
    assert same(rank(z, labels, z.clone(), labels, **apart, memory=least), whole)
    with pytest.raises(ValueError, match=f"memory={least - 1} bytes cannot rank 300 images for 300 queries"):
        rank(z, labels, **more, memory=least - 1)
    monkeypatch.setattr(squares, "_WIDTH", 37)  # nine blocks of the gallery
    assert same(rank(z, labels, **more), whole)

    def by_keys(near: Tensor, row: Tensor, wanted: Tensor, relevant: Tensor, _: Any) -> Tensor:
        return places_by_keys(near[row], wanted)[:, : int(relevant.max())]

    monkeypatch.setattr(retrieval, "places", by_keys)  # what another device does instead
    assert same(rank(z, labels, **more), whole)


def paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which way the squares are computed: each pair of images once, or query by query."""
    seen: list[str] = []
    for name in ("write", "write_mutual"):
        kept = getattr(squares.DistanceKernel, name)

        def noted(*args: Any, kept: Any = kept, name: str = name) -> None:
            seen.append(name)
            kept(*args)

        monkeypatch.setattr(squares.DistanceKernel, name, noted)
    return seen


@pytest.mark.parametrize(
    ("kind", "dtype"), [("sphere", torch.float32), ("copies", torch.float64), ("copies", torch.float16)]
)
def test_each_pair_once_ranks_as_query_by_query(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 700
    z, labels = embeddings(count, 0, kind).to(dtype), torch.arange(count) % 17
    z = torch.cat([z, z.flip(0), 0.3 * z, z * z], dim=1)
    seen = paths(monkeypatch)
    whole = rank(z, labels)
    assert seen == ["write_mutual"]
    seen.clear()
    least = smallest(z, labels, z, labels)
    assert same(rank(z, labels, memory=least), whole)
    # Another tensor of queries may hold anything.
    assert same(rank(z, labels, z.clone(), labels, own=torch.arange(count)), whole)
    assert set(seen) == {"write"}
    for tile in (100, 333):
        monkeypatch.setattr(retrieval, "_TILE", tile)
        assert same(rank(z, labels), whole)
    # The gallery as queries, some with another image of theirs or with none.
    own = torch.arange(count).roll(1)
    own[::3] = -1
    seen.clear()
    alone = rank(z, labels, z, labels, own=own, memory=least)
    assert same(rank(z, labels, z, labels, own=own), alone)
    assert set(seen[:-1]) == {"write"}
    assert seen[-1] == "write_mutual"


@pytest.mark.parametrize("relevant", [8, 12])  # counted, and sorted
@pytest.mark.parametrize("tied", [0, 1, 8, 11])
@pytest.mark.parametrize("before", [True, False])
def test_distances_that_round_alike_go_by_position(relevant: int, tied: int, before: bool) -> None:
    # Relevant images 1, 2, 3, … away; as many others as are tied are nearer than each by less than rounding.
    tied = min(tied, relevant)
    right = torch.arange(1, relevant + 1, dtype=torch.float64)
    wrong = right[:tied] * (1 - 1e-10)
    z = torch.cat([wrong, right] if before else [right, wrong])
    labels = (torch.arange(len(z)) < tied) if before else (torch.arange(len(z)) >= relevant)
    found = rank(z[:, None], labels.long(), torch.zeros(1, 1).double(), torch.tensor([0]))
    place = [k + min(k if before else k - 1, tied) for k in range(1, relevant + 1)]
    assert found.first.tolist() == place[:1]
    expected = sum(k / at for k, at in enumerate(place, 1)) / relevant
    assert found.average_precision.item() == pytest.approx(expected)


@pytest.mark.parametrize("length", [1e-30, 1e-6, 1e6, 1e30])
def test_the_length_of_the_embeddings_does_not_matter(length: float) -> None:
    z, labels = embeddings(60, 0, "copies").double(), torch.arange(60) % 7
    power = 2.0 ** round(float(np.log2(length)))
    assert same(rank(power * z, labels), rank(z, labels))
    if length == 1e30:
        with pytest.raises(
            ValueError, match=r"up to \d[.\d]*e\+30 apart and the square of that is no float32"
        ):
            distances(power * z, power * z)


@pytest.mark.parametrize("kind", ["sphere", "long"])
def test_scores_are_those_of_pytorch_metric_learning(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.arange(300) % 12, torch.arange(100) % 3, torch.tensor([500])])
    z = torch.randn(501, 16, generator=generator)[labels] + torch.randn(401, 16, generator=generator)
    z = z.double() if kind == "long" else F.normalize(z).double()

    def clusters(x: Tensor, count: int, *_: Any) -> Tensor:
        return torch.tensor(KMeans(count, n_init=1, random_state=0).fit_predict(x.numpy()))

    names = ("precision_at_1", "mean_average_precision", "mean_average_precision_at_r", "NMI")
    theirs = AccuracyCalculator(
        include=names,
        k=None,
        knn_func=CustomKNN(LpDistance(normalize_embeddings=False)),
        kmeans_func=clusters,
    )
    for queries in (None, slice(0, 90)):
        if queries is None:
            found = retrieval_scores(z, labels)
            expected = theirs.get_accuracy(z, labels)
        else:
            z_query, label = z[queries] + 0.1, labels[queries]
            found = retrieval_scores(z, labels, queries=z_query, query_labels=label)
            expected = theirs.get_accuracy(z_query, label, z, labels)
            # Theirs clusters the queries, ours the gallery.
            expected["NMI"] = found["NMI"] / 100
        ours = [found[name] / 100 for name in ("R@1", "mAP", "mAP@R", "NMI")]
        assert ours == pytest.approx([expected[name] for name in names], abs=1e-6)


def test_nmi() -> None:
    angle = torch.tensor([0.0, 0.01, 1.5, 1.51, 3.0, 3.01])
    z = torch.stack([angle.cos(), angle.sin()], dim=1)
    assert nmi(z, torch.tensor([5, 5, 2, 2, 9, 9])) == pytest.approx(1)
    mixed = torch.tensor([0, 1, 0, 1, 0, 1])
    assert nmi(z, mixed) < 0.2
    assert retrieval_scores(z, mixed)["NMI"] == nmi(z, mixed) == nmi(z.half().float(), mixed)
    # Fewer places than classes leave clusters empty, without a warning.
    assert nmi(torch.ones(4, 2), torch.tensor([0, 0, 1, 1])) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_nmi_of_few_classes_is_that_of_scikit_learn(dtype: torch.dtype) -> None:
    z, labels = embeddings(200, 0, "sphere").to(dtype), torch.arange(200) % 9
    for seed in (0, 1):
        wide = z.float() if dtype != torch.float64 else z
        clusters = KMeans(9, n_init=1, random_state=seed).fit_predict(wide.numpy())
        assert nmi(z, labels, seed=seed) == float(normalized_mutual_info_score(labels.numpy(), clusters))


def test_nmi_of_many_classes_begins_at_random_images() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3 * 1001) % 1001
    z = torch.randn(1001, 8, generator=generator)[labels]
    z += 0.01 * torch.randn(z.shape, generator=generator)
    clusters = KMeans(1001, n_init=1, random_state=0, init="random", max_iter=20).fit_predict(z.numpy())
    found = nmi(z, labels)
    assert found == float(normalized_mutual_info_score(labels.numpy(), clusters))
    assert 0.9 < found < 1
    assert found == nmi(z, labels) != nmi(z, labels, seed=1)


PEAK = """
import os, re, sys, torch
from pathlib import Path
from robustmetric.retrieval import rank
torch.set_num_threads(1)
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
for case in sys.argv[1:]:
    if os.fork():  # a peak for each case, and one import for all
        os.wait()
        continue
    count, dim, queries, memory, half, seen = (int(x) for x in case.split(","))
    z = torch.empty(count, dim).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % 100
    if half:
        labels[::2] = 100
    few = (z[:queries], labels[:queries]) if queries else ()
    more = {"own": torch.arange(queries)} if queries else {}
    if seen:
        labels //= 50
        cameras = (torch.arange(count) >= 40).long()
        more = {"cameras": cameras, "query_cameras": torch.ones(queries, dtype=torch.long)}
    before = peak()
    rank(z, labels, *few, **more, memory=memory)
    print(1024 * (peak() - before), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_stays_within_the_budget() -> None:
    # Images, dimensions, queries (0 for all), budget, whether half are in one class, and whether a query's
    # own camera took nearly all of its class.
    cases = [
        (20_000, 16, 600, 100 * 10**6, 0, 1),
        (20_000, 64, 600, 60 * 10**6, 0, 0),
        (20_000, 64, 600, 100 * 10**6, 1, 0),
        (5_000, 2048, 600, 10**8, 0, 0),
        (4_000, 8, 0, 60 * 10**6, 0, 0),
        (4_000, 8, 0, 220 * 10**6, 1, 0),
    ]
    options = [",".join(map(str, case)) for case in cases]
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", PEAK, *options], capture_output=True, text=True, timeout=600, check=True
    )
    peaks = [int(line) for line in done.stdout.split()]
    for (*_, budget, _, _), found in zip(cases, peaks, strict=True):
        assert 0 < found < budget, peaks
    # All squares of 4,000 images are 64 MB: they fit only into the last budget.
    assert peaks[-1] > 4 * 4_000**2


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1.5, 2.0]) | st.floats(0, 4, width=32), min_size=2),
    st.data(),
    st.sampled_from([0, 2, 10, 1000]),
)
def test_places_are_those_of_a_sorted_list(values: list[float], data: st.DataObject, few: int) -> None:
    chosen = st.sets(st.integers(0, len(values) - 1), min_size=1)
    ranking = sorted(range(len(values)), key=lambda i: (values[i], i))
    wanted = sorted(data.draw(chosen))
    expected = sorted(ranking.index(i) + 1 for i in wanted)
    near, position = torch.tensor(values).abs(), torch.tensor(wanted)
    keys = keys_of(near[position], position).sort().values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "_FEW", few)
        assert places_of_one(near.numpy(), keys.numpy()).tolist() == expected
    # What another device does instead.
    assert places_by_keys(near[None], keys[None].flip(1))[0].tolist() == expected
