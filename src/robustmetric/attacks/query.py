"""QA+ and QA−: move candidates up or down in the perturbed query's ranking; SP-QA keeps the rest in place.

Zhou et al., "Adversarial Ranking Attack and Defense", ECCV 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.attacks.base import ATTACKS, SignedAttack, Target, sign_of, with_options
from robustmetric.attacks.columns import Column
from robustmetric.attacks.draws import Draws
from robustmetric.attacks.gallery import Gallery, Queries, check_count, count_nearer, nearest, normalised_rank
from robustmetric.attacks.hinge import rank_hinge
from robustmetric.squares import square_distance
from robustmetric.validate import UserError, is_number


@ATTACKS.register("QA+", sign="+")
@ATTACKS.register("QA-", sign="-")
@dataclass(frozen=True, kw_only=True)
class QueryAttack(SignedAttack):
    """The perturbed image is the query; it should rank `m` candidates first (`sign` +) or last (−).

    The candidates are drawn at random (+), or among the 1 % nearest to the query (−). Reported is their rank,
    in % from first to last, as the mean over the candidates.

    >>> QueryAttack(sign="-").name, QueryAttack(sign="+", m=2).name
    ('QA-', 'QA+(m=2)')
    """

    family: ClassVar[str] = "QA"
    letter: ClassVar[str] = "m"

    m: int = 1

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the mean over images x of max(0, ±(d(x̃, c) − d(x̃, x))): how far c is from first, or last."""
        weights = [sign_of(self.sign) / self.m] * self.m
        return rank_hinge(z, target.index, weights, gallery, queries.own if self.strict else None)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the rank in % of the candidates for the perturbed query."""
        return {self.name: self.ranks(z, target.index, queries, gallery)}

    def ranks(self, z: Tensor, index: Tensor, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the mean rank (B,) in % of images `index` (B, M) of the `gallery`, for `queries` at `z`."""
        ranks = []
        for c in index.T:
            level = square_distance(z, gallery.z[c])
            if self.strict:
                ranks.append(normalised_rank(z, level, gallery, (queries.own, c)))
            else:
                nearer = count_nearer(z, level, gallery, [c])[0]
                ranks.append((100 * nearer).float() / len(gallery))
        return torch.stack(ranks).double().mean(0)


@ATTACKS.register("SP-QA+", sign="+")
@ATTACKS.register("SP-QA-", sign="-")
@dataclass(frozen=True, kw_only=True)
class SemanticsPreservingQueryAttack(QueryAttack):
    """QA that also keeps the query's `keep` nearest images in front, so that it is not noticed.

    The candidates are those of QA, and not among the images to keep: those are the nearest others. The
    objective is QA's plus `xi` times that of QA+ on the images to keep. Beside the candidates' rank the rank
    of the kept images is reported, as `SP-QA+:keep`. `xi` is that of the earlier work unless given: 1 for +,
    100 for −.

    >>> SemanticsPreservingQueryAttack(sign="-").weight
    100.0
    """

    keep: int = 5
    xi: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("keep", self.keep)
        if self.xi is not None and not (is_number(self.xi) and self.xi >= 0):
            raise UserError(f"xi must be a number of at least 0, not {self.xi!r}")

    @property
    def name(self) -> str:
        """SP-QA+ or SP-QA-, with the options that are not the usual ones."""
        return with_options(
            f"SP-{self.family}{self.sign}",
            m=self.m if self.m != 1 else None,
            keep=self.keep if self.keep != 5 else None,
            xi=self.xi,
        )

    @property
    def columns(self) -> tuple[Column, ...]:
        """The candidates' rank, and that of the kept images; the ERS has a term for neither."""
        (rank,) = super().columns
        # A low rank of what is kept is good for the attacker, and says nothing of the network alone.
        return (Column(self.name, rank.better), Column(f"{self.name}:keep", None))

    @property
    def weight(self) -> float:
        """The weight of what is to be kept."""
        if self.xi is not None:
            return float(self.xi)
        return 1.0 if self.sign == "+" else 100.0

    def check_fits(self, images: int) -> None:
        """Refuse a gallery with too few `images`, N, to find the targets in."""
        super().check_fits(images)
        check_count("keep", self.keep, images)
        if self.m + self.keep > images - 2:
            raise UserError(
                f"m is {self.m} and keep is {self.keep}, together too many for a gallery of {images} images; "
                f"give at most {images - 2} together"
            )

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the (B, m) candidates, and the nearest images that are none: (B, m + keep)."""
        candidates = super().select(queries, gallery, draws=draws)
        near = nearest(queries.z, gallery, self.m + self.keep, without=self.myself(queries, gallery))
        taken = (near[..., None] == candidates[:, None]).any(2)
        kept = near.gather(1, taken.byte().argsort(dim=1, stable=True)[:, : self.keep])
        return torch.cat([candidates, kept], dim=1)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return QA's objective on the candidates and, weighted, QA+'s on the images to keep."""
        weights = [sign_of(self.sign) / self.m] * self.m + [self.weight / self.keep] * self.keep
        return rank_hinge(z, target.index, weights, gallery, queries.own if self.strict else None)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the rank in % of the candidates, and of the images to keep."""
        return {
            self.name: self.ranks(z, target.index[:, : self.m], queries, gallery),
            f"{self.name}:keep": self.ranks(z, target.index[:, self.m :], queries, gallery),
        }
