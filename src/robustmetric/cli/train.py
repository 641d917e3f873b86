"""Train, and look at recipes."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from robustmetric.cli.app import OWN, TRUST, app, exit_code, read_changes, stoppable
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

DATA = f"cars, csv, cub, digits, fashion-mnist, folder, inshop, market1501, mnist, sop {OWN}."
ENTRIES = {
    "data", "root", "model", "weights", "defense", "eps", "alpha", "steps", "epochs", "batch", "lr", "fit",
    "validation", "seed", "precision",
}  # fmt: skip
"""The options that are entries of the recipe."""
AGAIN = {"cache", "skip_broken", "after_collapse", "device", "devices", "nodes", "logger"}
"""The options that no recipe has, so that a resumed training needs them again."""


def _panel(name: str) -> Any:
    def option(told: str, *names: str) -> Any:
        return typer.Option(*names, help=told, rich_help_panel=name)

    return option


_network, _images, _training, _output, _machine = map(
    _panel, ("Network", "Images", "Training", "Output", "Machine")
)


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
    model: Annotated[str | None, _network(f"c2f2, resnet18, resnet50, timm:NAME {OWN}.")] = None,
    weights: Annotated[Path | None, _network("Initial weights: safetensors or a torch file.")] = None,
    trust: Annotated[bool, _network(TRUST, "--trust")] = False,
    data: Annotated[str | None, _images(DATA)] = None,
    root: Annotated[Path | None, _images("Dataset directory.")] = None,
    size: Annotated[int | None, _images("Resize images to SIZE×SIZE.")] = None,
    fit: Annotated[Literal["squeeze", "crop", "pad"] | None, _images("How images become squares.")] = None,
    validation: Annotated[
        float | None, _images("Share of the training images that choose the best weights.")
    ] = None,
    cache: Annotated[Path | None, _images("Folder of decoded images.")] = None,
    skip_broken: Annotated[bool, _images("Leave out images that cannot be read.", "--skip-broken")] = False,
    describe: Annotated[
        bool, _images("Show counts, classes and sizes, and train nothing.", "--describe")
    ] = False,
    sheet: Annotated[Path | None, _images("With --describe: write some images to this PNG.")] = None,
    recipe: Annotated[str, _training("Recipe name or YAML file.")] = "",
    change: Annotated[list[str] | None, _training("KEY=VALUE: change any other entry.", "--set")] = None,
    defense: Annotated[
        str | None, _training(f"The paper's name for it, such as HM[S,LGA]&ICS, {OWN}.")
    ] = None,
    eps: Annotated[str | None, _training("ε, the largest change of a pixel, such as 8/255.")] = None,
    alpha: Annotated[str | None, _training("α, the step size.")] = None,
    steps: Annotated[int | None, _training("η, the number of steps.")] = None,
    epochs: Annotated[int | None, _training("Number of epochs.")] = None,
    batch: Annotated[int | None, _training("Images per batch.")] = None,
    lr: Annotated[float | None, _training("Learning rate of Adam.")] = None,
    seed: Annotated[int | None, _training("Random seed.")] = None,
    after_collapse: Annotated[Literal["stop", "continue"], _training("When the network collapses.")] = "stop",
    out: Annotated[Path | None, _output("Run folder; by default runs/DATA-DEFENSE-N.", "--out", "-o")] = None,
    resume: Annotated[bool, _output("Resume the run in the folder.", "--resume")] = False,
    logger: Annotated[list[str] | None, _output(f"tensorboard, wandb {OWN}.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], _machine("Where to train.")] = "auto",
    devices: Annotated[int, _machine("Worker processes that share the work.")] = 1,
    nodes: Annotated[int, _machine("Machines.")] = 1,
    precision: Annotated[Precision | None, _machine("Floating-point precision.")] = None,
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
    console = Terminal()

    def say(text: str) -> None:
        if is_first():
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    step = reached(run.checkpoint).step if resume and logger else 0
    not_begun = "the training had not begun: the same command starts it again"
    try:
        with stoppable(console, not_begun), Progress(console) as shown:
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
    for option in ctx.command.params:
        value = ctx.params.get(option.name or "")
        if option.name in names and value and value != option.default:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0]] if one is True else [option.opts[0], str(one)]
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
