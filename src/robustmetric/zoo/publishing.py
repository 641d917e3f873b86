"""Publishing a run: a folder that can be given away, with weights, recipe, records and a model card."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from robustmetric import __version__
from robustmetric.errors import UserError, brief, shorten
from robustmetric.evaluation import Record, load_record
from robustmetric.evaluation.document import write_json
from robustmetric.evaluation.record import FORMAT, RECORD
from robustmetric.experiments.cells import slug
from robustmetric.files import check_writable, write_atomically, writing
from robustmetric.files import publish as put_in_place
from robustmetric.models import save_weights
from robustmetric.models.weights import read_tensors
from robustmetric.training.folder import RunFolder, Weights, Which, copy_files
from robustmetric.training.recipe import dump_recipe, make_recipe
from robustmetric.training.trained import Run, load_run
from robustmetric.zoo.card import model_card
from robustmetric.zoo.entries import (
    CARD,
    PUBLISHED,
    file_digest,
    licence_of,
    sorted_records,
    stated,
    text_digest,
    why_not,
    with_records,
)
from robustmetric.zoo.private import bare_about, bare_recipe, bare_record

_AGAIN = "then run it again"
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}", re.IGNORECASE)


@dataclass(frozen=True)
class Published:
    """A network that was published, as `publish` returns it.

    - `folder`: where it is.
    - `name`: the network and how it was trained.
    - `digest`: the SHA-256 of the network, as its records have it.
    - `records`: the names of the records' folders.
    - `left_out`: records of the run that are not of these weights, or damaged, by name, and why.
    - `beside`: files in the folder that are no part of what is published, as paths in it.
    """

    folder: Path
    name: str
    digest: str
    records: tuple[str, ...]
    left_out: Mapping[str, str]
    beside: tuple[str, ...]


def publish(
    run: Path | str,
    out: Path | str | None = None,
    *,
    weights: Which | None = None,
    half: bool = False,
    records: Sequence[Path | str] = (),
    licence: str | None = None,
    force: bool = False,
    trust: bool = False,
) -> Published:
    """Write what a run trained to a folder that can be given away, with a model card.

    `run` is the folder of a run, `out` the new folder. It gets the weights that `load_run` takes, or the
    `weights` "last" or "best", with `half` in half precision; the recipe, run.json and metrics.csv without
    paths of this machine; copies of the Python files that the recipe names; the records in
    ``run/evaluation*`` and more `records` by their paths, without the values of each query; and README.md,
    the model card, which states the `licence` if there is one, such as ``"apache-2.0"``. A record counts if
    it is of the very weights that are published: half precision makes others of them, to be evaluated anew.

    Without `out`, a folder that was published is brought up to date: `records` are added, and its card is
    written anew; a card that was changed by hand is refused unless `force` says that it may go. A folder that
    is there already is refused unless it was published and `force` says to replace it; its licence and the
    records of it that are of the new weights, too, are kept. A published recipe that was changed is refused.
    Code that came with the run is refused unless it is the user's own, or `trust` says so.

    >>> import tempfile, robustmetric as rm
    >>> from robustmetric.training import load_recipe, train
    >>> with tempfile.TemporaryDirectory() as home:
    ...     recipe = load_recipe("digits", {"epochs": 1, "steps": 1, "batch": 512, "dim": 8})
    ...     _ = train(recipe, Path(home, "run"), progress=False)
    ...     done = rm.publish(Path(home, "run"), Path(home, "zoo", "digits", "mine"), half=True)
    ...     rm.zoo_names(Path(home, "zoo"))
    ['digits/HM[S,LGA]&ICS η=1']
    """
    source = RunFolder(run, trust=trust)
    if weights not in (None, *get_args(Which)):
        raise UserError(f"the weights are last or best, not {brief(weights)}", parameter="weights")
    licence = None if licence is None else _checked_licence(licence)
    named = [(Path(path), bare_record(load_record(path))) for path in records]
    place = source.path if out is None else Path(out).expanduser()
    recipe, about = source.recipe(), source.read()
    if place.resolve() == source.path.resolve():
        if out is None and PUBLISHED not in about:
            raise UserError(
                f"{source.path} has not been published yet: say where to, DIR (in Python, out=)",
                parameter="out",
            )
        _check_published(source, about, weights, half)
        licence = licence or licence_of(about)
        return _completed(source, source, place, named, about, licence, force)
    _check_place(source, place, force)
    licence = licence or licence_of(RunFolder(place).read()) or licence_of(about)
    chosen = source.weights(weights)
    with _drafted(place) as draft:
        made = RunFolder(draft, trust=trust)
        with writing(place, _AGAIN):
            kept = make_recipe(copy_files(bare_recipe(recipe).model_dump(), draft))
            write_atomically(made.recipe_file, lambda file: file.write(dump_recipe(kept).encode()))
            _write_weights(chosen.file, draft / chosen.file.name, half)
            if source.metrics.is_file():
                shutil.copyfile(source.metrics, made.metrics)
        content = {**bare_about(_known(source, about, chosen)), "recipe": kept.model_dump(mode="json")}
        made.write(content)
        return _completed(made, source, place, named, content, licence, force)


def _completed(
    made: RunFolder,
    source: RunFolder,
    place: Path,
    named: Sequence[tuple[Path, Record]],
    about: Mapping[str, Any],
    licence: str | None,
    force: bool,
) -> Published:
    """Write the records, the card and, last of all, run.json of a network that is in its folder."""
    loaded = load_run(made.path, trust=made.trust)
    records, left_out = _counting(made, source, place, loaded.digest)
    for path, record in named:
        if (why := why_not(record, loaded.digest)) is not None:
            raise UserError(
                f"the record {path} does not count: {why}; evaluate what is published, and give that record",
                parameter="records",
            )
        if record not in records.values():
            records[_free_name(_record_name(path), {*records, *left_out})] = record
    kept = {name: records[name] for name in sorted(records)}
    entry = {"licence": licence, "robustmetric": __version__}
    content = {**about, PUBLISHED: entry}
    card = model_card(with_records(loaded, made.path, kept), _dim(loaded, made), content)
    if not force:
        _check_card(made, card)
    for name, record in kept.items():
        with writing(made.path / name, _AGAIN):
            (made.path / name).mkdir(exist_ok=True)
        write_json(made.path / name / RECORD, record, _AGAIN)
    with writing(place / CARD, _AGAIN):
        write_atomically(made.path / CARD, lambda file: file.write(card.encode()))
    made.write({**content, PUBLISHED: {**entry, "card": text_digest(card)}})
    return Published(place, loaded.name, loaded.digest, tuple(kept), left_out, tuple(_others(made.path)))


def _counting(
    made: RunFolder, source: RunFolder, place: Path, digest: str
) -> tuple[dict[str, Record], dict[str, str]]:
    """Return the records of a run, and of the folder that is replaced, and why others do not count."""
    found, left_out = sorted_records(source.path, digest)
    records = {name: bare_record(record) for name, record in found.items()}
    if made is not source:
        earlier, others = sorted_records(place, digest)
        for name, record in earlier.items():
            if (kept := bare_record(record)) not in records.values():
                records[_free_name(name, records.keys())] = kept
        left_out = {**others, **left_out}
    return records, left_out


def _check_card(made: RunFolder, card: str) -> None:
    """Refuse to write a card over one that was changed by hand; a folder of before does not say."""
    if _is_changed(made) and file_digest(made.path / CARD) != text_digest(card):
        raise UserError(
            f"{made.path / CARD} is not the card that was written last: what was changed by hand would be "
            "lost; keep it in another file, and write the card anew by --force (in Python, force=True)"
        )


def _is_changed(folder: RunFolder) -> bool:
    """Return whether the card in a folder is known not to be the one that was written last."""
    known, file = stated(folder.read(), "card"), folder.path / CARD
    return known is not None and file.is_file() and file_digest(file) != known


def _dim(loaded: Run, made: RunFolder) -> int:
    """Return the length of a network's vectors, which two images of noise are tried for."""
    channels, size = made.shape()
    noise = torch.rand(2, channels, size, size, generator=torch.Generator().manual_seed(0))
    return loaded.embed(noise).shape[1]


def _known(source: RunFolder, about: Mapping[str, Any], chosen: Weights) -> dict[str, Any]:
    """Return the content of a run's run.json, with what an older run would look up elsewhere."""
    content = dict(about)
    if not isinstance(content.get("images"), dict):
        channels, size = source.shape()
        content["images"] = {"height": size, "width": size, "channels": channels}
    by = (chosen.chosen or "").partition("chosen on ")[2]
    if "choice" not in content and by:
        content["choice"] = {"images": by}
    return content


def _write_weights(source: Path, target: Path, half: bool) -> None:
    """Copy a file of weights, with nothing else that may be in it, and if asked for in half precision."""
    tensors = read_tensors(source)
    save_weights({name: _halved(name, value) for name, value in tensors.items()} if half else tensors, target)


def _halved(name: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    small = value.half()
    if small.isinf().sum() > value.isinf().sum():
        raise UserError(
            f"{name} has values beyond 65,504, which half precision cannot hold: publish in single precision",
            parameter="half",
        )
    return small


def _checked_licence(text: str) -> str:
    if not isinstance(text, str) or not _LICENCE.fullmatch(text):
        raise UserError(
            f"a licence is an identifier such as apache-2.0, mit, cc-by-4.0 or other, not {brief(text)}",
            parameter="licence",
        )
    return text.lower()


def _record_name(path: Path) -> str:
    """Return what the folder of a record that was found at a path would be called."""
    place = FORMAT.find(path).absolute().parent.name
    return place if place.startswith("evaluation") else f"evaluation-{slug(place) or 'more'}"


def _free_name(name: str, taken: AbstractSet[str]) -> str:
    """Return a name, with a number if it is taken."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(one for one in chain([name], numbered) if one not in taken)


def _check_published(source: RunFolder, about: Mapping[str, Any], weights: Which | None, half: bool) -> None:
    if PUBLISHED not in about:
        raise UserError(f"{source.path} is the run itself: give another folder", parameter="out")
    if weights is not None or half:
        raise UserError(
            f"{source.path} keeps the weights that it was published with: publish its run to another folder",
            parameter="half" if half else "weights",
        )


def _check_place(source: RunFolder, place: Path, force: bool) -> None:
    """Refuse a folder that cannot be written, or that holds something."""
    inner, outer = place.resolve(), source.path.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise UserError(f"{place} and the run {source.path} are in each other: give another folder")
    check_writable(place)
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not place.is_dir() or PUBLISHED not in RunFolder(place).read():
        raise UserError(f"{place} is there already, and was not published: give another folder")
    if others := _others(place):
        raise UserError(
            f"{place} holds more than was published: {shorten(others)}; move that, or give another folder"
        )
    if not force:
        told = f", with a {CARD} that was changed by hand" if _is_changed(RunFolder(place)) else ""
        raise UserError(
            f"{place} is there already{told}: give another folder, or replace it by --force (in Python, "
            "force=True)"
        )


def _others(folder: Path) -> list[str]:
    """Return the files in a folder that are none of those that are published."""
    run = RunFolder(folder)
    own = {run.recipe_file, run.about, run.metrics, run.last, run.best, folder / CARD}
    own |= {*run.code.rglob("*.py"), *folder.glob(f"evaluation*/{RECORD}")}
    files = sorted(file for file in folder.rglob("*") if not file.is_dir())
    return [str(file.relative_to(folder)) for file in files if file not in own]


@contextmanager
def _drafted(place: Path) -> Iterator[Path]:
    """Let a folder be filled beside its place, and put it there when it is whole; else nothing is left."""
    place = place.resolve()
    draft, before = (place.with_name(f".{place.name}.{uuid.uuid4().hex}.tmp") for _ in range(2))
    with writing(place, _AGAIN):
        draft.mkdir(parents=True)
    try:
        yield draft
        with writing(place, _AGAIN):
            if place.exists():
                place.replace(before)
            try:
                put_in_place(draft, place)
            except BaseException:  # Ctrl-C, too
                if before.exists():
                    before.replace(place)
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if place.exists():
            shutil.rmtree(before, ignore_errors=True)
