"""Files appear complete or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from robustmetric.files import (
    DamagedError,
    check_seal,
    load_entries,
    read_sealed,
    save_entries,
    write_atomically,
    write_sealed,
)


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_old_file_is_there_while_the_new_one_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    seen = []

    def write(file: BinaryIO) -> None:
        file.write(b"new")
        file.flush()
        seen.append(path.read_bytes())

    write_atomically(path, write)
    assert seen == [b"old"]


def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    seen: list[tuple[str, bytes]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        seen.append(("folder" if target.is_dir() else "file", path.read_bytes()))
        if target.is_file():
            assert target.read_bytes() == b"new", "synchronised before all was written"
        fsync(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("there is no /proc to see which file is meant")
    monkeypatch.setattr(os, "fsync", watched)
    write_atomically(path, lambda file: file.write(b"new"))
    assert seen == [("file", b"old"), ("folder", b"new")]


@pytest.mark.parametrize("before", [None, b"old"])
@pytest.mark.parametrize("stage", ["write", "fsync", "replace"])
def test_a_failure_keeps_the_old_file_and_leaves_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, before: bytes | None
) -> None:
    path = tmp_path / "file.bin"
    if before is not None:
        path.write_bytes(before)

    def write(file: BinaryIO) -> None:
        file.write(b"ne")
        if stage == "write":
            file.flush()
            full_disk()
        file.write(b"w")

    with monkeypatch.context() as patched:
        if stage == "fsync":
            patched.setattr(os, "fsync", full_disk)
        if stage == "replace":
            patched.setattr(Path, "replace", full_disk)
            patched.setattr(os, "replace", full_disk)
            patched.setattr(os, "rename", full_disk)
        with pytest.raises(OSError, match="No space") as caught:
            write_atomically(path, write)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == ([] if before is None else ["file.bin"])
    assert before is None or path.read_bytes() == before


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"

    def outer(file: BinaryIO) -> None:
        file.write(b"out")
        write_atomically(path, lambda inner: inner.write(b"inner"))
        assert path.read_bytes() == b"inner"
        file.write(b"er")

    write_atomically(path, outer)
    assert path.read_bytes() == b"outer"
    assert names(tmp_path) == ["file.bin"]


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_are_those_of_any_new_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "file.bin", lambda file: file.write(b"new"))
        (tmp_path / "usual.bin").write_bytes(b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "file.bin").stat().st_mode == (tmp_path / "usual.bin").stat().st_mode
    assert (tmp_path / "file.bin").stat().st_mode & 0o777 == 0o666 & ~mask


KILLED = """
import os, signal, sys
from pathlib import Path
from robustmetric import files

stage, path = sys.argv[1], Path(sys.argv[2])
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

def write(file):
    file.write(b"n" * 100_000)
    if stage == "write":
        file.flush()
        die()

if stage == "fsync":
    os.fsync = die
if stage == "replace":
    Path.replace = die
if stage == "folder":
    fsync, calls = os.fsync, []
    os.fsync = lambda descriptor: die() if calls else (calls.append(1), fsync(descriptor))
files.write_atomically(path, write)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")
def test_sigkill_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    stages = {"write": b"old", "fsync": b"old", "replace": b"old", "folder": b"n" * 100_000}
    for stage in stages:
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "file.bin").write_bytes(b"old")
    children = {}
    for stage in stages:
        command = [sys.executable, "-c", KILLED, stage, str(tmp_path / stage / "file.bin")]
        children[stage] = subprocess.Popen(command)  # noqa: S603
    for stage, child in children.items():
        assert child.wait(600) == -signal.SIGKILL
        assert (tmp_path / stage / "file.bin").read_bytes() == stages[stage], stage
        # What is left over does not look like the file, and does not stand in the way of the next attempt.
        rests = [name for name in names(tmp_path / stage) if name != "file.bin"]
        assert all(name.startswith(".") and name.endswith(".tmp") for name in rests)
        write_atomically(tmp_path / stage / "file.bin", lambda file: file.write(b"next"))
        assert (tmp_path / stage / "file.bin").read_bytes() == b"next"


def test_a_seal_finds_every_flipped_bit_and_every_cut(tmp_path: Path) -> None:
    path = tmp_path / "piece"
    write_sealed(path, lambda file: (file.write(b"some "), file.write(b"content")))
    whole = path.read_bytes()
    assert read_sealed(path) == b"some content"
    assert check_seal(path)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(DamagedError, match="piece"):
            read_sealed(path)
        path.write_bytes(whole[:place])
        with pytest.raises(DamagedError, match="piece"):
            read_sealed(path)


def test_a_damaged_file_is_not_taken_for_one_without_a_seal(tmp_path: Path) -> None:
    path = tmp_path / "piece"
    write_sealed(path, lambda file: file.write(bytes(3 << 20)))
    whole = bytearray(path.read_bytes())
    whole[1 << 21] = 1
    path.write_bytes(whole)
    with pytest.raises(DamagedError, match="piece"):
        check_seal(path)
    path.write_bytes(b"nobody sealed this")
    assert not check_seal(path)


def test_a_changed_entry_is_found_unless_the_file_may_be_edited(tmp_path: Path) -> None:
    file = tmp_path / "cell.json"
    save_entries(file, {"seed": 0, "name": "ε"})
    assert load_entries(file) == {"seed": 0, "name": "ε"}
    file.write_text(file.read_text().replace(": 0", ": 1"))
    with pytest.raises(DamagedError, match=r"cell\.json is damaged, or was changed by hand"):
        load_entries(file)
    assert load_entries(file, sealed=False)["seed"] == 1


@pytest.mark.parametrize("content", ["", "[]", '{"a": ', "[" * 100_000])
def test_what_is_no_object_is_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "cell.json").write_text(content)
    with pytest.raises(DamagedError, match=r"cell\.json is damaged"):
        load_entries(tmp_path / "cell.json", sealed=False)
