"""Damaged files that once made a reader fail: each is read, or refused in a sentence."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import robustmetric as rm
from robustmetric.cli.app import read_changes
from robustmetric.errors import UserError
from robustmetric.evaluation.job import PLAN, check_folder
from robustmetric.evaluation.record import load_arrays, load_record
from robustmetric.files import write_sealed
from robustmetric.locks import LOCK, locked
from robustmetric.training.checkpoint import reached
from robustmetric.training.folder import RunFolder, read_rows
from robustmetric.training.recipe import load_recipe, make_recipe
from tests.helpers.records import altered, golden, written

Read = Callable[[Path, bytes], object]
CASES = sorted(file for file in (Path(__file__).parent / "cases").rglob("*") if file.is_file())


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def read_arrays(folder: Path, content: bytes) -> object:
    digest = {"sha256": hashlib.sha256(content).hexdigest()}
    put(written(altered(golden("strict"), arrays=digest), folder) / "queries.safetensors", content)
    return load_arrays(folder)


def read_lock(folder: Path, content: bytes) -> object:
    put(folder / LOCK, content)
    with locked(folder, "a test", lambda _: None):
        return None


def read_plan(folder: Path, content: bytes) -> object:
    put(folder / PLAN, content)
    plan = {"kind": "evaluation", "settings": {"eps": 0.1}, "options": None, "model": "0" * 64}
    return check_folder(folder, plan)


def read_record(folder: Path, content: bytes) -> object:
    record = load_record(put(folder / "record.json", content))
    return str(record), [record.show(name) for name in record.columns()], record.model_dump_json()


def read_run(folder: Path, content: bytes) -> object:
    put(folder / "recipe.yaml", b"data: digits\nmodel: c2f2\ndim: 8\n")
    put(folder / "last.safetensors", b"")
    put(folder / "run.json", content)
    run = RunFolder(folder)
    return run.read(), run.weights(), run.inputs(), run.shape()


def read_sealed_checkpoint(folder: Path, content: bytes) -> object:
    # Somebody who changes a file may know how its digest is made.
    write_sealed(folder / "last.ckpt", lambda file: file.write(content))
    return reached(folder / "last.ckpt")


READERS: dict[str, Read] = {
    "arrays": read_arrays,
    "checkpoint": lambda folder, content: reached(put(folder / "last.ckpt", content)),
    "lock": read_lock,
    "metrics": lambda folder, content: read_rows(put(folder / "metrics.csv", content)),
    "plan": read_plan,
    "recipe": lambda folder, content: load_recipe(put(folder / "recipe.yaml", content)),
    "record": read_record,
    "run": read_run,
    "sealed": read_sealed_checkpoint,
    "set": lambda folder, content: make_recipe(read_changes([content.decode(errors="surrogateescape")])),
    "vectors-npy": lambda folder, content: rm.load_vectors(put(folder / "v.npy", content)),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_what_once_failed_is_read_or_refused(case: Path, tmp_path: Path) -> None:
    with suppress(UserError, OSError):
        READERS[case.parent.name](tmp_path, case.read_bytes())


@pytest.mark.parametrize("name", READERS)
def test_an_empty_file_and_noise_are_read_or_refused(name: str, tmp_path: Path) -> None:
    for number, content in enumerate((b"", bytes(200), b"{" * 5000, b"\xff\xd8\x80\x02}q\x00." * 40)):
        (tmp_path / str(number)).mkdir()
        with suppress(UserError, OSError):
            READERS[name](tmp_path / str(number), content)
