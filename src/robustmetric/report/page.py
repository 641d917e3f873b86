"""The report: one page of HTML from records, with all that it shows inside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from robustmetric import __version__
from robustmetric.files import write_atomically, writing
from robustmetric.report.content import Page
from robustmetric.report.entries import Entry, gather
from robustmetric.validate import UserError, printable

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(
    paths: Sequence[Path | str], out: Path | str, *, names: Sequence[str] | None = None, force: bool = False
) -> Path:
    """Write the report of the records at `paths` as one page of HTML to `out`, and return that.

    A path is a record file, or a folder that holds one; `names` are what the page calls the networks. A file
    that is there is not overwritten, unless by `force`.

    >>> write_report([], "report.html")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: there is nothing to report: give at least one record
    """
    if not paths:
        raise UserError("there is nothing to report: give at least one record")
    out = Path(out)
    check_page(out, force=force)
    text = render(gather([Path(path) for path in paths], names))
    with writing(out, "then run the same command again"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, lambda file: file.write(text.encode()))
    return out


def check_page(out: Path, *, force: bool) -> None:
    """Refuse a place `out` where no page can be, or where one is, unless by `force`."""
    if out.is_dir():
        raise UserError(f"{out} is a folder: give a file, such as {out / 'report.html'}", parameter="out")
    if out.exists() and not force:
        raise UserError(f"{out} is there already: give another file, or --force", parameter="out")


def render(entries: Sequence[Entry]) -> str:
    """Return the page of `entries` as text."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    style, script = ((_TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        page=Page(tuple(entries)),
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        script_digest=digest,
        version=__version__,
    )


def _visible(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
