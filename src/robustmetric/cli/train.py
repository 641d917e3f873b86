"""Train, and look at recipes."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from robustmetric.cli import options as of
from robustmetric.cli.app import app, exit_code, read_changes
from robustmetric.cli.options import ATTACK, IMAGES, MACHINE, NETWORK, OUTPUT, number, option
from robustmetric.cli.progress import Progress
from robustmetric.cli.terminal import Terminal
from robustmetric.errors import UserError
from robustmetric.files import save
from robustmetric.text import command_line
from robustmetric.training import CutShortError, Stopped, load_recipe, recipe_names
from robustmetric.training.recipe import Precision, Recipe, recipe_text, usual_recipe
from robustmetric.usercode import file_of

if TYPE_CHECKING:
    from robustmetric.training.folder import RunFolder

# Lightning and torch take seconds to import: they are imported in the commands that need them.

ENTRIES = {
    "data", "root", "model", "weights", "defense", "eps", "alpha", "steps", "epochs", "batch", "lr", "fit",
    "validation", "seed", "precision",
}  # fmt: skip
"""The options that are entries of the recipe."""
AGAIN = {"cache", "skip_broken", "after_collapse", "device", "devices", "nodes", "logger"}
"""The options that no recipe has, so that a resumed training needs them again."""
TRAINING = "Training"


@app.command()
def recipes(
    name: Annotated[str, typer.Argument(help="Show all entries of this recipe, with their meaning.")] = "",
) -> None:
    """List the recipes of the package, or show one."""
    if name:
        typer.echo(recipe_text(name), nl=False)
        return
    for known in recipe_names():
        typer.echo(f"{known:22}{recipe_text(known).splitlines()[0].removeprefix('# ')}")


@app.command()
def train(
    ctx: typer.Context,
    model: of.Model = None,
    weights: Annotated[Path | None, option(NETWORK, "Initial weights.")] = None,
    trust: of.Trust = False,
    data: of.Data = None,
    root: of.Root = None,
    size: of.Size = None,
    fit: of.Fit = None,
    validation: Annotated[float | None, option(IMAGES, "Share of training images to validate on.")] = None,
    cache: of.Cache = None,
    skip_broken: of.SkipBroken = False,
    describe: Annotated[bool, option(IMAGES, "Describe the dataset, train nothing.", "--describe")] = False,
    sheet: Annotated[Path | None, option(IMAGES, "With --describe: write images to this PNG.")] = None,
    defense: Annotated[str | None, option(ATTACK, "HM[S,LGA]&ICS, others, or FILE.py:NAME.")] = None,
    eps: Annotated[float | None, number(ATTACK, "ε, the largest change of a pixel.")] = None,
    alpha: Annotated[float | None, number(ATTACK, "α, the step size.")] = None,
    steps: Annotated[int | None, option(ATTACK, "η, the number of steps.")] = None,
    recipe: Annotated[str, option(TRAINING, "Recipe name or YAML file.", show_default="of the data")] = "",
    change: Annotated[list[str] | None, option(TRAINING, "Change any entry: KEY=VALUE.", "--set")] = None,
    epochs: Annotated[int | None, option(TRAINING, "Number of epochs.")] = None,
    batch: Annotated[int | None, option(TRAINING, "Images per batch.")] = None,
    lr: Annotated[float | None, option(TRAINING, "Learning rate of Adam.")] = None,
    seed: Annotated[int | None, option(TRAINING, "Random seed.")] = None,
    after_collapse: Annotated[
        Literal["stop", "continue"], option(TRAINING, "When the network collapses.")
    ] = "stop",
    out: Annotated[Path | None, of.out("Run folder.", show_default="runs/DATA-DEFENSE-N")] = None,
    resume: Annotated[bool, option(OUTPUT, "Resume the run in the folder.", "--resume")] = False,
    logger: Annotated[list[str] | None, option(OUTPUT, "tensorboard, wandb or FILE.py:NAME.")] = None,
    device: of.Device = "auto",
    devices: of.Devices = 1,
    nodes: Annotated[int, option(MACHINE, "Number of machines.")] = 1,
    precision: Annotated[Precision | None, option(MACHINE, "Floating-point precision.")] = None,
) -> None:
    """Train a network; Ctrl-C stops it, --resume resumes it."""
    changes = {key: value for key, value in ctx.params.items() if key in ENTRIES and value is not None}
    if size is not None:
        changes |= {"resize": size, "crop": size}
    others = read_changes(change or [])
    if twice := sorted(changes.keys() & others.keys()):
        raise UserError(f"{', '.join(twice)}: given by an option and by --set; leave one of them out")
    changes |= others
    for key in ("root", "weights"):
        if changes.get(key) is not None:  # a run is not tied to the folder that it was started in
            changes[key] = Path(str(changes[key])).expanduser().absolute()
    if describe:
        _describe(str(changes.get("data", "digits")), changes.get("root"), sheet, seed or 0)
        return
    title, made = _recipe(out, resume, recipe, changes, trust)
    out = out or _free_folder(made)

    from robustmetric.training.callbacks import ShowProgress
    from robustmetric.training.checkpoint import reached
    from robustmetric.training.folder import RunFolder
    from robustmetric.training.loggers import make_logger
    from robustmetric.training.run import Machines, is_first
    from robustmetric.training.run import train as run_training

    run = RunFolder(out)
    console = Terminal(quiet=not is_first())

    def say(text: str) -> None:
        if is_first():  # of many machines, which is known later
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    step = reached(run.checkpoint).step if resume and logger else 0
    try:
        with Progress(console) as shown:
            run_training(
                made,
                out,
                resume=resume,
                machines=Machines(device, devices, nodes),
                cache=cache,
                skip_broken=skip_broken,
                callbacks=[ShowProgress(shown.update, say, title)],
                loggers=[make_logger(name, out, step) for name in logger or []],
                progress=False,
                go_on_after_collapse=after_collapse == "continue",
                watch=shown.decoding,
                report=say,
            )
    except Stopped as stopped:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        left = "" if stopped.saved else " within a step"
        say(f"stopped by {stopped}{left}; {_next(ctx, run)}")
        raise typer.Exit(exit_code(str(stopped)) if is_first() else 0) from None
    except CutShortError as error:
        raise CutShortError(f"{error}; {_next(ctx, run)}") from error
    for line in _end_lines(run, ctx):
        say(line)


def _recipe(
    out: Path | None, resume: bool, name: str, changes: dict[str, Any], trust: bool
) -> tuple[str, Recipe]:
    """Take the recipe of the run in a folder, one by name or file, or that of the data set."""
    if resume:
        from robustmetric.training.folder import RunFolder

        if out is None:
            raise UserError("--resume needs the folder of a run: give --out")
        run = RunFolder(out, trust=trust)
        if run.exists:
            return f"the recipe of {out}", run.recipe(changes, resumed=True)
        if not changes and not name:
            raise UserError(f"there is no run in {out} to resume: give another --out, or leave --resume out")
    if name:
        return f"recipe {name}", load_recipe(name, changes, trust=trust)
    from robustmetric.training.parts import suited_recipe

    return f"recipe {usual_recipe(str(changes.get('data', 'digits')))}", suited_recipe(changes)


def _free_folder(recipe: Recipe) -> Path:
    source = file_of(recipe.data)
    name = re.sub(r"\W+", "-", f"{source.name if source else recipe.data}-{recipe.name.split(' ', 1)[1]}")
    number = 1
    while (found := Path("runs", f"{name.strip('-')}-{number}")).exists():
        number += 1
    return found


def _next(ctx: typer.Context, run: RunFolder) -> str:
    """Say how to resume a run, with all options that are not in its recipe."""
    if not run.exists:
        return "there is no checkpoint yet: start the same command again"
    words = ["robustmetric", "train", "--out", str(run.path), "--resume", *_again(ctx, run, AGAIN)]
    return f"resume with: {command_line(words)}"


def _again(ctx: typer.Context, run: RunFolder, names: set[str]) -> list[str]:
    words = ["--trust"] if run.code.is_dir() else []
    for known in ctx.command.params:
        value = ctx.params.get(known.name or "")
        if known.name in names and value and value != known.default:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [known.opts[0]] if one is True else [known.opts[0], str(one)]
    return words


def _end_lines(run: RunFolder, ctx: typer.Context) -> list[str]:
    """Say how well a finished run ranks, where its weights are, and what comes next."""
    choice = run.read().get("choice", {})
    lines = []
    if "best" in choice:
        by = choice.get("by", "R@1")
        best, last = (f"{choice[k][by]:.1f} at step {choice[k]['step']:,}" for k in ("best", "last"))
        lines.append(f"{by} of the {choice['count']:,} {choice['images']}: best {best}, last {last}")
    kept = " and ".join(f"{file.stem} in {file}" for file in (run.best, run.last) if file.exists())
    following = ["robustmetric", "evaluate", str(run.path), *_again(ctx, run, {"cache", "skip_broken"})]
    return [*lines, f"weights: {kept}", f"next: {command_line(following)}"]


def _describe(name: str, root: Path | None, sheet: Path | None, seed: int) -> None:
    """Show counts, classes and sizes of a data set, and some of its images."""
    from robustmetric.data import describe, load, own_validation

    console = Terminal()
    apart = own_validation(name, root)
    for images in (load(name, root, "train"), *([] if apart is None else [apart]), load(name, root, "test")):
        console.print(describe.show(describe.describe(images)))
    if sheet is not None:
        if sheet.suffix.lower() != ".png":
            raise UserError(f"the sheet is a PNG: {sheet} must end in .png")
        buffer = io.BytesIO()
        describe.contact_sheet(load(name, root, "train"), seed=seed).save(buffer, "PNG")
        save(sheet, buffer.getvalue())
        console.print(f"images in {sheet}")
