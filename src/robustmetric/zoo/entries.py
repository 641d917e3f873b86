"""A published network in its folder: what is read of it, and what it is called."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robustmetric.defenses import defense
from robustmetric.errors import UserError
from robustmetric.evaluation import Record, load_record
from robustmetric.evaluation.record import RECORD
from robustmetric.text import printable
from robustmetric.training.folder import RunFolder
from robustmetric.training.parts import perturbs
from robustmetric.training.recipe import Recipe, bare, make_recipe, named_files, read_file
from robustmetric.training.trained import Run, load_run
from robustmetric.usercode import without_folder

CARD = "README.md"
"""The file of the model card."""

PUBLISHED = "published"
"""The entry of run.json that says that a folder was published: its licence, and its files' digests."""


@dataclass(frozen=True, eq=False, repr=False)
class ZooRun(Run):
    """A published network, as `load_zoo` returns it.

    - `network`, `inputs`, `recipe`, `chosen`: as of any other run.
    - `folder`: where it was read from.
    - `card`: the model card, as Markdown; empty if there is none.
    - `records`: what was measured of this network, by the names of the records' folders.
    """

    folder: Path
    card: str
    records: Mapping[str, Record]

    def __repr__(self) -> str:
        return (
            f"ZooRun({self.name!r}, folder={str(self.folder)!r}, digest='{self.digest[:12]}…', "
            f"records={[*self.records]})"
        )


@dataclass(frozen=True)
class Label:
    """What a network of a zoo is called: its `data` and `defense`, and η, None if it perturbs nothing.

    >>> str(Label("fashion-mnist", "HM[S,LGA]&ICS", 8)), str(Label("digits", "N/A[S]", None))
    ('fashion-mnist/HM[S,LGA]&ICS η=8', 'digits/N/A[S]')
    """

    data: str
    defense: str
    steps: int | None

    @property
    def short(self) -> str:
        """The name without η."""
        return f"{self.data}/{self.defense}"

    def __str__(self) -> str:
        return self.short if self.steps is None else f"{self.short} η={self.steps}"


def one_spelling(text: str) -> str:
    """Return the name of a defense as `rm.defense` spells it; one that cannot be made here as it is.

    No code of a file is run for it.

    >>> one_spelling("HM[S, -gamma/2]&ICS(lambda=0.05)"), one_spelling("code/mine.py:Mine")
    ('HM[S,-γ/2]&ICS(λ=0.05)', 'mine.py:Mine')
    """
    if named_files({"defense": text}):
        return str(bare({"defense": text})["defense"]).strip()
    try:
        return defense(text).name
    except UserError:
        return text.strip()


def label_of(recipe: Recipe) -> Label:
    """Return what the network of a `recipe` is called in a zoo.

    >>> str(label_of(Recipe(data="digits", defense="min-max[S]", steps=4)))
    'digits/HM[S,2] η=4'
    """
    steps = recipe.steps if perturbs(recipe) else None
    return Label(without_folder(recipe.data), one_spelling(recipe.defense), steps)


def read_label(folder: Path) -> Label:
    """Return what the network in a `folder` is called, by its recipe; nothing else is read."""
    entries: dict[str, Any] = read_file(RunFolder(folder).recipe_file)
    return label_of(make_recipe(entries))


def sorted_records(folder: Path, digest: str) -> tuple[dict[str, Record], dict[str, str]]:
    """Return the records in a `folder` of the network with this `digest`, and why others do not count."""
    found: dict[str, Record] = {}
    others: dict[str, str] = {}
    for file in sorted(folder.glob(f"evaluation*/{RECORD}")):
        try:
            record = load_record(file)
        except (UserError, OSError) as error:
            others[file.parent.name] = str(error)
            continue
        if (why := why_not(record, digest)) is None:
            found[file.parent.name] = record
        else:
            others[file.parent.name] = why
    return found, others


def why_not(record: Record, digest: str) -> str | None:
    """Return why a `record` does not count for the network with this `digest`; None if it does."""
    if record.network.sha256 == digest:
        return None
    return (
        f"it is of other weights, whose SHA-256 is {printable(record.network.sha256)[:12]}…, and these have "
        f"{digest[:12]}…"
    )


def licence_of(about: Mapping[str, Any]) -> str | None:
    """Return the licence that a run.json states, given its content, `about` a run; None if it states none.

    >>> licence_of({"published": {"licence": "mit"}}), licence_of({})
    ('mit', None)
    """
    return stated(about, "licence")


def stated(about: Mapping[str, Any], key: str) -> str | None:
    """Return a text under a `key` of what run.json, `about` a run, says of its publishing; None without it.

    >>> stated({"published": {"card": "0a"}}, "card"), stated({"published": None}, "card")
    ('0a', None)
    """
    entry = about.get(PUBLISHED)
    found = entry.get(key) if isinstance(entry, dict) else None
    return found if isinstance(found, str) else None


def text_digest(text: str) -> str:
    r"""Return the SHA-256 of a `text`, however its lines end.

    >>> text_digest("a\r\n") == text_digest("a\n")
    True
    """
    return hashlib.sha256(text.replace("\r\n", "\n").encode("utf-8", "replace")).hexdigest()


def file_digest(file: Path) -> str:
    """Return the SHA-256 of the text in a `file`, however its lines end."""
    return text_digest(file.read_text(encoding="utf-8", errors="replace"))


def read_entry(folder: Path, *, trust: bool = False) -> ZooRun:
    """Load the network in a `folder` with its records; warnings tell which do not count, and what is gone."""
    run = load_run(folder, trust=trust)
    records, others = sorted_records(folder, run.digest)
    for name, why in others.items():
        warnings.warn(f"the record {folder / name} is left out: {why}", stacklevel=3)
    if not (about := RunFolder(folder).about).is_file():
        warnings.warn(
            f"{folder} has no {about.name}: whether its recipe was changed cannot be told; take a whole copy "
            "of the folder",
            stacklevel=3,
        )
    if not (folder / CARD).is_file():
        warnings.warn(
            f"{folder} has no model card, {CARD}: publish the folder again to write it", stacklevel=3
        )
    return with_records(run, folder, records)


def with_records(run: Run, folder: Path, records: Mapping[str, Record]) -> ZooRun:
    """Return a `run` that was loaded from a `folder` with its card, if there is one, and its `records`."""
    file = folder / CARD
    card = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return ZooRun(run.network, run.inputs, run.recipe, run.chosen, folder, card, records)
