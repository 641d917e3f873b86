"""Values beyond all bounds, memory, disks, files and signals: a sentence, through the command line."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from robustmetric.models.c2f2 import C2F2
from tests.cli.tables import ONE
from tests.helpers.command import Said, command, refused
from tests.helpers.processes import at_call, stop_by

TRAIN = ("train", "--data", "digits", "--epochs", 1, "--steps", 1)
NETWORK = ("evaluate", "--model", "c2f2", "--data", "digits", *ONE)


@pytest.mark.parametrize(
    ("arguments", "flag", "about"),
    [
        ([*TRAIN, "--devices", 0], "--devices", "not 0"),
        ([*TRAIN, "--devices", -2], "--devices", "not -2"),
        ([*TRAIN, "--devices", 10**6], "--devices", "not 1000000"),
        ([*TRAIN, "--nodes", 0], "--nodes", "not 0"),
        ([*TRAIN, "--epochs", 10**9], "--epochs", "1000000000"),
        ([*TRAIN, "--batch", 10**12], "--batch", "10000"),
        ([*TRAIN, "--lr", "nan"], "--lr", "finite"),
        ([*TRAIN, "--lr", "inf"], "--lr", "finite"),
        ([*TRAIN, "--lr", "1e300"], "--lr", "1e+300"),
        ([*TRAIN, "--eps", "nan"], "--eps", "nan"),
        ([*TRAIN, "--alpha", "inf"], "--alpha", "inf"),
        ([*TRAIN, "--validation", "nan"], "--validation", "nan"),
        ([*TRAIN, "--eps", 8], "--eps", "8 grey levels are 8/255"),
        ([*TRAIN, "--size", 2], "--size", "resize is 2"),
        ([*TRAIN, "--set", "resize=2"], "--set resize", "resize is 2"),
        ([*TRAIN, "--set", "dim=1000000000000"], "--set dim", "65536"),
        ([*TRAIN, "--data", "folder"], "--root", "the directory that holds"),
        ([*NETWORK, "--dim", 10**12], "--dim", "65,536"),
        ([*NETWORK, "--size", 10**6], "--size", "4,096"),
        ([*NETWORK, "--resize", 10**6], "--resize", "4,096"),
        ([*NETWORK, "--eps", "nan"], "--eps", "nan"),
        ([*NETWORK, "--alpha", "1e400"], "--alpha", "1e400"),
    ],
)
def test_a_value_beyond_bounds_is_refused(
    arguments: list[object], flag: str, about: str, tmp_path: Path
) -> None:
    said = refused(*arguments, "--out", tmp_path / "out")
    assert flag in said
    assert about in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_an_output_of_any_encoding_is_written_to(encoding: str, tmp_path: Path) -> None:
    train = [sys.executable, "-m", "robustmetric", *map(str, TRAIN), "--batch", "512", "--out", "run"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=600)  # noqa: S603
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u03b5" in done.stdout  # ε


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    assert "(--device)" in refused(*TRAIN, "--device", "cuda", "--out", tmp_path / "out")


@pytest.mark.parametrize("size", [10**12, 10**22])
@pytest.mark.parametrize(
    "arguments",
    [
        TRAIN,
        NETWORK,
    ],
)
def test_a_network_beyond_all_memory(arguments: tuple[object, ...], size: int, tmp_path: Path) -> None:
    said = refused(*arguments, "--model", f"c2f2(dim={size})", "--out", tmp_path / "out")
    assert "not enough memory" in said
    assert "lower --batch" in said
    assert size > 10**12 or "4,096,000.0 GB" in said
    assert not (tmp_path / "out").exists()


def test_memory_that_runs_out_in_the_network(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, images):\n"
        "        return torch.empty(len(images), 10**15)\n"
    )
    arguments = ["evaluate", "--model", f"{tmp_path}/net.py:Net", "--data", "digits"]
    said = refused(*arguments, "--out", tmp_path / "out")
    assert "not enough memory" in said
    assert "lower --batch" in said


def told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what is said if a command raises this error."""

    def fail(_: str) -> str:
        raise error

    monkeypatch.setattr("robustmetric.cli.train.recipe_text", fail)
    return refused("recipes", "images")


def test_memory_that_runs_out_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError) as raised:
        np.empty(10**18)
    assert "not enough memory" in told(raised.value, monkeypatch)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EIO, "look after the disk"),
        (errno.EACCES, "permissions"),
        (errno.EROFS, "writable"),
        (errno.EISDIR, "give a file"),
        (errno.ENOTDIR, "give another path"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
@pytest.mark.parametrize("file", [None, "images/[a].png"])
def test_an_error_of_the_system_has_a_remedy(
    number: int, remedy: str, file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = os.strerror(number)
    said = told(OSError(number, reason, *([] if file is None else [file])), monkeypatch)
    assert reason in said
    assert remedy in said
    assert file is None or file in said
    assert "Errno" not in said


def test_a_text_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnicodeDecodeError) as raised:
        b"\xff".decode("utf-8")
    assert "save it as UTF-8" in told(raised.value, monkeypatch)


@pytest.mark.parametrize(
    ("where", "file"),
    [
        ("--recipe", "/proc/self/mem.yaml"),
        ("--recipe", "FILE/mine.yaml"),
    ],
)
def test_a_path_that_leads_nowhere(where: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "FILE").touch()
    path = file.replace("FILE", str(tmp_path / "FILE"))
    assert path in refused("train", where, path, "--out", tmp_path / "out")


# Signals that come where a command does not listen itself


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_a_signal_anywhere_is_said(
    number: signal.Signals, code: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(_: str) -> str:
        try:
            stop_by(number)()
        finally:
            if again:  # while what was begun is put away
                stop_by(number)()
        return ""

    monkeypatch.setattr("robustmetric.cli.train.recipe_text", stopped)
    before = signal.getsignal(signal.SIGTERM)
    said = command("recipes", "images")
    assert said.code == code
    assert "stopped" in said.err
    assert "run the same command again" in said.err
    assert "Abort" not in said.out + said.err
    assert signal.getsignal(signal.SIGTERM) is before


def demo(tmp_path: Path, number: signal.Signals, call: int) -> Said:
    """Stop the demo at a call of its network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(C2F2, "forward", at_call(call, stop_by(number), C2F2.forward))
        patch.setattr("robustmetric.cli.demo.DEFENSES", ("N/A[R]",))
        return command("demo", "--out", tmp_path, "--epochs", 1, "--queries", 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
    ],
)
def test_the_demo_is_stopped_and_goes_on(number: signal.Signals, code: int, tmp_path: Path) -> None:
    for call in (3, 40):  # while it trains, while it evaluates
        said = demo(tmp_path, number, call)
        assert said.code == code, said
        assert "stopped" in said.out
        assert "the same command resumes" in said.out
        assert "Traceback" not in said.out + said.err
    assert list(tmp_path.rglob("last.safetensors"))
    assert demo(tmp_path, number, 10**9).code == 0


# A reader that goes away


@pytest.mark.slow
def test_a_pipe_that_closes_ends_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "robustmetric", "recipes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        assert started.stderr.read() == b""
