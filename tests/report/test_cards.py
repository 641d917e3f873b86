"""Pictures of queries under attack, and the card that shows one."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from robustmetric.attacks import PGD, Gallery, Queries, attack
from robustmetric.evaluation import Data, Threat
from robustmetric.evaluation.attack import NetworkView, embed_all, run_attack
from robustmetric.perturb import Budget
from robustmetric.report.cards import Album, Picture, card, encoded, nice_factor, rendered
from robustmetric.report.rankings import ITSELF, rank_candidates, rank_for_queries
from robustmetric.text import printable
from tests.evaluation.conftest import make_network
from tests.helpers.pages import parsed
from tests.helpers.pictured import a_picture


def opened(address: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))


def levels(image: Tensor) -> NDArray[Any]:
    """Return an image (1, H, W) in 255 levels, not yet rounded."""
    return np.asarray(255 * image[0].clamp(0, 1))


# Pictures


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", ["ES", "GTM", "CA+(w=3)", "promote(side='candidate')"])
def test_pictures_show_what_the_attack_did(name: str, separate: bool, images: Tensor, labels: Tensor) -> None:
    images, network, which = images.double(), make_network().double(), attack(name)
    numbers, everyone = torch.tensor([31, 4, 17]), torch.arange(40)
    z = embed_all(network, images, everyone, 16)
    ranked = images if separate else None
    queries = Queries(z, labels, torch.full((40,), -1) if separate else everyone)
    view = NetworkView(network, images, queries, Gallery(z, labels), ranked)
    files, classes = [f"f{k}\x1b.png" for k in range(40)], [f"kind {k}" for k in range(5)]
    gallery = Data(images, labels) if separate else None
    data = Data(images, labels, gallery=gallery, files=files, classes=classes)
    found = run_attack(view, which, numbers, Threat(Budget(eps=0.1, alpha=0.03, steps=4), PGD()))
    asks = which.perturbs == "candidate"

    def called(position: int) -> str:
        return f"gallery image {position}" if separate else printable(files[position])

    for row, one in enumerate(Album(view, data).pictures(which, numbers, found, {31: "worst"})):
        number, target = int(numbers[row]), found.target.index[row].tolist()
        assert (one.attack, one.number, one.why) == (which.name, number, "worst" if number == 31 else None)
        assert (one.query.name, one.query.label) == (printable(files[number]), f"kind {labels[number]}")
        assert [item.name for item in one.targets] == [called(position) for position in target[:5]]
        assert one.asker == (one.targets[0] if asks else None)
        change = (found.images[row] - images[number]).abs().max()
        assert one.change == pytest.approx(float(change))
        assert one.values == [
            (c.heading, c.show(float(found.before[c.name][row])), c.show(float(found.after[c.name][row])))
            for c in which.columns
        ]
        shown = {one.query.image: images[number], one.perturbed: found.images[row]}
        shown[one.difference] = 0.5 + one.factor * (found.images[row] - images[number])
        for address, image in shown.items():
            assert np.abs(np.asarray(opened(address), float) - levels(image)).max() <= 0.5 + 1e-6
        for place, (lists, end) in enumerate(((one.before, z), (one.after, found.z))):
            point = (end[numbers] if place == 0 else end)[row : row + 1]
            asking = queries[numbers[row : row + 1]]
            (wanted,) = (
                rank_candidates(torch.tensor(target[:1]), point, asking, view.gallery, 5)
                if asks
                else rank_for_queries(view, point, asking, 5)
            )
            assert one.place[place] == wanted.place
            for item, ranking in zip(lists, wanted.first, strict=True):
                position = number if ranking.position == ITSELF else ranking.position
                assert item.itself == (ranking.position == ITSELF)
                assert item.distance == pytest.approx(ranking.distance)
                assert item.right == ranking.right
                assert item.label == f"kind {labels[position]}"
                own = (one.query.image, one.perturbed)[place]
                assert (item.name, item.image) == (
                    (one.query.name, own) if item.itself else (called(position), encoded(images[position]))
                )


def test_nothing_is_judged_by_a_class_that_is_not_known(images: Tensor, labels: Tensor) -> None:
    network, nowhere = make_network(), torch.tensor([-1])
    z = embed_all(network, images, torch.arange(40), 16)
    view = NetworkView(network, images[:1], Queries(z[:1], nowhere, nowhere), Gallery(z, labels), images)
    album = Album(view, Data(images[:1], nowhere, gallery=Data(images, labels)), k=7)
    for name, judged in (("QA+", {None}), ("CA+", {True, False})):
        which, numbers = attack(name), torch.tensor([0])
        found = run_attack(view, which, numbers, Threat(Budget(eps=0.1, alpha=0.1, steps=1), PGD()))
        (one,) = album.pictures(which, numbers, found)
        assert (one.query.label, len(one.before)) == ("not known", 7)
        assert {item.right for item in one.before if not item.itself} <= judged
        assert {item.right for item in one.before if item.itself} <= {None}


# Image files


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 112, 20), (1, 1, 112), (3, 5, 5)])
def test_small_images_are_kept_to_the_pixel(shape: tuple[int, int, int]) -> None:
    image = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    found = opened(encoded(image))
    wanted = (255 * image).round().permute(1, 2, 0).numpy()
    assert found.format == "PNG"
    assert np.array_equal(np.asarray(found), wanted[..., 0] if shape[0] == 1 else wanted)


@pytest.mark.parametrize(
    ("shape", "size"),
    [((1, 113, 113), (112, 112)), ((3, 130, 120), (103, 112)), ((1, 2000, 1), (1, 112))],
)
def test_large_images_are_reduced(shape: tuple[int, int, int], size: tuple[int, int]) -> None:
    colour = torch.tensor([0.2, 0.5, 0.8])[: shape[0], None, None]
    for smooth in (True, False):
        found = opened(encoded(colour.expand(shape), smooth=smooth))
        assert (found.format, found.size) == ("WEBP", size)
        # One colour stays it, but for the rounding of its brightness and hues.
        pixels = np.asarray(found.convert("RGB"), float)
        assert np.abs(pixels - 255 * colour.expand(3, 1, 1)[:, 0, 0].numpy()).max() <= 3


def test_other_channels_are_shown_as_grey() -> None:
    image = torch.rand(4, 6, 5, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(np.asarray(rendered(image)), (255 * image.mean(0)).round().numpy())
    assert rendered(image.double()[:3]).mode == "RGB"
    assert np.asarray(rendered(torch.tensor([[[-1.0, 2.0]]]))).tolist() == [[0, 255]]


@pytest.mark.parametrize(
    ("change", "factor"),
    [(0.0, 1), (1e-9, 5e6), (1 / 255, 100), (8 / 255, 10), (0.25, 2), (0.26, 1), (0.5, 1), (0.9, 1)],
)
def test_factors_are_round_and_leave_the_change_in_range(change: float, factor: float) -> None:
    assert nice_factor(change) == factor


# Cards


def test_a_card_has_the_values_of_its_picture() -> None:
    picture = Picture.model_validate(a_picture("ES", number=3))
    shown = parsed(card(picture, network="mine", series=8, order=5)).one("article", "shot")
    wanted = {"attack": "ES", "why": "worst", "network": "8", "harm": "3.0", "number": "3", "order": "5"}
    assert {name: shown[f"data-{name}"] for name in wanted} == wanted
    said = " ".join(one.text for one in shown.all("p", "about"))
    for part in ("mine", "Class 3; ES ↑ 100.0 → 0.0;", "first of its class 1 → 2"):
        assert part in said
    captions = [one.text for one in shown.all("figcaption")]
    assert captions == ["image", "perturbed, by at most 8/255", "difference ×10", "target, class 4"]
    for ranking, items in zip(shown.all("ol"), (picture.before, picture.after), strict=True):
        rows = ranking.all("li")
        assert [row["class"] for row in rows] == ["right" if item.right else "wrong" for item in items]
        assert [row.one("span", "far").text for row in rows] == [f"{item.distance:.3f}" for item in items]
        assert [row.one("img")["src"] for row in rows] == [item.image for item in items]
    assert all(one["alt"] for one in shown.all("img"))


def test_an_image_that_is_ranked_stands_among_the_others() -> None:
    entries = a_picture("CA+", why=None, place=[317, 1], values=[])
    entries |= {"asker": entries["targets"][0]}
    entries["after"] = [{**entries["after"][0], "itself": True, "right": None}, *entries["after"][1:]]
    shown = parsed(card(Picture.model_validate(entries)))
    said = " ".join(one.text for one in shown.all("p", "about"))
    assert "rank of this image 317 → 1" in said
    assert "In the ranking of the target image 1 of class 1:" in said
    before, after = shown.all("ol")
    assert not before.all("li", "itself")
    assert after.all("li")[0].text == "4 this image, rank 10.400"


@pytest.mark.parametrize(
    "address", ["../a.png", "data:text/html;base64,aGk=", 'data:image/png;base64,a" onload="']
)
def test_a_picture_holds_images_alone(address: str) -> None:
    with pytest.raises(ValueError, match="String should match pattern"):
        Picture.model_validate(a_picture(perturbed=address))
