"""Evaluate networks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch

from robustmetric.cli import options
from robustmetric.cli.app import app
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import Request, Tested, takes
from robustmetric.cli.show import show_checks, show_scores, show_suite
from robustmetric.cli.terminal import Terminal, styled
from robustmetric.cluster import connect
from robustmetric.errors import UserError, whole
from robustmetric.evaluation import Settings, load_arrays
from robustmetric.evaluation.job import open_folder
from robustmetric.evaluation.record import FORMAT
from robustmetric.files import save
from robustmetric.locks import claimed
from robustmetric.report.curves import make_curves
from robustmetric.report.page import make_page
from robustmetric.report.pictures import make_pictures
from robustmetric.workers import finish, run_tasks


@app.command()
@takes(Settings, *Settings.model_fields, without=())
def evaluate(
    tested: Tested,
    settings: dict[str, Any],
    *,
    devices: options.Devices = 1,
    on: options.On = "local",
    address: options.Address = None,
    out: Annotated[Path | None, options.out("Folder of the record; RUN/evaluation by default.")] = None,
    report: Annotated[
        Path | None, options.option(options.OUTPUT, "Write a page of HTML with scores and pictures.")
    ] = None,
    curves: Annotated[
        bool, options.option(options.OUTPUT, "Add scores against ε and steps to the page.", "--curves")
    ] = False,
    force: options.Force = False,
) -> None:
    """Score how well a network ranks, also under attack.

    The same command resumes what was stopped.
    """
    whole("devices", devices, 1)
    options.check_address(on, address)
    if report is None and (curves or force):
        raise UserError(f"--{'curves' if curves else 'force'} is for a page: give --report FILE")
    request = Request.of(tested, settings)
    out = tested.folder(out, "evaluation")
    finished, console = open_folder(FORMAT, out, request.plan().settings), Terminal()
    with ExitStack() as leaving:
        if report is not None:
            leaving.enter_context(claimed(report, "a report", force=force))
        cluster, gpus = None, 0
        if on == "ray" and not finished:
            cluster = leaving.enter_context(connect(address))
            gpus = int(tested.device != "cpu" and cluster.room(1, 1) > 0)
            cluster.check_folder(out)
        progress = leaving.enter_context(Progress(console))
        networks = request.networks(tried=finished)
        images = request.images(progress)
        evaluation = request.evaluation(networks, images, out, progress, progress.say)

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
            again = request.evaluation(networks, images)
            make_pictures(again, record, load_arrays(out), out, progress)
            if curves:
                make_curves(evaluation.subject, evaluation.plan, out, progress, progress.say)
            save(report, make_page([out], progress.say))
    show_checks(console, record)
    show_scores(console, [record])
    show_suite(console, [record])
    if failed := [check.name for check in record.checks if check.status == "fail"]:
        console.say(styled(("do not trust these scores:", "bold red"), f" {', '.join(failed)} failed"))
    console.say(f"the record is in {out}")
    if report is not None:
        console.say(f"the report is {report}")


def work(request: Request, out: Path, threads: int, share: int, shares: int) -> None:
    """Do a worker's share of an evaluation, with so many threads."""
    torch.set_num_threads(threads)
    networks = request.networks(share, tried=True)
    request.evaluation(networks, request.images(), out, None, Terminal().print).work(share, shares)
