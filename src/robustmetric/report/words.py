"""What a report says in words: what scores, attacks and checks mean, what was tested, how to do it again."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from robustmetric.data import DATA
from robustmetric.evaluation import Record, Settings
from robustmetric.evaluation.ers import ERS_ATTACKS
from robustmetric.report.records import alpha_of, data_of, eps_of
from robustmetric.report.verdict import with_interval
from robustmetric.text import command_line
from robustmetric.usercode import file_of, split_options, without_folder

COLUMN_MEANINGS: Mapping[str, str] = {
    "CA+": "rank of an image that the attacker wants first for a random query",
    "CA-": "rank of an image that the attacker wants last for a query near it",
    "QA+": "rank of a random image that the attacker wants first for a query",
    "QA-": "rank of an image near a query that the attacker wants last for it",
    "TMA": "cosine of an image and a random other one that the attacker wants it near",
    "ES:D": "how far embeddings were moved away from where they were; 2 at most",
    "ES:R": "R@1 of queries whose embedding was moved away from where it was",
    "LTM": "R@1 of queries whose nearest images the attacker wants to be of other classes",
    "GTM": "R@1 of queries that the attacker wants to find the nearest image of another class first",
    "GTT": "how often the first image stays among the first four",
    "R@1": "how often the first image is of the query's class",
    "R@2": "how often one of the first two images is of the query's class",
    "mAP": "how far in front the images of the query's class stand, on average",
    "NMI": "how well clusters of the embeddings agree with the classes",
    "mAP@R": "the same as mAP, counted among as many images as the class has",
    "ERS": "the mean of the ten as points: 100 where no attack moves anything",
}
"""What each score is, in a line."""

AIMS: Mapping[str, str] = {
    "CA+": "this image is to come to the front of the target's ranking",
    "CA-": "this image is to go to the end of the target's ranking",
    "QA+": "the target is to come to the front of this image's ranking",
    "QA-": "the target is to go to the end of this image's ranking",
    "SP-QA+": "the target is to come to the front of this image's ranking, and the first images stay there",
    "SP-QA-": "the target is to go to the end of this image's ranking, and the first images stay there",
    "TMA": "this image is to look to the network like the target",
    "ES": "this image is to look to the network like anything else than itself",
    "LTM": "images of other classes are to be nearer than all of its own",
    "GTM": "the target, the nearest image of another class, is to come before all of its own",
    "GTT": "the target, its nearest image, is to leave the first four",
}
"""What each attack wants, by its name without options."""

GOAL_MEANINGS: Mapping[str, str] = {
    "misrank": "R@1 that is left where the attacker wants an image of another class in front",
    "translocate": "how often the first image stays in front, of the first four unless k says otherwise",
    "promote": "how often a random image comes to the front, of the first four unless k says otherwise",
    "demote": "how often a near image leaves the nearest 1 %, or the first k",
    "shift": "how far the embedding moves, 2 at most",
}
"""What the number of each goal of the suite is, by its name without options."""

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
    "last": "The descent oscillates, and the attack is weaker than it could be: use "
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


def aim(attack: str) -> str:
    """Return what an `attack` wants, by its name; nothing of one that is not known.

    >>> aim("GTT"), aim("mine.py:Mine")
    ('the target, its nearest image, is to leave the first four', '')
    """
    return AIMS.get(attack.partition("(")[0], "")


def goal_meaning(goal: str) -> str:
    """Return what the number of a `goal` of the suite is, by its name; nothing of one that is not known.

    >>> goal_meaning("shift"), goal_meaning("mine")
    ('how far the embedding moves, 2 at most', '')
    """
    name, _, options = goal.partition("(")
    ranked = "; a gallery image is perturbed" if "candidate" in options else ""
    return f"{GOAL_MEANINGS[name]}{ranked}" if name in GOAL_MEANINGS else ""


def facts(record: Record) -> list[tuple[str, str]]:
    """Return what was tested in a `record`, and how, as pairs of a name and a text."""
    network, data, how, asked = record.network, record.data, record.settings, record.queries
    told = [
        ("network", f"{network.name}, {network.parameters:,} parameters"),
        ("weights", network.weights or "it is not known how they were chosen"),
        ("network SHA-256", network.sha256),
    ]
    if network.surrogate is not None:
        told.append(("surrogate SHA-256", network.surrogate))
    told += [
        ("data", f"{data_of(record)}, {data.images:,} images of {data.classes:,} classes"),
        ("data SHA-256", data.sha256),
    ]
    if data.gallery is not None:
        told.append(("gallery", f"{data.gallery:,} images of its own"))
    if data.cameras:
        told.append(("cameras", "images of a query's class and camera do not count"))
    if data.skipped:
        told.append(("left out", f"{len(data.skipped):,} files that cannot be read"))
    if asked.left_out:
        told.append(("without an answer", f"{asked.left_out:,} queries, which are not in R@1, R@2 and mAP"))
    drawn = f"{asked.count:,} of {asked.of:,} images, drawn from the seed {how.seed}"
    told += [
        ("queries", f"all {asked.of:,} images, seed {how.seed}" if asked.count == asked.of else drawn),
        ("protocol", how.protocol),
        ("budget", f"ε = {eps_of(record)}, α = {alpha_of(record)}, {how.steps} steps"),
        ("search", how.search + ("" if network.surrogate is None else " with a surrogate")),
        ("attacks", ", ".join(how.attacks)),
        ("suite", how.suite),
        ("checks", how.checks),
        ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
    ]
    return told


def command(record: Record, run: str | None = None, data: str | None = None) -> str:
    """Return the command that evaluates as a `record` was.

    `run` is the folder of the network's run, `data` what that was trained on. A word in capitals stands for
    what a record does not say.

    >>> command.__name__
    'command'
    """
    how, usual = record.settings, Settings.model_fields
    words = ["robustmetric", "evaluate", run or "RUN"]
    name = record.data.name.removesuffix(" (all)")
    if run is None or (data is not None and without_folder(data) != name):
        known = split_options(name)[0] in DATA or file_of(name) is not None
        words += ["--data", name if known else "DATA"]
    if name != record.data.name:
        words += ["--split", "all"]
    if record.network.surrogate is not None:
        words += ["--surrogate", "SURROGATE"]
    for field in usual:
        value = getattr(how, field)
        if field == "eps" or value != usual[field].default:
            words += [f"--{field}", _written(value, levels=how.norm == "linf")]
    return command_line(words)


def _written(value: object, *, levels: bool) -> str:
    """Write a setting as an option takes it; what is a number of levels of 255 is written as such."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if not isinstance(value, float):
        return str(value)
    whole = f"{round(255 * value, 6):f}".rstrip("0").rstrip(".")
    # The option is read as a quotient, and as no power of ten.
    return f"{whole}/255" if levels and float(whole) / 255 == value else f"{Decimal(repr(value)):f}"


def citation(name: str, record: Record) -> str:
    """Return a sentence to cite the result of a `record` by, which calls its network `name`."""
    how, asked = record.settings, record.queries
    ers = f", ERS {with_interval(record)}" if record.ers is not None else ""
    ers += " (not valid)" if record.ers is not None and not record.ers.valid else ""
    software = ", ".join(f"{package} {version}" for package, version in record.versions.items())
    attacks = "" if how.attacks == ERS_ATTACKS else f"attacks {', '.join(how.attacks)}, "
    suite = "" if how.suite == "none" else f", {how.suite}"
    return (
        f"{name} on {data_of(record)}: R@1 {record.show('R@1')}{ers}; {asked.count} of {asked.of} images "
        f"attacked, seed {how.seed}, {how.protocol} protocol, {attacks}ε = {eps_of(record)}, "
        f"α = {alpha_of(record)}, {how.steps} steps, {how.search}{suite}; {software}; network SHA-256 "
        f"{record.network.sha256}, data SHA-256 {record.data.sha256}."
    )
