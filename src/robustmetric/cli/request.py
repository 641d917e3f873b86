"""What a command line asks to be tested: a network, images and a plan, as data that workers can take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch
import typer
from pydantic import BaseModel
from torch import nn

from robustmetric.cli import options
from robustmetric.cli.progress import Progress
from robustmetric.data import load
from robustmetric.data.base import Split
from robustmetric.data.cache import Pixels
from robustmetric.data.inputs import Inputs, load_pixels, relative_files, usual_inputs
from robustmetric.errors import UserError, whole
from robustmetric.evaluation import Evaluation, Plan, Subject
from robustmetric.evaluation.data import Data, data_by_marks, data_of_two
from robustmetric.evaluation.plan import usual_eps
from robustmetric.models.source import NetworkSource, try_network
from robustmetric.registry import split_names
from robustmetric.text import printable
from robustmetric.training.folder import RunFolder, Which
from robustmetric.training.trained import Run, load_run
from robustmetric.usercode import without_folder


@dataclass(frozen=True, kw_only=True)
class Tested:
    """The network and the images that are tested: an option of the command line for each field."""

    run: Annotated[Path | None, typer.Argument(help="Run folder; or give --model and --weights.")] = None
    model: options.Model = None
    weights: options.Weights = None
    dim: options.Dim = None
    surrogate: options.Surrogate = None
    trust: options.Trust = False
    data: options.Data = None
    root: options.Root = None
    split: options.Split = "test"
    gallery: options.Gallery = None
    queries_from: options.QueriesFrom = None
    size: options.Size = None
    resize: options.Resize = None
    crop: options.Crop = None
    fit: options.Fit = None
    cache: options.Cache = None
    skip_broken: options.SkipBroken = False
    device: options.Device = "auto"

    def __post_init__(self) -> None:
        for name, most in {"size": 4096, "resize": 4096, "crop": 4096, "dim": 65_536}.items():
            if (value := getattr(self, name)) is not None:
                whole(name, value, 1, most)

    def folder(self, out: Path | None, name: str) -> Path:
        """Return the folder `out` of the output, by default the one of this `name` in the run's."""
        if out is None and self.run is None:
            raise UserError(f"give a folder for the {name}", parameter="out")
        return out or RunFolder(self.run or "").path / name

    def run_folder(self) -> RunFolder | None:
        """Return the run, if one is given: it brings a network of its own."""
        if self.run is None:
            return None
        for name in ("model", "dim"):
            if (given := getattr(self, name)) is not None:
                raise UserError(
                    f"a run has its own network: leave {given} out, or {self.run}", parameter=name
                )
        return _run_folder(self.run, self.trust, "run")


def takes(
    plan: type[BaseModel], *settings: str, without: Collection[str] = ("surrogate",), **other: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take the options of `Tested`, and those of the fields `settings` of a `plan`.

    The command is called with a `Tested` and with the settings that were given, before its own options. It
    has no options for the fields `without`; `other` declares options of settings in another way.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[2:]
        hints = get_type_hints(Tested, include_extras=True)
        used = [field for field in fields(Tested) if field.name not in without]
        tested = [_parameter(field.name, hints[field.name], field.default) for field in used]
        planned = [_of_plan(plan, name, other.get(name, options.SETTINGS.get(name))) for name in settings]

        @wraps(command)
        def call(**values: Any) -> None:
            network = Tested(**{p.name: values.pop(p.name) for p in tested})
            given = {name: value for name in settings if (value := values.pop(name)) is not None}
            if "attacks" in given:
                given["attacks"] = split_names(given["attacks"])
            command(network, given, **values)

        parameters = sorted([*tested, *planned, *own], key=_panel)
        # The places that a signature is read from.
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate


def _of_plan(plan: type[BaseModel], name: str, declared: Any) -> inspect.Parameter:
    """Return the option of a plan's field, whose default the help shows."""
    kind, info = get_args(declared)
    default = plan.model_fields[name].default if info.show_default is True else None
    return _parameter(name, declared if default is not None else Annotated[kind | None, info], default)


def _panel(parameter: inspect.Parameter) -> int:
    declared = (*getattr(parameter.annotation, "__metadata__", ()), parameter.default)[0]
    panel = getattr(declared, "rich_help_panel", None)
    return options.PANELS.index(panel) if panel in options.PANELS else -1


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@dataclass(frozen=True)
class Images:
    """A `split` of a data set, by its name and directory."""

    data: str
    root: Path | None
    split: Split

    @classmethod
    def at(cls, path: Path) -> Images:
        """Return all images at a path: of a file as a table, of a directory as a folder of classes."""
        if not path.exists():
            raise FileNotFoundError(f"there is no {path} to take images from: give a folder or a CSV file")
        return cls("csv" if path.is_file() else "folder", path, "all")

    @property
    def title(self) -> str:
        """Their name in a record."""
        data = without_folder(self.data)
        return data if self.split == "test" else f"{data} ({self.split})"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A network, its images and how to attack it, with all that is known before they are loaded.

    `name` and `data` are the names of network and images in a record. `queries` are the images that query,
    `gallery` those that are ranked, if they are others. `chosen` says how the weights were chosen,
    `trained_on` names the classes of the training, where that is known. `surrogate` is the network that
    perturbations come from, with its inputs.
    """

    tested: Tested
    name: str
    data: str
    source: NetworkSource
    inputs: Inputs
    queries: Images
    gallery: Images | None
    chosen: str | None
    trained_on: tuple[str, ...] | None
    settings: Mapping[str, Any]
    surrogate: tuple[NetworkSource, Inputs] | None

    @classmethod
    def of(cls, tested: Tested, settings: Mapping[str, Any]) -> Request:
        """Resolve the options; what cannot be is rejected before an image is decoded."""
        device_of_share(tested.device)
        run = tested.run_folder()
        entries = _of_network(tested) if run is None else _of_run(tested, run)
        eps = entries.pop("eps")
        surrogate = None
        if tested.surrogate is not None:
            other = _run_folder(tested.surrogate, tested.trust, "surrogate")
            surrogate = other.source(), other.inputs()
        usual = {"eps": eps} if settings.get("norm", "linf") == "linf" else {}
        request = cls(tested=tested, settings={**usual, **settings}, surrogate=surrogate, **entries)
        plan = request.plan()
        if surrogate is not None and not plan.transfers and plan.suite is None:
            raise UserError(
                f"a surrogate needs the search transfer or a suite, not {plan.settings.search!r} alone",
                parameter="surrogate",
            )
        if surrogate is None and plan.transfers:
            raise UserError("transfer needs a surrogate: give the folder of a run", parameter="surrogate")
        return request

    def plan(self) -> Plan:
        """Make the plan."""
        return Plan.make(**self.settings)

    def images(self, progress: Progress | None = None) -> Data:
        """Load the images; show how far that is, and which files cannot be read."""
        found: list[Pixels] = []
        sides = [self.queries] if self.gallery is None else [self.queries, self.gallery]
        for side in sides:
            found += load_pixels(side.data, side.root, self.inputs, [side.split], **self.reading(progress))
        return self.data_of(found, [side.root for side in sides], progress)

    def reading(self, progress: Progress | None) -> dict[str, Any]:
        """Return how images are read."""
        return {
            "cache": self.tested.cache,
            "skip_broken": self.tested.skip_broken,
            "watch": None if progress is None else progress.decoding,
            "report": (lambda _: None) if progress is None else progress.say,
        }

    def data_of(
        self, found: Sequence[Pixels], roots: Sequence[Path | None], progress: Progress | None
    ) -> Data:
        """Return the images that were found below the roots, of one side or of both."""
        files = [relative_files(pixels, root) for pixels, root in zip(found, roots, strict=True)]
        skipped = [str(file) for pixels in found for file in pixels.skipped]
        if progress is not None:
            for file in skipped:
                progress.say(f"left out, not readable: {file}")
        if len(found) == 1:
            data = data_by_marks(found[0], self.inputs.crop, files[0])
        else:
            data = data_of_two(found[0], found[1], self.inputs.crop, files[0], files[1])
        return replace(data, name=self.data, skipped=[printable(file) for file in skipped])

    def networks(
        self,
        share: int = 0,
        *,
        tried: bool = False,
        gradient: bool | None = None,
        first: Pixels | None = None,
    ) -> tuple[nn.Module, nn.Module | None]:
        """Make the network and the surrogate on the `share`-th device, and try them on an image.

        The network needs a `gradient` if the search follows it, unless told otherwise. The image is the
        `first` one, by default of those that query.
        """
        device, plan = device_of_share(self.tested.device, share), self.plan()
        if first is None:
            first = self.inputs.first(load(self.queries.data, self.queries.root, self.queries.split))
        network = self.source.make(*self.inputs.shape(first)).to(device)
        image, other = self.inputs.images(first)[:1], None
        if self.surrogate is not None:
            source, inputs = self.surrogate
            try:
                other = source.make(*inputs.shape(first)).to(device)
                if not tried:
                    follows = plan.search_on(other).differentiates(other) or plan.suite is not None
                    try_network(other, image, gradient=follows)
            except UserError as error:
                raise UserError(
                    f"the surrogate does not fit the images: {error}", parameter="surrogate"
                ) from None
        if not tried:
            if gradient is None:
                gradient = plan.search_on(other).differentiates(network)
            try_network(network, image, gradient=gradient)
        return network, other

    def subject(self, networks: tuple[nn.Module, nn.Module | None], data: Data) -> Subject:
        """Return what is tested, from its networks and data."""
        classes = None if self.trained_on is None else [printable(name) for name in self.trained_on]
        network, surrogate = networks
        named: dict[str, Any] = {"train_classes": classes, "name": self.name, "weights": self.chosen}
        return Subject(network, data, surrogate=surrogate, **named)

    def evaluation(
        self, networks: tuple[nn.Module, nn.Module | None], data: Data, out: Path | None = None, *how: Any
    ) -> Evaluation:
        """Return the evaluation of networks and data; `how` are its progress and report."""
        return Evaluation(self.subject(networks, data), self.plan(), out, *how)


def device_of_share(name: str, share: int = 0) -> torch.device:
    """Return a device by its name; workers get one GPU each, as long as there are some."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = "cuda" if there["cuda"] else "cpu"
    if not there.get(name):
        raise UserError(f"torch finds no {name} here: use cpu", parameter="device")
    return torch.device(name, share % torch.cuda.device_count()) if name == "cuda" else torch.device(name)


def loaded_run(folder: Path, weights: str | None, device: str, trust: bool) -> Run:
    """Load what a run trained onto a device, for a command that needs no images of the run."""
    run = load_run(folder, _weights(weights), trust=trust)
    run.network.to(device_of_share(device))
    return run


def _run_folder(folder: Path, trust: bool, parameter: str) -> RunFolder:
    run = RunFolder(folder, trust=trust)
    if not run.exists:
        raise UserError(
            f"{str(folder)!r} is not a run folder: no {run.recipe_file.name} in it", parameter=parameter
        )
    return run


def _of_run(tested: Tested, run: RunFolder) -> dict[str, Any]:
    """Return the entries of a request for what a run trained."""
    recipe, weights = run.recipe(), run.choose(_weights(tested.weights))
    images = Images(tested.data or recipe.data, tested.root or recipe.root, tested.split)
    queries, gallery = _sides(tested, images)
    chosen = weights.chosen
    own = (images.data, images.root) == (recipe.data, recipe.root) and queries is images and gallery is None
    if chosen == "chosen on test images" and not own:
        chosen = f"{chosen} of its run"
    any_size = gallery is not None or tested.data not in (None, recipe.data)
    return {
        "name": run.name,
        "data": images.title,
        "source": run.source(weights.file),
        "inputs": replace(run.inputs(any_size=any_size), **_sizes(tested)),
        "queries": queries,
        "gallery": gallery,
        "chosen": chosen,
        "trained_on": run.train_classes(),
        "eps": recipe.eps,
    }


def _of_network(tested: Tested) -> dict[str, Any]:
    """Return the entries of a request for a network by its name or file, with a file of weights or none."""
    if tested.model is None:
        raise UserError("no network: give the folder of a run, or --model NAME with --weights FILE")
    data, root, file = tested.data, tested.root, _weights(tested.weights, of_run=False)
    if data is None and tested.gallery is not None and tested.queries_from is not None:
        place = Images.at(tested.queries_from)
        data, root = place.data, place.root
    if data is None:
        raise UserError("no images: give --data NAME, and its --root", parameter="data")
    source = NetworkSource(tested.model, dim=tested.dim, weights=file)
    source.check()
    images = Images(data, root, tested.split)
    queries, gallery = _sides(tested, images)
    name = without_folder(tested.model)
    return {
        "name": name if file is None else f"{name} {file.name}",
        "data": images.title,
        "source": source,
        "inputs": usual_inputs(data, root, tested.model, _sizes(tested)),
        "queries": queries,
        "gallery": gallery,
        "chosen": None if file is not None else "no weights were given",
        "trained_on": None,
        "eps": usual_eps(data),
    }


def _sides(tested: Tested, own: Images) -> tuple[Images, Images | None]:
    """Return the images that query and, if they are others, those that are ranked."""
    if tested.gallery is None and tested.queries_from is None:
        return own, None
    asked, ranked = (own if p is None else Images.at(p) for p in (tested.queries_from, tested.gallery))
    return asked, ranked


def _weights(given: str | None, *, of_run: bool = True) -> Any:
    """Return a file of weights, or the name of a run's."""
    if given is None or (of_run and given in get_args(Which)):
        return given
    if not Path(given).is_file():
        raise UserError(f"there is no weights file {given}: give another file", parameter="weights")
    return Path(given)


def _sizes(tested: Tested) -> dict[str, Any]:
    """Return the sizes and the fit that are given, in place of the usual ones or of those trained with."""
    size = tested.size
    asked = {"resize": tested.resize or size, "crop": tested.crop or size, "fit": tested.fit}
    return {name: value for name, value in asked.items() if value is not None}
