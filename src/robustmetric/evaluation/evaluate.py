"""Evaluate a network: how well it ranks, and how well it keeps its ranking under attack.

Reads from the top: `evaluate` makes an `Evaluation` of a subject and a plan and runs it; a run makes the
pieces that are missing, stage by stage, and puts the record together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from robustmetric.evaluation.identity import versions
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.pieces import Materials, Stage
from robustmetric.evaluation.plan import Plan
from robustmetric.evaluation.record import Record, build_record, load_arrays, load_record
from robustmetric.evaluation.store import RECORD, Store, check_folder
from robustmetric.evaluation.subject import Subject
from robustmetric.locks import LOCK, locked
from robustmetric.validate import UserError

Progress = Callable[[str, float, int], None]
"""Told the stage (embed, retrieval, an attack's name, checks), how many pieces are done, of how many.

A piece in the making counts by its share.
"""


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


class Evaluation:
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
        self.subject, self.plan = subject, plan
        self.store = Store(None if out is None else Path(out), report)
        self.materials = Materials(subject, plan, self.store)
        self.progress = progress

    def run(self, help_out: Callable[[], None] | None = None) -> Record:
        """Do all that is not done yet, and put the record together; nobody else can in the same folder.

        `help_out` is called before, if there is anything to do: it may let workers do their shares.
        """
        folder = self.store.folder
        if folder is None:
            self.probe()
            return self._run(help_out)
        if (finished := self._finished()) is not None:
            if (folder / LOCK).exists():  # of a process that was killed, unless it tidies up
                with suppress(UserError), locked(folder, "tidying up", lambda _: None):
                    pass
            return finished
        with locked(folder, "an evaluation", self.store.report):
            finished = self.begin()
            return self._run(help_out) if finished is None else finished

    def _run(self, help_out: Callable[[], None] | None) -> Record:
        self.store.drop_damaged(piece for stage in self.materials.stages for piece in stage.pieces)
        self.tell()  # what there is to do, before anything is done
        if help_out is not None:
            help_out()
        with self.subject.frozen():
            self._share(0, 1)
            return build_record(self.materials)

    def work(self, share: int, shares: int) -> None:
        """Do one `share`, counted from 0, of `shares` of the pieces; `run` puts them together."""
        if self.begin() is None:
            with self.subject.frozen():
                self._share(share, shares)

    def begin(self) -> Record | None:
        """Check data and network, write down what is to be done; return the record if it is finished."""
        if self.store.folder is None:
            self.probe()
        elif (finished := self._finished()) is not None:
            return finished
        elif not self._begun:
            self.probe()
            self.store.begin(self._identity)
        return None

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return {**self.plan.describe(), **self.subject.identity(), "versions": versions()}

    @property
    def _begun(self) -> bool:
        """Whether this evaluation, and no other, has begun in its folder."""
        return self.store.folder is not None and check_folder(self.store.folder, self._identity)

    def _finished(self) -> Record | None:
        """Return the record in the folder, if it is there."""
        folder = self.store.folder
        if folder is None or not self._begun or not self.store.finished:
            return None
        try:
            record = load_record(folder)
            if (folder / record.arrays.file).exists():
                load_arrays(folder)
        except UserError as error:
            raise UserError(
                f"{error}; remove {folder / RECORD} and run the same command again: it is made anew"
            ) from None
        self.store.tidy()
        return record

    def probe(self) -> None:
        """Try the networks on a batch: one that fails leaves no trace."""
        self.subject.probe(self.materials.search, self.plan)

    def embed(self) -> None:
        """Make the embeddings alone; call it inside `frozen`."""
        stage = self.materials.stages[0]
        for piece in stage.pieces:
            if not self.store.has(piece):
                self.store.keep(piece, piece.make(self.materials))
            self._tell(stage)

    def tell(self) -> None:
        """Report the progress of all stages."""
        for stage in self.materials.stages:
            self._tell(stage)

    def _share(self, share: int, shares: int) -> None:
        """Make every `shares`-th missing piece and wait for the others, unless a record took them."""
        turn = 0
        for phase in sorted({stage.phase for stage in self.materials.stages}):
            stages = [stage for stage in self.materials.stages if stage.phase == phase]
            for stage in stages:
                expected = 0  # the last piece tells better than what the next one expects
                for piece in stage.pieces:
                    expected = expected or piece.asks(self.materials)
                    if turn % shares == share and not self.store.has(piece):
                        ticks = Ticks(lambda part: self._tell(stage, part), expected)  # noqa: B023
                        self.store.keep(piece, piece.make(self.materials, ticks))
                        expected = ticks.asked or expected
                        self._tell(stage)
                    turn += 1
            if shares > 1 and not self.store.wait([piece for stage in stages for piece in stage.pieces]):
                return

    def _tell(self, stage: Stage, part: float = 0.0) -> None:
        if self.progress is not None:
            done = sum(map(self.store.has, stage.pieces)) + part
            self.progress(stage.name, done, len(stage.pieces))


class Ticks:
    """Tells of a piece in the making: by how often its search has asked, of how often it may ask in all."""

    def __init__(self, tell: Callable[[float], None], expected: int) -> None:
        self.tell, self.expected = tell, expected
        self.asked, self.told = 0, time.monotonic()

    def __call__(self, count: int = 1, of: int | None = None) -> None:
        """Count, and tell the share that is done, but no more than twice a second."""
        self.asked += count
        if time.monotonic() - self.told > 0.5:
            self.told = time.monotonic()
            self.tell(min(self.asked / (of or self.expected), 0.99))
