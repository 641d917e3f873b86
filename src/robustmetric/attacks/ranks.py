"""CA, QA and SP-QA: raise (+) or lower (−) the rank of chosen images.

Zhou et al., "Adversarial Ranking Attack and Defense", ECCV 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.attacks.base import ATTACKS, Attack, Target
from robustmetric.attacks.columns import Column, from_lowered_rank, from_raised_rank
from robustmetric.attacks.draws import Draws, choose, choose_near
from robustmetric.attacks.margin import rank_hinge
from robustmetric.errors import number, whole
from robustmetric.gallery import Gallery, Queries, away_from, count_nearer, exclude, nearest
from robustmetric.registry import changed_options, lookup, with_options
from robustmetric.sphere import cross_distance, pair_distance
from robustmetric.squares import square_distance

# Up to so many distances are kept from step to step; more are computed anew in each, block by block.
_KEPT = 2**26


@dataclass(frozen=True, kw_only=True)
class SignedAttack(Attack):
    """An attack that raises (+) random targets, or lowers (−) targets among the 1 % nearest.

    The options in `letters` are numbers of targets, the first that of the images it raises or lowers.
    """

    family: ClassVar[str]
    letters: ClassVar[tuple[str, ...]]

    sign: str

    def __post_init__(self) -> None:
        super().__post_init__()
        lookup("sign", self.sign, {"+": 1, "-": -1})
        for letter, count in self.counts(0).items():
            whole(letter, count, 1)

    def counts(self, images: int) -> dict[str, int]:
        """Return the numbers of targets, by option."""
        return {letter: getattr(self, letter) for letter in self.letters}

    @property
    def direction(self) -> float:
        """1 to raise, −1 to lower."""
        return 1.0 if self.sign == "+" else -1.0

    @property
    def name(self) -> str:  # type: ignore[override]
        """The family and the sign, with the options that are not the usual ones."""
        return with_options(self.family + self.sign, changed_options(self, "protocol", "sign"))

    @property
    def columns(self) -> tuple[Column, ...]:  # type: ignore[override]
        """The rank of the targets, in %: high where raising them failed, low where lowering them did."""
        if self.sign == "+":
            return (Column(self.name, "higher", term=from_raised_rank),)
        return (Column(self.name, "lower", term=from_lowered_rank),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the targets: (B, W) positions in the gallery."""
        self.check_fits(len(gallery))
        asking, uniform = self.asking(queries, gallery), draws.uniform(getattr(self, self.letters[0]))
        if self.sign == "+":
            return choose(uniform, gallery, asking.own, strict=self.strict)
        share = -(-len(gallery) // 100) if self.strict else max(1, len(gallery) // 100)
        return choose_near(uniform, asking, gallery, share, strict=self.strict)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the rank in %: of the targets for a perturbed query, of a perturbed candidate for them."""
        return {self.name: self.ranks(z, target.index, queries, gallery)}

    def ranks(self, z: Tensor, index: Tensor, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the mean rank (B,) in % over targets `index` (B, W) in the `gallery`, see `measure`."""
        found = []
        for t in index.T:
            place = gallery.z[t]
            asks, level = place if self.perturbs == "candidate" else z, square_distance(z, place)
            found.append(self.rank(asks, level, queries, t, gallery))
        return torch.stack(found).double().mean(0)

    def rank(self, z: Tensor, level: Tensor, queries: Queries, target: Tensor, gallery: Gallery) -> Tensor:
        """Return the rank (B,), in % from first to last, of what is at a square `level` (B,) from `z` (B, D).

        Strictly, tied images share the middle rank, and neither the `queries` nor the `target` (B,) are
        ranked. The reference counts images that are nearer.
        """
        if not self.strict:
            return (100 * count_nearer(z, level, gallery)[0]).float() / len(gallery)
        nearer, tied = count_nearer(z, level, gallery, queries.any_camera, target)
        ranked = len(gallery) - (queries.own >= 0).long() - (target != queries.own).long()
        return 100 * (nearer + tied.float() / 2) / ranked


@ATTACKS.register("CA+", sign="+")
@ATTACKS.register("CA-", sign="-")
@dataclass(frozen=True, kw_only=True)
class CandidateAttack(SignedAttack):
    """The perturbed image is a candidate; `w` gallery images should rank it first (`sign` +) or last (−).

    These queries are drawn at random (+), or among the 1 % nearest to the image (−). Reported is the rank of
    the perturbed image, in % from first to last, as the mean over its queries.

    >>> CandidateAttack(sign="+"), CandidateAttack(sign="-", w=5).name
    (CandidateAttack(protocol='strict', sign='+', w=1), 'CA-(w=5)')
    """

    family = "CA"
    letters = ("w",)
    perturbs = "candidate"

    w: int = 1

    def aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        """Return with the targets how far all images are from them, (B, w, N), if that is not too much."""
        if index.numel() * len(gallery) > _KEPT:
            return Target(index)
        kept = [torch.cat(list(self._rivals(q, queries, gallery)), dim=1) for q in index.T]
        return Target(index, torch.stack(kept, dim=1))

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the mean over images x of max(0, ±(d(q, x̃) − d(q, x))): how far x̃ is from first, or last."""
        goal = gallery.z[target.index]
        dist = pair_distance(away_from(z[:, None], goal), goal)
        # The value of a sum of hinges in one variable, and its slope: how many are open.
        level = dist.detach()
        value, opened = torch.zeros_like(level), torch.zeros_like(level)
        for k, q in enumerate(target.index.T):
            kept = None if target.extra is None else target.extra[:, k].split(gallery.chunk, dim=1)
            for rivals in kept or self._rivals(q, queries, gallery):
                gap = level[:, k, None] - rivals if self.sign == "+" else rivals - level[:, k, None]
                value[:, k] += gap.clamp_min_(0).sum(1)
                opened[:, k] += gap.sign_().sum(1)
        ranked = torch.full_like(queries.own, len(gallery))
        if self.strict:
            ranked -= 1 + (queries.own >= 0).long()
        return ((value + self.direction * opened * (dist - level)) / ranked[:, None]).mean(1)

    def _rivals(self, q: Tensor, queries: Queries, gallery: Gallery) -> Iterator[Tensor]:
        """Yield by block of the gallery how far its n images are from those that query, `q` (B,): (B, n)."""
        for block in gallery.blocks():
            rivals = cross_distance(gallery.z[q], gallery.z[block])
            if self.strict:
                # Neither the image that queries nor the candidate's original is a rival: no hinge opens.
                exclude(rivals, self.direction * torch.inf, queries.any_camera, gallery, block, q)
            yield rivals


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

    family = "QA"
    letters: ClassVar[tuple[str, ...]] = ("m",)

    m: int = 1

    @property
    def weights(self) -> list[float]:
        """The weight of each target's hinge."""
        return [self.direction / self.m] * self.m

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the mean over images x of max(0, ±(d(x̃, c) − d(x̃, x))): how far c is from first, or last."""
        return rank_hinge(z, target.index, self.weights, gallery, queries if self.strict else None)


@ATTACKS.register("SP-QA+", sign="+")
@ATTACKS.register("SP-QA-", sign="-")
@dataclass(frozen=True, kw_only=True)
class SemanticsPreservingQueryAttack(QueryAttack):
    """QA that also keeps the query's `keep` nearest images in front, so that it is not noticed.

    The candidates are those of QA, and not among the images to keep: those are the nearest others. The
    objective is QA's plus `xi` times that of QA+ on the images to keep. Next to the candidates' rank the rank
    of the kept images is reported, as `SP-QA+:keep`. `xi` is that of the earlier work unless given: 1 for +,
    100 for −.
    """

    family = "SP-QA"
    letters = ("m", "keep")

    keep: int = 5
    xi: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.xi is not None:
            number("xi", self.xi, 0)

    @property
    def columns(self) -> tuple[Column, ...]:  # type: ignore[override]
        """The candidates' rank, and that of the kept images; the ERS has a term for neither."""
        # A low rank of what is kept is good for the attacker, and says nothing of the network alone.
        better = super().columns[0].better
        return (Column(self.name, better), Column(f"{self.name}:keep", None))

    @property
    def weights(self) -> list[float]:
        """The weight of each target's hinge: of the candidates, and of the images to keep."""
        xi = (1.0 if self.sign == "+" else 100.0) if self.xi is None else float(self.xi)
        return super().weights + [xi / self.keep] * self.keep

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the (B, m) candidates, and the nearest images that are none: (B, m + keep)."""
        candidates = super().select(queries, gallery, draws=draws)
        asking = self.asking(queries, gallery).any_camera
        near = nearest(queries.z, gallery, self.m + self.keep, asking)
        taken = (near[..., None] == candidates[:, None]).any(2)
        kept = near.gather(1, taken.byte().argsort(dim=1, stable=True)[:, : self.keep])
        return torch.cat([candidates, kept], dim=1)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the rank in % of the candidates, and of the images to keep."""
        return {
            self.name: self.ranks(z, target.index[:, : self.m], queries, gallery),
            f"{self.name}:keep": self.ranks(z, target.index[:, self.m :], queries, gallery),
        }
