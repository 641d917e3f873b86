"""Export networks: to one file, or to a folder for the Hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

from robustmetric.cli.app import TRUST, app, stoppable
from robustmetric.cli.options import RUN, WEIGHTS
from robustmetric.cli.request import loaded_run
from robustmetric.cli.terminal import Terminal
from robustmetric.errors import UserError
from robustmetric.exports import export
from robustmetric.hub import publish

Format = Literal["onnx", "torchscript", "torch-export", "hub"]


@app.command("export")
def export_run(
    run: Path = RUN,
    *,
    out: Path = typer.Option(..., "--out", "-o", help="Output file; with --to hub, output folder."),
    to: Format | None = typer.Option(None, help="Format; by default from the suffix of --out."),
    force: bool = typer.Option(False, "--force", help="Overwrite existing output."),
    weights: str | None = WEIGHTS,
    trust: bool = typer.Option(False, "--trust", help=TRUST),
    half: bool = typer.Option(
        False, "--half", help="Write weights in half precision.", rich_help_panel="With --to hub"
    ),
    licence: str | None = typer.Option(
        None, "--license", help="License to state, e.g. apache-2.0.", rich_help_panel="With --to hub"
    ),
) -> None:
    """Write a run's network as one file that is tried, or as a folder for the Hub.

    The file takes 8-bit pixels and returns vectors of length 1; its metadata says how to make the pixels.
    """
    console = Terminal()
    say = partial(console.print, highlight=False, soft_wrap=True)
    with stoppable(console, "nothing was written: run the same command again"):
        if to == "hub":
            _publish(say, run, out, weights=weights, half=half, licence=licence, force=force, trust=trust)
            return
        if half or licence:
            option = "half" if half else "licence"
            raise UserError("only --to hub has --half and --license: leave them out", parameter=option)
        done = export(loaded_run(run, weights, "cpu", trust), out, to=to, force=force)
    about, shape = done.about, ", ".join(str(length) for length in done.about["input"]["shape"][1:])
    say(f"{about['name']}, {about['weights'] or 'weights that were given'}, as {done.to}: {done.path}")
    say(f"takes uint8 (N, {shape}), {about['colours']}: {'; '.join(about['before'])}")
    say(
        f"returns float32 (N, {about['dim']}) of length 1, at most {done.difference:.2g} from the run's; "
        f"rounding accounts for {done.allowed:.2g}"
    )


def _publish(say: Any, run: Path, out: Path, **options: Any) -> None:
    done = publish(run, out, **options)
    for name, why in done.left_out.items():
        say(f"{name} is not in the model card: {why}")
    count = f"{len(done.records)} record{'' if len(done.records) == 1 else 's'}"
    say(f"{done.name}, SHA-256 {done.digest[:12]}…, with {count}: {done.folder}")
    if not done.records:
        say("to add scores, evaluate that folder and export it onto itself with --force")
