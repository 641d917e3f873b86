"""The whole job on images that need no download."""

from __future__ import annotations

import re
from pathlib import Path

import typer
from rich.markup import escape

from robustmetric.cli.app import app, bars, wide
from robustmetric.cli.show import Watch, show_checks, show_scores
from robustmetric.data.pairs import ImageArray
from robustmetric.robustness import evaluate
from robustmetric.training import load_recipe
from robustmetric.training.inputs import pixels

DEFENSES = ("N/A[S]", "HM[S,LGA]&ICS")


@app.command()
def demo(
    out: Path = typer.Option(Path("runs/demo"), help="Folder for the two runs; finished ones are reused."),
    epochs: int = typer.Option(8, help="How often each image is an anchor."),
    queries: int = typer.Option(256, help="How many test images to attack."),
    seed: int = typer.Option(0, help="Starts every random draw."),
) -> None:
    """Train a plain and a defended network on scikit-learn's digits, attack both, compare."""
    from robustmetric.training.run import train

    console = wide()
    records = []
    for name in DEFENSES:
        recipe = load_recipe(
            "digits", {"defense": name, "epochs": epochs, "seed": seed, "validate_every": epochs}
        )
        folder = out / re.sub(r"\W+", "-", name).strip("-")
        console.print(f"train {escape(name)}, in {folder}")
        model = train(
            recipe,
            folder,
            resume=True,
            callbacks=bars(console),
            progress=console.is_terminal,
            report=console.print,
        ).model
        (test,) = pixels(recipe, splits=["test"])
        with Watch(console) as watch:
            record = evaluate(
                model,
                ImageArray(test.pixels, recipe.crop),
                test.labels,
                eps=recipe.eps,
                queries=queries,
                seed=seed,
                classes=test.classes,
                train_classes=test.classes,
                name=f"{recipe.model} {name}",
                data="digits",
                out=folder / f"evaluation-{queries}",
                progress=watch,
            )
        show_checks(console, record)
        records.append(record)
    console.print()
    console.print(
        f"{len(test)} digits that were not trained on, {queries} of them attacked; ε = {recipe.eps:g}, "
        "pixels are in \\[0, 1]"
    )
    show_scores(console, records)
