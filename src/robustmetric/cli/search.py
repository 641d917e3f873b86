"""Search vectors for images."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import typer
from rich.table import Table

from robustmetric.cli.app import TRUST, app, stoppable
from robustmetric.cli.options import DEVICE, RUN, WEIGHTS
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import loaded_run
from robustmetric.cli.terminal import Terminal, wide
from robustmetric.errors import UserError
from robustmetric.text import printable, spreadsheet_text
from robustmetric.vectors import Found, Index, Vectors, load_vectors, open_index
from robustmetric.vectors.index import KINDS, SAMPLE, kind_of
from robustmetric.vectors.vectors import check_k


class _Hit(NamedTuple):
    image: str
    rank: int
    file: str
    distance: float


@app.command()
def search(
    run: Path = RUN,
    images: list[Path] = typer.Argument(help="Images to search for."),
    vectors: Path = typer.Option(..., "--in", help="File of vectors that embed wrote."),
    k: int = typer.Option(10, "-k", help="How many to find for each image."),
    index: str | None = typer.Option(
        None, help=f"Search by an index of faiss: {', '.join(KINDS)} (hnsw); by default exactly."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    as_csv: bool = typer.Option(False, "--csv", help="Print CSV."),
    weights: str | None = WEIGHTS,
    device: str = DEVICE,
    trust: bool = typer.Option(False, "--trust", help=TRUST),
) -> None:
    """Find the images whose vectors are nearest to those of some images.

    An index is built when it is first asked for, and kept beside the vectors.
    """
    if as_json and as_csv:
        raise UserError("json and csv exclude each other: leave one of them out")
    check_k(k)
    if index is not None:
        kind_of(index)
    aside = Terminal(stderr=True)
    with stoppable(aside, "nothing was kept: run the same command again"):
        loaded = loaded_run(run, weights, device, trust)
        stored = load_vectors(vectors)
        stored.check(loaded)
        z = loaded.embed(images)
        found = (stored if index is None else _indexed(stored, index, k, aside)).search(z, k)
    hits = _hits(images, stored, found)
    if as_json:
        typer.echo(json.dumps([hit._asdict() for hit in hits], indent=1))
    elif as_csv:
        typer.echo(_csv(hits), nl=False)
    else:
        _show(hits)


def _indexed(stored: Vectors, kind: str, k: int, aside: Terminal) -> Index:
    """Open the index, and say how much of the truth it finds."""
    say = partial(aside.print, highlight=False, soft_wrap=True)
    with Progress(aside) as progress:
        index = open_index(stored, kind, k, progress=partial(progress.update, "build the index"), report=say)
    say(
        f"{index.kind} finds {100 * index.recalls[k]:.1f} % of what exact search does (recall@{k} of "
        f"{min(SAMPLE, len(stored))} stored vectors)"
    )
    return index


def _hits(images: Sequence[Path], stored: Vectors, found: Found) -> list[_Hit]:
    return [
        _Hit(str(image), rank, stored.files[place], distance)
        for image, places, distances in zip(
            images, found.position.tolist(), found.distance.tolist(), strict=True
        )
        for rank, (place, distance) in enumerate(zip(places, distances, strict=True), 1)
        if place >= 0
    ]


def _csv(hits: Sequence[_Hit]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_Hit._fields)
    for hit in hits:
        names = (spreadsheet_text(printable(name)) for name in (hit.image, hit.file))
        image, file = names
        writer.writerow([image, hit.rank, file, f"{hit.distance:.6f}"])
    return text.getvalue()


def _show(hits: Sequence[_Hit]) -> None:
    """Print a table; an image is named in the row of its first."""
    table = Table("image", "rank", "file", "distance")
    for column in ("rank", "distance"):
        next(c for c in table.columns if c.header == column).justify = "right"
    for hit in hits:
        table.add_row(
            _line(hit.image) if hit.rank == 1 else "",
            str(hit.rank),
            _line(hit.file),
            f"{hit.distance:.4f}",
            end_section=False,
        )
    wide().print(table)


def _line(name: str) -> str:
    """Return a name on one line."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")
