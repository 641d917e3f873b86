"""One attempt to read a file: within a time and a memory, and nothing but an error for the user comes out."""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from robustmetric.validate import UserError
from tests.fuzz.readers import Reader

SECONDS = 10  # of computing, for a file that takes a moment
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


def attempt_apart(reader: Reader, content: bytes) -> Outcome:
    """Let a reader read in a process of its own, which may be taken down by it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            outcome = attempt(reader, content)
            os.write(writing, f"{outcome.wrong}\n{outcome.story[-30_000:]}".encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], WAIT)
        if not ready:
            os.kill(child, signal.SIGKILL)
        said = pipe.read().decode(errors="replace") if ready else ""
    _, status = os.waitpid(child, 0)
    wrong, _, story = said.partition("\n")
    return Outcome(wrong or f"ended by {_ending(status)}", story)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


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
