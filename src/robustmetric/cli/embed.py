"""Embed folders of images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import typer

from robustmetric.cli.app import TRUST, app, stoppable
from robustmetric.cli.options import DEVICE, RUN, WEIGHTS
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import loaded_run
from robustmetric.cli.terminal import Terminal
from robustmetric.training.trained import BATCH
from robustmetric.vectors import embed_folder


@app.command()
def embed(
    run: Path = RUN,
    images: Path = typer.Argument(help="Folder of images, or a CSV file that lists them."),
    out: Path = typer.Option(..., "--out", "-o", help="Output file."),
    to: Literal["safetensors", "npy", "parquet"] | None = typer.Option(
        None, help="Format; by default from the suffix of --out."
    ),
    force: bool = typer.Option(False, "--force", help="Overwrite existing output."),
    weights: str | None = WEIGHTS,
    batch: int = typer.Option(BATCH, help="Images per batch."),
    device: str = DEVICE,
    skip_broken: bool = typer.Option(False, "--skip-broken", help="Leave out images that cannot be read."),
    trust: bool = typer.Option(False, "--trust", help=TRUST),
) -> None:
    """Write the vectors of all images below a folder to a file; the same command resumes."""
    console = Terminal()
    with stoppable(console, "what is finished is kept: the same command resumes"), Progress(console) as bar:
        loaded = loaded_run(run, weights, device, trust)
        update = partial(bar.update, "embed images")
        done = embed_folder(
            loaded, images, out, to=to, batch=batch, skip_broken=skip_broken, force=force,
            progress=update, report=bar.say,
        )  # fmt: skip
    for name, reason in done.listed.items():
        bar.say(f"left out: {name}: {reason}")
    if done.skipped > len(done.listed):
        bar.say(f"and {done.skipped - len(done.listed):,} more were left out")
    bar.say(f"{done.count:,} vectors are in {out}")
