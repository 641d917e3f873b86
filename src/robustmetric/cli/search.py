"""Search vectors for images."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Literal

import typer
from rich.table import Table

from robustmetric.cli.app import TRUST, app, stoppable
from robustmetric.cli.options import DEVICE, WEIGHTS
from robustmetric.cli.request import loaded_run
from robustmetric.cli.terminal import Terminal
from robustmetric.text import one_line, printable, spreadsheet_text
from robustmetric.vectors import K, load_vectors


@app.command()
def search(
    vectors: Path = typer.Argument(help="File of vectors that embed wrote."),
    images: list[Path] = typer.Argument(help="Images to search for."),
    run: Path = typer.Option(..., help="Folder of the run that the vectors are of."),
    k: int = typer.Option(K, "-k", help="Number of images to find for each."),
    to: Literal["table", "json", "csv"] = typer.Option("table", help="Format of the output."),
    weights: str | None = WEIGHTS,
    device: str = DEVICE,
    trust: bool = typer.Option(False, "--trust", help=TRUST),
) -> None:
    """Find the images whose vectors are nearest to those of some images."""
    with stoppable(Terminal(stderr=True), "run the same command again"):
        loaded, stored = loaded_run(run, weights, device, trust), load_vectors(vectors)
        stored.check(loaded)
        found = stored.search(loaded.embed(images), k)
    hits = [
        (str(image), rank, stored.files[place], distance)
        for image, *near in zip(images, found.position.tolist(), found.distance.tolist(), strict=True)
        for rank, (place, distance) in enumerate(zip(*near, strict=True), 1)
    ]
    head = ("image", "rank", "file", "distance")
    if to == "json":
        typer.echo(json.dumps([dict(zip(head, hit, strict=True)) for hit in hits], indent=1))
    elif to == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(head)
        for image, rank, file, distance in hits:
            names = (spreadsheet_text(printable(name)) for name in (image, file))
            writer.writerow([next(names), rank, next(names), f"{distance:.6f}"])
    else:
        table = Table(*head)
        for image, rank, file, distance in hits:
            table.add_row(one_line(image) if rank == 1 else "", str(rank), one_line(file), f"{distance:.4f}")
        Terminal().print(table)
