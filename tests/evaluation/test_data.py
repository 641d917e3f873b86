"""What is evaluated: who queries and who is ranked, what its identity tells apart, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.data.cache import Pixels
from robustmetric.errors import UserError
from robustmetric.evaluation import Data, Evaluation, Plan, Subject
from robustmetric.evaluation.data import data_by_marks, data_of_two
from tests.evaluation.conftest import Tiny, assert_same, make_network, values

CAMERAS = torch.arange(40) % 3


def test_the_first_pass_finds_copies(images: Tensor, labels: Tensor) -> None:
    x = images.clone()
    x[7], x[30] = x[4], x[4]
    assert Data(x, labels).fingerprint.copies == [(4, 7), (4, 30)]
    apart = Data(x[:10], labels[:10], gallery=(x[10:], labels[10:])).fingerprint
    assert (apart.copies, apart.shared, apart.shape) == ([], [(4, 20), (7, 20)], [1, 6, 6])
    known = torch.full((10,), -1)
    known[4] = 20
    of_known = dataclasses.replace(Data(x[:10], labels[:10], gallery=(x[10:], labels[10:])), own=known)
    assert of_known.fingerprint.shared == [(7, 20)], (
        "a query that is known to be there finds no copy of itself"
    )


def changed(images: Tensor) -> Tensor:
    other = images.clone()
    other[7, 0, 3, 3] = 1 - other[7, 0, 3, 3]
    return other


class Renamed(nn.Sequential):
    """The same network under another name."""


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda x, y: {"images": changed(x)}, "data"),
        (lambda x, y: {"images": x.double()}, "data"),
        (lambda x, y: {"images": x.reshape(40, 1, 4, 9)}, "data"),
        (lambda x, y: {"labels": y.flip(0)}, "data"),
        (lambda x, y: {"gallery": (x, y)}, "data"),
        (lambda x, y: {"cameras": CAMERAS}, "rules"),
        (lambda x, y: {"own": torch.arange(40)}, "rules"),
        (lambda x, y: {"name": "mine"}, "names"),
        (lambda x, y: {"classes": ["a"] * 5}, "classes"),
        (lambda x, y: {"model": make_network(1)}, "network"),
        (lambda x, y: {"model": Renamed(*make_network())}, "class"),
        (lambda x, y: {"surrogate": make_network(1)}, "surrogate"),
        (lambda x, y: {"title": "mine"}, "names"),
        (lambda x, y: {"train_classes": ["a"]}, "classes"),
        (lambda x, y: {"files": ["a"] * 40, "skipped": ["b"], "weights": "last"}, None),
        (lambda x, y: {"images": x.clone(), "labels": y.int()}, None),
    ],
)  # fmt: skip
def test_identity_tells_another_subject(change: Any, key: str | None, images: Tensor, labels: Tensor) -> None:
    def identity(**given: Any) -> dict[str, Any]:
        parts = {"model": make_network(), "images": images, "labels": labels, **given}
        of_subject = {n: parts.pop(n) for n in ("surrogate", "train_classes", "weights") if n in parts}
        name, model = parts.pop("title", None), parts.pop("model")
        return Subject(model, Data(**parts), name=name, **of_subject).identity()

    usual, other = identity(), identity(**change(images, labels))
    assert [name for name in usual if usual[name] != other[name]] == ([] if key is None else [key])


# What is refused: the value is named


X, Y = torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 5
APART: Any = (X[:10], Y[:10])
SEEN, ONE = (Data(*APART, cameras=numbers) for numbers in (torch.arange(10), torch.zeros(10).long()))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"images": X * 255}, r"pixels are in \[.*, 2\d\d\.\d+\]; they must be in \[0, 1\]: divide .* 255"),
        ({"images": X.masked_fill(torch.arange(40)[:, None, None, None] == 39, torch.nan)}, "nan"),
        ({"images": (X * 255).byte()}, "floating-point tensor, not uint8"),
        ({"images": X[:, 0]}, r"shape \(40, 6, 6\); they must have shape \(N, C, H, W\)"),
        ({"images": [*X]}, r"the images are a list; .*torch.stack"),
        ({"labels": Y[:39]}, r"shape \(40,\), the class of each image, not int64 of shape \(39,\)"),
        ({"labels": Y.float()}, "integers .* not float32"),
        ({"labels": Y.to(torch.uint16)}, "integers .* not uint16"),
        ({"labels": Y * 0 + 3}, "all 40 images are of class 3"),
        ({"labels": torch.arange(40)}, "none of the 40 queries .* gallery of 40"),
        ({"images": X[:4], "labels": Y[:4] // 2}, "the gallery has 4 images; give at least 5"),
        ({"queries": 41}, "from 1 to the number of images, 40, not 41"),
        ({"own": torch.arange(40)}, "own describes a gallery, and none is given"),
        ({"gallery": 3}, "gallery must be a Data, not 3: give one, or a pair"),
        ({"gallery": (X[:10, :, 1:, 1:], Y[:10])}, r"\(1, 6, 6\).*\(1, 5, 5\)"),
        ({"gallery": (X[:10].double(), Y[:10])}, "queries are float32 .*, images of the gallery float64"),
        ({"gallery": (X[:10], Y)}, r"shape \(10,\).* not int64 of shape \(40,\)"),
        ({"gallery": (X[:10], Y[:10] + 50)}, "none of the 40 queries .* gallery of 10"),
        ({"gallery": APART, "own": torch.arange(40)}, "own holds 39; .* 0 to"),
        ({"gallery": APART, "own": torch.arange(10)}, r"own must .* \(40,\).* not int64 of shape \(10,\)"),
        ({"gallery": APART, "cameras": CAMERAS}, "cameras of the queries are given and those of the gallery"),
        ({"gallery": SEEN}, "cameras of the gallery are given and those of the queries"),
        ({"cameras": CAMERAS[:39]}, r"int64.* of shape \(39,\)"),
        ({"cameras": CAMERAS * 0}, "none of the 40 queries .* by another camera .* or leave"),
        ({"gallery": ONE, "cameras": CAMERAS * 0}, "none of the 40 queries .* by another camera .* of 10"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_ranked(change: dict[str, Any], told: str) -> None:
    given = {"images": X, "labels": Y, **change}
    queries = given.pop("queries", None)
    data = Data(**given)
    with pytest.raises(UserError, match=told):
        _ = [data.check(queries), data.fingerprint]  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("how", "more", "parameter", "told"),
    [
        ({"protocol": "reference"}, {"cameras": CAMERAS}, "protocol", "knows no cameras"),
        ({"protocol": "reference"}, {"gallery": APART}, "protocol", "leave them out"),
        ({"attacks": ["CA+(w=90)"]}, {}, None, "w is 90, too many for a gallery of 40 images"),
        ({"suite": "worst-case(goals='promote(k=90)')"}, {}, "suite", "of the suite: .*90.* 40 images"),
        ({"queries": 41}, {}, "queries", "40, not 41"),
    ],
)
def test_a_plan_that_does_not_fit_the_data(
    how: dict[str, Any], more: dict[str, Any], parameter: str | None, told: str
) -> None:
    with pytest.raises(UserError, match=told) as refused:
        Evaluation(Subject(nn.Flatten(), Data(X, Y, **more)), Plan.make(**how))
    assert refused.value.parameter == parameter


@pytest.mark.parametrize("model", [torch.flatten, "c2f2", None, nn.Flatten])
def test_what_is_no_network(model: Any) -> None:
    with pytest.raises(UserError, match="network must be a Module, not"):
        Subject(model, Data(X, Y))


def test_data_and_labels_are_given_once() -> None:
    for given_, told in (((X,), "labels are missing"), ((Data(X, Y), Y), "given with a Data")):
        with pytest.raises(UserError, match=told):
            rm.evaluate(nn.Flatten(), *given_)


# Decoded images: by marks, and of two sets


def decoded(count: int, first: int = 0, **more: Any) -> Pixels:
    """Images that are told apart by their grey level, `first` and up, in two classes by turns."""
    levels = np.arange(first, first + count, dtype=np.uint8)[:, None, None, None]
    known: dict[str, Any] = {"labels": torch.arange(count) % 2, "classes": ("cat", "dog"), **more}
    return Pixels(np.zeros((count, 4, 4, 1), np.uint8) + levels, **known)


def levels(data: Data) -> list[int]:
    return [round(255 * float(image.mean())) for image in data.images[torch.arange(len(data.images))]]


def cameras(data: Data) -> list[int] | None:
    return None if data.cameras is None else data.cameras.tolist()


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
@settings(max_examples=50)
def test_marks_part_the_images_as_a_loop_does(marks: list[tuple[bool, bool]]) -> None:
    asks, ranks = [ask for ask, _ in marks], [rank for _, rank in marks]
    count, names = len(marks), [f"{k}.png" for k in range(len(marks))]
    known: dict[str, Any] = {"is_query": torch.tensor(asks), "is_gallery": torch.tensor(ranks)}
    parted = decoded(count, **known, cameras=torch.arange(count) + 100)
    if not any(asks) or not any(ranks):
        with pytest.raises(UserError, match=f"none of {count} images is marked"):
            data_by_marks(parted)
        return
    data = data_by_marks(parted, 2, files=names)
    assert (data.gallery is None) == (all(asks) and all(ranks))
    for side, some in ((data, asks), (data.ranked, ranks)):
        rows = [k for k in range(count) if some[k]]
        assert levels(side) == rows
        assert side.labels.tolist() == [k % 2 for k in rows]
        assert cameras(side) == [k + 100 for k in rows]
        assert side.files == [names[k] for k in rows]
        assert side.images[torch.arange(1)].shape == (1, 1, 2, 2), "both sides are cropped"
    order = levels(data.ranked)
    assert data.places.tolist() == [order.index(k) if ranks[k] else -1 for k in levels(data)]
    assert (data.called(0), data.called(0, gallery=True)) == (f"{levels(data)[0]}.png", f"{order[0]}.png")


def test_one_mark_alone_leaves_the_other_to_all() -> None:
    odd = torch.tensor([False, True, False, True])
    data = data_by_marks(decoded(4, is_query=odd))
    assert (levels(data), levels(data.ranked), data.places.tolist()) == ([1, 3], [0, 1, 2, 3], [1, 3])
    data = data_by_marks(decoded(4, is_gallery=odd))
    assert (levels(data), levels(data.ranked), data.places.tolist()) == ([0, 1, 2, 3], [1, 3], [-1, 0, -1, 1])
    assert (data.cameras, data.files, data.ranked.files) == (None, None, None)
    assert data_by_marks(decoded(4)).gallery is None
    assert (data.called(3), data.called(1, gallery=True)) == ("image 3", "gallery image 1")


def test_classes_of_two_sets_are_the_same_if_their_names_are() -> None:
    first = decoded(3, labels=torch.tensor([1, 0, 1]), classes=("dog", "emu"))
    second = decoded(4, 50, labels=torch.tensor([2, 0, 1, 2]), classes=("cat", "dog", "owl"))
    data = data_of_two(first, second, 2, files=["a", "b", "c"], gallery_files=["d", "e", "f", "g"])
    assert data.classes == ["cat", "dog", "emu", "owl"]
    assert [data.classes[k] for k in data.labels.tolist()] == ["emu", "dog", "emu"]
    assert [data.classes[k] for k in data.ranked.labels.tolist()] == ["owl", "cat", "dog", "owl"]
    assert (levels(data), levels(data.ranked)) == ([0, 1, 2], [50, 51, 52, 53])
    assert (data.files, data.ranked.files) == (["a", "b", "c"], ["d", "e", "f", "g"])
    assert (data.places.tolist(), data.cameras, data.ranked.cameras) == ([-1] * 3, None, None)
    assert data.ranked.images[torch.arange(1)].shape == (1, 1, 2, 2)
    asked = decoded(3, is_query=torch.tensor([False, True, True]))
    assert levels(data_of_two(asked, second)) == [1, 2], "its marks count"
    with pytest.raises(UserError, match="none of 3 images is marked"):
        data_of_two(decoded(3, is_query=torch.zeros(3, dtype=torch.bool)), second)


def test_cameras_of_two_tables_are_the_same_if_their_names_are() -> None:
    # Each table numbers its own cameras from 0: "door" is 0 in one and 1 in the other.
    first = decoded(2, cameras=torch.tensor([0, 1]), columns={"camera": ("door", "hall")})
    second = decoded(3, cameras=torch.tensor([1, 0, 2]), columns={"camera": ("door", "attic", "hall")})
    data = data_of_two(first, second)
    door, hall = cameras(data) or []
    mine, other, last = cameras(data.ranked) or []
    assert (mine, last) == (door, hall)
    assert len({door, hall, other}) == 3
    numbered = [decoded(2, cameras=torch.tensor(numbers)) for numbers in ([3, 1], [1, 6])]
    kept = data_of_two(numbered[0], numbered[1])
    assert (cameras(kept), cameras(kept.ranked)) == ([3, 1], [1, 6]), "numbers without names stay"
    for pair in ((numbered[0], decoded(2)), (decoded(2), numbered[0])):
        with pytest.raises(UserError, match=r"cameras of the .* are known and those of the .* are not"):
            data_of_two(*pair)


def test_each_its_own_in_a_gallery_of_the_same_images_is_leave_one_out(
    tiny: Tiny, images: Tensor, labels: Tensor
) -> None:
    for cameras in (None, torch.arange(40) // 5 % 3):
        ranked = Data(images, labels, cameras=cameras)
        alone = tiny(queries=12, cameras=cameras, checks="none,copies")
        both = tiny(queries=12, cameras=cameras, gallery=ranked, own=torch.arange(40), checks="none,copies")
        one, two = alone.run(), both.run()
        assert {n: s.value for n, s in one.retrieval.items()} == {
            n: s.value for n, s in two.retrieval.items()
        }
        assert (one.scores, one.queries, one.checks) == (two.scores, two.queries, two.checks)
        assert_same(values(both), values(alone))
