"""Pairs: all that there are, drawn evenly and none twice, and those that choose apart from those judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from robustmetric.errors import UserError
from robustmetric.evaluation import VerifyPlan
from robustmetric.evaluation.data import Data
from robustmetric.evaluation.verify_pairs import CHOOSE, JUDGED, Pairs, Pool, Split, draw, split_pairs


def every_pair(pool: Pool, same: bool) -> set[tuple[int, int]]:
    """All pairs by two loops, each two images once."""
    found = set()
    for a in pool.first.tolist():
        for b in pool.second.tolist():
            alike = pool.labels[a] == pool.labels[b]
            if a != b and alike == same and not (alike and pool.cameras[a] == pool.cameras[b]):
                found.add((min(a, b), max(a, b)))
    return found


@st.composite
def pools(made: Any) -> Pool:
    """Images of few classes and cameras, with or without a gallery that some of them are in."""
    count, size = made(st.integers(1, 9)), made(st.integers(0, 9))

    def some() -> Tensor:
        return torch.tensor(made(st.lists(st.integers(-1, 3), min_size=count + size, max_size=count + size)))

    pool = Pool.of(some(), some() if made(st.booleans()) else None)
    if size == 0:
        return pool
    second = [k if k < count and made(st.booleans()) else count + k for k in range(size)]
    return replace(pool, first=np.arange(count), second=np.array(second))


@given(pools())
def test_all_pairs_are_drawn_if_there_are_fewer_than_asked_for(pool: Pool) -> None:
    found = draw(pool, 1000, 0, JUDGED)
    for same in (True, False):
        pairs = found.take(found.same == same)
        drawn = [
            (min(a, b), max(a, b)) for a, b in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
        ]
        assert len(drawn) == len(set(drawn))
        assert set(drawn) == every_pair(pool, same)
    assert set(found.first.tolist()) <= set(pool.first.tolist())
    assert set(found.second.tolist()) <= set(pool.second.tolist())


def test_draws_are_even_and_none_is_drawn_twice() -> None:
    """Of 45 pairs, 10 in each of 900 draws: each is drawn 200 times, give or take five deviations."""
    pool = Pool.of(torch.arange(10))
    count: Counter[tuple[int, int]] = Counter()
    firsts: Counter[int] = Counter()
    for seed in range(900):
        found = draw(pool, 20, seed, JUDGED)
        both = np.sort(np.stack([found.first, found.second], axis=1), axis=1)
        pairs = [(a, b) for a, b in both.tolist()]
        assert len(set(pairs)) == 10  # there are no same ones
        count.update(pairs)
        firsts.update(found.first.tolist())
    assert len(count) == 45
    assert max(abs(n - 200) for n in count.values()) < 5 * (900 * 10 / 45 * 35 / 45) ** 0.5
    # Either image may be the first one, which is perturbed.
    assert max(abs(n - 900) for n in firsts.values()) < 5 * 900**0.5


def test_draws_depend_on_the_seed_and_the_purpose_alone() -> None:
    pool = Pool.of(torch.arange(40) % 4)
    first, again = (draw(pool, 30, 3, JUDGED) for _ in range(2))
    assert first.digest == again.digest
    assert first.digest != draw(pool, 30, 4, JUDGED).digest
    assert first.digest != draw(pool, 30, 3, CHOOSE).digest
    assert first.same.sum() == 15
    odd = draw(pool, 31, 3, JUDGED)
    assert (int(odd.same.sum()), len(odd)) == (15, 31)


def data_of(labels: Tensor, **more: Any) -> Data:
    images = torch.rand(len(labels), 1, 2, 2, generator=torch.Generator().manual_seed(0))
    return Data(images, labels, **more)


def split(data: Data, **changes: Any) -> Split:
    given = {name: changes.pop(name) for name in ("pairs", "validation") if name in changes}
    return split_pairs(data, VerifyPlan.make(**{"count": 60, **changes}), **given)


def classes_of(pairs: Pairs, labels: Tensor) -> set[int]:
    places = np.concatenate([pairs.first, pairs.second])
    return set(labels[torch.from_numpy(places)].tolist())


@pytest.mark.parametrize("seed", range(5))
def test_no_class_chooses_and_is_judged(seed: int) -> None:
    labels = torch.arange(60) % 12
    found = split(data_of(labels), seed=seed)
    assert found.choose is not None
    judged, choose = classes_of(found.judged, labels), classes_of(found.choose.pairs, labels)
    assert not judged & choose
    assert (len(judged), found.choose.classes, found.choose.source) == (6, 6, "other classes")
    assert len(found.judged) == len(found.choose.pairs) == 60


def test_classes_that_make_no_same_pairs_are_shared_out_as_well() -> None:
    """Ten classes of one image and four of three: each half has two of those."""
    labels = torch.cat([torch.arange(10), torch.arange(10, 14).repeat(3)])
    for seed in range(5):
        found = split(data_of(labels), seed=seed, count=10)
        assert found.choose is not None
        assert found.choose.pairs.same.sum() > 0
        assert found.judged.same.sum() > 0


def test_with_a_gallery_pairs_are_of_a_query_and_an_image_that_is_ranked() -> None:
    labels, ranked = torch.arange(8) % 4, torch.arange(12) % 4
    gallery = (torch.rand(12, 1, 2, 2), ranked)
    own = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1])
    data = data_of(labels, gallery=gallery, own=own)
    found = split(data, count=1000)
    both = [found.judged, found.choose.pairs] if found.choose else []
    assert len(both) == 2
    for pairs in both:
        assert pairs.first.max() < 8
        # An image that is on both sides stands where it queries, and makes no pair with itself.
        assert set(pairs.second.tolist()) <= {0, 1, 2, 3, *range(12, 20)}
        assert (pairs.first != pairs.second).all()
    # Of two classes each: 4 queries and 6 images are 24 pairs, less 2 of an image with itself, less 1 of two
    # queries that are both ranked, which would be there in both orders.
    assert [len(pairs) for pairs in both] == [24 - 2 - 1] * 2


def test_images_of_one_class_and_camera_make_no_pair() -> None:
    labels, cameras = torch.arange(24) % 4, torch.arange(24) // 12
    found = split(data_of(labels, cameras=cameras), count=1000, threshold=0.5)
    same = found.judged.same
    first, second = found.judged.first, found.judged.second
    assert same.sum() == 4 * 3 * 3
    assert (cameras.numpy()[first[same]] != cameras.numpy()[second[same]]).all()
    assert (~same).sum() == 6 * 36


def test_given_pairs_keep_their_order_and_are_parted_by_class() -> None:
    labels = torch.arange(12) % 4
    data = data_of(labels)
    pairs = torch.tensor([[i, j] for i in range(12) for j in range(12) if i != j])
    whole = split(data, pairs=pairs, threshold=0.5)
    assert np.stack([whole.judged.first, whole.judged.second], 1).tolist() == pairs.tolist()
    assert (whole.judged.same == (labels[pairs[:, 0]] == labels[pairs[:, 1]]).numpy()).all()
    assert (whole.given, whole.left_out, whole.choose) == (True, 0, None)
    parted = split(data, pairs=pairs)
    assert parted.choose is not None
    judged, choose = classes_of(parted.judged, labels), classes_of(parted.choose.pairs, labels)
    assert len(judged) == len(choose) == 2
    assert not judged & choose
    assert len(parted.judged) == len(parted.choose.pairs) == 6 * 5
    assert parted.left_out == len(pairs) - 60


def test_validation_images_choose_and_all_classes_are_judged() -> None:
    labels = torch.arange(24) % 4
    images = torch.rand(9, 1, 2, 2)
    found = split(data_of(labels), validation=(images, torch.arange(9) % 3), count=1000)
    assert found.choose is not None
    assert (len(found.images), found.choose.pairs.first.min()) == (33, 24)
    assert (found.choose.source, found.choose.classes) == ("validation images", 3)
    assert (int(found.choose.pairs.same.sum()), len(found.choose.pairs)) == (9, 36)
    assert classes_of(found.judged, labels) == {0, 1, 2, 3}
    # By their cameras as well: of each class, one of three is from another camera than the others.
    seen = Data(images, torch.arange(9) % 3, cameras=(torch.arange(9) < 3).long())
    by_camera = split(data_of(labels), validation=seen, count=1000)
    assert by_camera.choose is not None
    assert by_camera.choose.pairs.same.sum() == 6


TWO = torch.arange(8) % 2


@pytest.mark.parametrize(
    ("labels", "changes", "told"),
    [
        (TWO, {}, "none of the 6 choosing pairs is different: give more classes, validation images, or"),
        (torch.tensor([0, 0, 1, 2, 3]), {}, r"none of the \d+ (judged|choosing) pairs is same"),
        (TWO, {"pairs": torch.tensor([[0, 2], [1, 3]]), "threshold": 0.5}, "the 2 judged pairs is different"),
        (TWO, {"pairs": torch.zeros(0, 2).long(), "threshold": 0.5}, r"none of the 0 judged pairs is same"),
        (TWO, {"pairs": [[0, 1]]}, r"pairs must be a tensor \(P, 2\) of positions of two images, not a list"),
        (TWO, {"pairs": torch.rand(3, 2)}, r"not float32 of shape \(3, 2\)"),
        (TWO, {"pairs": torch.tensor([[0, 8]])}, "hold the position 8, and there are 8 images"),
        (TWO, {"pairs": torch.tensor([[-1, 3]])}, "pairs hold the position -1, and there are 8 images"),
        (TWO, {"pairs": torch.tensor([[0, 1], [3, 3]])}, "pair 1 is an image with itself"),
        (TWO, {"validation": torch.rand(3, 1, 2, 2)}, "validation must be a Data, not .*a pair of images"),
        (TWO, {"validation": (torch.rand(3, 1, 2, 2), TWO)}, r"must be a tensor of integers of shape \(3,\)"),
        (TWO, {"validation": (torch.rand(8, 1, 3, 3), TWO)}, "those to judge .*: resize"),
        (
            TWO,
            {"validation": (torch.rand(8, 1, 2, 2), torch.zeros(8).long())},
            r"none of the 28 choosing pairs is different: give more classes",
        ),
    ],
)  # fmt: skip
def test_pairs_that_are_none(labels: Tensor, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        split(data_of(labels), **changes)
