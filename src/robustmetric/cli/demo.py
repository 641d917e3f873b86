"""The whole job on images that need no download."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from robustmetric.cli import options
from robustmetric.cli.app import RESUME, app, exit_code
from robustmetric.cli.terminal import Terminal

DEFENSES = ("N/A[S]", "HM[S,LGA]&ICS")
SUITE = "worst-case(goals='misrank')"


@app.command()
def demo(
    epochs: Annotated[int, options.option(options.NETWORK, "Number of epochs.")] = 8,
    queries: Annotated[int, options.option(options.ATTACK, "Number of images that are attacked.")] = 256,
    seed: Annotated[int, options.option(options.ATTACK, "Random seed.")] = 0,
    out: Annotated[Path, options.out("Folder of the two runs.")] = Path("runs/demo"),
) -> None:
    """Train a plain and a defended network on scikit-learn's digits, and attack both.

    The same command resumes what was stopped.
    """
    from robustmetric.cli.progress import Progress
    from robustmetric.data import load
    from robustmetric.evaluation import Data, Evaluation, Plan, Subject, load_arrays
    from robustmetric.report.page import write_report
    from robustmetric.report.pictures import make_pictures
    from robustmetric.training.callbacks import ShowProgress
    from robustmetric.training.recipe import load_recipe
    from robustmetric.training.run import train
    from robustmetric.training.stops import Stopped
    from robustmetric.training.trained import load_run

    console, rows, folders = Terminal(), [], []
    for name in DEFENSES:
        recipe = load_recipe("digits", {"defense": name, "epochs": epochs, "seed": seed})
        folder = out / re.sub(r"\W+", "-", name).strip("-")
        console.say(f"train {name}, in {folder}")
        with Progress(console) as progress:
            shown = ShowProgress(progress.update, lambda _: None, "")
            try:
                train(recipe, folder, resume=True, callbacks=[shown], progress=False, report=progress.say)
            except Stopped as stopped:
                console.say(RESUME)
                raise typer.Exit(exit_code(str(stopped))) from None
            run = load_run(folder)
            test = run.inputs.pixels(load("digits", split="test"))
            subject = Subject(
                run.network,
                Data(run.inputs.images(test), test.labels, classes=test.classes, name="digits"),
                train_classes=test.classes,
                name=f"{recipe.model} {name}",
                weights=run.chosen,
            )
            plan = Plan.make(eps=recipe.eps, suite=SUITE, queries=queries, seed=seed)
            folders.append(folder / f"evaluation-{queries}")
            record = Evaluation(subject, plan, folders[-1], progress, progress.say).run()
            make_pictures(Evaluation(subject, plan), record, load_arrays(folders[-1]), folders[-1], progress)
        cells = [subject.title, record.show("R@1")]
        worst = None if record.suite is None else record.suite.goals["misrank"]
        for value in (record.ers, worst):
            cells.append("-" if value is None else f"{value.value:.1f} ({value.low:.1f} to {value.high:.1f})")
        rows.append(cells)
    page = write_report(folders, out / "report.html", force=True)
    console.say(
        f"{len(test)} digits that were not trained on, {queries} of them attacked; ε = {recipe.eps:g}, "
        "pixels are in [0, 1]"
    )
    console.table(["", "R@1 ↑", "ERS ↑ (95 %)", "worst-case R@1 ↑ (95 %)"], rows)
    console.say(f"all scores, checks, plots and pictures are on one page: open {page}")
