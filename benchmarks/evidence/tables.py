"""The tables and sentences of docs/evidence.md and results/README.md, each from records alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from benchmarks.evidence.found import (
    CLAIMED,
    ERS,
    RECALL,
    STRICT,
    WORST,
    Value,
    compare,
    hardness_of,
    log_of,
    measured,
    missing,
    published_of,
    record_of,
)
from benchmarks.evidence.plan import (
    CHEAP,
    CLAIM,
    FASHION,
    HM,
    KINDS,
    OTHERS,
    RESULTS,
    SAMPLERS,
    SEEDS,
    WHY,
    Kind,
    Network,
    tasks,
    written,
)
from robustmetric.experiments.published import Published, published
from robustmetric.report.summary import SCORES, record_scores
from robustmetric.report.tables import DRAWN
from robustmetric.training.runs import RunFolder

FULL, FEW = FASHION[3], FASHION[4]
"""The whole method at full length, with η = 32 and with few steps."""
RIVALS = ("ACT[R]", "EST[R]")
UNMEASURED = "None of this has been measured yet."


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table in Markdown; the first `left` columns are texts, the others figures.

    >>> print(table(["a", "b"], [["x", "1.0"]]))
    | a | b |
    |---|---:|
    | x | 1.0 |
    """
    shown = ["| " + " | ".join(row) + " |" for row in rows]
    if not shown:
        return UNMEASURED
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * left + "---:|" * (len(heads) - left)]
    return "\n".join([*lines, *shown])


def overview(networks: Sequence[Network]) -> str:
    """Return the scores of networks beside what was published for the same η."""
    rows = []
    for network in networks:
        known = published_of(network)
        theirs = known.scores if known is not None else {}
        recall, ers = (SCORES[name].show(theirs.get(name)).replace("-", "–") for name in ("R@1", "ERS"))
        eta = "none" if network.steps is None else str(network.steps)
        row = [
            network.defense,
            eta,
            RECALL.show(network, interval=True),
            recall,
            ERS.show(network, interval=True),
            ers,
        ]
        rows.append([*row, *(value.show(network, interval=True) for value in (STRICT, WORST))])
    heads = ["training", "η", "R@1", "published", "ERS, reference", "published", "ERS, strict"]
    return table([*heads, "R@1, worst case"], rows)


def attacks(networks: Sequence[Network], kind: Kind) -> str:
    """Return all scores of networks by a protocol; by the reference's, the published ones stand below."""
    rows = []
    for network in networks:
        if (record := record_of(network, kind)) is not None:
            rows.append([network.label, "ours", *map(record.show, SCORES)])
        if kind == "reference" and (known := published_of(network)) is not None:
            rows.append(_published_row(known))
    if kind == "reference":
        shown = {network.defense for network in networks}
        others = [row for row in published() if row.table == 0 and row.data == networks[0].data]
        rows += [_published_row(row) for row in others if row.defense not in shown]
    return table(["training", "", *(column.heading for column in SCORES.values())], rows, left=2)


def _published_row(row: Published) -> list[str]:
    eta = "" if row.steps is None else f", η = {row.steps}"
    shown = [column.show(row.scores.get(name)) for name, column in SCORES.items()]
    return [f"{row.defense}{eta}", "published", *("–" if text == "-" else text for text in shown)]


def agreement(networks: Sequence[Network]) -> str:
    """Return which published figures lie within our intervals, of trainings with the same η."""
    rows = []
    for network in networks:
        record, known = record_of(network, "reference"), published_of(network)
        if record is None or known is None:
            continue
        scores = record_scores(record)
        sides: dict[bool, list[str]] = {True: [], False: []}
        for name, theirs in known.scores.items():
            score = scores[name]
            if score.low is not None and score.high is not None:
                half = 0.5 * 10 ** -SCORES[name].unit.digits  # it was rounded
                within = score.low - half <= theirs <= score.high + half
                sides[within].append(name if within else f"{name} ({record.show(name)}, {theirs:g})")
        rows.append([network.label, ", ".join(sides[True]) or "none", ", ".join(sides[False]) or "none"])
    return table(["training", "within", "outside (ours, published)"], rows, left=3)


def suite(networks: Sequence[Network]) -> str:
    """Return what the suite leaves of each goal."""
    found = {
        n.label: r for n in networks if (r := record_of(n, "strict")) is not None and r.suite is not None
    }
    goals = list(dict.fromkeys(goal for record in found.values() for goal in record.suite.goals))  # type: ignore[union-attr]
    heads = [
        next(r.goal_column(goal).heading for r in found.values() if r.suite and goal in r.suite.goals)
        for goal in goals
    ]
    rows = [
        [label, *(record.goal_column(goal).show(record[goal]) for goal in goals)]
        for label, record in found.items()
    ]
    return table(["training", *heads], rows)


def cheap() -> str:
    """Say whether few steps keep the score, and what they cost."""
    known = [
        (v, few, many) for v in CLAIMED if (few := v.of(FEW)) is not None and (many := v.of(FULL)) is not None
    ]
    if not known:
        return f"The training with η = 32 has no record yet, so η = {CHEAP} cannot be compared with it."
    cost = _images(FEW) / _images(FULL)
    changes = "; ".join(f"{value.title} {few:.1f} against {many:.1f}" for value, few, many in known)
    return f"η = {CHEAP} against η = 32, with {cost:.2f} of the images through the network: {changes}."


def _images(network: Network) -> float:
    """Return the mean number of images forward and backward in the steps that were logged."""
    rows = [row for row in log_of(network) if row["images/forward"]]
    return fmean(float(row["images/forward"]) + float(row["images/backward"]) for row in rows)


def gap() -> str:
    """Say how far the published figure is, what it would ask, and which weights were taken."""
    known, record = published_of(FULL), record_of(FULL, "reference")
    if known is None or record is None or record.ers is None:
        return f"{HM} with the published η = 32 has not been measured yet."
    ours, theirs, gtt = record["ERS"], known.scores["ERS"], record.ers.terms["GTT"] or 0.0
    below = "below" if ours < theirs else "above"
    choice = RunFolder(RESULTS / FULL.name).read()["choice"]
    best, last = choice["best"], choice["last"]
    highest = (
        "which had the highest R@1 on the test images too"
        if best["step"] == last["step"]
        else f"with R@1 {last['R@1']:.1f}; it was highest, {best['R@1']:.1f}, at step {best['step']:,}"
    )
    return (
        f"The published ERS of {HM} is {theirs:.1f}; ours is {ours:.1f}, {abs(theirs - ours):.1f} {below} "
        "it. "
        f"With our GTT of {gtt:.1f}, an ERS of {theirs:.1f} would require {(10 * theirs - gtt) / 9:.1f} from "
        f"each of the other nine terms; the mean of ours is {(10 * ours - gtt) / 9:.1f}. The weights are "
        f"those of the last step, {last['step']:,}, {highest}."
    )


def reasons() -> str:
    """Return the experiments on the difference to the published figures, one change at a time."""
    one = {(n.defense, n.steps, n.reference, n.seed): n for n in (*CLAIM, *WHY)}
    short, long = one[HM, CHEAP, False, 0], one[HM, 32, False, 0]
    seeds = [one[HM, CHEAP, False, seed] for seed in SEEDS]
    faithful = [one[HM, CHEAP, True, seed] for seed in SEEDS]
    rows = [
        ["η of training, 8 epochs", f"{CHEAP}", "32", _change(RECALL, FEW, FULL), _change(ERS, FEW, FULL)],
        ["η of training, 1 epoch", f"{CHEAP}", "32", _change(RECALL, short, long), _change(ERS, short, long)],
        [f"epochs, η = {CHEAP}", "1", "8", _change(RECALL, short, FEW), _change(ERS, short, FEW)],
        ["epochs, η = 32", "1", "8", _change(RECALL, long, FULL), _change(ERS, long, FULL)],
        [
            f"[training as published](method.md#the-published-training), η = {CHEAP}, 1 epoch, "
            f"{len(SEEDS)} seeds",
            "off",
            "on",
            _paired(RECALL, seeds, faithful),
            _paired(ERS, seeds, faithful),
        ],
        [f"seed, η = {CHEAP}, 1 epoch", "lowest", "highest", _range(RECALL, seeds), _range(ERS, seeds)],
    ]
    for network in (FULL, FEW):
        change = _change(ERS, network, network, STRICT) + _most(network)
        rows.append([f"protocol, η = {network.steps}, 8 epochs", "reference", "strict", "the same", change])
    measured = [row for row in rows if row[-1] != "–"]
    return table(["what is changed", "from", "to", "R@1", "ERS"], measured, left=3)


def _most(network: Network) -> str:
    """Say which term differs most between the protocols."""
    found = [record_of(network, kind) for kind in KINDS]
    terms = [record.ers.terms for record in found if record is not None and record.ers is not None]
    if len(terms) < 2:
        return ""
    name = max(terms[0], key=lambda n: abs((terms[0][n] or 0) - (terms[1][n] or 0)))
    return f", most in {name}: {terms[0][name]:.1f} → {terms[1][name]:.1f}"


def _change(value: Value, before: Network, after: Network, then: Value | None = None) -> str:
    """Write a figure of two networks, or two figures of one, with the change."""
    a, b = value.of(before), (then or value).of(after)
    return "–" if a is None or b is None else f"{a:.1f} → {b:.1f} ({b - a:+.1f})"


def _paired(value: Value, before: Sequence[Network], after: Sequence[Network]) -> str:
    found = compare(value, after, before)
    return "–" if found is None else str(found)


def _range(value: Value, networks: Sequence[Network]) -> str:
    found = [figure for figure in map(value.of, networks) if figure is not None]
    if len(found) < 2:
        return "–"
    return f"{min(found):.1f} → {max(found):.1f} ({max(found) - min(found):+.1f})"


def masked() -> str:
    """Say what the checks and the suite tell of masked gradients."""
    rows = []
    for network in FASHION:
        if network.steps is None or (record := record_of(network, "strict")) is None:
            continue
        said = "; ".join(f"{c.name}: {c.says}" for c in record.checks if c.status in ("warn", "fail"))
        least = min(record[name] for name in ("ES:R", "LTM", "GTM"))
        rows.append([network.label, said or "all pass", f"{least:.1f}", WORST.show(network)])
    return table(
        ["training", "checks that warn or fail", "R@1 under ES, LTM, GTM: the least", WORST.title],
        rows,
        left=2,
    )


def claim() -> str:
    """Return each seed of the central claim, the differences, and what they say."""
    seeds = {name: [n for n in CLAIM if n.defense == name] for name in (*RIVALS, HM)}
    titles = [value.title for value in CLAIMED]
    each = [
        [n.defense, str(n.seed), *(v.show(n) for v in CLAIMED)] for those in seeds.values() for n in those
    ]
    if not any(v.of(n) is not None for those in seeds.values() for n in those for v in CLAIMED):
        return UNMEASURED
    differences, lines = [], []
    for other in RIVALS:
        found = {value.title: compare(value, seeds[HM], seeds[other]) for value in CLAIMED}
        differences.append([f"{HM} − {other}", *("–" if d is None else str(d) for d in found.values())])
        if line := verdict(other):
            lines.append(f"- Against {line}")
    parts = [
        table(["training", "seed", *titles], each, left=2),
        table(["difference", *titles], differences),
        "\n".join(lines),
    ]
    return "\n\n".join(parts)


def steps_between() -> str:
    """Return the means of the trainings between EST and the whole method."""
    rows = []
    for name in dict.fromkeys(n.defense for n in (*CLAIM, *OTHERS)):
        those = [n for n in (*CLAIM, *OTHERS) if n.defense == name]
        found = [[f for f in map(value.of, those) if f is not None] for value in CLAIMED]
        if any(found):
            rows.append([name, *(f"{fmean(f):.1f} ({len(f)})" if f else "–" for f in found)])
    return table(["training", *(value.title for value in CLAIMED)], rows)


def samplers() -> str:
    """Return Table 1: mean and variance of the hardness that each sampler draws, and the order of means."""
    found = [(one, hardness) for one in SAMPLERS if (hardness := hardness_of(one)) is not None]
    letters = list(dict.fromkeys(letter for _, hardness in found for letter in hardness))
    rows = []
    for one, hardness in found:
        means, variances = ([hardness[n][what] for n in letters] for what in ("mean", "variance"))
        order = _ordered({letter: hardness[letter]["mean"] for letter in letters if len(letter) == 1})
        rows.append([one.label, "E[H]", order, *(_minus(f"{mean:.3f}") for mean in means)])
        rows.append([one.label, "Var[H]", "", *(f"{variance:.5f}" for variance in variances)])
    return table(
        ["network", "", "order of E[H]", *(DRAWN.get(letter, letter) for letter in letters)], rows, left=3
    )


def _ordered(means: dict[str, float]) -> str:
    """Write names in the order of their means; those that are the same in three digits by ≈."""
    names = sorted(means, key=lambda name: means[name])
    signs = [" ≈ " if round(means[a], 3) == round(means[b], 3) else " < " for a, b in pairwise(names)]
    return names[0] + "".join(sign + name for sign, name in zip(signs, names[1:], strict=True))


def _minus(text: str) -> str:
    return text.replace("-", "−")


def summary() -> str:
    """Say in a few lines what was found so far."""
    lacks, whole = missing(), len(list(tasks())) + len(SAMPLERS)
    lines = [
        f"- {whole - len(lacks)} of {whole} measurements are made; [the rest](#not-measured-yet) is listed."
    ]
    for network in FASHION:
        if (ers := ERS.of(network)) is None:
            continue
        known = published_of(network)
        theirs = f" (published: {known.scores['R@1']:.1f} and {known.scores['ERS']:.1f})" if known else ""
        line = f"- {network.label}: R@1 {RECALL.show(network)} and ERS {ers:.1f}{theirs}"
        if (worst := WORST.of(network)) is not None:
            line += f"; the suite leaves R@1 {worst:.1f}"
        lines.append(f"{line}.")
    found = [f"- {HM} against {line}" for other in RIVALS if (line := verdict(other))]
    return "\n".join([*lines, *found])


def verdict(other: str) -> str:
    """Say in which figures the whole method is clearly higher or lower than another defense, seed by seed."""
    seeds = {name: [n for n in CLAIM if n.defense == name] for name in (other, HM)}
    found = {value.title: compare(value, seeds[HM], seeds[other]) for value in CLAIMED}
    said = [f"{title} is {d.verdict}" for title, d in found.items() if d is not None and d.verdict]
    return f"{other}, at equal cost: {', '.join(said)}." if said else ""


def unmeasured() -> str:
    """List what is not made yet."""
    lacks, whole = missing(), len(list(tasks())) + len(SAMPLERS)
    if not lacks:
        return f"Nothing: all {whole} measurements are made."
    return "\n".join([f"{len(lacks)} of {whole} measurements:", *(f"- {one}" for one in lacks)])


def trainings() -> str:
    """List each training that has a record with its command."""
    rows = [[f"`{n.name}`", f"`{written(n.train())}`"] for n in measured()]
    return table(["training", "command"], rows, left=2)


def records() -> str:
    """List each record with its scores and its command."""
    rows = []
    for network in measured():
        for kind in KINDS:
            if (record := record_of(network, kind)) is not None:
                name = network.record(kind).parent.relative_to(RESULTS)
                command = written(network.evaluate(kind))
                rows.append([f"`{name}`", f"`{command}`", record.show("R@1"), record.show("ERS")])
    return table(["record", "command", "R@1", "ERS"], rows, left=2)


def measurements() -> str:
    """List each measurement of Table 1 with its command."""
    found = [one for one in SAMPLERS if hardness_of(one) is not None]
    rows = [[f"`{one.name}`", f"`{written(one.reproduce())}`"] for one in found]
    return table(["measurement of Table 1", "command"], rows, left=2)
