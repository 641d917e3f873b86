"""The paper's tables with our figures beside the published ones, and the data of its figures."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from robustmetric.attacks import Column, Unit
from robustmetric.evaluation import COLUMNS
from robustmetric.experiments.findings import Finding
from robustmetric.experiments.paper import Experiment
from robustmetric.experiments.published import published_hardness
from robustmetric.experiments.samplers import DRAWN as _DRAWN
from robustmetric.experiments.sets import CLASSES
from robustmetric.report.sheet import Row, Sheet
from robustmetric.report.summary import SCORES, Estimate, Reader, Summary, hardness_of, scores_of, summarise

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
About = Mapping[str, str | float | None]


class _Group(NamedTuple):
    """What a training came to, `ours`, and its `rows`: ours, each seed, the published, the difference."""

    ours: Summary
    rows: list[Row]


def title_of(experiment: Experiment, told: str) -> str:
    """Return the title of an `experiment` with its scale, as `told`."""
    return f"{experiment.heading} on {', '.join(experiment.data)}: {experiment.title} ({told})"


def sheet(experiment: Experiment, findings: Sequence[Finding], told: str) -> Sheet:
    """Return the table of an `experiment`: what was found for each row, beside what was published.

    `findings` are those of its rows; `told` is the scale that they were made at, part of the title. A figure
    becomes the table of its points.
    """
    brackets: Sequence[str] = ()
    about: About = {"experiment": experiment.name, "scale": told}
    if experiment.kind == "samplers":
        groups = [group for finding in findings for group in _samplers(finding, about)]
        keys = {"data": "data", "statistic": ""}
        columns = {name: Column(drawn, None) for name, drawn in DRAWN.items()}
    elif experiment.kind == "pairs":
        groups = [_scores(finding, about, _MEASURED) for finding in findings]
        keys = {"data": "data", "source": "source"}
        columns = {
            f"{to} {name}": replace(SCORES[name], name=f"{to} {name}")
            for to in SAMPLERS.values()
            for name in _MEASURED
        }
    else:
        curves = experiment.kind == "curves"
        columns = {name: SCORES[name] for name in (_MEASURED if curves else SCORES)}
        shown = [point for line in points(findings).values() for point in line] if curves else findings
        groups = [_scores(finding, about, columns) for finding in shown]
        keys = {"data": "data", "defense": "defense", "eta": "η", **({"cost": "cost η+1"} if curves else {})}
        brackets = _MEASURED
    every = [row for group in groups for row in group.rows]
    rows = [row for row in every if not row.kind.startswith("seed")]
    rows = _matrix(rows) if experiment.kind == "pairs" else rows
    made = Sheet(title_of(experiment, told), keys, columns, rows, brackets=brackets, every=every)
    return replace(made, notes=tuple(_notes(experiment, findings, groups, made)))


def points(findings: Sequence[Finding]) -> dict[tuple[str, str], list[Finding]]:
    """Return the lines of a figure: by data set and defense the `findings`, each η once, from low to high."""
    lines: dict[tuple[str, str], dict[int, Finding]] = {}
    for finding in findings:
        row = finding.row
        lines.setdefault((row.data, row.defense), {}).setdefault(row.cost, finding)
    return {name: [found[cost] for cost in sorted(found)] for name, found in lines.items()}


def _scores(finding: Finding, about: About, names: Collection[str]) -> _Group:
    row, known = finding.row, finding.row.published
    about = {**about, "data": row.data, "defense": row.defense, "eta": row.steps, "cost": row.cost}
    if pair := re.fullmatch(r"HM\[([RMSDH]),([RMSDH])\]", row.defense):
        about |= {"source": pair[1], "destination": pair[2]}
    if known is None:
        return _group(finding, scores_of, names, Row(about, {}))
    theirs = {name: Estimate(value) for name, value in known.scores.items() if name in names}
    joined = known.joined and not COLUMNS.keys().isdisjoint(names)
    published = Row(
        about,
        theirs,
        kind="published",
        label=f"published{' †' * joined}",
        words=_words("collapse" if known.collapsed and not theirs else None, names),
        counts={"collapsed": int(known.collapsed), **({"joined": 1} if joined else {})},
    )
    return _group(finding, scores_of, names, Row(about, {}), published)


def _samplers(finding: Finding, about: About) -> Iterator[_Group]:
    data = finding.row.data
    theirs = {s: both for (d, s), both in published_hardness().items() if d == data}
    for number, (statistic, (name, unit)) in enumerate(_STATISTICS.items()):
        row = Row({**about, "data": data, "statistic": name}, {}, unit=unit)
        known = {s: Estimate(both[number]) for s, both in theirs.items() if number < len(both)}
        published = replace(row, estimates=known, kind="published", label="published") if known else None
        yield _group(finding, hardness_of(statistic), DRAWN, row, published)


def _group(
    finding: Finding, read: Reader, names: Collection[str], row: Row, published: Row | None = None
) -> _Group:
    """Put ours, each of several seeds, what was `published` and the difference below each other."""

    def ours(kind: str, found: Summary) -> Row:
        estimates = {name: found.estimates[name] for name in names if name in found.estimates}
        counts = {"seeds": found.seeds, "made": found.made, "collapsed": found.collapsed}
        words = _words(found.word, names)
        return replace(row, estimates=estimates, kind=kind, label=found.label, words=words, counts=counts)

    whole = summarise(finding.outcomes, read)
    rows = [ours("ours", whole)]
    if len(finding.outcomes) > 1:
        cells = zip(finding.row.tasks, finding.outcomes, strict=True)
        rows += [ours(f"seed {task.seed}", summarise([outcome], read)) for task, outcome in cells]
    if published is not None:
        known = published.estimates
        both = {name: e for name, e in rows[0].estimates.items() if name in known}
        # What was published has few digits: more of the difference are rounding.
        apart = {name: Estimate(round(e.value - known[name].value, 9)) for name, e in both.items()}
        rows.append(published)
        if apart:
            rows.append(replace(row, estimates=apart, kind="difference", label="difference"))
    return _Group(whole, rows)


def _words(word: str | None, names: Collection[str]) -> dict[str, str]:
    """Show a word in the first column and nothing in the others, if there is one."""
    return {} if word is None else {**dict.fromkeys(names, ""), next(iter(names)): word}


def _matrix(rows: Sequence[Row]) -> list[Row]:
    """Show rows of source × destination as a matrix, a destination for every two columns."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        data, source, to = (str(row.about[key]) for key in ("data", "source", "destination"))
        fallen = row.estimates and 0 < row.counts.get("made", 0) == row.counts["collapsed"]
        cells = found.setdefault((data, source, row.kind), {})
        for name in _MEASURED:
            cells[f"{SAMPLERS[to]} {name}"] = row.cell(name, SCORES[name]) + "*" * bool(fallen)
    kinds = ("ours", "published", "difference")
    sources = dict.fromkeys((data, source) for data, source, _ in found)
    return [
        Row(
            {"data": data, "source": SAMPLERS[source]},
            {},
            kind=kind,
            label=kind,
            words=found[data, source, kind],
        )
        for data, source in sources
        for kind in kinds
        if any(found.get((data, source, kind), {}).values())
    ]


def _notes(
    experiment: Experiment, findings: Sequence[Finding], groups: Sequence[_Group], made: Sheet
) -> Iterator[str]:
    """Say how the figures are to be read."""
    outcomes = {task: one for f in findings for task, one in zip(f.row.tasks, f.outcomes, strict=True)}
    records = [(task.data, one.record) for task, one in outcomes.items() if one and one.record]
    if told := sorted({record.settings.protocol for _, record in records}):
        yield f"Ours by the {' and '.join(told)} protocol."
    ours = [cells for row, cells in zip(made.rows, made.texts, strict=True) if row.kind == "ours"]
    shown = " ".join(cell for cells in ours for cell in cells[len(made.keys) :])
    published = [finding.row.published for finding in findings if finding.row.published is not None]
    conditional = {
        "Softhard: an anchor may be its own positive, as in the published training; Softhard p≠a: by its "
        "definition, never.": experiment.kind == "samplers",
        "Var[H]: variance of the batches' means, which the published one is.": experiment.kind == "samplers",
        "Brackets: 95 % interval over the queries.": "[" in shown,
        "±: standard deviation over seeds.": "±" in shown,
        "Seeds that collapsed are left out of mean and deviation.": any(
            0 < group.ours.collapsed < group.ours.seeds for group in groups
        ),
        "*: the network has collapsed, or nearly so.": "*" in shown,
        "Published figures are of the reference's page, for the paper has none on these images.": any(
            known.table == 0 for known in published
        ),
        "†: the ten scores under attack are of another training than the other published scores.": any(
            row.label.endswith("†") for row in made.rows
        ),
        "The published mAP mixes two measures: see docs/limits.md before comparing it.": (
            experiment.kind == "scores" and any("mAP" in known.scores for known in published)
        ),
    }
    yield from (note for note, holds in conditional.items() if holds)
    for data in experiment.data:
        about = [record.data for of, record in records if of == data]
        if len({images.sha256 for images in about}) > 1:
            yield f"Careful: the records on {data} are of different images, and cannot be compared."
        wanted = CLASSES.get(data, (0, 0))[1]
        if found := sorted({images.classes for images in about if wanted and images.classes != wanted}):
            yield (
                f"Careful: {data} has {' or '.join(map(str, found))} of {wanted:,} test classes here: "
                "figures cannot be compared with published ones."
            )
    fallen: dict[str, list[str]] = {}
    for whole, (row, *_) in groups:
        if whole.collapsed:
            eta = "" if row.about.get("eta") is None else f" η={row.about['eta']}"
            of = f" ({whole.collapsed} of {whole.seeds} seeds)" if whole.seeds > 1 else ""
            # One note for all, whatever the figure.
            why = re.sub(r", with a mean cosine of [\d.]+", "", "; ".join(whole.why).rstrip("."))
            fallen.setdefault(why, []).append(f"{row.about['data']} {row.about['defense']}{eta}{of}")
    yield from (f"Collapse of {', '.join(which)}: {why}." for why, which in fallen.items())
    if missing := sum(outcome is None for outcome in outcomes.values()):
        yield f"Not made yet: {missing} of {len(outcomes)} cells of {experiment.heading}."
