"""What a command line asks to be evaluated, as plain data that can be sent to workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from robustmetric.cli.app import OWN
from robustmetric.cli.options import Tested
from robustmetric.cli.progress import Progress as Bars
from robustmetric.data import DATA, load
from robustmetric.data.base import Split
from robustmetric.data.cache import Pixels
from robustmetric.data.inputs import Inputs, load_pixels, relative_files, usual_inputs
from robustmetric.errors import UserError
from robustmetric.evaluation import Evaluation, Plan, Subject
from robustmetric.evaluation.data import Data, data_by_marks, data_of_two
from robustmetric.evaluation.job import Progress
from robustmetric.evaluation.plan import usual_eps
from robustmetric.models.source import NetworkSource, try_network
from robustmetric.registry import lookup
from robustmetric.text import printable
from robustmetric.training.folder import RunFolder, Which
from robustmetric.training.trained import Run, load_run
from robustmetric.usercode import without_folder

SPLITS: dict[str, Split] = {"test": "test", "all": "all"}


@dataclass(frozen=True)
class Images:
    """Images by the name of a data set, where its files are, and which of them."""

    data: str
    root: Path | None
    split: Split

    @property
    def title(self) -> str:
        """What a record calls them."""
        data = without_folder(self.data)
        return data if self.split == "test" else f"{data} ({self.split})"


@dataclass(frozen=True)
class Request:
    """A network, its images and how to attack it, with all that can be told of them before they are loaded.

    `name` and `data` are what a record calls the network and the images, `inputs` is what the network takes.
    `queries` are the images that query, `gallery` those that are ranked, if they are others. `chosen` says
    how the weights were chosen, `trained_on` are the classes that the network was trained on, if that is
    known. `surrogate` is the network that perturbations come from, and what it takes.
    """

    name: str
    data: str
    source: NetworkSource
    inputs: Inputs
    queries: Images
    gallery: Images | None
    settings: Mapping[str, Any]
    surrogate: tuple[NetworkSource, Inputs] | None
    chosen: str | None
    trained_on: tuple[str, ...] | None
    device: str
    cache: Path | None
    skip_broken: bool

    @classmethod
    def of(cls, tested: Tested, settings: Mapping[str, Any]) -> Request:
        """Work out what the options ask for; whatever cannot be is refused before an image is decoded."""
        split = lookup("split", tested.split, SPLITS)
        device_of_share(tested.device, 0)
        made = _of_run(tested, split) if tested.run is not None else _of_network(tested, split)
        usual = made.pop("usual")
        request = cls(
            settings={**(usual if settings.get("norm", "linf") == "linf" else {}), **settings},
            surrogate=_surrogate(tested.surrogate, tested.trust),
            device=tested.device,
            cache=tested.cache,
            skip_broken=tested.skip_broken,
            **made,
        )
        plan = request.plan()
        if tested.surrogate is not None and not plan.transfers and plan.suite is None:
            raise UserError(
                f"a surrogate needs the search transfer or a suite, not {plan.settings.search!r} alone",
                parameter="surrogate",
            )
        if tested.surrogate is None and plan.transfers:
            raise UserError(
                "transfer needs a network to come from: give the folder of a run", parameter="surrogate"
            )
        return request

    def plan(self) -> Plan:
        """Make the plan."""
        return Plan.make(**self.settings)

    def images(self, progress: Bars | None = None) -> Data:
        """Load the images; tell the progress how far that is, and which files cannot be read."""
        named = [self.queries] if self.gallery is None else [self.queries, self.gallery]
        found = []
        for images in named:
            found += load_pixels(
                images.data,
                images.root,
                self.inputs,
                [images.split],
                self.cache,
                skip_broken=self.skip_broken,
                watch=None if progress is None else progress.decoding,
                report=(lambda _: None) if progress is None else progress.say,
            )
        files = [relative_files(pixels, images.root) for images, pixels in zip(named, found, strict=True)]
        skipped = [str(file) for pixels in found for file in pixels.skipped]
        if progress is not None:
            for file in skipped:
                progress.say(f"left out, not readable: {file}")
        if len(found) == 1:
            data = data_by_marks(found[0], self.inputs.crop, files[0])
        else:
            data = data_of_two(found[0], found[1], self.inputs.crop, files[0], files[1])
        return self.named(data, skipped)

    def named(self, data: Data, skipped: Sequence[str]) -> Data:
        """Return the data with the name for the record, and files that were `skipped`."""
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

        The network needs a `gradient` if the search of the plan follows it, unless it is said here. `first`
        is the image, by default the first that queries.
        """
        device, plan = device_of_share(self.device, share), self.plan()
        if first is None:
            first = self.inputs.first(load(self.queries.data, self.queries.root, self.queries.split))
        network = self.source.make(*self.inputs.shape(first)).to(device)
        other = None
        if self.surrogate is not None:
            source, inputs = self.surrogate
            try:
                other = source.make(*inputs.shape(first)).to(device)
                if not tried:
                    follows = plan.search_on(other).differentiates(other) or plan.suite is not None
                    try_network(other, self.inputs.images(first)[:1], gradient=follows)
            except UserError as error:
                raise UserError(
                    f"the surrogate does not fit the images: {error}", parameter="surrogate"
                ) from None
        if not tried:
            if gradient is None:
                gradient = plan.search_on(other).differentiates(network)
            try_network(network, self.inputs.images(first)[:1], gradient=gradient)
        return network, other

    def evaluation(
        self,
        networks: tuple[nn.Module, nn.Module | None],
        data: Data,
        out: Path | None = None,
        progress: Progress | None = None,
        report: Callable[[str], None] = print,
    ) -> Evaluation:
        """Return the evaluation of networks and data that were made."""
        return Evaluation(self.subject(networks, data), self.plan(), out, progress, report)

    def subject(self, networks: tuple[nn.Module, nn.Module | None], data: Data) -> Subject:
        """Return the networks and data that were made, as they are evaluated."""
        classes = None if self.trained_on is None else [printable(name) for name in self.trained_on]
        return Subject(
            networks[0],
            data,
            surrogate=networks[1],
            train_classes=classes,
            name=self.name,
            weights=self.chosen,
        )


def device_of_share(name: str, share: int) -> torch.device:
    """Choose a device by name; several workers get one GPU each, as long as there are some."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = "cuda" if there["cuda"] else "cpu"
    if name not in there:
        raise UserError(f"the device is auto, cpu, cuda or mps, not {name!r}", parameter="device")
    if not there[name]:
        raise UserError(f"torch finds no {name} here: use cpu", parameter="device")
    return torch.device(name, share % torch.cuda.device_count()) if name == "cuda" else torch.device(name)


def loaded_run(folder: Path, weights: str | None, device: str, trust: bool) -> Run:
    """Load what a run trained, for a command that needs no images of its own, onto a device."""
    which = next((w for w in get_args(Which) if w == weights), None)
    run = load_run(folder, which or _file(weights), trust=trust)
    run.network.to(device_of_share(device, 0))
    return run


def _of_run(tested: Tested, split: Split) -> dict[str, Any]:
    """Take what a run trained."""
    run = RunFolder(tested.run or "", trust=tested.trust)
    if tested.model is not None:
        raise UserError(
            f"a run and a model exclude each other, for a run has a network of its own: leave the model out, "
            f"or give no run instead of {tested.run}",
            parameter="model",
        )
    if not run.exists:
        raise UserError(
            f"{tested.run} is no run, it has no {run.recipe_file.name}: give the folder of a run, or a "
            "network by its name",
            parameter="model",
        )
    if tested.dim is not None:
        raise UserError(
            f"a run has embeddings of the length that it was trained with: leave {tested.dim} out",
            parameter="dim",
        )
    recipe = run.recipe()
    which = next((w for w in get_args(Which) if w == tested.weights), None)
    weights = run.choose(which or _file(tested.weights))
    source = run.source(weights.file)
    images = Images(tested.data or recipe.data, tested.root or recipe.root, split)
    queries, gallery = _sides(tested, images)
    same = (tested.data or recipe.data, tested.root or recipe.root) == (recipe.data, recipe.root)
    others = gallery is not None or tested.data not in (None, recipe.data)
    chosen = weights.chosen
    if chosen == "chosen on test images" and not (same and gallery is None and tested.queries_from is None):
        chosen = f"{chosen} of its run"
    return {
        "name": run.name,
        "data": images.title,
        "source": source,
        "inputs": replace(run.inputs(any_size=others), **_sizes(tested)),
        "queries": queries,
        "gallery": gallery,
        "chosen": chosen,
        "trained_on": run.train_classes(),
        "usual": {"eps": recipe.eps},
    }


def _of_network(tested: Tested, split: Split) -> dict[str, Any]:
    """Take a network by its name or file, with weights of one's own."""
    if tested.model is None:
        raise UserError("say what to evaluate: the folder of a run, or --model NAME with --weights FILE")
    data, root = tested.data, tested.root
    if data is None and tested.gallery is not None and tested.queries_from is not None:
        data, root = "csv" if tested.queries_from.is_file() else "folder", tested.queries_from
    if data is None:
        raise UserError(f"which images? give --data ({', '.join(sorted(DATA))} {OWN}) and --root")
    NetworkSource(tested.model).check()
    file = _file(tested.weights)
    source = NetworkSource(tested.model, dim=tested.dim, weights=file)
    images = Images(data, root, split)
    queries, gallery = _sides(tested, images)
    return {
        "name": without_folder(tested.model)
        if file is None
        else f"{without_folder(tested.model)} {file.name}",
        "data": images.title,
        "source": source,
        "inputs": usual_inputs(data, root, tested.model, _sizes(tested)),
        "queries": queries,
        "gallery": gallery,
        "chosen": None if file is not None else "no weights were given",
        "trained_on": None,
        "usual": {"eps": usual_eps(data)},
    }


def _surrogate(folder: Path | None, trust: bool) -> tuple[NetworkSource, Inputs] | None:
    """Take the network of another run, with what it takes."""
    if folder is None:
        return None
    run = RunFolder(folder, trust=trust)
    if not run.exists:
        raise UserError(
            f"{folder} is no run: a surrogate is the folder of one, which train wrote", parameter="surrogate"
        )
    return run.source(), run.inputs()


def _sides(tested: Tested, own: Images) -> tuple[Images, Images | None]:
    """Say which images query and, if they are others, which are ranked."""
    if tested.gallery is None and tested.queries_from is None:
        return own, None
    asked, ranked = (own if path is None else _at(path) for path in (tested.queries_from, tested.gallery))
    return asked, ranked


def _at(path: Path) -> Images:
    """Take all images of a place: a file as a table, a directory as a folder of classes."""
    if not path.exists():
        raise FileNotFoundError(f"there is no {path} to take images from: give a folder or a CSV file")
    return Images("csv" if path.is_file() else "folder", path, "all")


def _file(weights: str | None) -> Path | None:
    """Take a file of weights, if one is given."""
    if weights is not None and not Path(weights).is_file():
        raise UserError(f"there is no weights file {weights}: give another file", parameter="weights")
    return None if weights is None else Path(weights)


def _sizes(tested: Tested) -> dict[str, Any]:
    """Return the sizes and fit that are given, in place of the usual ones or of those trained with."""
    size = tested.size
    asked = {"resize": tested.resize or size, "crop": tested.crop or size, "fit": tested.fit}
    return {name: value for name, value in asked.items() if value is not None}
