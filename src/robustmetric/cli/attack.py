"""Run single attacks."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors.torch import save as as_safetensors

from robustmetric.attacks import Attack
from robustmetric.cli import options
from robustmetric.cli.app import app
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import Request, Tested, takes
from robustmetric.cli.terminal import Terminal
from robustmetric.errors import UserError
from robustmetric.evaluation import Evaluation, Settings, run_attack
from robustmetric.evaluation.attack import AttackResult
from robustmetric.evaluation.job import Ticks
from robustmetric.files import save
from robustmetric.locks import claimed
from robustmetric.registry import split_names
from robustmetric.report.cards import Album, Picture, card, rendered
from robustmetric.report.page import make_html
from robustmetric.report.records import alpha_of, eps_of
from robustmetric.text import one_line, printable, shortened, spreadsheet_text

ARRAYS, RANKS, PAGE = "images.safetensors", "ranks.csv", "attack.html"
TEXTS = ("file", "class", "target's file", "target's class")  # columns of text; all others are numbers
LINES, NAME = 20, 24  # of the table on the terminal, and letters of a name there
BETWEEN = " // "  # files of several targets: no path has two slashes in a row, but at its beginning


@app.command()
@takes(
    Settings,
    *(name for name in Settings.model_fields if name not in ("attacks", "checks", "suite")),
    without=(),
    queries=Annotated[
        int, options.option(options.ATTACK, "Number of images that are attacked.", show_default="16")
    ],
)
def attack(
    tested: Tested,
    settings: dict[str, object],
    *,
    name: options.AttackName,
    out: Annotated[Path, options.out("New folder for the page, the images and their ranks.")],
) -> None:
    """Run one attack; write a page of what it did, the images before and after, and their ranks."""
    console = Terminal()
    if len(split_names(name)) > 1:
        raise UserError(f"one attack is run, not {name!r}: evaluate takes several", parameter="name")
    request = Request.of(tested, {"queries": 16, **settings, "attacks": [name], "checks": "none"})
    if out.exists():
        raise UserError(f"{out} exists already: give another folder", parameter="out")
    with claimed(out, "an attack"):
        networks = request.networks()
        with Progress(console) as watch:
            data = request.images(watch)
            evaluation = request.evaluation(networks, data, None, watch)
            evaluation.probe()
            with evaluation.subject.frozen():
                evaluation.embed()
                results = _attacked(evaluation, watch)
        (goal,) = evaluation.plan.attacks
        album = Album(evaluation.view, data)
        pictures = [one for pair in results for one in album.pictures(goal, *pair)]
        targets = [index for _, result in results for index in result.target.index.tolist()]
        rows = _ranks(pictures, targets, goal, album)
        draft = out.with_name(f".{out.name}.tmp")
        shutil.rmtree(draft, ignore_errors=True)  # of an attack that was killed
        try:
            draft.mkdir()
            _write_images(draft, results)
            save(draft / RANKS, _csv(rows))
            about = {"title": goal.name, "told": _title(evaluation)}
            cards = (card(one, order=k) for k, one in enumerate(pictures))
            save(draft / PAGE, make_html("attack.html", about, cards)[0])
            draft.rename(out)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    console.say(_title(evaluation))
    _show(console, pictures[:LINES], rows)
    if len(rows) > LINES:
        console.say(f"{len(rows) - LINES} more queries are in {RANKS}")
    console.say(f"page, images, arrays and ranks of {len(rows)} queries are in {out}")


def _attacked(evaluation: Evaluation, watch: Progress) -> list[tuple[torch.Tensor, AttackResult]]:
    """Attack all queries, block by block."""
    (goal,), threat = evaluation.plan.attacks, evaluation.threat
    blocks, steps = evaluation.numbers.split(threat.batch), threat.search.num_evaluations(threat.budget)
    results: list[tuple[torch.Tensor, AttackResult]] = []

    def tell(part: float) -> None:
        watch(goal.name, len(results) + part, len(blocks))

    for numbers in blocks:
        how: dict[str, Any] = {"surrogate": evaluation.surrogate, "tick": Ticks(steps, tell)}
        results.append((numbers, run_attack(evaluation.view, goal, numbers, threat, **how)))
        tell(0)
    return results


def _title(evaluation: Evaluation) -> str:
    """Say what was done to which network and images."""
    plan, subject = evaluation.plan.settings, evaluation.subject
    steps = "1 step" if plan.steps == 1 else f"{plan.steps} steps"
    how = f"ε = {eps_of(plan)}, α = {alpha_of(plan)}, {steps}, {plan.search}"
    return f"{plan.attacks[0]} on {subject.title}, {subject.data.name}: {how}, {plan.protocol} protocol"


def _write_images(out: Path, results: Sequence[tuple[torch.Tensor, AttackResult]]) -> None:
    """Write the images before and after: rounded as pictures, and as they are in one file."""
    arrays = {
        "number": torch.cat([numbers for numbers, _ in results]),
        "target": torch.cat([result.target.index for _, result in results]).cpu(),
        "before": torch.cat([result.originals for _, result in results]).cpu(),
        "after": torch.cat([result.images.detach() for _, result in results]).cpu(),
    }
    save(out / ARRAYS, as_safetensors({name: array.contiguous() for name, array in arrays.items()}))
    for when in ("before", "after"):
        for number, image in zip(arrays["number"].tolist(), arrays[when], strict=True):
            buffer = io.BytesIO()
            rendered(image).save(buffer, "PNG")
            save(out / f"{number:06d}-{when}.png", buffer.getvalue())


def _ranks(
    pictures: Sequence[Picture], targets: Sequence[Sequence[int]], goal: Attack, album: Album
) -> list[dict[str, str]]:
    """List for each query its file, class, targets and values, and the rank that counts."""
    files, ranked = album.data.files, album.data.ranked.files
    rows = []
    for picture, index in zip(pictures, targets, strict=True):
        row = {"image": str(picture.number)}
        row |= {} if files is None else {"file": files[picture.number]}
        row["class"] = picture.query.label
        if index:
            row["target"] = " ".join(map(str, index))
            row |= {} if ranked is None else {"target's file": BETWEEN.join(ranked[k] for k in index)}
            row["target's class"] = " ".join(album.ranked(position).label for position in index)
        for column, (_, before, after) in zip(goal.columns, picture.values, strict=True):
            row |= {f"{column.name} before": before, f"{column.name} after": after}
        what = "first of its class" if picture.asker is None else "its place"
        for when, place in zip(("before", "after"), picture.place, strict=True):
            row[f"{what} {when}"] = "-" if place is None else str(place)
        rows.append(row)
    return rows


def _csv(rows: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*rows[0]])
    writer.writerow({name: spreadsheet_text(printable(name)) for name in rows[0]})
    for row in rows:
        texts = {name: spreadsheet_text(printable(row[name])) for name in TEXTS if name in row}
        writer.writerow({**row, **texts})
    return text.getvalue()


def _show(console: Terminal, pictures: Sequence[Picture], rows: Sequence[Mapping[str, str]]) -> None:
    """Print the queries, with values before and after in one cell."""
    keys = [name for name in ("image", "file", "class", "target's class") if name in rows[0]]
    cells = [
        [
            *(shortened(one_line(row[name]), lambda text: len(text) <= NAME) for name in keys),
            *(f"{before} → {after}" for _, before, after in picture.values),
            " → ".join("-" if place is None else str(place) for place in picture.place),
        ]
        for picture, row in zip(pictures, rows, strict=False)
    ]
    headings = [heading for heading, _, _ in pictures[0].values]
    console.table([*keys, *headings, "rank"], cells, keys=len(keys))
