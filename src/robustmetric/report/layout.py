"""A table of results: lines of text under headings, as Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from robustmetric.files import check_writable, write_atomically, writing
from robustmetric.report.latex import escaped, spelled
from robustmetric.text import printable, spreadsheet_text

Kind = Literal["ours", "published", "difference"]
WORDS = ("collapse", "not run")
"""What a line says in the place of figures."""
FORMATS = ("md", "tex", "csv")
"""The files that `write` makes."""
_PAPERS = {"cub": "CUB", "cars": "CARS", "sop": "SOP"}


@dataclass(frozen=True)
class Head:
    """A column of figures: its `name` and `group`, and its `rank`: where not all fit, 0 comes before 1 and 2.

    >>> Head("R@1 ↑", "Random").whole
    'Random R@1 ↑'
    """

    name: str
    group: str = ""
    rank: int = 0

    @property
    def whole(self) -> str:
        """The name with that of its group."""
        return f"{self.group} {self.name}".strip()


@dataclass(frozen=True)
class Line:
    """A line of a `kind`, with its `label`: the `keys` that say what it is of, and the `values` as text.

    The lines of one row, ours, published and the difference, follow each other and have the same keys.
    """

    kind: Kind
    label: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Sheet:
    """A table: its `title`, the names of the `keys`, the `heads` of the figures, the `lines`, and `notes`.

    `figures` are the same as numbers, with all intervals, a line each for CSV. Where a table is too wide,
    `together` columns are not parted. The names of the groups are shown if they are `grouped`.

    >>> line = Line("ours", "ours", ("cub", "N/A[R]"), ("53.9",))
    >>> print(Sheet("Table 3", ("data", "defense"), (Head("R@1 ↑"),), (line,)).markdown())
    **Table 3**
    <BLANKLINE>
    | data | defense | R@1 ↑ |
    |---|---|---:|
    | cub | N/A[R] | 53.9 |
    <BLANKLINE>
    """

    title: str
    keys: tuple[str, ...]
    heads: tuple[Head, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    figures: tuple[Mapping[str, str | float | None], ...] = ()
    together: int = 1
    grouped: bool = False

    @property
    def labelled(self) -> bool:
        """Whether lines have to say what they are: some are not simply ours."""
        return any(line.label != "ours" for line in self.lines)

    @property
    def headers(self) -> tuple[str, ...]:
        """The names of all columns: keys, what a line is, figures."""
        named = (head.whole if self.grouped else head.name for head in self.heads)
        return (*self.keys, *([""] if self.labelled else []), *named)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """All lines as text under the headers; keys stand in the first line of their row alone."""
        found: list[tuple[str, ...]] = []
        for keys, lines in groupby(self.lines, key=lambda line: line.keys):
            for number, line in enumerate(lines):
                shown = keys if number == 0 or line.kind == "ours" else ("",) * len(keys)
                found.append((*shown, *([line.label] if self.labelled else []), *line.values))
        return found

    def markdown(self) -> str:
        """Return the table as Markdown."""
        text = len(self.keys) + self.labelled
        lines = [
            f"**{marked_down(self.title)}**",
            "",
            markdown_row(self.headers),
            f"|{'---|' * text}{'---:|' * len(self.heads)}",
            *map(markdown_row, self.rows),
            *(f"\n{marked_down(note)}" for note in self.notes),
        ]
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        r"""Return the table as LaTeX with booktabs, as the paper's.

        >>> line = Line("ours", "ours", ("cub", "HM[S,LGA]"), ("38.0",))
        >>> print(Sheet("Table 4", ("data", "defense"), (Head("R@1 ↑"),), (line,)).latex())
        % \usepackage{booktabs,graphicx,multirow}
        \begin{table*}
        \centering
        \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%
        \begin{tabular}{llr}
        \toprule
        data & defense & R@1 $\uparrow$ \tabularnewline
        \midrule
        \multirow{1}{*}{CUB} & HM{[}$\mathcal{S},g_\mathsf{LGA}${]} & 38.0 \tabularnewline
        \bottomrule
        \end{tabular}}
        \caption{Table 4}
        \end{table*}
        <BLANKLINE>
        """
        text = len(self.keys) + self.labelled
        lines = [
            r"% \usepackage{booktabs,graphicx,multirow}",
            r"\begin{table*}",
            r"\centering",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{'l' * text}{'r' * len(self.heads)}}}",
            r"\toprule",
            *self._latex_head(text),
            r"\midrule",
            *self._latex_body(),
            r"\bottomrule",
            r"\end{tabular}}",
            *(rf"\par{{\footnotesize {escaped(note)}\par}}" for note in self.notes),
            rf"\caption{{{escaped(self.title)}}}",
            r"\end{table*}",
        ]
        return "\n".join(lines) + "\n"

    def _latex_head(self, text: int) -> Iterator[str]:
        if any(head.group for head in self.heads):
            cells, rules, place = [""] * text, [], text + 1
            for group, heads in groupby(self.heads, key=lambda head: head.group):
                count = len(list(heads))
                cells.append(rf"\multicolumn{{{count}}}{{c}}{{{escaped(group)}}}" if group else "")
                if group:
                    rules.append(rf"\cmidrule(lr){{{place}-{place + count - 1}}}")
                place += count
            yield _latex_row(cells)
            yield " ".join(rules)
        labels = [""] if self.labelled else []
        yield _latex_row([escaped(name) for name in (*self.keys, *labels, *(h.name for h in self.heads))])

    def _latex_body(self) -> Iterator[str]:
        """Lay out the lines; the first key, the data set, stands once for all its rows, which a rule ends."""
        place = 0
        rows = self.rows
        for data, lines in groupby(self.lines, key=lambda line: line.keys[0]):
            if place:
                yield r"\midrule"
            count = len(list(lines))
            for number, row in enumerate(rows[place : place + count]):
                once = rf"\multirow{{{count}}}{{*}}{{{_PAPERS.get(data) or escaped(data)}}}"
                text = len(row) - len(self.heads)
                yield _latex_row(
                    [
                        "" if number else once,
                        *(spelled(cell) for cell in row[1:text]),
                        *_merged(row[text:]),
                    ]
                )
            place += count

    def csv(self) -> str:
        """Return the figures as CSV: a line for each row and kind, with every interval."""
        names = list(dict.fromkeys(name for figure in self.figures for name in figure))
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        for figure in self.figures:
            writer.writerow({n: spreadsheet_text(v) if isinstance(v, str) else v for n, v in figure.items()})
        return file.getvalue()


def write(sheet: Sheet, stem: Path) -> list[Path]:
    """Write a `sheet` as Markdown, LaTeX and CSV; return the files, `stem` with .md, .tex and .csv behind it.

    >>> write(Sheet("Table 3", (), (), ()), Path("/dev/null/table3"))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the folder /dev/null cannot be written to (Not a directory): give another folder
    """
    check_writable(stem.parent)
    made = []
    for ending, text in zip(FORMATS, (sheet.markdown(), sheet.latex(), sheet.csv()), strict=True):
        file = stem.with_name(f"{stem.name}.{ending}")
        with writing(file, "then run the same command again: what is finished is kept"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, lambda draft: draft.write(text.encode()))  # noqa: B023
        made.append(file)
    return made


def markdown_row(cells: Sequence[str]) -> str:
    r"""Return the `cells` of a row of a table in Markdown.

    >>> markdown_row(["a|b", "1.0"])
    '| a\\|b | 1.0 |'
    """
    return f"| {' | '.join(map(marked_down, cells))} |"


def marked_down(text: str) -> str:
    r"""Return a `text` as Markdown that shows it as it is, on one line.

    >>> print(marked_down("*a*  <b>"))
    \*a\* \<b\>
    """
    text = re.sub(r"\s+", " ", printable(text))
    text = re.sub(r"([\\`*_<>|~$])", r"\\\1", text)
    return re.sub(r"&(?=#?\w+;)", "&amp;", text).replace("](", "]\\(")


def _merged(values: Sequence[str]) -> Iterator[str]:
    """Let a word that stands for figures reach over the empty columns behind it."""
    place = 0
    while place < len(values):
        end = place + 1
        if values[place] in WORDS:
            while end < len(values) and values[end] == "":
                end += 1
            yield rf"\multicolumn{{{end - place}}}{{c}}{{{escaped(values[place])}}}"
        else:
            yield escaped(values[place])
        place = end


def _latex_row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\tabularnewline"
