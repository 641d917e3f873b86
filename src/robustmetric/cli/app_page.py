"""Try an attack by hand."""

from __future__ import annotations

from typing import Annotated, Any

from robustmetric.app import MOST_STEPS, Trial, check_port, load_gradio, serve
from robustmetric.cli import options
from robustmetric.cli.app import app
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import Request, Tested, takes
from robustmetric.cli.terminal import Terminal
from robustmetric.errors import whole
from robustmetric.evaluation import Settings


@app.command("app")
@takes(Settings, "eps", "alpha", "steps", "seed", "batch")
def app_page(
    tested: Tested,
    settings: dict[str, Any],
    *,
    name: options.AttackName = "ES",
    port: Annotated[int, options.option(options.OUTPUT, "Port of the page on this machine.")] = 7860,
    browser: Annotated[bool, options.option(options.OUTPUT, "Open the page in a browser.", "--open")] = False,
) -> None:
    """Try an attack by hand on a page in the browser."""
    check_port(port)
    load_gradio()
    whole("steps", settings["steps"], 1, MOST_STEPS)
    request, console = Request.of(tested, {**settings, "attacks": [name], "checks": "none"}), Terminal()
    with Progress(console) as progress:
        networks = request.networks()
        evaluation = request.evaluation(networks, request.images(progress), None, progress)
    evaluation.probe()
    with evaluation.subject.frozen():
        evaluation.embed()
        trial = Trial(evaluation.view, evaluation.subject.data, evaluation.plan.threat, name)
        serve(trial, port, console.say, browser=browser)
