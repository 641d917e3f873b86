"""Certificates: against a network whose smoothed form is known, under interruption, and in all messages.

This file is also the program that the test of kills starts (see tests/helpers/processes.py).
"""

from __future__ import annotations

import json
import math
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.attacks import Draws, Gallery, Queries, hit_at_1
from robustmetric.evaluation import (
    Certificate,
    Certification,
    CertifyPlan,
    Subject,
    load_certificate,
    smoothing,
)
from robustmetric.evaluation import certify_pieces as pieces
from robustmetric.evaluation.bounds import certified_radius, largest_radius, mean_of
from robustmetric.evaluation.certificate import FORMAT
from robustmetric.evaluation.certify import certify
from robustmetric.evaluation.store import PARTS, Store
from robustmetric.files import DamagedError
from tests.evaluation.conftest import make_network
from tests.evaluation.test_bounds import plain_radius
from tests.helpers.faults import fault
from tests.helpers.processes import die, forked, needs_fork

SIGMA = 0.25
FILES = ("certificate.json", "queries.safetensors")


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
    subject = Subject(
        kind(degrees),
        at(*DISTANCES),
        torch.ones(len(DISTANCES), dtype=torch.long),
        gallery=(at(2, 2.2, 2.4, -2, -2.2, -2.4), torch.tensor([1, 1, 1, 0, 0, 0])),
    )
    return Certification(subject, CertifyPlan.make(**{"sigma": SIGMA, "samples": 1000, **settings}))


class Slope(Plane):
    """The angle grows with the distance from the plane: margins of noisy images differ little."""

    def forward(self, images: Tensor) -> Tensor:
        angle = self.angle * torch.tanh(images.flatten(1).sum(1) / 6 - 3)
        return torch.stack([angle.cos(), angle.sin()], dim=1)


def arrays_of(certification: Certification) -> dict[str, Tensor]:
    certification.run()
    found = certification.materials.joined(1)
    return found | (certification.materials.joined(2) if certification.plan.attack else {})


# What is known


@pytest.mark.slow
def test_no_radius_is_larger_than_the_distance_to_the_boundary() -> None:
    for seed in range(20):
        found = arrays_of(of_plane(90, attack=False, seed=seed, samples=200))
        for distance, radius in zip(DISTANCES, found["radius"].tolist(), strict=True):
            assert radius == 0 or radius < distance


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


@pytest.mark.slow
def test_a_radius_is_that_of_a_loop_over_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sides that the samples are on, counted; all bounds by hand."""
    found = of_plane(60, attack=False, samples=300, choose=20)
    sides: list[list[bool]] = []
    original = smoothing.noisy_embeddings

    def watched(model: nn.Module, image: Tensor, **how: Any) -> Any:
        parts = list(original(model, image, **how))
        if how["samples"] == 300:
            sides.append([bool(z[1] > 0) for part in parts for z in part])
        return iter(parts)

    monkeypatch.setattr(pieces, "noisy_embeddings", watched)
    arrays = arrays_of(found)
    assert len(sides) == len(DISTANCES)
    decided = set[bool]()
    for k, hits in enumerate(sides):
        values = [math.sin(math.pi / 3) * (1 if hit else -1) for hit in hits]
        mean = sum(values) / 300
        variance = sum((v - mean) ** 2 for v in values) / 299
        log = math.log(2 * 3 / (0.001 / 4))
        bernstein = math.sqrt(2 * variance * log / 300) + 14 * log / (3 * 299)
        low = mean - min(bernstein, (1 + math.sqrt(2 * math.log(4 / 0.001))) / math.sqrt(300))
        # Embeddings in single precision.
        assert float(arrays["right"][k]) == pytest.approx(low, abs=1e-6)
        radius = SIGMA * norm.ppf((1 + low) / 2) if low > 0 else 0.0
        band = SIGMA * plain_radius(values, 3, 0.0005)
        assert float(arrays["radius"][k]) == pytest.approx(max(radius, band), abs=1e-6)
        decided.add(radius > band)
        assert float(arrays["hit"][k]) == (100 if mean > 0 else 0)
    assert False in decided


def test_wrong_is_not_abstained() -> None:
    certification = of_plane(90, attack=False, radii=[0.05, 0.3])
    certificate = certification.run()
    found = certification.materials.joined(1)
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
    found = certification.materials.joined(1) | certification.materials.joined(2)
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


def test_certified_queries_are_not_broken_and_all_is_in_order(
    images: Tensor, labels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Centred(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return (images - 0.5).flatten(1)

    radii = (0.025, 0.03, 0.8, 1.5)
    subject = Subject(Centred(), images, labels)
    plan = CertifyPlan.make(sigma=0.1, radii=radii, samples=400, gallery_samples=30, queries=16, steps=10)
    certification = Certification(subject, plan)
    certificate = certification.run()
    found = certification.materials.joined(1) | certification.materials.joined(2)
    for k, radius in enumerate(radii):
        assert not ((found["radius"] > radius) & (found["attacked"][:, k] == 0)).any()
        assert not ((found["radius"] > radius) & (found["broken"][:, k] > 0)).any()
    rows = [(b.certified.value, b.attacked, b.upper) for b in certificate.bounds]
    for certain, attacked, upper in rows:
        assert attacked is not None
        assert upper is not None
        assert certain <= attacked.value <= certificate.recall.value  # type: ignore[operator]
        assert attacked.value <= upper.value  # type: ignore[operator]
    values = [[b.certified.value, b.attacked.value, b.upper.value] for b in certificate.bounds]  # type: ignore[union-attr]
    assert all(before >= after for a, b in pairwise(values) for before, after in zip(a, b, strict=True))  # type: ignore[operator]
    assert values[0][0] > 0  # type: ignore[operator]
    assert values[-1][2] < 50  # type: ignore[operator]


def test_a_query_that_is_wrong_for_sure_is_not_attacked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, list[int]]] = []
    original = pieces.attacked

    def watched(materials: Any, numbers: Tensor, radius: float, tick: Any = None) -> Tensor:
        asked.append((radius, numbers.tolist()))
        return original(materials, numbers, radius, tick)

    monkeypatch.setattr(pieces, "attacked", watched)
    found = arrays_of(of_plane(60, radii=(0.2, 0.7), samples=2000, steps=8))
    numbers = {radius: [n for r, some in asked for n in some if r == radius] for radius in (0.2, 0.7)}
    assert numbers[0.2] == [n for n in range(len(DISTANCES)) if not found["wrong"][n] > 0]
    assert numbers[0.7] == [n for n in range(len(DISTANCES)) if not found["broken"][n, 0] > 0]
    assert len(numbers[0.7]) < len(numbers[0.2]) < len(DISTANCES)


# Whom a query is compared with


def test_every_stream_of_noise_is_used_once(images: Tensor, labels: Tensor, network: nn.Module) -> None:
    """A query's samples choose nothing that they judge, and the gallery has noise of its own."""
    drawn: Counter[tuple[int, str, int]] = Counter()

    class Watched(Draws):
        def __init__(self, seed: int, purpose: str, numbers: Any) -> None:
            drawn.update((seed, purpose, int(number)) for number in numbers)
            super().__init__(seed, purpose, numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "Draws", Watched)
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
    subject = Subject(
        network,
        images[:20],
        labels[:20],
        gallery=(images[10:], labels[10:]),
        own=torch.where(own >= 0, own, -1),
        cameras=cameras[:20],
        gallery_cameras=cameras[10:],
    )
    plan = CertifyPlan.make(sigma=0.4, samples=30, choose=5, gallery_samples=10, attack=False)
    certification = Certification(subject, plan)
    found = arrays_of(certification)
    materials = certification.materials
    with subject.frozen():
        seen = [mean_of(materials.samples(images[n], n, "certify/judge", 30)) for n in range(20)]
    z = torch.nn.functional.normalize(torch.stack(seen))
    queries = Queries(z, labels[:20], subject.places, cameras[:20])
    gallery = Gallery(materials.vectors, labels[10:], cameras=cameras[10:])
    expected = hit_at_1(z, queries, gallery)
    assert found["hit"].tolist() == expected.tolist()
    assert 0 < expected.mean() < 100, "some are right and some wrong"
    for number in range(20):
        mates, others = materials.sides(number)
        assert int(subject.places[number]) not in [*mates.tolist(), *others.tolist()]
        for position in range(30):
            same = labels[10 + position] == labels[number]
            mine = position == int(subject.places[number])
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
    seed = next(s for s in range(99) if int(CertifyPlan.make(sigma=1, queries=1, seed=s).draw(6)) > 1)
    with pytest.raises(rm.UserError, match=r"none of the 1 queries has an image of its class to find"):
        certify(network, images[:6], lonely, **how, queries=1, seed=seed, attack=False)


def test_copies_of_an_image_in_another_class_are_certified_nowhere() -> None:
    """A mate and a rival with one and the same vector: neither is nearer."""
    certification = of_plane(90, attack=False)
    certification.run()
    materials = certification.materials
    copied = materials.vectors.clone()
    copied[:] = copied[0]
    materials.__dict__["vectors"] = copied
    judged = materials.judge(at(1.2)[0], 8)
    assert judged is not None
    assert not judged.hit
    assert judged.right < 0
    assert judged.wrong < 0


def test_where_nothing_can_be_wrong_the_radius_is_the_largest_that_there_is() -> None:
    subject = Subject(
        Plane(60),
        at(1, 1.1, -1.2, 2, 3),
        torch.tensor([0, 0, 0, 0, 1]),
        gallery=(at(1, 1.1, -1.2, 2, 3), torch.tensor([0, 0, 0, 0, 1])),
        own=torch.tensor([4, 4, 4, 4, 4]),
    )
    plan = CertifyPlan.make(sigma=SIGMA, samples=100, attack=False)
    found = arrays_of(Certification(subject, plan))
    assert found["hit"][:4].tolist() == [100] * 4
    assert found["radius"][:4].tolist() == [plan.limit] * 4


# The same, whatever the batch


@pytest.fixture(scope="module")
def how() -> dict[str, Any]:
    return {
        "sigma": 0.1,
        "radii": [0.02, 0.3],
        "samples": 120,
        "choose": 20,
        "gallery_samples": 15,
        "steps": 3,
    }


def certification_of(
    images: Tensor, labels: Tensor, model: nn.Module | None = None, out: Path | None = None, **settings: Any
) -> Certification:
    subject = Subject(make_network() if model is None else model, images, labels, data="tiny")
    return Certification(subject, CertifyPlan.make(**settings), out, report=lambda _: None)


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


# Interruptions


class Failing(nn.Module):
    """Counts its calls, and fails at one of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0
        self.at: int | None = None

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        z: Tensor = self.inner(images)
        return z


def test_an_interrupted_certification_goes_on(
    images: Tensor, labels: Tensor, how: dict[str, Any], tmp_path: Path
) -> None:
    model, out = Failing(make_network()), tmp_path / "out"
    whole = certification_of(images, labels, model, tmp_path / "whole", **how).run()
    total, kept, done = model.calls, set[str](), 0
    for at_call in (30, 30, 70, 50):
        model.calls, model.at = 0, at_call
        with pytest.raises(KeyboardInterrupt):
            certification_of(images, labels, model, out, **how).run()
        parts = (
            {file.name for file in (out / PARTS).glob("*.safetensors")} if (out / PARTS).exists() else set()
        )
        assert kept <= parts
        done += len(parts) > len(kept)
        kept = parts
    assert done >= 2
    model.calls, model.at = 0, None
    again = certification_of(images, labels, model, out, **how).run()
    assert model.calls < total
    assert again == whole
    for name in FILES:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (out / PARTS).exists()
    # What is finished is read back without a call.
    model.calls, model.at = 0, 1
    assert certification_of(images, labels, model, out, **how).run() == whole
    assert model.calls == 0


@pytest.mark.slow
@fault(
    "evaluation",
    "a certification is killed",
    "the same call goes on behind its last block, to the same certificate",
)
@needs_fork
def test_a_killed_certification_goes_on(
    images: Tensor, labels: Tensor, how: dict[str, Any], tmp_path: Path
) -> None:
    whole = certification_of(images, labels, None, tmp_path / "whole", **how).run()

    def act() -> None:
        keep, calls = Store.keep, 0

        def kept(store: Store, piece: Any, value: Any) -> None:
            nonlocal calls
            calls += 1
            keep(store, piece, value)
            if calls == 4:
                die()

        Store.keep = kept  # type: ignore[method-assign, assignment]
        certification_of(images, labels, None, tmp_path / "out", **how).run()

    code, _ = forked(act)
    assert code == -signal.SIGKILL
    assert len(list((tmp_path / "out" / PARTS).glob("*.safetensors"))) == 4
    assert certification_of(images, labels, None, tmp_path / "out", **how).run() == whole


@fault("evaluation", "a finished piece of a certification is damaged", "it is named and made anew")
def test_a_damaged_piece_is_made_anew(
    images: Tensor, labels: Tensor, how: dict[str, Any], tmp_path: Path
) -> None:
    whole = certification_of(images, labels, None, tmp_path / "whole", **how).run()
    out, told = tmp_path / "out", list[str]()
    certification_of(images, labels, None, out, **how).work(0, 1)
    piece = out / PARTS / "certify-00001.safetensors"
    piece.write_bytes(piece.read_bytes()[:-3])
    subject = Subject(make_network(), images, labels, data="tiny")
    found = Certification(subject, CertifyPlan.make(**how), out, report=told.append).run()
    assert found == whole
    assert len(told) == 1
    assert "certify-00001.safetensors" in told[0]
    assert told[0].endswith("; it is made anew")


@pytest.mark.slow
def test_workers_share_the_pieces(
    images: Tensor, labels: Tensor, how: dict[str, Any], tmp_path: Path
) -> None:
    whole = certification_of(images, labels, **how).run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "wait", lambda *_: True)
        certification_of(images, labels, None, tmp_path, **how).work(0, 2)
    parts = {file.name for file in (tmp_path / PARTS).glob("*.safetensors")}
    assert 1 < len(parts) < 11
    assert certification_of(images, labels, None, tmp_path, **how).run() == whole


# Folders


@pytest.fixture(scope="module")
def made(
    images: Tensor, labels: Tensor, how: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Certificate]:
    """A finished certificate without an attack."""
    out = tmp_path_factory.mktemp("made") / "out"
    return out, certification_of(images, labels, None, out, **how, attack=False, queries=8).run()


def test_a_certificate_is_read_back(made: tuple[Path, Certificate]) -> None:
    out, certificate = made
    for path in (out, out / "certificate.json", str(out)):
        assert load_certificate(path) == rm.load_certificate(path) == certificate
    content = json.loads((out / "certificate.json").read_text(encoding="utf-8"))
    assert content["schema"] == "robustmetric/certificate/1"
    assert content["network"]["parameters"] == 36 * 32 + 32 + 32 * 16 + 16
    assert content["data"]["name"] == "tiny"
    assert content["settings"]["radii"] == [0.02, 0.3]
    assert content["bounds"][0]["attacked"] is content["bounds"][0]["upper"] is None
    arrays = FORMAT.read_arrays(out)
    assert set(arrays) == {"number", "mate", "rival", "hit", "right", "wrong", "radius"}
    assert len(arrays["radius"]) == 8
    assert str(certificate).splitlines()[1].startswith("radius 0.02: certified R@1 ")
    assert "is at least" in certificate.says(certificate.at(0.3))
    with pytest.raises(rm.UserError, match=r"nothing was certified at the radius 0.1; known: 0.02, 0.3"):
        certificate.at(0.1)


def test_the_schema_of_certificates_is_published() -> None:
    schema = Certificate.model_json_schema(by_alias=True, mode="serialization")
    file = Path(__file__).parents[2] / "docs" / "certificate.schema.json"
    assert file.read_text(encoding="utf-8") == json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def test_a_certificate_that_was_changed_is_refused(made: tuple[Path, Certificate], tmp_path: Path) -> None:
    text = (made[0] / "certificate.json").read_text(encoding="utf-8")
    file = tmp_path / "certificate.json"
    file.write_text(text.replace('"alpha": 0.001', '"alpha": 0.0001'), encoding="utf-8")
    with pytest.raises(DamagedError, match="is damaged, or was changed by hand"):
        load_certificate(tmp_path)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(rm.UserError, match="is not a certificate: it is not JSON"):
        load_certificate(tmp_path)
    file.write_text('{"schema": "robustmetric/record/1"}', encoding="utf-8")
    with pytest.raises(rm.UserError, match="is not a certificate of this version"):
        load_certificate(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no certificate .*; give a certificate.json"):
        load_certificate(tmp_path / "nothing")


def test_another_certification_is_refused_with_what_differs(
    made: tuple[Path, Certificate], images: Tensor, labels: Tensor, how: dict[str, Any]
) -> None:
    same = {**how, "attack": False, "queries": 8}
    with pytest.raises(rm.UserError, match=r"holds another certification: sigma was 0.1, is 0.2; give"):
        certification_of(images, labels, None, made[0], **{**same, "sigma": 0.2}).run()
    with pytest.raises(rm.UserError, match=r"holds another certification: network was '.*', is"):
        certification_of(images, labels, make_network(1), made[0], **same).run()


def test_pieces_that_knew_the_mean_alone_are_not_gone_on_with(
    images: Tensor, labels: Tensor, how: dict[str, Any], tmp_path: Path
) -> None:
    certification_of(images, labels, None, tmp_path, **how).work(0, 1)
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert plan.pop("bound") == "distribution"
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(rm.UserError, match=r"holds another certification: bound was None, is 'distribution'"):
        certification_of(images, labels, None, tmp_path, **how).run()


def test_evaluations_and_certifications_do_not_share_a_folder(
    made: tuple[Path, Certificate], images: Tensor, labels: Tensor, how: dict[str, Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"steps": 1, "attacks": ["ES"], "queries": 4, "checks": "none"}
    with pytest.raises(
        rm.UserError, match=r"holds another kind of work, 'certification': give another folder"
    ):
        rm.evaluate(make_network(), images, labels, out=made[0], **settings)
    rm.evaluate(make_network(), images, labels, out=tmp_path / "evaluated", **settings)
    with pytest.raises(rm.UserError, match=r"holds another kind of work, 'evaluation': give another folder"):
        certification_of(images, labels, None, tmp_path / "evaluated", **how).run()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(rm.UserError, match=r"is not empty and holds no certification: give another folder"):
        certification_of(images, labels, None, tmp_path / "other", **how).run()


# Messages


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"sigma": 0},
            r"sigma must be in \(0, 10\], not 0: it is the deviation of noise on pixels in \[0, 1\]",
        ),
        ({"sigma": math.nan}, r"sigma must be in \(0, 10\], not nan"),
        ({"radii": []}, r"radii must be positive numbers in ascending order such as 0.25,0.5,1, not \[\]"),
        ({"radii": [0, 1]}, r"radii must be positive numbers in ascending order .*, not \[0, 1\]: they are"),
        ({"radii": [0.5, 0.25]}, r"radii must be positive numbers in ascending order"),
        ({"radii": [0.5, 0.5]}, r"radii must be positive numbers in ascending order"),
        ({"radii": "0.5;1"}, r"radii must be positive .*, not '0.5;1'"),
        ({"radii": 0}, r"radii must be positive .*, not 0"),
        (
            {"samples": 14},
            r"samples is 14, and nothing can be certified with fewer than 15 where alpha is 0.001",
        ),
        ({"samples": 0}, r"samples must be a whole number of at least 1, not 0"),
        ({"choose": 0}, r"choose must be a whole number of at least 1, not 0"),
        ({"gallery_samples": 1.5}, r"gallery_samples must be a whole number of at least 1, not 1.5"),
        ({"attack_samples": -1}, r"attack_samples must be a whole number of at least 1, not -1"),
        ({"alpha": 0.5}, r"alpha must be in \(0, 0.5\), not 0.5: a bound fails with this probability"),
        ({"alpha": 0}, r"alpha must be in \(0, 0.5\), not 0"),
        ({"queries": 0}, r"queries must be a whole number of at least 1, not 0"),
        ({"queries": 41}, r"queries must be from 1 to the number of images, 40, not 41"),
        ({"seed": 2**32}, r"seed must be less than 2³², not 4294967296"),
        ({"batch": 0}, r"batch must be a whole number of at least 1, not 0"),
        ({"attack": "no"}, r"attack must be True or False, not 'no'"),
        ({"search": "pgd"}, r"search 'pgd' keeps to the budget of each pixel, .* take apgd"),
        ({"search": 3}, r"search is 3; give its name, such as apgd"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    images: Tensor, labels: Tensor, change: dict[str, Any], says: str
) -> None:
    model = Failing(nn.Flatten())
    with pytest.raises(rm.UserError, match=says) as told:
        certify(model, images, labels, **{"sigma": 0.25, **change})
    assert told.value.parameter == next(iter(change))
    assert model.calls == 0


def test_a_setting_that_is_unknown_is_refused() -> None:
    with pytest.raises(rm.UserError, match=r"unknown setting 'sample' \(did you mean 'samples'\?\)"):
        CertifyPlan.make(sigma=0.1, sample=100)
    with pytest.raises(rm.UserError, match=r"sigma must be in \(0, 10\], not None"):
        CertifyPlan.make()


def test_noise_beyond_the_memory_is_refused_before_any_work(
    images: Tensor, labels: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(smoothing, "free_memory", lambda: 10**6)
    model = Failing(nn.Flatten())
    out = tmp_path / "out"
    with pytest.raises(
        rm.UserError, match=r"attack_samples is 10,000: noise for images of shape \(1, 6, 6\)"
    ):
        certify(model, images, labels, sigma=0.25, attack_samples=10_000, out=out)
    with pytest.raises(rm.UserError, match=r"batch is 50,000: noise for images of shape \(1, 6, 6\)"):
        certify(model, images, labels, sigma=0.25, batch=50_000, samples=50_000, out=out)
    assert model.calls == 0
    with pytest.raises(rm.UserError) as told:  # embeddings of 36 numbers, and two products in double
        certify(model, images, labels, sigma=0.25, samples=50_000, attack=False, out=out)
    assert str(told.value).startswith(
        "samples is 50,000: the embeddings of length 36 of one query would take"
    )
    assert str(told.value).endswith(": give at most 6,250")
    assert told.value.parameter == "samples"
    assert model.calls == 1, "only to see how long its embeddings are"
    assert not list(out.glob("*")) if out.exists() else True


def test_a_network_that_fails_leaves_no_trace(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
    with pytest.raises(rm.UserError, match="the network failed on images of shape"):
        certify(narrow, images, labels, sigma=0.25, out=tmp_path / "out")
    assert not (tmp_path / "out" / "plan.json").exists()


def test_a_mean_without_direction_is_told() -> None:
    """Two samples, one on each side, cancel out."""
    subject = of_plane(90).subject
    subject.gallery[0][0] = at(0)[0]  # type: ignore[index]

    def sides(seed: int) -> set[bool]:
        noise = Draws(seed, "certify/gallery", [0]).normal(2, 1, 6, 6)[0]
        return {bool(x.sum() > 0) for x in noise}

    seed = next(seed for seed in range(99) if len(sides(seed)) == 2)
    plan = CertifyPlan.make(sigma=SIGMA, gallery_samples=2, seed=seed, attack=False)
    with pytest.raises(rm.UserError, match=r"the mean of 2 noisy embeddings of image 0 is zero and has no"):
        Certification(subject, plan).run()


def test_progress_tells_of_all_stages(images: Tensor, labels: Tensor, how: dict[str, Any]) -> None:
    told: list[tuple[str, float, int]] = []
    certify(make_network(), images, labels, **how, queries=10, progress=lambda *args: told.append(args))
    assert told[:3] == [("embed", 0, 1), ("certify", 0, 2), ("attack", 0, 2)]
    assert told[-1] == ("attack", 2, 2)


def test_the_network_comes_back_as_it_was(images: Tensor, labels: Tensor, how: dict[str, Any]) -> None:
    model = make_network().train()
    state = torch.get_rng_state()
    certify(model, images, labels, **how, queries=2)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.get_rng_state().equal(state)
