"""Evaluate a network: how well it ranks, and how well it keeps its ranking under attack.

Reads from the top: `evaluate` makes an `Evaluation` of a subject and a plan and runs it; a run makes the
pieces that are missing, stage by stage (`staged.py`), and puts the record together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from robustmetric.evaluation.identity import versions
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.pieces import Materials
from robustmetric.evaluation.plan import Plan
from robustmetric.evaluation.record import FORMAT, Record, build_record
from robustmetric.evaluation.staged import Progress, Stage, Staged
from robustmetric.evaluation.subject import Subject
from robustmetric.validate import UserError


def evaluate(
    model: nn.Module,
    images: Images,
    labels: Tensor,
    *,
    gallery: tuple[Images, Tensor] | None = None,
    own: Tensor | None = None,
    cameras: Tensor | None = None,
    gallery_cameras: Tensor | None = None,
    classes: Sequence[str] | None = None,
    train_classes: Sequence[str] | None = None,
    name: str | None = None,
    data: str = "images",
    surrogate: nn.Module | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
    plan: Plan | None = None,
    **settings: Any,
) -> Record:
    """Measure how well a network ranks images, and how well it keeps that ranking under attack.

    Every attack perturbs each query by at most ε a pixel. The record has R@1, R@2, mAP, NMI, mAP@R, the
    scores under attack and, if all ten are there, the ERS, with 95 % intervals over the queries, and the
    checks of how far to trust them.

    Args:
        model: Any module that maps images (N, C, H, W) to vectors (N, D). It is held in evaluation mode,
            frozen, and comes back as it was.
        images: Images (N, C, H, W) in [0, 1]: a tensor, or anything that is indexed like one. Each queries
            all others, or the gallery.
        labels: Their classes (N,).
        gallery: The images and labels that are ranked instead, as a pair.
        own: Each query's position (N,) in the gallery, −1 for none.
        cameras: The cameras (N,) that took the images: what is of a query's class and camera does not count
            for it, which is the rule of re-identification.
        gallery_cameras: Those of the gallery's images.
        classes: The names of the labels' classes.
        train_classes: The names of the classes that the network was trained on: a check looks for them.
        name: What the record calls the network; by default the name of its class.
        data: What the record calls the images.
        surrogate: The network that perturbations come from, for the search ``"transfer"`` or a suite.
        out: A folder. The record is written there as `record.json` with its per-query values, and whatever is
            finished stays on disk: the same call goes on where an interrupted one stopped. Nobody else can
            use the folder meanwhile.
        progress: Told the stage, how many of its pieces are done, and how many there are.
        report: Told in a line what was found in the folder: a damaged file that is made anew, or the lock of
            a process that was killed.
        plan: How to attack and to judge; made of the `settings` unless it is given.
        settings: The fields of a `Plan`: protocol, eps, norm, alpha, steps, search, attacks, suite, queries,
            seed, batch and checks.

    >>> import torch, robustmetric as rm
    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
    >>> record = rm.evaluate(rm.model("c2f2", size=8), images, labels, steps=2, queries=8, checks="none")
    >>> 0 <= record["ERS"] <= 100, record.settings.protocol
    (True, 'strict')

    """
    if plan is None:
        plan = Plan.make(**settings)
    elif not isinstance(plan, Plan):
        raise UserError(f"plan is a {type(plan).__name__}; give a Plan, as Plan.make returns it")
    elif settings:
        raise UserError(f"a plan and {', '.join(settings)} are given; give the plan alone, or its settings")
    subject = Subject(
        model,
        images,
        labels,
        gallery=gallery,
        own=own,
        cameras=cameras,
        gallery_cameras=gallery_cameras,
        classes=classes,
        train_classes=train_classes,
        name=name,
        data=data,
        surrogate=surrogate,
    )
    return Evaluation(subject, plan, out, progress, report).run()


class Evaluation(Staged[Materials, Record]):
    """An evaluation in pieces that several workers can share.

    The network and images of `subject` are evaluated as `plan` says. Each finished piece is a file in
    `out/parts`, or stays in memory if `out` is None. `work(k, n)` does the k-th of n shares of all pieces;
    `run` does what is left and puts the record together. `progress` is told the stage, how many of its
    pieces are done, and how many there are; `report` is told in a line what was found damaged in the folder.

    >>> import torch
    >>> subject = Subject(nn.Flatten(), torch.rand(20, 1, 8, 8), torch.arange(20) % 4)
    >>> evaluation = Evaluation(subject, Plan.make(attacks=["ES", "GTM"], checks="none"))
    >>> [stage.name for stage in evaluation.materials.stages]
    ['embed', 'retrieval', 'ES', 'GTM', 'checks']
    """

    def __init__(
        self,
        subject: Subject,
        plan: Plan,
        out: str | Path | None = None,
        progress: Progress | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        # A search that is given as an object brings its own network.
        network = plan.search_on(subject.surrogate).network
        if subject.surrogate is None and network is not None:
            subject = replace(subject, surrogate=network)
        subject.check(plan)
        super().__init__(out, progress, report)
        self.subject, self.plan = subject, plan
        self.materials = Materials(subject, plan, self.store)

    @property
    def stages(self) -> tuple[Stage[Materials], ...]:
        """All pieces by stage, in the order of their making."""
        return self.materials.stages

    def describe(self) -> dict[str, Any]:
        """Return all that the record depends on, in JSON's types."""
        return {**self.plan.describe(), **self.subject.identity(), "versions": versions()}

    def probe(self) -> None:
        """Try the networks on a batch: one that fails leaves no trace."""
        self.subject.probe(self.materials.search, self.plan)

    def build(self) -> Record:
        """Put the record together."""
        return build_record(self.materials)

    def read(self, folder: Path) -> Record:
        """Read the finished record from its `folder`."""
        return FORMAT.read_whole(folder)

    def embed(self) -> None:
        """Make the embeddings alone; call it inside `frozen`."""
        stage = self.materials.stages[0]
        for piece in stage.pieces:
            if not self.store.has(piece):
                self.store.keep(piece, piece.make(self.materials))
            self._tell(stage)
