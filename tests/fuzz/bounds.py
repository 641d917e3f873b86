"""One attempt to read a file: within a time and a memory, and nothing but an error for the user comes out."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from robustmetric.errors import UserError
from tests.fuzz.readers import Reader

SECONDS = 10  # of computing, for a file that takes a moment
ATTEMPTS = 500  # of a process, so that what one leaves behind does not pile up
WAIT = 120  # seconds, on a machine that is busy with other things
MEMORY = 1 << 31  # bytes beyond what the process has


class TooLongError(BaseException):
    """Reading took too long; no reader may catch it."""


class Outcome(NamedTuple):
    """What became of an attempt: "read", "refused", or what went `wrong`, with the `story` of it."""

    wrong: str
    story: str = ""


def attempt(reader: Reader, content: bytes) -> Outcome:
    """Let a reader read in this process."""
    folder = tempfile.mkdtemp(prefix="fuzz-")
    try:
        with _bounded():
            reader.read(Path(folder), content)
    except (UserError, OSError):
        return Outcome("refused")
    except (Exception, TooLongError) as error:
        return Outcome(f"{type(error).__name__} in {_place(error.__traceback__)}", traceback.format_exc())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome("read")


class Apart:
    """A process of its own that lets a reader read; a new one takes its place if it is taken down."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._child: BaseProcess | None = None

    def attempt(self, content: bytes) -> Outcome:
        """Let the reader read there."""
        if self._child is None:
            self._begin()
        assert self._child is not None
        self._line.send_bytes(content)
        self._left -= 1
        try:
            if self._line.poll(WAIT):
                outcome = Outcome(*self._line.recv())
                if self._left == 0:
                    self.end()
                return outcome
        except (EOFError, ConnectionError):
            self._child.join()
            code = self._child.exitcode or 0
            self._child = None
            return Outcome(f"ended by {signal.Signals(-code).name if code < 0 else f'exit code {code}'}")
        self.end()
        return Outcome("hangs")

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._child = None

    def _begin(self) -> None:
        fork = multiprocessing.get_context("fork")
        self._line, theirs = fork.Pipe()
        self._left = ATTEMPTS
        self._child = fork.Process(target=_serve, args=(self.reader, theirs), daemon=True)
        self._child.start()
        theirs.close()


def _serve(reader: Reader, line: Connection[Any, bytes]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends this process
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    while True:
        line.send(tuple(attempt(reader, line.recv_bytes())))


@contextmanager
def _bounded() -> Iterator[None]:
    """Bound the computing time and the memory of what is done within."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLongError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _place(trace: TracebackType | None) -> str:
    """Return the last function of our own that an error went through."""
    ours = [frame for frame in traceback.extract_tb(trace) if "robustmetric" in Path(frame.filename).parts]
    return f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "the harness"
