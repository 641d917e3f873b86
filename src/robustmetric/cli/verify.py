"""Verify pairs of images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from robustmetric.cli import options
from robustmetric.cli.app import app
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import Request, Tested, takes
from robustmetric.cli.show import interval, show_weights
from robustmetric.cli.terminal import Terminal
from robustmetric.data.pair_lists import PairList, read_pairs
from robustmetric.data.pairs import ImageArray
from robustmetric.errors import UserError
from robustmetric.evaluation import Verification, Verifying, VerifyPlan
from robustmetric.evaluation.data import Data
from robustmetric.evaluation.intervals import Score
from robustmetric.evaluation.job import open_folder
from robustmetric.evaluation.verified import FEW, FORMAT
from robustmetric.evaluation.verify_pairs import SHARED
from robustmetric.report.records import data_of
from robustmetric.training.folder import RunFolder
from robustmetric.training.sets import load_sets


@app.command()
@takes(VerifyPlan, "count", "far", "threshold", *SHARED)
def verify(
    tested: Tested,
    settings: dict[str, Any],
    *,
    pairs: Annotated[
        Path | None,
        options.option(options.IMAGES, "Pairs: lines of two files and 1 or 0, or LFW's pairs.txt."),
    ] = None,
    skip_attack: options.SkipAttack = False,
    out: Annotated[Path | None, options.out("Folder of the result; RUN/verification by default.")] = None,
) -> None:
    """Decide whether pairs of images are of one class, also under attack.

    The same command resumes what was stopped.
    """
    request = Request.of(tested, {name: value for name, value in settings.items() if name in SHARED})
    plan = VerifyPlan.make(**settings | dict(request.settings), attack=not skip_attack)
    out = tested.folder(out, "verification")
    listed = None
    if pairs is not None:
        if tested.gallery or tested.queries_from:
            raise UserError("pairs name their images: leave --gallery and --queries-from out")
        listed = read_pairs(pairs, tested.root)
        request = replace(request, data=pairs.name, inputs=_inputs_of_any(request))
    finished, console = open_folder(FORMAT, out, plan), Terminal()
    with Progress(console) as progress:
        gradient = plan.attack and plan.threat.search.follows_gradient
        first = None if listed is None else request.inputs.first(listed.images)
        networks = request.networks(tried=finished, gradient=gradient, first=first)
        given, images = _images(request, listed, progress)
        validation = _validation(request, images, progress) if plan.threshold is None else None
        subject = request.subject(networks, images)
        found = Verifying(subject, plan, given, validation, out, progress, progress.say).run()
    show_verification(console, found)
    console.say(f"the verification is in {out}")


def _inputs_of_any(request: Request) -> Any:
    """Return what the network takes of any image, also where its run resizes none: its size."""
    inputs, tested = request.inputs, request.tested
    if tested.run is None or inputs.resize is not None or inputs.crop is not None:
        return inputs
    return replace(inputs, resize=RunFolder(tested.run, trust=tested.trust).shape()[1])


def _images(request: Request, listed: PairList | None, progress: Progress) -> tuple[Tensor | None, Data]:
    """Load the images of the request, or those of a list of pairs with the pairs that could be read."""
    if listed is None:
        return None, request.images(progress)
    pixels = request.inputs.pixels(listed.images, **request.reading(progress))
    return listed.among(pixels.files or ()), request.data_of([pixels], [listed.images.root], progress)


def _validation(request: Request, judged: Data, progress: Progress) -> Data | None:
    """Return the validation images of a run where its own test images are judged, unless they are too few."""
    tested, inputs = request.tested, request.inputs
    elsewhere = (tested.data, tested.root, tested.gallery, tested.queries_from)
    if tested.run is None or tested.split != "test" or any(given is not None for given in elsewhere):
        return None  # other images: what was chosen for the run's may not suit them
    recipe = RunFolder(tested.run, trust=tested.trust).recipe()
    if not recipe.validation:
        return None
    sizes = {"resize": inputs.resize, "crop": inputs.crop, "fit": inputs.fit}
    try:
        sets = load_sets(recipe.model_copy(update=sizes), **request.reading(progress))
    except (UserError, OSError) as error:
        raise UserError(
            f"the validation images of the run, which choose the threshold, cannot be read ({error}): give "
            "the threshold, or the --root of the images, of which half of the classes choose it then",
            parameter="threshold",
        ) from None
    source, rows = sets.score.source, sets.score.rows
    classes, others = (len(labels.unique()) for labels in (source.labels[rows], judged.labels))
    # A threshold of two or three classes would be that of these.
    if sets.scored != "validation images" or classes < min(FEW, others // 2):
        return None
    cameras = None if source.cameras is None else source.cameras[rows]
    return Data(ImageArray(source.pixels, inputs.crop, rows), source.labels[rows], cameras=cameras)


def show_verification(console: Terminal, found: Verification) -> None:
    """Print TAR and FAR at the threshold, a row for each condition, and TAR at some FAR."""
    console.say(f"{found.network.name}: {found.headline[0]}")
    for line in found.headline[1:]:
        console.say(line)
    rows = [
        [name, *(f"{_value(s)}\n{interval(s)}" for s in (rates.tar, rates.far, rates.auc, rates.eer))]
        for name, rates in found.conditions.items()
    ]
    console.table(["", "TAR ↑", "FAR ↓", "AUC ↑", "EER ↓"], rows)
    console.say("TAR at a FAR, with thresholds read off the judged pairs themselves:")
    rows = []
    for point in found.points:
        cells = [f"{100 * point.far:g} %", "-", "-", "-"]
        if point.tar is not None:
            cells[1:] = [f"{point.threshold:.4f}", _value(point.tar), interval(point.tar)]
        rows.append([*cells, *("-" if v is None else f"{v:.1f}" for v in (point.evaded, point.impersonated))])
    heads = ["FAR ≤", "distance", "TAR ↑", "95 %", "TAR evaded ↑", "FAR impersonated ↓"]
    shown = len(heads) if found.both is not None else 4
    console.table(heads[:shown], [cells[:shown] for cells in rows])
    pairs = found.pairs
    console.say(
        f"{pairs.same:,} same and {pairs.different:,} different pairs of {pairs.images:,} images of "
        f"{pairs.classes:,} classes, {pairs.source}; {data_of(found)}"
    )
    for line in (*(point.why for point in found.points if point.why), *found.notes):
        console.say(line)
    show_weights(console, found)


def _value(score: Score) -> str:
    return "-" if score.value is None else f"{score.value:.1f}"
