"""A disk that takes no more, and a table of metrics that is none."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.command import refused, works
from tests.helpers.processes import needs_proc
from tests.training.conftest import QUICK, resume


@contextmanager
def full_after(monkeypatch: pytest.MonkeyPatch, name: str, number: int, calls: int = 0) -> Iterator[None]:
    """Let the disk take no more of a file of this name, after it was written some times."""
    replace, left = os.fsync, calls

    def full(descriptor: int) -> None:
        nonlocal left
        if f".{name}." in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            left -= 1
            if left < 0:
                raise OSError(number, os.strerror(number))
        replace(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        yield


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("name", "number", "calls", "told"),
    [
        ("last.ckpt", errno.ENOSPC, 2, "make room"),
        ("best.safetensors", errno.EDQUOT, 0, "make room"),
        ("run.json", errno.ENOSPC, 1, "make room"),
        ("last.ckpt", errno.EROFS, 1, "make the folder writable"),
    ],
)
def test_a_disk_that_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, calls: int, told: str
) -> None:
    out = tmp_path / "run"
    with full_after(monkeypatch, name, number, calls):
        said = refused("train", *QUICK, "--epochs", 2, "--out", out)
    assert f"{out / name} could not be saved ({os.strerror(number)}): {told}" in said
    assert f"resume with: robustmetric train --out {out} --resume" in said
    assert not list(out.glob(".*")), "something partial is left"
    assert "R@1 of the 100 validation images" in works("train", "--out", out, "--resume")


def test_torch_hides_what_the_disk_said(tmp_path: Path) -> None:
    # Python ignores SIGXFSZ: a file that grows beyond the limit is an error, as on a full disk.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        said = refused("train", *QUICK, "--epochs", 1, "--out", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"{tmp_path / 'run' / 'last.ckpt'} could not be saved (File too large): use a disk" in said
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.parametrize(
    "content", [b"epoch,loss\n1,2\n", b"epoch;step\n0;4\n", b"\xff\xfe", b"epoch,step\n0,x\n"]
)
def test_a_table_that_is_none_is_not_overwritten(run: Path, content: bytes) -> None:
    (run / "metrics.csv").write_bytes(content)
    assert "metrics.csv is no table with a step in each row" in refused(*resume(run))
    assert (run / "metrics.csv").read_bytes() == content
