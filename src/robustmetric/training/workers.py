"""The workers of a training: which of them this is, and what happens when another one is gone."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.plugins import environments
from lightning.fabric.utilities.rank_zero import rank_zero_only

from robustmetric.errors import UserError
from robustmetric.training.stops import CutShortError, Left, Signals, Stopped

_PERIOD = 0.2  # seconds between two looks at the others
_GRACE = 10.0  # seconds that this worker has to end by itself
_SCHEDULERS: tuple[Any, ...] = tuple(  # in the order in which Lightning looks for them
    getattr(environments, f"{name}Environment") for name in ("TorchElastic", "SLURM", "LSF", "MPI")
)
_LOST = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe", "socket")


def is_first() -> bool:
    """Return whether this is the worker that writes.

    >>> is_first()
    True
    """
    return getattr(rank_zero_only, "rank", 0) == 0


def number_worker(devices: int, nodes: int) -> None:
    """Let Lightning know which of all workers this is before it connects: the first of many machines writes.

    With `nodes` machines of `devices` workers each, a scheduler says so (torchrun, Slurm, LSF, MPI), or the
    user does by `NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT`.

    >>> number_worker(devices=2, nodes=1)
    """
    if nodes == 1:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that srun is there and not used
        for kind in _SCHEDULERS:
            if kind.detect():
                rank_zero_only.rank = _of_scheduler(kind)  # type: ignore[attr-defined]
                return
    wanted = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in wanted if not os.environ.get(name)]:
        raise UserError(
            f"{nodes} machines find each other by {', '.join(wanted)}: {', '.join(missing)} not set; give "
            "them to the command on each machine, with NODE_RANK counting from 0, or start it by torchrun "
            "or srun",
            parameter="nodes",
        )
    node = os.environ["NODE_RANK"]
    if not node.isdecimal() or int(node) >= nodes:
        raise UserError(f"NODE_RANK must be 0 to {nodes - 1}, not {node!r}", parameter="nodes")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    rank_zero_only.rank = int(node) * devices + local  # type: ignore[attr-defined]


def _of_scheduler(kind: Any) -> int:
    try:
        return int(kind().global_rank())
    except (RuntimeError, LookupError, ValueError) as error:
        told = f"the scheduler's settings do not fit: {' '.join(str(error).split())}"
        raise UserError(told, parameter="nodes") from error


@contextmanager
def together(trainer: L.Trainer, signals: Signals) -> Iterator[None]:
    """Train inside, with the other workers of a `trainer`; an end that one of them causes is told as such.

    The worker that started the others sees them end; those see that it is gone. Who waits for nobody is made
    to leave its step by `signals`. Raises `Stopped` where a signal had a step left.
    """
    others = _Others(trainer, signals)
    failed = True
    try:
        with _parting():
            yield
        failed = False
    except Left:
        if others.lost is None:
            raise Stopped(signals.stop or "SIGINT", signals.left) from None
        raise CutShortError(others.lost) from None
    except Stopped:
        failed = False  # all workers stop together
        raise
    except (RuntimeError, ConnectionError) as error:
        if trainer.world_size == 1 or not _of_connection(error):
            raise
        if signals.stop is not None:
            raise Stopped(signals.stop, "another worker left its step") from None
        raise CutShortError(others.who()) from error
    finally:
        others.end(failed)


@contextmanager
def _parting() -> Iterator[None]:
    """Close the connection between workers that Lightning opens inside, and leaves open.

    A thread of it that ends after Python does aborts the process, when all work is done.
    """
    before = dist.is_available() and dist.is_initialized()
    try:
        yield
    finally:
        if not before and dist.is_available() and dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()


def _of_connection(error: BaseException) -> bool:
    known = isinstance(error, ConnectionError | getattr(dist, "DistError", ConnectionError))
    return known or any(word in str(error).lower() for word in _LOST)


class _Others:
    """Looks after the other workers in a thread, where there are any.

    Lightning's own thread does so too; it would kill the first worker in silence, and is given nothing to
    look at.
    """

    def __init__(self, trainer: L.Trainer, signals: Signals) -> None:
        self.trainer, self.signals = trainer, signals
        self.started: list[subprocess.Popen[bytes]] = []
        self.parent = os.getppid()
        self.lost: str | None = None
        self.over = threading.Event()
        if trainer.world_size > 1:
            threading.Thread(target=self._look, daemon=True, name="other-workers").start()

    def who(self) -> str:
        """Say who is gone, when the connection is; a worker that another one started leaves that to it."""
        end = time.monotonic() + _GRACE / 2
        while self.lost is None and time.monotonic() < end:
            time.sleep(_PERIOD / 4)
        if self.lost is None and self.trainer.local_rank != 0:
            raise SystemExit(1)
        return self.lost or "the connection to another worker was lost"

    def end(self, failed: bool) -> None:
        """Look no more; where this worker failed, the others that it started have nothing left to do."""
        self.over.set()
        if failed:
            for process in self.started:
                process.kill()

    def _look(self) -> None:
        while not self.over.wait(_PERIOD):
            self._take_over()
            self.lost = self._gone()
            if self.lost is not None:
                break
        else:
            return
        if not self.trainer.interrupted:
            self.signals.leave(self.lost)
        # Blocked where no signal is heard, such as in a connection that is never made.
        if not self.over.wait(_GRACE) and not self.trainer.interrupted:
            print(f"error: {self.lost}; start again", file=sys.stderr, flush=True)
            self.end(failed=True)
            os._exit(1)

    def _take_over(self) -> None:
        launched: Any = getattr(self.trainer.strategy.launcher, "procs", [])
        if not self.started and len(launched) == self.trainer.num_devices - 1:
            self.started = list(launched)
            launched.clear()

    def _gone(self) -> str | None:
        for number, process in enumerate(self.started, 2):
            if code := process.poll():
                return f"worker {number} of {self.trainer.world_size} {_ended(code)}"
        if self.trainer.local_rank != 0 and os.getppid() != self.parent:
            return "the first worker has ended"
        return None


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with an error (exit code {code})"
