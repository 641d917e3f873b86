"""The front matter of a model card: what Hugging Face reads of it, as YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from robustmetric.attacks import Column
from robustmetric.data import DATA
from robustmetric.evaluation import Record
from robustmetric.report.records import alpha_of, eps_of
from robustmetric.text import one_line
from robustmetric.usercode import file_of, split_options, without_folder

TASK = "image-feature-extraction"
"""What the network does, in the words of Hugging Face."""
TAGS = ("metric-learning", "image-retrieval", "adversarial-robustness", "pytorch", "safetensors")
METRICS = {
    "R@1": "recall_at_1",
    "R@2": "recall_at_2",
    "mAP": "mean_average_precision",
    "NMI": "normalized_mutual_information",
    "ERS": "empirical_robustness_score",
}
"""The scores that stand in the front matter beside the worst case, and their identifiers."""
_OWN = {"folder": "images of a folder", "csv": "images of a CSV file"}
"""Images of the user's own: no data sets that others know by a name."""


def is_known(data: str) -> bool:
    """Return whether the name of a data set means the same `data` to everybody.

    >>> is_known("digits"), is_known("folder"), is_known("mine.py:birds")
    (True, False, False)
    """
    name = split_options(data)[0]
    return name in DATA and name not in _OWN


def images_of(data: str) -> str:
    """Return what to call `data`: the name of a data set, or what images of the user's own come from.

    >>> images_of("digits"), images_of("folder"), images_of("code/mine.py:birds")
    ('digits', 'images of a folder', 'images of mine.py:birds')
    """
    name = without_folder(data)
    return f"images of {name}" if file_of(data) is not None else _OWN.get(split_options(name)[0], name)


def front_matter(name: str, data: str, licence: str | None, records: Mapping[str, Record]) -> str:
    """Return the front matter of a network with this `name` that was trained on `data`, with its marks.

    `licence` is its identifier, if one is stated; `records` are those of the network, by name.

    >>> print(front_matter("c2f2 N/A[S]", "digits", "mit", {}))
    ---
    license: mit
    library_name: robustmetric
    pipeline_tag: image-feature-extraction
    tags:
    - metric-learning
    - image-retrieval
    - adversarial-robustness
    - pytorch
    - safetensors
    datasets:
    - digits
    ---
    <BLANKLINE>
    """
    results = [_result(folder, record) for folder, record in records.items()]
    kinds = dict.fromkeys(metric["type"] for result in results for metric in result["metrics"])
    content: dict[str, Any] = {
        **({} if licence is None else {"license": one_line(licence)}),
        "library_name": "robustmetric",
        "pipeline_tag": TASK,
        "tags": [*TAGS],
        **({"datasets": [one_line(data)]} if is_known(data) else {}),
    }
    if results:
        content["metrics"] = [*kinds]
        content["model-index"] = [{"name": one_line(name), "results": results}]
    text = yaml.safe_dump(content, allow_unicode=True, sort_keys=False, width=math.inf)
    return f"---\n{text}---\n"


def conditions(record: Record) -> str:
    """Return what the scores of a `record` were measured under, in a line."""
    how, asked = record.settings, record.queries
    suite = "" if how.suite == "none" else f", {how.suite}"
    return one_line(
        f"{how.protocol} protocol, ε = {eps_of(record)}, α = {alpha_of(record)}, {how.steps} steps, "
        f"{how.search}{suite}, {asked.count:,} of {asked.of:,} images attacked, seed {how.seed}"
    )


def _result(folder: str, record: Record) -> dict[str, Any]:
    """Return what a record says, as an entry of the model index, which must have a type of the images."""
    name = record.data.name.removesuffix(" (all)")
    called, shape = one_line(images_of(name)), record.data.shape
    return {
        "task": {"type": TASK, "name": "Image retrieval"},
        "dataset": {
            "type": called,
            "name": f"{called} {shape[1]}×{shape[2]}" if is_known(name) else called,
            "config": one_line(folder),
            "split": "test" if name == record.data.name else "all",
            "args": {
                "images": record.data.images,
                "classes": record.data.classes,
                "sha256": one_line(record.data.sha256),
            },
        },
        "metrics": list(_metrics(record)),
    }


def _metrics(record: Record) -> Iterator[dict[str, Any]]:
    """Yield the scores of a record; one that is not known, or not valid, is left out."""
    for name, kind in METRICS.items():
        found = record.ers if name == "ERS" else record.retrieval.get(name)
        if found is None or (record.ers is found and not record.ers.valid):
            continue
        yield from _metric(kind, name, found, record.column(name), record)
    for goal, worst in record.suite.goals.items() if record.suite is not None else ():
        kind = f"worst_case_{re.sub('[^a-z0-9]+', '_', goal.lower()).strip('_')}"
        yield from _metric(kind, f"worst case of {goal}", worst, record.goal_column(goal), record)


def _metric(kind: str, name: str, found: Any, column: Column, record: Record) -> Iterator[dict[str, Any]]:
    """Yield a score that was found, with one digit more than tables show of its column."""
    if found.value is None or math.isnan(found.value):
        return
    value, low, high = (
        None if one is None else round(one, column.unit.digits + 1)
        for one in (found.value, found.low, found.high)
    )
    failed = [check.name for check in record.checks if check.status == "fail"]
    told = f"; checks that failed: {', '.join(failed)}" if failed else ""
    known = low is not None and high is not None
    yield {
        "type": kind,
        "name": one_line(f"{name} ({record.settings.protocol})"),
        "value": value,
        "config": conditions(record) + one_line(told),
        **({"args": {"low": low, "high": high, "interval": "95 %"}} if known else {}),
    }
