"""The command line's frame: the application, how errors are said, and what all commands share."""

from __future__ import annotations

import importlib
import io
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import typer
import typer.core
import typer.main
from rich.markup import escape

from robustmetric import __version__
from robustmetric.cli.errors import out_of_memory, told_of_files
from robustmetric.cli.terminal import Terminal
from robustmetric.errors import UserError, brief
from robustmetric.usercode import own_failure

OWN = "or FILE.py:NAME of your own"
"""Stands in the help behind the names that an option takes."""


TRUST = "Run the code that a run or a recipe file brings along, and trust it while it stays the same."
FIT = "How images become squares: squeezed, cropped to the middle, or padded with white."


class Place(NamedTuple):
    """The module of `robustmetric.cli` that holds a command, and the command's line in the help."""

    module: str
    line: str


COMMANDS = {
    "demo": Place(
        "demo", "Train a plain and a defended network on scikit-learn's digits, attack both, compare."
    ),
    "train": Place("train", "Train a network; Ctrl-C stops it, --resume resumes it."),
    "evaluate": Place(
        "evaluate", "Score how well a network ranks, and how well it keeps its ranking under attack."
    ),
    "certify": Place(
        "certify", "Certify R@1 of a network that is smoothed by noise, and attack it: the truth is between."
    ),
    "verify": Place(
        "verify", "Judge whether pairs of images are of one class, by a threshold, and under attack."
    ),
    "attack": Place(
        "attack",
        "Run one attack, and write the images before and after, their ranks, and a sheet of pictures.",
    ),
    "app": Place(
        "try_out",
        "Try an attack by hand on a page in the browser, and watch the ranking change step by step.",
    ),
    "embed": Place("embed", "Write the vectors of all images below a folder to a file."),
    "search": Place("search", "Find the images whose vectors are nearest to those of some images."),
    "export": Place(
        "export",
        "Write a run's network as one file that is tried, or as a folder for the Hub.",
    ),
    "compare": Place("compare", "Put records side by side."),
    "report": Place(
        "report",
        "Write one page of HTML with the scores of records, side by side, and pictures of attacks.",
    ),
    "reproduce": Place(
        "reproduce", "Make the paper's tables and figures, and show them beside the published ones."
    ),
    "plot": Place("plot", "Plot trainings, and records beside each other, as files for a paper."),
    "recipes": Place("train", "List the recipes that come with the package, with every entry."),
    "data": Place("train", "Look at data sets."),
}
"""All commands, in the order of the help, which has to be shown without their modules: those take seconds."""


class Commands(typer.core.TyperGroup):
    """A group that imports a command's module when the command is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the arguments."""
        if args[0] in COMMANDS:
            importlib.import_module(f"robustmetric.cli.{COMMANDS[args[0]].module}")
            self.commands = typer.main.get_group(app).commands
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a signal that it does not hear itself is said in a line as well."""
        with stoppable(Terminal(stderr=True), "what is finished is kept: run the same command again"):
            return super().invoke(ctx)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _elsewhere() -> None:
    """Stand for a command in the help until its module is imported."""


for name, place in COMMANDS.items():
    app.command(name, help=place.line)(_elsewhere)


def run() -> None:
    """Run the command line; what a person can mend is said in a line, without a traceback.

    With --debug, anywhere in the command, every error keeps its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # ε, for one, is not in every encoding
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    try:
        app(args=arguments)
    except Exception as error:
        if debug:
            raise
        told = _told(error, arguments)
        Terminal(stderr=True).print(told, markup=True, highlight=False, soft_wrap=True)
        sys.exit(1)


def _told(error: Exception, arguments: list[str]) -> str:
    """Say what went wrong: as something to mend, as a fault of the user's code, or as one of ours."""
    if (asked := out_of_memory(error)) is not None:
        flags = [flag for name in _LOWER if (flag := _flag(name, arguments)) is not None]
        mend = f"lower {' or '.join(flags)}, or take a smaller network"
        return f"[bold red]error:[/] there is not enough memory{escape(asked)}: {mend}"
    if (told := own_failure(error) or told_of_files(error)) is not None:
        return f"[bold red]error:[/] {escape(told)}"
    if isinstance(error, UserError):
        flag = _flag(error.parameter, arguments)
        text = str(error)
        if flag == "--skip-broken":  # its name stands in the text, as Python has it
            text, flag = text.replace("skip_broken", flag), None
        return f"[bold red]error:[/] {escape(text)}{f' ({flag})' if flag else ''}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = escape(f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}")
    return (
        f"[bold red]unexpected error[/] in {place}: {type(error).__name__}: {escape(str(error))}\n"
        "This is no mistake of yours, as far as robustmetric can tell: run the same command with --debug and "
        "report the traceback that it shows."
    )


_LOWER = ("batch", "size", "dim", "devices")
"""The options that ask for memory."""


def _flag(parameter: str | None, arguments: list[str]) -> str | None:
    """Find the flag of a parameter among those of the command that was run."""
    command: Any = typer.main.get_group(app)
    for argument in arguments:
        command = getattr(command, "commands", {}).get(argument, command)
    flags = {option.name: option.opts[0] for option in command.params if option.opts}
    if any(argument.startswith(f"{parameter}=") for argument in arguments):
        return f"--set {parameter}"
    found = flags.get("size" if parameter in ("resize", "crop") and parameter not in flags else parameter)
    return found if found is not None and found.startswith("-") else None


def show_version(wanted: bool) -> None:
    """Print the versions that decide about results, and exit."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"robustmetric {__version__}\ntorch {version('torch')}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Show the versions and exit."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of every error."),
) -> None:
    """Embedding networks that keep their ranking under adversarial perturbation."""


@contextmanager
def stoppable(console: Terminal, advice: str) -> Iterator[None]:
    """Let Ctrl-C or SIGTERM stop what is inside: say so with the advice, and exit with the signal's code.

    Another signal does not keep it from being said.
    """
    name = "SIGINT"

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal name
        name = "SIGTERM"  # a library may catch what is raised, and raise its own
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        console.print(f"stopped; {advice}")
        raise typer.Exit(exit_code(name)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(name: str) -> int:
    """Return the exit code of a command that a signal stopped; that of Ctrl-C if it is no signal's name.

    >>> exit_code("SIGINT"), exit_code("SIGTERM"), exit_code("another worker was told to stop")
    (130, 143, 130)
    """
    return 128 + signal.Signals.__members__.get(name, signal.SIGINT)


def read_changes(pairs: list[str]) -> dict[str, Any]:
    """Read the KEY=VALUE of --set.

    >>> read_changes(["dim=64", "flip=true"])
    {'dim': 64, 'flip': True}
    """
    from robustmetric.training.recipe import read_yaml

    changes: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--set takes KEY=VALUE, such as --set validate_every=5, not {brief(pair)}")
        if key in changes:
            raise UserError(f"--set {key} is given twice; leave one of them out")
        changes[key] = read_yaml(value, f"--set {key}")
    return changes
