"""Train, and look at recipes and data sets."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.table import Table

from robustmetric.cli.app import FIT, OWN, TRUST, app, exit_code, read_changes, stoppable
from robustmetric.cli.progress import Progress
from robustmetric.cli.terminal import Terminal
from robustmetric.errors import UserError
from robustmetric.files import write_atomically, writing
from robustmetric.text import command_line
from robustmetric.training import CutShortError, Stopped, load_recipe, recipe_names
from robustmetric.training.recipe import Recipe, recipe_text, usual_recipe

if TYPE_CHECKING:
    from robustmetric.training.runs import RunFolder

# Lightning and torch take seconds to import: they are imported in the commands that need them.

DATA = f"cars, csv, cub, digits, fashion-mnist, folder, inshop, market1501, mnist, sop {OWN}."


@app.command()
def recipes(
    name: str = typer.Argument("", help="Show this one as YAML, each entry with its meaning."),
) -> None:
    """List the recipes that come with the package, with every entry."""
    if name:
        typer.echo(recipe_text(name), nl=False)
        return
    console = Terminal()
    names = recipe_names()
    while names:
        count = len(names)
        while count > 1 and not _fits(console, _entries(names[:count])):
            count -= 1
        console.print(_entries(names[:count]), highlight=False)
        names = names[count:]


def _entries(names: Sequence[str]) -> Table:
    """Lay out recipes, a column each, with their entries as rows."""
    table = Table("", *names, box=None, show_edge=False)
    for column in table.columns:
        column.no_wrap = True
    shown = [load_recipe(name) for name in names]
    for key in Recipe.model_fields:
        table.add_row(key, *(_entry(key, getattr(recipe, key)) for recipe in shown), end_section=False)
    table.add_row()
    return table


def _entry(key: str, value: object) -> str:
    if key in ("eps", "alpha") and isinstance(value, float):
        return f"{255 * value:.3g}/255"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fits(console: Terminal, table: Table) -> bool:
    return table.__rich_measure__(console, console.options.update(max_width=10**4)).maximum <= console.width


@app.command()
def train(
    data: str = typer.Option(None, help=DATA),
    root: Path = typer.Option(None, help="Where its files are."),
    model: str = typer.Option(None, help=f"c2f2, resnet18, resnet50, timm:NAME {OWN}."),
    weights: Path = typer.Option(None, help="Weights to begin with: safetensors or a torch file."),
    defense: str = typer.Option(None, help=f"The paper's name for it, such as HM[S,LGA]&ICS, {OWN}."),
    eps: str = typer.Option(None, help="ε, the largest change of a pixel: 8/255."),
    alpha: str = typer.Option(None, help="α, the size of a step."),
    steps: int = typer.Option(None, help="η, the number of steps."),
    epochs: int = typer.Option(None, help="How often each image is an anchor."),
    batch: int = typer.Option(None, help="Images in a batch of a worker, two a pair."),
    lr: float = typer.Option(None, help="Learning rate of Adam."),
    size: int = typer.Option(None, help="Size that images are brought to; resize and crop in one."),
    fit: Literal["squeeze", "crop", "pad"] = typer.Option(None, help=FIT),
    validation: float = typer.Option(
        None, help="Share of the training images that choose the best weights; 0 for none."
    ),
    seed: int = typer.Option(None, help="Starts every random draw."),
    precision: str = typer.Option(None, help="32-true, bf16-mixed, 16-mixed or 64-true."),
    recipe: str = typer.Option("", help="A recipe's name or a YAML file; by default the data set's."),
    change: list[str] = typer.Option([], "--set", help="KEY=VALUE: change any other entry of the recipe."),
    trust: bool = typer.Option(False, "--trust", help=TRUST),
    out: Path = typer.Option(..., help="Folder of the run."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in this folder."),
    cache: Path = typer.Option(None, help="Where decoded images are kept."),
    skip_broken: bool = typer.Option(False, "--skip-broken", help="Leave out images that cannot be read."),
    after_collapse: str = typer.Option("stop", help="When the network collapses: stop or continue."),
    accelerator: str = typer.Option("auto", help="auto, cpu, gpu or mps."),
    devices: int = typer.Option(1, help="Workers on a machine."),
    nodes: int = typer.Option(1, help="Machines."),
    logger: list[str] = typer.Option([], help=f"csv, tensorboard, wandb {OWN}, beside metrics.csv."),
) -> None:
    """Train a network; Ctrl-C stops it, --resume resumes it."""
    given = {
        "data": data, "root": root, "model": model, "weights": weights, "defense": defense, "eps": eps,
        "alpha": alpha, "steps": steps, "epochs": epochs, "batch": batch, "lr": lr, "resize": size,
        "crop": size, "fit": fit, "validation": validation, "seed": seed, "precision": precision,
    }  # fmt: skip
    changes = {key: value for key, value in given.items() if value is not None}
    if twice := sorted(changes.keys() & (others := read_changes(change)).keys()):
        raise UserError(f"{', '.join(twice)}: given by an option and by --set; leave one of them out")
    changes |= others
    if after_collapse not in ("stop", "continue"):
        raise UserError(f"--after-collapse is stop or continue, not {after_collapse!r}")
    for key in ("root", "weights"):
        # A run is not tied to the folder that it was started in.
        if changes.get(key) is not None:
            changes[key] = Path(str(changes[key])).expanduser().absolute()
    title, made = _resumed(out, recipe, changes, trust) if resume else _recipe(recipe, changes, trust)

    from robustmetric.training.loggers import make_logger
    from robustmetric.training.progress import Teller
    from robustmetric.training.run import Machines, checkpoint_step
    from robustmetric.training.run import train as run_training
    from robustmetric.training.runs import RunFolder
    from robustmetric.training.workers import is_first, number_worker

    machines = Machines(accelerator=accelerator, devices=devices, nodes=nodes)
    number_worker(devices, nodes)
    console = Terminal(quiet=not is_first())

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    shown = Progress(console)
    step = checkpoint_step(out) if resume and logger else 0
    again = {
        "--cache": cache, "--skip-broken": skip_broken, "--logger": logger,
        "--after-collapse": after_collapse if after_collapse != "stop" else None,
        "--accelerator": accelerator if accelerator != "auto" else None,
        "--devices": devices if devices != 1 else None, "--nodes": nodes if nodes != 1 else None,
    }  # fmt: skip
    try:
        with stoppable(console, "the training had not begun: the same command starts it again"), shown:
            run_training(
                made,
                out,
                resume=resume,
                machines=machines,
                cache=cache,
                skip_broken=skip_broken,
                callbacks=[Teller(shown.training, say, title)],
                loggers=[make_logger(name, out, step) for name in logger],
                progress=False,
                go_on_after_collapse=after_collapse == "continue",
                watch=shown.decoding,
                report=say,
            )
    except Stopped as stopped:
        left = f" ({stopped.left})" if stopped.left else ""
        say(f"stopped by {stopped}{left}; go on with: {_command(out, again)}")
        raise typer.Exit(exit_code(str(stopped))) from None
    except CutShortError as error:
        how = (
            f"go on with: {_command(out, again)}" if RunFolder(out).exists else "start the same command again"
        )
        raise CutShortError(f"{error}; {how}") from error
    for line in _end_lines(RunFolder(out), cache, skip_broken):
        say(line)


def _resumed(out: Path, name: str, changes: dict[str, Any], trust: bool) -> tuple[str, Recipe]:
    """Take the recipe of the run in a folder, or that of a new run where there is none."""
    from robustmetric.training.runs import RunFolder

    run = RunFolder(out, trust=trust)
    if run.exists:
        return f"the recipe of {out}", run.recipe(changes, resumed=True)
    if not changes and not name:
        raise UserError(f"there is no run in {out} to go on with: give another --out, or leave --resume out")
    return _recipe(name, changes, trust)


def _recipe(name: str, changes: dict[str, Any], trust: bool) -> tuple[str, Recipe]:
    """Make the recipe of a new run: one by name or file, or the data set's, which looks at the images."""
    if name:
        return f"recipe {name}", load_recipe(name, changes, trust=trust)
    from robustmetric.training.parts import suited_recipe

    return f"recipe {usual_recipe(str(changes.get('data', 'digits')))}", suited_recipe(changes)


def _command(out: Path, again: dict[str, Any]) -> str:
    """Write the command that goes on with a run, with all options that are not in its recipe."""
    parts = ["robustmetric", "train", "--out", str(out), "--resume"]
    for option, value in again.items():
        if value is True:
            parts.append(option)
        elif value:
            for one in value if isinstance(value, list) else [value]:
                parts += [option, str(one)]
    return command_line(parts)


def _end_lines(run: RunFolder, cache: Path | None, skip_broken: bool) -> list[str]:
    """Say how well a finished run ranks, where its weights are, and what comes next."""
    choice = run.read().get("choice", {})
    lines = []
    if "best" in choice:
        by = choice.get("by", "R@1")
        best, last = (f"{choice[k][by]:.1f} at step {choice[k]['step']:,}" for k in ("best", "last"))
        lines.append(f"{by} of the {choice['count']:,} {choice['images']}: best {best}, last {last}")
    kept = {file.stem: file for file in (run.best, run.last) if file.exists()}
    told = " and ".join(f"{name} in {file}" for name, file in kept.items())
    following = [
        "robustmetric",
        "evaluate",
        str(run.path),
        *([] if cache is None else ["--cache", str(cache)]),
        *(["--skip-broken"] if skip_broken else []),
    ]
    return [*lines, f"weights: {told}", f"next: {command_line(following)}"]


sets = typer.Typer(no_args_is_help=True, help="Look at data sets.")
app.add_typer(sets, name="data")


@sets.callback()
def look() -> None:
    """Look at data sets."""


@sets.command("describe")
def describe(
    name: str = typer.Argument(help=DATA),
    root: Path = typer.Option(None, help="Where its files are."),
    sheet: Path = typer.Option(None, help="Write a contact sheet of the training images to this PNG."),
    seed: int = typer.Option(0, help="Chooses the images of the sheet."),
) -> None:
    """Show counts, classes and sizes of a data set, and some of its images."""
    from robustmetric.data import describe as about
    from robustmetric.data import load, own_validation

    console = Terminal()
    apart = own_validation(name, root)
    for images in (load(name, root, "train"), *([] if apart is None else [apart]), load(name, root, "test")):
        console.print(about.show(about.describe(images)))
    if sheet is not None:
        if sheet.suffix.lower() != ".png":
            raise UserError(f"the contact sheet is a PNG: {sheet} must end in .png")
        image = about.contact_sheet(load(name, root, "train"), seed=seed)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        with writing(sheet, "then run the same command again"):
            write_atomically(sheet, lambda file: file.write(buffer.getvalue()))
        console.print(f"contact sheet in {sheet}")
