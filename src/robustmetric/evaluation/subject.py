"""What is evaluated: a network, the images that query, and the images that are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from robustmetric.attacks import Gallery, Queries, Search
from robustmetric.data.sides import Sides
from robustmetric.evaluation.identity import digest_of, digest_of_names, digest_of_numbers
from robustmetric.evaluation.images import Fingerprint, Images, Joined
from robustmetric.evaluation.plan import Plan
from robustmetric.evaluation.scene import Scene
from robustmetric.gallery import count_mates
from robustmetric.labels import check_labels
from robustmetric.models.source import try_network
from robustmetric.perturb import check_images, device_of, frozen
from robustmetric.retrieval import check_cameras, check_own
from robustmetric.validate import UserError, printable


@dataclass(frozen=True)
class Origin:
    """Where images and weights come from, to be named.

    `files` are those of the images, `gallery_files` those of a gallery of its own, `skipped` those that were
    left out; `weights` says how the weights were chosen.

    >>> Origin(files=["a.png", "b.png"]).called(1), Origin().called(1)
    ('b.png', 'image 1')
    """

    files: Sequence[str] | None = None
    gallery_files: Sequence[str] | None = None
    skipped: Sequence[str] = ()
    weights: str | None = None

    def called(self, number: int, gallery: bool = False) -> str:
        """Return what image `number` is called, of the `gallery` if so: its file, or its number."""
        names = self.gallery_files if gallery else self.files
        if names is not None:
            return names[number]
        return f"{'gallery image' if gallery else 'image'} {number}"


@dataclass(frozen=True, eq=False)
class Subject:
    """A network with the images that query and those that are ranked, checked to go together.

    `model` is the network. `images` (N, C, H, W) with `labels` (N,) query all others, or the `gallery` (its
    images and labels) if one is given, but for their `own` (N,) position in it, −1 for none. `cameras` (N,)
    and `gallery_cameras` took the images. A `surrogate` is the network that perturbations are searched on, if
    it is another one. `classes` and `train_classes` name the classes of the labels and those that the network
    was trained on; `name` and `data` are what a record calls the network and the images, and `origin` says
    where they are from.

    >>> subject = Subject(nn.Flatten(), torch.rand(6, 1, 2, 2), torch.arange(6) % 2)
    >>> len(subject.every), subject.title
    (6, 'Flatten')
    """

    model: nn.Module
    images: Images
    labels: Tensor
    _: KW_ONLY
    gallery: tuple[Images, Tensor] | None = None
    own: Tensor | None = None
    cameras: Tensor | None = None
    gallery_cameras: Tensor | None = None
    surrogate: nn.Module | None = None
    classes: Sequence[str] | None = None
    train_classes: Sequence[str] | None = None
    name: str | None = None
    data: str = "images"
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise UserError(f"the network must be a torch.nn.Module, not a {type(self.model).__name__}")
        if self.surrogate is not None and not isinstance(self.surrogate, nn.Module):
            raise UserError(f"the surrogate must be a torch.nn.Module, not a {type(self.surrogate).__name__}")
        self._check_images()
        self._check_classes()
        self._check_rules()

    @classmethod
    def of_sides(
        cls,
        model: nn.Module,
        sides: Sides,
        *,
        surrogate: nn.Module | None = None,
        train_classes: Sequence[str] | None = None,
        name: str | None = None,
        data: str = "images",
        skipped: Sequence[str] = (),
        weights: str | None = None,
    ) -> Subject:
        """Return a network with decoded images, who queries and who is ranked.

        `sides` are the images; `skipped` are files of them that could not be read, `weights` says how the
        network's were chosen, and the others are as the class has them. Names of files and classes are made
        such that a record can hold them: text without control characters.
        """
        queries, gallery = sides.queries, sides.gallery
        return cls(
            model,
            queries.images,
            queries.labels,
            gallery=None if gallery is None else (gallery.images, gallery.labels),
            own=sides.own,
            cameras=queries.cameras,
            gallery_cameras=None if gallery is None else gallery.cameras,
            surrogate=surrogate,
            classes=_shown(sides.classes),
            train_classes=_shown(train_classes),
            name=name,
            data=data,
            origin=Origin(
                files=_shown(queries.files),
                gallery_files=None if gallery is None else _shown(gallery.files),
                skipped=_shown(skipped) or (),
                weights=weights,
            ),
        )

    @property
    def title(self) -> str:
        """What the network is called."""
        return self.name or type(self.model).__name__

    @property
    def every(self) -> Images:
        """All images to embed: queries first, then a gallery of its own."""
        return self.images if self.gallery is None else Joined(self.images, self.gallery[0])

    @property
    def ranked_labels(self) -> Tensor:
        """The labels of the images that are ranked."""
        return self.labels if self.gallery is None else self.gallery[1]

    @cached_property
    def places(self) -> Tensor:
        """Each query's position (N,) in a gallery of its own, −1 for none."""
        return check_own(self.own, len(self.images), len(self.ranked_labels))

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What a first pass over the images finds."""
        return Fingerprint.of(self.images, self.labels, self.gallery, self.places)

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the scores, and what else the record says, in JSON's types."""
        return {
            "class": type(self.model).__qualname__,
            "network": digest_of(self.model),
            "surrogate": None if self.surrogate is None else digest_of(self.surrogate),
            "data": self.fingerprint.sha256,
            "rules": [digest_of_numbers(t) for t in (self.own, self.cameras, self.gallery_cameras)],
            "names": [self.name, self.data],
            "classes": [digest_of_names(self.classes), digest_of_names(self.train_classes)],
        }

    def frozen(self) -> ExitStack:
        """Hold all networks in evaluation mode, frozen, until the stack is closed."""
        stack = ExitStack()
        for model in (self.model, self.surrogate):
            if model is not None:
                stack.enter_context(frozen(model))
        return stack

    def as_queries(self, z: Tensor) -> Queries:
        """Return embeddings `z` (N, D) of the images that query, with who they are."""
        own = torch.arange(len(z)) if self.gallery is None else self.places
        cameras = None if self.cameras is None else self.cameras.to(z.device)
        return Queries(z, self.labels.to(z.device), own.to(z.device), cameras)

    def as_gallery(self, z: Tensor) -> Gallery:
        """Return embeddings `z` (M, D) of the images that are ranked, with who they are."""
        cameras = self.cameras if self.gallery is None else self.gallery_cameras
        return Gallery(
            z, self.ranked_labels.to(z.device), cameras=None if cameras is None else cameras.to(z.device)
        )

    def scene(self, model: nn.Module, z: Tensor, ranked: Tensor | None = None) -> Scene:
        """Return the scene of a network `model` with its embeddings `z` (N, D), and `ranked` (M, D).

        Without `ranked` all are in `z` (N + M, D).
        """
        z = z.to(device_of(model))
        if ranked is None:
            z, ranked = (z, z) if self.gallery is None else (z[: len(self.images)], z[len(self.images) :])
        images = None if self.gallery is None else self.gallery[0]
        return Scene(model, self.images, self.as_queries(z), self.as_gallery(ranked), images)

    def check(self, plan: Plan) -> None:
        """Refuse a `plan` that does not go with these images."""
        self.check_queries(plan.queries)
        if self.cameras is not None and plan.protocol == "reference":
            raise UserError(
                "the reference protocol knows no cameras: use the strict protocol, or leave the cameras out",
                parameter="protocol",
            )
        if self.gallery is not None and plan.protocol == "reference":
            raise UserError(
                "the reference protocol takes the nearest image for the query itself, so its queries must be "
                "in the gallery: use the strict protocol with a gallery of its own",
                parameter="protocol",
            )
        for attack in plan.goals:
            attack.check_fits(len(self.ranked_labels))
        for goal in () if plan.worst_case is None else plan.worst_case.wanted:
            try:
                goal.check_fits(len(self.ranked_labels))
            except UserError as error:
                raise UserError(f"goal {goal.name} of the suite: {error}", parameter="suite") from None

    def check_queries(self, queries: int | None) -> None:
        """Refuse more `queries` than there are images; None stands for all."""
        if queries is not None and queries > len(self.images):
            raise UserError(
                f"queries must be from 1 to the number of images, {len(self.images)}, not {queries!r}",
                parameter="queries",
            )

    def probe(self, search: Search, plan: Plan) -> None:
        """Embed a batch, and differentiate if the `search` or the `plan`'s suite will.

        A network that fails leaves no trace.
        """
        images = self.images[torch.arange(min(plan.batch, len(self.images)))]
        try_network(self.model, images, gradient=search.differentiates(self.model))
        if self.surrogate is not None:
            gradient = search.differentiates(self.surrogate) or plan.worst_case is not None
            try_network(self.surrogate, images, gradient=gradient, what="surrogate")

    def _check_images(self) -> None:
        """Refuse images that are none, or labels that are not of them."""
        sets = [(self.images, self.labels)]
        if self.gallery is not None:
            if not isinstance(self.gallery, tuple | list) or len(self.gallery) != 2:
                raise UserError(
                    f"the gallery is a {type(self.gallery).__name__}; give a pair of its images and labels"
                )
            sets.append(self.gallery)
        shapes = []
        for images, labels in sets:
            if isinstance(images, list | tuple):
                raise UserError(
                    f"the images are a {type(images).__name__}; give one tensor (N, C, H, W), for example by "
                    "torch.stack(images)"
                )
            one = images[torch.arange(min(1, len(images)))]
            check_images(images if isinstance(images, Tensor) and images.ndim != 4 else one)
            shapes.append(tuple(one.shape[1:]))
            check_labels(labels, len(images))
        if shapes[0] != shapes[-1]:
            raise UserError(
                f"queries have shape {shapes[0]} and the images of the gallery {shapes[-1]}: bring them to "
                "one size"
            )
        if len(images) < 5:
            raise UserError(
                f"the gallery has {len(images)} images; give at least 5, for a top 4 besides the query"
            )

    def _check_classes(self) -> None:
        """Refuse labels of which no ranking can be right, or none wrong."""
        labels = self.ranked_labels
        kinds, sizes = labels.unique(return_counts=True)
        if len(kinds) < 2:
            raise UserError(
                f"all {len(labels)} images are of class {int(kinds[0])}; no ranking can be wrong: give at "
                "least two classes"
            )
        if self.gallery is None and int(sizes.max()) < 2:
            raise UserError(
                f"no two of the {len(labels)} images share a class; no query has an answer to find: give at "
                "least two images of some classes"
            )
        if self.gallery is not None and not torch.isin(self.labels, labels).any():
            raise UserError(
                "no query's class is in the gallery: give queries and gallery the same numbers for the same "
                "classes"
            )

    def _check_rules(self) -> None:
        """Refuse what does not say which images count for which query."""
        if self.gallery is None and (self.own is not None or self.gallery_cameras is not None):
            raise UserError("own and gallery_cameras describe a gallery, and none is given: pass gallery too")
        ranked = self.cameras if self.gallery is None else self.gallery_cameras
        if (ranked is None) != (self.cameras is None):
            known, missing = (
                ("gallery_cameras", "cameras") if ranked is not None else ("cameras", "gallery_cameras")
            )
            raise UserError(f"{known} are given and {missing} are not: pass both, or none")
        count, images = len(self.images), len(self.ranked_labels)
        check_cameras(ranked, self.cameras, images, count)
        check_own(self.own, count, images)
        if self.cameras is None or ranked is None:
            return
        asked, seen = self.as_queries(torch.empty(count, 0)), self.as_gallery(torch.empty(images, 0))
        if not (count_mates(asked, seen) > 0).any():
            raise UserError(
                "no query has an image of its class from another camera, so none has an answer to find: "
                "look at the cameras, or leave them out"
            )


def _shown(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else [printable(name) for name in names]
