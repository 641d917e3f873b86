"""Verification: whether two images are of one class, by a threshold of their distance, and how often right.

A pair is accepted as same if its distance is at most the threshold. TAR, the true accept rate, is the share
of same pairs that are accepted; FAR, the false accept rate, that of different ones. Every score is of counts
of pairs and exact: distances are compared in double precision, and pairs that are equally far are accepted
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robustmetric.errors import UserError, describe, number
from robustmetric.sphere import BrokenEmbeddingsError

FARS = (1e-1, 1e-2, 1e-3, 1e-4)
"""The FAR at which TAR is usually given."""


class OperatingPoint(NamedTuple):
    """A `threshold` and the shares of same (`tar`) and of different pairs (`far`) that it accepts."""

    threshold: float
    tar: float
    far: float


@dataclass(frozen=True, eq=False)
class Roc:
    """How many pairs there are at each distance, and what every threshold would accept.

    `distance` (K,) are the distances that occur, ascending; `same` and `different` (K,) count the pairs of
    each kind that are that far apart.

    >>> curve = roc(torch.tensor([0.25, 0.5, 0.5, 0.75]), torch.tensor([True, True, False, False]))
    >>> curve.tar.tolist(), curve.far.tolist()
    ([0.5, 1.0, 1.0], [0.0, 0.5, 1.0])
    >>> curve.auc, curve.eer, curve.at_far(0.5)
    (0.875, 0.25, OperatingPoint(threshold=0.5, tar=1.0, far=0.5))
    """

    distance: NDArray[np.float64]
    same: NDArray[np.int64]
    different: NDArray[np.int64]

    @cached_property
    def accepted(self) -> NDArray[np.int64]:
        """Same pairs (K,) that are at most as far apart as each distance."""
        return self.same.cumsum()

    @cached_property
    def mistaken(self) -> NDArray[np.int64]:
        """Different pairs (K,) that are at most as far apart as each distance."""
        return self.different.cumsum()

    @property
    def tar(self) -> NDArray[np.float64]:
        """The TAR (K,) of each distance as a threshold."""
        rates: NDArray[np.float64] = self.accepted / self.accepted[-1]
        return rates

    @property
    def far(self) -> NDArray[np.float64]:
        """The FAR (K,) of each distance as a threshold."""
        rates: NDArray[np.float64] = self.mistaken / self.mistaken[-1]
        return rates

    @property
    def auc(self) -> float:
        """The probability that a same pair is nearer than a different one; one that is as near counts half.

        It is the area under the ROC.
        """
        before = self.accepted - self.same
        twice = int((self.different * (2 * before + self.same)).sum())
        return twice / (2 * int(self.accepted[-1]) * int(self.mistaken[-1]))

    @property
    def eer(self) -> float:
        """The FAR where it is as high as the share of same pairs that are refused, 1 − TAR.

        Between two distances the ROC is a straight line, as for the area under it.
        """
        refused, far = np.append(1.0, 1 - self.tar), np.append(0.0, self.far)
        k = int(np.argmax(far >= refused))
        gap, rise = refused[k - 1] - far[k - 1], far[k] - far[k - 1]
        return float(far[k - 1] + gap / (rise + refused[k - 1] - refused[k]) * rise)

    def at(self, threshold: float) -> OperatingPoint:
        """Return what a `threshold` accepts."""
        k = int(np.searchsorted(self.distance, threshold, side="right"))
        if k == 0:
            return OperatingPoint(threshold, 0.0, 0.0)
        return OperatingPoint(threshold, float(self.tar[k - 1]), float(self.far[k - 1]))

    def at_far(self, far: float) -> OperatingPoint | None:
        """Return the largest distance as a threshold whose FAR is at most `far`.

        If it is higher at every distance, nothing is accepted. It is None if there are fewer different pairs
        than `pairs_for` says.
        """
        if self.mistaken[-1] < pairs_for(far):
            return None
        return self._first(int((self.far <= far).sum()))

    def choose_threshold(self, far: float) -> OperatingPoint:
        """Return the largest distance as a threshold that accepts another different pair with at most `far`.

        A new pair falls on each of the n + 1 ranks among the n different ones here with one probability, so a
        threshold that accepts m of these accepts it with at most (m + 1)/(n + 1). At least m = 0 is taken,
        which is the strictest choice, if n is too small for `far`.
        """
        likely = (self.mistaken + 1) / (int(self.mistaken[-1]) + 1)
        return self._first(int(((likely <= far) | (self.mistaken == 0)).sum()))

    def _first(self, k: int) -> OperatingPoint:
        """Return what a threshold accepts that accepts the first `k` distances."""
        return self.at(float(self.distance[k - 1] if k else np.nextafter(self.distance[0], -1)))


def roc(distances: Tensor, same: Tensor) -> Roc:
    """Return what every threshold does to pairs with `distances` (P,), of which `same` (P,) are of one class.

    >>> curve = roc(torch.tensor([0.1, 0.3, 0.4, 1.2]), torch.tensor([True, True, False, False]))
    >>> curve.at(0.35).tar, curve.at(0.35).far, curve.auc
    (1.0, 0.0, 1.0)
    """
    values, flags = _checked(distances, same)
    return weighted_roc(values, flags)(np.ones(len(values)))


def weighted_roc(
    distances: NDArray[np.float64], same: NDArray[np.bool_]
) -> Callable[[NDArray[np.float64]], Roc]:
    """Return the ROC of pairs, `distances` (P,) and `same` (P,), as a function of how often each counts."""
    levels, place = np.unique(distances, return_inverse=True)

    def curve(often: NDArray[np.float64]) -> Roc:
        counts = (np.bincount(place[kind], often[kind], len(levels)) for kind in (same, ~same))
        return Roc(levels, *(count.astype(np.int64) for count in counts))

    return curve


def verification_scores(
    distances: Tensor, same: Tensor, *, fars: Sequence[float] = FARS
) -> dict[str, float | None]:
    """Return AUC, EER and TAR at each FAR of `fars`, in %, of pairs with `distances` (P,).

    `same` (P,) says which are of one class. TAR is None at a FAR that so few different pairs do not resolve.

    >>> same = torch.tensor([True, True, False, False])
    >>> verification_scores(torch.tensor([0.1, 0.5, 0.4, 1.2]), same, fars=[0.5, 0.1])
    {'AUC': 75.0, 'EER': 50.0, 'TAR@FAR=0.5': 100.0, 'TAR@FAR=0.1': None}
    """
    curve = roc(distances, same)
    scores: dict[str, float | None] = {"AUC": 100 * curve.auc, "EER": 100 * curve.eer}
    for far in fars:
        found = curve.at_far(check_far(far))
        scores[f"TAR@FAR={far:g}"] = None if found is None else 100 * found.tar
    return scores


def pairs_for(far: float) -> int:
    """Return how many different pairs there must be for one of them to be a share of at most `far`."""
    return math.ceil(1 / far - 1e-9)


def check_far(far: object) -> float:
    """Return a `far` that is a share; reject any other.

    >>> check_far(10)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: far must be in (0, 1), not 10: it is the share of different pairs that are ...
    """
    why = "it is the share of different pairs that are accepted, 0.01 for 1 %"
    return number("far", far, 0, 1, open_low=True, open_high=True, why=why)


def check_kinds(
    same: NDArray[np.bool_], what: str, advice: str = "give some", parameter: str | None = None
) -> None:
    """Reject pairs of which none is `same` (P,), or all; the message has `what` they are and the `advice`.

    `parameter` is the argument at fault.
    """
    for kind, flags in (("same", same), ("different", ~same)):
        if not flags.any():
            raise UserError(f"none of the {len(same)} {what} is {kind}: {advice}", parameter=parameter)


def _checked(distances: Tensor, same: Tensor) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return `distances` (P,) in double precision and `same` (P,); reject what is no pairs of both kinds."""
    if not isinstance(distances, Tensor) or not distances.is_floating_point() or distances.ndim != 1:
        raise UserError(f"distances must be a tensor (P,) of floats, not {describe(distances)}")
    if not isinstance(same, Tensor) or same.dtype != torch.bool or same.shape != distances.shape:
        wanted = f"a tensor ({len(distances)},) of bools"
        raise UserError(f"same must be {wanted}, not {describe(same)}: compare labels with ==")
    values, flags = distances.detach().cpu().double().numpy(), same.cpu().numpy()
    if bad := int((~np.isfinite(values)).sum()):
        told = "the network has diverged or its weights are damaged; go back to its last good weights"
        raise BrokenEmbeddingsError(f"{bad} of {len(values)} distances are NaN or infinite: {told}")
    check_kinds(flags, "pairs")
    return values, flags
