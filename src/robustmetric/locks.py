"""One program at a time writes to a folder or a file: the kernel releases the lock when its process ends."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from robustmetric.errors import UserError
from robustmetric.files import check_writable, writing

LOCK = ".lock"
"""The name of the lock in a folder."""


class InUseError(UserError):
    """A folder or a file that another program is writing to."""


@contextmanager
def locked(folder: Path, doing: str, report: Callable[[str], None] = print) -> Iterator[None]:
    """Keep other programs out of a `folder`, which is created if it does not exist.

    While the lock is held, `.lock` names the process, its host and what it is `doing`, such as "a training".
    A folder that is in use raises an `InUseError` with that line. What a killed process left is passed to
    `report`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as home, locked(Path(home), "a training"):
    ...     with locked(Path(home), "an evaluation"):
    ...         pass
    Traceback (most recent call last):
    ...
    robustmetric.locks.InUseError: ... is in use: a training by process ...; wait until it has ended, ...
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with writing(folder / LOCK, "or use another folder"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with _held(folder / LOCK, folder, doing, report):
            yield
    finally:
        with suppress(OSError):  # something is in it, or it is gone
            for place in made:
                place.rmdir()


@contextmanager
def claimed(file: Path, doing: str, *, force: bool = False) -> Iterator[None]:
    """Keep other programs from writing the `file`, from the check that it may be written to its rename.

    A file that exists is refused unless `force`. A folder, or a file in a folder that is missing or cannot be
    written to, is always refused.

    >>> with claimed(Path("nowhere/page.html"), "a report"):
    ...     pass
    Traceback (most recent call last):
    ...
    robustmetric.UserError: there is no folder nowhere to write page.html to: create it, or give another path
    """
    if file.is_dir():
        raise UserError(f"{file} is a folder: give the path of a file", parameter="out")
    if not file.parent.is_dir():
        raise UserError(
            f"there is no folder {file.parent} to write {file.name} to: create it, or give another path",
            parameter="out",
        )
    check_writable(file.parent)
    with _held(file.with_name(f".{file.name}.lock"), file, doing):
        if file.exists() and not force:
            raise UserError(f"{file} exists already: give another path, or overwrite it", parameter="force")
        yield


@contextmanager
def _held(path: Path, what: Path, doing: str, report: Callable[[str], None] | None = None) -> Iterator[None]:
    if (before := _note(path)) is None:
        raise UserError(f"{path} is a link, or not a file: it is no lock of ours; look at it, and remove it")
    lock = FileLock(path)
    with writing(path, "or use another folder"):
        try:
            lock.acquire(blocking=False)
        except Timeout:
            who = _note(path) or "another program holds its lock"
            raise InUseError(
                f"{what} is in use: {who}; wait until it has ended, or use another path", parameter="out"
            ) from None
    try:
        if before and report is not None:
            report(f"{what} was left by {before}, which has ended: resuming")
        since = time.strftime("%F %T")
        note = f"{doing} by process {os.getpid()} on {socket.gethostname()} since {since}"
        if type(lock) is not SoftFileLock:  # what a file system without locks gets: it names its own holder
            with writing(path, "or use another folder"):
                path.write_text(note)
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def _note(path: Path) -> str | None:
    """Return what a lock says of its holder, "" if nothing; None for a link or anything but a file."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
            return None
        return path.read_bytes()[:200].decode(errors="replace")
    except OSError:
        return ""
