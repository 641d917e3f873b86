"""What is evaluated: a network, the images that query, and those that are ranked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from robustmetric.attacks import Gallery, Queries
from robustmetric.data.cache import Pixels
from robustmetric.data.pairs import ImageArray
from robustmetric.errors import UserError, describe, instance
from robustmetric.evaluation.attack import NetworkView
from robustmetric.evaluation.identity import digest_of, digest_of_names, digest_of_numbers
from robustmetric.evaluation.images import Images, Joined
from robustmetric.gallery import count_relevant
from robustmetric.labels import check_labels
from robustmetric.models.source import try_network
from robustmetric.perturb import check_images, device_of, frozen
from robustmetric.retrieval import check_cameras, check_own
from robustmetric.text import printable


@dataclass(frozen=True)
class Fingerprint:
    """What a first pass over all images finds: their shape (C, H, W), a digest, and exact copies.

    `copies` are pairs of positions in the gallery; `shared` are queries and their copies in a separate
    gallery.
    """

    shape: list[int]
    sha256: str
    copies: list[tuple[int, int]]
    shared: list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Data:
    """Images with their classes: who queries, and who is ranked.

    Each of the `images` (N, C, H, W) with `labels` (N,) queries all others, or the images of the `gallery`,
    another `Data` or a pair of images and labels, but for its `own` (N,) position there, −1 for none. An
    image from a query's class and one of its `cameras` (N,) does not count for it, which is the rule of
    re-identification. `classes` and `files` name the labels and the images, `skipped` are files that could
    not be read, and `name` is what a record calls the data.

    >>> gallery = torch.rand(5, 1, 2, 2), torch.arange(5)
    >>> data = Data(torch.rand(6, 1, 2, 2), torch.arange(6) % 2, gallery=gallery)
    >>> len(data.every), len(data.ranked.labels), data.called(1)
    (11, 5, 'image 1')
    """

    images: Images
    labels: Tensor
    _: KW_ONLY
    gallery: Data | tuple[Images, Tensor] | None = None
    own: Tensor | None = None
    cameras: Tensor | None = None
    classes: Sequence[str] | None = None
    files: Sequence[str] | None = None
    skipped: Sequence[str] = ()
    name: str = "images"

    @cached_property
    def ranked(self) -> Data:
        """The images that are ranked."""
        return self if self.gallery is None else data_from("gallery", self.gallery)

    @property
    def every(self) -> Images:
        """All images to embed: queries first, then those of a separate gallery."""
        return self.images if self.gallery is None else Joined(self.images, self.ranked.images)

    @cached_property
    def places(self) -> Tensor:
        """Each query's position (N,) in the gallery, −1 for none."""
        if self.gallery is None:
            return torch.arange(len(self.images))
        return check_own(self.own, len(self.images), len(self.ranked.labels))

    def as_queries(self, z: Tensor) -> Queries:
        """Return embeddings `z` (N, D) of the images that query, with who they are."""
        cameras = None if self.cameras is None else self.cameras.to(z.device)
        return Queries(z, self.labels.to(z.device), self.places.to(z.device), cameras)

    def as_gallery(self, z: Tensor) -> Gallery:
        """Return embeddings `z` (M, D) of the images that are ranked, with who they are."""
        cameras = None if self.ranked.cameras is None else self.ranked.cameras.to(z.device)
        return Gallery(z, self.ranked.labels.to(z.device), cameras=cameras)

    def called(self, number: int, *, gallery: bool = False) -> str:
        """Return the name of image `number`, of the separate `gallery` if so: its file or its number."""
        files = self.ranked.files if gallery else self.files
        if files is not None:
            return files[number]
        return f"{'gallery image' if gallery else 'image'} {number}"

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What a first pass over all images finds; pixels outside [0, 1] are refused."""
        whole = hashlib.sha256()
        shape: list[int] = []
        keys: list[list[bytes]] = []
        for side in [self] if self.gallery is None else [self, self.ranked]:
            keys.append([])
            whole.update(side.labels.cpu().to(torch.int64).numpy().tobytes())
            for part in torch.arange(len(side.images)).split(256):
                batch = side.images[part]
                check_images(batch)
                shape = shape or list(batch.shape[1:])
                whole.update(f"{tuple(batch.shape)} {batch.dtype}".encode())
                content = batch.detach().cpu().to(torch.float32).contiguous().numpy()
                whole.update(content.tobytes())
                keys[-1] += [hashlib.blake2b(image, digest_size=16).digest() for image in content]
        first: dict[bytes, int] = {}
        copies = [
            (first[key], place) for place, key in enumerate(keys[-1]) if first.setdefault(key, place) != place
        ]
        # A query that is known to be in the gallery does not find itself; its copies are the gallery's.
        shared = [
            (n, first[key])
            for n, (key, place) in enumerate(zip(keys[0], self.places.tolist(), strict=True))
            if place < 0 and key in first
        ]
        return Fingerprint(shape, whole.hexdigest(), copies, shared)

    def identity(self) -> dict[str, Any]:
        """Return all of the data that a document depends on, in JSON's types."""
        cameras = (self.cameras, None if self.gallery is None else self.ranked.cameras)
        return {
            "data": self.fingerprint.sha256,
            "rules": [digest_of_numbers(numbers) for numbers in (self.own, *cameras)],
        }

    def check(self, queries: int | None = None) -> None:
        """Refuse data for which no ranking can be scored, and more `queries` than there are images."""
        self.check_sides()
        labels, count = self.ranked.labels, len(self.images)
        if len(labels) < 5:
            raise UserError(f"the gallery has {len(labels)} images; give at least 5, for a top 4 of a query")
        if len(labels.unique()) < 2:
            told = f"all {len(labels)} images are of class {int(labels[0])}; no ranking can be wrong"
            raise UserError(f"{told}: give at least two classes")
        rules = (labels, self.labels, self.places, self.ranked.cameras, self.cameras)
        if not count_relevant(*(None if part is None else part.cpu() for part in rules)).any():  # type: ignore[arg-type]
            by, advice = ("", "") if self.cameras is None else (" by another camera", ", or leave them out")
            raise UserError(
                f"none of the {count} queries has another image of its class{by} in the gallery of "
                f"{len(labels)}: look at the labels of both{advice and f' and at the cameras{advice}'}"
            )
        if queries is not None and queries > count:
            told = f"queries must be from 1 to the number of images, {count}, not {queries!r}"
            raise UserError(told, parameter="queries")

    def check_sides(self) -> None:
        """Reject images that are none or of several sizes, and labels or cameras that are not of them."""
        if self.gallery is None and self.own is not None:
            raise UserError("own describes a gallery, and none is given: pass gallery too")
        if self.ranked.gallery is not None and self.gallery is not None:
            raise UserError("the gallery has a gallery of its own: give its images without one")
        sides = []
        for side in (self, self.ranked):
            images = side.images
            if isinstance(images, list | tuple):
                raise UserError(f"the images are {describe(images)}; give one tensor: torch.stack(images)")
            one = images[torch.arange(min(1, len(images)))]
            check_images(images if isinstance(images, Tensor) and images.ndim != 4 else one)
            sides.append(describe(one[0]))
            check_labels(side.labels, len(images))
        if sides[0] != sides[1]:
            told = f"queries are {sides[0]}, images of the gallery {sides[1]}"
            raise UserError(f"{told}: bring them to one size and type")
        check_cameras(self.ranked.cameras, self.cameras, len(self.ranked.images), len(self.images))


def data_from(name: str, given: Data | tuple[Images, Tensor]) -> Data:
    """Return a `Data` that is given, or that of a pair of images and labels, called `name` in errors."""
    if isinstance(given, tuple | list) and len(given) == 2:
        return Data(*given)
    return instance(name, given, Data, why="give one, or a pair of images and their labels")


def data_of(images: Images | Data, labels: Tensor | None) -> Data:
    """Return the data as they are, or of `images` (N, C, H, W) with `labels` (N,).

    >>> data_of(torch.rand(2, 1, 2, 2), None)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: labels are missing: give a class for each of the images, or a Data
    """
    if isinstance(images, Data) and labels is not None:
        raise UserError("labels were given with a Data that has labels: leave them out")
    if isinstance(images, Data):
        return images
    if labels is None:
        raise UserError("labels are missing: give a class for each of the images, or a Data")
    return Data(images, labels)


@dataclass(frozen=True, eq=False)
class Subject:
    """A network, `model`, and the `data` that it is judged on.

    A `surrogate` is the network that perturbations are searched on, if it is another one. `name` is what a
    record calls the network, `weights` says how its weights were chosen, and `train_classes` are the names of
    the classes that it was trained on.
    """

    model: nn.Module
    data: Data
    _: KW_ONLY
    surrogate: nn.Module | None = None
    name: str | None = None
    weights: str | None = None
    train_classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        instance("the network", self.model, nn.Module, why="give a torch.nn.Module")
        if self.surrogate is not None:
            instance("the surrogate", self.surrogate, nn.Module, why="give a torch.nn.Module")

    @property
    def title(self) -> str:
        """The name of the network in a record."""
        return self.name or type(self.model).__name__

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the scores, and what else a document says, in JSON's types."""
        return {
            "class": type(self.model).__qualname__,
            "network": digest_of(self.model),
            "surrogate": None if self.surrogate is None else digest_of(self.surrogate),
            **self.data.identity(),
            "names": [self.name, self.data.name],
            "classes": [digest_of_names(self.data.classes), digest_of_names(self.train_classes)],
        }

    def describe(self) -> dict[str, Any]:
        """Return the entries of a document on the network and the data."""
        data, surrogate = self.data, self.surrogate
        return {
            "network": {
                "name": self.title,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "sha256": digest_of(self.model),
                "surrogate": None if surrogate is None else digest_of(surrogate),
                "weights": self.weights,
            },
            "data": {
                "name": data.name,
                "images": len(data.images),
                "gallery": None if data.gallery is None else len(data.ranked.images),
                "classes": len(data.labels.unique()),
                "shape": data.fingerprint.shape,
                "sha256": data.fingerprint.sha256,
                "cameras": data.cameras is not None,
                "skipped": list(data.skipped),
            },
        }

    def frozen(self) -> ExitStack:
        """Hold all networks in evaluation mode, frozen, until the stack is closed."""
        stack = ExitStack()
        for model in (self.model, self.surrogate):
            if model is not None:
                stack.enter_context(frozen(model))
        return stack

    def batch(self, size: int) -> Tensor:
        """Return the first images (B, C, H, W), at most `size`."""
        return self.data.images[torch.arange(min(size, len(self.data.images)))]

    def probe(self, size: int, *, gradient: bool, of_surrogate: bool = False) -> int:
        """Embed a batch of `size` images, with a `gradient` if it will be needed, and `of_surrogate` as well.

        A network that fails is an error that names the images, and so are pixels outside [0, 1] anywhere.
        Returns the length of the embeddings.
        """
        _, images = self.data.fingerprint, self.batch(size)
        dim = try_network(self.model, images, gradient=gradient)
        if self.surrogate is not None:
            try_network(self.surrogate, images, gradient=of_surrogate, what="surrogate")
        return dim

    def view(self, model: nn.Module, z: Tensor, ranked: Tensor | None = None) -> NetworkView:
        """Return the view of a network `model` with its embeddings `z` (N, D), and `ranked` (M, D).

        Without `ranked` all are in `z` (N + M, D).
        """
        data, z = self.data, z.to(device_of(model))
        if ranked is None:
            count = len(data.images)
            z, ranked = (z, z) if data.gallery is None else (z[:count], z[count:])
        images = None if data.gallery is None else data.ranked.images
        return NetworkView(model, data.images, data.as_queries(z), data.as_gallery(ranked), images)


def data_by_marks(images: Pixels, crop: int | None = None, files: Sequence[str] | None = None) -> Data:
    """Return decoded images as data: queries and gallery as marked; without marks each image is both.

    `files` names the images.
    """
    asks, ranked = _marks(images, images.is_query), _marks(images, images.is_gallery)
    queries = _marked(images, asks, crop, files)
    if asks.all() and ranked.all():
        return queries
    place = torch.where(ranked, ranked.cumsum(0) - 1, -1)
    return replace(queries, gallery=_marked(images, ranked, crop, files), own=place[asks])


def data_of_two(
    queries: Pixels,
    gallery: Pixels,
    crop: int | None = None,
    files: Sequence[str] | None = None,
    gallery_files: Sequence[str] | None = None,
) -> Data:
    """Return decoded images as `queries` of others: classes and cameras are the same if their names are.

    Where the data marks queries and gallery, those alone query and are ranked. `files` and `gallery_files`
    name the images.
    """
    if (queries.cameras is None) != (gallery.cameras is None):
        known, missing = ("queries", "gallery") if gallery.cameras is None else ("gallery", "queries")
        told = f"the cameras of the {known} are known and those of the {missing} are not"
        raise UserError(f"{told}: give both, or neither")
    classes = sorted({*queries.classes, *gallery.classes})
    # A table numbers its cameras by their names, each table by itself.
    cameras = sorted({*queries.columns.get("camera", ()), *gallery.columns.get("camera", ())})
    label, camera = ({name: k for k, name in enumerate(names)} for names in (classes, cameras))

    def renumbered(images: Pixels) -> Pixels:
        labels = torch.tensor([label[name] for name in images.classes])[images.labels]
        numbers = images.cameras
        if numbers is not None and (texts := images.columns.get("camera")):
            numbers = torch.tensor([camera[text] for text in texts])
        return replace(images, labels=labels, cameras=numbers, classes=tuple(classes))

    ranked = _marked(renumbered(gallery), _marks(gallery, gallery.is_gallery), crop, gallery_files)
    return replace(
        _marked(renumbered(queries), _marks(queries, queries.is_query), crop, files), gallery=ranked
    )


def _marks(images: Pixels, marked: Tensor | None) -> Tensor:
    """Return which images (N,) are `marked`: all of them where nothing is; reject marks of none."""
    marked = torch.ones(len(images), dtype=torch.bool) if marked is None else marked
    if not marked.any():
        told = f"none of {len(images)} images is marked to query, or to be ranked"
        raise UserError(f"{told}: mark some as each (is_query, is_gallery), or leave the marks out")
    return marked


def _marked(images: Pixels, marked: Tensor, crop: int | None, files: Sequence[str] | None) -> Data:
    """Return the `marked` (N,) images; names that a document can hold are text without control characters."""
    rows = marked.nonzero()[:, 0]
    return Data(
        ImageArray(images.pixels, crop, rows.numpy()),
        images.labels[rows],
        cameras=None if images.cameras is None else images.cameras[rows],
        classes=[printable(name) for name in images.classes],
        files=None if files is None else [printable(files[row]) for row in rows.tolist()],
    )
