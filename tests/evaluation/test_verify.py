"""Verification: against a network whose distances are known, by loops, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.errors import UserError
from robustmetric.evaluation import Data, Verification
from robustmetric.evaluation.intervals import exact_interval
from robustmetric.evaluation.verified import FORMAT
from robustmetric.verification import roc
from tests.evaluation.conftest import make_network

pytestmark = pytest.mark.kernels


class Circle(nn.Module):
    """Embeds an image on half of a circle, by the mean of its pixels: distances are known."""

    def forward(self, images: Tensor) -> Tensor:
        angle = math.pi * images.mean((1, 2, 3))
        return torch.stack([angle.cos(), angle.sin()], dim=1)


def at(levels: list[float] | Tensor) -> Tensor:
    """Images (N, 1, 2, 2) of one level each."""
    return torch.as_tensor(levels, dtype=torch.float32)[:, None, None, None].expand(-1, 1, 2, 2).contiguous()


def chord(apart: np.ndarray | float) -> Any:
    """The distance of two images whose levels are so far apart."""
    return 2 * np.sin(np.pi * np.asarray(apart) / 2)


LEVELS = torch.tensor([0.40, 0.42, 0.47, 0.50, 0.52, 0.60, 0.61, 0.61, 0.10, 0.17])
LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3])
EVERY = torch.tensor([[i, j] for i in range(10) for j in range(10) if i != j])
# Of sums of four pixels, a cosine and a difference, on a sphere: some units of single precision.
ROUNDING = 1e-6


def on_circle(**changes: Any) -> Verification:
    usual: dict[str, Any] = {"pairs": EVERY, "threshold": 0.12, "eps": 0.03, "alpha": 0.01, "steps": 5}
    return rm.verify(Circle(), at(LEVELS), LABELS, **{**usual, **changes})


def arrays_of(out: Path) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in FORMAT.read_arrays(out).items()}


def by_hand(distances: np.ndarray, same: np.ndarray, threshold: float) -> tuple[float, float]:
    """TAR and FAR in %, by a loop."""
    shares = []
    for kind in (True, False):
        those = [d for d, s in zip(distances, same, strict=True) if s == kind]
        shares.append(100 * sum(d <= threshold for d in those) / len(those))
    return shares[0], shares[1]


def test_distances_before_and_after_an_attack_are_those_of_the_circle(tmp_path: Path) -> None:
    found = on_circle(out=tmp_path / "out")
    arrays = arrays_of(tmp_path / "out")
    first, second = EVERY.numpy().T
    same = LABELS.numpy()[first] == LABELS.numpy()[second]
    apart = np.abs(LEVELS.double().numpy()[first] - LEVELS.double().numpy()[second])
    assert (arrays["first"] == first).all()
    assert (arrays["second"] == second).all()
    assert (arrays["same"] == same).all()
    clean, moved = chord(apart), np.where(same, chord(apart + 0.03), chord(np.maximum(apart - 0.03, 0)))
    assert arrays["distance"] == pytest.approx(clean, abs=ROUNDING)
    # A pair that has met cannot stay together by steps of a fixed size, but for one of them.
    met = ~same & (apart < 0.03)
    assert arrays["attacked"][~met] == pytest.approx(moved[~met], abs=ROUNDING)
    assert (arrays["attacked"][met] <= clean[met] + ROUNDING).all()
    assert (arrays["attacked"][met] < chord(0.01) + ROUNDING).all()
    # Two copies are driven apart too, though the distance has no gradient there.
    copies = same & (apart == 0)
    assert copies.sum() == 2
    assert arrays["attacked"][copies] == pytest.approx(chord(0.03), abs=ROUNDING)

    assert (found.threshold.value, found.threshold.source) == (0.12, "given")
    # Beyond rounding: an image that is embedded again may be a last digit away.
    still = on_circle(eps=0.0)
    for rates in still.conditions.values():
        assert (rates.tar.value, rates.far.value) == (still.clean.tar.value, still.clean.far.value)
    tables = {
        "clean": arrays["distance"],
        "evasion": np.where(same, arrays["attacked"], arrays["distance"]),
        "impersonation": np.where(same, arrays["distance"], arrays["attacked"]),
        "both": arrays["attacked"],
    }
    for name, distances in tables.items():
        rates, (tar, far) = found.conditions[name], by_hand(distances, same, 0.12)
        curve = roc(torch.from_numpy(distances), torch.from_numpy(same))
        wanted = {"tar": tar, "far": far, "auc": 100 * curve.auc, "eer": 100 * curve.eer}
        for key, value in wanted.items():
            score = getattr(rates, key)
            assert score.value == pytest.approx(value, abs=1e-8)
            assert score.low <= score.value <= score.high
            before = None if name == "clean" else getattr(found.clean, key).value
            assert score.before == before
        count, wrong = round(tar / 100 * same.sum()), round(far / 100 * (~same).sum())
        ends = [exact_interval(count, int(same.sum())), exact_interval(wrong, int((~same).sum()))]
        for score, (low, high) in zip((rates.tar, rates.far), ends, strict=True):
            assert [score.low, score.high] == pytest.approx([100 * low, 100 * high], abs=1e-8)
    # What each attack can do, and what it leaves alone.
    assert found.evasion is not None
    assert found.impersonation is not None
    assert found.both is not None
    assert found.evasion.far.value == found.clean.far.value
    assert found.impersonation.tar.value == found.clean.tar.value
    assert found.both.tar.value == found.evasion.tar.value
    assert found.both.far.value == found.impersonation.far.value
    assert found.evasion.tar.value < found.clean.tar.value  # type: ignore[operator]
    assert found.impersonation.far.value > found.clean.far.value  # type: ignore[operator]


def test_tar_at_a_far_and_what_an_attack_leaves_of_it(tmp_path: Path) -> None:
    found = on_circle(out=tmp_path / "out")
    arrays = arrays_of(tmp_path / "out")
    same, clean, moved = (arrays[name] for name in ("same", "distance", "attacked"))
    far = [point.far for point in found.points]
    assert far == [0.1, 0.01, 0.001, 0.0001]
    best = max(by_hand(clean, same, t)[0] for t in clean if by_hand(clean, same, t)[1] <= 10)
    point = found.points[0]
    assert point.tar is not None
    assert point.threshold is not None
    assert point.tar.value == pytest.approx(best)
    tar, wrong = by_hand(clean, same, point.threshold)
    assert tar == best
    assert wrong <= 10
    wanted = by_hand(moved, same, point.threshold)
    assert (point.evaded, point.impersonated) == pytest.approx(wanted, abs=1e-8)
    assert wanted[0] < best
    assert wanted[1] > 10
    different = int((~same).sum())
    assert [p.why for p in found.points[1:]] == [
        f"a FAR of {f:g} takes at least {round(1 / f):,} different pairs, and there are {different}"
        for f in far[1:]
    ]
    assert all(p.tar is None and p.threshold is None for p in found.points[1:])


def test_the_threshold_is_not_chosen_on_pairs_that_are_judged(tmp_path: Path) -> None:
    """Planted: the judged pairs are told apart by 0.2 to 0.3, the validation pairs by 0.02 to 0.06."""
    judged = at([0.0, 0.05, 0.2, 0.25, 0.4, 0.45])
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    validation = (at([0.10, 0.11, 0.14, 0.15, 0.18, 0.19]), labels)
    found = rm.verify(
        Circle(), judged, labels, validation=validation, count=1000, attack=False, out=tmp_path / "out"
    )
    arrays = arrays_of(tmp_path / "out")
    # The largest distance of the validation pairs that accepts none of the different ones.
    assert found.threshold.value == arrays["choose/distance"][arrays["choose/same"]].max()
    assert found.threshold.value == pytest.approx(chord(0.01), abs=ROUNDING)
    # Perfect with a threshold of their own, and at the one that was chosen nothing is accepted.
    assert (found.clean.auc.value, found.clean.eer.value) == (100, 0)
    assert (found.clean.tar.value, found.clean.far.value) == (0, 0)
    assert found.threshold.model_dump(exclude={"value", "sha256"}) == {
        "source": "validation images", "same": 3, "different": 12, "classes": 3, "tar": 100, "far": 0,
    }  # fmt: skip
    assert "the threshold was chosen on 3 classes: another few may choose another one" in found.notes
    # With the threshold that suits these images it is right.
    given = rm.verify(Circle(), judged, labels, threshold=chord(0.1), count=1000, attack=False)
    assert (given.clean.tar.value, given.clean.far.value) == (100, 0)


def people() -> tuple[Tensor, Tensor]:
    """Images of 40 classes that overlap."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(400) % 40
    middle = torch.rand(40, generator=generator)
    return at((middle[labels] + 0.02 * torch.randn(400, generator=generator)).clamp(0, 1)), labels


@pytest.mark.parametrize("far", [0.1, 0.01])
def test_the_threshold_is_chosen_for_a_far_and_keeps_to_it_on_other_pairs(far: float, tmp_path: Path) -> None:
    images, labels = people()
    found = rm.verify(Circle(), images, labels, far=far, eps=0.02, steps=2, count=4000, out=tmp_path / "out")
    arrays = arrays_of(tmp_path / "out")
    # By a loop: no larger distance of the pairs that choose keeps to the FAR, one pair more or not.
    choose, wrong = arrays["choose/distance"], arrays["choose/distance"][~arrays["choose/same"]]
    kept = [d for d in choose if (wrong <= d).sum() + 1 <= far * (len(wrong) + 1)]
    assert found.threshold.value == max(kept)
    assert found.threshold.far == pytest.approx(100 * (wrong <= max(kept)).mean())
    # The others accept about as many, and the interval tells what it is.
    tar, rate = by_hand(arrays["distance"], arrays["same"], max(kept))
    assert (found.clean.tar.value, found.clean.far.value) == pytest.approx((tar, rate), abs=1e-8)
    # First of all that is printed: both with their intervals, and after the attack at the same threshold.
    tar, rate = by_hand(arrays["attacked"], arrays["same"], max(kept))
    assert found.both is not None
    assert (found.both.tar.value, found.both.far.value) == pytest.approx((tar, rate), abs=1e-8)
    told, attacked, chose = str(found).splitlines()[:3]
    assert f"for a target of {100 * far:g} %" in told
    for line, rates in ((told, found.clean), (attacked, found.both)):
        for score in (rates.tar, rates.far):
            assert f"{score.value:.1f} % [{score.low:.1f}, {score.high:.1f}]" in line
    assert f"{max(kept):.4f}" in chose


def test_too_few_pairs_for_a_far_choose_the_strictest_threshold_and_that_is_said(tmp_path: Path) -> None:
    images, labels = people()
    found = rm.verify(Circle(), images, labels, far=1e-3, attack=False, count=400, out=tmp_path / "out")
    arrays = arrays_of(tmp_path / "out")
    choose, same = arrays["choose/distance"], arrays["choose/same"]
    assert found.threshold.value == choose[choose < choose[~same].min()].max()
    assert "too few pairs for the target of 0.1 %" in found.headline[0]
    (few,) = (note for note in found.notes if "FAR of 0.001 takes at least 1,000 different pairs" in note)
    assert "draw a count of 2,000" in few


def test_a_far_above_its_target_is_said() -> None:
    images, labels = people()
    found = rm.verify(Circle(), images / 10, labels, validation=(images, labels), attack=False)
    assert found.clean.far.low > 1  # type: ignore[operator]
    assert any("the FAR is above its target of 1 %" in note for note in found.notes)


def test_a_perturbation_that_does_not_help_is_not_used(tmp_path: Path) -> None:
    """One long step overshoots where levels are nearer than half of it: the image is left as it is."""
    on_circle(eps=0.3, alpha=0.3, steps=1, out=tmp_path / "out")
    arrays = arrays_of(tmp_path / "out")
    clean, moved, same = arrays["distance"], arrays["attacked"], arrays["same"]
    near = ~same & (clean < chord(0.15))
    assert near.sum() > 10
    assert (moved[near] == clean[near]).all()
    assert (moved[~same] <= clean[~same]).all()
    assert (moved[same] >= clean[same]).all()


@pytest.mark.parametrize("batch", [1, 7])
def test_batch_and_order_change_nothing_but_rounding(
    batch: int, images: Tensor, labels: Tensor, tmp_path: Path
) -> None:
    network, images = make_network().double(), images.double()
    pairs = torch.randint(40, (50, 2), generator=torch.Generator().manual_seed(2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(3))
    how: dict[str, Any] = {"threshold": 0.5, "eps": 0.1, "alpha": 0.02, "steps": 6}
    rm.verify(network, images, labels, pairs=pairs, out=tmp_path / "a", **how)
    rm.verify(network, images, labels, pairs=pairs[order], batch=batch, out=tmp_path / "b", **how)
    one, other = arrays_of(tmp_path / "a"), arrays_of(tmp_path / "b")
    for name in ("distance", "attacked"):
        assert other[name] == pytest.approx(one[name][order.numpy()], abs=1e-9)


def test_cameras_and_a_gallery(tmp_path: Path) -> None:
    labels, cameras = torch.arange(24) % 4, torch.arange(24) // 12
    levels = labels / 4 + torch.linspace(0, 0.05, 24)
    ranked = Data(at(levels[8:]), labels[8:], cameras=cameras[8:])
    data = Data(at(levels[:8]), labels[:8], gallery=ranked, cameras=cameras[:8])
    how: dict[str, Any] = {"threshold": 0.3, "count": 1000, "attack": False}
    found = rm.verify(Circle(), data, **how, out=tmp_path / "out")
    arrays = arrays_of(tmp_path / "out")
    first, second = arrays["first"], arrays["second"]
    assert first.max() < 8 <= second.min()
    same = arrays["same"]
    assert (cameras.numpy()[first[same]] != cameras.numpy()[second[same]]).all()
    assert (labels.numpy()[first] == labels.numpy()[second]).tolist() == same.tolist()
    assert arrays["distance"] == pytest.approx(
        chord(np.abs(levels.numpy()[first] - levels.numpy()[second])), abs=ROUNDING
    )
    assert found.data.cameras
    assert found.data.gallery == 16
    assert found.pairs.images == len({*first.tolist(), *second.tolist()})


def test_a_network_that_tells_nothing_apart() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.ones(len(x), 1), 0 * x.flatten(1)[:, :1]], dim=1)

    found = rm.verify(Same(), at(LEVELS), LABELS, pairs=EVERY, threshold=0.5, steps=2)
    assert found.clean.auc.value == found.clean.eer.value == 50
    chosen = rm.verify(Same(), at(LEVELS), LABELS, count=20, attack=False)
    assert (chosen.clean.tar.value, chosen.clean.far.value, chosen.threshold.tar) == (0, 0, 0)
    assert any("accepts none of the same pairs that chose it" in note for note in chosen.notes)
    assert "all pairs are equally far apart: the network tells nothing apart, it has collapsed" in found.notes


# The document: for interruptions, damage and folders see test_job.py


def test_the_file_is_what_was_returned(tmp_path: Path) -> None:
    data = Data(at(LEVELS), LABELS, name="levels")
    how: dict[str, Any] = {"pairs": EVERY, "threshold": 0.12, "steps": 1, "name": "circle"}
    found = rm.verify(Circle(), data, **how, out=tmp_path)
    content = json.loads((tmp_path / "verification.json").read_text(encoding="utf-8"))
    assert content["schema"] == "robustmetric/verification/1"
    assert content["network"]["name"] == "circle"
    assert content["data"]["name"] == "levels"
    assert content["pairs"]["source"] == "given"
    assert {*content["versions"]} >= {"robustmetric", "torch", "numpy"}
    assert rm.load_verification(tmp_path) == found
    assert str(found).splitlines() == [*found.headline, *found.notes]
    quiet = on_circle(attack=False)
    assert quiet.evasion is quiet.impersonation is quiet.both is None
    assert list(quiet.conditions) == ["clean"]
    assert quiet.points[0].evaded is None


def test_other_pairs_or_validation_images_do_not_go_into_the_folder(tmp_path: Path) -> None:
    choose = (at(LEVELS), LABELS)
    how: dict[str, Any] = {"threshold": None, "validation": choose, "attack": False, "out": tmp_path}
    on_circle(**how)
    for change, told in (
        ({"pairs": EVERY[1:]}, "pairs was"),
        ({"validation": (at(LEVELS / 2), LABELS)}, "choosing was"),
    ):
        with pytest.raises(UserError, match=f"holds another verification: {told}"):
            on_circle(**{**how, **change})


# What cannot be


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"count": 1}, "count is 1: .*greater than or equal to 2"),
        ({"threshold": 2.5}, "threshold is 2.5: .*less than or equal to 2"),
        ({"threshold": "far"}, "threshold is 'far'"),
        ({"far": 0.01}, "give one of threshold and far"),
        ({"far": 10, "threshold": None}, r"far must be in \(0, 1\), not 10.* 0\.01 for 1 %"),
        ({"eps": 8}, "eps is 8: .*less than or equal to 1"),
        ({"labels": torch.arange(10)}, "none of the 10 queries has another image of its class"),
        ({"epsilon": 0.1}, r"unknown setting 'epsilon' \(did you mean 'eps'\?\); known: alpha, attack,"),
    ],
)  # fmt: skip
def test_what_cannot_be_verified(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    usual: dict[str, Any] = {
        "model": Circle(),
        "images": at(LEVELS),
        "labels": LABELS,
        "pairs": EVERY,
        "threshold": 0.1,
    }
    with pytest.raises(UserError, match=told):
        rm.verify(**{**usual, **changes}, out=tmp_path / "out")
    assert not list((tmp_path / "out").rglob("verification.json"))


OWN = """
from dataclasses import dataclass
from robustmetric.attacks import Search

@dataclass(frozen=True, kw_only=True)
class Up(Search):
    by: float = 0.01
    follows_gradient = False
    def minimise(self, problem):
        return (problem.images + self.by).clamp(0, 1)
"""


def test_a_search_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    found = on_circle(search=f"{tmp_path}/mine.py:Up(by=0.02)", out=tmp_path / "out")
    assert found.settings.search == "mine.py:Up(by=0.02)"
    arrays = arrays_of(tmp_path / "out")
    first, second = EVERY.numpy().T
    levels = LEVELS.double().numpy()
    moved, clean = (
        chord(np.abs(levels[first] + 0.02 - levels[second])),
        chord(np.abs(levels[first] - levels[second])),
    )
    wanted = np.where(arrays["same"], np.maximum(moved, clean), np.minimum(moved, clean))
    assert arrays["attacked"] == pytest.approx(wanted, abs=ROUNDING)
    with pytest.raises(UserError, match=r"changed a pixel by 0\.2, to within .*; eps is 0\.03, and"):
        on_circle(search=f"{tmp_path}/mine.py:Up(by=0.2)")


def test_validation_data_are_checked_and_may_have_a_gallery() -> None:
    images, labels = torch.rand(12, 1, 1, 1), torch.arange(12) % 4
    whole = Data(images, labels, gallery=(images + 0, labels))
    found = rm.verify(nn.Flatten(), images, labels, validation=whole, count=8, attack=False)
    assert found.threshold.classes == 4
    wrong = Data(images, labels, cameras=torch.arange(3))
    with pytest.raises(rm.UserError, match="cameras"):
        rm.verify(nn.Flatten(), images, labels, validation=wrong, count=8, attack=False)
