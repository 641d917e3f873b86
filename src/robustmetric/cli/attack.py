"""Run single attacks."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
import typer
from PIL import Image
from rich.table import Table
from safetensors.torch import save
from torch import Tensor

from robustmetric.attacks import ATTACKS, RankingAttack, Target
from robustmetric.attacks.gallery import count_mates
from robustmetric.cli.app import OWN, app, stoppable
from robustmetric.cli.options import Tested, takes
from robustmetric.cli.request import Request
from robustmetric.cli.show import Watch
from robustmetric.cli.terminal import wide
from robustmetric.evaluation import Evaluation, Outcome, Plan, Scene, run_attack
from robustmetric.evaluation.staged import Progress, Ticks
from robustmetric.files import check_writable, is_draft, write_atomically, writing
from robustmetric.locks import LOCK, locked
from robustmetric.registry import split_names
from robustmetric.validate import UserError, printable, spreadsheet_text

ARRAYS, RANKS = "images.safetensors", "ranks.csv"
UNFINISHED = ".attack"  # is there until all files are
AGAIN = "then run the same command again, or give another folder"
TEXTS = ("file", "class", "target's class")  # columns of text; all others are numbers
_IMAGE = re.compile(r"\d{6,}-(before|after)\.png")


@app.command()
@takes(*(name for name in Plan.model_fields if name not in ("attacks", "checks", "suite")), queries=16)
def attack(
    tested: Tested,
    settings: dict[str, object],
    *,
    name: str = typer.Option(..., "--attack", help=f"{', '.join(ATTACKS)} {OWN}."),
    out: Path = typer.Option(..., help="Folder for the images."),
) -> None:
    """Run one attack, and write the images before and after with their ranks."""
    console = wide()
    if len(split_names(name)) > 1:
        raise UserError(f"one attack is run, not {name!r}: evaluate takes several", parameter="name")
    request = Request.of(tested, {**settings, "attacks": [name], "checks": "none"})
    _check_free(out)
    check_writable(out)
    with (
        stoppable(console, "nothing was written: run the same command again"),
        locked(out, "an attack", console.print),
    ):
        _check_free(out)  # now that nobody else can use it
        networks = request.networks()
        sides, skipped = request.images(console)
        with Watch(console) as watch:
            evaluation = request.evaluation(networks, (sides, skipped), progress=watch)
            evaluation.probe()
            with evaluation.subject.frozen():
                evaluation.embed()
                done = _attacked(evaluation, watch)
        (goal,), scene = evaluation.plan.goals, evaluation.materials.scene
        numbers = evaluation.materials.numbers
        with _all_or_nothing(out):
            table = _write_attack(out, scene, goal, numbers, done, sides.classes, sides.queries.files)
    console.print(table)
    console.print(f"images, arrays and ranks of {len(numbers)} queries are in {out}")


def _check_free(out: Path) -> None:
    """Refuse a folder that holds anything but what an attack that was killed had written."""
    begun = (out / UNFINISHED).exists()
    if out.exists() and (
        not out.is_dir()
        or any(path.name != LOCK and not (begun and _is_ours(path)) for path in out.iterdir())
    ):
        raise UserError(f"{out} is not empty: give another folder", parameter="out")


def _is_ours(path: Path) -> bool:
    return path.name in (UNFINISHED, ARRAYS, RANKS) or is_draft(path) or bool(_IMAGE.fullmatch(path.name))


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


def _attacked(evaluation: Evaluation, watch: Progress) -> list[Outcome]:
    """Attack all queries, block by block."""
    materials, plan = evaluation.materials, evaluation.plan
    (goal,) = plan.goals
    parts = materials.numbers.split(plan.batch)
    done: list[Outcome] = []

    def tell(part: float) -> None:
        watch(goal.name, len(done) + part, len(parts))

    for numbers in parts:
        tell(0)
        outcome = run_attack(
            materials.scene,
            goal,
            numbers,
            plan.budget,
            materials.search,
            seed=plan.seed,
            surrogate=materials.surrogate,
            tick=Ticks(tell, materials.search.asks(plan.budget)),
        )
        done.append(replace(outcome, target=Target(outcome.target.index)))
    tell(0)
    return done


def _write_attack(
    out: Path,
    scene: Scene,
    goal: RankingAttack,
    numbers: Tensor,
    done: list[Outcome],
    classes: tuple[str, ...],
    files: Sequence[str] | None,
) -> Table:
    """Write images, arrays and ranks; return a table of the first ones."""
    rows = _ranks(scene, goal, numbers, done, classes, files)
    before = scene.batch(numbers)[0].cpu()
    after = torch.cat([o.images for o in done]).cpu()
    target = torch.cat([o.target.index for o in done]).cpu()
    for number, old, new in zip(numbers.tolist(), before, after, strict=True):
        for what, image in (("before", old), ("after", new)):
            _write_png(out / f"{number:06d}-{what}.png", image)
    arrays = {"number": numbers, "target": target, "before": before, "after": after}
    content = save({name: value.contiguous() for name, value in arrays.items()})
    _write(out / ARRAYS, content)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([spreadsheet_text(printable(key)) for key in rows[0]])
    writer.writerows(
        [spreadsheet_text(printable(str(value))) if key in TEXTS else value for key, value in row.items()]
        for row in rows
    )
    _write(out / RANKS, text.getvalue().encode())
    table = Table(*rows[0])
    for row in rows[:10]:
        table.add_row(*map(str, row.values()))
    return table


def _ranks(
    scene: Scene,
    goal: RankingAttack,
    numbers: Tensor,
    done: list[Outcome],
    classes: tuple[str, ...],
    files: Sequence[str] | None,
) -> list[dict[str, object]]:
    """List for each query its file, class, targets, values, and the rank of the first of its class."""
    gallery, queries = scene.gallery, scene.queries[numbers.to(scene.device)]
    target = torch.cat([o.target.index for o in done]).cpu()
    first: dict[str, dict[int, int]] = {"before": {}, "after": {}}
    if (count_mates(queries, gallery, queries.own) > 0).any():
        for when, z in (("before", queries.z), ("after", torch.cat([o.z for o in done]))):
            found = scene.rank(z, queries)
            first[when] = dict(zip(found.query.tolist(), found.first.tolist(), strict=True))
    values = {
        f"{column.name} {when}": [
            column.show(value) for o in done for value in getattr(o, when)[column.name].tolist()
        ]
        for column in goal.columns
        for when in ("before", "after")
    }
    rows = []
    for k, number in enumerate(numbers.tolist()):
        row: dict[str, object] = {"image": number} | ({} if files is None else {"file": files[number]})
        row["class"] = classes[int(queries.labels[k])]
        if target.shape[1]:
            row["target"] = " ".join(str(t) for t in target[k].tolist())
            row["target's class"] = " ".join(classes[int(gallery.labels[t])] for t in target[k].tolist())
        row |= {key: shown[k] for key, shown in values.items()}
        for when in ("before", "after"):
            row[f"first of its class {when}"] = first[when].get(k, "-")
        rows.append(row)
    return rows


def _write_png(path: Path, image: Tensor) -> None:
    """Write one image (C, H, W) in [0, 1], rounded to 8 bits."""
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
    _write(path, buffer.getvalue())


def _write(path: Path, content: bytes) -> None:
    with writing(path, AGAIN):
        write_atomically(path, lambda file: file.write(content))
