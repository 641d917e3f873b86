"""The report: one page of HTML from records, with all that it shows inside it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from robustmetric import __version__
from robustmetric.errors import UserError
from robustmetric.evaluation import Record
from robustmetric.evaluation.ers import ERS_ATTACKS
from robustmetric.evaluation.record import FORMAT
from robustmetric.files import save
from robustmetric.locks import claimed
from robustmetric.report import plots
from robustmetric.report.cards import CARD_STYLE, Picture, Why, card, templates
from robustmetric.report.curves import Curves, load_curves
from robustmetric.report.pictures import Pictures, load_pictures
from robustmetric.report.records import alpha_of, data_of, differing, eps_of, named_records
from robustmetric.report.sheet import sheet_of_records
from robustmetric.report.summary import figures_of
from robustmetric.report.verdict import listed, verdict, with_interval
from robustmetric.report.words import (
    CHECK_MEANINGS,
    COLUMN_MEANINGS,
    TEMPLATES,
    command,
    goal_meaning,
)
from robustmetric.training.folder import RunFolder, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGAIN = "run the same evaluate command again, with --report FILE"
"""What to do where pictures are missing."""
MOST_BYTES = 10_000_000
"""What a page has at most: pictures beyond that are left out."""
_RECORDS = 2_000_000  # bytes of records in a page
_LONGEST = 90  # of a title with names in it
_WHY: tuple[Why, ...] = ("worst", "median", "random")


@dataclass(frozen=True)
class Entry:
    """A `record` with what stands beside it in its `folder`, and its `name` on the page.

    `missing` says what is left out of `pictures` and `curves`, and why. `run` is the folder of the run that
    it is of, `data` what that was trained on, and `rows` what it logged.
    """

    name: str
    record: Record
    pictures: Pictures | None = None
    curves: Curves = field(default_factory=list)
    missing: Sequence[str] = ()
    run: str | None = None
    data: str | None = None
    rows: Sequence[Mapping[str, str]] = ()


def write_report(paths: Sequence[Path | str], out: Path | str, *, force: bool = False) -> Path:
    """Write the report of the records at `paths` as one page of HTML to `out`, and return that.

    A path is a record file, or a folder that holds one. A file that exists is not overwritten unless `force`.

    >>> write_report([], "report.html")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: there is nothing to report: give at least one record
    """
    out = Path(out)
    with claimed(out, "a report", force=force):
        save(out, make_page([Path(path) for path in paths], out=out))
    return out


def make_page(
    paths: Sequence[Path], report: Callable[[str], object] = lambda _: None, *, out: Path | None = None
) -> str:
    """Return the report of the records at `paths` as one page of HTML, which is to be written to `out`.

    `report` is called with a line about each thing that the page has to do without.
    """
    if not paths:
        raise UserError("there is nothing to report: give at least one record")
    if out is not None and out.resolve() in [FORMAT.find(path).resolve() for path in paths]:
        raise UserError(f"{out} is a record itself: give another file", parameter="out")
    named = named_records(paths)
    entries = [_entry(name, record, path) for (name, record), path in zip(named.items(), paths, strict=True)]
    names = listed([*named])
    fits = len(entries) == 1 or len(names) <= _LONGEST
    attacks = list(dict.fromkeys(a for e in entries if e.pictures for a in e.pictures.map.moves))
    about = {
        "title": f"Robustness of {names if fits else f'{len(entries)} networks'}",
        "entries": entries,
        "figures": [figures_of(record) for record in named.values()],
        "verdict": verdict(named),
        "differing": differing(named),
        "plots": _plots(entries, attacks),
        "moved": attacks,
        "meanings": COLUMN_MEANINGS,
        "checks": CHECK_MEANINGS,
        "goal_meaning": goal_meaning,
        "eps_of": eps_of,
        "alpha_of": alpha_of,
        "data_of": data_of,
        "with_interval": with_interval,
        "usual": ERS_ATTACKS,
        "queries": max((r.queries.count for e in entries for _, r in e.curves), default=0),
        "commands": [command(e.record, e.run, e.data) for e in entries],
        "csv": _link("text/csv", sheet_of_records(named).csv()),
        "json": _records(named.values()),
    }
    text, left_out = make_html("page.html", about, _cards(entries))
    for entry in entries:
        for line in entry.missing:
            report(f"{entry.name}: {line}")
    if left_out:
        report(f"{left_out} cards are left out, to keep the page small")
    return text


def _entry(name: str, record: Record, path: Path) -> Entry:
    """Read what stands beside a record: pictures, curves, and the run that its folder is in."""
    folder = FORMAT.find(path).parent
    pictures, missing = None, []
    try:
        pictures = load_pictures(folder, record)
    except FileNotFoundError:
        missing.append(f"no pictures were made: {AGAIN}")
    except (OSError, UserError) as error:
        missing.append(f"no pictures are shown, for {error}: {AGAIN}")
    curves, left_out = load_curves(folder, record)
    about: dict[str, Any] = {}
    run = RunFolder(folder.parent if folder.name not in ("", "..") else folder / "..")
    if run.exists:
        try:
            data = run.recipe().data
            about = {"run": str(run.path), "data": data} if run.name == record.network.name else {}
        except (OSError, UserError):  # a recipe with code that is not trusted, which is not needed here
            about = {"run": str(run.path)}
    if about:
        with suppress(OSError, UserError):
            about["rows"] = read_rows(run.metrics)
    return Entry(name, record, pictures, curves, [*missing, *left_out], **about)


def make_html(template: str, about: Mapping[str, Any], cards: Iterable[Markup]) -> tuple[str, int]:
    """Return the page of a `template` with as many of the `cards` as fit, and how many are left out.

    The page loads nothing, and runs no script but its own.
    """
    style = CARD_STYLE + (TEMPLATES / "page.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    page = templates().get_template(template)

    def whole(shown: Sequence[Markup], left_out: int) -> str:
        return page.render(
            **about,
            cards=shown,
            left_out=left_out,
            style=Markup(style),  # noqa: S704
            script=Markup(script),  # noqa: S704
            digests={"style": _digest(style), "script": _digest(script)},
            version=__version__,
        )

    shown: list[Markup] = []
    left_out = 0
    room = MOST_BYTES - len(whole([Markup()], 9999).encode())
    if room < 0:
        raise UserError(
            f"a page of these records would have {(MOST_BYTES - room) / 1e6:.1f} MB without a picture, and "
            f"{MOST_BYTES / 1e6:g} are the most: give fewer records"
        )
    for one in cards:
        room -= len(one.encode())
        if room < 0:
            left_out += 1
        else:
            shown.append(one)
    return whole(shown, left_out), left_out


def _digest(text: str) -> str:
    """Return the digest of an element's text as a Content-Security-Policy has it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _cards(entries: Sequence[Entry]) -> Iterable[Markup]:
    """Yield the cards of all pictures: the worst first, those of an attack side by side."""
    attacks: dict[str, int] = {}
    every: list[tuple[tuple[int, bool, int, int, int], int, Picture]] = []
    for place, entry in enumerate(entries):
        counts: dict[tuple[str, str], int] = {}
        for one in entry.pictures.pictures if entry.pictures is not None else ():
            column, why = attacks.setdefault(one.attack, len(attacks)), one.why or "random"
            row = counts[why, one.attack] = counts.get((why, one.attack), -1) + 1
            # A query says more at a glance than an image that is ranked for others.
            every.append(((_WHY.index(why), one.asker is not None, column, row, place), place, one))
    for order, (_, place, one) in enumerate(sorted(every, key=lambda each: each[0])):
        network = entries[place].name if len(entries) > 1 else ""
        yield card(one, network=network, series=place, order=order)


def _plots(entries: Sequence[Entry], attacks: Sequence[str]) -> dict[str, list[Markup]]:
    """Draw the plots of each section; one in which there is nothing to show has none."""
    named = {entry.name: entry for entry in entries}
    found: dict[str, list[Markup]] = {"scores": [], "curves": [], "map": [], "training": []}

    def add(section: str, figure: Figure, about: str) -> None:
        found[section].append(plots.inline(figure, about, f"{section}-{len(found[section])}"))

    with suppress(UserError):  # there is nothing to plot
        records = {name: entry.record for name, entry in named.items()}
        add("scores", plots.records(records), "ERS against R@1, and the terms of the ERS")
    for against, figure in plots.budgets({name: entry.curves for name, entry in named.items()}).items():
        add("curves", figure, f"Scores against {against}")
    for name, entry in named.items():
        if entry.pictures is not None and entry.pictures.map.points:
            about = f"Embeddings of {name} in the plane of their two principal components"
            add("map", plots.embedding_map(entry.pictures.map, attacks), about)
    with suppress(UserError):
        logged = {name: entry.rows for name, entry in named.items()}
        add("training", plots.training(logged), "The course of training")
    return found


def _records(records: Iterable[Record]) -> str | None:
    """Return records as the address of a link; None where they are too large for a page."""
    text = json.dumps([record.model_dump(mode="json", by_alias=True) for record in records], indent=1)
    return _link("application/json", text) if len(text) <= _RECORDS else None


def _link(kind: str, text: str) -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"
