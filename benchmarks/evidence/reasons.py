"""Where the figures differ from the published ones, and what the experiments say of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.evidence.found import (
    ERS,
    LESS,
    RECALL,
    STRICT,
    Value,
    compare,
    log_of,
    measured,
    published_of,
    record_of,
)
from benchmarks.evidence.plan import (
    ATTACKED,
    CHEAP,
    CLAIM,
    COMPARED,
    FASHION,
    HARDER,
    HM,
    MNIST,
    RESULTS,
    SEEDS,
    SMALL,
    WHY,
    Network,
)
from benchmarks.evidence.tables import FEW, FULL, RANKED, before, minus, table
from robustmetric.evaluation.ers import COLUMNS, ers
from robustmetric.evaluation.record import AttackShare
from robustmetric.experiments.published import published
from robustmetric.report.summary import SCORES, record_scores
from robustmetric.report.verdict import RECALLS
from robustmetric.training.folder import RunFolder


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
                within = _holds((score.low, score.high), theirs, SCORES[name].unit.digits)
                shown = minus(name)
                ours = record.show(name)
                sides[within].append(shown if within else f"{shown} ({ours}, {SCORES[name].show(theirs)})")
        label = f"{network.label}{' †' * known.joined}"
        rows.append([label, ", ".join(sides[True]) or "none", ", ".join(sides[False]) or "none"])
    return table(["training", "within", "outside (ours, published)"], rows, left=3)


def _holds(ends: tuple[float, float], published: float, digits: int = 1) -> bool:
    """Say whether an interval holds a figure that was rounded to so many `digits`."""
    half = 0.5 * 10.0**-digits
    return ends[0] - half <= published <= ends[1] + half


def gap() -> str:
    """Say how near the scores without attacks come, how far the ERS is, and which weights were taken."""
    known, record = published_of(FULL), record_of(FULL, "reference")
    if known is None or record is None or record.ers is None:
        return f"{HM} with the published η = 32 has not been measured yet."
    choice = RunFolder(RESULTS / FULL.name).read()["choice"]
    best, last = choice["best"], choice["last"]
    highest = (
        "which had the highest R@1 on the test images too"
        if best["step"] == last["step"]
        else f"with R@1 {last['R@1']:.1f}; it was highest, {best['R@1']:.1f}, at step {best['step']:,}"
    )
    ranked = ", ".join(f"{name} {record.show(name)} (published {known.scores[name]:.1f})" for name in RANKED)
    return (
        f"Without attacks {HM} has {ranked}. Its ERS is {record['ERS']:.1f} where {known.scores['ERS']:.1f} "
        f"was published. The weights are those of the last step, {last['step']:,}, {highest}."
    )


def budgets() -> str:
    """Return the ERS with the paper's two budgets beside the published one, and which of them holds it."""
    rows = []
    for network in (*COMPARED, *MNIST):
        known = published_of(network)
        if known is None or ERS.of(network) is None or LESS.of(network) is None:
            continue
        theirs = known.scores["ERS"]
        shown = [value.show(network, interval=True) for value in (ERS, LESS)]
        levels = ((ATTACKED, ERS), (SMALL, LESS))
        within = [f"{level}/255" for level, v in levels if (ends := v.ends(network)) and _holds(ends, theirs)]
        holds = ", ".join(within) or "neither"
        rows.append([network.data, network.title, network.length, *shown, f"{theirs:.1f}", holds])
    heads = [f"ERS, ε = {ATTACKED}/255", LESS.title, "published ERS", "within the interval of ε ="]
    return table(["data", "training", "length", *heads], rows, left=3)


def odd_one() -> str:
    """Say of which defenses the published ERS is higher on MNIST than on Fashion-MNIST, and of which not."""
    those: dict[str, dict[str, float]] = {}
    for row in published():
        if row.table == 0:
            those.setdefault(row.defense, {})[row.data] = row.scores["ERS"]
    sides: dict[bool, list[str]] = {True: [], False: []}
    for name, found in those.items():
        easy, hard = found["mnist"], found["fashion-mnist"]
        sides[easy > hard].append(f"{name} ({easy:.1f} and {hard:.1f})")
    return (
        "Of the published ERS on MNIST and on Fashion-MNIST, that on MNIST is the higher one for "
        f"{', '.join(sides[True])}, not for {', '.join(sides[False])}: by either explanation the latter "
        f"is too high for ε = {ATTACKED}/255."
    )


def reading() -> str:
    """Say which ERS other trainings have, and what both budgets say of ACT."""
    every = (FULL, FEW, *(n for n in CLAIM if n.defense == HM), *(n for n in WHY if n.defense == HM))
    those = [network for network in every if ERS.of(network) is not None]
    if not those:
        return ""
    found = [score for score in map(ERS.of, those) if score is not None]
    counts = (
        (sum(n.steps == FULL.steps for n in those), f"with η = {FULL.steps}"),
        (sum(n.epochs == FULL.epochs for n in those), f"of {FULL.length}"),
        (sum(n.reference for n in those), "as published but for η and length"),
    )
    kinds = ", ".join(f"{count or 'none'} {what}" for count, what in counts)
    told = (
        f"{len(those)} trainings of {HM} on {FULL.data} ({kinds}) have an ERS of {min(found):.1f} to "
        f"{max(found):.1f} with ε = {ATTACKED}/255."
    )
    act = FASHION[2]
    pairs = [(value.of(act), value.of(FULL)) for value in (ERS, LESS)]
    if all(a is not None and b is not None and a > b for a, b in pairs):
        both = "; ".join(f"{a:.1f} and {b:.1f}" for a, b in pairs)
        told += (
            f" {act.defense} has a higher ERS than {HM} with either budget ({both}): that {HM} leads, as "
            "its printed ERS has it, is not reproduced."
        )
    kept = [record_of(network, "small-strict") for network in (FULL, act)]
    if all(record is not None for record in kept):
        left = [f"{record['misrank']:.1f} of {before(record)}" for record in kept if record is not None]
        told += (
            f" Under the worst-case suite with ε = {SMALL}/255 {FULL.title} keeps an R@1 of {left[0]}, "
            f"{act.title} one of {left[1]}."
        )
    return told


def formula() -> str:
    """Return the published ERS of 28×28 images beside that of the scores published with it."""
    rows = []
    for known in published():
        if known.table == 0 and all(name in known.scores for name in COLUMNS):
            made = ers({name: known.scores[name] for name in COLUMNS}, protocol="reference")
            rows.append([known.data, known.defense, f"{made:.1f}", f"{known.scores['ERS']:.1f}"])
    return table(["data", "training", "ERS of the ten published scores", "published ERS"], rows, left=2)


def changes() -> str:
    """Return the experiments on the difference to the published figures, one change at a time."""
    one = {(n.defense, n.steps, n.reference, n.seed): n for n in (*CLAIM, *WHY)}
    short, long = one[HM, CHEAP, False, 0], one[HM, 32, False, 0]
    seeds = [one[HM, CHEAP, False, seed] for seed in SEEDS]
    faithful = [one[HM, CHEAP, True, seed] for seed in SEEDS]
    rows = [
        [
            "η and α of training, 8 epochs",
            f"{CHEAP}",
            "32",
            _change(RECALL, FEW, FULL),
            _change(ERS, FEW, FULL),
        ],
        [
            "η and α of training, 1 epoch",
            f"{CHEAP}",
            "32",
            _change(RECALL, short, long),
            _change(ERS, short, long),
        ],
        [f"epochs, η = {CHEAP}", "1", "8", _change(RECALL, short, FEW), _change(ERS, short, FEW)],
        ["epochs, η = 32", "1", "8", _change(RECALL, long, FULL), _change(ERS, long, FULL)],
        [
            f"[training as published](method.md#the-published-training), η = {CHEAP}, 1 epoch, "
            f"{len([n for n in faithful if n in measured()])} seeds",
            "off",
            "on",
            _paired(RECALL, seeds, faithful),
            _paired(ERS, seeds, faithful),
        ],
        *(
            [
                f"destination, η = {CHEAP}, 1 epoch",
                f"LGA, on average {_destination(short)}",
                minus(name[len("HM[S,") : name.index("]")]),
                _change(RECALL, short, one[name, CHEAP, False, 0]),
                _change(ERS, short, one[name, CHEAP, False, 0]),
            ]
            for name in HARDER
        ),
        [f"seed, η = {CHEAP}, 1 epoch", "0", "1, 2", _each(RECALL, seeds), _each(ERS, seeds)],
    ]
    for network in (FULL, FEW):
        change = _change(ERS, network, network, STRICT) + _most(network)
        rows.append([f"protocol, η = {network.steps}, 8 epochs", "reference", "strict", "the same", change])
    known = [row for row in rows if row[-1] != "–"]
    return table(["what is changed", "from", "to", "R@1", "ERS"], known, left=3)


def _destination(network: Network) -> str:
    """Return the mean of the hardness that triplets were to reach."""
    if network not in measured():
        return "–"
    wished = [row["hardness/destination"] for row in log_of(network)]
    return minus(f"{fmean(float(text) for text in wished if text):.2f}")


def _most(network: Network) -> str:
    """Say which term differs most between the protocols."""
    found = [record_of(network, "reference"), record_of(network, "strict")]
    terms = [record.ers.terms for record in found if record is not None and record.ers is not None]
    if len(terms) < 2:
        return ""
    name = max(terms[0], key=lambda n: abs((terms[0][n] or 0) - (terms[1][n] or 0)))
    why = ", for which the reference picks [a wrong target](protocol.md#strict-and-reference)"
    return f", most in {name}: {terms[0][name]:.1f} → {terms[1][name]:.1f}{why if name == 'GTM' else ''}"


def _change(value: Value, before: Network, after: Network, then: Value | None = None) -> str:
    """Write a figure of two networks, or two figures of one, with the change."""
    last = then or value
    a, b = value.of(before), last.of(after)
    if record_of(before, value.kind) is None or record_of(after, last.kind) is None:
        return "–"
    change = "" if a is None or b is None else minus(f" ({round(b, 1) - round(a, 1):+.1f})")
    return f"{value.show(before)} → {last.show(after)}{change}"


def _paired(value: Value, before: Sequence[Network], after: Sequence[Network]) -> str:
    found = compare(value, after, before)
    return "–" if found is None else minus(found.show())


def _each(value: Value, networks: Sequence[Network]) -> str:
    found = [value.show(network) for network in networks if value.of(network) is not None]
    return ", ".join(found) if len(found) > 1 else "–"


WEAK = {
    "one-step": "one step of ε does better",
    "noise": "random signs of size ε do better",
    "last": "an earlier point was better",
    "masked": "broken by squares alone",
}
"""The checks that tell of attacks that gradients lead astray, and what share of the queries each counts."""


def masked() -> str:
    """Say what the suite and the checks tell of masked gradients."""
    rows, farther, blind, left = [], [0.0], [], []
    for network in FASHION:
        large, small = record_of(network, "strict"), record_of(network, "small-strict")
        if large is None or large.suite is None or small is None or small.suite is None:
            continue
        goals = large.suite.goals
        least = min(large[name] for name in RECALLS)
        shifted = _share(goals["shift"].attacks, blind=True)
        cells = [goals["misrank"].before, least, large["misrank"]]
        cells += [_share(goals["misrank"].attacks, blind=True), shifted]
        blind.append(_share(small.suite.goals["misrank"].attacks, blind=True))
        left.append(small["misrank"] + blind[-1])
        rows.append([network.label, *(f"{cell:.1f}" for cell in [*cells, left[-1], blind[-1]])])
        if network.steps is not None:
            farther.append(shifted)
    heads = ["training", "R@1 of these queries", "the least of ES, LTM, GTM", "worst case"]
    heads += ["broken by squares alone", "moved farthest by squares"]
    heads += [f"left by gradients, ε = {SMALL}/255", f"broken by squares alone, ε = {SMALL}/255"]
    if not rows:
        return table(heads, rows)
    broken = f"up to {max(blind):.1f} %" if max(blind) else "none"
    said = (
        f"With ε = {SMALL}/255 gradients leave {min(left):.1f} to {max(left):.1f} % of the queries, and "
        f"squares break {broken} of them: no sign of masked gradients there. At larger ε there are signs. "
        "With 32/255 squares break [what gradients leave](worst-case.md#how-much-it-finds) of the network of "
        f"η = {CHEAP}, and with {ATTACKED}/255, where next to nothing is left to break, squares move up to "
        f"{max(farther):.1f} % of the embeddings of a defended network farther than gradients do: either "
        "gradients mislead there, or the suite's steps are too few"
    )
    return "\n\n".join([table(heads, rows), said + _more_steps()])


def _more_steps() -> str:
    """Say how many embeddings move farther without gradients still if attacks along them have more steps."""
    told, pairs = [], []
    for network in FASHION:
        usual, more = record_of(network, "strict"), record_of(network, "more-steps")
        if usual is None or usual.suite is None or more is None or more.suite is None:
            continue
        goals = [found.goals["shift"] for found in (usual.suite, more.suite)]
        pairs.append([_share(goal.attacks, blind=True) for goal in goals])
        told.append(
            f"{network.label}: {pairs[-1][0]:.1f} → {pairs[-1][1]:.1f} %, shift {goals[0].value:.3f} → "
            f"{goals[1].value:.3f}"
        )
    if not told:
        return "; that was not tested."
    said = f". With four times the steps along gradients: {'; '.join(told)}."
    if all(after < before for before, after in pairs):
        rest = "and not all of it" if max(after for _, after in pairs) >= 1 else "and nearly all of it"
        said += f" So the steps are a part of it, {rest}; the shift in the worst case is too low by a little."
    return said


def checks() -> str:
    """Return the share of queries for which each check found an attack weak, and what that means."""
    rows, noisy = [], []
    for network in FASHION:
        record = record_of(network, "strict")
        if record is None or network.steps is None:
            continue
        known = {check.name: check for check in record.checks}
        cells = [
            f"{100 * (known[name].figure or 0.0):.1f}{' (warn)' * (known[name].status == 'warn')}"
            for name in WEAK
        ]
        rows.append([network.label, *cells])
        noisy.append((known["noise"].figure or 0.0, network.label))
    if not rows:
        return table(["training", *WEAK.values()], rows)
    most, label = max(noisy)
    said = (
        "So the ERS is no worst case, and would be lower under stronger attacks of the same budget: of "
        f"{label}, random signs beat an attack for {100 * most:.1f} % of the queries."
    )
    return "\n\n".join([table(["training", *WEAK.values()], rows), said])


def _share(attacks: Sequence[AttackShare], *, blind: bool) -> float:
    """Return the share of queries, in %, that fell to attacks that are `blind` to gradients, or to others."""
    return sum(a.broke or 0.0 for a in attacks if a.search is not None and (a.search == "square") == blind)
