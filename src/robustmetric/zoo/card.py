"""The model card of a published network: what it is, how it was made, what was measured, what that means."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from safetensors import safe_open

from robustmetric import __version__
from robustmetric.attacks import Column
from robustmetric.evaluation import Record
from robustmetric.evaluation.record import Score
from robustmetric.exports.product import describe
from robustmetric.report.records import data_of
from robustmetric.report.sheet import markdown_row, marked_down
from robustmetric.report.verdict import listed
from robustmetric.report.words import CHECK_MEANINGS, COLUMN_MEANINGS, citation, command, goal_meaning
from robustmetric.text import command_line, one_line
from robustmetric.training.code import bare, named_files
from robustmetric.training.parts import perturbs
from robustmetric.training.recipe import Recipe
from robustmetric.training.runs import RunFolder
from robustmetric.zoo.entries import ZooRun, label_of, licence_of
from robustmetric.zoo.front import conditions, front_matter, images_of
from robustmetric.zoo.summary import headline, trust

_SHOWN = (
    "data", "model", "weights", "dim", "freeze_bn", "defense", "reference", "eps", "alpha", "steps", "margin",
    "epochs", "batch", "lr", "schedule", "warmup", "clip", "weight_decay", "resize", "fit", "crop", "flip",
    "zoom", "jitter", "validation", "precision", "seed",
)  # fmt: skip
"""The entries of a recipe that say what the network became; the others say where and how often."""
_OF_ATTACKS = ("eps", "alpha", "steps")
_IF_ANY = {"fit": "squeeze", "jitter": 0}  # not shown while they are so
_FEW = 500  # queries, below which an interval is wide
_FEW_CLASSES = 20  # so that chance alone ranks some images right

PAPER = """@inproceedings{zhou2022enhancing,
  title     = {Enhancing Adversarial Robustness for Deep Metric Learning},
  author    = {Zhou, Mo and Patel, Vishal M.},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  pages     = {15325--15334},
  year      = {2022}
}"""


def model_card(run: ZooRun, dim: int, about: Mapping[str, Any]) -> str:
    """Return the model card of a published network, as Markdown with a front matter for Hugging Face.

    `run` is the network in its folder, with the records to show; `dim` is the length of its vectors, and
    `about` the content of its run.json.
    """
    steps = label_of(run.recipe).steps
    eta = "" if steps is None else f", η = {steps}"
    body = [
        f"# {marked_down(f'{run.name} on {images_of(run.recipe.data)}{eta}')}",
        *_what(run, dim, licence_of(about)),
        *_use(run, dim),
        *_data(about),
        *_training(run, about),
        *_scores(run),
        *_worst(run),
        *_checks(run),
        *_limits(run),
        *_citation(run),
    ]
    front = front_matter(f"{run.name}{eta}", run.recipe.data, licence_of(about), run.records)
    return front + "\n".join(body) + "\n"


def is_half(run: ZooRun) -> bool:
    """Return whether the weights in the folder of a `run` are in half precision."""
    with safe_open(RunFolder(run.folder).weights().file, framework="pt") as file:
        return any(file.get_slice(name).get_dtype() == "F16" for name in file.keys())  # noqa: SIM118


def _what(run: ZooRun, dim: int, licence: str | None) -> Iterator[str]:
    recipe = run.recipe
    channels, size = RunFolder(run.folder).shape()
    colours = "colour" if channels == 3 else "grey"
    parameters = sum(p.numel() for p in run.network.parameters())
    yield (
        f"An embedding network for image retrieval: it maps a {colours} image of {size}×{size} pixels to a "
        f"vector of {dim:,} numbers and of length 1, and similar images have nearby vectors. It has "
        f"{parameters:,} parameters, in {'half' if is_half(run) else 'single'} precision in the file."
    )
    if perturbs(recipe):
        yield (
            f"It was trained with the defense {marked_down(label_of(recipe).defense)} against perturbations "
            f"of at most ε = {_level(recipe.eps)} a pixel, so that they change its ranking less."
        )
    else:
        yield (
            f"It was trained as {marked_down(label_of(recipe).defense)}, without a defense: it is here to "
            "compare with, and anybody who can change an image can change its ranking."
        )
    yield ""
    yield (
        "**Intended use**: research on robust retrieval, and a starting point for networks of your own. It "
        "is made for images like those that it was trained on. Before you rely on it, measure it on images "
        "of your own: `robustmetric evaluate FOLDER --data folder --root IMAGES --out scores`."
    )
    yield ""
    yield (
        f"**Licence**: {marked_down(licence)}."
        if licence
        else "**Licence**: none is stated; ask who gave you this folder."
    )
    yield ""


def _use(run: ZooRun, dim: int) -> Iterator[str]:
    own = bool(named_files(run.recipe.model_dump()))
    trust = ", trust=True" if own else ""
    yield "## Use it"
    yield f"With robustmetric {__version__} or later; `FOLDER` is the one that holds this file."
    yield from ("```python", "import robustmetric as rm", "", f'run = rm.load_run("FOLDER"{trust})')
    yield 'vectors = run.embed(["a.png", "b.png"])  # (2, D), of length 1'
    name = one_line(json.dumps(str(label_of(run.recipe)), ensure_ascii=False))
    yield f'run = rm.load_zoo({name}, folder="ZOO"{trust})  # if FOLDER is ZOO/*/*'
    yield "```"
    if own:
        yield "The folder `code` holds Python files that are run: read them before you trust them."
    yield from ("", f"**Preprocessing**: {_preprocessing(run, dim)}", "")
    yield f"The SHA-256 of the network, `run.digest`, is `{run.digest}`."
    yield ""


def _preprocessing(run: ZooRun, dim: int) -> str:
    """Return how an image becomes what the network takes."""
    told, crop = describe(run, dim), run.inputs.crop
    channels, size = told["channels"], crop or run.inputs.resize
    steps = [*told["before"]]
    if crop is not None and run.inputs.resize is not None:
        steps.append(f"take the middle {crop} x {crop}")
    return (
        f"the network takes floats (N, {channels}, {size}, {size}) from 0 to 1, {told['colours']}. `embed` "
        f"makes them from image files: {'; '.join([*steps, 'divide by 255'])}. Tensors it takes as they are."
    )


def _data(about: Mapping[str, Any]) -> Iterator[str]:
    yield "## Data"
    origin = about.get("origin")
    images = origin.get("images") if isinstance(origin, dict) else None
    known = {k: v for k, v in images.items() if isinstance(v, dict)} if isinstance(images, dict) else {}
    if known:
        yield from _table(
            ("images", "number", "classes", "SHA-256 of the labels", "SHA-256 of the pixels"),
            [
                (name, *(_text(of.get(k)) for k in ("count", "classes", "labels", "pixels")))
                for name, of in known.items()
            ],
        )
    else:
        yield "The run did not write down which images it was trained on."
    skipped = about.get("skipped")
    if isinstance(skipped, list) and skipped:
        were = (
            "1 image could not be read and was"
            if len(skipped) == 1
            else (f"{len(skipped):,} images could not be read and were")
        )
        yield f"\n{were} left out."
    yield ""


def _training(run: ZooRun, about: Mapping[str, Any]) -> Iterator[str]:
    recipe, fields = run.recipe, Recipe.model_fields
    entries = bare(recipe.model_dump(mode="json"))
    yield "## Training"
    chosen = (run.chosen or "").removesuffix(" weights")
    rows = [("weights", f"best, {chosen}" if "chosen" in chosen else chosen, "which were published")]
    for key in _SHOWN:
        if entries[key] in (None, _IF_ANY.get(key)):
            continue
        if perturbs(recipe) or key not in _OF_ATTACKS:
            shown = _level(entries[key]) if key in ("eps", "alpha") else _text(entries[key])
            name = "first weights" if key == "weights" else key
            rows.append((name, shown, str(fields[key].description)))
    yield from _table(("entry", "value", "meaning"), rows)
    yield ""
    starts = about.get("starts")
    starts = [one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else []
    if starts and isinstance(starts[0].get("command"), list):
        told = "" if len(starts) == 1 else f", which was started {len(starts)} times"
        yield f"The command{told}, with files and folders by their names alone:"
        yield from ("```sh", one_line(command_line(["robustmetric", *map(str, starts[0]["command"])])), "```")
    if starts:
        versions = [f"{key} {value}" for key, value in starts[-1].items() if key != "command"]
        yield f"Made with {marked_down(', '.join(versions))}."
    yield ""


def _scores(run: ZooRun) -> Iterator[str]:
    yield "## Scores"
    if not run.records:
        yield "Nothing has been measured of these weights yet. To do so:"
        yield from ("```sh", _evaluate(run, ["robustmetric", "evaluate", "FOLDER"]), "```", "")
        return
    yield (
        "A 95 % interval is over the queries. Arrows point to where a score is better; *clean* is the "
        "same without an attack."
    )
    yield ""
    for folder, record in run.records.items():
        data = record.data
        yield f"### {marked_down(folder)}"
        yield (
            f"{marked_down(data_of(record))}, {data.images:,} images of {data.classes:,} classes"
            f"{'' if data.gallery is None else f', ranked among {data.gallery:,} others'}; "
            f"{marked_down(conditions(record))}. SHA-256 of the images: {marked_down(data.sha256)}."
        )
        for sentence in (headline(run.name, folder, run.records), trust(run.name, record)):
            yield f"\n{marked_down(sentence)}"
        yield ""
        yield from _table(
            ("score", "value", "95 % interval", "clean", "unit", "meaning"),
            [_score(record, name) for name in record.columns()],
        )
        yield ""
        yield from (
            "```sh",
            _evaluate(run, shlex.split(command(record, "FOLDER", run.recipe.data))),
            "```",
            "",
        )


def _score(record: Record, name: str) -> tuple[str, ...]:
    column = record.column(name)
    found = record.ers if name == "ERS" else {**record.retrieval, **record.scores}[name]
    clean = column.show(found.before) if isinstance(found, Score) and name in record.scores else ""
    invalid = " (not valid)" if name == "ERS" and record.ers is not None and not record.ers.valid else ""
    shown = column.show(found.value if found else None) + invalid
    unit, meaning = column.unit.name, COLUMN_MEANINGS.get(name, "")
    return column.heading, shown, _interval(column, found), clean, unit, meaning


def _worst(run: ZooRun) -> Iterator[str]:
    yield "## Worst case"
    measured = {folder: record for folder, record in run.records.items() if record.suite is not None}
    if not measured:
        yield (
            "It has not been measured. The attacks behind the ERS are weak ones: strong attacks may leave "
            "nothing of R@1. To measure it:"
        )
        words = ["robustmetric", "evaluate", "FOLDER", "--suite", "worst-case"]
        yield from ("```sh", _evaluate(run, words), "```", "")
        return
    yield "The worst that an ensemble of strong attacks left of each query."
    yield ""
    for folder, record in measured.items():
        yield f"### {marked_down(folder)}: worst case"
        yield f"{marked_down(conditions(record))}."
        yield ""
        goals = record.suite.goals if record.suite is not None else {}
        rows = []
        for goal, worst in goals.items():
            column = record.goal_column(goal)
            rows.append(
                (column.heading, column.show(worst.value), _interval(column, worst),
                 column.show(worst.before), column.unit.name, f"{worst.queries:,}", goal_meaning(goal))
            )  # fmt: skip
        yield from _table(("goal", "value", "95 % interval", "clean", "unit", "queries", "meaning"), rows)
        yield ""


def _checks(run: ZooRun) -> Iterator[str]:
    """Yield the checks that warn or fail; where only collapse was checked, the scores say so."""
    rows = [
        (folder, check.name, check.status, check.says, CHECK_MEANINGS.get(check.name, ""))
        for folder, record in run.records.items()
        for check in record.checks
        if check.status in ("warn", "fail")
    ]
    checked = [folder for folder, record in run.records.items() if not record.unchecked]
    if not rows and not checked:
        return
    yield "## Checks"
    if rows:
        yield "Checks of whether the scores can be trusted; these warn or fail:"
        yield ""
        yield from _table(("record", "check", "status", "what was found", "what that means"), rows)
    else:
        of = "" if len(checked) == len(run.records) else f" of {marked_down(listed(checked))}"
        yield f"No check of whether the scores{of} can be trusted warns or fails."
    yield ""


def _limits(run: ZooRun) -> Iterator[str]:
    records = run.records
    yield "## Limits"
    yield (
        "- The ERS is a mean over weak attacks. It compares networks under these attacks; it is no bound on "
        "what an attacker can do. docs/limits.md of robustmetric says what else the scores do not tell."
    )
    yield (
        "- Attacks know the weights and the gallery, and keep to the ε above. Other changes of an image, "
        "such as patches, rotation or another camera, were not tested."
    )
    yield (
        f"- It is one training, with the seed {run.recipe.seed}. Intervals say how far scores depend on the "
        "queries, not on the seed."
    )
    if run.chosen is not None and "test images" in run.chosen:
        yield "- The weights were chosen on the test images: their R@1 is too high by what that gains."
    if is_half(run):
        told = "; all scores here are of the rounded weights" if records else ", which moves scores a little"
        yield f"- The weights are rounded to half precision{told}."
    if reference := [name for name, record in records.items() if record.settings.protocol == "reference"]:
        follow, their = ("follows", "its") if len(reference) == 1 else ("follow", "their")
        yield (
            f"- {marked_down(listed(reference))} {follow} the protocol `reference`: {their} figures compare "
            "with published ones, and with no others."
        )
    if few := [f"{name} {r.queries.count:,}" for name, r in records.items() if r.queries.count < _FEW]:
        yield f"- Few images were attacked ({marked_down(listed(few))}): look at the intervals."
    classes = min((record.data.classes for record in records.values()), default=_FEW_CLASSES)
    if classes < _FEW_CLASSES:
        chance = f"{100 / classes:.0f} %"
        yield f"- The test images are of {classes} classes: chance finds the right one for some {chance}."
    yield ""


def _citation(run: ZooRun) -> Iterator[str]:
    yield "## Citation"
    yield "The method:"
    yield from ("```bibtex", PAPER, "```")
    yield f"The software: robustmetric {__version__}, by the robustmetric authors."
    for record in run.records.values():
        yield f"\n{marked_down(citation(run.name, record))}"


def _evaluate(run: ZooRun, words: Sequence[str]) -> str:
    """Return a command that evaluates, with where the images are: a published folder does not say."""
    root = [] if run.recipe.data == "digits" else ["--root", "DIR"]
    return one_line(command_line([*words, *root, "--out", "scores"]))


def _interval(column: Column, found: object) -> str:
    """Return the interval of a score, if it has one."""
    low, high = getattr(found, "low", None), getattr(found, "high", None)
    return "" if low is None or high is None else f"{column.show(low)} to {column.show(high)}"


def _level(value: float) -> str:
    return f"{255 * value:.10g}/255"


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield markdown_row(heads)
    yield f"|{'---|' * len(heads)}"
    yield from map(markdown_row, rows)
