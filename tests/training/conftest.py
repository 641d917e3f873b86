"""A run to break, and how it is resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.command import works

QUICK = ("--defense", "N/A[R]", "--batch", 512, "--set", "dim=16", "--set", "save_every=1")


def contents(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs of four steps, which no test changes."""
    out = tmp_path_factory.mktemp("broken") / "run"
    works("train", "--data", "digits", *QUICK, "--epochs", 2, "--out", out)
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def resume(out: Path, epochs: int = 3, *more: object) -> tuple[object, ...]:
    return ("train", "--out", out, "--resume", "--epochs", epochs, *more)
