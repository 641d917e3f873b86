"""Export networks."""

from __future__ import annotations

from pathlib import Path

import typer

from robustmetric.cli.app import TRUST, app, stoppable
from robustmetric.cli.options import RUN, WEIGHTS
from robustmetric.cli.request import loaded_run
from robustmetric.cli.terminal import wide
from robustmetric.exports import FORMATS, export


@app.command("export")
def export_run(
    run: Path = RUN,
    *,
    to: str | None = typer.Option(
        None, help=f"{', '.join(FORMATS)} (torch.export's); by default what the file's name ends in."
    ),
    out: Path = typer.Option(..., "--out", "-o", help="The file to write, such as network.onnx."),
    weights: str | None = WEIGHTS,
    trust: bool = typer.Option(False, "--trust", help=TRUST),
    force: bool = typer.Option(False, "--force", help="Replace a file that is there already."),
) -> None:
    """Write a run's network as one file: ONNX, TorchScript or torch.export; and try that file.

    It takes 8-bit pixels and returns vectors of length 1; the file says how pixels are made of an image.
    """
    console = wide()
    with stoppable(console, "no file was written: run the same command again"):
        done = export(loaded_run(run, weights, "cpu", trust), out, to=to, force=force)
    shape = ", ".join(str(length) for length in done.about["input"]["shape"][1:])
    for line in (
        f"{done.about['name']}, {done.about['weights'] or 'weights that were given'}: "
        f"{done.path.stat().st_size / 1e6:,.1f} MB in {done.path}, as {done.to}",
        f"takes uint8 (N, {shape}), {done.about['colours']}: {'; '.join(done.about['before'])}",
        f"returns float32 (N, {done.about['dim']}) of length 1, at most {done.difference:.2g} from the run's "
        f"on images tried alone and together; rounding accounts for {done.allowed:.2g}",
    ):
        console.print(line, highlight=False, soft_wrap=True)
