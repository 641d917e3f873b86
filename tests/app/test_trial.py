"""A query under an attack, step by step: the same as an attack elsewhere, within budget and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from robustmetric.app import Query, Trial, Walk
from robustmetric.app.trial import MOST_K, MOST_STEPS, shown_steps
from robustmetric.attacks import ATTACKS, PGD, attack
from robustmetric.data.inputs import Inputs, load_pixels
from robustmetric.errors import UserError
from robustmetric.evaluation import Data, Subject, Threat, run_attack
from robustmetric.evaluation.attack import embed_all
from robustmetric.models.c2f2 import C2F2
from robustmetric.perturb import Budget, frozen
from robustmetric.sphere import embed
from robustmetric.training import load_run
from tests.helpers.command import works
from tests.helpers.runs import make_run

Make = Callable[..., Trial]
EPS, ALPHA = 0.1, 0.02


class Ticking:
    """A clock that goes on by a second each time it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize("name", list(ATTACKS))
def test_the_last_step_is_what_the_attack_finds(name: str, make_trial: Make) -> None:
    trial = make_trial(alpha=ALPHA, seed=3)
    walks = trial.attack(trial.query(17), name, eps=EPS, steps=7, k=6)
    assert [walk.network for walk in walks] == ["plain", "defended"]
    for walk, view in zip(walks, trial.views.values(), strict=True):
        threat = Threat(Budget(eps=EPS, alpha=ALPHA, steps=7), PGD(), seed=3)
        outcome = run_attack(view, attack(name), torch.tensor([17]), threat)
        last = walk.shots[-1]
        assert torch.equal(last.perturbed, outcome.images[0])
        assert last.targets == tuple(outcome.target.index[0].tolist())
        assert walk.objective[0] == float(outcome.first)
        assert walk.objective[-1] == float(outcome.last)
        assert last.values == {
            key: (float(outcome.before[key]), float(value)) for key, value in outcome.after.items()
        }
        assert walk.shots[0].values == {key: (float(v), float(v)) for key, v in outcome.before.items()}
        assert torch.equal(walk.shots[0].perturbed, walk.shots[0].image)


def test_it_is_what_the_command_attack_writes(tmp_path: Path) -> None:
    """With the same seed and settings, to the last bit: also a run's own ε."""
    run = make_run(tmp_path / "run", "last", eps=0.15)
    options = ("--queries", 1, "--seed", 5, "--steps", 9, "--alpha", "2/255", "--attack", "GTM")
    works("attack", run, *options, "--out", tmp_path / "out", "--cache", tmp_path / "cache")
    found = load_file(tmp_path / "out" / "images.safetensors")
    network = load_run(run).network
    (pixels,) = load_pixels("digits", None, Inputs(), ["test"], tmp_path / "cache")
    images = Inputs().images(pixels)
    with frozen(network):
        trial = Trial.of({"it": network}, images, pixels.labels, ["GTM"], alpha=2 / 255, seed=5)
        (walk,) = trial.attack(trial.query(int(found["number"])), "GTM", eps=0.15, steps=9, k=3)
    assert torch.equal(walk.shots[-1].image, found["before"][0])
    assert torch.equal(walk.shots[-1].perturbed, found["after"][0])
    assert walk.shots[-1].targets == tuple(found["target"][0].tolist())


@pytest.mark.parametrize("name", ["ES", "misrank", "CA+", "SP-QA-"])
def test_each_step_is_where_an_attack_of_so_many_steps_ends(name: str, make_trial: Make) -> None:
    """But for a single one, which is as long as the budget allows; and each is within the budget."""
    trial = make_trial("one", alpha=ALPHA)
    (walk,) = trial.attack(trial.query(8), name, eps=EPS, steps=8, k=4)
    assert walk.steps == tuple(range(walk.taken + 1))
    for step, shot in zip(walk.steps, walk.shots, strict=True):
        # x ± ε and its difference from x are each rounded once, by at most half of 2⁻²³ below 1.
        assert shot.change <= EPS + 2**-23
        assert shot.perturbed.min() >= 0
        assert shot.perturbed.max() <= 1
        if step >= 2:
            (shorter,) = trial.attack(trial.query(8), name, eps=EPS, steps=step, k=4)
            assert torch.equal(shorter.shots[-1].perturbed, shot.perturbed)
            assert shorter.objective == walk.objective[: step + 1]
            # Embeddings in single precision, of a batch and of one image.
            for column, value in shot.values.items():
                assert shorter.shots[-1].values[column] == pytest.approx(value, rel=1e-5)
    assert walk.objective[-1] < walk.objective[0]


def ranking(
    trial: Trial, network: nn.Module, image: Tensor, own: int, k: int
) -> list[tuple[int, float, bool]]:
    """Rank by a loop: position, distance and whether the class is right."""
    z = embed(network, image[None])[0].double()
    gallery = [embed(network, trial.data.images[torch.tensor([n])])[0].double() for n in range(60)]
    far = sorted((float((z - other).norm()), n) for n, other in enumerate(gallery) if n != own)
    labels = trial.data.labels
    return [(n, distance, bool(labels[n] == labels[own])) for distance, n in far][:k]


def test_the_rankings_are_those_of_a_loop(make_trial: Make) -> None:
    trial = make_trial(alpha=ALPHA)
    walks = trial.attack(trial.query(21), "ES", eps=EPS, steps=5, k=7)
    changed = 0
    for walk, view in zip(walks, trial.views.values(), strict=True):
        for shot in walk.shots:
            whole = ranking(trial, view.model, shot.perturbed, 21, 60)
            assert [(one.position, one.right) for one in shot.after] == [(n, r) for n, _, r in whole[:7]]
            # Embeddings of single precision, of a batch or of one image: some roundings of 2⁻²⁴.
            assert [one.distance for one in shot.after] == pytest.approx(
                [d for _, d, _ in whole[:7]], abs=1e-5
            )
            assert shot.place[1] == 1 + [right for _, _, right in whole].index(True)
            changed += [one.position for one in shot.after] != [one.position for one in shot.before]
    assert changed > 0


def test_at_most_so_many_steps_are_shown_and_both_networks_the_same_ones(make_trial: Make) -> None:
    trial = make_trial(alpha=0.002)
    plain, defended = trial.attack(trial.query(2), "ES", eps=EPS, steps=MOST_STEPS, k=1)
    assert plain.steps == defended.steps == shown_steps(MOST_STEPS) == tuple(range(0, 65, 4))
    assert len(plain.objective) == MOST_STEPS + 1
    for taken in range(MOST_STEPS + 1):
        steps = shown_steps(taken)
        assert steps[0] == 0
        assert steps[-1] == taken
        assert len(steps) <= 17
        assert sorted(set(steps)) == list(steps)


def test_an_attack_that_has_what_it_wants_stops(make_trial: Make) -> None:
    """And shows the step that won; the other network goes on, and the page finds both at any step."""
    trial = make_trial(alpha=0.01)
    walks = [
        walk for n in range(12) for walk in trial.attack(trial.query(n), "misrank", eps=0.3, steps=30, k=1)
    ]
    early = [walk for walk in walks if 0 < walk.taken < 30]
    assert early
    for walk in early:
        assert not walk.late
        assert walk.shots[-1].values["misrank"][1] == 0
        assert walk.shots[0].values["misrank"][1] == 100
        assert all(math.isfinite(value) for value in walk.objective)
        assert walk.at(10**6) is walk.shots[-1]
        assert walk.at(0) is walk.shots[0]
    lost = [walk for walk in walks if walk.taken == 0]
    assert all(len(walk.shots) == 1 and walk.shots[0].values["misrank"] == (0, 0) for walk in lost)


def test_without_a_budget_nothing_changes(make_trial: Make) -> None:
    trial = make_trial("one")
    (walk,) = trial.attack(trial.query(0), "ES", eps=0.0, steps=3, k=2)
    assert walk.shots[-1].change == 0


# Bounds


def test_the_time_is_a_limit_for_all_networks_together(make_trial: Make) -> None:
    """Of 20 seconds each network gets a half, and looks at the clock once a step."""
    clock = Ticking()
    trial = make_trial(alpha=0.001, seconds=20.0, clock=clock)
    walks = trial.attack(trial.query(4), "ES", eps=EPS, steps=40, k=2)
    for walk in walks:
        assert walk.late
        assert 5 <= walk.taken <= 11
        assert walk.steps[-1] == walk.taken
        assert walk.objective[-1] < walk.objective[0]
        assert walk.shots[-1].change > 0
    assert clock.now <= 30
    whole = make_trial(alpha=0.001).attack(trial.query(4), "ES", eps=EPS, steps=40, k=2)
    for walk, longer in zip(walks, whole, strict=True):
        # Up to where it came it is the same.
        assert walk.objective == longer.objective[: walk.taken + 1]


def test_without_any_time_the_image_is_shown_as_it_was(make_trial: Make) -> None:
    trial = make_trial(seconds=0.5, clock=Ticking())
    for walk in trial.attack(trial.query(4), "ES", eps=EPS, steps=40, k=2):
        assert walk.late
        assert walk.taken == 0
        assert walk.shots[0].change == 0
        assert walk.shots[0].after == walk.shots[0].before


def test_who_stops_the_app_stops_the_attack(make_trial: Make) -> None:
    trial = make_trial()
    told = []

    def tell(network: str, done: int, total: int) -> None:
        told.append((network, done, total))
        if done == 3:
            trial.stopped.set()

    walks = trial.attack(trial.query(4), "ES", eps=EPS, steps=40, k=2, tell=tell)
    assert told == [("plain", 1, 40), ("plain", 2, 40), ("plain", 3, 40)]
    assert [walk.taken for walk in walks] == [3, 0]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"steps": 65}, "steps must be a whole number from 1 to 64, not 65"),
        ({"steps": 0}, "steps must be a whole number from 1 to 64, not 0"),
        ({"steps": 2.5}, "steps must be a whole number from 1 to 64, not 2.5"),
        ({"k": 21}, "k must be a whole number from 1 to 20, not 21"),
        ({"k": True}, "k must be a whole number from 1 to 20, not True"),
        ({"eps": 1.5}, "eps must be in [0, 1], not 1.5: pixels are in [0, 1], so 8 grey levels are 8/255"),
        (
            {"eps": math.nan},
            "eps must be in [0, 1], not nan: pixels are in [0, 1], so 8 grey levels are 8/255",
        ),
        ({"name": "SE"}, "unknown attack 'SE' (did you mean 'ES'?); known: CA+"),
    ],
)
def test_what_is_out_of_bounds_is_refused(asked: dict[str, object], told: str, make_trial: Make) -> None:
    trial = make_trial()
    usual: dict[str, object] = {"name": "ES", "eps": 0.1, "steps": 2, "k": 2}
    with pytest.raises(UserError) as error:
        trial.attack(trial.query(0), **{**usual, **asked})  # type: ignore[arg-type]
    assert str(error.value).startswith(told)


def test_an_attack_that_is_not_offered_is_not_run(make_trial: Make, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Mine: pass\n")
    trial = make_trial()
    with pytest.raises(UserError, match="unknown attack"):
        trial.attack(trial.query(0), f"{file}:Mine", eps=0.1, steps=1, k=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [-1, 60, 1.5, None, "0", True])
def test_a_number_that_no_image_has_is_refused(number: object, make_trial: Make) -> None:
    with pytest.raises(UserError, match=r"the images have the numbers 0 to 59; there is no "):
        make_trial().query(number)  # type: ignore[arg-type]


def test_a_ranking_is_as_long_as_there_are_images(make_trial: Make, images: tuple[Tensor, Tensor]) -> None:
    few = Trial.of({"flat": nn.Flatten()}, images[0][:8], images[1][:8])
    (walk,) = few.attack(few.query(0), "ES", eps=0.1, steps=2, k=MOST_K)
    assert len(walk.shots[0].after) == 7


# Uploads


def upload(trial: Trial, file: Path, number: int, label: int) -> Query:
    """Write an image of the data as a file, without loss, and upload it."""
    pixels = (255 * trial.data.images[torch.tensor([number])][0, 0]).round().to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(file)
    return trial.upload(file, label)


def test_an_upload_queries_the_gallery_as_a_new_image(make_trial: Make, tmp_path: Path) -> None:
    trial = make_trial()
    query = upload(trial, tmp_path / "a.png", 9, 1)
    assert query.number is None
    known = trial.query(9)
    assert torch.allclose(query.image, known.image, atol=0.5 / 255 + 2**-24, rtol=0)
    for walk in trial.attack(query, "ES", eps=EPS, steps=3, k=3):
        first = walk.shots[0].after[0]
        # Itself, but for the rounding to 8 bits; among the data it would not find itself.
        assert first.position == 9
        assert first.right
        assert first.distance < 0.05
        assert walk.shots[0].place[1] == 1


def test_of_an_upload_of_no_class_nothing_is_right(make_trial: Make, tmp_path: Path) -> None:
    trial = make_trial()
    query = upload(trial, tmp_path / "a.png", 9, -1)
    for name in ATTACKS:
        if name in ("misrank", "LTM", "GTM"):
            with pytest.raises(UserError) as error:
                trial.attack(query, name, eps=EPS, steps=2, k=3)
            assert str(error.value) == (
                f"{name} is about images of the query's class, and there is none to find: choose another "
                "image, or a class for the upload"
            )
            continue
        for walk in trial.attack(query, name, eps=EPS, steps=2, k=3):
            if attack(name).perturbs == "query":
                assert walk.shots[-1].place == (None, None)
                assert not any(one.right for one in walk.shots[-1].after)


def test_an_upload_is_cut_as_the_images_are(tmp_path: Path) -> None:
    """Squeezed to the size of the pixels, then the middle of it."""
    network = C2F2(size=4)
    inputs = Inputs(crop=4)
    (pixels,) = load_pixels("digits", None, inputs, ["test"], tmp_path / "cache")
    Image.fromarray(pixels.pixels[5][:, :, 0]).resize((16, 16), Image.Resampling.NEAREST).save(
        tmp_path / "a.png"
    )
    images = inputs.images(pixels)
    with frozen(network):
        trial = Trial.of({"it": network}, images, pixels.labels, ["ES"])
        query = trial.upload(tmp_path / "a.png", 3)
    assert query.image.shape == (1, 1, 4, 4)
    wanted = replace(inputs, resize=8, channels=1).tensor(tmp_path / "a.png")
    assert torch.equal(query.image, wanted)
    Image.effect_noise((30, 20), 64).save(tmp_path / "wide.png")
    trial.fit = "crop"
    wanted = replace(inputs, resize=8, channels=1, fit="crop").tensor(tmp_path / "wide.png")
    assert torch.equal(trial.upload(tmp_path / "wide.png").image, wanted)


def test_queries_and_a_gallery_of_its_own_with_cameras(images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    """An upload's camera is not known: all images count for it, also those that do not for the data's."""
    pixels, labels = images
    network = nn.Flatten()
    cameras = torch.arange(40) // 4 % 2
    gallery = Data(pixels[:40], labels[:40], cameras=cameras)
    data = Data(pixels[40:], labels[40:], gallery=gallery, cameras=torch.zeros(20, dtype=torch.long))
    z = embed_all(network, data.every, torch.arange(60), 16)
    trial = Trial(data, {"flat": Subject(network, data).view(network, z)}, [attack("ES"), attack("misrank")])

    def first(walks: tuple[Walk, ...]) -> set[int]:
        return {one.position for one in walks[0].shots[0].after}

    query = trial.query(3)
    seen = first(trial.attack(query, "ES", eps=0.1, steps=2, k=20))
    mates = {n for n in range(40) if labels[n] == query.label}
    assert {int(cameras[n]) for n in mates & seen} == {1}
    uploaded = replace(query, number=None)
    assert {
        int(cameras[n]) for n in mates & first(trial.attack(uploaded, "misrank", eps=0.1, steps=2, k=20))
    } == {0, 1}
