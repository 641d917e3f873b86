"""Files that appear complete or not at all, also if the machine stops in the middle, and digests of them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from robustmetric.errors import UserError

_SEAL = b"\nsha256 "
_SEALED = len(_SEAL) + 64 + 1  # bytes of a seal: the word, the digest in hexadecimal, the end of the line
_BLOCK = 1 << 20
AGAIN = "then run the same command again: what is finished is kept"
"""What to do after there is room again."""

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    errno.EFBIG: "use a disk, or a limit, that allows larger files",
    errno.EIO: "look after the disk",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or give another path"),
    errno.EROFS: "make the folder writable",
    errno.ENOTDIR: "a part of the path is a file: give another path",
    errno.EISDIR: "give a file, not a folder",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files, such as by ulimit -n 4096"),
    errno.ENOMEM: "close other programs, or ask for less at once",
    errno.EAGAIN: "wait until less runs at the same time",
}


class DamagedError(UserError):
    """A file whose bytes are not those that were written."""


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
        draft.replace(path)
        if os.name == "posix":  # the folder's entry is brought to the disk, too
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, then: str) -> Iterator[None]:
    """Say of a full disk, or whatever else keeps `path` from being written, what to do, and what `then`.

    >>> with writing(Path("record.json"), "then run it again"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: record.json cannot be written (No space left on device): make room; then ...
    """
    try:
        yield
    except OSError as error:
        told = f"{path} cannot be written ({error.strerror or error})"
        raise UserError(f"{told}: {remedy(error) or 'give another path'}; {then}") from None


def save(path: Path, content: bytes | str | Callable[[BinaryIO], object], then: str = AGAIN) -> None:
    """Write `content`, or what a function writes to the file it is given, to `path` in one step.

    If the disk is full, or `path` cannot be written, a `UserError` says what to do, and what `then`.

    >>> save(Path("nowhere/record.json"), "{}")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: nowhere/record.json cannot be written (No such file or directory): ...
    """
    data = content.encode() if isinstance(content, str) else content
    write = (lambda file: file.write(data)) if isinstance(data, bytes) else data
    with writing(path, then):
        write_atomically(path, write)


def remedy(error: BaseException) -> str | None:
    """Return what to do about an `error` of the disk or the system; None about any other error.

    >>> remedy(OSError(errno.ENOSPC, "No space left on device")), remedy(FileNotFoundError())
    ('make room', None)
    """
    return _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None


def write_sealed(path: Path, write: Callable[[BinaryIO], object], key: bytes = b"") -> None:
    r"""Let `write` fill `path` as `write_atomically` does, from beginning to end; a digest is the last line.

    The digest is in the file itself, so that a kill cannot part the two. Readers of zip archives, torch.load
    among them, take no notice of the line. It covers a `key` too: only a reader with the same one accepts it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "note.txt")
    ...     write_sealed(file, lambda f: f.write(b"complete"))
    ...     file.read_bytes()[:16], read_sealed(file)
    (b'complete\nsha256 ', b'complete')
    """

    def sealed(file: BinaryIO) -> None:
        hashed = _Hashed(file, key)
        write(hashed)  # type: ignore[arg-type]
        file.write(_SEAL + hashed.digest.hexdigest().encode() + b"\n")

    write_atomically(path, sealed)


class _Hashed:
    """A file that is written from beginning to end, and the digest of what was written."""

    def __init__(self, file: BinaryIO, key: bytes) -> None:
        self.file, self.digest = file, hashlib.sha256(key)

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        self.file.flush()


def check_seal(path: Path) -> bool:
    """Return whether the file `path` ends with the digest of what is before it; False if it has no digest.

    A file that is not what its digest says raises a `DamagedError`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "note.txt")
    ...     _ = file.write_bytes(b"nobody sealed this")
    ...     check_seal(file)
    False
    """
    with path.open("rb") as file:
        left = file.seek(0, os.SEEK_END) - _SEALED
        if left < 0:
            return False
        file.seek(left)
        seal = file.read(_SEALED)
        if not seal.startswith(_SEAL):
            return False
        file.seek(0)
        digest = hashlib.sha256()
        while left > 0 and (block := file.read(min(_BLOCK, left))):
            digest.update(block)
            left -= len(block)
    if seal != _SEAL + digest.hexdigest().encode() + b"\n":
        raise DamagedError(f"{path} is damaged: its content does not match the digest at its end")
    return True


def read_sealed(path: Path, key: bytes = b"") -> bytes:
    """Return what `write_sealed` wrote to `path` with this `key`; anything else raises a `DamagedError`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "note.txt")
    ...     write_sealed(file, lambda f: f.write(b"complete"))
    ...     read_sealed(file)
    b'complete'
    """
    content = path.read_bytes()
    body, seal = content[:-_SEALED], content[-_SEALED:]
    if seal != _SEAL + hashlib.sha256(key + body).hexdigest().encode() + b"\n":
        raise DamagedError(f"{path} is damaged: its content does not match the digest at its end")
    return body


def digest_of_entries(entries: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the `entries` of a JSON object but "sha256", however a file lays them out.

    >>> digest_of_entries({"a": 1, "b": 2}) == digest_of_entries({"b": 2, "a": 1, "sha256": "0"})
    True
    """
    rest = {key: value for key, value in entries.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def save_entries(path: Path, entries: Mapping[str, Any], then: str = AGAIN) -> None:
    """Write the `entries` of a JSON object to `path`, with their digest as its last entry, "sha256"."""
    sealed = {**entries, "sha256": digest_of_entries(entries)}
    save(path, json.dumps(sealed, indent=1, ensure_ascii=False) + "\n", then)


def load_entries(path: Path, *, sealed: bool = True) -> dict[str, Any]:
    """Return the entries of the JSON object in `path`, without the digest.

    A damaged file raises a `DamagedError`. A file that is not `sealed` may be edited by hand.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "cell.json")
    ...     save_entries(file, {"seed": 0})
    ...     load_entries(file)
    {'seed': 0}
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{path} is damaged: it holds no JSON object")
    if found.pop("sha256", None) != digest_of_entries(found) and sealed:
        raise DamagedError(f"{path} is damaged, or was changed by hand: its digest does not match")
    return found


def is_draft(path: Path) -> bool:
    """Return whether `path` is what a killed program left of a file it was writing.

    >>> is_draft(Path(".note.txt.0123.tmp")), is_draft(Path("note.txt"))
    (True, False)
    """
    return path.name.startswith(".") and path.suffix == ".tmp"


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
