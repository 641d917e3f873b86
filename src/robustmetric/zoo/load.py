"""Networks by their names, from the package or from a folder of published ones; nothing is fetched."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from robustmetric.data import DATA
from robustmetric.defenses import defense
from robustmetric.errors import UserError, brief, shorten
from robustmetric.usercode import file_of
from robustmetric.zoo.entries import Label, ZooRun, one_spelling, read_entry, read_label

NETWORKS = Path(__file__).with_name("networks")
"""Where the networks of the package are: in a clone a link to results/zoo."""

_ETA = re.compile(r"(?:\s*,\s*|\s+)(?:η|eta)\s*=\s*(\d{1,9})\s*\Z")


def zoo_names(folder: Path | str | None = None) -> list[str]:
    """Return the names of the networks that `load_zoo` knows: those of the package, or of a `folder`.

    Of a defense that perturbs images, the name says the η that it was trained with. An entry that cannot be
    read is told by a warning.

    >>> zoo_names()[-1]
    'fashion-mnist/N/A[S]'
    """
    labels = set(_entries(folder).values())
    return [str(label) for label in sorted(labels, key=lambda label: (label.short, label.steps or 0))]


def load_zoo(name: str, folder: Path | str | None = None, *, trust: bool = False) -> ZooRun:
    """Load a trained network by its `name`, with its model card and what was measured of it.

    The name is ``DATA/DEFENSE``: the data set that it was trained on and the defense as `rm.defense` takes
    it, in any spelling. ``η=8`` behind it asks for the one that was trained with 8 steps; else the one with
    the most steps counts. Networks are those of the package, or the published ones below a `folder`:
    ``FOLDER/*/*/recipe.yaml``. Nothing is downloaded. A network of a file is refused unless it is known to be
    the user's own, or `trust` says so.

    >>> run = load_zoo("fashion-mnist/HM[S,LGA]&ICS η=8")
    >>> run.name, run.recipe.steps, run.card.splitlines()[0]
    ('c2f2 HM[S,LGA]&ICS', 8, '---')
    """
    if not isinstance(name, str):
        raise UserError(f"a network is named by a text such as 'digits/N/A[S]', not {brief(name)}")
    return read_entry(_place(name, _entries(folder), folder), trust=trust)


def zoo_folder(name: str) -> Path | None:
    """Return the folder of the package's network that `load_zoo` knows by a `name`; None without one.

    >>> zoo_folder("fashion-mnist/HM[S, LGA] & ICS eta=8").name, zoo_folder("runs/mine")
    ('HM-S-LGA-and-ICS-8', None)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of entries that cannot be read
            return _place(name, _entries(None), None)
    except UserError:
        return None


def _place(name: str, entries: Mapping[Path, Label], folder: Path | str | None) -> Path:
    """Return the folder of the one network among `entries`, those of a zoo's folder, that is meant."""
    eta = _ETA.search(name)
    short = name[: eta.start()] if eta else name
    found = {
        place: label
        for place, label in entries.items()
        if _is_meant(label, short) and (eta is None or label.steps == int(eta[1]))
    }
    if not found:
        where = "" if folder is None else f" in {folder}"
        names = sorted({str(label) for label in entries.values()})
        hint = _near(short, entries.values())
        raise UserError(f"unknown network {brief(name)}{hint}; known: {', '.join(names)}{where}")
    most = max(label.steps or 0 for label in found.values())
    places = [place for place, label in found.items() if (label.steps or 0) == most]
    if len(places) > 1:
        raise UserError(
            f"{len(places)} networks are called {brief(name)}: {shorten(places)}; load one of them by its "
            "folder, with rm.load_run"
        )
    return places[0]


def _is_meant(label: Label, short: str) -> bool:
    """Return whether a name without η is that of a network, in whichever spelling of the defense."""
    data, asked = f"{label.data}/", short.strip()
    return asked.startswith(data) and one_spelling(asked.removeprefix(data)) == label.defense


def _near(short: str, labels: Iterable[Label]) -> str:
    """Return which network may be meant by a name without η that is misspelt; another defense is not."""
    data, _, rest = short.strip().partition("/")
    if data in DATA and _is_defense(rest):
        return ""
    names = {label.short.lower(): label.short for label in labels}
    found = difflib.get_close_matches(short.strip().lower(), names, n=1, cutoff=0.8)
    return f" (did you mean {names[found[0]]!r}?)" if found else ""


def _is_defense(text: str) -> bool:
    try:
        return bool(defense(text)) if file_of(text) is None else True
    except UserError:
        return False


def _entries(folder: Path | str | None) -> dict[Path, Label]:
    """Return the folders of published networks, and what each is called; damaged ones are told."""
    place = NETWORKS if folder is None else Path(folder).expanduser()
    if not place.is_dir():
        if folder is None:
            raise UserError(
                f"the networks of the package are not at {place}, which should be a folder or a link to one: "
                "give folder=, such as results/zoo of a clone",
                parameter="folder",
            )
        raise FileNotFoundError(f"there is no folder {place}: give one with DATA/NAME/recipe.yaml in it")
    found, broken = {}, 0
    for file in sorted(place.glob("*/*/recipe.yaml")):
        try:
            found[file.parent] = read_label(file.parent)
        except (UserError, OSError) as error:
            warnings.warn(f"{file.parent} is left out, its recipe cannot be read: {error}", stacklevel=3)
            broken += 1
    if not found:
        raise UserError(_why_empty(place, broken), parameter="folder")
    return found


def _why_empty(place: Path, broken: int) -> str:
    """Return why a folder is no zoo, `broken` entries aside, and what to do."""
    if broken:
        told = "the only network" if broken == 1 else f"all {broken} networks"
        return f"{told} in {place} cannot be read: publish again what the warnings name"
    if (place / "recipe.yaml").is_file():
        return (
            f"{place} is a network itself: load it with rm.load_run, or give the folder two above it, with "
            "DATA/NAME/recipe.yaml in it"
        )
    if any(place.glob("*/recipe.yaml")):
        return (
            f"{place} holds networks as NAME/recipe.yaml: give the folder above it, with "
            "DATA/NAME/recipe.yaml in it, or load one of them with rm.load_run"
        )
    return (
        f"{place} holds no network: give a folder with DATA/NAME/recipe.yaml in it, as `robustmetric "
        "publish` writes it"
    )
