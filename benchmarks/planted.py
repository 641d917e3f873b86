"""Which share of planted adversaries the attacks of the protocol find, and which the worst-case suite.

    python -m benchmarks.planted

prints a Markdown table, in seconds on one core. A row is a kind of network, of
`tests/helpers/planted.py`, in which every query has an image in the ball that breaks its R@1, hidden in
another way. The attacks of the protocol take 32 steps of an eighth of ε; they know no Euclidean ball.
"""

from __future__ import annotations

from robustmetric.evaluation import Plan, evaluate
from tests.helpers.planted import KINDS, Plant, plant

COLUMNS = {"ES": "ES:R", "LTM": "LTM", "GTM": "GTM"}
SUITE = "worst-case(goals='misrank')"


def by_protocol(planted: Plant) -> list[str]:
    """Return which share each attack of the protocol finds, in %."""
    if planted.norm != "linf":
        return ["–"] * len(COLUMNS)
    plan = Plan.make(eps=planted.eps, alpha=planted.eps / 8, steps=32, attacks=[*COLUMNS], checks="none")
    record = evaluate(planted.network, planted.images, planted.labels, plan=plan)
    return [f"{record['R@1'] - record[name]:.0f}" for name in COLUMNS.values()]


def by_suite(planted: Plant) -> str:
    """Return which share the suite finds, in %."""
    beside = {"steps": 1, "attacks": ["TMA"], "search": "apgd", "checks": "none"}  # counts for nothing
    plan = Plan.make(eps=planted.eps, norm=planted.norm, suite=SUITE, **beside)
    record = evaluate(planted.network, planted.images, planted.labels, plan=plan)
    assert record.suite is not None
    score = record.suite.goals["misrank"]
    assert score.before is not None
    assert score.alone is not None
    return f"{score.before - score.alone:.0f}"


def main() -> None:
    """Print the table."""
    print(f"| kind | {' | '.join(COLUMNS)} | suite |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for kind in KINDS:
        planted = plant(kind)
        print(f"| {kind} | {' | '.join([*by_protocol(planted), by_suite(planted)])} |", flush=True)


if __name__ == "__main__":
    main()
