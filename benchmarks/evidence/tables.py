"""The tables and sentences of docs/evidence.md and results/README.md, each from records alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    Network,
    tasks,
    written,
)
from robustmetric.report.summary import SCORES
from robustmetric.report.tables import DRAWN
from robustmetric.training.runs import RunFolder

FULL, FEW = FASHION[3], FASHION[4]
"""The whole method at full length, with η = 32 and with few steps."""
RIVALS = ("ACT[R]", "EST[R]")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table in Markdown; the first `left` columns are texts, the others figures.

    >>> print(table(["a", "b"], [["x", "1.0"]]))
    | a | b |
    |---|---:|
    | x | 1.0 |
    """
    shown = ["| " + " | ".join(row) + " |" for row in rows]
    if not shown:
        return "Nothing of this is measured yet."
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * left + "---:|" * (len(heads) - left)]
    return "\n".join([*lines, *shown])


def overview(networks: Sequence[Network]) -> str:
    """Return the scores of networks beside what was published for the same η."""
    rows = []
    for network in networks:
        known = published_of(network)
        theirs = known.scores if known is not None else {}
        recall, ers = (SCORES[name].show(theirs.get(name)).replace("-", "–") for name in ("R@1", "ERS"))
        eta = "–" if network.steps is None else str(network.steps)
        row = [network.defense, eta, RECALL.show(network), recall, ERS.show(network, interval=True), ers]
        rows.append([*row, *(value.show(network, interval=True) for value in (STRICT, WORST))])
    heads = ["training", "η", "R@1", "published", "ERS, reference", "published", "ERS, strict"]
    return table([*heads, "R@1, worst case"], rows)


def attacks(networks: Sequence[Network]) -> str:
    """Return all scores of networks by the reference protocol, each above the published ones."""
    rows = []
    for network in networks:
        record, known = record_of(network, "reference"), published_of(network)
        if record is not None:
            rows.append([network.label, "ours", *map(record.show, SCORES)])
        if known is not None and "CA+" in known.scores:
            theirs = [column.show(known.scores.get(name)) for name, column in SCORES.items()]
            rows.append([network.label, "published", *theirs])
    return table(["training", "", *(column.heading for column in SCORES.values())], rows, left=2)


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
        return f"The training with η = 32 has no record yet, so that η = {CHEAP} cannot be compared with it."
    cost = _images(FEW) / _images(FULL)
    changes = "; ".join(f"{value.title} {few:.1f} against {many:.1f}" for value, few, many in known)
    return f"η = {CHEAP} against η = 32, with {cost:.2f} of the images through the network: {changes}."


def _images(network: Network) -> float:
    """Return the mean number of images forward and backward in the steps that were logged."""
    rows = [row for row in log_of(network) if row["images/forward"]]
    return fmean(float(row["images/forward"]) + float(row["images/backward"]) for row in rows)


def gap() -> str:
    """Say how far the published figure is, what it would ask, and which weights were taken."""
    known, network = published_of(FULL), FULL if ERS.of(FULL) is not None else FEW
    record = record_of(network, "reference")
    if known is None or record is None or record.ers is None:
        return "Nothing is measured yet."
    ours, theirs, gtt = record["ERS"], known.scores["ERS"], record.ers.terms["GTT"] or 0.0
    lines = [
        f"Published for {HM} is an ERS of {theirs:.1f}. Ours is {ours:.1f} (η = {network.steps}), "
        f"{abs(theirs - ours):.1f} {'below' if ours < theirs else 'above'} it. With our GTT of {gtt:.1f}, an "
        f"ERS of {theirs:.1f} asks {(10 * theirs - gtt) / 9:.1f} of each of the other nine terms; ours have "
        f"a mean of {(10 * ours - gtt) / 9:.1f}."
    ]
    choice = RunFolder(RESULTS / network.name).read().get("choice", {})
    if (best := choice.get("best")) and (last := choice.get("last")):
        lines.append(
            f"The weights are the last ones, of step {last['step']:,}; R@1 on the test images was highest at "
            f"step {best['step']:,} ({best['R@1']:.1f}, {last['R@1']:.1f} at the end)."
        )
    return "\n".join(lines)


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
        change = _change(ERS, network, network, STRICT)
        rows.append([f"protocol, η = {network.steps}, 8 epochs", "reference", "strict", "the same", change])
    return table(["what is changed", "from", "to", "R@1", "ERS"], rows, left=3)


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
        if (record := record_of(network, "strict")) is None:
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
    differences, lines = [], []
    for other in RIVALS:
        found = {value.title: compare(value, seeds[HM], seeds[other]) for value in CLAIMED}
        differences.append([f"{HM} − {other}", *("–" if d is None else str(d) for d in found.values())])
        said = [f"{title} is {d.verdict}" for title, d in found.items() if d is not None and d.verdict]
        if said:
            lines.append(f"- Against {other}: {', '.join(said)}.")
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
        order = " < ".join(
            letter for letter in sorted(letters, key=lambda n: hardness[n]["mean"]) if len(letter) == 1
        )
        rows.append([one.label, "E[H]", order, *(f"{mean:.3f}" for mean in means)])
        rows.append([one.label, "Var[H]", "", *(f"{variance:.5f}" for variance in variances)])
    return table(["network", "", "order", *(DRAWN.get(letter, letter) for letter in letters)], rows, left=3)


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
                rows.append([f"`{name}`", record.show("R@1"), record.show("ERS"), f"`{command}`"])
    return table(["record", "R@1", "ERS", "command"], rows)


def measurements() -> str:
    """List each measurement of Table 1 with its command."""
    found = [one for one in SAMPLERS if hardness_of(one) is not None]
    rows = [[f"`{one.name}`", f"`{written(one.reproduce())}`"] for one in found]
    return table(["measurement of Table 1", "command"], rows, left=2)
