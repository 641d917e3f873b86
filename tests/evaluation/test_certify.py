"""Certificates: against a network whose smoothed form is known, by loops, and what is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.attacks import Draws, Gallery, Queries, hit_at_1
from robustmetric.evaluation import Certification, CertifyPlan, Data, Subject, smoothing
from robustmetric.evaluation.bounds import certified_radius, largest_radius, mean_of
from robustmetric.evaluation.certificate import FORMAT
from robustmetric.evaluation.certify import certify
from robustmetric.evaluation.plan import draw_queries
from tests.evaluation.conftest import make_network

SIGMA = 0.25
MODULE = Certification.judge.__globals__


class Plane(nn.Module):
    """Embeds images at ±angle, by the side of a plane that they are on; of 36 pixels, equally weighed.

    With noise the chance of a side is Φ(d/σ) at the distance d from the plane: the smoothed network is known,
    and changes its mind exactly at the plane.
    """

    def __init__(self, degrees: float) -> None:
        super().__init__()
        self.angle = math.radians(degrees)

    def forward(self, images: Tensor) -> Tensor:
        distance = images.flatten(1).sum(1) / 6 - 3
        side = torch.where(distance > 0, 1.0, -1.0)
        # Of the sides no gradient leads anywhere; that of the distance does.
        angle = self.angle * (side + distance - distance.detach())
        return torch.stack([angle.cos(), angle.sin()], dim=1)


def at(*distances: float) -> Tensor:
    """Images (N, 1, 6, 6) at these distances from the plane."""
    return (0.5 + torch.tensor(distances) / 6)[:, None, None, None].expand(-1, 1, 6, 6).contiguous()


DISTANCES = (-0.5, -0.2, 0.01, 0.1, 0.2, 0.35, 0.5, 0.8, 1.2)


def of_plane(degrees: float, kind: type[Plane] = Plane, **settings: Any) -> Certification:
    """Certify queries of class 1 at the distances, in a gallery far away on both sides."""
    gallery = (at(2, 2.2, 2.4, -2, -2.2, -2.4), torch.tensor([1, 1, 1, 0, 0, 0]))
    data = Data(at(*DISTANCES), torch.ones(len(DISTANCES), dtype=torch.long), gallery=gallery)
    plan = CertifyPlan.make(**{"sigma": SIGMA, "samples": 1000, **settings})
    return Certification(Subject(kind(degrees), data), plan)


class Slope(Plane):
    """The angle grows with the distance from the plane: margins of noisy images differ little."""

    def forward(self, images: Tensor) -> Tensor:
        angle = self.angle * torch.tanh(images.flatten(1).sum(1) / 6 - 3)
        return torch.stack([angle.cos(), angle.sin()], dim=1)


def arrays_of(certification: Certification) -> dict[str, Tensor]:
    certification.run()
    return certification.joined("certify") | (
        certification.joined("attack") if certification.plan.attack else {}
    )


# What is known


@pytest.mark.slow
def test_where_margins_agree_radii_are_those_of_their_distribution() -> None:
    """By symmetry this network changes its mind at the plane too, and its mean margins are small."""
    for seed in range(10):
        found = arrays_of(of_plane(15, Slope, attack=False, seed=seed))
        by_mean = certified_radius(found["right"], SIGMA)
        for distance, radius in zip(DISTANCES, found["radius"].tolist(), strict=True):
            assert radius == 0 or radius < distance
        assert (found["radius"] >= by_mean).all()
        assert float(found["radius"].mean()) > 4 * float(by_mean.mean())
        assert float(found["radius"][DISTANCES.index(0.35)]) > 0.1


def test_with_many_samples_the_radius_is_that_distance() -> None:
    found = arrays_of(of_plane(90, attack=False, samples=20_000, batch=2000))
    for distance, radius in zip(DISTANCES, found["radius"].tolist(), strict=True):
        # The bound for three rivals; the estimate is off by four of its deviations at most.
        mean = 2 * norm.cdf(distance / SIGMA) - 1
        variance = 1 - mean**2
        log = math.log(2 * 3 / 0.0005)
        error = math.sqrt(2 * variance * log / 20_000) + 14 * log / (3 * 19_999)
        doubt = error * 1.1 + 4 * math.sqrt(variance / 20_000)
        least = SIGMA * norm.ppf((1 + mean - doubt) / 2) if mean > doubt else 0.0
        assert max(0.0, least) <= radius <= max(0.0, distance)
    middle = DISTANCES.index(0.2)
    assert found["radius"][middle] > 0.9 * 0.2


def test_wrong_is_not_abstained() -> None:
    certification = of_plane(90, attack=False, radii=[0.05, 0.3])
    certificate = certification.run()
    found = certification.joined("certify")
    hit, radius = found["hit"] > 0, found["radius"]
    assert hit[:2].tolist() == [False, False]
    assert not (radius[~hit] > 0).any()
    assert (hit & (radius == 0)).any(), "one is so near that it abstains"
    share = 100 / len(DISTANCES)
    assert certificate.wrong.value == pytest.approx(share * int((~hit).sum()))
    assert certificate.abstained.value == pytest.approx(share * int((hit & (radius == 0)).sum()))
    assert certificate.recall.value == pytest.approx(share * int(hit.sum()))
    assert certificate.at(0.05).certified.value == pytest.approx(share * int((radius > 0.05).sum()))
    assert certificate.radius.value == pytest.approx(float(radius.mean()))
    assert certificate.median == pytest.approx(float(radius.median()))
    assert certificate.limit == pytest.approx(largest_radius(SIGMA, 1000, 0.001, 3))
    assert certificate.limit is not None
    assert certificate.limit >= float(radius.max())


def test_the_truth_lies_between_the_bounds() -> None:
    """A query is misranked by some perturbation shorter than r if its distance is less, and by no other."""
    radii = (0.15, 0.4, 0.9)
    certification = of_plane(60, radii=radii, samples=2000)
    certificate = certification.run()
    found = certification.joined("certify") | certification.joined("attack")
    distance = torch.tensor(DISTANCES)
    for k, radius in enumerate(radii):
        certain, broken = found["radius"] > radius, found["broken"][:, k] > 0
        robust = distance > radius
        assert not (certain & ~robust).any()
        assert not (broken & robust).any()
        bound = certificate.at(radius)
        assert bound.upper is not None
        assert bound.certified.value is not None
        assert bound.upper.value is not None
        truth = round(100 * float(robust.double().mean()), 9)  # as means are
        assert bound.certified.value <= truth <= bound.upper.value
    # The bounds say something: some are certified, and some broken that are not so as they are.
    assert certificate.bounds[0].certified.value > 30  # type: ignore[operator]
    assert (found["broken"][:, 2] > 0).sum() > (found["wrong"] > 0).sum() + 2
    change = found["change"][:, 2]
    assert float(change[~change.isnan()].max()) <= 0.9
    assert float(change[~change.isnan()].max()) > 0.89


# Whom a query is compared with


def test_every_stream_of_noise_is_used_once(images: Tensor, labels: Tensor, network: nn.Module) -> None:
    """A query's samples choose nothing that they judge, and the gallery has noise of its own."""
    drawn: Counter[tuple[int, str, int]] = Counter()

    class Watched(Draws):
        def __init__(self, seed: int, purpose: str, numbers: Any) -> None:
            drawn.update((seed, purpose, int(number)) for number in numbers)
            super().__init__(seed, purpose, numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODULE, "Draws", Watched)
        certify(network, images, labels, sigma=0.1, radii=[0.1], samples=50, queries=5, steps=2)
    assert set(drawn.values()) == {1}
    purposes = Counter(purpose for _, purpose, _ in drawn)
    assert purposes == {
        "certify/gallery": 40,
        "certify/choose": 5,
        "certify/judge": 5,
        "certify/attack/0.1/choose": 5,
        "certify/attack/0.1/judge": 5,
    }


def test_the_nearest_image_is_the_project_s(images: Tensor, labels: Tensor, network: nn.Module) -> None:
    """With a gallery, own positions and cameras, as `hit_at_1` has it for the same vectors."""
    own = torch.arange(-10, 10).clamp_min(-1)
    cameras = torch.arange(40) // 5 % 2
    ranked = Data(images[10:], labels[10:], cameras=cameras[10:])
    data = Data(images[:20], labels[:20], gallery=ranked, own=own, cameras=cameras[:20])
    subject = Subject(network, data)
    plan = CertifyPlan.make(sigma=0.4, samples=30, choose=5, gallery_samples=10, attack=False)
    certification = Certification(subject, plan)
    found = arrays_of(certification)
    with subject.frozen():
        seen = [mean_of(certification.samples(images[n], n, "certify/judge", 30)) for n in range(20)]
    z = torch.nn.functional.normalize(torch.stack(seen))
    queries = Queries(z, labels[:20], data.places, cameras[:20])
    gallery = Gallery(certification.vectors, labels[10:], cameras=cameras[10:])
    expected = hit_at_1(z, queries, gallery, strict=True)
    assert found["hit"].tolist() == expected.tolist()
    assert 0 < expected.mean() < 100, "some are right and some wrong"
    for number in range(20):
        mates, others = certification.sides(number)
        assert int(data.places[number]) not in [*mates.tolist(), *others.tolist()]
        for position in range(30):
            same = labels[10 + position] == labels[number]
            mine = position == int(data.places[number])
            camera = cameras[10 + position] == cameras[number]
            assert (position in mates) == bool(same and not mine and not camera)
            assert (position in others) == bool(not same)


def test_queries_without_an_answer_are_left_out(images: Tensor, network: nn.Module) -> None:
    labels = torch.tensor([0, 0, 1, 1, 2, 3])
    how: dict[str, Any] = {"sigma": 0.1, "samples": 50, "steps": 2, "radii": [0.1]}
    certificate = certify(network, images[:6], labels, **how)
    assert certificate.queries.left_out == 2
    four = certify(network, images[:6], labels, **how, queries=6)
    assert certificate.recall == four.recall
    share = certificate.recall.value
    assert share is not None
    assert share % 25 == 0
    lonely = torch.tensor([0, 0, 1, 2, 3, 4])
    # The seed is one by which the only query drawn has no mate.
    seed = next(s for s in range(99) if int(draw_queries(6, 1, s)) > 1)
    with pytest.raises(rm.UserError, match=r"none of the 1 queries has an image of its class to find"):
        certify(network, images[:6], lonely, **how, queries=1, seed=seed, attack=False)


def test_copies_of_an_image_in_another_class_are_certified_nowhere() -> None:
    """A mate and a rival with one and the same vector: neither is nearer."""
    certification = of_plane(90, attack=False)
    certification.run()
    vars(certification)["vectors"] = certification.vectors[:1].expand_as(certification.vectors).clone()
    judged = certification.judge(at(1.2)[0], 8)
    assert judged is not None
    assert not judged.hit
    assert judged.right < 0
    assert judged.wrong < 0


def test_where_nothing_can_be_wrong_the_radius_is_the_largest_that_there_is() -> None:
    ranked = (at(1, 1.1, -1.2, 2, 3), torch.tensor([0, 0, 0, 0, 1]))
    subject = Subject(Plane(60), Data(*ranked, gallery=ranked, own=torch.tensor([4, 4, 4, 4, 4])))
    plan = CertifyPlan.make(sigma=SIGMA, samples=100, attack=False)
    found = arrays_of(Certification(subject, plan))
    assert found["hit"][:4].tolist() == [100] * 4
    assert found["radius"][:4].tolist() == [plan.limit] * 4


# The same, whatever the batch


@pytest.fixture(scope="module")
def how() -> dict[str, Any]:
    few: dict[str, Any] = {"samples": 120, "choose": 20, "gallery_samples": 15, "steps": 3}
    return {"sigma": 0.1, "radii": [0.02, 0.3], **few}


def certification_of(
    images: Tensor, labels: Tensor, out: Path | None = None, **settings: Any
) -> Certification:
    subject = Subject(make_network(), Data(images, labels, name="tiny"))
    return Certification(subject, CertifyPlan.make(**settings), out)


@pytest.mark.slow
def test_batch_and_number_of_queries_change_nothing(
    images: Tensor, labels: Tensor, how: dict[str, Any]
) -> None:
    whole = arrays_of(certification_of(images, labels, **how))
    other = arrays_of(certification_of(images, labels, **how, batch=7))
    some = arrays_of(certification_of(images, labels, **how, queries=9))
    assert some["number"].tolist() != list(range(9))
    rows = some["number"]
    for name, value in whole.items():
        # Only rounding may depend on the batch: of single precision, through a radius of slope 0.13. The
        # steps of an attack have a fixed length, whatever the gradient, and make more of it.
        least = 1e-3 if name in ("broken", "change") else 1e-5
        torch.testing.assert_close(other[name], value, rtol=0, atol=least, equal_nan=True)
        if name in ("attacked", "broken", "change"):  # attacked together with others
            torch.testing.assert_close(some[name], value[rows], rtol=0, atol=least, equal_nan=True)
        else:
            assert some[name].allclose(value[rows], rtol=0, atol=0, equal_nan=True)
    again = arrays_of(certification_of(images, labels, **how, seed=1))
    assert not again["right"].equal(whole["right"])


# The document: for interruptions, damage and folders see test_job.py


def test_what_a_certificate_holds(
    images: Tensor, labels: Tensor, how: dict[str, Any], tmp_path: Path
) -> None:
    made = certification_of(images, labels, tmp_path, **how, attack=False, queries=8).run()
    assert rm.load_certificate(tmp_path) == rm.load_certificate(tmp_path / "certificate.json") == made
    content = json.loads((tmp_path / "certificate.json").read_text(encoding="utf-8"))
    assert content["schema"] == "robustmetric/certificate/1"
    assert content["network"]["parameters"] == 36 * 32 + 32 + 32 * 16 + 16
    assert content["data"]["name"] == "tiny"
    assert content["settings"]["radii"] == [0.02, 0.3]
    assert content["bounds"][0]["attacked"] is content["bounds"][0]["upper"] is None
    arrays = FORMAT.read_arrays(tmp_path)
    assert {*arrays} == {"number", "mate", "rival", "hit", "right", "wrong", "radius"}
    assert len(arrays["radius"]) == 8
    assert str(made).splitlines()[1].startswith("radius 0.02: certified R@1 ")
    assert "is at least" in made.says(made.at(0.3))
    with pytest.raises(rm.UserError, match=r"at the radius 0.1; known: 0.02, 0.3"):
        made.at(0.1)


# What is refused


class Failing(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return images.flatten(1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "sigma"),
        ({"sigma": 0}, "sigma is 0: .*greater than 0"),
        ({"radii": []}, r"radii .*not \[\]"),
        ({"radii": [0, 1]}, r"radii must be positive .*, not \[0, 1\]"),
        ({"radii": [0.5, 0.25]}, r"radii .*ascending order.* not \[0.5, 0.25\]"),
        ({"radii": "0.5;1"}, "radii .*, not '0.5;1'"),
        ({"samples": 14}, "samples is 14, .* fewer than 15 where alpha is 0.001"),
        ({"choose": 0}, "choose is 0: .*greater than or equal to 1"),
        ({"alpha": 0.5}, "alpha is 0.5: .*less than 0.5"),
        ({"queries": 41}, "queries must be from 1 to the number of images, 40, not 41"),
        ({"sample": 100}, r"unknown setting 'sample' \(did you mean 'samples'\?\)"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    images: Tensor, labels: Tensor, change: dict[str, Any], says: str
) -> None:
    model, given = Failing(), {"sigma": 0.25, **change} if change else {}
    with pytest.raises(rm.UserError, match=says) as told:
        certify(model, images, labels, **given)
    assert told.value.parameter == next(iter(change), "sigma")
    assert model.calls == 0


def test_noise_beyond_the_memory_is_refused_before_any_work(
    images: Tensor, labels: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(smoothing, "free_memory", lambda: 10**6)
    model, out = Failing(), tmp_path / "out"
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({"attack_samples": 10_000}, r"attack_samples is 10,000: noise for images of shape \(1, 6, 6\)", 0),
        ({"batch": 50_000, "samples": 50_000}, "batch is 50,000: noise for images", 0),
        # Embeddings of 36 numbers, and two products in double: only their length is looked at.
        ({"samples": 50_000, "attack": False}, "samples is 50,000: .* of length 36 .*at most 6,250$", 1),
    ]
    for how, told, calls in cases:
        with pytest.raises(rm.UserError, match=told):
            certify(model, images, labels, sigma=0.25, out=out, **how)
        assert model.calls == calls
    assert not out.exists()


def test_a_mean_without_direction_is_told() -> None:
    """Two samples, one on each side, cancel out."""
    subject = of_plane(90).subject
    subject.data.ranked.images[0] = at(0)[0]  # type: ignore[index]

    def sides(seed: int) -> set[bool]:
        noise = Draws(seed, "certify/gallery", [0]).normal(2, 1, 6, 6)[0]
        return {bool(x.sum() > 0) for x in noise}

    seed = next(seed for seed in range(99) if len(sides(seed)) == 2)
    plan = CertifyPlan.make(sigma=SIGMA, gallery_samples=2, seed=seed, attack=False)
    with pytest.raises(rm.UserError, match=r"the mean of 2 noisy embeddings of image 0 is zero"):
        Certification(subject, plan).run()
