"""Networks to give away and to take: a folder with a model card, local or on the Hugging Face Hub."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from robustmetric import __version__
from robustmetric.data import DATA
from robustmetric.errors import UserError, brief
from robustmetric.evaluation import Record, load_record
from robustmetric.evaluation.document import write_json
from robustmetric.evaluation.record import FORMAT, RECORD
from robustmetric.exports import describe
from robustmetric.files import AGAIN, DamagedError, save
from robustmetric.locks import locked
from robustmetric.models import save_weights
from robustmetric.models.weights import read_tensors
from robustmetric.report.records import conditions
from robustmetric.report.sheet import marked_down
from robustmetric.report.summary import figures_of
from robustmetric.report.verdict import verdict
from robustmetric.text import one_line
from robustmetric.training import Recipe, Run, RunFolder, dump_recipe, load_run
from robustmetric.training.folder import Which
from robustmetric.training.recipe import make_recipe, read_file, rename_files
from robustmetric.usercode import without_folder

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

CARD = "README.md"
"""The file of the model card."""

_FILES = ["*.safetensors", "recipe.yaml", "run.json", CARD, "code/*.py", f"evaluation*/{RECORD}"]
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_QUOTED_PATH = re.compile(r"""(['"])[^'"]*[/\\][^'"]*\1""")
_TASK = "image-feature-extraction"
_TAGS = ["metric-learning", "image-retrieval", "adversarial-robustness", "pytorch", "safetensors"]


def from_pretrained(name: str | Path, revision: str | None = None, *, trust: bool = False) -> Run:
    """Load a network from the folder `name`, or download it where `name` is an id on the Hub, OWNER/NAME.

    `revision` is a branch, tag or commit of the Hub. The weights must have the digest that `publish` stated.
    Code that the network brings along is run only if you `trust` it.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _downloaded(str(name), revision)
    elif revision is not None:
        raise UserError(f"{name} is a folder, and only the Hub has revisions: leave out {brief(revision)}")
    run = load_run(folder, trust=trust)
    stated = _published(RunFolder(folder)).get("sha256")
    if stated not in (None, run.digest):
        raise DamagedError(
            f"the weights in {folder} are not those that were published: their SHA-256 is "
            f"{run.digest[:12]}…, not {str(stated)[:12]}…; take another copy"
        )
    return run


def _downloaded(name: str, revision: str | None) -> Path:
    if not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"there is no folder {name}, and a network on the Hub is named OWNER/NAME")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        told = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise UserError(
            f"there is no folder {name}, and it cannot be downloaded from the Hub ({told}): check the name, "
            "the revision and the connection"
        ) from None


@dataclass(frozen=True)
class Published:
    """What `publish` wrote: the `name` of the network in a `folder`, and its SHA-256, `digest`.

    `records` are the folders of its records; `left_out` says why others do not count.
    """

    folder: Path
    name: str
    digest: str
    records: tuple[str, ...]
    left_out: Mapping[str, str]


def publish(
    run: Path | str,
    out: Path | str,
    *,
    weights: Which | None = None,
    half: bool = False,
    records: Sequence[Path | str] = (),
    licence: str | None = None,
    force: bool = False,
    trust: bool = False,
) -> Published:
    """Write what a `run` trained to a folder `out` that can be given away, with a model card.

    The folder gets the weights that `load_run` takes, or the `weights` "last" or "best", with `half` in half
    precision; the recipe and copies of the code it names; the records in ``run/evaluation*`` and further
    `records`; and a card that states the `licence`. Paths of this machine are left out. A record counts if it
    is of the very weights that are published. `force` rewrites a folder that was published before, and keeps
    its other files. The code of a run is run only with `trust`.
    """
    source, place = RunFolder(run, trust=trust), Path(out).expanduser()
    if weights not in (None, *get_args(Which)):
        raise UserError(f"weights must be last or best, not {brief(weights)}", parameter="weights")
    source.recipe()  # refused if it was edited
    recipe = _bare_recipe(read_file(source.recipe_file))
    chosen = source.weights(weights).file
    tensors = {name: _half(name, value) if half else value for name, value in read_tensors(chosen).items()}
    licence = licence or _published(source).get("licence") or _published(RunFolder(place)).get("licence")
    with _rewritten(place, force) as draft:
        made = RunFolder(draft, trust=trust)
        for old in draft.glob("*.safetensors"):
            old.unlink()
        save_weights(tensors, draft / chosen.name)
        save(made.recipe_file, dump_recipe(recipe))
        if source.code.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(source.code, made.code, dirs_exist_ok=True, ignore=ignored)
        if source.metrics.is_file():
            shutil.copyfile(source.metrics, made.metrics)
        before, (channels, size) = source.read(), source.shape()
        origin = before.get("origin")
        about = {
            "recipe": recipe.model_dump(mode="json"),
            "images": {"height": size, "width": size, "channels": channels},
            "choice": before.get("choice"),
            "origin": {
                "images": origin.get("images") if isinstance(origin, dict) else None,
                "code": made.code_digest(),
            },
        }
        made.write(about)
        loaded = load_run(draft, trust=trust)
        stated = {"licence": licence, "robustmetric": __version__, "sha256": loaded.digest}
        made.write({**about, "published": stated})
        found, left_out = _records([draft, source.path], [Path(path) for path in records], loaded.digest)
        for name, record in found.items():
            (draft / name).mkdir(exist_ok=True)
            write_json(draft / name / RECORD, record, AGAIN)
        rounded = any(value.dtype == torch.float16 for value in tensors.values())
        card = _card(loaded, recipe, found, licence=licence, half=rounded, own=made.code.is_dir())
        save(draft / CARD, card)
    return Published(place, loaded.name, loaded.digest, tuple(found), left_out)


@contextmanager
def _rewritten(place: Path, force: bool) -> Iterator[Path]:
    """Yield a copy of the folder `place`, or a new folder, and put it there when it is complete."""
    home = place.absolute().with_name(f".{place.absolute().name}.export")
    draft, before = home / "new", home / "old"
    try:
        with locked(home, "an export"):
            if before.exists() and not place.exists():  # a kill between the two renames
                before.replace(place)
            shutil.rmtree(draft, ignore_errors=True)
            try:
                if not place.exists() or (place.is_dir() and not any(place.iterdir())):
                    draft.mkdir()
                elif not _published(RunFolder(place)):
                    raise UserError(f"{place} holds something else: give another folder", parameter="out")
                elif not force:
                    raise UserError(
                        f"{place} exists: give another folder, or overwrite it", parameter="force"
                    )
                else:
                    shutil.copytree(place, draft)
                yield draft
                if place.exists():
                    place.replace(before)
                draft.replace(place)
            finally:
                if before.exists() and not place.exists():
                    before.replace(place)
                shutil.rmtree(draft, ignore_errors=True)
                shutil.rmtree(before, ignore_errors=True)
    finally:
        with suppress(OSError):  # locked() removes it, unless a kill left it
            home.rmdir()


def _published(folder: RunFolder) -> dict[str, Any]:
    """Return what the run.json of a published folder says of that; empty for any other."""
    found = folder.read().get("published")
    return found if isinstance(found, dict) else {}


def _half(name: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    small = value.half()
    if small.isinf().sum() > value.isinf().sum():
        raise UserError(f"{name} has values beyond 65,504: publish in single precision", parameter="half")
    return small


# Without paths of this machine


def _bare_recipe(entries: dict[str, Any]) -> Recipe:
    """Return a recipe without the folders of images and of first weights; its code is that of the run."""

    def own(file: Path) -> Path:
        if file.parts[0] != "code" or ".." in file.parts:
            raise UserError(f"the recipe names {file}, of which the run holds no copy: train it again")
        return file

    for key in ("model", "defense", "data"):
        if _QUOTED_PATH.search(str(entries.get(key))):
            raise UserError(
                f"the {key} {brief(entries[key])} has a path in its options, which cannot be given away: "
                "train with one that needs no such file"
            )
    first = entries.get("weights")
    return make_recipe({**rename_files(entries, own), "root": None, "weights": first and _name(str(first))})


def _name(path: str) -> str:
    """Return the last part of a path, of whichever system."""
    return PureWindowsPath(path).name or "."


def _records(
    folders: Sequence[Path], named: Sequence[Path], digest: str
) -> tuple[dict[str, Record], dict[str, str]]:
    """Return the records of the weights with this digest, and why others do not count."""
    found: dict[str, Record] = {}
    left_out: dict[str, str] = {}
    inside = [file for folder in folders for file in sorted(folder.glob(f"evaluation*/{RECORD}"))]
    for path in [*inside, *named]:
        name = FORMAT.find(path).absolute().parent.name
        name = name if name.startswith("evaluation") else f"evaluation-{name}"
        try:
            record = load_record(path)
            if record.network.sha256 != digest:
                raise UserError(f"it is of other weights, with the SHA-256 {record.network.sha256[:12]}…")
        except UserError as error:
            if path in named:
                raise UserError(f"the record {path} does not count: {error}", parameter="records") from None
            left_out[name] = str(error)
            continue
        skipped = [_name(file) for file in record.data.skipped]
        record = record.model_copy(update={"data": record.data.model_copy(update={"skipped": skipped})})
        if (record := record.sealed()) not in found.values():
            while name in found:
                name += "-2"
            found[name] = record
    return found, left_out


# The model card


def _card(run: Run, recipe: Recipe, records: Mapping[str, Record], **told: Any) -> str:
    """Return the model card of a run, Markdown with metadata; its template shows what is `told` besides."""
    from huggingface_hub import ModelCard, ModelCardData
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    results = [result for name, record in records.items() for result in _results(name, record)]
    data = ModelCardData(
        license=told["licence"] and told["licence"].lower(),
        library_name="robustmetric",
        pipeline_tag=_TASK,
        tags=_TAGS,
        datasets=[recipe.data] if recipe.data in DATA and recipe.data not in ("folder", "csv") else None,
        model_name=one_line(run.name),
        eval_results=results or None,
    )
    channels, size = run.inputs.channels or 3, run.inputs.crop or run.inputs.resize or 1
    noise = torch.rand(2, channels, size, size, generator=torch.Generator().manual_seed(0))
    pages = Environment(
        loader=PackageLoader("robustmetric", "."),
        autoescape=False,  # noqa: S701  # Markdown: all text goes through marked_down
        finalize=lambda value: value if isinstance(value, Markup) else marked_down(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = pages.get_template("hub.md.j2").render(
        run=run,
        images=without_folder(recipe.data),
        about=describe(run, dim=run.embed(noise).shape[1]),
        recipe=Markup(dump_recipe(recipe)),  # noqa: S704  # in a block of code
        records=records,
        conditions=_conditions,
        figures=figures_of,
        verdict=verdict,
        version=__version__,
        **told,
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))


def _results(folder: str, record: Record) -> Iterator[EvalResult]:
    """Yield the valid scores as the Hub lists them, with one digit more than tables show."""
    from huggingface_hub import EvalResult

    data = record.data
    for name, (column, score) in figures_of(record).items():
        if score.value is None or math.isnan(score.value) or not getattr(score, "valid", True):
            continue
        value, low, high = (
            None if one is None else round(one, column.unit.digits + 1)
            for one in (score.value, score.low, score.high)
        )
        yield EvalResult(
            task_type=_TASK,
            task_name="Image retrieval",
            dataset_type=one_line(without_folder(data.name)),
            dataset_name=one_line(f"{without_folder(data.name)} {data.shape[1]}×{data.shape[2]}"),
            dataset_config=one_line(folder),
            dataset_args={"images": data.images, "sha256": one_line(data.sha256)},
            metric_type=one_line(name),
            metric_name=one_line(f"{name} ({record.settings.protocol})"),
            metric_value=value,
            metric_config=_conditions(record),
            metric_args=None if low is None else {"low": low, "high": high, "interval": "95 %"},
        )


def _conditions(record: Record) -> str:
    told = {"protocol": record.settings.protocol, **conditions(record)}
    failed = [check.name for check in record.checks if check.status == "fail"]
    told |= {"failed checks": ", ".join(failed)} if failed else {}
    return one_line("; ".join(f"{name} {value}" for name, value in told.items() if name != "data"))
