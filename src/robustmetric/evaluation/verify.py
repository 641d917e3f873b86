"""Verify a network: whether it tells pairs of one class from others, by a threshold, and under attack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robustmetric.evaluation.identity import versions
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.staged import Progress, Stage, Staged
from robustmetric.evaluation.store import VERIFICATION
from robustmetric.evaluation.subject import Subject
from robustmetric.evaluation.verified import FORMAT, Verification, build_verification
from robustmetric.evaluation.verify_pairs import Split, Validation, split_pairs
from robustmetric.evaluation.verify_pieces import VerifyMaterials
from robustmetric.evaluation.verify_plan import VerifyPlan
from robustmetric.models.source import try_network

KIND = "verification"
"""What the folder of a verification is told to hold."""


def verify(
    model: nn.Module,
    images: Images,
    labels: Tensor,
    *,
    pairs: Tensor | None = None,
    validation: Validation | None = None,
    threshold: float | None = None,
    far: float | None = None,
    count: int = 2000,
    attack: bool = True,
    eps: float = 8 / 255,
    alpha: float = 3 / 255,
    steps: int = 32,
    search: str = "pgd",
    seed: int = 0,
    batch: int = 128,
    gallery: tuple[Images, Tensor] | None = None,
    own: Tensor | None = None,
    cameras: Tensor | None = None,
    gallery_cameras: Tensor | None = None,
    name: str | None = None,
    data: str = "images",
    out: str | Path | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
) -> Verification:
    """Judge whether pairs of images are of one class by a threshold of their distance, and attack them.

    The threshold is chosen for a FAR on pairs that are not judged: those of the `validation` images, or else
    of half of the classes, while the other half is judged. An attack perturbs the first image of a pair: it
    drives same pairs apart (evasion) and different ones together (impersonation), as far as it can; the
    threshold stays.

    Args:
        model: Any module that maps images (N, C, H, W) in [0, 1] to vectors (N, D). It is held in evaluation
            mode, frozen, and comes back as it was.
        images: Images (N, C, H, W) in [0, 1]: a tensor, or anything that is indexed like one.
        labels: Their classes (N,).
        pairs: Pairs (P, 2) to judge, as positions of images; without them some are drawn.
        validation: Images and their labels, and cameras if you like, whose pairs choose the threshold.
        threshold: The distance up to which a pair is same, in [0, 2]; nothing is chosen then.
        far: The FAR that the threshold is chosen for, 0.01 by default; it takes 1/far different pairs.
        count: Number of pairs that are drawn, half of them same. As many choose the threshold.
        attack: Whether the pairs are attacked.
        eps: ε, the largest change of a pixel.
        alpha: α, the size of a step.
        steps: η, the number of steps.
        search: How perturbations are searched for, such as ``"pgd(restarts=5)"`` or ``"apgd"``.
        seed: Starts every random draw.
        batch: Pairs that are attacked together.
        gallery: Images and labels that the second image of each pair is of, as a pair.
        own: Each image's position (N,) in the gallery, −1 for none: it makes no pair with itself.
        cameras: The cameras (N,) that took the images: images of one class and camera make no pair.
        gallery_cameras: Those of the gallery's images.
        name: What the document calls the network; by default the name of its class.
        data: What the document calls the images.
        out: A folder. The document is written there as `verification.json` with the distances, and whatever
            is finished stays on disk: the same call goes on where an interrupted one stopped.
        progress: Told the stage, how many of its pieces are done, and how many there are.
        report: Told in a line what was found damaged in the folder.

    >>> import robustmetric as rm
    >>> images, labels = torch.rand(40, 1, 8, 8), torch.arange(40) % 8
    >>> found = rm.verify(rm.model("c2f2", size=8), images, labels, count=40, steps=2)
    >>> found.pairs.same, found.pairs.different, found.both.tar.value <= found.clean.tar.value
    (20, 20, True)
    >>> "too few pairs for the target of 1 %" in found.headline[0]
    True

    """
    plan = VerifyPlan.make(
        count=count,
        threshold=threshold,
        far=far,
        attack=attack,
        eps=eps,
        alpha=alpha,
        steps=steps,
        search=search,
        seed=seed,
        batch=batch,
    )
    subject = Subject(
        model,
        images,
        labels,
        gallery=gallery,
        own=own,
        cameras=cameras,
        gallery_cameras=gallery_cameras,
        name=name,
        data=data,
    )
    return Verifying.of(subject, plan, pairs, validation, out, progress, report).run()


class Verifying(Staged[VerifyMaterials, Verification]):
    """A verification in pieces, each kept as soon as it is made.

    The pairs of `split`, of the images of `subject`, are verified as `plan` says. Each finished piece is a
    file in `out/parts`, or stays in memory if `out` is None; `run` does what is left and puts the document
    together. `progress` is told the stage, how many of its pieces are done, and how many there are; `report`
    is told in a line what was found damaged in the folder.

    >>> subject = Subject(nn.Flatten(), torch.rand(20, 1, 8, 8), torch.arange(20) % 4)
    >>> verifying = Verifying.of(subject, VerifyPlan.make(count=8, attack=False))
    >>> [stage.name for stage in verifying.stages], len(verifying.split.judged)
    (['embed'], 8)
    """

    what = KIND
    document = VERIFICATION

    def __init__(
        self,
        subject: Subject,
        plan: VerifyPlan,
        split: Split,
        out: str | Path | None = None,
        progress: Progress | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        super().__init__(out, progress, report)
        self.subject, self.plan, self.split = subject, plan, split
        self.materials = VerifyMaterials(subject, plan, split, self.store)

    @classmethod
    def of(
        cls,
        subject: Subject,
        plan: VerifyPlan,
        pairs: Tensor | None = None,
        validation: Validation | None = None,
        out: str | Path | None = None,
        progress: Progress | None = None,
        report: Callable[[str], None] = print,
    ) -> Verifying:
        """Draw or take the pairs, as `verify` has `pairs` and `validation`, and set aside those that choose.

        `subject`, `plan`, `out`, `progress` and `report` are those of the class.
        """
        split = split_pairs(
            subject,
            pairs=pairs,
            validation=validation,
            chosen=plan.threshold is None,
            count=plan.count,
            seed=plan.seed,
        )
        return cls(subject, plan, split, out, progress, report)

    @property
    def stages(self) -> tuple[Stage[VerifyMaterials], ...]:
        """All pieces by stage, in the order of their making."""
        return self.materials.stages

    def describe(self) -> dict[str, Any]:
        """Return all that the document depends on, in JSON's types."""
        return {
            "kind": KIND,
            **self.plan.describe(),
            **self.subject.identity(),
            "pairs": self.split.judged.digest,
            "choosing": None if self.split.choose is None else self.split.choose.sha256,
            "versions": versions(),
        }

    def probe(self) -> None:
        """Try the network on a batch: one that fails leaves no trace."""
        images = self.subject.images[torch.arange(min(self.plan.batch, len(self.subject.images)))]
        gradient = self.plan.attack and self.plan.searching.differentiates(self.subject.model)
        try_network(self.subject.model, images, gradient=gradient)

    def build(self) -> Verification:
        """Put the document together."""
        return build_verification(self.materials)

    def read(self, folder: Path) -> Verification:
        """Read the finished document from its `folder`."""
        return FORMAT.read_whole(folder)
