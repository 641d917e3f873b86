"""Embed folders of images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from robustmetric.cli import options
from robustmetric.cli.app import app
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import loaded_run
from robustmetric.cli.terminal import Terminal
from robustmetric.training.trained import BATCH
from robustmetric.vectors import embed_folder

Format = Literal["safetensors", "npy", "parquet"]


@app.command()
def embed(
    run: options.Run,
    images: Annotated[Path, typer.Argument(help="Folder of images, or a CSV file that lists them.")],
    *,
    weights: options.Weights = None,
    trust: options.Trust = False,
    skip_broken: options.SkipBroken = False,
    out: Annotated[Path, options.out("Output file.")],
    to: Annotated[Format | None, options.option(options.OUTPUT, "Format; by default that of OUT.")] = None,
    force: options.Force = False,
    batch: Annotated[int, options.option(options.MACHINE, "Images per batch.")] = BATCH,
    device: options.Device = "auto",
) -> None:
    """Write the vectors of all images below a folder to a file; the same command resumes."""
    loaded = loaded_run(run, weights, device, trust)
    with Progress(Terminal()) as bar:
        done = embed_folder(
            loaded,
            images,
            out,
            to=to,
            batch=batch,
            skip_broken=skip_broken,
            force=force,
            progress=partial(bar.update, "embed images"),
            report=bar.say,
        )
    for name, reason in done.listed.items():
        bar.say(f"left out: {name}: {reason}")
    if done.skipped > len(done.listed):
        bar.say(f"and {done.skipped - len(done.listed):,} more were left out")
    bar.say(f"{done.count:,} vectors are in {out}")
