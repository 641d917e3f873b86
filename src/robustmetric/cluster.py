"""Work on many machines: functions as tasks of Ray, which places them, and runs them again if a worker dies.

The one place that imports Ray.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robustmetric.errors import UserError
from robustmetric.files import check_writable, write_atomically, writing
from robustmetric.usercode import SentTraceError, sendable

RETRIES = 3
"""How often Ray runs a task again whose worker or machine has died."""

_PATIENCE = 10.0  # seconds to wait for an address, and for a task to end by itself when it is told to
_PERIOD = 0.2  # seconds between two looks at tasks
_STORE = 100_000_000  # bytes; results are on disk, and Ray would take a third of the memory


class LostError(UserError):
    """A task whose workers died, as often as it was tried."""


@dataclass(frozen=True)
class Node:
    """A machine of a cluster: its number in Ray, its name, and its `cpus` and `gpus` in all."""

    key: str
    host: str
    cpus: int
    gpus: int

    def room(self, cpus: int, gpus: int) -> int:
        """Return how many tasks of `cpus` and `gpus` each it has room for.

        >>> Node("0", "here", cpus=8, gpus=1).room(2, 0), Node("0", "here", cpus=8, gpus=1).room(2, 1)
        (4, 1)
        """
        return min(self.cpus // cpus, self.gpus // gpus if gpus else self.cpus)


@dataclass(frozen=True)
class Outcome:
    """What became of the `number`-th task: its `value`, or the `error` that it ended with."""

    number: int
    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        """Return the value, or raise the error.

        >>> Outcome(0, value=3).get()
        3
        """
        if self.error is not None:
            raise self.error
        return self.value


@contextmanager
def connect(address: str | None = None) -> Iterator[Cluster]:
    """Join the Ray cluster at `address`, ``"HOST:PORT"`` or ``"auto"``, and leave it afterwards.

    Without an address it is that of `RAY_ADDRESS` or, without one, a cluster of this machine's cores alone,
    which is started here and ended. Ray sends no usage statistics.

    >>> with connect("somewhere"):
    ...     pass
    Traceback (most recent call last):
    ...
    robustmetric.UserError: a Ray cluster is at HOST:PORT, or auto finds the one of this machine, not ...
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address not in (None, "auto", "local"):
        _check_address(address)
    joins = address not in (None, "local")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if joins:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # each of the usual 20 takes 40 s
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise UserError(
            'Ray is not installed: pip install "robustmetric[cluster]", or work on this machine alone',
            parameter="on",
        ) from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    # A cluster may be older than this environment, and have other modules.
    options: dict[str, Any] = {"runtime_env": {"env_vars": _environment()}}
    if not joins:
        options |= {"num_cpus": os.cpu_count() or 1, "object_store_memory": _STORE}
        options |= {"include_dashboard": False}
    try:
        with _own_signals():
            ray.init(
                address=address if joins else "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                **options,
            )
    except Exception as error:
        ray.shutdown()
        raise _unanswered(address if joins else None, error) from error
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Refuse an address where nobody listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"a Ray cluster is at HOST:PORT, or auto finds the one of this machine, not {address!r}",
            parameter="address",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except OSError as error:
        raise _unanswered(address, error) from None


def _unanswered(address: str | None, error: Exception) -> UserError:
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
    if address is None:
        return UserError(f"Ray does not start here ({reason}); see the logs in its folder, or use --on local")
    if address == "auto":
        return UserError(
            f"no Ray cluster is found on this machine ({reason}): join one with `ray start "
            "--address=HOST:PORT`, or leave the address out to use this machine alone",
            parameter="address",
        )
    return UserError(
        f"no Ray cluster answers at {address} ({reason}): begin one with `ray start --head`, and run "
        f"this on a machine that has joined it with `ray start --address={address}`",
        parameter="address",
    )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Let SIGTERM go where it went before: Ray takes it for itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment() -> dict[str, str]:
    """Let workers import this very package if it is not installed, and whatever else this process may."""
    root = Path(__file__).parents[1]
    mine = [] if root.name in ("site-packages", "dist-packages") else [str(root)]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = dict.fromkeys(mine + [str(Path(path).absolute()) for path in given])
    return {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}


class Cluster:
    """A Ray cluster that this process has joined; `ray` is the module."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    @property
    def nodes(self) -> list[Node]:
        """The machines, as they are now."""
        return [
            Node(
                str(node["NodeID"]),
                str(node["NodeManagerHostname"]),
                int(node["Resources"].get("CPU", 0)),
                int(node["Resources"].get("GPU", 0)),
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def threads(self, tasks: int, gpus: int = 0) -> int:
        """Return the most CPUs that each of `tasks` can have at the same time, beside `gpus`; at least 1."""
        nodes = self.nodes
        most = max((node.cpus for node in nodes), default=1)
        fit = (n for n in range(most, 0, -1) if sum(node.room(n, gpus) for node in nodes) >= tasks)
        return next(fit, 1)

    def check_folder(self, folder: Path) -> None:
        """Refuse a `folder` that a machine of the cluster does not share, or cannot write to."""
        check_writable(folder)
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        word = secrets.token_hex(8)
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        note = folder.absolute() / f".note.{word}.tmp"
        try:
            with writing(note, "or use another folder"):
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(note, lambda file: file.write(word.encode()))
            for node in self.nodes:
                options = {"num_cpus": 0, "scheduling_strategy": affinity(node.key, soft=False)}
                for outcome in self._done([self._send(_look, (note, word), RETRIES, options)]):
                    outcome.get()
        finally:
            note.unlink(missing_ok=True)
            with suppress(OSError):
                for place in made:
                    place.rmdir()

    def run(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        *,
        cpus: int = 1,
        gpus: int = 0,
        retries: int = RETRIES,
        tick: Callable[[], None] = lambda: None,
    ) -> Iterator[Outcome]:
        """Call `function` once with each of the `arguments`, and yield what becomes of it as each call ends.

        Each call is a task with `cpus` and `gpus` of its own, which Ray starts when there is room. One whose
        worker or machine dies is run again, `retries` times; it goes on from the files that it left. What it
        raises is the `error` of its `Outcome`, and is not tried again. `tick` is called in the meantime.
        Whoever leaves the loop, as by Ctrl-C, tells the tasks that are left to end, as Ctrl-C would. The
        function must be importable; it works in the folder of this process, where its machine has that.
        """
        self.check_room(1, cpus, gpus)
        options = {"num_cpus": cpus, "num_gpus": gpus}
        yield from self._done([self._send(function, one, retries, options) for one in arguments], tick)

    def run_together(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        count: int,
        *,
        cpus: int = 1,
        gpus: int = 0,
        retries: int = RETRIES,
        tick: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Call ``function(*arguments, k, count)`` for each k below `count`, all at the same time.

        They may wait for each other: none begins before Ray has room for all, with `cpus` and `gpus` each.
        Returns what they return; the first error is raised, and ends the others. `retries` and `tick` are
        those of `run`.
        """
        self.check_room(count, cpus, gpus)
        groups = importlib.import_module("ray.util.placement_group")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        group = groups.placement_group([{"CPU": cpus, **({"GPU": gpus} if gpus else {})}] * count)
        try:
            while not group.wait(_PERIOD):  # others work on the cluster, too
                tick()
            refs = []
            for k in range(count):
                place = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=k)
                options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": place}
                refs.append(self._send(function, (*arguments, k, count), retries, options))
            found = {outcome.number: outcome.get() for outcome in self._done(refs, tick)}
        finally:
            groups.remove_placement_group(group)
        return [found[k] for k in range(count)]

    def check_room(self, count: int, cpus: int, gpus: int) -> None:
        """Refuse `count` tasks at a time, with `cpus` and `gpus` each, if there is no room for them."""
        nodes = self.nodes
        room = sum(node.room(cpus, gpus) for node in nodes)
        if room >= count:
            return
        asked = f"{cpus} CPU{'s' * (cpus > 1)}" + (f" and {gpus} GPU{'s' * (gpus > 1)}" if gpus else "")
        has = f"{sum(node.cpus for node in nodes)} CPUs and {sum(node.gpus for node in nodes)} GPUs"
        machines = f"{len(nodes)} machine{'s' * (len(nodes) != 1)}"
        raise UserError(
            f"the Ray cluster has {has} on {machines}, room for {room} workers with {asked} each, not for "
            f"{count}: ask for fewer, or let more machines join",
            parameter="devices",
        )

    def _send(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], retries: int, options: dict[str, Any]
    ) -> Any:
        task = self.ray.remote(_task).options(max_retries=retries, name=function.__name__, **options)
        return task.remote(function, arguments, str(Path.cwd()))

    def _done(self, refs: list[Any], tick: Callable[[], None] = lambda: None) -> Iterator[Outcome]:
        """Yield what becomes of tasks as they end; those that are left when nobody asks on are cancelled."""
        left = {ref: number for number, ref in enumerate(refs)}
        try:
            while left:
                ended, _ = self.ray.wait(list(left), timeout=_PERIOD)
                tick()
                for ref in ended:
                    outcome = self._outcome(ref, left[ref], len(refs))
                    del left[ref]
                    yield outcome
        finally:
            self._cancel(list(left))

    def _outcome(self, ref: Any, number: int, count: int) -> Outcome:
        try:
            value, error, trace = self.ray.get(ref)
        except self.ray.exceptions.RayError as lost:
            return Outcome(number, error=_lost(lost, number, count))
        if error is not None:
            error.__cause__ = SentTraceError(trace)
        return Outcome(number, value, error)

    def _cancel(self, refs: list[Any]) -> None:
        if not refs:
            return
        for ref in refs:
            self.ray.cancel(ref)
        _, left = self.ray.wait(refs, num_returns=len(refs), timeout=_PATIENCE)
        for ref in left:
            self.ray.cancel(ref, force=True)


def _lost(error: Exception, number: int, count: int) -> UserError:
    """Say why Ray gave a task up."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = (lines[-1] if "No module named" in str(error) else " ".join(lines))[:300]
    if "No module named" in str(error):
        return UserError(
            f"a machine of the cluster cannot run task {number + 1} of {count} ({told}): install the same "
            "version of robustmetric on every machine, or run it from a folder that all of them share"
        )
    return LostError(
        f"Ray has lost task {number + 1} of {count} ({type(error).__name__}: {told}); what was finished is "
        "kept: run the same command again, with fewer workers if memory ran out"
    )


def _task(
    function: Callable[..., Any], arguments: tuple[Any, ...], folder: str
) -> tuple[Any, Exception | None, str]:
    """Do the work of a task; what it raises is returned, for Ray would change it."""
    with suppress(OSError):  # where the machine has that folder, its paths are the same
        os.chdir(folder)
    try:
        return function(*arguments), None, ""
    except Exception as error:
        return None, sendable(error), f"\n{traceback.format_exc()}"


def _look(note: Path, word: str) -> None:
    """See, on another machine, whether a folder is the same and can be written to."""
    here, folder = socket.gethostname(), note.parent
    try:
        same = note.read_text() == word
    except OSError:
        same = False
    if not same:
        raise UserError(
            f"{here}, a machine of the cluster, does not see the files of {folder}: give a folder that all "
            "machines share",
            parameter="out",
        )
    try:
        draft = folder / f".{here}.{word}.tmp"
        draft.write_text(word)
        draft.unlink()
    except OSError as error:
        raise UserError(
            f"{here}, a machine of the cluster, cannot write to {folder} ({error.strerror or error}): make "
            "it writable there, or give another folder",
            parameter="out",
        ) from None
