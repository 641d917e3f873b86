"""Files that appear complete or not at all, also if the machine stops in the middle."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from robustmetric.validate import UserError


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a new file, bring it to the disk, and put it in the place of `path` in one step.

    Until then `path` is what it was; if anything goes wrong it stays so, and no partial file is left behind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "note.txt")
    ...     write_atomically(file, lambda f: f.write(b"complete"))
    ...     file.read_text()
    'complete'
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        publish(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def is_draft(path: Path) -> bool:
    """Return whether `path` is what a killed program left of a file it was writing.

    >>> is_draft(Path(".note.txt.0123.tmp")), is_draft(Path("note.txt"))
    (True, False)
    """
    return path.name.startswith(".") and path.suffix == ".tmp"


def publish(draft: Path, final: Path) -> None:
    """Rename the file `draft`, complete on the disk, to `final`, and bring the folder's entry to the disk.

    >>> publish(Path("no such draft"), Path("final"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: ...
    """
    draft.replace(final)
    if os.name == "posix":
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def check_writable(out: Path) -> None:
    """Refuse a folder `out` that cannot be made or written to, without making it.

    >>> check_writable(Path("/dev/null/run"))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the folder /dev/null/run cannot be written to (Not a directory): give another ...
    """
    try:
        if out.is_symlink() and not out.exists():
            raise FileNotFoundError(None, "a link that leads nowhere")
        there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"the folder {out} cannot be written to ({reason}): give another folder", parameter="out"
        ) from None
