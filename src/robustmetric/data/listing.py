"""Images listed in files: what the readers of all data sets share."""

from __future__ import annotations

import codecs
import errno
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from robustmetric.data.base import Half, ImageSet, Part
from robustmetric.errors import UserError, shorten

Key = TypeVar("Key", int, str)

LONGEST = 1 << 30  # bytes of a list of images; that of fourteen million has about half of this
_SHOWN = 100  # characters of a text that a message shows


def find_root(
    name: str, root: Path | None, holds: Sequence[str], published: str, *, nested: str | None = None
) -> Path:
    """Return the directory that holds a data set's parts: ``root``, or ``nested`` in it if that is there.

    >>> find_root("cub", None, ["images.txt", "images"], "It is published at https://example.org")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: cub needs a root: the directory that holds images.txt, images. It is published ...
    """
    needs = f"the directory that holds {', '.join(holds)}. {published}"
    root = check_root(name, root, needs)
    inner = root / nested if nested else root
    folder = root if (root / holds[0]).exists() or not inner.is_dir() else inner
    if missing := [part for part in holds if not (folder / part).exists()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)} of {name}; give {needs}")
    return folder


def check_root(name: str, root: Path | None, needs: str) -> Path:
    """Return the root if it was given and is a directory.

    >>> check_root("mine", Path("nowhere"), "the directory of the images")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: there is no directory nowhere for mine; give the directory of the images
    """
    if root is None:
        raise UserError(f"{name} needs a root: {needs}", parameter="root")
    if not root.is_dir():
        raise UserError(f"there is no directory {root} for {name}; give {needs}", parameter="root")
    return root


def listed(
    name: str, split: Part, rows: Sequence[tuple[Path, Key]], names: Mapping[Key, str], *, hint: str
) -> ImageSet:
    """Make the image set of one split from its (file, class) rows, in their order, and check the files.

    ``names`` gives each class its name; ``hint`` tells what to do when files are missing.

    >>> listed("mine", "train", [(Path("no.png"), 7), (Path("none.png"), 7)], {7: "cat"}, hint="copy them")
    Traceback (most recent call last):
    ...
    FileNotFoundError: 2 of 2 image files of the train split of mine are missing: no.png, none.png; copy them
    """
    labels, classes = count_classes([key for _, key in rows])
    files = tuple(path for path, _ in rows)
    if missing := [path for path in files if not _is_file(path)]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} image files of the {split} split of {name} are missing: "
            f"{shorten([_clipped(str(path)) for path in missing])}; {hint}"
        )
    return ImageSet(name, split, labels, tuple(names[key] for key in classes), files=files)


def count_classes(keys: Sequence[Key]) -> tuple[Tensor, list[Key]]:
    """Return labels (N,) that count the sorted classes from 0, and those classes.

    >>> count_classes([30, 20, 30])
    (tensor([1, 0, 1]), [20, 30])
    """
    classes = sorted(set(keys))
    index = {key: label for label, key in enumerate(classes)}
    return torch.tensor([index[key] for key in keys], dtype=torch.long), classes


def check_retrievable(images: ImageSet) -> ImageSet:
    """Return a split if some class of it has two images, and if some are queries and some in the gallery.

    >>> check_retrievable(ImageSet("mine", "test", torch.tensor([0]), ("a",), (Path("a.png"),)))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: no class in the test split of mine has two images (1 images, 1 classes), so ...
    """
    counts = Counter(images.labels.tolist())
    if max(counts.values(), default=0) < 2:
        raise UserError(
            f"no class in the {images.split} split of {images.name} has two images ({len(images)} images, "
            f"{len(counts)} classes), so there are no pairs to train on or to retrieve; add images or "
            "classes, or check that labels name classes and not single images"
        )
    for what, marks in (("query", images.is_query), ("gallery", images.is_gallery)):
        if marks is not None and not marks.any():
            raise UserError(f"the {images.split} split of {images.name} has no {what} image; name some")
    return images


def with_queries(images: ImageSet, is_query: Sequence[bool]) -> ImageSet:
    """Say which images are queries; the others are the gallery.

    >>> pair = ImageSet("mine", "test", torch.tensor([0, 0]), ("a",), (Path("a.png"), Path("b.png")))
    >>> with_queries(pair, [True, False]).is_gallery
    tensor([False,  True])
    """
    marks = torch.tensor(is_query, dtype=torch.bool)
    return replace(images, is_query=marks, is_gallery=~marks)


def half(keys: Iterable[Key], split: Half) -> list[Key]:
    """Return the classes of a zero-shot split: the first half in sorted order trains, the rest tests.

    Of an odd number of classes the middle one trains, because training needs other classes to compare with.

    >>> half([5, 3, 4, 3], "train"), half([5, 3, 4, 3], "test")
    ([3, 4], [5])
    """
    classes = sorted(set(keys))
    middle = (len(classes) + 1) // 2
    return classes[:middle] if split == "train" else classes[middle:]


def read_text(path: Path) -> str:
    r"""Read a text file as UTF-8, with or without the mark that spreadsheets put first.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.csv").write_bytes(b"\xef\xbb\xbfpath")
    ...     read_text(Path(folder, "a.csv"))
    'path'
    """
    data = read_bytes(path, LONGEST)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path} is not UTF-8 text (it is UTF-16); save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} is not UTF-8 text (line {line}: {error.reason}); save it as UTF-8") from None
    if (place := text.find("\0")) >= 0:
        line = text.count("\n", 0, place) + 1
        raise UserError(
            f"{path}, line {line}: there is a zero byte, which no text has: the file is damaged, or UTF-16; "
            "save it as UTF-8, or fetch it again"
        )
    return text


def read_bytes(path: Path, limit: int) -> bytes:
    r"""Read a file of at most `limit` bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.csv").write_bytes(b"path,label")
    ...     read_bytes(Path(folder, "a.csv"), 1000)
    b'path,label'
    """
    if not path.is_file():  # a pipe might never end
        raise UserError(f"{path} is not a file; give one")
    if (length := path.stat().st_size) > limit:
        raise UserError(f"{path} has {length:,} bytes; expected at most {limit:,}: is it the right file?")
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path} cannot be read ({reason}); make it readable, or give another") from None


def quoted(text: str) -> str:
    """Return a `text` in quotes, cut where it is too long for a message.

    >>> quoted("cat"), len(quoted("c" * 1_000_000))
    ("'cat'", 126)
    """
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}… ({len(text):,} characters)"


def _clipped(text: str) -> str:
    return text if len(text) <= 3 * _SHOWN else f"{text[: 3 * _SHOWN]}…"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def read_fields(path: Path, *columns: str, skip: int = 0) -> list[tuple[int, list[str]]]:
    r"""Read lines of fields separated by spaces, as (line number, fields); the last field may hold spaces.

    The first `skip` lines are left out.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "images.txt").write_text("1 a b.jpg\n")
    ...     read_fields(Path(folder, "images.txt"), "image_id", "path")
    [(1, ['1', 'a b.jpg'])]
    """
    rows = []
    for number, line in enumerate(read_text(path).split("\n")[skip:], start=skip + 1):
        fields = line.strip().split(maxsplit=len(columns) - 1)
        if fields and len(fields) != len(columns):
            raise UserError(f"{path}, line {number}: {quoted(line.strip())} is not '{' '.join(columns)}'")
        if fields:
            rows.append((number, fields))
    return rows


def read_table(path: Path, *columns: str, skip: int = 0) -> list[tuple[int, list[str]]]:
    r"""Read lines of fields below a header of exactly these columns.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "list.txt").write_text("image_id path\n1 a.jpg\n")
    ...     read_table(Path(folder, "list.txt"), "image_id", "path")
    [(2, ['1', 'a.jpg'])]
    """
    lines = read_fields(path, *columns, skip=skip)
    header = lines[0][1] if lines else []
    if header != list(columns):
        raise UserError(f"{path}: the header is {quoted(' '.join(header))}; expected {' '.join(columns)!r}")
    return lines[1:]


def integer(text: str, where: str) -> int:
    """Read a whole number such as an image's or a class's.

    >>> integer("x", "images.txt, line 3: image_id")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: images.txt, line 3: image_id is 'x'; expected a whole number
    """
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{where} is {quoted(text)}; expected a whole number") from None


def check_distinct(source: Path, paths: Iterable[str]) -> None:
    """Refuse a file that lists an image twice: it would be its own partner, or in two classes.

    >>> check_distinct(Path("images.txt"), ["a.jpg", "b.jpg", "a.jpg"])
    Traceback (most recent call last):
    ...
    robustmetric.UserError: images.txt lists images more than once: a.jpg; list each image once
    """
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        names = shorten([_clipped(path) for path in twice])
        raise UserError(f"{source} lists images more than once: {names}; list each image once")
