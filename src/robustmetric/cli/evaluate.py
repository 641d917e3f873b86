"""Evaluate networks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch
import typer

from robustmetric.cli.app import app, stoppable
from robustmetric.cli.options import ADDRESS, ON, Tested, check_engine, takes
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import Request
from robustmetric.cli.show import show_checks, show_scores
from robustmetric.cli.terminal import Terminal, styled, wide
from robustmetric.cli.worst import show_suite
from robustmetric.cluster import connect
from robustmetric.errors import UserError
from robustmetric.evaluation import Evaluation, Record, Settings, load_arrays
from robustmetric.evaluation.job import open_folder
from robustmetric.evaluation.record import FORMAT
from robustmetric.report.curves import make_curves
from robustmetric.report.gallery import images_of
from robustmetric.report.page import check_page, write_report
from robustmetric.report.pictures import load_pictures, make_pictures
from robustmetric.training.folder import RunFolder
from robustmetric.workers import finish, run_tasks


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
    if report is not None:
        check_page(report, force=force, parameter="report")
    elif curves or force:
        raise UserError(f"{'curves go' if curves else 'force goes'} with a page: give --report FILE")
    request = Request.of(tested, settings)
    if out is None:
        if tested.run is None:
            raise UserError("say where the record goes: give a folder", parameter="out")
        out = RunFolder(tested.run).evaluation
    finished = open_folder(FORMAT, out, request.plan().settings)
    with ExitStack() as leaving:
        leaving.enter_context(stoppable(console, "what is finished is kept: the same command resumes"))
        cluster, gpus = None, 0
        if on == "ray" and not finished:
            cluster = leaving.enter_context(connect(address))
            gpus = int(tested.device != "cpu" and cluster.room(1, 1) > 0)
            cluster.check_folder(out)
        networks = request.networks(tried=finished)
        with Progress(console) as watch:
            images = request.images(watch)
            if request.source.weights is None:
                watch.say("no weights were given: the network is as it is made")
            evaluation = request.evaluation(networks, images, out, watch, watch.say)

            def help_out() -> None:
                threads = max(1, (os.cpu_count() or 1) // devices)
                if cluster is not None:
                    threads = cluster.threads(devices, gpus)
                tasks = [(request, out, threads, share, devices) for share in range(devices)]
                if cluster is None:
                    finish(run_tasks(work, tasks, devices, evaluation.tell))
                else:
                    finish(cluster.run(work, tasks, threads, gpus, together=True, tick=evaluation.tell))

            record = evaluation.run(help_out if devices > 1 or cluster is not None else None)
            if report is not None:
                picture(request.evaluation(networks, images), record, out, watch)
                if curves:
                    make_curves(evaluation.subject, evaluation.plan, out, watch, watch.say)
    show_checks(console, record)
    show_scores(console, [record])
    show_suite(console, [record])
    if failed := [check.name for check in record.checks if check.status == "fail"]:
        console.print(styled(("do not trust these scores:", "bold red"), f" {', '.join(failed)} failed"))
    console.print(f"the record is in {out}")
    if report is not None:
        write_report([out], report, force=force)
        console.print(f"the report is {report}")


def picture(evaluation: Evaluation, record: Record, out: Path, watch: Progress) -> None:
    """Make the pictures of a record in a folder, unless all of them are there."""
    try:
        for one in load_pictures(out, record).pictures:
            images_of(one, out)
    except (OSError, UserError):  # none are there, or some are missing, damaged or of another record
        make_pictures(evaluation, record, load_arrays(out), out, watch, watch.say)


def work(request: Request, out: Path, threads: int, share: int, shares: int) -> None:
    """Do a worker's share of an evaluation, with so many threads."""
    torch.set_num_threads(threads)
    networks = request.networks(share, tried=True)
    request.evaluation(networks, request.images(), out, report=Terminal().print).work(share, shares)
