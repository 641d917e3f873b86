"""The command line's frame: the commands, and the one place that tells of errors and signals."""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import typer
import typer.core
import typer.main

from robustmetric import __version__
from robustmetric.cli.terminal import Terminal, styled
from robustmetric.errors import UserError, brief
from robustmetric.files import remedy
from robustmetric.usercode import own_failure

COMMANDS = {
    "demo": ("demo", "Train a plain and a defended network on scikit-learn's digits, and attack both."),
    "recipes": ("train", "List the recipes of the package, or show one."),
    "train": ("train", "Train a network; Ctrl-C stops it, --resume resumes it."),
    "evaluate": ("evaluate", "Score how well a network ranks, also under attack."),
    "certify": ("certify", "Certify R@1 of a network that is smoothed by noise, and attack it."),
    "verify": ("verify", "Decide whether pairs of images are of one class, also under attack."),
    "attack": (
        "attack",
        "Run one attack; write a page of what it did, the images before and after, and their ranks.",
    ),
    "report": ("report", "Compare records in a table, and write a page of HTML, a table or plots."),
    "embed": ("embed", "Write the vectors of all images below a folder to a file; the same command resumes."),
    "search": ("search", "Find the images whose vectors are nearest to those of some images."),
    "export": (
        "export",
        "Write a run's network as one file that is tried, or as a folder with a model card for the Hub.",
    ),
    "reproduce": (
        "reproduce",
        "Make the paper's tables and figures, and show them next to the published ones.",
    ),
    "app": ("app_page", "Try an attack by hand on a page in the browser."),
}
"""The module and the first line of each command: the help imports no module, which would take seconds."""

KEPT = "what is finished is kept: run the same command again"
RESUME = f"stopped; {KEPT} to resume"


class Commands(typer.core.TyperGroup):
    """A group that imports a command's module when the command is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the arguments."""
        if args[0] in COMMANDS:
            importlib.import_module(f"robustmetric.cli.{COMMANDS[args[0]][0]}")
            self.commands = typer.main.get_group(app).commands
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            _show_flags(command.get_params(ctx))
        return name, command, rest

    def get_params(self, ctx: Any) -> Any:
        """Return the options of the group."""
        return _show_flags(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; SIGINT or SIGTERM ends it with a line and the signal's exit code."""
        with _stoppable():
            return super().invoke(ctx)


def _show_flags(options: list[Any]) -> list[Any]:
    """Let the help show flags without a type."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return options


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, (_, line) in COMMANDS.items():
    app.command(name, help=line)(lambda: None)  # stands for the command until its module is imported


def show_version(wanted: bool) -> None:
    """Print the versions that decide about results, and exit."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"robustmetric {__version__}\ntorch {version('torch')}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Show the versions."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of every error."),
) -> None:
    """Embedding networks that keep their ranking under adversarial perturbation."""


def run() -> None:
    """Run the command line; an error that the user can fix is told in a line, without a traceback.

    With --debug, anywhere in the command, every error keeps its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # ε, for one, is not in every encoding
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(args=arguments)
    except Exception as error:
        if len(arguments) < len(sys.argv) - 1:
            raise
        Terminal(stderr=True).print(_told(error, arguments), soft_wrap=True)
        sys.exit(1)


def _told(error: Exception, arguments: list[str]) -> Any:
    """Say what went wrong: something to fix, a fault of the user's code, or one of ours."""
    if (asked := _out_of_memory(error)) is not None:
        flags = [flag for name in ("batch", "size", "dim", "devices") if (flag := _flag(name, arguments))]
        told = f"there is not enough memory{asked}: lower {' or '.join(flags)}, or take a smaller network"
    elif (failed := own_failure(error) or _told_of_files(error)) is not None:
        told = failed
    elif isinstance(error, UserError):
        flag, told = _flag(error.parameter, arguments), str(error)
        if flag == "--skip-broken":  # its name is in the text, as Python has it
            told, flag = told.replace("skip_broken", flag), None
        told += f" ({flag})" if flag else ""
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
        return styled(
            ("unexpected error", "bold red"),
            f" in {place}: {type(error).__name__}: {error}\nThis is a fault of robustmetric: run "
            "the same command with --debug and report the traceback.",
        )
    return styled(("error:", "bold red"), f" {told}")


_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|storage size calculation overflowed"
    r"|numel: integer multiplication overflow|overflow when unpacking long",
    re.IGNORECASE,
)


def _out_of_memory(error: BaseException) -> str | None:
    """Return how much memory was asked for if an `error` is for want of it; None of any other error."""
    cause: BaseException | None = error
    seen = set[int]()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        known = isinstance(cause, RuntimeError | TypeError | OverflowError) and _MEMORY.search(str(cause))
        if isinstance(cause, MemoryError) or known:
            asked = re.search(r"tried to allocate (\d+) bytes", str(cause))
            return f" ({int(asked[1]) / 1e9:,.1f} GB were asked for at once)" if asked else ""
        cause = cause.__cause__
    return None


def _told_of_files(error: BaseException) -> str | None:
    """Return what to say of an `error` of the system: the file, what is wrong with it and what to do."""
    if isinstance(error, UnicodeDecodeError):
        return f"a file is no text in {error.encoding.upper()} ({error.reason}): save it as UTF-8"
    if not isinstance(error, OSError):
        return None
    if error.errno is None or error.strerror is None:
        return str(error)  # it is one of ours, and says all
    files = [os.fsdecode(file) for file in (error.filename, error.filename2) if isinstance(file, str | bytes)]
    place = f"{' and '.join(files)}: " if files else ""
    return f"{place}{error.strerror}; {remedy(error) or 'give another path'}; {KEPT}"


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


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let the first SIGINT or SIGTERM stop what is inside, and exit with its code; further ones are ignored.

    What is inside may clean up undisturbed, and a second signal cannot change the exit code.
    """
    heard: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    # A shell's background jobs ignore SIGINT.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        Terminal(stderr=True).say(RESUME)
        raise typer.Exit(128 + (heard or [signal.SIGINT])[0]) from None
    finally:
        if not heard:
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
