"""Functions as tasks of Ray, on many machines. The one place that imports Ray."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from robustmetric.errors import UserError
from robustmetric.files import check_writable
from robustmetric.workers import Endings, WorkerError, attempt

_RETRIES = 3  # of a task whose worker or machine has died
_PATIENCE = 10.0  # seconds to wait for an address, and for a task that is cancelled


@contextmanager
def connect(address: str | None = None) -> Iterator[Cluster]:
    """Join the Ray cluster at `address`, ``"HOST:PORT"`` or ``"auto"``, and leave it afterwards.

    Without an address it is that of `RAY_ADDRESS`, or a cluster of this machine alone, started here.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    host, _, port = address.rpartition(":")
    if address not in ("auto", "local") and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        told = f"the address of a Ray cluster is HOST:PORT or auto, not {address!r}"
        raise UserError(told, parameter="address")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # each of the usual 20 takes 40 s
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        told = f'Ray cannot be imported ({error}): pip install "robustmetric[cluster]", or use --on local'
        raise UserError(told, parameter="on") from None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":  # results are on disk: Ray would keep a third of the memory for them
        options |= {"num_cpus": os.cpu_count(), "object_store_memory": 10**8, "include_dashboard": False}
    # Workers import this very package, whether it is installed or not, and whatever else this process may.
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if host:  # where nobody listens Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
        ray.init(address=address, **options)
    except Exception as error:
        ray.shutdown()
        told = f"no Ray cluster answers at {address} ({' '.join(str(error).split())[:200]})"
        how = "start it with `ray start --head`, or join it with `ray start --address=HOST:PORT`"
        raise UserError(f"{told}: {how}", parameter="address") from error
    for number, handler in handlers.items():  # Ray takes SIGTERM for itself
        signal.signal(number, handler)
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


class Cluster:
    """A Ray cluster that this process has joined; `ray` is the module."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    def room(self, cpus: int, gpus: int = 0) -> int:
        """Return how many tasks can run at the same time, each with `cpus` and `gpus` of a machine."""
        asked = [("CPU", cpus), ("GPU", gpus)][: 2 if gpus else 1]
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return sum(min(int(node.get(kind, 0)) // count for kind, count in asked) for node in nodes)

    def threads(self, tasks: int, gpus: int = 0) -> int:
        """Return the most CPUs that each of `tasks` can have at the same time, beside `gpus`; at least 1."""
        most = int(self.ray.cluster_resources()["CPU"])
        return next((cpus for cpus in range(most, 0, -1) if self.room(cpus, gpus) >= tasks), 1)

    def check_folder(self, folder: Path) -> None:
        """Refuse a `folder` that cannot be written to, or that a machine of the cluster does not share."""
        check_writable(folder)
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        affinity = _strategies().NodeAffinitySchedulingStrategy
        with tempfile.NamedTemporaryFile(dir=there, prefix=".", suffix=".tmp") as note:
            for node in filter(lambda node: node["Alive"], self.ray.nodes()):
                options = {"num_cpus": 0, "scheduling_strategy": affinity(node["NodeID"], soft=False)}
                if not self.ray.get(self.ray.remote(**options)(os.path.exists).remote(note.name)):
                    told = f"{node['NodeManagerHostname']}, a machine of the cluster, does not see {there}"
                    raise UserError(f"{told}: give a folder that all share", parameter="out")

    def run(
        self,
        function: Callable[..., object],
        tasks: Sequence[tuple[Any, ...]],
        cpus: int = 1,
        gpus: int = 0,
        *,
        together: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> Endings:
        """Call `function` with each of the `tasks`, its arguments, on the cluster; yield each as it ends.

        Each has `cpus` and `gpus` of its own; one whose worker or machine dies is run again. With `together`
        none begins before there is room for all, for they wait for each other. `tick` is called in the
        meantime. Leaving the loop, by Ctrl-C for example, interrupts the tasks.
        """
        room, options = self.room(cpus, gpus), {"num_cpus": cpus, "num_gpus": gpus, "max_retries": _RETRIES}
        if room < (count := len(tasks) if together else 1):
            told = f"room for {room} workers with {cpus} CPUs and {gpus} GPUs each, not for {count}"
            raise UserError(f"the cluster has {told}: ask for fewer, or add machines", parameter="devices")
        group = self.ray.util.placement_group([{"CPU": cpus, "GPU": gpus}] * count) if together else None
        if together:
            options["scheduling_strategy"] = _strategies().PlacementGroupSchedulingStrategy(group)
        remote = self.ray.remote(**options)(_task)
        left = {remote.remote(function, task, str(Path.cwd())): k for k, task in enumerate(tasks)}
        try:
            while left:
                ended, _ = self.ray.wait(list(left), timeout=0.2)
                tick()
                for ref in ended:
                    yield left.pop(ref), self._error(ref)
        finally:
            for ref in left:
                self.ray.cancel(ref)
            _, stuck = self.ray.wait([*left], num_returns=len(left), timeout=_PATIENCE) if left else ((), ())
            for ref in stuck:
                self.ray.cancel(ref, force=True)
            if together:
                self.ray.util.remove_placement_group(group)

    def _error(self, ref: Any) -> Exception | None:
        try:
            error: Exception | None = self.ray.get(ref)
        except self.ray.exceptions.RayError as lost:
            return WorkerError(
                f"Ray has lost a task ({' '.join(str(lost).split())[:300]}); what is finished is kept: run "
                "the same command again, with fewer workers if memory ran out"
            )
        return error


def _strategies() -> Any:
    return importlib.import_module("ray.util.scheduling_strategies")


def _task(function: Callable[..., object], arguments: tuple[Any, ...], folder: str) -> Exception | None:
    """Do the work of a task; what it raises is returned, for Ray would change it."""
    with suppress(OSError):  # where the machine has that folder, relative paths mean the same
        os.chdir(folder)
    return attempt(function, arguments)
