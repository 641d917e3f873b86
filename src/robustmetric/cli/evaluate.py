"""Evaluate networks, run single attacks, compare records."""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import typer
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors.torch import save
from torch import Tensor, nn

from robustmetric.attacks import Search, Target, Transfer, make_search
from robustmetric.attacks import attack as make_attack
from robustmetric.attacks.gallery import count_mates
from robustmetric.cli.app import app, read_changes, stoppable, wide
from robustmetric.cli.progress import Decoding
from robustmetric.cli.show import Watch, data_of, show_checks, show_scores
from robustmetric.data import DATA as DATA_SETS
from robustmetric.data.base import Split
from robustmetric.data.sides import Sides, by_marks, of_two
from robustmetric.evaluation import ERS_ATTACKS, Evaluation, Outcome, Record, Scene, load_record, run_attack
from robustmetric.evaluation.record import RECORD, Settings, show
from robustmetric.evaluation.run import CheckSet, Origin, check_folder, descends_on
from robustmetric.evaluation.workers import run_workers
from robustmetric.files import write_atomically
from robustmetric.perturb import Budget
from robustmetric.registry import lookup
from robustmetric.training import load_recipe
from robustmetric.training.folder import check_writable
from robustmetric.training.inputs import (
    Subject,
    Which,
    check_model,
    first_image,
    image_files,
    pixels,
    suited_recipe,
    try_network,
)
from robustmetric.training.recipe import Recipe
from robustmetric.validate import UserError, fraction

PARTS: dict[str, Split] = {"test": "test", "all": "all"}

RUN = typer.Argument(None, help="Folder of a run; or give --model and --weights.")
DATA = typer.Option(None, help=f"{', '.join(DATA_SETS)}.")
SPLIT = typer.Option("test", help="Which of its images: test, or all, training images included.")
ROOT = typer.Option(None, help="Where its files are.")
MODEL = typer.Option(None, help="c2f2, resnet18, resnet50, timm:NAME or file.py:function.")
WEIGHTS = typer.Option(
    None,
    help="Its weights: safetensors or a torch file; of a run, last or best. By default a run's best where "
    "validation images chose them, else its last.",
)
GALLERY = typer.Option(None, help="Rank these instead: a folder of classes or a CSV file.")
QUERIES_FROM = typer.Option(None, help="Query with these instead: a folder of classes or a CSV file.")
SIZE = typer.Option(None, help="Size that images are brought to; resize and crop in one.")
RECIPE = typer.Option("", help="A recipe's name or a YAML file, for image sizes; by default the data set's.")
CHANGE = typer.Option([], "--set", help="KEY=VALUE: change any other entry of the recipe, such as dim.")
PROTOCOL = typer.Option("strict", help="strict, or reference: what published figures were made with.")
EPS = typer.Option(None, help="ε, the largest change of a pixel, such as 8/255; by default the recipe's.")
ALPHA = typer.Option("3/255", help="α, the size of a step.")
STEPS = typer.Option(32, help="η, the number of steps.")
SEARCH = typer.Option("pgd", help="pgd, pgd(restarts=5), nes, spsa, transfer or transfer(nes).")
SURROGATE = typer.Option(None, help="For transfer: folder of the run that perturbations come from.")
SEED = typer.Option(0, help="Starts every random draw.")
BATCH = typer.Option(128, help="Images that are perturbed together.")
CACHE = typer.Option(None, help="Where decoded images are kept.")
SKIP = typer.Option(False, "--skip-broken", help="Leave out images that cannot be read.")
DEVICE = typer.Option("auto", help="auto, cpu, cuda or mps.")


@dataclass(frozen=True)
class Given:
    """What the command line says of a network, its images and how to attack it: plain data for workers."""

    subject: Subject
    surrogate: Subject | None
    search: str
    split: Split
    gallery: Path | None
    queries_from: Path | None
    cache: Path | None
    skip_broken: bool
    device: str
    options: dict[str, Any]

    def settings(self) -> Settings:
        """Say how scores are to be measured."""
        inside = _inside_transfer(self.search)
        search = make_search(inside or "pgd" if inside is not None else self.search).name
        names = {key: self.options[key] for key in Settings.model_fields if key in self.options}
        attacks = [make_attack(a, protocol=names["protocol"]).name for a in names.pop("attacks")]
        return Settings(search=search if inside is None else f"transfer({search})", attacks=attacks, **names)

    def _chosen(self) -> str | None:
        """Say how the weights were chosen, and whether on other images than these."""
        here, trained = self.subject.recipe, self.subject.trained
        same = trained is not None and (here.data, here.root) == (trained.data, trained.root)
        other = self.gallery is not None or self.queries_from is not None or not same
        chosen = self.subject.chosen if self.subject.weights else "no weights were given"
        return f"{chosen} of its run" if chosen == "chosen on test images" and other else chosen

    def recipes(self) -> list[tuple[Recipe, Split]]:
        """Name the images that query and, if they are others, those that are ranked, by recipe and split."""
        own = (self.subject.recipe, self.split)
        if self.gallery is None and self.queries_from is None:
            return [own]
        asked = (self.queries_from, self.gallery)
        return [own if path is None else (_at(own[0], path), "all") for path in asked]

    def images(self, watch: Decoding | None = None) -> tuple[Sides, list[str]]:
        """Load the images, and name those that cannot be read."""
        named, found = self.recipes(), []
        for recipe, split in named:
            found += pixels(recipe, self.cache, splits=[split], skip_broken=self.skip_broken, watch=watch)
        files = [image_files(recipe, images) for (recipe, _), images in zip(named, found, strict=True)]
        skipped = [str(file) for images in found for file in images.skipped]
        crop = self.subject.recipe.crop
        if len(found) == 1:
            return by_marks(found[0], crop, files[0]), skipped
        return of_two(found[0], found[1], crop, files[0], files[1]), skipped

    def networks(self, share: int = 0, *, tried: bool = False) -> tuple[nn.Module, Search]:
        """Make the network and the search with its surrogate, on the `share`-th device, and try them."""
        device = _device(self.device, share)
        recipe, split = self.recipes()[0]
        image, crop = first_image(recipe, split), self.subject.recipe.crop
        network = self.subject.network(like=image).to(device)
        inside = _inside_transfer(self.search)
        search = make_search(inside or "pgd" if inside is not None else self.search)
        if self.surrogate is not None:
            try:
                other = self.surrogate.network(like=image).to(device)
                if not tried:
                    try_network(other, image, crop, gradient=descends_on(search, other))
            except ValueError as error:
                raise UserError(f"the surrogate does not fit the images: {error}") from None
            search = Transfer(surrogate=other, search=search)
        if not tried:
            try_network(network, image, crop, gradient=descends_on(search, network))
        return network, search

    def evaluation(
        self, made: tuple[nn.Module, Search], sides: Sides, skipped: list[str], **more: Any
    ) -> Evaluation:
        """Put the evaluation together."""
        queries, gallery = sides.queries, sides.gallery
        return Evaluation(
            made[0],
            queries.images,
            queries.labels,
            search=made[1],
            gallery=None if gallery is None else (gallery.images, gallery.labels),
            own=sides.own,
            cameras=queries.cameras,
            gallery_cameras=None if gallery is None else gallery.cameras,
            classes=sides.classes,
            train_classes=self.subject.train_classes(),
            origin=Origin(
                files=queries.files,
                gallery_files=None if gallery is None else gallery.files,
                skipped=skipped,
                weights=self._chosen(),
            ),
            **self.options,
            **more,
        )


@app.command()
def evaluate(
    run: Path | None = RUN,
    data: str = DATA,
    root: Path = ROOT,
    split: str = SPLIT,
    gallery: Path = GALLERY,
    queries_from: Path = QUERIES_FROM,
    model: str = MODEL,
    weights: str = WEIGHTS,
    size: int = SIZE,
    recipe: str = RECIPE,
    change: list[str] = CHANGE,
    protocol: str = PROTOCOL,
    eps: str = EPS,
    alpha: str = ALPHA,
    steps: int = STEPS,
    search: str = SEARCH,
    surrogate: Path = SURROGATE,
    attacks: str = typer.Option(",".join(ERS_ATTACKS), help="Which ones: CA+,QA-(m=5),SP-QA+."),
    queries: int = typer.Option(
        None, help="Attack so many test images, drawn from the seed; by default all."
    ),
    checks: str = typer.Option("quick", help="Checks of the scores: none (but collapse), quick or full."),
    seed: int = SEED,
    batch: int = BATCH,
    devices: int = typer.Option(1, help="Workers that share the queries."),
    device: str = DEVICE,
    out: Path | None = typer.Option(None, help="Folder of the record; by default RUN/evaluation."),
    cache: Path = CACHE,
    skip_broken: bool = SKIP,
) -> None:
    """Score how well a network ranks, and how well it keeps its ranking under attack.

    Ctrl-C or SIGTERM stops it; the same command goes on from there.
    """
    console = wide()
    if devices < 1:
        raise UserError(f"--devices must be at least 1, not {devices}")
    given = _given(
        run, data, root, split, gallery, queries_from, model, weights, size, recipe, change, eps, search,
        surrogate, cache, skip_broken, device,
        {
            "alpha": _level("alpha", alpha, "(0, 1]"),
            "steps": steps,
            "protocol": protocol,
            "attacks": split_names(attacks),
            "queries": queries,
            "checks": checks,
            "seed": seed,
            "batch": batch,
        },
    )  # fmt: skip
    if out is None:
        if run is None:
            raise UserError("say where the record goes: --out FOLDER")
        out = run / "evaluation"
    check_folder(out, {"settings": given.settings().model_dump()})
    if not (out / RECORD).is_file():
        check_writable(out)
    given.options["out"] = out
    with stoppable(console, "what is finished is kept: the same command goes on from there"):
        made = given.networks(tried=(out / RECORD).is_file())
        images = _images(given, console)
        if given.subject.weights is None:
            console.print("no weights were given: the network is as it is made", highlight=False)
        with Watch(console) as watch:
            evaluation = given.evaluation(made, *images, progress=watch)
            if devices > 1 and evaluation.begin() is None:
                run_workers(_work, (given,), devices, evaluation.tell)
            record = evaluation.run()
    show_checks(console, record)
    show_scores(console, [record])
    if failed := [check.name for check in record.checks if check.status == "fail"]:
        console.print(f"[bold red]do not trust these scores:[/] {', '.join(failed)} failed", highlight=False)
    console.print(f"the record is in {out}", markup=False)


@app.command()
def attack(
    run: Path | None = RUN,
    name: str = typer.Option(
        ..., "--attack", help="CA+, CA-, QA+, QA-, TMA, ES, LTM, GTM, GTT, SP-QA+, SP-QA-."
    ),
    data: str = DATA,
    root: Path = ROOT,
    split: str = SPLIT,
    gallery: Path = GALLERY,
    queries_from: Path = QUERIES_FROM,
    model: str = MODEL,
    weights: str = WEIGHTS,
    size: int = SIZE,
    recipe: str = RECIPE,
    change: list[str] = CHANGE,
    protocol: str = PROTOCOL,
    eps: str = EPS,
    alpha: str = ALPHA,
    steps: int = STEPS,
    search: str = SEARCH,
    surrogate: Path = SURROGATE,
    queries: int = typer.Option(16, help="Attack so many test images, drawn from the seed."),
    seed: int = SEED,
    batch: int = BATCH,
    device: str = DEVICE,
    out: Path = typer.Option(..., help="Folder for the images."),
    cache: Path = CACHE,
    skip_broken: bool = SKIP,
) -> None:
    """Run one attack, and write the images before and after with their ranks."""
    console = wide()
    given = _given(
        run, data, root, split, gallery, queries_from, model, weights, size, recipe, change, eps, search,
        surrogate, cache, skip_broken, device,
        {
            "alpha": _level("alpha", alpha, "(0, 1]"),
            "steps": steps,
            "protocol": protocol,
            "attacks": [name],
            "queries": queries,
            "checks": "none",
            "seed": seed,
            "batch": batch,
        },
    )  # fmt: skip
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty: give another --out")
    check_writable(out)
    with stoppable(console, "nothing was written: run the same command again"):
        networks = given.networks()
        sides, skipped = _images(given, console)
        with Watch(console) as watch:
            evaluation = given.evaluation(networks, sides, skipped, progress=watch)
            (made,) = evaluation.goals
            evaluation.probe()
            with evaluation.frozen():
                evaluation.embed()
                scene, other = evaluation.scene, evaluation.surrogate
                done: list[Outcome] = []
                parts = evaluation.numbers.split(batch)
                for part in parts:
                    watch(made.name, len(done), len(parts))
                    asked = itertools.count(1)

                    def tick(asked: Iterator[int] = asked, finished: int = len(done)) -> None:
                        watch(made.name, finished + min(next(asked) / steps, 0.99), len(parts))

                    outcome = run_attack(
                        scene,
                        made,
                        part,
                        evaluation.budget,
                        evaluation.how,
                        seed=seed,
                        surrogate=other,
                        tick=tick,
                    )
                    done.append(replace(outcome, target=Target(outcome.target.index)))
                watch(made.name, len(parts), len(parts))
        try:
            out.mkdir(parents=True, exist_ok=True)
            table = _write_attack(out, scene, evaluation.numbers, done, sides.classes, sides.queries.files)
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)  # it was empty
            raise
    console.print(table)
    console.print(f"images, arrays and ranks of {queries} queries are in {out}", markup=False)


@app.command()
def compare(
    records: list[Path] = typer.Argument(help="Record files, or folders that hold one."),
) -> None:
    """Put records side by side."""
    console = wide()
    loaded = [load_record(path) for path in records]
    named = {str(path): record for path, record in zip(records, loaded, strict=True)}
    protocols = {name: record.settings.protocol for name, record in named.items()}
    if len(set(protocols.values())) > 1:
        told = ", ".join(f"{name} is {protocol}" for name, protocol in protocols.items())
        raise UserError(f"records of different protocols are never compared: {told}")
    conditions = {name: _conditions(record) for name, record in named.items()}
    for what in _conditions(loaded[0]):
        if len({c[what] for c in conditions.values()}) > 1:
            told = ", ".join(f"{name}: {c[what]}" for name, c in conditions.items())
            console.print(f"[yellow]careful:[/] they differ in {what}: {escape(told)}", highlight=False)
    show_scores(console, loaded, _row_names(records, loaded))
    table = Table("", "check", "", "what was found", box=None)
    for name, record in named.items():
        for check in record.checks:
            if check.status in ("warn", "fail"):
                table.add_row(escape(name), check.name, check.status, escape(check.says))
    if table.row_count:
        console.print(table)


def _row_names(paths: list[Path], records: list[Record]) -> list[str]:
    """Name each record by its network, and by where its path differs from the others if names repeat."""
    parts = [path.parts for path in paths]
    common = 0
    while all(len(part) > common + 1 and part[common] == parts[0][common] for part in parts):
        common += 1
    names = [record.network.name for record in records]
    return [
        name if names.count(name) == 1 else f"{name} ({Path(*part[common:])})"
        for name, part in zip(names, parts, strict=True)
    ]


def _conditions(record: Record) -> dict[str, str]:
    """Say under which conditions scores were measured; only equal ones can be compared."""
    how, asked, surrogate = record.settings, record.queries, record.network.surrogate
    return {
        "data": f"{data_of(record)}, {record.data.images} images of {record.data.classes} classes, "
        f"SHA-256 {record.data.sha256[:12]}",
        "ε": f"{255 * how.eps:.4g}/255",
        "α": f"{255 * how.alpha:.4g}/255",
        "η": str(how.steps),
        "search": how.search + ("" if surrogate is None else f" from {surrogate[:12]}"),
        "queries": f"{asked.count} of {asked.of}, seed {how.seed}",
        "versions": ", ".join(f"{p} {record.versions.get(p)}" for p in ("robustmetric", "torch")),
    }


def split_names(text: str) -> list[str]:
    """Split names at the commas that are not in brackets.

    >>> split_names("CA+, SP-QA+(m=2,keep=3)")
    ['CA+', 'SP-QA+(m=2,keep=3)']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _images(given: Given, console: Console) -> tuple[Sides, list[str]]:
    """Load the images, and say which could not be read."""
    decoding = Decoding(console)
    try:
        sides, skipped = given.images(decoding)
    finally:
        decoding.bar.stop()
    for file in skipped:
        console.print(f"left out, not readable: {file}", markup=False)
    return sides, skipped


def _work(given: Given, share: int, shares: int) -> None:
    """Do a worker's share."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // shares))
    given.evaluation(given.networks(share, tried=True), *given.images()).work(share, shares)


def _at(recipe: Recipe, path: Path) -> Recipe:
    """Read other images at the size of a recipe's: a file as a table, a directory as a folder of classes."""
    if not path.exists():
        raise FileNotFoundError(f"there is no {path} to take images from: give a folder or a CSV file")
    return recipe.model_copy(update={"data": "csv" if path.is_file() else "folder", "root": path})


def _given(
    run: Path | None,
    data: str | None,
    root: Path | None,
    split: str,
    gallery: Path | None,
    queries_from: Path | None,
    model: str | None,
    weights: str | None,
    size: int | None,
    recipe: str,
    change: list[str],
    eps: str | None,
    search: str,
    surrogate: Path | None,
    cache: Path | None,
    skip_broken: bool,
    device: str,
    options: dict[str, Any],
) -> Given:
    if run is None and data is None and gallery is not None and queries_from is not None:
        data, root = "csv" if queries_from.is_file() else "folder", queries_from
    given = {"data": data, "root": root, "model": model, "resize": size, "crop": size}
    changes = {**{k: v for k, v in given.items() if v is not None}, **read_changes(change)}
    if run is not None:
        for option, value in (("--model", model), ("--recipe", recipe)):
            if value:
                raise UserError(
                    f"a run and {option} exclude each other, for a run has a recipe of its own: leave "
                    f"{option} out, or give no run instead of {run}"
                )
        which = next((w for w in get_args(Which) if w == weights), None)
        subject = Subject.of_run(run, changes, Path(weights) if weights and not which else None, which)
        name = subject.name
    else:
        if model is None:
            raise UserError("say what to evaluate: the folder of a run, or --model NAME with --weights FILE")
        if not recipe and "data" not in changes:
            raise UserError(f"which images? give --data ({', '.join(DATA_SETS)}) and --root")
        check_model(model)
        file = None if weights is None else Path(weights)
        if file is not None and not file.exists():
            raise FileNotFoundError(f"there is no weights file {file}: give another --weights")
        subject = Subject(load_recipe(recipe, changes) if recipe else suited_recipe(changes), file)
        name = model if file is None else f"{model} {file.name}"
    level = subject.recipe.eps if eps is None else _level("eps", eps, "[0, 1]")
    part = lookup("split", split, PARTS)
    images = subject.recipe.data if part == "test" else f"{subject.recipe.data} ({part})"
    options = {**options, "eps": level, "data": images, "name": name}
    # Whatever can be told now is, before images are decoded.
    _check_options(options)
    _check_search(search, surrogate)
    _device(device, 0)
    others = {k: v for k, v in changes.items() if k in ("data", "root")}
    other = None if surrogate is None else Subject.of_run(surrogate, others)
    return Given(subject, other, search, part, gallery, queries_from, cache, skip_broken, device, options)


def _check_options(options: dict[str, Any]) -> None:
    """Refuse numbers and names that cannot be, with the names that they have on the command line."""
    try:
        Budget(eps=options["eps"], alpha=options["alpha"], steps=options["steps"])
    except ValueError as error:
        raise UserError(f"--{error}".replace("--steps", "--steps")) from None
    for name, least in (("queries", 1), ("batch", 1), ("seed", 0)):
        if options[name] is not None and options[name] < least:
            raise UserError(f"--{name} must be a whole number of at least {least}, not {options[name]}")
    for attacked in options["attacks"]:
        make_attack(attacked, protocol=options["protocol"])
    lookup("set of checks", options["checks"], dict.fromkeys(get_args(CheckSet)))
    if len(set(options["attacks"])) < len(options["attacks"]):
        raise UserError(f"an attack was given twice: {', '.join(options['attacks'])}")


def _check_search(search: str, surrogate: Path | None) -> None:
    """Refuse a search that cannot be made, and a surrogate without transfer or that is no run."""
    inside = _inside_transfer(search)
    try:
        make_search(inside or "pgd" if inside is not None else search)
    except ValueError as error:
        other = inside is None and str(error).startswith("unknown search")
        raise UserError(f"{error}{'; or transfer, with --surrogate' if other else ''}") from None
    if inside is None and surrogate is not None:
        raise UserError(f"--surrogate goes with --search transfer, not with {search!r}")
    if inside is not None and surrogate is None:
        raise UserError("transfer needs a network to come from: give --surrogate RUN")
    if surrogate is not None and not (surrogate / "recipe.yaml").is_file():
        raise FileNotFoundError(
            f"{surrogate} is no run, it has no recipe.yaml: --surrogate takes the folder of a run, which "
            "robustmetric train --out wrote"
        )


def _inside_transfer(search: str) -> str | None:
    """Return the search in the brackets of transfer(…), "" if there is none; None for another search."""
    found = re.fullmatch(r"transfer(?:\((.*)\))?", search)
    return None if found is None else found[1] or ""


def _level(name: str, text: str, allowed: str) -> float:
    value = fraction(text)
    if not isinstance(value, float):
        raise UserError(f"--{name} must be a number in {allowed} such as 8/255 or 0.03, not {text!r}")
    return value


def _device(name: str, share: int) -> torch.device:
    """Choose a device by name; several workers get one GPU each, as long as there are some."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = "cuda" if there["cuda"] else "cpu"
    if name not in there:
        raise UserError(f"--device is auto, cpu, cuda or mps, not {name!r}")
    if not there[name]:
        raise UserError(f"--device {name}: torch finds none here; use --device cpu")
    return torch.device(name, share % torch.cuda.device_count()) if name == "cuda" else torch.device(name)


def _write_attack(
    out: Path,
    scene: Scene,
    numbers: Tensor,
    done: list[Outcome],
    classes: tuple[str, ...],
    files: Sequence[str] | None,
) -> Table:
    """Write images, arrays and ranks; give a table of the first ones."""
    rows = _ranks(scene, numbers, done, classes, files)
    before = scene.batch(numbers)[0].cpu()
    after = torch.cat([o.images for o in done]).cpu()
    target = torch.cat([o.target.index for o in done]).cpu()
    for number, old, new in zip(numbers.tolist(), before, after, strict=True):
        for what, image in (("before", old), ("after", new)):
            _write_png(out / f"{number:06d}-{what}.png", image)
    arrays = {"number": numbers, "target": target, "before": before, "after": after}
    content = save({name: value.contiguous() for name, value in arrays.items()})
    write_atomically(out / "images.safetensors", lambda file: file.write(content))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(out / "ranks.csv", lambda file: file.write(text.getvalue().encode()))
    table = Table(*(escape(key) for key in rows[0]))
    for row in rows[:10]:
        table.add_row(*(escape(str(value)) for value in row.values()))
    return table


def _ranks(
    scene: Scene, numbers: Tensor, done: list[Outcome], classes: tuple[str, ...], files: Sequence[str] | None
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
        f"{name} {when}": [show(name, v) for o in done for v in getattr(o, when)[name].tolist()]
        for name in done[0].after
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
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
