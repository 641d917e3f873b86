"""Train, and look at recipes and data sets."""

from __future__ import annotations

import io
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

import robustmetric as rm
from robustmetric.cli.app import Decoding, app, bars, exit_code, read_changes
from robustmetric.files import write_atomically
from robustmetric.training import Stopped, load_recipe, recipe_names
from robustmetric.training.recipe import usual_recipe


@app.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    table = Table("recipe", "network", "ε", "α", "η", "epochs", "batch", "lr", box=None)
    table.columns[0].no_wrap = True
    for name in recipe_names():
        r = load_recipe(name)
        eps, alpha = (f"{255 * v:.3g}/255" for v in (r.eps, r.alpha))
        table.add_row(name, r.model, eps, alpha, str(r.eta), str(r.epochs), str(r.batch), f"{r.lr:g}")
    Console().print(table)


@app.command()
def train(
    data: str = typer.Option(None, help="digits, mnist, fashion-mnist, cub, cars, sop, folder or csv."),
    root: Path = typer.Option(None, help="Where its files are."),
    model: str = typer.Option(None, help="c2f2, resnet18, resnet50, timm:NAME or file.py:function."),
    weights: Path = typer.Option(None, help="Weights to begin with: safetensors or a torch file."),
    defense: str = typer.Option(None, help="The paper's name for it, such as HM[S,LGA]&ICS."),
    eps: str = typer.Option(None, help="ε, the largest change of a pixel: 8/255."),
    alpha: str = typer.Option(None, help="α, the size of a step."),
    eta: int = typer.Option(None, help="η, the number of steps."),
    epochs: int = typer.Option(None, help="How often each image is an anchor."),
    batch: int = typer.Option(None, help="Images in a batch of a worker, two a pair."),
    lr: float = typer.Option(None, help="Learning rate of Adam."),
    seed: int = typer.Option(None, help="Starts every random draw."),
    precision: str = typer.Option(None, help="32-true, bf16-mixed, 16-mixed or 64-true."),
    recipe: str = typer.Option("", help="A recipe's name or a YAML file; by default the data set's."),
    change: list[str] = typer.Option([], "--set", help="KEY=VALUE: change any other entry of the recipe."),
    out: Path = typer.Option(..., help="Folder of the run."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in this folder."),
    cache: Path = typer.Option(None, help="Where decoded images are kept."),
    skip_broken: bool = typer.Option(False, "--skip-broken", help="Leave out images that cannot be read."),
    after_collapse: str = typer.Option("stop", help="When the network collapses: stop or continue."),
    accelerator: str = typer.Option("auto", help="auto, cpu, gpu or mps."),
    devices: int = typer.Option(1, help="Workers on a machine."),
    nodes: int = typer.Option(1, help="Machines."),
    logger: list[str] = typer.Option([], help="tensorboard, csv or wandb, beside metrics.csv."),
) -> None:
    """Train a network; Ctrl-C stops it so that --resume goes on from there."""
    given = {
        "data": data, "root": root, "model": model, "weights": weights, "defense": defense, "eps": eps,
        "alpha": alpha, "eta": eta, "epochs": epochs, "batch": batch, "lr": lr, "seed": seed,
        "precision": precision,
    }  # fmt: skip
    changes = {key: value for key, value in given.items() if value is not None}
    changes |= read_changes(change)
    if after_collapse not in ("stop", "continue"):
        raise ValueError(f"--after-collapse is stop or continue, not {after_collapse!r}")
    recipe = recipe or usual_recipe(data or "digits")
    kept = out / "recipe.yaml"
    made = load_recipe(str(kept) if resume and kept.exists() else recipe, changes)
    # Lightning takes seconds to import: here, and not when the command line starts.
    from lightning.pytorch.utilities import rank_zero_only

    from robustmetric.training.run import Machines, make_logger
    from robustmetric.training.run import train as run_training

    console = Console(quiet=getattr(rank_zero_only, "rank", 0) != 0)
    decoding = Decoding(console)
    try:
        run_training(
            made,
            out,
            resume=resume,
            machines=Machines(accelerator=accelerator, devices=devices, nodes=nodes),
            cache=cache,
            skip_broken=skip_broken,
            callbacks=bars(console),
            loggers=[make_logger(name, out) for name in logger],
            progress=console.is_terminal,
            go_on_after_collapse=after_collapse == "continue",
            watch=decoding,
            report=console.print,
        )
    except Stopped as stopped:
        console.print(f"stopped by {stopped}; go on with: robustmetric train --out {out} --resume")
        raise typer.Exit(exit_code(str(stopped))) from None
    finally:
        decoding.bar.stop()
    console.print(f"done; the run is in {out}")


sets = typer.Typer(no_args_is_help=True, help="Look at data sets.")
app.add_typer(sets, name="data")


@sets.callback()
def look() -> None:
    """Look at data sets."""


@sets.command("describe")
def describe(
    name: str = typer.Argument(help="digits, mnist, fashion-mnist, cub, cars, sop, folder or csv."),
    root: Path = typer.Option(None, help="Where its files are."),
    sheet: Path = typer.Option(None, help="Write a contact sheet of the training images to this PNG."),
    seed: int = typer.Option(0, help="Chooses the images of the sheet."),
) -> None:
    """Show counts, classes and sizes of a data set, and some of its images."""
    from robustmetric.data import describe as about

    console = Console()
    for split in ("train", "test"):
        console.print(about.show(about.describe(rm.data.load(name, root, split))))
    if sheet is not None:
        if sheet.suffix.lower() != ".png":
            raise ValueError(f"the contact sheet is a PNG: {sheet} must end in .png")
        image = about.contact_sheet(rm.data.load(name, root, "train"), seed=seed)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        write_atomically(sheet, lambda file: file.write(buffer.getvalue()))
        console.print(f"contact sheet in {sheet}")
