"""A table of results as Markdown, LaTeX or CSV, and the table of records."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from robustmetric.attacks import Column, Unit
from robustmetric.evaluation import Record
from robustmetric.report.records import data_of, differing
from robustmetric.report.summary import Estimate, figures_of
from robustmetric.text import printable, spreadsheet_text

SUFFIXES = {"md": ".md", "latex": ".tex", "csv": ".csv"}
"""The formats of tables, and the suffixes of their files."""


@dataclass(frozen=True)
class Row:
    """A row of a table: `about` says by name what it is of, and `estimates` are its figures by column.

    `kind` is ours, published, difference, or a seed, which only CSV shows; rows of one group follow each
    other. `label` is what a table calls the kind, `words` by column what it shows in place of figures, `unit`
    that of all figures if it is not the columns', and `counts` are more numbers for CSV.
    """

    about: Mapping[str, str | float | None]
    estimates: Mapping[str, Estimate]
    kind: str = "ours"
    label: str = "ours"
    words: Mapping[str, str] = field(default_factory=dict)
    unit: Unit | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    def cell(self, name: str, column: Column, *, interval: bool = False) -> str:
        """Return the figure of a `column` as text."""
        found = self.estimates.get(name)
        if name in self.words:
            return self.words[name]
        if self.unit is not None:
            column = replace(column, unit=self.unit)
        if self.kind != "difference":
            return "-" if found is None else found.show(column, interval=interval)
        text = "" if found is None else f"{found.value:+.{column.unit.digits}f}"
        return text[1:] if not text.strip("+-0.") else text.replace("-", "−")

    def figures(self) -> dict[str, str | float | None]:
        """Return the row as numbers by name, with all that is known of how far they may be off."""
        found: dict[str, str | float | None] = {**self.about, "kind": self.kind, **self.counts}
        for name, one in self.estimates.items():
            found[name] = one.value
            ends = {"low": one.low, "high": one.high, "deviation": one.deviation}
            found |= {f"{name} {end}": value for end, value in ends.items() if value is not None}
        return found


@dataclass(frozen=True)
class Sheet:
    """A table: its `title`, the headings of its `keys`, its `columns`, its `rows`, and `notes`.

    `brackets` names the columns that show intervals. CSV has `every` row as numbers, by default the `rows`.

    >>> row = Row({"defense": "HM[S,LGA]"}, {"R@1": Estimate(53.9)})
    >>> print(Sheet("Table 4", {"defense": "defense"}, {"R@1": Column("R@1", "higher")}, (row,)).markdown())
    **Table 4**
    <BLANKLINE>
    | defense | R@1 ↑ |
    |---|---:|
    | HM[S,LGA] | 53.9 |
    <BLANKLINE>
    """

    title: str
    keys: Mapping[str, str]
    columns: Mapping[str, Column]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    brackets: Sequence[str] = ()
    every: Sequence[Row] | None = None

    @property
    def headers(self) -> list[str]:
        """The headings of all columns: keys, what a row is unless all are simply ours, figures."""
        label = [""] if any(row.label != "ours" for row in self.rows) else []
        return [*self.keys.values(), *label, *(column.heading for column in self.columns.values())]

    @property
    def texts(self) -> list[list[str]]:
        """All rows as text under the headers; keys stand in the first row of their group alone."""
        found = []
        for row in self.rows:
            keys = ["-" if row.about[key] is None else str(row.about[key]) for key in self.keys]
            label = [row.label] if len(self.headers) > len(self.keys) + len(self.columns) else []
            cells = [row.cell(n, c, interval=n in self.brackets) for n, c in self.columns.items()]
            found.append([*(keys if row.kind == "ours" else [""] * len(keys)), *label, *cells])
        return found

    def markdown(self) -> str:
        """Return the table as Markdown."""
        figures = len(self.columns)
        lines = [
            f"**{marked_down(self.title)}**\n",
            markdown_row(self.headers),
            f"|{'---|' * (len(self.headers) - figures)}{'---:|' * figures}",
            *map(markdown_row, self.texts),
            *(f"\n{marked_down(note)}" for note in self.notes),
        ]
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """Return the table as LaTeX with booktabs."""
        figures = len(self.columns)
        head, *body = (
            " & ".join(map(spelled, row)) + r" \tabularnewline" for row in (self.headers, *self.texts)
        )
        lines = [
            r"% \usepackage{booktabs,graphicx}",
            r"\begin{table*}",
            r"\centering",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{'l' * (len(self.headers) - figures)}{'r' * figures}}}",
            *(r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
            r"\end{tabular}}",
            *(rf"\par{{\footnotesize {escaped(note)}\par}}" for note in self.notes),
            rf"\caption{{{escaped(self.title)}}}",
            r"\end{table*}",
        ]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Return all figures as CSV."""
        rows = [row.figures() for row in (self.rows if self.every is None else self.every)]
        names = dict.fromkeys(name for row in rows for name in row)
        file = io.StringIO(newline="")
        writer = csv.writer(file, lineterminator="\n")
        for cells in (names, *([row.get(name) for name in names] for row in rows)):
            writer.writerow(spreadsheet_text(printable(c)) if isinstance(c, str) else c for c in cells)
        return file.getvalue()

    def text(self, kind: str) -> str:
        """Return the table in the format of a `kind`: md, latex or csv."""
        return {"md": self.markdown, "latex": self.latex, "csv": self.csv}[kind]()


def sheet_of_records(named: Mapping[str, Record]) -> Sheet:
    """Return the table of `named` records: all their scores, what they differ in, and checks that warn."""
    notes = [f"Careful: they differ in {what}: {told}." for what, told in differing(named).items()]
    rows: list[Row] = []
    columns: dict[str, Column] = {}
    for name, record in named.items():
        figures = figures_of(record)
        columns |= {score: column for score, (column, _) in figures.items()}
        estimates = {
            score: Estimate(one.value, one.low, one.high)
            for score, (_, one) in figures.items()
            if one.value is not None
        }
        rows.append(Row({"network": name, "data": data_of(record)}, estimates))
        if record.ers is not None and not record.ers.valid:
            notes.append(f"{name}: the ERS is not valid: {record.ers.why}")
        warned = [check for check in record.checks if check.status in ("warn", "fail")]
        notes += [f"{name}: {check.name}: {check.status}: {check.says}" for check in warned]
        if record.unchecked:
            notes.append(f"{name}: only collapse was checked")
    keys = {"network": "network", "data": "data"}
    return Sheet("Records", keys, columns, rows, notes, brackets=("R@1", "ERS"))


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


_TEX = str.maketrans(
    {
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
        **{letter: f"{{{letter}}}" for letter in "[]*"},  # after the end of a line they would be its options
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "`": r"\textasciigrave{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
        '"': r"\textquotedbl{}", "…": r"\ldots{}",
        "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "≠": r"$\neq$", "↑": r"$\uparrow$",
        "↓": r"$\downarrow$", "→": r"$\to$", "†": r"$\dagger$", "α": r"$\alpha$", "γ": r"$\gamma$",
        "ε": r"$\varepsilon$", "η": r"$\eta$", "λ": r"$\lambda$", "ξ": r"$\xi$",
    }
)  # fmt: skip
_NAMES = {
    "LGA": r"$g_\mathsf{LGA}$", "gB": r"$g_\mathsf{B}$", "g2": r"$g_\mathsf{2}$", "g1/2": r"$g_\mathsf{1/2}$",
    **{letter: rf"$\mathcal{{{letter}}}$" for letter in "RMSDH"},
}  # fmt: skip
"""The paper's names of samplers and destinations, in the brackets of a defense."""


def escaped(text: str) -> str:
    r"""Return `text` so that LaTeX shows it as it is.

    >>> print(escaped("50 % of R&D_1, η = 8"))
    50 \% of R\&D\_1, $\eta$ = 8
    """
    return re.sub(r"\s+", " ", printable(text)).translate(_TEX)


def spelled(name: str) -> str:
    r"""Return `escaped` text, in which the parts of a defense are spelled as in the paper.

    >>> print(spelled("HM[S,LGA]&ICS(λ=0.05)"))
    HM{[}$\mathcal{S}$,$g_\mathsf{LGA}${]}\&ICS($\lambda$=0.05)
    """
    parts = re.split(r"(?<=[\[,(])(LGA|gB|g2|g1/2|[RMSDH])(?=[\],()])", name)
    return "".join(_NAMES[part] if number % 2 else escaped(part) for number, part in enumerate(parts))
