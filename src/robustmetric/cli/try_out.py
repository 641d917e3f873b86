"""Try an attack by hand."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import typer

from robustmetric.app.serve import check_port, serve
from robustmetric.app.trial import MOST_STEPS, SECONDS, Trial
from robustmetric.attacks import ATTACKS
from robustmetric.cli.app import app, stoppable
from robustmetric.cli.options import Tested, takes
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import Request
from robustmetric.cli.terminal import wide
from robustmetric.data import load
from robustmetric.errors import UserError
from robustmetric.training.folder import Which


@app.command("app")
@takes("attacks", "eps", "alpha", "steps", "seed", "batch", attacks=",".join(ATTACKS))
def try_out(
    tested: Tested,
    settings: dict[str, object],
    *,
    beside: Path | None = typer.Option(
        None, help="Folder of another run: its network is attacked beside the first, on the same images."
    ),
    port: int = typer.Option(7860, help="Port of this machine that the page is shown at."),
    seconds: float = typer.Option(SECONDS, help="Longest time that an attack on a query may take."),
    open_: bool = typer.Option(False, "--open", help="Open the page in a browser."),
) -> None:
    """Try an attack by hand on a page in the browser, and watch the ranking change step by step."""
    console = wide()
    if find_spec("gradio") is None:
        raise UserError("the app needs gradio: pip install 'robustmetric[app]'")
    if seconds <= 0:
        raise UserError(f"seconds must be more than 0, not {seconds:g}", parameter="seconds")
    check_port(port)
    settings = {**settings, "checks": "none"}
    first = Request.of(tested, settings)
    requests = [first] if beside is None else [first, _second(first, tested, settings, beside)]
    plan = first.plan()
    budget = plan.threat.budget
    if budget.steps > MOST_STEPS:
        raise UserError(f"steps must be at most {MOST_STEPS} here, not {budget.steps}", parameter="steps")
    with stoppable(console, "the same command starts it again"), ExitStack() as stack:
        networks = [request.networks() for request in requests]
        with Progress(console) as watch:
            images = first.images(watch)
        evaluations = []
        for request, made in zip(requests, networks, strict=True):
            with Progress(console) as watch:
                evaluation = request.evaluation(made, images, progress=watch)
                evaluation.probe()
                stack.enter_context(evaluation.subject.frozen())
                evaluation.embed()
            evaluations.append(evaluation)
        names = _names(requests, tested, beside)
        trial = Trial(
            evaluations[0].subject.data,
            {name: one.view for name, one in zip(names, evaluations, strict=True)},
            plan.attacks,
            alpha=budget.alpha,
            seed=plan.threat.seed,
            seconds=seconds,
            fit=first.inputs.fit,
        )
        serve(
            trial,
            eps=budget.eps,
            steps=budget.steps,
            port=port,
            show=open_,
            ready=lambda address: console.print(
                f"the page is at {address}, for this machine alone; Ctrl-C stops it", highlight=False
            ),
        )


def _second(first: Request, tested: Tested, settings: dict[str, object], beside: Path) -> Request:
    """Return the request for another run on the images of the first; both must take them alike."""
    weights = tested.weights if tested.weights in get_args(Which) else None
    other = Request.of(replace(tested, run=beside, model=None, dim=None, weights=weights), settings)
    other = replace(other, queries=first.queries, gallery=first.gallery, data=first.data)
    queries = load(first.queries.data, first.queries.root, first.queries.split)
    told = []
    for request in (first, other):
        inputs = request.inputs
        channels = inputs.first(queries).pixels.shape[3]
        fit = "" if inputs.fit == "squeeze" else f" by {inputs.fit}"
        told.append(f"resize {inputs.resize}{fit}, crop {inputs.crop}, {'grey' if channels == 1 else 'RGB'}")
    if told[0] != told[1]:
        raise UserError(
            f"side by side two networks must take the same images: {first.name} takes {told[0]} and "
            f"{other.name} takes {told[1]}; give a --resize, --crop and --fit for both, or another run",
            parameter="beside",
        )
    return other


def _names(requests: list[Request], tested: Tested, beside: Path | None) -> list[str]:
    """Return a name for each network; those of the same name get their folder's too."""
    names = [request.name for request in requests]
    if len(set(names)) == len(names):
        return names
    folders = [tested.run or tested.weights or tested.model, beside]
    numbered = [f"{name} ({folder})" for name, folder in zip(names, folders, strict=True)]
    return (
        numbered
        if len(set(numbered)) == len(numbered)
        else [f"{name} {k}" for k, name in enumerate(names, 1)]
    )
