"""The record of an evaluation: everything it depended on and found, as one JSON file and per-query arrays."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from robustmetric.attacks import Protocol
from robustmetric.evaluation.ers import COLUMNS
from robustmetric.files import write_atomically
from robustmetric.validate import UserError

SCHEMA: Literal["robustmetric/record/1"] = "robustmetric/record/1"
RECORD, ARRAYS = "record.json", "queries.safetensors"


def _null(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value


Number = Annotated[float | None, BeforeValidator(_null)]
"""A figure; null where there is none, for JSON has no NaN."""


def _without_example(schema: dict[str, Any]) -> None:
    schema["description"] = schema["description"].partition("\n\n>>>")[0]


class _Part(BaseModel):
    """A part of a record."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_without_example)


class Settings(_Part):
    """How the scores were measured."""

    protocol: Protocol = Field(description="strict, or reference for what published figures were made with")
    eps: float = Field(description="largest change of a pixel, of 1")
    alpha: float = Field(description="size of a step")
    steps: int = Field(description="number of steps")
    search: str = Field(description="how perturbations were searched for")
    attacks: list[str] = Field(description="which attacks were run")
    queries: int | None = Field(description="number of queries that were drawn; null for all")
    seed: int = Field(description="starts every random draw")
    batch: int = Field(description="queries that were perturbed together")
    checks: Literal["none", "quick", "full"] = Field(description="which checks were run")


class Network(_Part):
    """The network that was attacked."""

    name: str
    parameters: int
    sha256: str = Field(description="of all names, types, shapes and values of its state")
    surrogate: str | None = Field(None, description="the same digest of the network that attacks came from")
    weights: str | None = Field(None, description="how its weights were chosen, as far as that is known")


class Data(_Part):
    """The images that were queried and ranked."""

    name: str
    images: int = Field(description="images that query, and are ranked unless a gallery is")
    gallery: int | None = Field(None, description="images of a gallery of its own")
    classes: int
    shape: list[int] = Field(description="channels, height, width")
    sha256: str = Field(description="of all labels and of the pixels in single precision")
    cameras: bool = Field(False, description="whether images of a query's class and camera do not count")
    skipped: list[str] = Field([], description="files that were left out because they could not be read")


class Queries(_Part):
    """The images that were perturbed."""

    count: int
    of: int
    left_out: int = Field(description="images whose class has no other, without an answer to find")


class Score(_Part):
    """A mean over queries with its 95 % interval; `before` is that of the images as they were."""

    value: Number
    low: Number
    high: Number
    before: Number = None


class Ers(_Part):
    """The Empirical Robustness Score and its ten terms; to be read beside R@1."""

    value: Number
    low: Number
    high: Number
    terms: dict[str, Number]
    valid: bool
    why: str = Field("", description="why it is not valid")


class Check(_Part):
    """A check of whether the scores can be trusted: what was found, what is allowed, how that is judged.

    >>> Check(name="copies", status="pass", figure=0, limit="none", says="no copies").status
    'pass'
    """

    name: str
    status: Literal["pass", "warn", "fail", "not run"]
    figure: Number
    limit: str
    says: str


class Arrays(_Part):
    """The file of per-query values."""

    file: str
    sha256: str


class Record(_Part):
    """The scores of a network on a data set, with all they depend on.

    `record["R@1"]`, `record["ERS"]`, `record["CA+"]` give single values. Ranks and shares are in %; TMA is a
    cosine, ES:D a distance.

    >>> sorted(Record.model_json_schema()["properties"])[:4]
    ['arrays', 'checks', 'data', 'ers']
    """

    schema_: Literal["robustmetric/record/1"] = Field(SCHEMA, alias="schema")
    network: Network
    data: Data
    settings: Settings
    queries: Queries
    retrieval: dict[str, Score]
    scores: dict[str, Score]
    ers: Ers | None
    checks: list[Check]
    versions: dict[str, str]
    arrays: Arrays

    def __getitem__(self, name: str) -> float:
        if name == "ERS" and self.ers is not None:
            return _number(self.ers.value)
        known = {**self.retrieval, **self.scores}
        if name not in known:
            names = [*known, *(["ERS"] if self.ers is not None else [])]
            raise KeyError(f"{name!r} was not measured; measured: {', '.join(names)}")
        return _number(known[name].value)

    def __str__(self) -> str:
        lines = ["  ".join(f"{name} {show(name, self[name])}" for name in self.columns())]
        if self.ers is not None and not self.ers.valid:
            lines.append(f"the ERS is not valid: {self.ers.why}")
        lines += [f"{c.name}: {c.status}: {c.says}" for c in self.checks if c.status in ("warn", "fail")]
        run = [c.status for c in self.checks if c.status != "not run"]
        told = f"{run.count('pass')} of {len(run)} checks passed" if run else "no checks were run"
        return "\n".join([*lines, told])

    def columns(self) -> list[str]:
        """Name what was measured, in the paper's order."""
        ours = [name for name in COLUMNS if name in self.scores]
        others = [name for name in self.scores if name not in COLUMNS]
        return [*self.retrieval, *ours, *others, *(["ERS"] if self.ers is not None else [])]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def show(name: str, value: float | None) -> str:
    """Write a score with the paper's digits.

    >>> show("TMA", 0.9), show("R@1", 53.94), show("ES:R", math.nan)
    ('0.900', '53.9', '-')
    """
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.3f}" if name in ("TMA", "ES:D") else f"{value:.1f}"


def write_record(folder: Path, made: dict[str, Any], arrays: dict[str, Tensor]) -> Record:
    """Write `record.json` and `queries.safetensors` into a folder and return the record."""
    content = save({name: value.contiguous() for name, value in arrays.items()})
    record = make_record(made, content)
    write_atomically(folder / ARRAYS, lambda file: file.write(content))
    text = json.dumps(record.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False) + "\n"
    write_atomically(folder / RECORD, lambda file: file.write(text.encode()))
    return record


def make_record(made: dict[str, Any], arrays: bytes) -> Record:
    """Put a record together with the digest of its arrays."""
    return Record(arrays=Arrays(file=ARRAYS, sha256=hashlib.sha256(arrays).hexdigest()), **made)


def load_record(path: str | Path) -> Record:
    """Read a record from its JSON file or the folder that it is in.

    >>> load_record("nowhere")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no record nowhere; give a record.json, or a folder that holds one
    """
    path = Path(path)
    for inside in (path / RECORD, path / "evaluation" / RECORD):
        if inside.is_file():
            path = inside
            break
    if not path.is_file():
        raise FileNotFoundError(f"there is no record {path}; give a {RECORD}, or a folder that holds one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a record: it is not JSON ({error})") from None
    found = content.get("schema") if isinstance(content, dict) else None
    if found != SCHEMA:
        raise UserError(f"{path} is not a record of this version: its schema is {found!r}, not {SCHEMA!r}")
    try:
        return Record(**content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path} is not a whole record: {place}: {first['msg']}") from None


def load_arrays(path: str | Path) -> dict[str, Tensor]:
    """Read the per-query arrays (Q, …) that stand beside a record; a file that was changed is refused.

    >>> load_arrays("nowhere")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no record nowhere; give a record.json, or a folder that holds one
    """
    record, folder = load_record(path), Path(path)
    for candidate in (folder, folder / "evaluation", folder.parent):
        file = candidate / record.arrays.file
        if file.is_file():
            content = file.read_bytes()
            if hashlib.sha256(content).hexdigest() != record.arrays.sha256:
                raise UserError(f"{file} is not what its record was written with: its digest differs")
            return load(content)
    raise FileNotFoundError(f"there is no {record.arrays.file} beside the record {path}")
