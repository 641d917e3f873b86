"""The whole job on images that need no download."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from robustmetric.cli.app import app, exit_code, stoppable
from robustmetric.cli.terminal import wide

KEPT = "what is finished is kept: the same command resumes"
DEFENSES = ("N/A[S]", "HM[S,LGA]&ICS")
SUITE = "worst-case(goals='misrank')"


@app.command()
def demo(
    out: Path = typer.Option(Path("runs/demo"), help="Folder for the two runs; finished ones are reused."),
    epochs: int = typer.Option(8, help="How often each image is an anchor."),
    queries: int = typer.Option(256, help="How many test images to attack."),
    seed: int = typer.Option(0, help="Starts every random draw."),
) -> None:
    """Train a plain and a defended network on scikit-learn's digits, attack both, compare."""
    from robustmetric.cli.progress import Progress
    from robustmetric.cli.show import show_checks, show_scores, show_suite
    from robustmetric.data import load
    from robustmetric.evaluation import Data, Evaluation, Plan, Subject, load_arrays
    from robustmetric.report.page import write_report
    from robustmetric.report.pictures import make_pictures
    from robustmetric.training.callbacks import ShowProgress
    from robustmetric.training.recipe import load_recipe
    from robustmetric.training.run import train
    from robustmetric.training.stops import Stopped
    from robustmetric.training.trained import load_run

    console = wide()
    records, folders = [], []
    for name in DEFENSES:
        recipe = load_recipe("digits", {"defense": name, "epochs": epochs, "seed": seed})
        folder = out / re.sub(r"\W+", "-", name).strip("-")
        console.print(f"train {name}, in {folder}")
        try:
            with stoppable(console, KEPT), Progress(console) as shown:
                bar = [ShowProgress(shown.update, lambda _: None, "")] if console.is_terminal else []
                train(recipe, folder, resume=True, callbacks=bar, progress=False, report=console.print)
        except Stopped as stopped:
            console.print(f"stopped by {stopped}; {KEPT}")
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
        with stoppable(console, KEPT), Progress(console) as watch:
            evaluation = Evaluation(subject, plan, folders[-1], watch)
            record = evaluation.run()
            make_pictures(Evaluation(subject, plan), record, load_arrays(folders[-1]), folders[-1], watch)
        show_checks(console, record)
        records.append(record)
    console.print()
    console.print(
        f"{len(test)} digits that were not trained on, {queries} of them attacked; ε = {recipe.eps:g}, "
        "pixels are in [0, 1]"
    )
    show_scores(console, records)
    show_suite(console, records)
    page = write_report(folders, out / "report.html", force=True)
    console.print(f"pictures, plots and checks are on one page: open {page}")
