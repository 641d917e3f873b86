"""Documents: a JSON file with a digest of its own, and the values of each query in a file beside it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor

from robustmetric.errors import UserError, brief, shorten
from robustmetric.files import DamagedError, digest_of_entries, load_entries, save, save_entries
from robustmetric.registry import unknown
from robustmetric.text import command_line

ARRAYS = "queries.safetensors"
GO_ON = "what is finished is kept, and the same command resumes"
"""What to do when a file cannot be written."""


def _null(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_null)]
"""A figure; null where there is none, for JSON has neither NaN nor infinity."""


class FrozenModel(BaseModel):
    """Values of a document: they do not change, and there are no others than those that are named."""

    model_config = ConfigDict(extra="forbid", frozen=True)


P = TypeVar("P", bound=BaseModel)


def validated(kind: type[P], what: str, given: dict[str, Any]) -> P:
    """Return a model of a `kind` with the `given` values; say which `what` is unknown or wrong.

    >>> class Sizes(FrozenModel):
    ...     rows: int = Field(3, ge=1, description="number of rows")
    >>> validated(Sizes, "setting", {"rows": 0})
    Traceback (most recent call last):
    ...
    robustmetric.UserError: rows is 0: input should be greater than or equal to 1 (number of rows)
    """
    for name, value in given.items():
        if name not in kind.model_fields:
            raise UserError(unknown(what, name, kind.model_fields), parameter=name)
        if wanted := _of_another_kind(value, kind.model_fields[name]):
            raise _wrong(kind, name, brief(value), f"give {wanted}")
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        value = "missing" if first["type"] == "missing" else brief(first["input"])
        raise _wrong(
            kind, str(first["loc"][0]), value, f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        ) from None


def first_of(error: ValidationError) -> str:
    """Return where the first thing is that an `error` is about, and what is wrong with it."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


_KINDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}


def _of_another_kind(value: object, field: FieldInfo) -> str | None:
    """Return what to give for a text or a flag that pydantic would read as a number, or vice versa."""
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind in _KINDS]
    flag = bool in kinds and not isinstance(value, bool)
    wrong = kinds and (flag or (isinstance(value, str | bool) and type(value) not in kinds))
    return _KINDS[kinds[0]] if wrong else None


def _wrong(kind: type[BaseModel], name: str, value: str, told: str) -> UserError:
    meaning = kind.model_fields[name].description
    return UserError(f"{name} is {value}: {told}{f' ({meaning})' if meaning else ''}", parameter=name)


class Arrays(FrozenModel):
    """The file of per-query values."""

    file: str
    sha256: str


class Sealed(FrozenModel):
    """A document with a digest of all its other entries."""

    sha256: str | None = Field(default=None, description="of all the other entries")

    def sealed(self: S) -> S:
        """Return the same with its digest."""
        return self.model_copy(update={"sha256": digest_of_entries(_entries(self))})


S = TypeVar("S", bound=Sealed)


class Document(Sealed):
    """A record, a certificate or a verification, with the digest of its arrays."""

    arrays: Arrays


D = TypeVar("D", bound=Document)


def _entries(document: Sealed) -> dict[str, Any]:
    """Return the entries of a `document` but its digest; its arrays come last."""
    entries = document.model_dump(mode="json", by_alias=True, exclude={"sha256"})
    return entries | ({"arrays": entries.pop("arrays")} if "arrays" in entries else {})


def write_json(file: Path, document: Sealed, then: str) -> None:
    """Write a `document` to its `file`; if that fails, say what to do, and what `then`."""
    save_entries(file, _entries(document), then)


def read_json(file: Path, kind: Callable[..., S], what: str, schema: str) -> S:
    """Read a document of a `kind` from its `file`; another one, or a damaged one, is refused.

    `what` it is called, and `schema` is what its entry of that name says.
    """
    entries = load_entries(file)
    if (found := entries.get("schema")) != schema:
        raise UserError(
            f"{file} is not a {what} of this version: its schema is {brief(found)}, not {schema!r}"
        )
    try:
        return kind(**entries, sha256=digest_of_entries(entries))
    except ValidationError as error:
        raise UserError(f"{file} is not a whole {what}: {first_of(error)}") from None


@dataclass(frozen=True)
class Format(Generic[D]):
    """How documents of a `kind` are written and read.

    `what` they are called, `inside` is the folder of a run that they are in. `work` makes them, by a
    `command`.
    """

    kind: type[D]
    what: str
    inside: str
    work: str
    command: str

    @property
    def file(self) -> str:
        """The name of their file."""
        return f"{self.what}.json"

    def there(self, folder: Path | None) -> bool:
        """Return whether a `folder` holds the document."""
        return folder is not None and (folder / self.file).exists()

    def make(self, made: dict[str, Any], arrays: bytes) -> D:
        """Put a document together with the digest of its arrays, and its own."""
        digest = hashlib.sha256(arrays).hexdigest()
        return self.kind(arrays=Arrays(file=ARRAYS, sha256=digest), **made).sealed()

    def write(self, folder: Path | None, made: dict[str, Any], arrays: dict[str, Tensor]) -> D:
        """Make a document and, if there is a folder, write it and its arrays there."""
        content = to_bytes({name: value.contiguous() for name, value in arrays.items()})
        found = self.make(made, content)
        if folder is not None:
            save(folder / ARRAYS, content, GO_ON)
            write_json(folder / self.file, found, GO_ON)
        return found

    def find(self, path: str | Path) -> Path:
        """Return the JSON file of the document at a path: itself, in that folder, or in that run."""
        path = Path(path)
        for file in (path / self.file, path / self.inside / self.file, path):
            if file.is_file():
                return file
        if others := sorted(path.glob(f"*/{self.file}")):
            advice = f"give the one that is meant: {shorten([file.parent for file in others])}"
        elif (path / "recipe.yaml").is_file():
            advice = f"make it by {command_line(['robustmetric', self.command, str(path)])}"
        else:
            advice = f"give a {self.file}, or a folder that holds one"
        raise FileNotFoundError(f"there is no {self.what} {path}; {advice}")

    def read(self, path: str | Path) -> D:
        """Read a document from its JSON file or the folder that it is in; a damaged one is refused."""
        return read_json(self.find(path), self.kind, self.what, self.kind.model_fields["schema_"].default)

    def read_whole(self, folder: Path) -> D:
        """Read a document from its folder, and see that its arrays, if they are there, are its own."""
        document = self.read(folder)
        if (folder / document.arrays.file).exists():
            self.read_arrays(folder)
        return document

    def read_arrays(self, path: str | Path) -> dict[str, Tensor]:
        """Read the per-query arrays (Q, …) beside the document at a path; a changed file is refused."""
        beside = self.find(path)
        arrays = self.read(beside).arrays
        if Path(arrays.file).name != arrays.file:
            raise UserError(
                f"the {self.what} {path} names the arrays {arrays.file!r}; they must be beside it"
            )
        file = beside.parent / arrays.file
        if not file.is_file():
            raise FileNotFoundError(f"there is no {file.name} beside the {self.what} {path}")
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != arrays.sha256:
            raise DamagedError(f"{file} is not what its {self.what} was written with: its digest differs")
        try:
            return load(content)
        except SafetensorError as error:
            raise DamagedError(f"{file} holds no arrays: {error}; evaluate again") from None
