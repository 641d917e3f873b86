"""The folder of an evaluation: what it was planned as, and its finished pieces, on disk or in memory."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from robustmetric.evaluation.identity import SINCE, differences
from robustmetric.files import (
    DamagedError,
    is_draft,
    read_sealed,
    write_atomically,
    write_sealed,
    writing,
)
from robustmetric.locks import LOCK
from robustmetric.validate import UserError, brief

PLAN, RECORD, ARRAYS, PARTS = "plan.json", "record.json", "queries.safetensors", "parts"
CERTIFICATE, VERIFICATION = "certificate.json", "verification.json"
GO_ON = "what is finished is kept, and the same command goes on from there"
"""What to do when a file cannot be written."""

T = TypeVar("T")


class Storable(Protocol[T]):
    """What a store keeps: something with a file name, that can be written as bytes and read back."""

    @property
    def file(self) -> str:
        """The name of its file."""

    def encode(self, value: T) -> bytes:
        """Write what was made as bytes."""

    def decode(self, content: bytes) -> T:
        """Read what `encode` wrote; damaged bytes raise a ValueError."""


class Store:
    """Finished pieces: files in `folder/parts`, or in memory without a folder.

    `report` is told in a line of what was found damaged; `document` is the file that is written at the end.
    """

    def __init__(
        self, folder: Path | None = None, report: Callable[[str], None] = print, document: str = RECORD
    ) -> None:
        self.folder, self.report, self.document = folder, report, document
        self._memory: dict[str, Any] = {}

    def has(self, piece: Storable[Any]) -> bool:
        """Return whether a piece is finished."""
        return piece.file in self._memory if self.folder is None else self._path(piece).exists()

    def keep(self, piece: Storable[T], value: T) -> None:
        """Keep what was made of a piece; on disk it appears complete or not at all."""
        if self.folder is None:
            self._memory[piece.file] = value
            return
        content = piece.encode(value)
        with writing(self._path(piece), GO_ON):
            self._path(piece).parent.mkdir(exist_ok=True)
            write_sealed(self._path(piece), lambda file: file.write(content), self.key(piece))

    def get(self, piece: Storable[T]) -> T:
        """Return what was made of a finished piece; one that is not what was kept raises a `DamagedError`."""
        if self.folder is None:
            value: T = self._memory[piece.file]
            return value
        path = self._path(piece)
        try:
            return piece.decode(read_sealed(path, self.key(piece)))
        except FileNotFoundError:
            raise DamagedError(f"{path} is gone") from None
        except DamagedError:
            raise
        except ValueError as error:
            raise DamagedError(f"{path} is damaged: {error}") from None

    def key(self, piece: Storable[Any]) -> bytes:
        """Return what the digest of a piece covers besides its content: no piece stands in for another."""
        return f"{self._plan} {piece.file}\n".encode()

    @cached_property
    def _plan(self) -> str:
        assert self.folder is not None  # noqa: S101
        return hashlib.sha256((self.folder / PLAN).read_bytes()).hexdigest()

    def drop_damaged(self, pieces: Iterable[Storable[Any]]) -> None:
        """Remove those of the `pieces` that are there and damaged, and say so: they will be made anew."""
        for piece in filter(self.has, pieces):
            try:
                self.get(piece)
            except DamagedError as error:
                self.report(f"{error}; it is made anew")
                self._path(piece).unlink(missing_ok=True)

    def wait(self, pieces: Sequence[Storable[Any]]) -> bool:
        """Wait for pieces of other workers; tell that they are there, and not gone into a record."""
        for piece in pieces:
            while not self.has(piece):
                if self.finished:
                    return False
                time.sleep(0.05)
        return True

    @property
    def finished(self) -> bool:
        """Whether the record is there."""
        return self.folder is not None and (self.folder / self.document).exists()

    def begin(self, identity: dict[str, Any]) -> None:
        """Write down what is to be done."""
        assert self.folder is not None  # noqa: S101
        text = json.dumps(identity, indent=1, ensure_ascii=False) + "\n"
        with writing(self.folder / PLAN, GO_ON):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / PLAN, lambda file: file.write(text.encode()))

    def tidy(self) -> None:
        """Remove the pieces of a finished record, and what was left of unfinished files."""
        if self.folder is None:
            return
        parts = self.folder / PARTS
        # The record is there, whether these can be removed or not: a worker may not have heard yet.
        with suppress(OSError):
            pieces = list(parts.iterdir()) if parts.is_dir() and not parts.is_symlink() else []
            for file in [*filter(is_draft, self.folder.iterdir()), *pieces]:
                file.unlink(missing_ok=True)
            if parts.is_dir():
                parts.rmdir()

    def _path(self, piece: Storable[Any]) -> Path:
        assert self.folder is not None  # noqa: S101
        return self.folder / PARTS / piece.file


def check_folder(folder: Path, identity: dict[str, Any], what: str = "evaluation") -> bool:
    """Refuse a folder with anything else than this evaluation in it; tell whether that has begun there.

    An `identity` may name some of what an evaluation depends on: the rest is not compared. `what` it is
    called, which the folder's plan has as `kind` if it is no evaluation.

    >>> check_folder(Path("nowhere"), {})
    False
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder for the record", parameter="out")
    if (folder / PARTS).is_symlink():
        raise UserError(
            f"{folder / PARTS} is a link, and pieces are kept in a folder: look at it, and remove it",
            parameter="out",
        )
    file = folder / PLAN
    if not file.exists():
        others = folder.exists() and any(
            not is_draft(path) and path.name != LOCK for path in folder.iterdir()
        )
        if others and not file.exists():
            raise UserError(
                f"{folder} is not empty and holds no {what}: give another folder", parameter="out"
            )
        return False
    before = _planned(file)
    if (kind := before.get("kind", "evaluation")) != what:
        raise UserError(
            f"{folder} holds another kind of work, {brief(kind)}: give another folder", parameter="out"
        )
    now = json.loads(json.dumps(identity))
    since = {name: value for name, value in SINCE.items() if name in now.get("settings", {})}
    before = {**before, "settings": {**since, **before["settings"]}}
    before = {key: before.get(key) for key in now}
    # Options that no name tells are said only if the names are the same.
    options = [whole.pop("options", None) for whole in (before, now)]
    if differing := differences(before, now) or differences(*options):
        raise UserError(
            f"{folder} holds another {what}: {'; '.join(differing)}; give another folder, or remove this one",
            parameter="out",
        )
    return True


def _planned(file: Path) -> dict[str, Any]:
    """Read what an evaluation was planned as."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
        if not isinstance(found.get("settings"), dict):
            raise TypeError("it holds no settings")
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} is damaged ({error}): remove {file.parent} and run the same command again, or give "
            "another folder",
            parameter="out",
        ) from None
    return found
