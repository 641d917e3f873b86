"""A folder belongs to one program at a time: a file in it says to which."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from io import FileIO
from pathlib import Path

from robustmetric.errors import UserError
from robustmetric.files import writing

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"
"""The name of the file, in the folder that is locked."""

_TASK: ContextVar[str | None] = ContextVar("task", default=None)
_VARIABLE = "ROBUSTMETRIC_TASK"
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}  # a file system that has none


class InUseError(UserError):
    """A folder that another program works in."""


@contextmanager
def handed_out(task: str) -> Iterator[None]:
    """Say that the work inside is a `task` of an engine that runs it in one place at a time.

    When its machine dies, the engine runs it again on another one, which finds the lock that is left. It is
    taken over if it names the same task and the file system grants the kernel's lock.

    >>> with handed_out("ray 0123"):
    ...     _TASK.get()
    'ray 0123'
    """
    before = _TASK.set(task)
    try:
        yield
    finally:
        _TASK.reset(before)


def handed_on() -> dict[str, str]:
    """Return the environment that a process needs to go on with the task of this one.

    >>> with handed_out("ray 0123"):
    ...     handed_on()
    {'ROBUSTMETRIC_TASK': 'ray 0123'}
    """
    task = _TASK.get()
    return {} if task is None else {_VARIABLE: task}


def _tasks() -> list[str]:
    """Name the task that this is of an engine, last, behind the attempts at it that have ended."""
    if (task := _TASK.get() or os.environ.get(_VARIABLE)) is not None:
        return [task, task]  # which Ray names the same each time
    cluster, job, again = (
        os.environ.get(f"SLURM_{name}", "") for name in ("CLUSTER_NAME", "JOB_ID", "RESTART_COUNT")
    )
    attempts = 1 + int(again) if again.isdecimal() else 1
    return [f"slurm {cluster} {job} {attempt}" for attempt in range(attempts)] if job else []


@contextmanager
def locked(folder: Path, doing: str, report: Callable[[str], None] = print) -> Iterator[None]:
    """Keep other programs out of a `folder`, which is made if it is not there.

    A file `.lock` names the host, the process and what it is `doing`, such as "a training". A folder that is
    in use raises an `InUseError` that says by whom. The lock of a process of this host that has ended is told
    to `report` and taken over. Whether a process of another host still runs cannot be seen: its lock is
    refused, with the file to remove, unless an engine ran the same task there before: Ray (`handed_out`), or
    Slurm, which requeued the job. On Windows, and where a file system has no locks, a process of this host
    is looked for by its number. A lock that is a link, or another name of a file elsewhere, is refused.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as home, locked(Path(home), "a training"):
    ...     with locked(Path(home), "an evaluation"):
    ...         pass
    Traceback (most recent call last):
    ...
    robustmetric.locks.InUseError: ... is in use: a training by process ...; wait until it has ended, ...
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / LOCK
    with writing(path, "or use another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        file, alone = _taken(path)
    try:
        owner = _owner(file)
        here = socket.gethostname()
        if alone is False or (owner and owner["host"] == here and alone is None and _runs(owner["process"])):
            raise InUseError(
                f"{folder} is in use: {_told(owner)}; wait until it has ended, or use another folder",
                parameter="out",
            )
        tasks = _tasks()
        retried = alone is True and owner.get("task") in tasks[:-1]
        if owner and owner["host"] != here and not retried:
            raise InUseError(
                f"{folder} is in use: {_told(owner)}; if that has ended, remove {path} and start again",
                parameter="out",
            )
        if owner:
            report(f"{folder} was left by {_told(owner)}, which has ended: going on from there")
        mine = {"host": here, "process": os.getpid(), "doing": doing, "since": time.strftime("%F %T")}
        mine |= {"task": tasks[-1]} if tasks else {}
        try:
            with writing(path, "or use another folder"):
                file.seek(0)
                file.truncate()
                file.write(json.dumps(mine).encode())
            yield
        finally:
            if _same(file, path):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # something is in it, or it is gone
                for place in made:
                    place.rmdir()
    finally:
        file.close()


def _taken(path: Path) -> tuple[FileIO, bool | None]:
    """Open the file and take the kernel's lock on it; who held it may have removed it meanwhile."""
    while True:
        # A folder may come from somebody else: what a link in it leads to is not ours to write.
        if path.is_symlink():
            raise _no_lock(path)
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644), "r+")
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
            file.close()
            raise _no_lock(path)
        alone = _alone(file)
        if alone is not True or _same(file, path):
            return file, alone
        file.close()


def _no_lock(path: Path) -> UserError:
    return UserError(f"{path} is a link, or no file: it is no lock of ours; look at it, and remove it")


def _alone(file: FileIO) -> bool | None:
    """Take the kernel's lock, which ends with the process; None where there is no such lock."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _same(file: FileIO, path: Path) -> bool:
    """Return whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except OSError:
        return False


def _owner(file: FileIO) -> dict[str, object]:
    """Read who holds the lock; empty if nobody does, or if that cannot be read."""
    file.seek(0)
    try:
        found = json.loads(file.read(10_000) or b"{}")
    except (ValueError, RecursionError):
        return {}
    known = {"host", "process", "doing", "since"}
    return found if isinstance(found, dict) and known <= found.keys() else {}


def _told(owner: dict[str, object]) -> str:
    if not owner:
        return "another program holds its lock"
    return f"{owner['doing']} by process {owner['process']} on {owner['host']} since {owner['since']}"


def _runs(process: object) -> bool:
    if not isinstance(process, int) or process <= 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
