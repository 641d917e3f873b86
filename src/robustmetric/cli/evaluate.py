"""Evaluate networks."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import typer

from robustmetric.cli.app import app, stoppable
from robustmetric.cli.options import Tested, takes
from robustmetric.cli.request import Request
from robustmetric.cli.show import Watch, show_checks, show_scores
from robustmetric.cli.terminal import Terminal, styled, wide
from robustmetric.evaluation import Plan
from robustmetric.evaluation.store import Store, check_folder
from robustmetric.evaluation.workers import run_workers
from robustmetric.files import check_writable
from robustmetric.training.runs import RunFolder
from robustmetric.validate import UserError


@app.command()
@takes(*Plan.model_fields)
def evaluate(
    tested: Tested,
    settings: dict[str, object],
    *,
    devices: int = typer.Option(1, help="Workers that share the queries."),
    out: Path | None = typer.Option(None, help="Folder of the record; by default RUN/evaluation."),
) -> None:
    """Score how well a network ranks, and how well it keeps its ranking under attack.

    Ctrl-C or SIGTERM stops it; the same command goes on from there.
    """
    console = wide()
    if devices < 1:
        raise UserError(f"devices must be at least 1, not {devices}", parameter="devices")
    request = Request.of(tested, settings)
    if out is None:
        if tested.run is None:
            raise UserError("say where the record goes: give a folder", parameter="out")
        out = RunFolder(tested.run).evaluation
    check_folder(out, {"settings": request.plan().model_dump(mode="json")})
    finished = Store(out).finished
    if not finished:
        check_writable(out)
    with stoppable(console, "what is finished is kept: the same command goes on from there"):
        networks = request.networks(tried=finished)
        images = request.images(console)
        if request.source.weights is None:
            console.print("no weights were given: the network is as it is made", highlight=False)
        with Watch(console) as watch:
            evaluation = request.evaluation(networks, images, out, watch, watch.say)

            def help_out() -> None:
                run_workers(work, (request, out), devices, evaluation.tell)

            record = evaluation.run(help_out if devices > 1 else None)
    show_checks(console, record)
    show_scores(console, [record])
    if failed := [check.name for check in record.checks if check.status == "fail"]:
        console.print(styled(("do not trust these scores:", "bold red"), f" {', '.join(failed)} failed"))
    console.print(f"the record is in {out}")


def work(request: Request, out: Path, share: int, shares: int) -> None:
    """Do a worker's share of an evaluation."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // shares))
    networks = request.networks(share, tried=True)
    request.evaluation(networks, request.images(), out, report=Terminal().print).work(share, shares)
