"""What a report says in words: the verdict, what a check's warning means, how to cite, and the command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from robustmetric.evaluation import Plan, Record
from robustmetric.report.records import data_of, eps_of

COLUMN_MEANINGS: Mapping[str, str] = {
    "CA+": "the attacker brings an image to the front of a random query's ranking; its rank, 0 is first",
    "CA-": "the attacker drives an image out of the ranking of a query near to it; its rank",
    "QA+": "the attacker makes a query rank a random image first; that image's rank, 0 is first",
    "QA-": "the attacker makes a query rank an image near to it last; that image's rank",
    "TMA": "the attacker makes an image look like a random other one; the cosine of the two",
    "ES:D": "the attacker moves an embedding away from where it was; the distance, 2 at most",
    "ES:R": "R@1 of queries whose embedding was moved away from where it was",
    "LTM": "R@1 of queries whose nearest images shall be of other classes",
    "GTM": "R@1 of queries that the nearest image of another class shall come before",
    "GTT": "how often the first image stays among the first four",
    "R@1": "how often the first image is of the query's class",
    "R@2": "how often one of the first two images is of the query's class",
    "mAP": "how far in front the images of the query's class stand, on average",
    "NMI": "how well clusters of the embeddings agree with the classes",
    "mAP@R": "the same as mAP, counted among as many images as the class has",
    "ERS": "the Empirical Robustness Score: the mean of the ten terms, 100 where no attack moves anything",
}
"""What each score is, in a line."""

CHECK_MEANINGS: Mapping[str, str] = {
    "collapse": "All images look alike to the network: the ERS is not valid. Train again.",
    "mode": "The network switches itself to training mode: take that out of its code.",
    "repeat": "Dropout or noise is on, so that no score repeats: switch it off.",
    "seed": "The network or the device is not deterministic: the scores cannot be reproduced.",
    "batch-1": "A layer mixes the images of a batch, as BatchNorm in training mode does.",
    "gradient": "The network hides its gradient from the attack, so that the scores are too good: attack "
    "with --search nes as well.",
    "budget": "A search leaves the budget: the scores are too bad. Project its result.",
    "eps-0": "A score changes without an attack: it depends on something else than the embedding.",
    "one-step": "A single step does more harm than all steps: the steps are too large or too few, and the "
    "scores are too good.",
    "last": "The descent jumps to and fro, and the attack is weaker than it could be: use "
    "--search 'pgd(best=True)'.",
    "noise": "Random noise does as much as the attack for some queries: it is stuck there, and the scores "
    "are too good.",
    "8-bit": "Perturbed images lose their effect when they are saved as files: say that they were not "
    "rounded.",
    "masked": "Attacks without gradients break what those with gradients left: gradients are masked, and the "
    "scores with PGD are too good. Use the worst case.",
    "copies": "The same image is there several times, which makes R@1 too easy or impossible: remove copies.",
    "classes": "The network was trained on these classes: right for digits, a leak for unseen classes.",
    "eps-1": "Anything is allowed, and still the attack fails: gradients are masked, the scores too good.",
    "eps-sweep": "The network is better under a stronger attack: gradients are masked, the scores too good.",
    "steps": "Twice as many steps do more harm: the attack has not converged, and the scores are too good.",
    "black-box": "Attacks that know less do more harm: gradients are masked, and the scores too good.",
    "transfer": "Perturbations from another network do more harm: gradients are masked, the scores too good.",
}
"""What a warning or a failure of each check means, and what to do about it."""


def verdict(named: Mapping[str, Record]) -> tuple[str, str]:
    """Return what `named` records come to, in two sentences: how robust, and how far to trust that."""
    first = _alone(*next(iter(named.items()))) if len(named) == 1 else _beside(named)
    return first, _trust(named)


def _alone(name: str, record: Record) -> str:
    told = f"{name} finds an image of the right class first for {record.show('R@1')} % of its queries"
    kept = _kept(record)
    if kept is not None:
        told += f", and for {kept:.1f} % of them when an attacker may change {_may_change(record)}"
    if record.ers is not None:
        told += f"{': ' if kept is not None else ', with '}ERS {_with_interval(record)} of 100"
    return f"{told}."


def _beside(named: Mapping[str, Record]) -> str:
    scored = sorted(
        ((name, record) for name, record in named.items() if record.ers is not None),
        key=lambda pair: -pair[1]["ERS"],
    )
    if len(scored) < 2:
        rest = "; ".join(f"{name} {record.show('R@1')} %" for name, record in named.items())
        return f"The share of queries that find an image of the right class first: {rest}."
    (best, top), (second, next_best) = scored[0], scored[1]
    told = (
        f"ERS {_with_interval(top)} at R@1 {top.show('R@1')}, against ERS {_with_interval(next_best)} at R@1 "
        f"{next_best.show('R@1')} of {second}"
    )
    low, high = (top.ers and top.ers.low) or 0.0, (next_best.ers and next_best.ers.high) or 100.0
    if low <= high:
        return f"{best} and {second} are not told apart by the intervals of their scores: {told}."
    return f"Of {len(named)} networks {best} keeps its ranking best under attack: {told}."


def _trust(named: Mapping[str, Record]) -> str:
    invalid = [(n, r.ers.why) for n, r in named.items() if r.ers is not None and not r.ers.valid]
    if invalid:
        return f"The ERS of {invalid[0][0]} is not valid: {invalid[0][1].rstrip('.')}."
    for status, advice in (("fail", "Do not trust these scores"), ("warn", "Read these scores with care")):
        found: dict[str, list[str]] = {}
        for name, record in named.items():
            for check in (check for check in record.checks if check.status == status):
                found.setdefault(check.name, []).append(name)
        told = [
            check if len(names) == len(named) else f"{check} (of {', '.join(names)})"
            for check, names in found.items()
        ]
        if told:
            which = f"the check {told[0]}" if len(told) == 1 else f"the checks {', '.join(told)}"
            word = "failed" if status == "fail" else "warns" if len(told) == 1 else "warn"
            return f"{advice}: {which} {word}."
    run = [check for record in named.values() for check in record.checks if check.status != "not run"]
    if len(run) <= len(named):  # the collapse alone is looked for in any case
        return "No checks were run, so that nothing says how far to trust these scores."
    return f"All {len(run)} checks of whether to trust these scores passed."


def _kept(record: Record) -> float | None:
    """Return R@1 under the strongest attack that was run, in %."""
    known = [record[name] for name in ("ES:R", "LTM", "GTM") if name in record.scores]
    if record.suite is not None:
        known += [record[name] for name in record.suite.goals if name == "misrank"]
    return min(known, default=None)


def _may_change(record: Record) -> str:
    if record.settings.norm == "linf":
        return f"each pixel by up to {eps_of(record)}"
    return f"an image by a length of up to {record.settings.eps:.4g}"


def _with_interval(record: Record) -> str:
    if record.ers is None or record.ers.low is None or record.ers.high is None:
        return record.show("ERS")
    return f"{record.show('ERS')} ({record.ers.low:.1f} to {record.ers.high:.1f})"


def facts(record: Record) -> list[tuple[str, str]]:
    """Return what was tested in a `record`, and how, as pairs of a name and a text."""
    network, data, how, asked = record.network, record.data, record.settings, record.queries
    told = [
        ("network", f"{network.name}, {network.parameters:,} parameters"),
        ("weights", network.weights or "it is not known how they were chosen"),
        ("network SHA-256", network.sha256),
        ("data", f"{data_of(record)}, {data.images:,} images of {data.classes:,} classes"),
        ("data SHA-256", data.sha256),
    ]
    if data.gallery is not None:
        told.append(("gallery", f"{data.gallery:,} images of its own"))
    if data.cameras:
        told.append(("cameras", "images of a query's class and camera do not count"))
    if data.skipped:
        told.append(("left out", f"{len(data.skipped):,} files that cannot be read"))
    told += [
        ("protocol", how.protocol),
        ("budget", f"ε = {eps_of(record)}, α = {255 * how.alpha:.4g}/255, {how.steps} steps"),
        ("search", how.search + ("" if network.surrogate is None else " with a surrogate")),
        ("attacks", ", ".join(how.attacks)),
        ("suite", how.suite),
        ("queries", f"{asked.count:,} of {asked.of:,} images, drawn from the seed {how.seed}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
    ]
    return told


def command(record: Record, run: str | None = None) -> str:
    """Return the command that evaluates as a `record` was; `run` is the folder of the network's run.

    >>> command.__name__
    'command'
    """
    how, usual = record.settings, Plan.model_fields
    words = ["robustmetric", "evaluate", run or "RUN"]
    if run is None:
        words += ["--data", record.data.name]
    for name in usual:
        value = getattr(how, name)
        if name != "eps" and value == usual[name].default:
            continue
        words += [f"--{name}", _written(name, value, how.norm)]
    return shlex.join(words)


def _written(name: str, value: object, norm: str) -> str:
    if name == "attacks":
        return ",".join(str(attack) for attack in value)  # type: ignore[attr-defined]
    if isinstance(value, float) and (name == "alpha" or norm == "linf"):
        levels = round(255 * value, 6)
        return f"{levels:g}/255" if abs(levels / 255 - value) < 1e-12 else repr(value)
    return str(value)


def citation(name: str, record: Record) -> str:
    """Return a sentence to cite the result of a `record` by, which calls its network `name`."""
    how, asked = record.settings, record.queries
    ers = f", ERS {_with_interval(record)}" if record.ers is not None else ""
    software = ", ".join(f"{package} {version}" for package, version in record.versions.items())
    return (
        f"{name} on {data_of(record)}: R@1 {record.show('R@1')}{ers}; {asked.count} of {asked.of} images "
        f"attacked, seed {how.seed}, {how.protocol} protocol, ε = {eps_of(record)}, "
        f"α = {255 * how.alpha:.4g}/255, {how.steps} steps, {how.search}; {software}; network SHA-256 "
        f"{record.network.sha256}, data SHA-256 {record.data.sha256}."
    )
