"""Why a training ends before its end, and the signals that end it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from robustmetric.errors import UserError
from robustmetric.files import remedy

Report = Callable[[str], None]


class Stopped(Exception):  # noqa: N818 (it is no error)
    """A training that a signal stopped, and that can be resumed.

    Its text is the name of the signal; `saved` is False if a step was left: an earlier checkpoint counts.
    """

    def __init__(self, name: str, saved: bool = True) -> None:
        super().__init__(name, saved)
        self.saved = saved

    def __str__(self) -> str:
        return str(self.args[0])


class CollapsedError(UserError):
    """A network whose embeddings all point the same way, or are no longer finite."""


class CutShortError(UserError):
    """A training that something outside of it ended: a full disk, a lost worker. It can be resumed."""


class Left(BaseException):
    """Ends a training in the middle of a step, past all that catches errors."""


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Raise a `CutShortError` where a `path` cannot be written, for want of room or of the right to."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and remedy(cause) is None:  # torch's writer raises an error of its own
            cause = cause.__cause__ or cause.__context__
        if not isinstance(cause, OSError):
            raise
        told = f"{path} could not be saved ({cause.strerror or cause}): {remedy(cause)}"
        raise CutShortError(told) from error


class Signals:
    """SIGINT and SIGTERM during a training.

    The first one ends it after the step, or at once while there is none; a second one at once. A checkpoint
    that is being written is finished before.
    """

    def __init__(self) -> None:
        self.name: str | None = None  # of the first signal that came
        self.stepping = False
        self._saving = self._leave = self._left = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        self.take()
        return self

    @property
    def active(self) -> bool:
        """Whether signals come here."""
        return bool(self._before)

    def take(self) -> None:
        """Let the signals come here, also after Lightning took them."""
        if threading.current_thread() is threading.main_thread():  # no other one gets any
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before.setdefault(number, signal.signal(number, self._heard))

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Let nothing be left inside."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False
        self._leave_step()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._leave = self.name is not None or not self.stepping
        self.name = self.name or signal.Signals(number).name
        self._leave_step()

    def _leave_step(self) -> None:
        if self._leave and not self._saving and not self._left:
            self._left = True
            raise Left
