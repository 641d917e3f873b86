"""Tasks of Ray: what becomes of them, what they raise, how they die, and clusters that are not there."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from robustmetric.cluster import Cluster, connect
from robustmetric.errors import UserError
from robustmetric.workers import WorkerError, finish
from tests.helpers.command import refused, works
from tests.helpers.processes import ROOT, needs_proc, until
from tests.helpers.runs import make_run

ONE = ("--attacks", "ES,GTM", "--queries", 40, "--batch", 5, "--steps", 40, "--checks", "none")

# Workers import what they call, so it stands in a module of its own.
WORK = """
import os, signal, time
from pathlib import Path
from robustmetric.errors import UserError

def note(folder, name):
    (Path(folder) / f"{name}.{os.getpid()}").touch()

def work(folder, name):
    note(folder, name)
    if name == "picky":
        raise UserError("no [such] share", parameter="out")
    if name == "mortal" and len(list(Path(folder).glob("mortal.*"))) == 1 or name == "doomed":
        os.kill(os.getpid(), signal.SIGKILL)

def wait(folder):
    try:
        note(folder, "waits")
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        note(folder, "stopped")
        raise

def meet(folder, share, shares):
    note(folder, f"share{share}")
    while len({path.stem for path in Path(folder).glob("share*")}) < shares:
        time.sleep(0.05)
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that workers import."""
    name = f"work_of_ray_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    return importlib.import_module(name)


def tried(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"{name}.*")))


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def tasks_of_ray() -> list[int]:
    """The processes of Ray that work at a task now."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdecimal() and (place / "cmdline").read_bytes().startswith(b"ray::_task"):
                found.append(int(place.name))
        except OSError:
            continue
    return found


# One test, for a Ray takes seconds to start.
@needs_proc
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_tasks_of_a_real_ray(work: Any, tmp_path: Path) -> None:
    heard = signal.getsignal(signal.SIGTERM)
    with connect("local") as found:
        assert signal.getsignal(signal.SIGTERM) is heard
        assert found.room(1) == os.cpu_count()
        _errors_and_retries(found, work, tmp_path)
        _together(found, work, tmp_path)
        _left(found, work, tmp_path)
        found.check_folder(tmp_path / "new" / "out")
        assert not (tmp_path / "new").exists()
        _evaluation(found, tmp_path)
    import ray

    assert not ray.is_initialized()


def _errors_and_retries(found: Cluster, work: Any, folder: Path) -> None:
    names = ["plain", "picky", "mortal", "doomed"]
    ended = dict(found.run(work.work, [(str(folder), name) for name in names]))
    assert ended[0] is ended[2] is None
    error = ended[1]
    assert type(error) is UserError
    assert (str(error), error.parameter) == ("no [such] share", "out")
    assert "in work" in vars(error)["__notes__"][0]
    assert isinstance(ended[3], WorkerError)
    assert [tried(folder, name) for name in names] == [1, 1, 2, 4]


def _together(found: Cluster, work: Any, folder: Path) -> None:
    shares = min(2, most := found.room(1))
    finish(found.run(work.meet, [(str(folder), k, shares) for k in range(shares)], together=True))
    with pytest.raises(UserError, match=rf"room for {most} .* not for {most + 1}"):
        finish(found.run(work.meet, [(str(folder), 0, 1)] * (most + 1), together=True))


def _left(found: Cluster, work: Any, folder: Path) -> None:
    """Who is interrupted ends the tasks as Ctrl-C would."""

    def interrupt() -> None:
        if tried(folder, "waits"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(found.run(work.wait, [(str(folder),)], tick=interrupt))
    assert tried(folder, "stopped") == 1


def _evaluation(found: Cluster, folder: Path) -> None:
    """The record is the same if a worker is killed in the middle."""
    run = make_run(folder / "trained", "last")
    address = found.ray.get_runtime_context().gcs_address
    ordered = ["evaluate", run, "--device", "cpu", "--weights", "last", *ONE]
    on_ray = ["--out", folder / "shared", "--on", "ray", "--address", address, "--devices", 2]
    arguments = [sys.executable, "-m", "robustmetric", *map(str, [*ordered, *on_ray])]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, cwd=folder)  # noqa: S603
    parts = folder / "shared" / "parts"
    try:
        assert until(lambda: any(parts.glob("attack-*")) or process.poll() is not None)
        os.kill(tasks_of_ray()[0], signal.SIGKILL)
        assert not (folder / "shared" / "record.json").exists(), "there is nothing left to do"
        assert process.wait(timeout=600) == 0, (folder / "log").read_text()
    finally:
        process.kill()
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    try:
        works(*ordered, "--out", folder / "alone")
    finally:
        torch.set_num_threads(threads)
    assert contents(folder / "shared") == contents(folder / "alone")


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r'pip install "robustmetric\[cluster\]"'), connect():
        pass


def test_an_address_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = make_run(tmp_path / "run", "last")
        options = ["--on", "ray", "--address", address, "--out", tmp_path / "out"]
        said = refused("evaluate", run, *options, *ONE)
    assert f"no Ray cluster answers at {address}" in said
    assert said.endswith("(--address)\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["here", "ray://here:1", ":1", "here:", "here:x", "here:0", "here:65536"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT") as caught, connect(address):
        pass
    assert caught.value.parameter == "address"


def test_what_ray_says_of_a_failed_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("the version\nis another")

    down: list[int] = []
    broken = SimpleNamespace(init=init, shutdown=lambda: down.append(1))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.setitem(sys.modules, "ray", broken)
    with pytest.raises(UserError, match=r"\(the version is another\)"), connect("local"):
        pass
    assert down
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0", "Ray sends statistics"


@pytest.mark.parametrize(
    ("cpus", "tasks", "threads"),
    [([2], 2, 1), ([8], 3, 2), ([5, 5], 3, 2), ([8, 8, 8, 8], 3, 8), ([32, 8], 2, 16), ([2], 9, 1)],
)
def test_as_many_threads_as_there_is_room_for(cpus: list[int], tasks: int, threads: int) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": float(count)}} for count in cpus]
    ray = SimpleNamespace(nodes=lambda: nodes, cluster_resources=lambda: {"CPU": float(sum(cpus))})
    assert Cluster(ray).threads(tasks) == threads
    # The most by trying all: each task in a machine of its own share.
    assert threads == max((n for n in range(1, 33) if sum(c // n for c in cpus) >= tasks), default=1)
