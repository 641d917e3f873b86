"""The report: one page of HTML from records, with all that it shows inside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from robustmetric import __version__
from robustmetric.errors import UserError
from robustmetric.evaluation.record import FORMAT
from robustmetric.files import check_writable, write_atomically, writing
from robustmetric.report.content import Page
from robustmetric.report.entries import AGAIN, Entry, gather
from robustmetric.report.gallery import Gallery, Shown, fill
from robustmetric.text import printable

MOST_BYTES = 10_000_000
"""What a page has at most: pictures beyond that are left out."""

_TEMPLATES = Path(__file__).parent / "templates"
_FRAME = 20_000  # bytes of what stands around the pictures, if there are any: the choice of them


def write_report(
    paths: Sequence[Path | str],
    out: Path | str,
    *,
    force: bool = False,
    report: Callable[[str], object] = lambda _: None,
) -> Path:
    """Write the report of the records at `paths` as one page of HTML to `out`, and return that.

    A path is a record file, or a folder that holds one. A file that is there is not overwritten, unless by
    `force`. `report` is told in a line of each thing that the page has to do without.

    >>> write_report([], "report.html")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: there is nothing to report: give at least one record
    """
    if not paths:
        raise UserError("there is nothing to report: give at least one record")
    out = Path(out)
    check_page(out, force=force)
    if out.resolve() in [FORMAT.find(path).resolve() for path in paths]:
        raise UserError(f"{out} is a record itself: give another file", parameter="out")
    text = render(gather([Path(path) for path in paths]), report)
    with writing(out, "then run the same command again"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, lambda file: file.write(text.encode()))
    return out


def check_page(out: Path, *, force: bool, parameter: str = "out") -> None:
    """Refuse a file `out` where no page can be, or where there is one, unless by `force`.

    `parameter` is the name of the argument that it was given by.
    """
    if out.is_dir():
        raise UserError(f"{out} is a folder: give a file, such as {out / 'report.html'}", parameter=parameter)
    if out.exists() and not force:
        raise UserError(f"{out} is there already: give another file, or --force", parameter=parameter)
    try:
        check_writable(out.parent)
    except UserError as error:
        raise UserError(str(error), parameter=parameter) from None


def render(entries: Sequence[Entry], report: Callable[[str], object] = lambda _: None) -> str:
    """Return the page of `entries` as text; `report` is told of what is missing."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    style, script = ((_TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    page = Page(tuple(entries))
    template, card = environment.get_template("page.html"), environment.get_template("card.html")

    def whole(gallery: Gallery) -> str:
        return template.render(
            page=page,
            gallery=gallery,
            style=Markup(style),  # noqa: S704
            script=Markup(script),  # noqa: S704
            digests={"style": _digest(style), "script": _digest(script)},
            version=__version__,
            again=AGAIN,
        )

    def draw(shown: Shown) -> Markup:
        return Markup(card.render(page=page, shown=shown))  # noqa: S704

    room = MOST_BYTES - _FRAME - len(whole(Gallery()).encode())
    if room < 0:
        raise UserError(
            f"a page of these {len(entries)} records would have {(MOST_BYTES - room) / 1e6:.1f} MB without a "
            f"picture, and {MOST_BYTES / 1e6:g} are the most: give fewer records"
        )
    gallery = fill(entries, room, draw)
    for entry in entries:
        for line in filter(None, (entry.no_pictures, *entry.no_curves)):
            report(f"{entry.name}: {line}")
    if gallery.unreadable:
        report(
            f"{len(gallery.unreadable)} pictures are left out, the first: {gallery.unreadable[0]}; {AGAIN}"
        )
    if gallery.left_out:
        report(f"{gallery.left_out} pictures are left out, to keep the page small")
    return whole(gallery)


def _digest(text: str) -> str:
    """Return the digest of an element's text as a Content-Security-Policy has it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _visible(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
