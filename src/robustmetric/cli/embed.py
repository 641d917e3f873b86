"""Embed folders of images."""

from __future__ import annotations

from functools import partial
from pathlib import Path

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
    folder: Path = typer.Argument(help="Folder of the images, or a CSV file that lists them."),
    out: Path = typer.Option(
        ..., "--out", "-o", help="File for the vectors: .safetensors, .npy or .parquet."
    ),
    weights: str | None = WEIGHTS,
    batch: int = typer.Option(BATCH, help="Images that go through the network at once."),
    device: str = DEVICE,
    skip_broken: bool = typer.Option(False, "--skip-broken", help="Leave out images that cannot be read."),
    force: bool = typer.Option(False, "--force", help="Replace a file that is there."),
    trust: bool = typer.Option(False, "--trust", help=TRUST),
) -> None:
    """Write the vectors of all images below a folder to a file.

    Ctrl-C or SIGTERM stops it; the same command resumes.
    """
    console = Terminal()
    with stoppable(console, "what is finished is kept: the same command resumes"):
        loaded = loaded_run(run, weights, device, trust)
        with Progress(console) as progress:
            done = embed_folder(
                loaded,
                folder,
                out,
                batch=batch,
                skip_broken=skip_broken,
                force=force,
                progress=partial(progress.update, "embed images"),
                report=lambda text: console.print(text, highlight=False, soft_wrap=True),
            )
    for name, reason in done.listed.items():
        console.print(f"left out: {name}: {reason}", highlight=False, soft_wrap=True)
    if done.skipped > len(done.listed):
        console.print(f"and {done.skipped - len(done.listed):,} more were left out", highlight=False)
    console.print(f"{done.count:,} vectors are in {out}", highlight=False, soft_wrap=True)
