"""Export networks: to one file, or to a folder for the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from robustmetric.cli import options
from robustmetric.cli.app import app
from robustmetric.cli.request import loaded_run
from robustmetric.cli.terminal import Terminal
from robustmetric.errors import UserError
from robustmetric.exports import export
from robustmetric.hub import publish

Format = Literal["onnx", "torchscript", "torch-export", "hub"]
HUB = "With --to hub"


@app.command("export")
def export_run(
    run: options.Run,
    *,
    weights: options.Weights = None,
    trust: options.Trust = False,
    out: Annotated[Path, options.out("Output file; with --to hub, output folder.")],
    to: Annotated[Format | None, options.option(options.OUTPUT, "Format; by default that of OUT.")] = None,
    force: options.Force = False,
    half: Annotated[bool, options.option(HUB, "Write weights in half precision.", "--half")] = False,
    licence: Annotated[str | None, options.option(HUB, "License, such as apache-2.0.", "--license")] = None,
) -> None:
    """Write a run's network as one file that is tried, or as a folder with a model card for the Hub.

    The file takes 8-bit pixels and returns vectors of length 1; its metadata says how to make the pixels.
    """
    say = Terminal().say
    if to == "hub":
        chosen: Any = weights  # publish rejects all but last and best
        made = publish(run, out, weights=chosen, half=half, licence=licence, force=force, trust=trust)
        for name, why in made.left_out.items():
            say(f"{name} is not in the model card: {why}")
        say(f"{made.name}, SHA-256 {made.digest[:12]}…: {made.folder}")
        say(f"records: {', '.join(made.records) or 'none'}")
        if not made.records:
            say("to add scores, evaluate that folder and export it onto itself with --force")
        return
    if half or licence:
        raise UserError("only --to hub has it: leave it out", parameter="half" if half else "licence")
    done = export(loaded_run(run, weights, "cpu", trust), out, to=to, force=force)
    about, shape = done.about, ", ".join(str(length) for length in done.about["input"]["shape"][1:])
    say(f"{about['name']}, {about['weights'] or 'weights that were given'}, as {done.to}: {done.path}")
    say(f"takes uint8 (N, {shape}), {about['colours']}: {'; '.join(about['before'])}")
    say(
        f"returns float32 (N, {about['dim']}) of length 1, at most {done.difference:.2g} from the run's; "
        f"rounding accounts for {done.allowed:.2g}"
    )
