"""Why a training ends before its end, and the signals that end it."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from robustmetric.errors import UserError
from robustmetric.files import remedy

PATIENCE = 5.0
"""The seconds that a step may still take after the first signal."""


class Stopped(Exception):  # noqa: N818 (it is no error)
    """A training that stopped before its end, and can be resumed.

    Its text is the name of the signal. `left` says why the stop was not saved; None if it was.
    """

    def __init__(self, why: str, left: str | None = None) -> None:
        super().__init__(why)
        self.left = left


class CollapsedError(UserError):
    """A network whose embeddings all point the same way, or are no numbers any more."""


class CutShortError(UserError):
    """A training that something outside of it ended: a full disk, a worker that was killed.

    It can be resumed when that is mended.
    """


class Left(BaseException):
    """Ends a training in the midst of a step, past all that catches errors."""


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Tell of a `path` that could not be written inside, for want of room or of the right to.

    >>> with saving(Path("last.ckpt")):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    ...
    robustmetric.training.stops.CutShortError: last.ckpt could not be saved (No space left on device): ...
    """
    try:
        yield
    except CutShortError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and remedy(cause) is None:  # torch's writer tells of its own position instead
            cause = cause.__cause__ or cause.__context__
        if not isinstance(cause, OSError):
            raise
        raise unsaved(path, cause) from error


def unsaved(path: Path, error: OSError) -> CutShortError:
    """Return what to say of an `error` of the disk that keeps `path` from being written.

    >>> print(unsaved(Path("run"), OSError(30, "Read-only file system")))
    run could not be saved (Read-only file system): make the folder writable...
    """
    return CutShortError(f"{path} could not be saved ({error.strerror or error}): {remedy(error)}")


class Signals:
    """SIGINT and SIGTERM during a training.

    The first one asks for a stop at the end of the step; a step that takes longer than `PATIENCE` is left. A
    second one leaves it at once. Nothing is left while `busy`, which is when a checkpoint is written.
    """

    def __init__(self) -> None:
        self.stop: str | None = None  # the signal that asked for a stop
        self.left: str | None = None  # why the step was left
        self.busy = False
        self._timer: threading.Timer | None = None
        self._before: dict[signal.Signals, object] = {}
        self._active = False
        self._ending = threading.Lock()

    def take(self) -> None:
        """Let the signals come here; only the main thread of a program hears any."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._active = True
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._heard)
            self._before.setdefault(number, before)

    def give_back(self) -> None:
        """Let the signals go where they went before."""
        self._active = False
        with self._ending:  # nobody sends a signal any more that would come too late
            if self._timer is not None:
                self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def leave(self, why: str) -> None:
        """Leave the step, whichever thread says so, and say `why`."""
        with self._ending:
            if not self._active:
                return
            self.left = why
            if sys.platform == "win32":
                _thread.interrupt_main(signal.SIGINT)
            else:  # which also ends a call that waits
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if not self._active:
            return
        if self.left is not None or self.stop is not None:
            self.left = self.left or "stopped at once"
            if not self.busy:
                raise Left
            self._later(1.0, self.left)
        else:
            self.stop = signal.Signals(number).name
            self._later(PATIENCE, f"the step took longer than {PATIENCE:g} s and was left")

    def _later(self, seconds: float, why: str) -> None:
        self._timer = threading.Timer(seconds, self.leave, (why,))
        self._timer.daemon = True
        self._timer.start()


@contextmanager
def stopping(signals: Signals) -> Iterator[None]:
    """Let `signals` stop what is inside."""
    signals.take()
    try:
        yield
    finally:
        signals.give_back()


Report = Callable[[str], None]
