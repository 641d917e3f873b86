"""The paper's tables with our figures beside the published ones, and the data of its figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robustmetric.attacks import Column, Unit
from robustmetric.evaluation import COLUMNS
from robustmetric.experiments.findings import Finding
from robustmetric.experiments.outcome import Outcome
from robustmetric.experiments.paper import Experiment, Row
from robustmetric.experiments.published import published_hardness
from robustmetric.experiments.samplers import DRAWN as _DRAWN
from robustmetric.experiments.sets import CLASSES
from robustmetric.report.layout import FORMATS, Head, Kind, Line, Sheet, write
from robustmetric.report.summary import SCORES, Estimate, Reader, Summary, hardness_of, scores_of, summarise

__all__ = ["DRAWN", "FORMATS", "SAMPLERS", "Head", "Line", "Sheet", "points", "sheet", "title_of", "write"]

SAMPLERS = {"R": "Random", "M": "Semihard", "S": "Softhard", "D": "Distance", "H": "Hardest"}
"""What the paper calls its samplers."""
DRAWN = {name: SAMPLERS.get(name, "Softhard p≠a") for name in _DRAWN}
"""What Table 1 calls them, and S by its definition, where the positive is not the anchor."""
_MEASURED = ("R@1", "ERS")  # what pairs and figures show; tables of scores show their intervals
_STATISTICS = {
    "mean": ("E[H]", Unit("hardness", 50, 3)),
    "variance": ("Var[H]", Unit("hardness²", 50, 5)),
    "variance_within": ("Var[H] within batches", Unit("hardness²", 50, 5)),
}


@dataclass(frozen=True)
class _Block:
    """A row to be shown: its `keys`, what is known `about` it, what we found, and what was published."""

    keys: tuple[str, ...]
    about: Mapping[str, str | float | None]
    columns: Mapping[str, Column]
    ours: Summary
    seeds: Mapping[str, Summary]
    theirs: Mapping[str, float] | None = None
    fell: bool = False
    joined: bool = False

    @property
    def compared(self) -> dict[str, float]:
        """Our figures minus the published ones, where there are both."""
        known = self.theirs or {}
        return {n: e.value - known[n] for n, e in self.ours.estimates.items() if n in known}


def title_of(experiment: Experiment, told: str) -> str:
    """Return the title of an `experiment` with its scale, as `told`.

    >>> from robustmetric.experiments.paper import experiment
    >>> title_of(experiment("table7", ["digits"]), "2 epochs (of 8)")
    'Table 7 on digits: The parameter u of gradual adversary (2 epochs (of 8))'
    """
    return f"{experiment.heading} on {', '.join(experiment.data)}: {experiment.title} ({told})"


def sheet(experiment: Experiment, findings: Sequence[Finding], told: str) -> Sheet:
    """Return the table of an `experiment`: what was found for each row, beside what was published.

    `findings` are those of its rows; `told` is the scale that they were made at, part of the title. A figure
    becomes the table of its points.

    >>> from robustmetric.experiments.paper import experiment
    >>> rows = [Finding(row, (None,)) for row in experiment("figure1").rows]
    >>> print(sheet(experiment("figure1"), rows, "none").markdown()[:243])
    **Figure 1 on cub: Robustness, training cost and R@1 against ACT (none)**
    <BLANKLINE>
    | data | defense | η | cost η+1 |  | R@1 ↑ | ERS ↑ |
    |---|---|---|---|---|---:|---:|
    | cub | ACT[R] | 2 | 3 | ours | not run |  |
    |  |  |  |  | published | 46.5 | 5.8 |
    """
    title = title_of(experiment, told)
    about: dict[str, str | float | None] = {"experiment": experiment.name, "scale": told}
    keys: tuple[str, ...]
    if experiment.kind == "samplers":
        blocks = [block for finding in findings for block in _samplers(finding, about)]
        keys, heads = ("data", ""), tuple(Head(name) for name in DRAWN.values())
        lines = [line for block in blocks for line in _lines(block)]
    elif experiment.kind == "pairs":
        blocks = [_scores(finding, about, _MEASURED) for finding in findings]
        keys = ("data", "source")
        heads = tuple(Head(SCORES[n].heading, to) for to in SAMPLERS.values() for n in _MEASURED)
        lines = list(_matrix(blocks))
    else:
        curves = experiment.kind == "curves"
        names = _MEASURED if curves else tuple(SCORES)
        shown = [point for line in points(findings).values() for point in line] if curves else findings
        blocks = [_scores(finding, about, names, cost=curves) for finding in shown]
        keys = ("data", "defense", "η", *(["cost η+1"] if curves else []))
        heads = tuple(Head(SCORES[n].heading, "" if curves else _group(n), _rank(n)) for n in names)
        lines = [line for block in blocks for line in _lines(block, interval=_MEASURED)]
    return Sheet(
        title=title,
        keys=keys,
        heads=heads,
        lines=tuple(lines),
        notes=tuple(_notes(experiment, findings, blocks, lines)),
        figures=tuple(figure for block in blocks for figure in _figures(block)),
        together=len(_MEASURED) if experiment.kind == "pairs" else 1,
        grouped=experiment.kind == "pairs",
    )


def points(findings: Sequence[Finding]) -> dict[tuple[str, str], list[Finding]]:
    """Return the lines of a figure: by data set and defense the `findings`, each η once, from low to high.

    >>> from robustmetric.experiments.paper import experiment
    >>> found = points([Finding(row, (None,)) for row in experiment("figure1").rows])
    >>> [finding.row.steps for finding in found["cub", "HM[S,LGA]&ICS"]]
    [2, 4, 8, 16, 32]
    """
    lines: dict[tuple[str, str], dict[int, Finding]] = {}
    for finding in findings:
        row = finding.row
        lines.setdefault((row.data, row.defense), {}).setdefault(row.cost, finding)
    return {name: [found[cost] for cost in sorted(found)] for name, found in lines.items()}


def _scores(
    finding: Finding, about: Mapping[str, str | float | None], names: Sequence[str], *, cost: bool = False
) -> _Block:
    row, known = finding.row, finding.row.published
    eta = "-" if row.steps is None else str(row.steps)
    more: dict[str, str | float | None] = {"data": row.data, "defense": row.defense, "eta": row.steps}
    if (pair := _pair(row)) is not None:
        more |= {"source": pair[0], "destination": pair[1]}
    if cost:
        more["cost"] = row.cost
    return _Block(
        keys=(row.data, row.defense, eta, *([str(row.cost)] if cost else [])),
        about={**about, **more},
        columns={name: SCORES[name] for name in names},
        theirs=None if known is None else {n: v for n, v in known.scores.items() if n in names},
        fell=known is not None and known.collapsed,
        joined=known is not None and known.joined and not COLUMNS.keys().isdisjoint(names),
        **_summaries(finding, scores_of, names),
    )


def _samplers(finding: Finding, about: Mapping[str, str | float | None]) -> Iterator[_Block]:
    data = finding.row.data
    for number, (statistic, (name, unit)) in enumerate(_STATISTICS.items()):
        theirs = {s: both for (d, s), both in published_hardness().items() if d == data}
        known = {s: both[number] for s, both in theirs.items() if number < len(both)}
        yield _Block(
            keys=(data, name),
            about={**about, "data": data, "statistic": statistic},
            columns={name: Column(name, None, unit) for name in DRAWN},
            theirs=known or None,
            **_summaries(finding, hardness_of(statistic), tuple(DRAWN)),
        )


def _summaries(finding: Finding, read: Reader, names: Sequence[str]) -> dict[str, Any]:
    """Summarise all seeds of a row together, and each alone where there are several."""

    def those(outcome: Outcome) -> Mapping[str, Estimate]:
        return {name: estimate for name, estimate in read(outcome).items() if name in names}

    cells = zip(finding.row.tasks, finding.outcomes, strict=True)
    each = {f"seed {task.seed}": summarise([outcome], those) for task, outcome in cells}
    return {"ours": summarise(finding.outcomes, those), "seeds": each if len(each) > 1 else {}}


def _lines(block: _Block, interval: Sequence[str] = ()) -> Iterator[Line]:
    """Show a row: ours, then what was published and the difference if there is any."""
    columns, ours = block.columns, block.ours
    found = tuple(
        "-" if (e := ours.estimates.get(n)) is None else e.show(c, interval=n in interval)
        for n, c in columns.items()
    )
    yield Line("ours", ours.label, block.keys, _said(ours.word, len(columns)) if ours.word else found)
    if block.theirs is None:
        return
    known = tuple(column.show(block.theirs.get(name)) for name, column in columns.items())
    fell = block.fell and not block.theirs
    label = f"published{' †' * block.joined}"
    yield Line("published", label, block.keys, _said("collapse", len(columns)) if fell else known)
    if compared := block.compared:
        shown = tuple(_difference(column, compared.get(name)) for name, column in columns.items())
        yield Line("difference", "difference", block.keys, shown)


def _matrix(blocks: Sequence[_Block]) -> Iterator[Line]:
    """Show rows of source × destination as a matrix, a destination for every two columns."""
    by_source: dict[tuple[str, str], dict[str, _Block]] = {}
    for block in blocks:
        place = by_source.setdefault((block.keys[0], str(block.about["source"])), {})
        place[str(block.about["destination"])] = block
    for (data, source), found in by_source.items():
        cells: dict[Kind, list[str]] = {"ours": [], "published": [], "difference": []}
        for letter in SAMPLERS:
            lines = {line.kind: line.values for line in _lines(found[letter])} if letter in found else {}
            if letter in found and found[letter].ours.fallen and found[letter].ours.estimates:
                lines["ours"] = tuple(f"{value}*" for value in lines["ours"])
            for kind, row in cells.items():
                row += lines.get(kind, ("",) * len(_MEASURED))
        for kind, row in cells.items():
            if any(row):
                yield Line(kind, kind, (data, SAMPLERS[source]), tuple(row))


def _figures(block: _Block) -> Iterator[dict[str, str | float | None]]:
    """Return a row as numbers: ours, each of several seeds, what was published, the difference."""
    for kind, found in {"ours": block.ours, **block.seeds}.items():
        figures: dict[str, str | float | None] = {
            **block.about,
            "kind": kind,
            "seeds": found.seeds,
            "made": found.made,
            "collapsed": found.collapsed,
        }
        for name in block.columns:
            one = found.estimates.get(name)
            figures |= {
                name: None if one is None else one.value,
                f"{name} low": None if one is None else one.low,
                f"{name} high": None if one is None else one.high,
                f"{name} deviation": None if one is None else one.deviation,
            }
        yield figures
    if block.theirs is not None:
        joined = {"joined": 1} if block.joined else {}
        yield {**block.about, "kind": "published", "collapsed": int(block.fell), **joined, **block.theirs}
        if compared := block.compared:
            # What was published has few digits: more of the difference are rounding.
            yield {**block.about, "kind": "difference", **{n: round(v, 9) for n, v in compared.items()}}


def _notes(
    experiment: Experiment, findings: Sequence[Finding], blocks: Sequence[_Block], lines: Sequence[Line]
) -> Iterator[str]:
    """Say how the figures are to be read."""
    made = [outcome for finding in findings for outcome in finding.outcomes if outcome is not None]
    told = sorted({outcome.record.settings.protocol for outcome in made if outcome.record is not None})
    if told:
        yield f"Ours by the {' and '.join(told)} protocol."
    if experiment.kind == "samplers":
        yield (
            "Softhard: an anchor may be its own positive, as in the published training; Softhard p≠a: by its "
            "definition, never."
        )
        yield "Var[H]: variance of the batches' means, which the published one is."
    shown = [value for line in lines if line.kind == "ours" for value in line.values]
    if any("[" in value for value in shown):
        yield "Brackets: 95 % interval over the queries."
    if any("±" in value for value in shown):
        yield "±: standard deviation over seeds."
    if any(block.ours.collapsed and block.ours.collapsed < block.ours.seeds for block in blocks):
        yield "Seeds that collapsed are left out of mean and deviation."
    if any(value.endswith("*") for value in shown):
        yield "*: the network has collapsed, or nearly so."
    if any(row.published is not None and row.published.table == 0 for row in (f.row for f in findings)):
        yield "Published figures are of the reference's page, for the paper has none on these images."
    if any(block.joined for block in blocks):
        yield "†: the ten scores under attack are of another training than the other published scores."
    for data in experiment.data:
        own = [outcome for finding in findings if finding.row.data == data for outcome in finding.outcomes]
        about = [one.record.data for one in own if one is not None and one.record is not None]
        if len({images.sha256 for images in about}) > 1:
            yield f"Careful: the records on {data} are of different images, and cannot be compared."
        wanted = CLASSES.get(data, (0, 0))[1]
        if found := sorted({images.classes for images in about if wanted and images.classes != wanted}):
            yield (
                f"Careful: {data} has {' or '.join(map(str, found))} of {wanted:,} test classes here: "
                "figures cannot be compared with published ones."
            )
    if experiment.kind == "scores" and any(block.theirs and "mAP" in block.theirs for block in blocks):
        yield "The published mAP mixes two measures: see docs/limits.md before comparing it."
    fallen: dict[str, list[str]] = {}
    for block in blocks:
        if block.ours.collapsed:
            eta = f" η={block.about['eta']}" if block.about.get("eta") is not None else ""
            of = f" ({block.ours.collapsed} of {block.ours.seeds} seeds)" if block.ours.seeds > 1 else ""
            # One note for all, whatever the figure.
            why = re.sub(r", with a mean cosine of [\d.]+", "", "; ".join(block.ours.why).rstrip("."))
            fallen.setdefault(why, []).append(f"{block.keys[0]} {block.about['defense']}{eta}{of}")
    for why, which in fallen.items():
        yield f"Collapse of {', '.join(which)}: {why}."
    cells = {task: outcome for f in findings for task, outcome in zip(f.row.tasks, f.outcomes, strict=True)}
    if missing := sum(outcome is None for outcome in cells.values()):
        yield f"Not made yet: {missing} of {len(cells)} cells of {experiment.heading}."


def _pair(row: Row) -> tuple[str, str] | None:
    found = re.fullmatch(r"HM\[([RMSDH]),([RMSDH])\]", row.defense)
    return None if found is None else (found[1], found[2])


def _group(name: str) -> str:
    if name == "ERS":
        return ""
    return "White-box attacks" if name in COLUMNS else "Benign examples"


def _rank(name: str) -> int:
    return 0 if name in _MEASURED else 2 if name in COLUMNS else 1


def _said(word: str, count: int) -> tuple[str, ...]:
    return (word, *[""] * (count - 1))


def _difference(column: Column, value: float | None) -> str:
    if value is None:
        return ""
    text = f"{value:+.{column.unit.digits}f}"
    return text[1:] if not text.strip("+-0.") else text.replace("-", "−")
