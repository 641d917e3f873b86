"""Queries that are in their gallery, cameras, names of images, and progress within a piece."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robustmetric.distance import embed
from robustmetric.evaluation import Check, Evaluation, Record
from robustmetric.evaluation.staged import Ticks
from robustmetric.evaluation.store import check_folder
from robustmetric.evaluation.subject import Origin

Tiny = Callable[..., Evaluation]
FEW: dict[str, Any] = {"attacks": ["ES", "LTM", "GTM", "GTT"], "steps": 2}


def check_of(record: Record, name: str) -> Check:
    return next(check for check in record.checks if check.name == name)


def values(evaluation: Evaluation) -> dict[str, Tensor]:
    return {
        f"{a.name}/{name}": value
        for a in evaluation.plan.goals
        for name, value in evaluation.materials.found(a).items()
    }


# Queries in their gallery


def test_each_its_own_in_a_gallery_of_the_same_images_is_leave_one_out(
    tiny: Tiny, images: Tensor, labels: Tensor
) -> None:
    alone = tiny(queries=12)
    both = tiny(queries=12, gallery=(images, labels), own=torch.arange(40), checks="quick", steps=8)
    one, two = alone.run(), both.run()
    for name, score in one.retrieval.items():
        assert two.retrieval[name].value == score.value, name
    for name, other in one.scores.items():
        assert two.scores[name] == other, name
    assert values(alone).keys() == values(both).keys()
    for name, value in values(alone).items():
        assert torch.equal(values(both)[name].nan_to_num(-1), value.nan_to_num(-1)), name
    assert (one.data.gallery, two.data.gallery) == (None, 40)
    assert one.queries == two.queries
    assert check_of(two, "copies").status == "pass"


def test_a_query_does_not_find_itself(tiny: Tiny, images: Tensor, labels: Tensor, network: nn.Module) -> None:
    # Every third image asks, and is in the gallery behind some others.
    rows = torch.arange(0, 40, 3)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    own = torch.stack([(order == row).nonzero()[0, 0] for row in rows])
    own[0] = -1  # as if nobody knew
    gallery = (images[order], labels[order])
    few = {"images": images[rows], "labels": labels[rows], "gallery": gallery, **FEW}
    evaluation = tiny(network, own=own, checks="quick", **few)
    record, found = evaluation.run(), values(evaluation)
    with torch.no_grad():
        z, ranked = (embed(network, x).double() for x in (images[rows], gallery[0]))
    hits = []
    for i in range(len(rows)):
        others = [p for p in range(40) if p != int(own[i])]
        far = sorted((float((z[i] - ranked[p]).square().sum()), p) for p in others)
        hits.append(100.0 * bool(gallery[1][far[0][1]] == labels[rows[i]]))
        assert found["GTT/target"][i].tolist() == [far[0][1]]
        for name in ("ES/before/ES:R", "LTM/before/LTM", "GTM/before/GTM"):
            assert float(found[name][i]) == hits[-1]
    assert record["R@1"] == pytest.approx(np.mean(hits))
    assert hits[0] == 100
    check = check_of(record, "copies")
    assert check.figure == 1
    place = int((order == 0).nonzero())
    assert check.says.endswith(f"find themselves: image 0 = gallery image {place}")
    # Without their positions all find themselves.
    blind = tiny(network, checks="quick", **few).run()
    assert (blind["R@1"], check_of(blind, "copies").figure) == (100, 14)


def test_files_name_the_images(tiny: Tiny, images: Tensor, labels: Tensor) -> None:
    copied = images.clone()
    copied[7] = copied[4]
    names = [f"{k}.png" for k in range(40)]
    few: dict[str, Any] = {"attacks": ["TMA"], "steps": 1, "queries": 4, "checks": "quick"}
    record = tiny(images=copied, origin=Origin(files=names), **few).run()
    assert check_of(record, "copies").says.endswith("1 of another class: 7.png = 4.png")
    theirs = [f"ranked/{name}" for name in names]
    origin = Origin(files=names, gallery_files=theirs, skipped=["a.png"], weights="last weights")
    record = tiny(gallery=(copied, labels), own=torch.arange(40), origin=origin, **few).run()
    assert "7.png = ranked/7.png" not in check_of(record, "copies").says
    assert "ranked/4.png" in check_of(record, "copies").says
    assert record.data.skipped == ["a.png"]
    assert record.network.weights == "last weights"
    assert (tiny(**few).run().network.weights, tiny(**few).run().data.skipped) == (None, [])


# Cameras


def test_cameras_change_the_scores_as_a_loop_says(tiny: Tiny, labels: Tensor, network: nn.Module) -> None:
    cameras = torch.tensor([10**12, -3, 5])[torch.arange(40) // 5 % 3]
    cameras[labels == 4] = 5  # which then has no answer
    evaluation = tiny(network, cameras=cameras, **FEW)
    record, found = evaluation.run(), values(evaluation)
    with torch.no_grad():
        z = embed(network, evaluation.subject.images[torch.arange(40)]).double()
    hits, precisions = [], []
    for i in range(40):
        others = [p for p in range(40) if p != i and (labels[p] != labels[i] or cameras[p] != cameras[i])]
        order = sorted(others, key=lambda p: float((z[i] - z[p]).square().sum()))
        right = [bool(labels[p] == labels[i]) for p in order]
        if any(right):
            hits.append(100.0 * right[0])
            places = [k for k, hit in enumerate(right, 1) if hit]
            precisions.append(100 * np.mean([n / k for n, k in enumerate(places, 1)]))
        wanted = 100.0 * right[0] if any(right) else math.nan
        for name in ("ES/before/ES:R", "LTM/before/LTM", "GTM/before/GTM"):
            assert float(found[name][i]) == pytest.approx(wanted, nan_ok=True)
        assert found["GTT/target"][i].tolist() == [order[0]]
    assert record.queries.left_out == 8
    assert record["R@1"] == pytest.approx(np.mean(hits))
    assert record["mAP"] == pytest.approx(np.mean(precisions))
    assert record["R@1"] < tiny(network, **FEW).run()["R@1"]
    assert record.data.cameras is True
    assert tiny(network, **FEW).run().data.cameras is False


def test_cameras_of_a_gallery_are_those_of_leave_one_out(tiny: Tiny, images: Tensor, labels: Tensor) -> None:
    cameras = torch.arange(40) // 5 % 3
    apart = {"gallery": (images, labels), "own": torch.arange(40), "gallery_cameras": cameras}
    one, two = tiny(cameras=cameras, **FEW), tiny(cameras=cameras, **apart, **FEW)
    assert one.run().scores == two.run().scores
    for name, value in values(one).items():
        assert torch.equal(values(two)[name].nan_to_num(-1), value.nan_to_num(-1)), name


@pytest.mark.parametrize("name", ["CA+", "CA-", "QA+", "QA-", "TMA"])
def test_attacks_on_the_whole_ranking_know_no_cameras(name: str, tiny: Tiny) -> None:
    few: dict[str, Any] = {"attacks": [name], "steps": 2, "queries": 8}
    plain = tiny(**few).run()
    by_cameras = tiny(cameras=torch.arange(40) // 5 % 2, **few).run()
    assert by_cameras.scores == plain.scores
    assert by_cameras["R@1"] != plain["R@1"]


# What is refused


APART = (torch.rand(10, 1, 6, 6), torch.arange(10) % 5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"own": torch.arange(40)}, "^own and gallery_cameras describe a gallery, and none is given: pass"),
        ({"gallery_cameras": torch.arange(40), "cameras": torch.arange(40)}, "^own and gallery_cameras des"),
        ({"gallery": APART, "own": torch.arange(40)}, "^own holds 39; positions in a gallery of 10 are 0 to"),
        ({"gallery": APART, "own": torch.arange(10)}, r"^own is torch.int64 of shape \(10,\) for 40 queries"),
        ({"gallery": APART, "own": torch.zeros(40)}, r"^own is torch.float32 of shape \(40,\) for 40 quer"),
        ({"gallery": APART, "cameras": torch.arange(40)}, "are given and .* are not: pass both, or none"),
        (
            {"gallery": APART, "gallery_cameras": torch.arange(10)},
            "are given and .* are not: pass both, or none",
        ),
        ({"cameras": torch.arange(39)}, r"^cameras are torch.int64 of shape \(39,\); they must be integers"),
        ({"cameras": torch.zeros(40)}, r"^cameras are torch.float32 of shape \(40,\); they must be integers"),
        ({"cameras": torch.zeros(40).long()}, "^no query has an image of its class from another camera"),
        (
            {"gallery": APART, "cameras": torch.zeros(40).long(), "gallery_cameras": torch.zeros(10).long()},
            "^no query has an image of its class from another camera",
        ),
        (
            {"cameras": torch.arange(40), "protocol": "reference"},
            "^the reference protocol knows no cameras: use the strict protocol, or leave the cameras out",
        ),
        (
            {"gallery": APART, "own": torch.full((40,), -1), "protocol": "reference"},
            "^the reference protocol takes the nearest image for the query itself",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_once(tiny: Tiny, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tiny(**changes)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {"own": torch.arange(40).roll(1)},
        {"own": None},
        {"cameras": None, "gallery_cameras": None},
        {"cameras": torch.arange(40)},
        {"gallery_cameras": torch.arange(40)},
    ],
)
def test_other_positions_or_cameras_are_another_evaluation(
    change: dict[str, Any], finished: bool, tiny: Tiny, images: Tensor, labels: Tensor, tmp_path: Path
) -> None:
    cameras = torch.arange(40) % 3
    given: dict[str, Any] = {"gallery": (images, labels), "own": torch.arange(40), "out": tmp_path / "out"}
    given |= {"cameras": cameras, "gallery_cameras": cameras, "attacks": ["TMA"], "steps": 1, "queries": 4}
    evaluation = tiny(**given)
    record = evaluation.run() if finished else evaluation.begin()
    with pytest.raises(ValueError, match=r"holds another evaluation: rules was \[.*\], is \[.*\]; give ano"):
        tiny(**{**given, **change}).run()
    again = tiny(**given).run()
    assert record is None or again.model_dump_json() == record.model_dump_json()


def test_a_part_of_the_plan_tells_another_evaluation(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    evaluation = tiny(out=out, attacks=["TMA"], steps=1, queries=4)
    settings = evaluation.plan.model_dump()
    assert check_folder(out, {"settings": settings}) is False
    evaluation.begin()
    assert check_folder(out, {"settings": settings}) is True
    other = {"settings": {**settings, "steps": 5}}
    with pytest.raises(ValueError, match=r"holds another evaluation: steps was 1, is 5; give another"):
        check_folder(out, other)
    assert other == {"settings": {**settings, "steps": 5}}
    (out / "plan.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"plan.json is damaged \(it holds a list\)"):
        check_folder(out, {"settings": settings})


# Progress within a piece


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever somebody looks at the clock, 0.3 s have passed."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.3 * next(ticks), sleep=lambda _: None)
    monkeypatch.setitem(Ticks.__init__.__globals__, "time", clock)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("search", ["pgd", "nes(samples=2)", "pgd(restarts=3)"])
def test_a_block_in_the_making_counts_by_its_share(search: str, tiny: Tiny) -> None:
    told: list[tuple[str, float, int]] = []
    evaluation = tiny(
        attacks=["ES", "TMA"],
        steps=8,
        search=search,
        progress=lambda stage, done, of: told.append((stage, done, of)),
    )
    evaluation.run()
    for stage in ("ES", "TMA"):
        done = [d for s, d, of in told if s == stage and of == 3]
        assert done == sorted(done)
        assert [d for d in done if d == int(d)] == [0, 1, 2, 3]
        assert done[-1] == 3
        for block in range(3):
            parts = [d - block for d in done if block < d < block + 1]
            assert len(parts) >= 2
            assert max(parts) <= 0.99 + 1e-9
    if search == "pgd":
        # Eight times the objective is asked for, and every second time is told.
        shares = [round(8 * d) for s, d, _ in told if s == "TMA" and 0 < d < 1]
        assert shares == sorted(set(shares))
        assert {*shares} <= {*range(1, 9)}
    else:
        # How often it is asked for is known after the first block.
        later = [d - 2 for s, d, _ in told if s == "TMA" and 2 < d < 3]
        assert len({*later}) == len(later)
        assert min(later) < 0.5


def test_quick_blocks_are_told_by_whole_numbers_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 5.0, sleep=lambda _: None)
    monkeypatch.setitem(Ticks.__init__.__globals__, "time", clock)
    told: list[float] = []
    tiny(attacks=["TMA"], steps=8, progress=lambda stage, done, _: told.append(done)).run()
    assert all(done == int(done) for done in told)


@pytest.mark.usefixtures("slow")
def test_telling_changes_no_score(tiny: Tiny) -> None:
    quiet = tiny(**FEW).run()
    loud = tiny(**FEW, progress=lambda *_: None).run()
    assert re.sub(r"\s", "", str(quiet)) == re.sub(r"\s", "", str(loud))
    assert quiet.arrays.sha256 == loud.arrays.sha256
