"""Run single attacks."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import torch
from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from safetensors.torch import save

from robustmetric.attacks import Attack, Column
from robustmetric.cli import options
from robustmetric.cli.app import app
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import Request, Tested, takes
from robustmetric.cli.terminal import wide
from robustmetric.errors import UserError
from robustmetric.evaluation import Evaluation, Settings, run_attack
from robustmetric.evaluation.job import Ticks
from robustmetric.files import check_writable, is_draft, write_atomically, writing
from robustmetric.locks import LOCK, locked
from robustmetric.registry import split_names
from robustmetric.report.pictures import rendered
from robustmetric.report.records import alpha_of_plan, eps_of_plan
from robustmetric.report.sheet import ROWS, Album, draw_sheet, left_out
from robustmetric.report.shots import Shot, take_shots
from robustmetric.text import one_line, printable, shortened, spreadsheet_text

ARRAYS, RANKS, SHEET = "images.safetensors", "ranks.csv", "sheet.png"
UNFINISHED = ".attack"  # is there until all files are
AGAIN = "then run the same command again, or give another folder"
FIRST = 5  # of a ranking are on the sheet
LINES = 20  # of the table on the terminal
TEXTS = ("file", "class", "target's file", "target's class")  # columns of text; all others are numbers
BETWEEN = " // "  # files of several targets: no path has two slashes in a row, but at its beginning
_BROKEN = {"target's class": "target's\nclass", "first of its class": "first of\nits class"}
_IMAGE = re.compile(r"\d{6,}-(before|after)\.png")


@app.command()
@takes(
    Settings,
    *(name for name in Settings.model_fields if name not in ("attacks", "checks", "suite")),
    without=(),
    queries=Annotated[int, options.option(options.ATTACK, "Images that are attacked.", show_default="16")],
)
def attack(
    tested: Tested,
    settings: dict[str, object],
    *,
    name: options.AttackName,
    out: Annotated[Path, options.out("Folder for the images.")],
) -> None:
    """Run one attack, and write the images before and after, their ranks, and a sheet of pictures."""
    console = wide()
    if len(split_names(name)) > 1:
        raise UserError(f"one attack is run, not {name!r}: evaluate takes several", parameter="name")
    request = Request.of(tested, {"queries": 16, **settings, "attacks": [name], "checks": "none"})
    _check_free(out)
    check_writable(out)
    with locked(out, "an attack", console.print):
        _check_free(out)  # now that nobody else can use it
        networks = request.networks()
        with Progress(console) as watch:
            data = request.images(watch)
            evaluation = request.evaluation(networks, data, None, watch)
            evaluation.probe()
            with evaluation.subject.frozen():
                evaluation.embed()
                shots = _attacked(evaluation, watch)
        (goal,) = evaluation.plan.attacks
        album = Album(evaluation.view, data)
        title = _title(evaluation)
        with _all_or_nothing(out):
            _write_images(out, shots)
            _write_ranks(out / RANKS, _ranks(shots, album, goal))
            _write_png(out / SHEET, draw_sheet(shots, album, goal.columns, title=title))
    console.print(title, highlight=False)
    console.print(_table(console, shots, album, goal))
    if len(shots) > LINES:
        console.print(f"{left_out(len(shots) - LINES)} here; all are in {RANKS}")
    console.print(f"sheet, images, arrays and ranks of {len(shots)} queries are in {out}")
    if len(shots) > ROWS:
        console.print(f"{SHEET} shows the first {ROWS}; {left_out(len(shots) - ROWS)} there")


def _check_free(out: Path) -> None:
    """Refuse a folder that holds anything but what an attack that was killed had written."""
    begun = (out / UNFINISHED).exists()
    if out.exists() and (
        not out.is_dir()
        or any(path.name != LOCK and not (begun and _is_ours(path)) for path in out.iterdir())
    ):
        raise UserError(f"{out} is not empty: give another folder", parameter="out")


def _is_ours(path: Path) -> bool:
    return (
        path.name in (UNFINISHED, ARRAYS, RANKS, SHEET) or is_draft(path) or bool(_IMAGE.fullmatch(path.name))
    )


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[None]:
    """Mark a folder until all is written to it; what was written by one that failed is removed."""
    mark = out / UNFINISHED
    with writing(mark, AGAIN):
        mark.touch()
        _clear(out)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            _clear(out)
            mark.unlink()
        raise
    mark.unlink()


def _clear(out: Path) -> None:
    for path in [path for path in out.iterdir() if _is_ours(path) and path.name != UNFINISHED]:
        path.unlink(missing_ok=True)


def _attacked(evaluation: Evaluation, watch: Progress) -> list[Shot]:
    """Attack all queries, block by block."""
    (goal,), threat = evaluation.plan.attacks, evaluation.threat
    parts = evaluation.numbers.split(threat.batch)
    shots: list[Shot] = []
    done = 0

    def tell(part: float) -> None:
        watch(goal.name, done + part, len(parts))

    for numbers in parts:
        tell(0)
        outcome = run_attack(
            evaluation.view,
            goal,
            numbers,
            threat,
            surrogate=evaluation.surrogate,
            tick=Ticks(threat.search.num_evaluations(threat.budget), tell),
        )
        shots += take_shots(evaluation.view, goal, numbers, outcome, FIRST)
        done += 1
    tell(0)
    return shots


def _title(evaluation: Evaluation) -> str:
    """Say what was done to which network and images."""
    plan, subject = evaluation.plan.settings, evaluation.subject
    steps = "1 step" if plan.steps == 1 else f"{plan.steps} steps"
    how = f"ε = {eps_of_plan(plan)}, α = {alpha_of_plan(plan)}, {steps}, {plan.search}"
    return f"{plan.attacks[0]} on {subject.title}, {subject.data.name}: {how}, {plan.protocol} protocol"


def _write_images(out: Path, shots: Sequence[Shot]) -> None:
    """Write the images before and after: rounded as pictures, and as they are in one file."""
    for shot in shots:
        for when, image in (("before", shot.image), ("after", shot.perturbed)):
            _write_png(out / f"{shot.number:06d}-{when}.png", rendered(image))
    arrays = {
        "number": torch.tensor([shot.number for shot in shots]),
        "target": torch.tensor([shot.targets for shot in shots], dtype=torch.long),
        "before": torch.stack([shot.image for shot in shots]),
        "after": torch.stack([shot.perturbed for shot in shots]),
    }
    _write(out / ARRAYS, save(arrays))


def _write_ranks(path: Path, rows: list[dict[str, object]]) -> None:
    """Write a row for each query."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([spreadsheet_text(printable(key)) for key in rows[0]])
    writer.writerows(
        [spreadsheet_text(printable(str(value))) if key in TEXTS else value for key, value in row.items()]
        for row in rows
    )
    _write(path, text.getvalue().encode())


def _ranks(shots: Sequence[Shot], album: Album, goal: Attack) -> list[dict[str, object]]:
    """List for each query its file, class, targets and values, and the place that counts."""
    rows = []
    for shot in shots:
        row: dict[str, object] = {"image": shot.number}
        if album.data.files is not None:
            row["file"] = album.data.files[shot.number]
        row["class"] = album.class_of(shot.number)
        if shot.targets:
            files = [album.ranked_file(target) for target in shot.targets]
            row["target"] = " ".join(map(str, shot.targets))
            if None not in files:
                row["target's file"] = BETWEEN.join(map(str, files))
            row["target's class"] = " ".join(map(album.ranked_class, shot.targets))
        for column in goal.columns:
            before, after = map(column.show, shot.values[column.name])
            row |= {f"{column.name} before": before, f"{column.name} after": after}
        for when, place in zip(("before", "after"), shot.place, strict=True):
            row[f"{_place(shot)} {when}"] = "-" if place is None else place
        rows.append(row)
    return rows


def _place(shot: Shot) -> str:
    """Say whose place a shot has."""
    return "first of its class" if shot.asker is None else "its place"


def _table(console: Console, shots: Sequence[Shot], album: Album, goal: Attack) -> Table:
    """Make a table of the first queries that fits on the terminal: names lose their middle as it takes."""
    rows = [_cells(shot, album, goal) for shot in shots[:LINES]]

    def made(most: int) -> Table:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for name, _ in rows[0]:
            table.add_column(_BROKEN.get(name, name), overflow="fold", vertical="bottom")
        for row in rows:
            table.add_row(*(_cut(cell, most) if name in TEXTS else cell for name, cell in row))
        return table

    low, high = 8, console.width  # letters of a name
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _width(console, made(middle)) <= console.width else (low, middle - 1)
    return made(low)


def _cut(text: str, most: int) -> str:
    return shortened(text, lambda shown: cell_len(shown) <= most)


def _width(console: Console, table: Table) -> int:
    return table.__rich_measure__(console, console.options.update(max_width=10**4)).maximum


def _cells(shot: Shot, album: Album, goal: Attack) -> list[tuple[str, str]]:
    """Write down a query, each cell behind its heading, with values before and after in one."""
    cells = [("image", str(shot.number))]
    if album.data.files is not None:
        cells.append(("file", one_line(album.data.files[shot.number])))
    cells.append(("class", one_line(album.class_of(shot.number))))
    if shot.targets:
        more = f" +{len(shot.targets) - 1}" if len(shot.targets) > 1 else ""
        cells.append(("target's class", one_line(album.ranked_class(shot.targets[0])) + more))
    for column in goal.columns:
        values = " → ".join(map(column.show, shot.values[column.name]))
        cells.append((_heading(column, goal), values))
    places = ("-" if place is None else str(place) for place in shot.place)
    return [*cells, (_place(shot), " → ".join(places))]


def _heading(column: Column, goal: Attack) -> str:
    """Write the name of a column without the options that are in the attack's name."""
    options = goal.name[goal.name.find("(") :] if goal.name.endswith(")") else ""
    return column.heading.replace(options, "", 1)


def _write_png(path: Path, image: Image.Image) -> None:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    _write(path, buffer.getvalue())


def _write(path: Path, content: bytes) -> None:
    with writing(path, AGAIN):
        write_atomically(path, lambda file: file.write(content))
