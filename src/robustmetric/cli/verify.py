"""Verify pairs of images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from robustmetric.cli.app import app, stoppable
from robustmetric.cli.options import Tested, takes
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import Request
from robustmetric.cli.terminal import styled, wide
from robustmetric.data.inputs import Inputs, relative_files
from robustmetric.data.pair_lists import PairList, read_pairs
from robustmetric.data.pairs import ImageArray
from robustmetric.errors import UserError, fraction
from robustmetric.evaluation import Verification, Verifying, VerifyPlan
from robustmetric.evaluation.data import Data, data_by_marks
from robustmetric.evaluation.intervals import Score
from robustmetric.evaluation.job import open_folder
from robustmetric.evaluation.verified import FEW, FORMAT
from robustmetric.evaluation.verify_pairs import FAR, SHARED
from robustmetric.report.records import data_of
from robustmetric.training.folder import RunFolder
from robustmetric.training.sets import load_sets


@app.command()
@takes(*SHARED)
def verify(
    tested: Tested,
    settings: dict[str, object],
    *,
    pairs: Path | None = typer.Option(
        None, help="Pairs to judge: lines of two files and 1 or 0, or LFW's pairs.txt; by default drawn."
    ),
    count: int = typer.Option(
        VerifyPlan.model_fields["count"].default, help="Number of pairs that are drawn, half of them same."
    ),
    far: str | None = typer.Option(
        None, help=f"FAR that the threshold is chosen for, on pairs not judged; {FAR} by default."
    ),
    threshold: str | None = typer.Option(
        None, help="Distance up to which a pair is same, in [0, 2], instead of a chosen one."
    ),
    attack: bool = typer.Option(True, help="Attack the first image of each pair."),
    out: Path | None = typer.Option(None, help="Folder of what is found; by default RUN/verification."),
) -> None:
    """Judge whether pairs of images are of one class, by a threshold, and under attack.

    Ctrl-C or SIGTERM stops it; the same command resumes.
    """
    console = wide()
    request = Request.of(tested, settings)
    plan = VerifyPlan.make(
        **{name: request.settings[name] for name in SHARED if name in request.settings},
        count=count,
        far=fraction(far),
        threshold=fraction(threshold),
        attack=attack,
    )
    if out is None:
        if tested.run is None:
            raise UserError("say where the verification goes: give a folder", parameter="out")
        out = RunFolder(tested.run).path / "verification"
    if pairs is not None and (tested.gallery or tested.queries_from):
        raise UserError("pairs say which images there are: leave --gallery and --queries-from out")
    finished = open_folder(FORMAT, out, plan)
    listed = None if pairs is None else read_pairs(pairs, tested.root)
    if listed is not None and pairs is not None:
        request = replace(request, data=pairs.name, inputs=_inputs(tested, request))
    with stoppable(console, "what is finished is kept: the same command resumes"), Progress(console) as watch:
        gradient = attack and plan.threat.search.follows_gradient
        first = None if listed is None else request.inputs.first(listed.images)
        networks = request.networks(tried=finished, gradient=gradient, first=first)
        if listed is None:
            given, images = None, request.images(watch)
        else:
            given, images = _listed(request, listed, watch)
        validation = None
        if plan.threshold is None:
            validation = _validation(tested, request, images, watch)
        if request.source.weights is None:
            watch.say("no weights were given: the network is as it is made")
        subject = request.subject(networks, images)
        found = Verifying(subject, plan, given, validation, out, watch, watch.say).run()
    show_verification(console, found)
    console.print(f"the verification is in {out}")


def _reading(request: Request, progress: Progress) -> dict[str, Any]:
    """Return what a reader of images is told."""
    return {
        "cache": request.cache,
        "skip_broken": request.skip_broken,
        "watch": progress.decoding,
        "report": progress.say,
    }


def _inputs(tested: Tested, request: Request) -> Inputs:
    """Return what the network takes of any image, also where its run resizes none: its size."""
    inputs = request.inputs
    if tested.run is None or inputs.resize is not None or inputs.crop is not None:
        return inputs
    return replace(inputs, resize=RunFolder(tested.run, trust=tested.trust).shape()[1])


def _listed(request: Request, listed: PairList, progress: Progress) -> tuple[Tensor, Data]:
    """Decode the images of a list of pairs; return the pairs with those that could be read."""
    pixels = request.inputs.pixels(listed.images, **_reading(request, progress))
    skipped = [str(file) for file in pixels.skipped]
    for file in skipped:
        progress.say(f"left out, not readable: {file}")
    files = relative_files(pixels, listed.images.root)
    data = data_by_marks(pixels, request.inputs.crop, files)
    return listed.among(pixels.files or ()), request.named(data, skipped)


def _validation(tested: Tested, request: Request, judged: Data, progress: Progress) -> Data | None:
    """Return the validation images of a run where its own test images are judged, unless they are too few."""
    if tested.run is None or tested.split != "test":
        return None
    if any(given is not None for given in (tested.data, tested.root, tested.gallery, tested.queries_from)):
        return None  # other images: what was chosen for the run's may not suit them
    recipe = RunFolder(tested.run, trust=tested.trust).recipe()
    if not recipe.validation:
        return None
    inputs = request.inputs
    sizes = {"resize": inputs.resize, "crop": inputs.crop, "fit": inputs.fit}
    try:
        sets = load_sets(recipe.model_copy(update=sizes), **_reading(request, progress))
    except (UserError, OSError) as error:
        raise UserError(
            f"the threshold is chosen on the validation images of the run, which cannot be read ({error}): "
            "give it, or the --root of the images to judge, of which half of the classes choose it then",
            parameter="threshold",
        ) from None
    source, rows = sets.score.source, sets.score.rows
    classes, others = (len(labels.unique()) for labels in (source.labels[rows], judged.labels))
    # A threshold of two or three classes would be that of these.
    if sets.scored != "validation images" or classes < min(FEW, others // 2):
        return None
    cameras = None if source.cameras is None else source.cameras[rows]
    images = ImageArray(source.pixels, request.inputs.crop, rows)
    return Data(images, source.labels[rows], cameras=cameras)


def show_verification(console: Console, found: Verification) -> None:
    """Print TAR and FAR at the threshold, a line for each condition, TAR at some FAR, and what to mind."""

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)

    for line in (f"{found.network.name}: {found.headline[0]}", *found.headline[1:]):
        say(line)
    table = Table("", "TAR ↑", "FAR ↓", "AUC ↑", "EER ↓")
    for name, rates in found.conditions.items():
        scores = (rates.tar, rates.far, rates.auc, rates.eer)
        table.add_row(name, *(f"{_value(score)}\n{_interval(score)}" for score in scores))
    console.print(table)
    attacked = found.both is not None
    headings = ["FAR ≤", "distance", "TAR ↑", "95 %"]
    say("TAR at a FAR, with thresholds read off the judged pairs themselves:")
    points = Table(*headings, *(["TAR evaded ↑", "FAR impersonated ↓"] if attacked else []))
    for point in found.points:
        cells = [f"{100 * point.far:g} %", "-", "-", "-"]
        if point.tar is not None:
            cells[1:] = [f"{point.threshold:.4f}", _value(point.tar), _interval(point.tar)]
        if attacked:
            cells += ["-" if v is None else f"{v:.1f}" for v in (point.evaded, point.impersonated)]
        points.add_row(*cells)
    console.print(points)
    pairs = found.pairs
    say(
        f"{pairs.same:,} same and {pairs.different:,} different pairs of {pairs.images:,} images of "
        f"{pairs.classes:,} classes, {pairs.source}; {data_of(found)}"
    )
    for line in (*(point.why for point in found.points if point.why), *found.notes):
        say(line)
    if found.network.weights == "chosen on test images":
        careful = " these images chose the weights, so the scores are better than on others"
        console.print(styled(("careful:", "yellow"), careful))


def _value(score: Score) -> str:
    return "-" if score.value is None else f"{score.value:.1f}"


def _interval(score: Score) -> str:
    """Show an interval in nine letters at most."""
    ends = ("-" if end is None else f"{end:.1f}" for end in (score.low, score.high))
    return "–".join(end.replace("100.0", "100") for end in ends)
