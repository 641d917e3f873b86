"""Work in pieces: made once, kept, resumed, shared by workers, and put together into a document."""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor

from robustmetric.errors import UserError, a, brief
from robustmetric.evaluation.data import Subject
from robustmetric.evaluation.document import GO_ON, Document, Format, FrozenModel
from robustmetric.evaluation.identity import differences, versions
from robustmetric.evaluation.plan import Plan, SearchPlan
from robustmetric.files import (
    DamagedError,
    check_writable,
    is_draft,
    load_entries,
    read_sealed,
    save_entries,
    write_sealed,
    writing,
)
from robustmetric.locks import LOCK, locked

PLAN, PARTS = "plan.json", "parts"

P = TypeVar("P", bound=Plan | SearchPlan)
D = TypeVar("D", bound=Document)
Tensors = dict[str, Tensor]
Tick = Callable[..., None]
"""Called with the number of parts of a piece that are done, 1 by default."""
Progress = Callable[[str, float, int], None]
"""Called with a stage, its pieces that are done, with shares of those that are not, and all its pieces."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of work: what makes it, and the file that keeps it.

    It is made after all pieces of the phases before its own. `make` returns tensors by name, or values of
    JSON's types if the `file` ends in .json; it is given a function to call with the number of parts that are
    done, of `parts`. `cost` is about the number of passes of an image through a network; a pass back counts
    twice.
    """

    stage: str
    phase: int
    file: str
    make: Callable[[Tick], Any]
    cost: int = 1
    parts: int = 1


def blocks(
    stage: str,
    phase: int,
    numbers: Tensor,
    size: int,
    make: Callable[[Tensor, Tick], Tensors],
    *,
    cost: int = 1,
    parts: int | None = None,
    file: str | None = None,
) -> Iterator[Piece]:
    """Split `numbers` (N,) into pieces of `size`, in files that are named after the stage unless by `file`.

    `cost` is that of one number, `parts` are those of a piece, by default its numbers.
    """
    for k, part in enumerate(numbers.split(size)):
        name = f"{file or stage}-{k:05d}.safetensors"
        yield Piece(stage, phase, name, partial(make, part), cost * len(part), parts or len(part))


class Job(ABC, Generic[P, D]):
    """Work in pieces that several workers can share: a network and data, `subject`, judged as `plan` says.

    A finished piece is a file in `out/parts`, or stays in memory if `out` is None. `run` makes the missing
    pieces and puts the document together; `work(k, n)` makes the k-th of n shares of the pieces. `progress`
    is called with how far each stage is, `report` in a line about what was damaged or left in the folder.
    """

    form: ClassVar[Format[Any]]

    def __init__(
        self,
        subject: Subject,
        plan: P,
        out: str | Path | None = None,
        progress: Progress | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        self.subject, self.plan, self.data = subject, plan, subject.data
        self.folder = None if out is None else Path(out)
        self.progress, self.report = progress, report
        self._memory: dict[str, Any] = {}
        self._parts = Path(out or "") / PARTS
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Refuse a plan that does not fit the data, and draw the queries."""

    @cached_property
    @abstractmethod
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, stage by stage."""

    @abstractmethod
    def probe(self) -> None:
        """Try the networks on a batch, so that one that fails leaves no trace."""

    @abstractmethod
    def build(self) -> tuple[dict[str, Any], Tensors]:
        """Return what the document says of the scores, and the values of each query, from finished pieces."""

    def describe(self) -> dict[str, Any]:
        """Return all that the document depends on, in JSON's types; its plan as `settings`."""
        return {**self.plan.describe(), **self.subject.identity(), "versions": versions()}

    def frozen(self) -> ExitStack:
        """Hold the networks in evaluation mode, frozen."""
        return self.subject.frozen()

    @cached_property
    def stages(self) -> dict[str, list[Piece]]:
        """The pieces by stage."""
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.stage, []).append(piece)
        return found

    def run(self, help_out: Callable[[], None] | None = None) -> D:
        """Make what is missing and return the document; nobody else can work in the folder meanwhile.

        `help_out` is called first if there is anything to do: it may start workers.
        """
        if self.folder is None:
            self.probe()
            return self._run(help_out)
        if (finished := self._finished()) is not None:
            if (self.folder / LOCK).exists():  # of a process that was killed, unless it is tidying up
                with suppress(UserError), locked(self.folder, "tidying up", lambda _: None):
                    pass
            return finished
        with locked(self.folder, a(self.form.work), self.report):
            finished = self._begin()
            return self._run(help_out) if finished is None else finished

    def work(self, share: int, shares: int) -> None:
        """Make one `share`, counted from 0, of `shares` of the pieces."""
        if self._begin() is None:
            with self.frozen():
                self._make(share, shares)

    def tell(self, stage: str | None = None, part: float = 0.0) -> None:
        """Report the progress of a `stage`, by default of all; `part` of a piece is done besides."""
        if self.progress is not None:
            for name in self.stages if stage is None else [stage]:
                pieces = self.stages[name]
                self.progress(name, sum(map(self.has, pieces)) + part, len(pieces))

    def has(self, piece: Piece) -> bool:
        """Return whether a `piece` is finished."""
        return piece.file in self._memory if self.folder is None else (self._parts / piece.file).exists()

    def get(self, piece: Piece) -> Any:
        """Return the value of a finished `piece`; one that was damaged since is made again."""
        try:
            return self._read(piece)
        except DamagedError as error:
            self.report(f"{error}; it is made anew")
        value = piece.make(lambda count=1: None)
        self.keep(piece, value)
        return value

    def joined(self, stage: str) -> Tensors:
        """Return the tensors of all pieces of a `stage`, joined by name."""
        kept = [self.get(piece) for piece in self.stages[stage]]
        return {name: torch.cat([tensors[name] for tensors in kept]) for name in kept[0]}

    def keep(self, piece: Piece, value: Any) -> None:
        """Keep the `value` of a `piece`; on disk it appears complete or not at all."""
        if self.folder is None:
            self._memory[piece.file] = value
            return
        path = self._parts / piece.file
        content = json.dumps(value).encode() if path.suffix == ".json" else to_bytes(value)
        with writing(path, GO_ON):
            path.parent.mkdir(exist_ok=True)
            write_sealed(path, lambda file: file.write(content), self._key(piece))

    def _run(self, help_out: Callable[[], None] | None) -> D:
        self.tell()
        if help_out is not None:
            help_out()
        with self.frozen():
            self._make(0, 1)
            scores, arrays = self.build()
            entries = {**self.subject.describe(), **scores, "versions": versions()}
            document: D = self.form.write(self.folder, entries, arrays)
        self._tidy()
        return document

    def _begin(self) -> D | None:
        """Check data and networks and write the plan; return the document if it is finished."""
        if (finished := self._finished()) is not None:
            return finished
        if not self._begun:
            self.probe()
            if self.folder is not None:
                with writing(self.folder / PLAN, GO_ON):
                    self.folder.mkdir(parents=True, exist_ok=True)
                save_entries(self.folder / PLAN, self._identity, GO_ON)
        return None

    def _finished(self) -> D | None:
        if self.folder is None or not self._begun or not self.form.there(self.folder):
            return None
        try:
            document: D = self.form.read_whole(self.folder)
        except UserError as error:
            again = f"remove {self.folder / self.form.file} and run the same command again"
            raise UserError(f"{error}; {again}") from None
        self._tidy()
        return document

    def _make(self, share: int, shares: int) -> None:
        """Make every `shares`-th missing piece; wait for the others, unless the document is there."""
        turn = 0
        for phase in sorted({piece.phase for piece in self.pieces}):
            pieces = [piece for piece in self.pieces if piece.phase == phase]
            for piece in pieces:
                if turn % shares == share and not self.has(piece):
                    self.keep(piece, piece.make(Ticks(piece.parts, partial(self.tell, piece.stage))))
                    self.tell(piece.stage)
                turn += 1
            for piece in pieces if shares > 1 else ():
                while not self.has(piece):
                    if self.form.there(self.folder):
                        return
                    time.sleep(0.05)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return {"kind": self.form.work, **self.describe()}

    @property
    def _begun(self) -> bool:
        return self.folder is not None and check_folder(self.folder, self._identity)

    def _read(self, piece: Piece) -> Any:
        if self.folder is None:
            return self._memory[piece.file]
        path = self._parts / piece.file
        try:
            content = read_sealed(path, self._key(piece))
        except FileNotFoundError:
            raise DamagedError(f"{path} is gone") from None
        return json.loads(content) if path.suffix == ".json" else load(content)

    def _key(self, piece: Piece) -> bytes:
        """Return what the digest of a piece covers besides its content: no piece stands in for another."""
        return f"{self._digest_of_plan} {piece.file}\n".encode()

    @cached_property
    def _digest_of_plan(self) -> str:
        assert self.folder is not None  # noqa: S101
        return hashlib.sha256((self.folder / PLAN).read_bytes()).hexdigest()

    def _tidy(self) -> None:
        """Remove the pieces of a finished document, and drafts of files."""
        if self.folder is None:
            return
        parts = self._parts
        # The document is there, whether these can be removed or not: a worker may not have noticed yet.
        with suppress(OSError):
            pieces = list(parts.iterdir()) if parts.is_dir() and not parts.is_symlink() else []
            for file in [*filter(is_draft, self.folder.iterdir()), *pieces]:
                file.unlink(missing_ok=True)
            if parts.is_dir():
                parts.rmdir()


class Ticks:
    """Counts the parts of a piece that are done, and tells its share at most twice a second."""

    def __init__(self, parts: int, tell: Callable[[float], None]) -> None:
        self.parts, self.tell, self.done, self.told = parts, tell, 0, time.monotonic()

    def __call__(self, count: int = 1) -> None:
        """Count `count` parts."""
        self.done += count
        if time.monotonic() - self.told > 0.5:
            self.told = time.monotonic()
            self.tell(min(self.done / self.parts, 0.99))


def open_folder(form: Format[Any], out: Path, settings: FrozenModel) -> bool:
    """Return whether a document of `settings` is finished in the folder `out`; refuse other work there."""
    check_folder(out, {"kind": form.work, "settings": settings.model_dump(mode="json")})
    if not form.there(out):
        check_writable(out)
    return form.there(out)


def check_folder(folder: Path, identity: dict[str, Any]) -> bool:
    """Refuse a `folder` that holds anything but the work of this `identity`; return whether that has begun.

    An `identity` may name some of what the work depends on: the rest is not compared.

    >>> check_folder(Path("nowhere"), {"kind": "evaluation"})
    False
    """
    what, file = identity["kind"], folder / PLAN

    def refused(told: str, advice: str = ": give another folder") -> UserError:
        return UserError(f"{told}{advice}", parameter="out")

    if folder.exists() and not folder.is_dir():
        raise refused(f"{folder} is a file", f": give a folder for the {what}")
    if (folder / PARTS).is_symlink():
        raise refused(f"{folder / PARTS} is a link, and pieces are kept in a folder")
    if not file.exists():
        inside = folder.iterdir() if folder.exists() else ()
        others = any(not is_draft(path) and not path.name.endswith(LOCK) for path in inside)
        if others and not file.exists():  # now: another worker may have begun
            raise refused(f"{folder} is not empty and holds no {what}")
        return False
    try:
        before = load_entries(file)
    except DamagedError as error:
        raise refused(str(error), f"; remove {folder} and run the same command again") from None
    if (kind := before.get("kind")) != what:
        raise refused(f"{folder} holds another kind of work, {brief(kind)}")
    now = json.loads(json.dumps(identity))
    before = {key: before.get(key) for key in now}
    # Options that no name tells matter only if the names are the same.
    options = [whole.pop("options", None) for whole in (before, now)]
    if differing := differences(before, now) or differences(*options):
        told = f"{folder} holds another {what}: {'; '.join(differing)}"
        raise refused(told, "; give another folder, or remove this one")
    return True
