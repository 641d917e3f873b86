"""What a report says in words: what scores, attacks and checks mean, and how to repeat an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

import yaml

from robustmetric.data import DATA
from robustmetric.evaluation import Record, Settings
from robustmetric.text import command_line
from robustmetric.usercode import file_of, split_options, without_folder

TEMPLATES = Path(__file__).parent / "templates"
_MEANINGS: Mapping[str, Mapping[str, str]] = yaml.safe_load(
    (TEMPLATES / "meanings.yaml").read_text(encoding="utf-8")
)
COLUMN_MEANINGS, CHECK_MEANINGS = _MEANINGS["columns"], _MEANINGS["checks"]
"""What each score is, and what a warning or a failure of each check means, in a line."""


def aim(attack: str) -> str:
    """Return what an `attack` wants, by its name; nothing of one that is not known.

    >>> aim("GTT"), aim("mine.py:Mine")
    ('drive the target, its nearest image, out of the first four', '')
    """
    return _MEANINGS["attacks"].get(attack.partition("(")[0], "")


def goal_meaning(goal: str) -> str:
    """Return what the number of a `goal` of the suite is, by its name; nothing of one that is not known.

    >>> goal_meaning("shift"), goal_meaning("mine")
    ('distance that the embedding moves; 2 at most', '')
    """
    name, _, options = goal.partition("(")
    ranked = "; a gallery image is perturbed" if "candidate" in options else ""
    known = _MEANINGS["goals"].get(name)
    return f"{known}{ranked}" if known else ""


def command(record: Record, run: str | None = None, data: str | None = None) -> str:
    """Return the command that evaluates as a `record` was.

    `run` is the folder of the network's run, `data` what that was trained on. A word in capitals stands for
    what a record does not say.
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
