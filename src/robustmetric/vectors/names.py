"""Names of files, a million of them in one piece of memory, and the images below a folder."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from robustmetric.data import load
from robustmetric.data.decode import SUFFIXES
from robustmetric.errors import UserError


class Names(Sequence[str]):
    """N names as the bytes of all of them, `text` (B,), and where each one `ends` (N,).

    Bytes of a name that are no UTF-8 stay what they are, as Python's `surrogateescape` has them.

    >>> names = Names.of(["a.png", "ü.png"])
    >>> len(names), names[1], names[:1], names.ends
    (2, 'ü.png', ['a.png'], array([ 5, 11]))
    """

    def __init__(self, text: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.text, self.ends = text, ends
        begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        if (begins > ends).any() or (ends[-1] if len(ends) else 0) != len(text):
            raise UserError(f"the ends of {len(ends)} names do not fit the {len(text)} bytes of their text")

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Keep `names` as they come."""
        text, ends = bytearray(), array("q")
        for name in names:
            text += name.encode("utf-8", "surrogateescape")
            ends.append(len(text))
        return cls(np.frombuffer(text, np.uint8), np.frombuffer(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._name(place) for place in range(*index.indices(len(self)))]
        place = int(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"name {place} is not among {len(self)}")
        return self._name(place % len(self))

    def _name(self, place: int) -> str:
        begin = int(self.ends[place - 1]) if place else 0
        return self.text[begin : int(self.ends[place])].tobytes().decode("utf-8", "surrogateescape")

    def only(self, kept: NDArray[np.bool_]) -> Names:
        """Return those of the names that are `kept` (N,), in their order.

        >>> list(Names.of(["a", "b", "c"]).only(np.array([True, False, True])))
        ['a', 'c']
        """
        lengths = np.diff(self.ends, prepend=0)
        return Names(self.text[np.repeat(kept, lengths)], lengths[kept].cumsum())

    def is_text(self) -> bool:
        r"""Return whether all names are UTF-8.

        >>> Names.of(["a.png"]).is_text(), Names.of([os.fsdecode(b"\xff.png")]).is_text()
        (True, False)
        """
        begins = np.concatenate([[0], self.ends[:-1]])[np.diff(self.ends, prepend=0) > 0]
        try:
            self.text.tobytes().decode("utf-8")
        except UnicodeDecodeError:
            return False
        # Nor may a character go on from one name to the next.
        return not bool((self.text[begins] & 0xC0 == 0x80).any())


def images_below(folder: Path) -> Names:
    """Return the images below a `folder`, by their names relative to it, sorted.

    They end as those of `read_folder` do; hidden files and folders are left out, links are followed.
    Instead of a folder it may be a CSV file as the data set `csv` reads it; names are then relative to the
    folder that it is in.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for image in ("b/2.png", "b/1.png", "a.jpg", "notes.txt"):
    ...         Path(root, image).parent.mkdir(exist_ok=True)
    ...         Path(root, image).touch()
    ...     list(images_below(Path(root)))
    ['a.jpg', 'b/1.png', 'b/2.png']
    """
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder {folder} of images; give one, or a CSV file")
    if not folder.is_dir():
        return Names.of(_listed(folder))
    names = Names.of(_walk(folder))
    if not len(names):
        raise UserError(
            f"there are no images below {folder}; expected files that end in {', '.join(SUFFIXES)}"
        )
    return names


def _listed(file: Path) -> Iterator[str]:
    """Read the files of a table."""
    images = load("csv", file, "all")
    if images.boxes is not None:
        raise UserError(
            f"{file} has boxes, and vectors are found by the names of their files: cut the boxes out into "
            "files of their own"
        )
    for path in images.files or ():
        yield path.relative_to(file.parent).as_posix()


def _walk(folder: Path) -> Iterator[str]:
    """Yield the names of images, folder by folder."""
    # Of each open folder: what is to be looked at still, last first, what it is called and which it is.
    levels = [(_entries(folder), "", _which(folder))]
    while levels:
        entries, prefix, _ = levels[-1]
        if not entries:
            levels.pop()
            continue
        name = prefix + entries.pop()
        if not name.endswith("/"):
            yield name
        elif (which := _which(folder / name)) not in [above for *_, above in levels]:  # a link may lead up
            levels.append((_entries(folder / name), name, which))


def _entries(folder: Path) -> list[str]:
    """Return the images and, with a slash behind them, the folders in a folder, sorted, last first."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                found.append(f"{entry.name}/")
            # A link that leads nowhere is told among those that cannot be read.
            elif entry.name.lower().endswith(SUFFIXES) and (entry.is_file() or entry.is_symlink()):
                found.append(entry.name)
    return sorted(found, reverse=True)


def _which(folder: Path) -> tuple[int, int]:
    about = folder.stat()
    return about.st_dev, about.st_ino
