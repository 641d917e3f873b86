"""How plots look, the same everywhere, and how they are written: the same bytes for the same content."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from robustmetric.errors import UserError
from robustmetric.files import check_writable, write_atomically, writing
from robustmetric.registry import unknown
from robustmetric.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "pdf", "png")
"""The formats that plots are written in."""
WIDTH = 3.3
"""Inches: a column of a paper."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which people of all kinds of colour vision tell apart, without the yellow."""
MARKERS = "os^Dv<>PX"
GREY = "#595959"

_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.3,
    "lines.markeredgewidth": 0.8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.borderaxespad": 0,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "robustmetric",  # else ids are drawn at random
    "pdf.fonttype": 42,
}
_UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
_LETTERS = 60  # of a line across the column


class Look(NamedTuple):
    """How a series is drawn: its `colour` and `marker`."""

    colour: str
    marker: str


def look(number: int) -> Look:
    """Return how the series of a `number` is drawn; 63 of them look different.

    >>> look(0), len({look(number) for number in range(63)})
    (Look(colour='#0072B2', marker='o'), 63)
    """
    return Look(COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)])


@contextmanager
def styled() -> Iterator[None]:
    """Make and write plots in one style, whatever the user's own settings are; those come back afterwards."""
    import matplotlib.style

    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        # A name may have letters that the font lacks: they are shown as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def new_figure(height: float) -> Figure:
    """Return an empty figure of a column's width and a `height` in inches; make it within `styled`.

    >>> with styled():
    ...     figure = new_figure(2.0)
    >>> figure.get_size_inches().tolist()
    [3.3, 2.0]
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def plain(text: str) -> str:
    r"""Return `text` so that a plot shows it as it is: neither dollars nor a first underscore mean anything.

    >>> print(plain("_cost$"))
     _cost\$
    """
    text = printable(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def wrapped(text: str, letters: int = _LETTERS) -> str:
    """Return `text` in lines of at most so many `letters`, by default as fit across a column.

    >>> wrapped("Figure 1 on cub", 8).splitlines()
    ['Figure 1', 'on cub']
    """
    return plain("\n".join(textwrap.wrap(printable(text), letters, break_on_hyphens=False)))


def check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Return the `formats` that are asked for, each once; refuse one that is not known.

    >>> check_formats(["svg", "gif"])
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown format 'gif'; known: pdf, png, svg
    """
    if not formats:
        raise UserError(f"no format is given; known: {', '.join(FORMATS)}", parameter="formats")
    for name in formats:
        if name not in FORMATS:
            raise UserError(unknown("format", name, dict.fromkeys(FORMATS)), parameter="formats")
    return tuple(dict.fromkeys(formats))


def save(figure: Figure, stem: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a `figure`, with the format's ending behind `stem`, in all `formats`; return the files.

    The same figure gives the same bytes. A PNG has 300 dots an inch.

    >>> with styled():
    ...     save(new_figure(1.0), Path("/dev/null/plot"))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the folder /dev/null cannot be written to (Not a directory): give another folder
    """
    check_writable(stem.parent)
    made = []
    for name in check_formats(formats):
        file = stem.with_name(f"{stem.name}.{name}")
        with styled(), writing(file, "then run the same command again"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(
                file,
                lambda draft: figure.savefig(draft, format=name, dpi=300, metadata=_UNDATED[name]),  # noqa: B023
            )
        made.append(file)
    return made
