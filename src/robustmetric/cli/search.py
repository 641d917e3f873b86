"""Search vectors for images."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from robustmetric.cli import options
from robustmetric.cli.app import app
from robustmetric.cli.request import loaded_run
from robustmetric.cli.terminal import Terminal
from robustmetric.text import one_line, printable, spreadsheet_text
from robustmetric.vectors import K, load_vectors

HEAD = ("image", "rank", "file", "distance")


@app.command()
def search(
    vectors: Annotated[Path, typer.Argument(help="File of vectors that embed wrote.")],
    images: Annotated[list[Path], typer.Argument(help="Images to search for.")],
    *,
    run: Annotated[Path, options.option(options.NETWORK, "Run folder of the network that made them.")],
    weights: options.Weights = None,
    trust: options.Trust = False,
    k: Annotated[int, options.option(options.OUTPUT, "Number of images to find for each.", "-k")] = K,
    to: Annotated[
        Literal["table", "json", "csv"], options.option(options.OUTPUT, "Format of the output.")
    ] = "table",
    device: options.Device = "auto",
) -> None:
    """Find the images whose vectors are nearest to those of some images."""
    loaded, stored = loaded_run(run, weights, device, trust), load_vectors(vectors)
    stored.check(loaded)
    found = stored.search(loaded.embed(images), k)
    hits = [
        (str(image), rank, stored.files[place], distance)
        for image, *near in zip(images, found.position.tolist(), found.distance.tolist(), strict=True)
        for rank, (place, distance) in enumerate(zip(*near, strict=True), 1)
    ]
    if to == "json":
        typer.echo(json.dumps([dict(zip(HEAD, hit, strict=True)) for hit in hits], indent=1))
    elif to == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(HEAD)
        for image, rank, file, distance in hits:
            names = [spreadsheet_text(printable(name)) for name in (image, file)]
            writer.writerow([names[0], rank, names[1], f"{distance:.6f}"])
    else:
        rows = [(one_line(i) if r == 1 else "", str(r), one_line(f), f"{d:.4f}") for i, r, f, d in hits]
        Terminal().table(HEAD, rows, keys=3)
