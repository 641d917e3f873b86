"""The tables and sentences of docs/evidence.md and results/README.md, each from records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from benchmarks.evidence.found import (
    CLAIMED,
    ERS,
    LESS,
    LESS_WORST,
    RECALL,
    STRICT,
    WORST,
    Difference,
    Value,
    compare,
    hardness_of,
    log_of,
    measured,
    missing,
    planned,
    published_of,
    record_of,
)
from benchmarks.evidence.plan import (
    ATTACKED,
    CHEAP,
    CLAIM,
    FASHION,
    HM,
    KINDS,
    LONGER,
    MNIST,
    OTHERS,
    RESULTS,
    SAMPLERS,
    SEEDS,
    SMALL,
    Kind,
    Network,
    written,
)
from robustmetric.evaluation import Record
from robustmetric.experiments.published import Published, published
from robustmetric.report.records import eps_of
from robustmetric.report.summary import SCORES
from robustmetric.report.tables import DRAWN
from robustmetric.report.verdict import RECALLS, listed

FULL, FEW = FASHION[3], FASHION[4]
"""The whole method at full length, with η = 32 and with few steps."""
RIVALS = ("ACT[R]", "EST[R]")
PARTS = {
    RIVALS[0]: "",
    "HM[R,M]": "hardness manipulation",
    "HM[S,M]": "softhard source triplets",
    "HM[S,LGA]": "the gradual adversary",
    HM: "intra-class structure",
}
"""The steps from ACT to the whole method, and what each adds."""
MEANINGS: dict[Kind, str] = {
    "reference": "scores by the reference protocol",
    "strict": "scores by the strict protocol, and the worst case",
    "small": f"scores with ε = {SMALL}/255",
    "small-strict": f"the worst case with ε = {SMALL}/255",
    "more-steps": "shift with more steps along gradients",
}
"""What the kinds of record hold, in a few words."""
PAPER = {"R@1": "R@1, paper, CUB", "ERS": "ERS, paper, CUB"}
"""The scores of the paper that differences stand beside, and the heads of their columns."""
RANKED = ("R@1", "R@2", "mAP", "NMI")
"""The scores without attacks."""
PRINTED = "#the-published-ers-on-fashion-mnist"
"""The section about the published ERS of the whole method."""
SLIP = 53.9
"""That ERS, if its first digit is a slip."""
UNMEASURED = "None of this has been measured yet."
ORDER = "R < M < S < D ≈ H"
"""The paper's order of the samplers by the hardness that they draw."""


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
    shown = [column.show(row.scores.get(name)) for name, column in SCORES.items()]
    source = f"published{' †' * row.joined}"
    title = Network(row.data, row.defense, row.steps).title
    return [title, source, *("–" if text == "-" else text for text in shown)]


def suite(networks: Sequence[Network]) -> str:
    """Return what the suite leaves of each goal, and in parentheses what was there before the attacks."""
    found = {
        n.label: r for n in networks if (r := record_of(n, "strict")) is not None and r.suite is not None
    }
    goals = list(dict.fromkeys(goal for record in found.values() for goal in record.suite.goals))  # type: ignore[union-attr]
    heads = [
        next(r.goal_column(goal).heading for r in found.values() if r.suite and goal in r.suite.goals)
        for goal in goals
    ]
    rows = []
    for label, record in found.items():
        cells = []
        for goal, score in record.suite.goals.items() if record.suite else ():
            show = record.goal_column(goal).show
            cells.append(f"{show(score.value)} ({show(score.before)})")
        rows.append([label, *cells])
    return table(["training", *heads], rows)


def small_suite(networks: Sequence[Network]) -> str:
    """Return what attacks of the smaller budget leave of R@1."""
    rows = []
    for network in networks:
        if (record := record_of(network, "small-strict")) is not None:
            under = [record.show(name) for name in RECALLS]
            rows.append([network.label, before(record), *under, LESS_WORST.show(network, interval=True)])
    heads = ["R@1 of these queries", "under ES", "under LTM", "under GTM", "worst case"]
    return table(["training", *heads], rows)


def before(record: Record) -> str:
    """Return R@1 of the attacked queries without an attack."""
    return "–" if record.suite is None else f"{record.suite.goals['misrank'].before:.1f}"


def steps(network: Network) -> int:
    """Return how many steps a training had."""
    return int(log_of(network)[-1]["step"])


def cheap() -> str:
    """Say whether few steps keep the score, and what they cost."""
    known = [
        (v, few, many) for v in CLAIMED if (few := v.of(FEW)) is not None and (many := v.of(FULL)) is not None
    ]
    if not known:
        return f"The training with η = 32 has no record yet, so η = {CHEAP} cannot be compared with it."
    sides: dict[bool, list[str]] = {True: [], False: []}
    for value, few, many in known:
        low, high = value.ends(FULL) or (many, many)
        keeps = few <= high if value.lower else few >= low
        if value.lower or max(few, many) >= 1:  # else nothing is left of either
            sides[keeps].append(f"*{value.title}* ({value.write(few)} and {value.write(many)})")
    costs = "; ".join(f"{n.label}: {images(n):,.0f}" for n in FASHION if n in measured())
    lines = [
        f"Does η = {CHEAP}, with larger steps, keep what η = 32 reaches? By one training each:\n",
        f"- not worse than the interval of η = 32: {', '.join(sides[True]) or 'nothing'};",
        f"- worse: {', '.join(sides[False]) or 'nothing'}.\n",
        f"{_terms()}Passes of an image through the network in a step of the training, forward and backward "
        f"ones added, on average: {costs}.",
    ]
    return "\n".join(lines)


def _terms() -> str:
    """Say which terms of the ERS differ most between few steps and many."""
    few, many = (record_of(network, "reference") for network in (FEW, FULL))
    if few is None or few.ers is None or many is None or many.ers is None:
        return ""
    pairs = {name: (few.ers.terms[name] or 0.0, many.ers.terms[name] or 0.0) for name in many.ers.terms}
    most = sorted(pairs, key=lambda name: -abs(pairs[name][0] - pairs[name][1]))[:3]
    shown = ", ".join(f"{name} {pairs[name][0]:.1f} and {pairs[name][1]:.1f}" for name in most)
    return f"The ERS is a mean; of its terms these differ most: {shown}. "


def images(network: Network, epochs: int | None = None) -> float:
    """Return the mean number of images forward and backward in logged steps, of the first `epochs` or all."""
    rows = [row for row in log_of(network) if row["images/forward"]]
    rows = [row for row in rows if epochs is None or int(row["epoch"]) < epochs]
    return fmean(float(row["images/forward"]) + float(row["images/backward"]) for row in rows)


def passes() -> str:
    """Say how many passes one to three epochs of the whole method take, and how many one of ACT."""
    epoch = steps(FEW) / FEW.epochs
    ours = [f"{images(FEW, n) * n * epoch / 1e6:.1f}" for n in (1, 2, 3)]
    act = next(n for n in CLAIM if n.defense == RIVALS[0])
    return (
        f"one, two and three of its epochs take {ours[0]}, {ours[1]} and {ours[2]} million passes of an "
        f"image, one of {RIVALS[0]} {images(act) * steps(act) / 1e6:.1f}"
    )


def claim() -> str:
    """Return each seed of the central claim, the differences, and what they say."""
    every = sorted((*CLAIM, *LONGER), key=lambda n: (n.epochs, n.defense, n.seed))
    those = [n for n in every if n in measured()]
    if not those:
        return UNMEASURED
    titles = [value.title for value in CLAIMED]
    each = [[n.defense, str(n.epochs), str(n.seed), *(v.show(n) for v in CLAIMED)] for n in those]
    differences, lines = [], []
    for ours in (CLAIM, LONGER):
        for other in RIVALS:
            found = against(other, ours)
            theirs = map(_signed, paper_change(other, HM).values()) if ours is CLAIM else "––"
            if any(found.values()):
                differences.append([f"{HM}, {ours[0].length} − {other}", *_shown(found), *theirs])
            if line := verdict(other, ours):
                lines.append(f"- {line}")
    parts = [
        table(["training", "epochs", "seed", *titles], each, left=3),
        table(["difference", *titles, *PAPER.values()], differences),
        "\n".join(lines),
    ]
    return "\n\n".join(parts)


def steps_between() -> str:
    """Return the means of the trainings from EST to the whole method, and what each costs."""
    rows = []
    every = (*CLAIM, *LONGER, *OTHERS)
    for name, epochs in dict.fromkeys((n.defense, n.epochs) for n in every):
        those = [n for n in every if (n.defense, n.epochs) == (name, epochs)]
        found = [[f for f in map(value.of, those) if f is not None] for value in CLAIMED]
        if any(found):
            cost = fmean(images(n) * steps(n) for n in those if n in measured()) / 1e6
            shown = (
                f"{value.write(fmean(f))} ({len(f)})" if f else "–"
                for value, f in zip(CLAIMED, found, strict=True)
            )
            rows.append([name, str(epochs), *shown, f"{cost:.1f}"])
    return table(["training", "epochs", *(value.title for value in CLAIMED), "million passes"], rows, left=2)


def parts() -> str:
    """Return what each step from ACT to the whole method adds, seed by seed and in the paper, and compare."""
    rows = []
    values = [value for value in CLAIMED if any(value.of(network) for network in OTHERS)]
    seeds = {name: [n for n in (*CLAIM, *OTHERS) if n.defense == name] for name in PARTS}
    ways: dict[Value, dict[str, list[str]]] = {RECALL: {}, ERS: {}}
    chain = [(PARTS[after], before, after) for before, after in pairwise(PARTS)]
    for what, before, after in (*chain, ("the whole method", RIVALS[0], HM)):
        found = {value: compare(value, seeds[after], seeds[before]) for value in values}
        if not any(found.values()):
            continue
        theirs = paper_change(before, after)
        rows.append([what, f"{before} → {after}", *_shown(found), *map(_signed, theirs.values())])
        for (value, groups), change in zip(ways.items(), theirs.values(), strict=True):
            if (ours := found.get(value)) is not None and ours.verdict:
                same = (ours.mean > 0) == (change > 0)
                sign = "has the sign of the paper" if same else "has the other sign"
                way = sign if ours.verdict in ("higher", "lower") else "is not clear"
                groups.setdefault(way, []).append(what)
    heads = ["what is added", "from, to", *(value.title for value in values)]
    said = [
        f"The change of {name} {'; '.join(f'{way} for {listed(those)}' for way, those in groups.items())}."
        for name, groups in zip(PAPER, ways.values(), strict=True)
        if groups
    ]
    whole = table([*heads, *PAPER.values()], rows, left=2)
    return "\n\n".join([whole, *([" ".join(said)] if said else [])])


def samplers() -> str:
    """Return Table 1: mean and variances of the hardness that each sampler draws, and the order of means."""
    found = [(one, hardness) for one in SAMPLERS if (hardness := hardness_of(one)) is not None]
    letters = list(dict.fromkeys(letter for _, hardness in found for letter in hardness))
    rows = []
    for one, hardness in found:
        means = [hardness[letter]["mean"] for letter in letters]
        order = _ordered({letter: hardness[letter]["mean"] for letter in letters if len(letter) == 1})
        rows.append([one.label, "E[H]", order, *(minus(f"{mean:.3f}") for mean in means)])
        for what, name in (("variance", "Var[H]"), ("variance_within", "Var[H] within batches")):
            rows.append([one.label, name, "", *(f"{hardness[letter][what]:.5f}" for letter in letters)])
    heads = ["network", "", "order of E[H]", *(DRAWN.get(letter, letter) for letter in letters)]
    others = [f"{row[0]} ({row[2]})" for row in rows if row[2] not in ("", ORDER)]
    said = f"The order is the paper's everywhere{' but ' + ', '.join(others) if others else ''}."
    return "\n\n".join([table(heads, rows, left=3), *([said] if rows else [])])


def _ordered(means: dict[str, float]) -> str:
    """Write names in the order of their means; those that are within a thousandth by ≈."""
    names = sorted(means, key=lambda name: means[name])
    signs = [" ≈ " if means[b] - means[a] < 0.001 else " < " for a, b in pairwise(names)]
    return names[0] + "".join(sign + name for sign, name in zip(signs, names[1:], strict=True))


def minus(text: str) -> str:
    """Return a text with its hyphens as minus signs."""
    return text.replace("-", "−")


def summary() -> str:
    """Say in a few lines what was found so far."""
    lines = []
    ours, theirs, small = record_of(FULL, "reference"), published_of(FULL), LESS.of(FULL)
    if ours is not None and theirs is not None and small is not None:
        printed = theirs.scores["ERS"]
        ranked = {name: (ours.show(name), theirs.scores[name]) for name in RANKED}
        shown = ", ".join(f"{name} {own} ({other:.1f})" for name, (own, other) in ranked.items())
        most = max(abs(float(own) - other) for own, other in ranked.values())
        lines.append(
            f"- **Reproduced?** {FULL.title}, after {FULL.length} on {FULL.data} (in parentheses the "
            f"published figures): {shown} are reproduced, within {most:.1f} points. The ERS is "
            f"{ours['ERS']:.1f} where {printed:.1f} is printed, [more than this network has without an "
            f"attack]({PRINTED}) if GTT is 0. Either {printed:.1f} is of ε = {SMALL}/255, where ours is "
            f"{small:.1f}, or one digit is wrong and it is {SLIP}: our attacks and RobRank's agree, and "
            "cannot tell which."
        )
    for networks in (FASHION, MNIST):
        told = []
        for network in networks:
            known = None if network == FULL else published_of(network)
            if known is not None and ERS.of(network) is not None:
                scores = f"{known.scores['R@1']:.1f} and {known.scores['ERS']:.1f}"
                told.append(f"{network.title}: {RECALL.show(network)} and {ERS.show(network)} ({scores})")
        if told:
            lines.append(
                f"- R@1 and ERS on {networks[0].data} after {networks[0].length} (in parentheses the "
                f"published ones, after {FULL.length}): {'; '.join(told)}."
            )
    lines.append(f"- **The central claim**: {answer()}")
    worst = [found for network in FASHION if (found := WORST.of(network)) is not None]
    left = [
        f"{LESS_WORST.show(network)} of {before(record)} ({network.title})"
        for network in FASHION
        if (record := record_of(network, "small-strict")) is not None
    ]
    if worst and left:
        lines.append(
            f"- **The worst case**: strong attacks with ε = {ATTACKED}/255 leave an R@1 of at most "
            f"{max(worst):.1f}; with {SMALL}/255 they leave {', '.join(left)}."
        )
    lines.append(
        f"- **Not known**: {len(missing())} of {planned()} measurements are "
        f"[not made yet](#not-measured-yet), and of the trainings of {FULL.length} there is one seed each."
    )
    return "\n".join(lines)


def answer() -> str:
    """Say whether the central claim holds, by how much, and what the paper has."""
    clauses, verdicts = [], set()
    for other in RIVALS:
        found, theirs = against(other, CLAIM), paper_change(other, HM)
        ours = [found[RECALL], found[ERS]]
        if any(difference is None for difference in ours):
            return UNMEASURED
        verdicts |= {difference.verdict for difference in ours if difference is not None}
        shown = [minus(difference.show()) for difference in ours if difference is not None]
        clauses.append(
            f"{other}: R@1 {shown[0]}, ERS {shown[1]} "
            f"(in the paper, on CUB: {' and '.join(map(_signed, theirs.values()))})"
        )
    short = (
        "it holds" if verdicts == {"higher"} else "it does not hold" if "lower" in verdicts else "undecided"
    )
    return (
        f"{short} on {CLAIM[0].data} with η = {CHEAP}, {CLAIM[0].length} and {len(SEEDS)} seeds. "
        f"{HM} compared with {'; with '.join(clauses)}."
    )


def paper_change(before: str, after: str) -> dict[str, float]:
    """Return by how much R@1 and ERS of two defenses differ in the paper, on CUB with the lower η."""
    those = {row.defense: row.scores for row in published() if (row.data, row.steps) == ("cub", CHEAP)}
    return {name: those[after][name] - those[before][name] for name in PAPER}


def _signed(change: float) -> str:
    return minus(f"{change:+.1f}")


def _shown(found: Mapping[Value, Difference | None]) -> list[str]:
    """Return differences as cells of a table; a dash stands for one that is not measured."""
    return ["–" if d is None else minus(d.show(value.digits)) for value, d in found.items()]


def against(other: str, ours: Sequence[Network]) -> dict[Value, Difference | None]:
    """Return by how much the whole method, among `ours`, is above another defense, seed by seed."""
    pairs = [n for n in ours if n.defense == HM], [n for n in CLAIM if n.defense == other]
    return {value: compare(value, *pairs) for value in CLAIMED}


def verdict(other: str, ours: Sequence[Network]) -> str:
    """Say where the whole method, among `ours`, is clearly better or worse than another defense."""
    groups: dict[str, list[str]] = {
        "better in": [],
        "worse in": [],
        "not clearly different in": [],
        "nothing is left of either in": [],
    }
    for value, found in against(other, ours).items():
        if found is not None and found.low == found.high == 0:
            groups["nothing is left of either in"].append(value.title)
        if found is None or not found.verdict:
            continue
        good = "lower" if value.lower else "higher"
        how = "not clearly different in" if found.verdict not in ("higher", "lower") else "worse in"
        groups["better in" if found.verdict == good else how].append(value.title)
    said = [
        f"{how} {', '.join(f'*{title}*' for title in titles)}" for how, titles in groups.items() if titles
    ]
    cost = f"η = {CHEAP}, {len(SEEDS)} seeds on {ours[0].data}, {ours[0].length}"
    cost += " each" if ours is CLAIM else f" against {CLAIM[0].length}"
    return f"{HM} against {other}, {cost}: {'; '.join(said)}." if said else ""


def unmeasured() -> str:
    """List what is not made yet, seeds and kinds of record together."""
    if not (lacks := missing()):
        return f"Nothing: all {planned()} measurements are made."
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for lack in lacks:
        groups.setdefault((lack.where, lack.what), {}).setdefault(lack.kind, []).append(lack.seed)
    lines = []
    for (where, what), kinds in groups.items():
        each = [
            kind + (f" (seed{'s' * (len(seeds) > 1)} {', '.join(seeds)})" if seeds[0] else "")
            for kind, seeds in kinds.items()
        ]
        lines.append(f"- {where}, {what}{': ' if any(each) else ''}{'; '.join(each)}")
    shown = {lack.kind for lack in lacks}
    legend = "; ".join(f"*{kind}*: {what}" for kind, what in MEANINGS.items() if kind in shown)
    return "\n".join([f"{len(lacks)} of {planned()} measurements ({legend}):", *lines])


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
                scores = [record.show(score).replace("-", "–") for score in ("R@1", "ERS")]
                goals = {} if record.suite is None else record.suite.goals
                worst = f"{goals['misrank'].value:.1f}" if "misrank" in goals else "–"
                rows.append(
                    [f"`{name}`", f"`{command}`", record.settings.protocol, eps_of(record), *scores, worst]
                )
    return table(["record", "command", "protocol", "ε", "R@1", "ERS", "R@1, worst case"], rows, left=4)


def measurements() -> str:
    """List each measurement of Table 1 with its command."""
    found = [one for one in SAMPLERS if hardness_of(one) is not None]
    rows = [[f"`{one.name}`", f"`{written(one.reproduce())}`"] for one in found]
    return table(["measurement of Table 1", "command"], rows, left=2)
