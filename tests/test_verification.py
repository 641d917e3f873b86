"""Scores of pairs against plain loops, scikit-learn and scipy, and pairs that are none."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

from robustmetric.errors import UserError
from robustmetric.verification import (
    roc,
    verification_scores,
    weighted_roc,
)

pytestmark = pytest.mark.kernels


def auc_by_pairs(distances: list[float], same: list[bool]) -> float:
    ours = [d for d, s in zip(distances, same, strict=True) if s]
    theirs = [d for d, s in zip(distances, same, strict=True) if not s]
    won = sum(Fraction(1) if a < b else Fraction(1, 2) if a == b else 0 for a in ours for b in theirs)
    return float(Fraction(won) / (len(ours) * len(theirs)))  # rounded once, as a quotient of counts is


def rates_by_hand(distances: list[float], same: list[bool], threshold: float) -> tuple[float, float]:
    def share(kind: bool) -> float:
        those = [d for d, s in zip(distances, same, strict=True) if s == kind]
        return sum(d <= threshold for d in those) / len(those)

    return share(True), share(False)


def tar_by_hand(distances: list[float], same: list[bool], far: float) -> float | None:
    """The highest TAR of all thresholds that accept at most this share; None if one of all is more."""
    if far * same.count(False) < 1 - 1e-12:
        return None
    found = [rates_by_hand(distances, same, t) for t in [-1.0, *distances]]
    return max(tar for tar, wrong in found if wrong <= far)


def tensors(distances: list[float], same: list[bool]) -> tuple[Tensor, Tensor]:
    return torch.tensor(distances, dtype=torch.float64), torch.tensor(same)


# Few different distances, so that many are equal.
PAIRS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5000000001, 1.0, 2.0]), st.booleans()),
    min_size=2,
    max_size=40,
).filter(lambda rows: len({kind for _, kind in rows}) == 2)


@given(PAIRS)
def test_every_score_is_that_of_a_plain_loop(rows: list[tuple[float, bool]]) -> None:
    distances, same = [d for d, _ in rows], [s for _, s in rows]
    curve = roc(*tensors(distances, same))
    assert curve.distance.tolist() == sorted(set(distances))
    assert curve.auc == auc_by_pairs(distances, same)
    for threshold in (-0.1, *set(distances), 0.3, 3.0):
        at = curve.at(threshold)
        assert (at.tar, at.far) == rates_by_hand(distances, same, threshold)
    for far in (0.5, 0.2, 0.1, 0.01):
        found = curve.at_far(far)
        assert (None if found is None else found.tar) == tar_by_hand(distances, same, far)
        if found is not None:
            assert found.far <= far
            assert (found.tar, found.far) == rates_by_hand(distances, same, found.threshold)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 2.0]) | st.floats(0, 2), min_size=2, max_size=30))
def test_a_chosen_threshold_accepts_one_more_different_pair_as_rarely_as_its_far(values: list[float]) -> None:
    """Each of the different pairs is once the new one: then it may be any of them, ties included."""
    alike, accepted = [0.05, 0.3, 1.5], 0
    for k, new in enumerate(values):
        others = values[:k] + values[k + 1 :]
        distances, same = [*alike, *others], [True] * len(alike) + [False] * len(others)
        chosen = roc(*tensors(distances, same)).choose_threshold(0.2)
        assert (chosen.tar, chosen.far) == rates_by_hand(distances, same, chosen.threshold)
        accepted += new <= chosen.threshold
        # The largest: the next distance accepts too many.
        above = min((d for d in distances if d > chosen.threshold), default=None)
        if above is not None:
            within = sum(d <= above for d in others)
            assert within > 0
            assert 5 * (within + 1) > len(others) + 1
        if len(others) + 1 < 5:  # too few: the strictest
            assert chosen.far == 0
    assert 5 * accepted <= max(5, len(values))


@given(PAIRS)
def test_scikit_learn_agrees(rows: list[tuple[float, bool]]) -> None:
    distances, same = [d for d, _ in rows], [s for _, s in rows]
    curve = roc(*tensors(distances, same))
    nearness = [-d for d in distances]
    assert curve.auc == pytest.approx(roc_auc_score(same, nearness), abs=1e-12)
    far, tar, _ = roc_curve(same, nearness, drop_intermediate=False)
    assert np.append(0, curve.far) == pytest.approx(far, abs=1e-15)
    assert np.append(0, curve.tar) == pytest.approx(tar, abs=1e-15)


@given(PAIRS)
def test_the_eer_is_on_the_curve(rows: list[tuple[float, bool]]) -> None:
    """By a walk along the sides of the polygon, in fractions."""
    distances, same = [d for d, _ in rows], [s for _, s in rows]
    count = {kind: same.count(kind) for kind in (True, False)}
    at = [(Fraction(0), Fraction(1))]  # FAR and the share that is refused
    for t in sorted(set(distances)):
        hits = {k: sum(d <= t for d, s in rows if s == k) for k in (True, False)}
        at.append((Fraction(hits[False], count[False]), 1 - Fraction(hits[True], count[True])))
    for (f0, r0), (f1, r1) in itertools.pairwise(at):
        if f1 >= r1:
            part = (r0 - f0) / ((f1 - f0) + (r0 - r1))
            assert roc(*tensors(distances, same)).eer == pytest.approx(
                float(f0 + part * (f1 - f0)), abs=1e-12
            )
            break


@pytest.mark.parametrize(
    ("far", "different", "resolved"),
    [(0.1, 10, True), (0.1, 9, False), (1e-3, 999, False), (1e-4, 10_000, True), (0.3, 4, True)],
)
def test_a_far_takes_as_many_pairs_as_tell_it_from_none(far: float, different: int, resolved: bool) -> None:
    distances = torch.rand(different + 5, generator=torch.Generator().manual_seed(0))
    same = torch.arange(different + 5) < 5
    assert (roc(distances, same).at_far(far) is not None) == resolved


def test_pairs_counted_several_times() -> None:
    """As a resample does: the curve is that of pairs that are there as often."""
    distances, same = tensors([0.1, 0.5, 0.1, 0.5], [True, True, False, False])
    often = np.array([2, 1, 1, 3])
    once = weighted_roc(distances.numpy(), same.numpy())(often)
    again = roc(
        distances.repeat_interleave(torch.from_numpy(often)), same.repeat_interleave(torch.from_numpy(often))
    )
    assert (once.auc, once.eer, once.choose_threshold(0.3)) == (
        again.auc,
        again.eer,
        again.choose_threshold(0.3),
    )


YES_NO = torch.tensor([True, False])


@pytest.mark.parametrize(
    ("distances", "same", "told"),
    [
        ([0.1, 0.2], YES_NO, r"distances must be a tensor \(P,\) of floats, not a list"),
        (torch.rand(2, 1), YES_NO, r"not float32 of shape \(2, 1\)"),
        (torch.rand(2), torch.tensor([1, 0]), r"same must be a tensor \(2,\) of bools.*int64"),
        (torch.rand(3), YES_NO, r"same must be a tensor \(3,\) .*shape \(2,\): compare labels"),
        (torch.tensor([0.1, torch.nan]), YES_NO, "1 of 2 distances are NaN or infinite: the network"),
        (torch.rand(0), torch.zeros(0, dtype=torch.bool), "none of the 0 pairs is same: give some"),
        (torch.rand(2), YES_NO | True, "none of the 2 pairs is different: give some"),
    ],
)  # fmt: skip
def test_what_is_no_pairs(distances: Tensor, same: Tensor, told: str) -> None:
    with pytest.raises(UserError, match=told):
        roc(distances, same)


@pytest.mark.parametrize("far", [0, 1, -0.1, 10, True, "0.1", math.nan])
def test_what_is_no_far(far: float) -> None:
    with pytest.raises(
        UserError, match=r"far must be in \(0, 1\), not .*: it is the share of different pairs"
    ):
        verification_scores(torch.rand(4), torch.tensor([True, True, False, False]), fars=[far])
