"""A disk that takes no more, and a table that a spreadsheet saved."""

from __future__ import annotations

import csv
import errno
import os
import resource
from collections.abc import Callable, Iterator
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
        ("last.ckpt", errno.ENOSPC, 2, "make room; the checkpoint of step 2 is whole"),
        ("best.safetensors", errno.EDQUOT, 0, "make room; the checkpoint of step 3 is whole"),
        ("run.json", errno.ENOSPC, 1, "make room; the checkpoint of step 8 is whole"),
        ("last.ckpt", errno.EROFS, 1, "make the folder writable"),
    ],
)
def test_a_disk_that_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, calls: int, told: str
) -> None:
    out = tmp_path / "run"
    with full_after(monkeypatch, name, number, calls):
        said = refused("train", *QUICK, "--epochs", 2, "--out", out)
    assert f"{out / name} could not be saved ({os.strerror(number)}): {told}; " in said
    assert f"go on with: robustmetric train --out {out} --resume" in said
    assert not list(out.glob(".*")), "something partial is left"
    assert "R@1 of the 100 validation images" in works("train", "--out", out, "--resume")


@needs_proc
@pytest.mark.parametrize("name", ["recipe.yaml", "run.json", "metrics.csv"])
def test_a_disk_that_is_full_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with full_after(monkeypatch, name, errno.ENOSPC):
        said = refused("train", *QUICK, "--epochs", 1, "--out", tmp_path / "run")
    assert f"{tmp_path / 'run' / name} could not be saved (No space left on device): make room" in said
    assert "start the same command again" in said
    assert not (tmp_path / "run").exists()


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


# The table


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def semicolons(text: str) -> bytes:
    return (
        "\n".join(
            ";".join(cell.replace(".", ",") for cell in line.split(",")) for line in text.splitlines()
        ).encode()
        + b"\n"
    )


SAVED: dict[str, Callable[[str], bytes]] = {
    "semicolons": semicolons,
    "BOM": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "LF": lambda text: text.replace("\r\n", "\n").encode(),
    "1.0": lambda text: text.replace("0,4,", "0,4.0,").replace("1,8,", "1,8.0,").encode(),
    "tabs": lambda text: text.replace(",", "\t").encode(),
}


@pytest.mark.slow
@pytest.mark.parametrize("save", SAVED.values(), ids=SAVED.keys())
def test_a_table_that_a_spreadsheet_saved_is_gone_on_with(run: Path, save: Callable[[str], bytes]) -> None:
    before = rows(run)
    text = (run / "metrics.csv").read_bytes().decode()
    (run / "metrics.csv").write_bytes(save(text))
    works(*resume(run))
    assert rows(run)[: len(before)] == before
    assert [row["step"] for row in rows(run)] == ["4", "8", "10", "12"]
    assert not (run / "metrics-1.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"epoch,loss\r\n1,2\r\n", id="no steps"),
        b"epoch,step,\xff\xfe\r\n1,2,3\r\n",
        pytest.param(b"PK\x03\x04\n\0\0", id="another format"),
        pytest.param(b'epoch,step\n1,"' + b"x" * 200_000 + b'"\n', id="a field too long"),
    ],
)
def test_a_table_that_is_none_is_put_aside(run: Path, content: bytes) -> None:
    (run / "metrics.csv").write_bytes(content)
    (run / "metrics-1.csv").write_bytes(b"of another time")
    said = works(*resume(run))
    assert f"it was put aside as {run / 'metrics-2.csv'}" in said
    assert (run / "metrics-2.csv").read_bytes() == content
    assert [row["step"] for row in rows(run)] == ["10", "12"]


@pytest.mark.slow
def test_the_table_of_a_logger_is_put_aside_too(run: Path) -> None:
    works(*resume(run, 3, "--logger", "csv"))
    table = run / "csv" / "metrics.csv"
    table.write_bytes(b"\xff")
    works(*resume(run, 4, "--logger", "csv"))
    assert (run / "csv" / "metrics-1.csv").read_bytes() == b"\xff"
    assert "R@1" in table.read_text()


def test_rows_without_a_step_are_left_out(run: Path) -> None:
    text = (run / "metrics.csv").read_bytes().decode()
    (run / "metrics.csv").write_bytes(text.replace("0,4,", "0,nan,").encode())
    assert "1 rows without a step were left out" in works(*resume(run))
    assert [row["step"] for row in rows(run)] == ["8", "10", "12"]
