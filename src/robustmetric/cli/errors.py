"""Errors of the machine as sentences: of memory, of files, of disks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from robustmetric.files import remedy

_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|storage size calculation overflowed"
    r"|numel: integer multiplication overflow|overflow when unpacking long",
    re.IGNORECASE,
)
_KEPT = "what is finished is kept: run the same command again"


def out_of_memory(error: BaseException) -> str | None:
    """Return what to say of an `error` for want of memory: how much was asked for; None of any other error.

    >>> out_of_memory(RuntimeError("can't allocate memory: you tried to allocate 5000000000 bytes"))
    ' (5.0 GB were asked for at once)'
    >>> out_of_memory(MemoryError()), out_of_memory(ValueError("elsewhere"))
    ('', None)
    """
    for cause in _causes(error):
        text = str(cause)
        known = isinstance(cause, RuntimeError | TypeError | OverflowError) and _MEMORY.search(text)
        if isinstance(cause, MemoryError) or known:
            asked = re.search(r"tried to allocate (\d+) bytes", text)
            return f" ({int(asked[1]) / 1e9:,.1f} GB were asked for at once)" if asked else ""
    return None


def told_of_files(error: BaseException) -> str | None:
    """Return what to say of an `error` of the system: the file, what is wrong with it and what to do.

    >>> told_of_files(IsADirectoryError(21, "Is a directory", "runs"))
    'runs: Is a directory; give a file, not a folder; what is finished is kept: run the same command again'
    >>> told_of_files(ValueError("elsewhere")) is None
    True
    """
    if isinstance(error, UnicodeDecodeError):
        return f"a file is no text in {error.encoding.upper()} ({error.reason}): save it as UTF-8"
    if not isinstance(error, OSError):
        return None
    if error.errno is None or error.strerror is None:
        return str(error)  # it is one of ours, and says all
    files = [os.fsdecode(file) for file in (error.filename, error.filename2) if isinstance(file, str | bytes)]
    place = f"{' and '.join(files)}: " if files else ""
    return f"{place}{error.strerror}; {remedy(error) or 'give another path'}; {_KEPT}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__
