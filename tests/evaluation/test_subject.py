"""What is evaluated: what goes together, what its identity tells apart, the scene that it sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robustmetric.attacks import NES, PGD
from robustmetric.evaluation import Origin, Plan, Subject
from robustmetric.validate import UserError
from tests.evaluation.conftest import make_network


def subject(images: Any, labels: Tensor, /, **changes: Any) -> Subject:
    given: dict[str, Any] = {"model": make_network(), "images": images, "labels": labels, **changes}
    return Subject(given.pop("model"), given.pop("images"), given.pop("labels"), **given)


def test_images_of_a_gallery_come_behind_the_queries(images: Tensor, labels: Tensor) -> None:
    alone = subject(images, labels)
    assert alone.every is images
    assert alone.ranked_labels is labels
    two = subject(images[:10], labels[:10], gallery=(images[10:], labels[10:]))
    assert len(two.every) == 40
    assert torch.equal(two.every[torch.tensor([3, 12, 39])], images[torch.tensor([3, 12, 39])])
    assert torch.equal(two.ranked_labels, labels[10:])
    assert two.places.tolist() == [-1] * 10


def test_a_network_is_called_by_its_name_or_class(images: Tensor, labels: Tensor) -> None:
    assert subject(images, labels).title == "Sequential"
    assert subject(images, labels, name="mine").title == "mine"


def test_files_name_images() -> None:
    origin = Origin(files=["a.png", "b.png"], gallery_files=["c.png"])
    assert (origin.called(1), origin.called(0, gallery=True)) == ("b.png", "c.png")
    assert (Origin().called(3), Origin().called(3, gallery=True)) == ("image 3", "gallery image 3")


# Identity


def test_the_same_subject_has_the_same_identity(images: Tensor, labels: Tensor) -> None:
    assert subject(images, labels).identity() == subject(images.clone(), labels.int()).identity()


def changed(images: Tensor) -> Tensor:
    other = images.clone()
    other[7, 0, 3, 3] = 1 - other[7, 0, 3, 3]
    return other


CAMERAS = torch.arange(40) % 3


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda x, y: {"images": changed(x)}, "data"),
        (lambda x, y: {"labels": y.flip(0)}, "data"),
        (lambda x, y: {"model": make_network(1)}, "network"),
        (lambda x, y: {"model": Renamed(*make_network())}, "class"),
        (lambda x, y: {"surrogate": make_network(1)}, "surrogate"),
        (lambda x, y: {"cameras": CAMERAS}, "rules"),
        (lambda x, y: {"name": "mine"}, "names"),
        (lambda x, y: {"data": "mine"}, "names"),
        (lambda x, y: {"classes": ["a"] * 5}, "classes"),
        (lambda x, y: {"train_classes": ["a"]}, "classes"),
    ],
)
def test_identity_tells_another_subject(change: Any, key: str, images: Tensor, labels: Tensor) -> None:
    usual = subject(images, labels).identity()
    other = subject(images, labels, **change(images, labels)).identity()
    assert [name for name in usual if usual[name] != other[name]] == [key]


class Renamed(nn.Sequential):
    """The same network under another name."""


def test_origin_is_no_part_of_the_identity(images: Tensor, labels: Tensor) -> None:
    named = subject(images, labels, origin=Origin(weights="last weights", skipped=["a.png"]))
    assert named.identity() == subject(images, labels).identity()


# Networks while they are evaluated


def test_networks_are_frozen_and_come_back(images: Tensor, labels: Tensor) -> None:
    model, other = make_network().train(), make_network(1)
    other[1].weight.requires_grad_(False)
    with subject(images, labels, model=model, surrogate=other).frozen():
        assert not model.training
        assert not any(p.requires_grad for network in (model, other) for p in network.parameters())
    assert [network.training for network in (model, other)] == [True, False]
    assert [p.requires_grad for p in other.parameters()] == [False, True, True, True]
    assert all(p.requires_grad for p in model.parameters())


class Fails(nn.Module):
    """A network that fails with more than one image, or with a gradient."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def forward(self, images: Tensor) -> Tensor:
        if self.when == "many" and len(images) > 1:
            raise RuntimeError("too many")
        z = images.flatten(1)
        return z.detach() if self.when == "gradient" else z


def test_a_probe_tells_which_network_fails(images: Tensor, labels: Tensor) -> None:
    broken = subject(images, labels, model=Fails("many"))
    with pytest.raises(UserError, match=r"the network failed on images of shape \(16, 1, 6, 6\).*too many"):
        broken.probe(PGD(), Plan.make(batch=16))
    with pytest.raises(UserError, match="the surrogate failed on images") as refused:
        subject(images, labels, surrogate=Fails("many")).probe(PGD(), Plan.make(batch=16))
    assert refused.value.parameter == "size"
    broken.probe(PGD(), Plan.make(batch=1))


def test_a_probe_differentiates_only_for_a_search_that_does(images: Tensor, labels: Tensor) -> None:
    detached = subject(images, labels, model=Fails("gradient"))
    detached.probe(NES(), Plan.make(batch=4))
    with pytest.raises(UserError, match=r"take no_grad\(\) and detach\(\) out"):
        detached.probe(PGD(), Plan.make(batch=4))


# Scenes


def test_a_scene_of_one_set_and_of_two(images: Tensor, labels: Tensor) -> None:
    z = torch.rand(40, 3)
    scene = subject(images, labels, cameras=CAMERAS).scene(make_network(), z)
    assert scene.queries.own.tolist() == list(range(40))
    assert torch.equal(scene.gallery.z, z)
    assert scene.gallery.cameras is not None
    assert scene.ranked is None
    own = torch.tensor([2, -1, 5])
    two = subject(images[:3], labels[:3], gallery=(images, labels), own=own)
    both = two.scene(make_network(), torch.rand(43, 3))
    assert both.queries.own.tolist() == [2, -1, 5]
    assert (len(both.queries), len(both.gallery)) == (3, 40)
    assert both.ranked is images


# What does not go together


@pytest.mark.parametrize(
    ("settings", "more", "parameter", "told"),
    [
        ({"queries": 41}, {}, "queries", "from 1 to the number of images, 40, not 41"),
        ({"protocol": "reference"}, {"cameras": CAMERAS}, "protocol", "knows no cameras: use the strict"),
        ({"protocol": "reference"}, {"gallery": True}, "protocol", "use the strict protocol with a gallery"),
        ({"attacks": ["CA+(w=90)"]}, {}, None, "w is 90, too many for a gallery of 40 images"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    settings: dict[str, Any],
    more: dict[str, Any],
    parameter: str | None,
    told: str,
    images: Tensor,
    labels: Tensor,
) -> None:
    if "gallery" in more:
        more = {"gallery": (images, labels)}
    fits, other = subject(images, labels), subject(images, labels, **more)
    fits.check(Plan.make())
    with pytest.raises(UserError, match=told) as refused:
        other.check(Plan.make(**settings))
    assert refused.value.parameter == parameter


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"model": torch.flatten}, "must be a torch.nn.Module, not a builtin_function"),
        ({"images": [0.5]}, r"the images are a list; give one tensor \(N, C, H, W\).*torch.stack"),
        ({"gallery": 3}, "the gallery is a int; give a pair of its images and labels"),
        ({"own": torch.arange(40)}, "own and gallery_cameras describe a gallery, and none is given"),
        ({"gallery": (torch.rand(9, 1, 5, 5), torch.arange(9) % 2)}, r"\(1, 6, 6\).*\(1, 5, 5\): bring them"),
        ({"gallery": (torch.rand(4, 1, 6, 6), torch.arange(4) % 2)}, "4 images; give at least 5"),
        ({"gallery": (torch.rand(9, 1, 6, 6), torch.arange(9) % 2 + 50)}, "no query's class is in the gall"),
        (
            {"gallery": (torch.rand(9, 1, 6, 6), torch.arange(9) % 2), "cameras": CAMERAS},
            "cameras are given and gallery_cameras are not: pass both, or none",
        ),
        ({"cameras": torch.arange(40) % 5}, "from another camera.*look at the cameras"),
    ],
)
def test_what_does_not_go_together_is_refused(
    more: dict[str, Any], told: str, images: Tensor, labels: Tensor
) -> None:
    with pytest.raises(UserError, match=told):
        subject(images, labels, **more)
