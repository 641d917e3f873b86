"""Work in pieces, stage by stage: made once, kept, read back, and put together into a document."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from robustmetric.attacks import Search
from robustmetric.evaluation.store import RECORD, Store, check_folder
from robustmetric.evaluation.subject import Subject
from robustmetric.files import DamagedError
from robustmetric.locks import LOCK, locked
from robustmetric.perturb import Budget
from robustmetric.validate import UserError

T = TypeVar("T")
M = TypeVar("M")
R = TypeVar("R")
Tensors = dict[str, Tensor]

Tick = Callable[..., None]
"""Told that a piece in the making got on, by `count` of `of` parts."""

Progress = Callable[[str, float, int], None]
"""Told the stage (embed, retrieval, an attack's name, checks), how many pieces are done, of how many.

A piece in the making counts by its share.
"""


class Piece(ABC, Generic[M, T]):
    """A piece of the work that is made of materials, kept and read back on its own."""

    stage: str

    @property
    @abstractmethod
    def file(self) -> str:
        """The name of its file."""

    @abstractmethod
    def make(self, materials: M, tick: Tick | None = None) -> T:
        """Make the piece; `tick` is told how it gets on."""

    def asks(self, materials: M) -> int:
        """Return how often `tick` will be told, as far as can be said before."""
        return 1

    def cost(self, materials: M) -> int:
        """Return how many passes of an image through a network it takes, about; one back counts for two."""
        return 0

    @abstractmethod
    def encode(self, value: T) -> bytes:
        """Write what was made as bytes."""

    @abstractmethod
    def decode(self, content: bytes) -> T:
        """Read what `encode` wrote; damaged bytes raise a ValueError."""


class TensorPiece(Piece[M, Tensors]):
    """A piece that is kept as tensors by name."""

    def encode(self, value: Tensors) -> bytes:
        """Write tensors as safetensors."""
        return save(value)

    def decode(self, content: bytes) -> Tensors:
        """Read safetensors."""
        try:
            return load(content)
        except SafetensorError as error:
            raise ValueError(str(error)) from None


@dataclass(frozen=True)
class Stage(Generic[M]):
    """A stage of the work and its pieces; those of a phase need all of the phases before."""

    name: str
    phase: int
    pieces: tuple[Piece[M, Any], ...]


def search_cost(search: Search, budget: Budget) -> int:
    """Return how many passes of an image a `search` takes within a `budget`; one back counts for two."""
    return search.num_evaluations(budget) * (3 if search.follows_gradient else 1)


def fetch(store: Store, piece: Piece[M, T], materials: M) -> T:
    """Return what was made of a finished piece; one that was damaged since then is made anew."""
    try:
        return store.get(piece)
    except DamagedError as error:
        store.report(f"{error}; it is made anew")
    value = piece.make(materials)
    store.keep(piece, value)
    return value


class Staged(ABC, Generic[M, R]):
    """Work on a subject in pieces that several workers can share.

    Each finished piece is a file in `out/parts`, or stays in memory if `out` is None. `work(k, n)` does the
    k-th of n shares of all pieces; `run` does what is left and puts the document together. `progress` is told
    the stage, how many of its pieces are done, and how many there are; `report` is told in a line what was
    found damaged in the folder. `what` it is called, and `document` is the file that ends it.
    """

    what: ClassVar[str] = "evaluation"
    document: ClassVar[str] = RECORD

    subject: Subject
    materials: M

    def __init__(
        self, out: str | Path | None, progress: Progress | None, report: Callable[[str], None]
    ) -> None:
        self.store = Store(None if out is None else Path(out), report, self.document)
        self.progress = progress

    @property
    @abstractmethod
    def stages(self) -> tuple[Stage[M], ...]:
        """All pieces by stage, in the order of their making."""

    @property
    def costs(self) -> dict[str, list[int]]:
        """What each piece of each stage costs; nothing if the document is there."""
        if self.store.finished:
            return {}
        return {stage.name: [piece.cost(self.materials) for piece in stage.pieces] for stage in self.stages}

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return all that the document depends on, in JSON's types."""

    @abstractmethod
    def probe(self) -> None:
        """Try the networks on a batch: one that fails leaves no trace."""

    @abstractmethod
    def build(self) -> R:
        """Put the document together of finished pieces."""

    @abstractmethod
    def read(self, folder: Path) -> R:
        """Read a finished document from a folder; a damaged one raises a UserError."""

    def run(self, help_out: Callable[[], None] | None = None) -> R:
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
        with locked(folder, f"{'an' if self.what[0] in 'aeiou' else 'a'} {self.what}", self.store.report):
            finished = self.begin()
            return self._run(help_out) if finished is None else finished

    def _run(self, help_out: Callable[[], None] | None) -> R:
        self.store.drop_damaged(piece for stage in self.stages for piece in stage.pieces)
        self.tell()  # what there is to do, before anything is done
        if help_out is not None:
            help_out()
        with self.subject.frozen():
            self._share(0, 1)
            return self.build()

    def work(self, share: int, shares: int) -> None:
        """Do one `share`, counted from 0, of `shares` of the pieces; `run` puts them together."""
        if self.begin() is None:
            with self.subject.frozen():
                self._share(share, shares)

    def begin(self) -> R | None:
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
        return self.describe()

    @property
    def _begun(self) -> bool:
        """Whether this work, and no other, has begun in its folder."""
        return self.store.folder is not None and check_folder(self.store.folder, self._identity, self.what)

    def _finished(self) -> R | None:
        """Return the record in the folder, if it is there."""
        folder = self.store.folder
        if folder is None or not self._begun or not self.store.finished:
            return None
        try:
            record = self.read(folder)
        except UserError as error:
            raise UserError(
                f"{error}; remove {folder / self.document} and run the same command again: it is made anew"
            ) from None
        self.store.tidy()
        return record

    def tell(self) -> None:
        """Report the progress of all stages."""
        for stage in self.stages:
            self._tell(stage)

    def _share(self, share: int, shares: int) -> None:
        """Make every `shares`-th missing piece and wait for the others, unless a record took them."""
        turn = 0
        for phase in sorted({stage.phase for stage in self.stages}):
            stages = [stage for stage in self.stages if stage.phase == phase]
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

    def _tell(self, stage: Stage[M], part: float = 0.0) -> None:
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
