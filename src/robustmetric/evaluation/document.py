"""Documents: a JSON file with a digest of its own, and the values of each query in a file beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from robustmetric.evaluation.schema import Part
from robustmetric.evaluation.store import ARRAYS, GO_ON
from robustmetric.files import DamagedError, digest_of_entries, write_atomically, writing
from robustmetric.validate import UserError, command_line, shorten


class Arrays(Part):
    """The file of per-query values."""

    file: str
    sha256: str


class Sealed(Protocol):
    """A pydantic model with a digest of itself."""

    @property
    def sha256(self) -> str | None:
        """The digest of all the other entries."""

    def model_dump(self, *, mode: str, by_alias: bool) -> dict[str, Any]:
        """Return the entries."""

    def model_copy(self, *, update: dict[str, Any]) -> Any:
        """Return the same with other entries."""


class Document(Sealed, Protocol):
    """A record or a certificate, with the digest of its arrays."""

    @property
    def arrays(self) -> Arrays:
        """The file of per-query values."""


S = TypeVar("S", bound=Sealed)
D = TypeVar("D", bound=Document)


def seal(document: S) -> S:
    """Return a `document` with the digest of all its other entries."""
    whole: S = document.model_copy(update={"sha256": digest_of_entries(_dumped(document))})
    return whole


def write_json(file: Path, document: Sealed, then: str) -> None:
    """Write a `document` to its `file`; if that fails, say what to do, and what `then`."""
    text = json.dumps(_dumped(document), indent=1, ensure_ascii=False) + "\n"
    with writing(file, then):
        write_atomically(file, lambda draft: draft.write(text.encode()))


def read_json(file: Path, kind: Callable[..., S], what: str, schema: str) -> S:
    """Read a document of a `kind` from its `file`; another one, or a damaged one, is refused.

    `what` it is called, and `schema` is what its entry of that name says.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not a {what}: it is not JSON ({error})") from None
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise UserError(
            f"{file} is not a {what} of this version: its schema is {repr(found)[:80]}, not {schema!r}"
        )
    try:
        document = kind(**content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{file} is not a whole {what}: {place}: {first['msg']}") from None
    if document.sha256 not in (None, digest_of_entries(content)):
        raise DamagedError(f"{file} is damaged, or was changed by hand: its digest does not match")
    return document


@dataclass(frozen=True)
class Format(Generic[D]):
    """How documents of a `kind` are written and read.

    `what` they are called, `schema` is what their entry of that name says, `file` the name of their file, and
    `inside` that of the folder of a run that they are in.
    """

    kind: Callable[..., D]
    what: str
    schema: str
    file: str
    inside: str

    def make(self, made: dict[str, Any], arrays: bytes) -> D:
        """Put a document together with the digest of its arrays, and its own."""
        return seal(self.kind(arrays=Arrays(file=ARRAYS, sha256=hashlib.sha256(arrays).hexdigest()), **made))

    def write(self, folder: Path | None, made: dict[str, Any], arrays: dict[str, Tensor]) -> D:
        """Make a document and, if there is a folder, write it and its arrays there."""
        content = save({name: value.contiguous() for name, value in arrays.items()})
        found = self.make(made, content)
        if folder is not None:
            with writing(folder / ARRAYS, GO_ON):
                write_atomically(folder / ARRAYS, lambda draft: draft.write(content))
            write_json(folder / self.file, found, GO_ON)
        return found

    def find(self, path: str | Path) -> Path:
        """Return the JSON file of the document at a path: itself, in that folder, or in that run."""
        path = Path(path)
        for file in (path / self.file, path / self.inside / self.file, path):
            if file.is_file():
                return file
        inside = sorted(path.glob(f"*/{self.file}")) if path.is_dir() else []
        if inside:
            raise FileNotFoundError(
                f"there is no {self.what} in {path} itself; give the one that is meant: "
                f"{shorten([file.parent for file in inside])}"
            )
        if (path / "recipe.yaml").is_file():  # a run
            done, command = _MADE_BY[self.what]
            raise FileNotFoundError(f"{path} is not {done} yet: {command_line([*command, str(path)])}")
        raise FileNotFoundError(
            f"there is no {self.what} {path}; give a {self.file}, or a folder that holds one"
        )

    def read(self, path: str | Path) -> D:
        """Read a document from its JSON file or the folder that it is in; a damaged one is refused."""
        return read_json(self.find(path), self.kind, self.what, self.schema)

    def read_whole(self, folder: Path) -> D:
        """Read a document from its folder, and see that its arrays, if they are there, are its own."""
        document = self.read(folder)
        if (folder / document.arrays.file).exists():
            self.read_arrays(folder)
        return document

    def read_arrays(self, path: str | Path) -> dict[str, Tensor]:
        """Read the per-query arrays (Q, …) beside the document at a path; a changed file is refused."""
        beside = self.find(path)
        document = self.read(beside)
        name = document.arrays.file
        if Path(name).name != name:
            raise UserError(f"the {self.what} {path} names the arrays {name!r}; they stand beside it")
        file = beside.parent / name
        if not file.is_file():
            raise FileNotFoundError(f"there is no {name} beside the {self.what} {path}")
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != document.arrays.sha256:
            raise DamagedError(f"{file} is not what its {self.what} was written with: its digest differs")
        try:
            return load(content)
        except SafetensorError as error:
            raise DamagedError(f"{file} holds no arrays: {error}; evaluate again") from None


_MADE_BY = {
    "record": ("evaluated", ["robustmetric", "evaluate"]),
    "certificate": ("certified", ["robustmetric", "certify"]),
    "verification": ("verified", ["robustmetric", "verify"]),
}


def _dumped(document: Sealed) -> dict[str, Any]:
    return document.model_dump(mode="json", by_alias=True)
