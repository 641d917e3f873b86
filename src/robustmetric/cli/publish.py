"""Publish networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from robustmetric.cli.app import TRUST, app, stoppable
from robustmetric.cli.options import RUN
from robustmetric.cli.terminal import wide
from robustmetric.errors import shorten
from robustmetric.text import command_line
from robustmetric.training.folder import RunFolder
from robustmetric.training.recipe import Recipe
from robustmetric.zoo import publish


@app.command("publish")
def publish_run(
    run: Path = RUN,
    out: Path = typer.Argument(
        None, metavar="DIR", help="The new folder; without it, a published one is brought up to date."
    ),
    *,
    weights: str = typer.Option(
        None, help="Its weights: last or best; by default those that evaluate takes."
    ),
    half: bool = typer.Option(False, "--half", help="Write the weights in half precision."),
    records: list[Path] = typer.Option(
        [], "--record", help="A record of these weights, beside those in RUN/evaluation*."
    ),
    licence: str = typer.Option(
        None, "--license", help="The licence to state, such as apache-2.0; by default none."
    ),
    force: bool = typer.Option(
        False, "--force", help="Replace a folder that was published before, or a card that was changed."
    ),
    trust: bool = typer.Option(False, "--trust", help=TRUST),
) -> None:
    """Write what a run trained to a folder that can be given away, with a model card.

    No path of this machine goes out, and no pickle. Records are left out if they are of other weights: with
    --half evaluate the new folder, and publish it again, without DIR, to bring its card up to date.
    """
    console = wide()

    def say(text: str, **options: Any) -> None:
        console.print(text, highlight=False, soft_wrap=True, **options)

    with stoppable(console, "what was being written is gone: run the same command again"):
        chosen: Any = weights  # what it may be is checked there
        done = publish(
            run, out, weights=chosen, half=half, records=records, licence=licence, force=force, trust=trust
        )
    for name, why in done.left_out.items():
        stays = name not in done.records and (done.folder / name).is_dir()
        say(f"{'not in the card, still in the folder' if stays else 'left out'}: {name}: {why}")
    if done.beside:
        say(f"in the folder, and no part of what is published: {shorten(done.beside)}")
    counted = f"{len(done.records)} record{'' if len(done.records) == 1 else 's'}"
    say(f"{done.name}, SHA-256 {done.digest[:12]}…, with {counted}: {done.folder}")
    if done.left_out and not done.records:
        for line in _next_lines(RunFolder(run, trust=trust).recipe(), done.folder, trust):
            say(line)


def _next_lines(recipe: Recipe, folder: Path, trust: bool) -> list[str]:
    """Say how what is published is measured, and its card brought up to date: no record is of its weights."""
    root = [] if recipe.data == "digits" else ["--root", str(recipe.root or "DIR")]
    trusting = ["--trust"] if trust else []
    evaluate = ["robustmetric", "evaluate", str(folder), *root, *trusting, "--out", "scores"]
    add = ["robustmetric", "publish", str(folder), *trusting, "--record", "scores"]
    return [f"next: {command_line(evaluate)}", f"then: {command_line(add)}"]
