"""Evaluate networks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch
import typer

from robustmetric.cli.app import app, stoppable
from robustmetric.cli.options import ADDRESS, ON, Tested, check_engine, takes
from robustmetric.cli.request import Request
from robustmetric.cli.show import Watch, show_checks, show_scores
from robustmetric.cli.terminal import Terminal, styled, wide
from robustmetric.cli.worst import show_suite
from robustmetric.cluster import connect
from robustmetric.errors import UserError
from robustmetric.evaluation import Settings, load_arrays
from robustmetric.evaluation.job import open_folder
from robustmetric.evaluation.record import FORMAT
from robustmetric.files import save
from robustmetric.locks import claimed
from robustmetric.report.curves import make_curves
from robustmetric.report.page import make_page
from robustmetric.report.pictures import make_pictures
from robustmetric.training.runs import RunFolder
from robustmetric.workers import run_workers


@app.command()
@takes(*Settings.model_fields, transfers=True)
def evaluate(
    tested: Tested,
    settings: dict[str, object],
    *,
    devices: int = typer.Option(1, help="Workers that share the queries."),
    on: str = ON,
    address: str | None = ADDRESS,
    out: Path | None = typer.Option(None, help="Folder of the record; by default RUN/evaluation."),
    report: Path | None = typer.Option(
        None, help="Write a page of HTML with the scores and with pictures of attacks to this file."
    ),
    curves: bool = typer.Option(
        False, "--curves", help="Score against ε and against steps as well, for the page."
    ),
    force: bool = typer.Option(False, "--force", help="Overwrite the page if it is there."),
) -> None:
    """Score how well a network ranks, and how well it keeps its ranking under attack.

    Ctrl-C or SIGTERM stops it; the same command resumes.
    """
    console = wide()
    if devices < 1:
        raise UserError(f"devices must be at least 1, not {devices}", parameter="devices")
    check_engine(on, address)
    if report is None and (curves or force):
        raise UserError(f"{'curves go' if curves else 'force goes'} with a page: give --report FILE")
    request = Request.of(tested, settings)
    if out is None:
        if tested.run is None:
            raise UserError("say where the record goes: give a folder", parameter="out")
        out = RunFolder(tested.run).evaluation
    finished = open_folder(FORMAT, out, request.plan().settings)
    with ExitStack() as leaving:
        leaving.enter_context(stoppable(console, "what is finished is kept: the same command resumes"))
        if report is not None:
            leaving.enter_context(claimed(report, "a report", force=force))
        cluster, gpus = None, 0
        if on == "ray" and not finished:
            cluster = leaving.enter_context(connect(address))
            gpus = int(tested.device != "cpu" and any(node.gpus for node in cluster.nodes))
            cluster.check_room(devices, 1, gpus)
            cluster.check_folder(out)
        networks = request.networks(tried=finished)
        images = request.images(console)
        if request.source.weights is None:
            console.print("no weights were given: the network is as it is made", highlight=False)
        with Watch(console) as watch:
            evaluation = request.evaluation(networks, images, out, watch, watch.say)
            watch.expect(evaluation.costs)

            def help_out() -> None:
                if cluster is None:
                    threads = max(1, (os.cpu_count() or 1) // devices)
                    run_workers(work, (request, out, threads), devices, evaluation.tell)
                else:
                    cpus = cluster.threads(devices, gpus)
                    cluster.run_together(
                        work, (request, out, cpus), devices, cpus=cpus, gpus=gpus, tick=evaluation.tell
                    )

            record = evaluation.run(help_out if devices > 1 or cluster is not None else None)
            if report is not None:
                again = request.evaluation(networks, images)
                make_pictures(again, record, load_arrays(out), out, watch)
                if curves:
                    make_curves(evaluation.subject, evaluation.plan, out, watch, watch.say)
        if report is not None:
            save(report, make_page([out], console.print))
    show_checks(console, record)
    show_scores(console, [record])
    show_suite(console, [record])
    if failed := [check.name for check in record.checks if check.status == "fail"]:
        console.print(styled(("do not trust these scores:", "bold red"), f" {', '.join(failed)} failed"))
    console.print(f"the record is in {out}")
    if report is not None:
        console.print(f"the report is {report}")


def work(request: Request, out: Path, threads: int, share: int, shares: int) -> None:
    """Do a worker's share of an evaluation, with so many threads."""
    torch.set_num_threads(threads)
    networks = request.networks(share, tried=True)
    request.evaluation(networks, request.images(), out, report=Terminal().print).work(share, shares)
