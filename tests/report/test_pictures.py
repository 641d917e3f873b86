"""Pictures of an evaluation: which queries, what was done to them, the files, and what can go wrong."""

from __future__ import annotations

import errno
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from robustmetric.attacks import ATTACKS, Attack, attack
from robustmetric.data.inputs import Inputs, load_pixels, relative_files
from robustmetric.errors import UserError
from robustmetric.evaluation import Data, Evaluation, Plan, Record, Subject, load_arrays, run_attack
from robustmetric.evaluation.data import data_by_marks
from robustmetric.files import DamagedError, digest_of_entries, write_atomically
from robustmetric.locks import InUseError, locked
from robustmetric.report.pictures import (
    EACH,
    FOLDER,
    LIST,
    Item,
    K,
    Picture,
    Pictures,
    amplified,
    choose,
    encoded,
    harm_of,
    load_pictures,
    make_pictures,
    nice_factor,
    rendered,
)
from robustmetric.report.shots import Shot, take_shots
from robustmetric.text import printable
from tests.evaluation.conftest import make_network
from tests.helpers import runs
from tests.helpers.networks import Counted
from tests.helpers.processes import at_call
from tests.helpers.records import a_record

Tiny = Callable[..., Evaluation]
Arrays = dict[str, Tensor]

SIDES = ["misrank(side='candidate')", "demote(k=7,side='candidate')", "CA-(w=2)"]
FEW: dict[str, Any] = {"attacks": ["ES", "CA+"], "steps": 2, "queries": 20}
ROUNDED = 0.5 + 1e-6  # of 255 levels


@dataclass(frozen=True)
class Made:
    """An evaluation, what it found, and its pictures."""

    evaluation: Evaluation
    record: Record
    arrays: Arrays
    out: Path
    found: Pictures

    def pixels(self, name: str) -> np.ndarray[Any, Any]:
        return np.asarray(Image.open(self.out / FOLDER / name), float)


def picture(make: Callable[[Path | None], Evaluation], out: Path) -> Made:
    """Evaluate, and make pictures of it."""
    record, again = make(out).run(), make(None)
    return Made(again, record, load_arrays(out), out, make_pictures(again, record, load_arrays(out), out))


@pytest.fixture(scope="module")
def pictured(tiny: Tiny, images: Tensor) -> Callable[..., Made]:
    """Make pictures of the small world, in double precision: batches differ by some 1e-15."""

    def make(out: Path, model: nn.Module | None = None, **changes: Any) -> Made:
        network = make_network().double() if model is None else model
        given = {"images": images.double(), **FEW, **changes}
        return picture(lambda folder: tiny(network, out=folder, **given), out)

    return make


@pytest.fixture(scope="module")
def whole(pictured: Callable[..., Made], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Pictures of every attack."""
    out = tmp_path_factory.mktemp("whole")
    return pictured(out, attacks=[*ATTACKS, *SIDES], steps=4, queries=30, seed=3)


# Which queries


def by_loop(which: Attack, arrays: Arrays, seed: int, each: int) -> dict[int, str]:
    """Choose by the text: worst first, then the middle, then drawn of what is left."""
    rows = []
    for row in range(len(arrays["number"])):
        harm = 0.0
        for column in which.columns:
            before, after = (
                float(arrays[f"{which.name}/{w}/{column.name}"][row]) for w in ("before", "after")
            )
            if column.better == "higher":
                harm += column.unit.points * (before - after)
            if column.better == "lower":
                harm += column.unit.points * (after - before)
        first, last = (float(arrays[f"{which.name}/objective/{when}"][row]) for when in ("first", "last"))
        if not math.isnan(harm):
            rows.append((-harm, last - first, row))
    order = [row for _, _, row in sorted(rows)]
    found = dict.fromkeys(order[:each], "worst")
    middle = (len(order) - each) // 2
    for row in order[max(middle, each) :][:each]:
        found[row] = "median"
    left = [row for row in order if row not in found]
    drawn = torch.randperm(len(left), generator=torch.Generator().manual_seed(seed)).tolist()[:each]
    found |= {left[place]: "random" for place in drawn}
    return {int(arrays["number"][row]): why for row, why in found.items()}


def made_up(which: Attack, count: int, seed: int) -> Arrays:
    """Arrays of few different values, some of them none, of queries with any numbers."""
    generator = torch.Generator().manual_seed(seed)

    def some(*values: float) -> Tensor:
        return torch.tensor(values).double()[torch.randint(len(values), (count,), generator=generator)]

    found = {"number": torch.randperm(1000, generator=generator)[:count].sort().values}
    for column in which.columns:
        found[f"{which.name}/before/{column.name}"] = some(0.0, 50.0, 100.0, math.nan)
        found[f"{which.name}/after/{column.name}"] = some(0.0, 50.0, 100.0)
    return found | {f"{which.name}/objective/{when}": some(0.0, -0.5, 0.25) for when in ("first", "last")}


@pytest.mark.parametrize("name", ["GTM", "ES", "TMA", "SP-QA-", "CA-(w=2)"])
def test_the_chosen_are_those_of_a_loop(name: str) -> None:
    which = attack(name)
    for seed, count in enumerate([0, 1, 2, 3, 4, 5, 6, 7, 8, 20, 61]):
        arrays = made_up(which, count, seed)
        for each in (1, EACH, 5):
            found = choose(which, arrays, seed=seed, each=each)
            assert found == by_loop(which, arrays, seed, each)
            assert list(found) == list(by_loop(which, arrays, seed, each)), "the worst is the first"
            assert choose(which, arrays, seed=seed, each=each) == found


def test_harm_is_counted_in_points_to_the_worse() -> None:
    values = {"ES:D": (0.25, 1.0), "ES:R": (100.0, 0.0)}
    assert harm_of(attack("ES").columns, values) == 50 * 0.75 + 100
    assert harm_of(attack("CA+").columns, {"CA+": (40.0, 10.0)}) == 30
    assert harm_of(attack("CA-").columns, {"CA-": (40.0, 10.0)}) == -30
    assert harm_of(attack("TMA").columns, {"TMA": (0.5, 0.75)}) == 25
    assert math.isnan(harm_of(attack("ES").columns, {"ES:D": (0.0, 1.0), "ES:R": (math.nan, math.nan)}))


# What was done to them


def check_values(made: Made) -> None:
    """Compare each picture with the row of its query in the arrays of the record."""
    rows = {number: row for row, number in enumerate(made.arrays["number"].tolist())}
    for one in made.found.pictures:
        row = rows[one.number]
        for column, (before, after) in one.values.items():
            for when, value in (("before", before), ("after", after)):
                wanted = float(made.arrays[f"{one.attack}/{when}/{column}"][row])
                assert value == pytest.approx(wanted, rel=1e-9, abs=1e-9), (one.attack, column)
        if made.record.settings.norm == "linf":
            assert one.change == pytest.approx(float(made.arrays[f"{one.attack}/change"][row]), abs=1e-9)
        aimed = made.arrays[f"{one.attack}/target"][row].tolist()
        assert [target.name for target in one.targets] == [f"image {t}" for t in aimed[:K]]


@pytest.mark.slow
def test_an_attack_does_again_what_it_did(whole: Made) -> None:
    check_values(whole)
    assert {one.attack for one in whole.found.pictures} == {
        goal.name for goal in whole.evaluation.plan.attacks
    }
    for goal in whole.evaluation.plan.attacks:
        chosen = by_loop(goal, whole.arrays, seed=3, each=EACH)
        mine = {one.number: one.why for one in whole.found.pictures if one.attack == goal.name}
        assert mine == chosen
        assert len(mine) == 3 * EACH


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": "reference", "attacks": ["CA-", "ES", "GTM", "GTT"]},
        {"search": "nes(samples=4)"},
        {"search": "pgd(restarts=2,random_start=True)"},
        {"search": "apgd", "norm": "l2", "eps": 0.5},
        {"search": "transfer", "surrogate": 1},
        {"batch": 4, "queries": None},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_however_it_was_searched(
    changes: dict[str, Any], pictured: Callable[..., Made], tmp_path: Path
) -> None:
    if "surrogate" in changes:
        changes = {**changes, "surrogate": make_network(1).double()}
    made = pictured(tmp_path, **changes)
    check_values(made)
    assert len(made.found.pictures) == 3 * EACH * len(made.evaluation.plan.attacks)
    assert load_pictures(tmp_path, made.record) == made.found


def test_no_more_are_perturbed_together_than_the_plan_says(tiny: Tiny, tmp_path: Path) -> None:
    record = tiny(out=tmp_path, batch=4, **FEW).run()
    evaluation, sizes = tiny(batch=4, **FEW), []
    evaluation.subject.model.register_forward_hook(lambda module, inputs, z: sizes.append(len(z)))
    make_pictures(evaluation, record, load_arrays(tmp_path), tmp_path)
    assert max(sizes) == 4


def shot_of(made: Made, one: Picture) -> Shot:
    """Attack the query of a picture once more, alone."""
    evaluation, number = made.evaluation, torch.tensor([one.number])
    (goal,) = (goal for goal in evaluation.plan.attacks if goal.name == one.attack)
    with evaluation.frozen():
        outcome = run_attack(evaluation.view, goal, number, evaluation.threat)
    return take_shots(evaluation.view, goal, number, outcome, K)[0]


def levels(image: Tensor) -> np.ndarray[Any, Any]:
    """Return an image (1, H, W) in 255 levels, not yet rounded."""
    return np.asarray(255 * image[0].clamp(0, 1))


@pytest.mark.slow
def test_pictures_are_those_of_a_shot(whole: Made, images: Tensor, labels: Tensor) -> None:
    for one in whole.found.pictures:
        shot = shot_of(whole, one)
        assert one.place == shot.place
        assert one.query == Item(
            name=f"image {one.number}",
            label=str(int(labels[one.number])),
            image=f"image-{one.number:06d}.png",
        )
        assert (one.asker is None) == (shot.asker is None)
        if one.asker is not None:
            assert one.asker == one.targets[0]
            assert one.asker.name == f"image {shot.asker}"
        assert one.harm == pytest.approx(harm_of(attack(one.attack).columns, shot.values), rel=1e-9, abs=1e-9)
        for listed, ranking, itself in (
            (one.before, shot.before, one.query.image),
            (one.after, shot.after, one.perturbed),
        ):
            for entry, ranked in zip(listed, ranking, strict=True):
                place = one.number if ranked.itself else ranked.position
                file = itself if ranked.itself else f"image-{place:06d}.png"
                assert (entry.name, entry.image) == (f"image {place}", file)
                assert entry.label == str(int(labels[place]))
                assert entry.distance == pytest.approx(ranked.distance, rel=1e-6)
                assert (entry.right, entry.itself) == (ranked.right, ranked.itself)
        # 8 bits, and no more than half of a level off.
        assert np.array_equal(whole.pixels(one.query.image), levels(images[one.number]).round())
        assert np.abs(whole.pixels(one.perturbed) - levels(shot.perturbed)).max() <= ROUNDED
        larger = amplified(shot.image, shot.perturbed, one.factor)
        assert np.abs(whole.pixels(one.difference) - levels(larger)).max() <= ROUNDED
        for item in (*one.targets, *one.before, *one.after):
            if not getattr(item, "itself", False):
                number = int(item.name.removeprefix("image "))
                assert np.array_equal(whole.pixels(item.image), levels(images[number]).round())


def test_files_are_those_of_the_list(whole: Made) -> None:
    named = {LIST}
    for one in whole.found.pictures:
        named |= {one.query.image, one.perturbed, one.difference}
        named |= {item.image for item in (*one.targets, *one.before, *one.after)}
        named |= {one.asker.image} if one.asker else set()
    assert {path.name for path in (whole.out / FOLDER).iterdir()} == named


def test_they_come_by_why_by_attack_and_by_harm(whole: Made) -> None:
    order = [goal.name for goal in whole.evaluation.plan.attacks]
    whys = ("worst", "median", "random")
    keys = [(whys.index(one.why), order.index(one.attack)) for one in whole.found.pictures]
    assert keys == sorted(keys)
    assert len({(one.attack, one.number) for one in whole.found.pictures}) == len(whole.found.pictures)
    for name in order:
        worst, middle = (
            [one.harm for one in whole.found.pictures if (one.attack, one.why) == (name, why)]
            for why in whys[:2]
        )
        falling = [harm for harm in (*worst, *middle) if harm is not None]
        # They are ordered by the record, whose last digits differ.
        assert all(a >= b - 1e-9 for a, b in pairwise(falling))


def test_a_query_without_an_answer_is_not_shown(
    pictured: Callable[..., Made], labels: Tensor, tmp_path: Path
) -> None:
    lonely = labels.clone()
    lonely[7] = 9
    made = pictured(tmp_path, labels=lonely, attacks=["ES", "QA+"], queries=None)
    assert made.arrays["ES/after/ES:R"].isnan().tolist() == [n == 7 for n in range(40)]
    assert all(one.number != 7 for one in made.found.pictures if one.attack == "ES")
    rank = made.arrays["QA+/after/QA+"]
    assert not rank.isnan().any(), "of others it has a rank"


def test_the_map_has_the_gallery_and_the_moves(whole: Made, labels: Tensor) -> None:
    z = whole.evaluation.view.gallery.z.numpy()
    centre = z.mean(0)
    _, spread, axes = np.linalg.svd(z - centre, full_matrices=False)
    found = whole.found.map
    assert found.explained == pytest.approx((spread**2 / (spread**2).sum())[:2], abs=1e-4)
    points = np.array(found.points)
    flat = (z - centre) @ axes[:2].T
    flat *= np.sign((flat * points[:, :2]).sum(0))
    assert np.abs(points[:, :2] - flat).max() <= 0.5e-4 + 1e-9
    assert [found.classes[int(k)] for k in points[:, 2]] == [str(label) for label in labels.tolist()]
    assert {name: len(moves) for name, moves in found.moves.items()} == {
        goal.name: 3 * EACH for goal in whole.evaluation.plan.attacks
    }
    for name, moves in found.moves.items():
        numbers = [*by_loop(attack(name), whole.arrays, 3, EACH)]
        assert [tuple(move[:2]) for move in moves] == [found.points[n][:2] for n in numbers]
    # TMA goes to its target, where it can.
    tma = whole.arrays["TMA/after/TMA"].max()
    assert tma > 0.9
    assert any(move[:2] != move[2:] for move in found.moves["TMA"])


# Other subjects


def test_a_gallery_of_its_own(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    own = torch.arange(16)
    own[::3] = -1
    files, theirs = [f"asked/{k}.png" for k in range(16)], [f"ranked/{k}.png" for k in range(40)]
    names = ["ant", "bee", "cow", "dog", "elk"]
    gallery = Data(images.double(), labels, files=theirs)
    data = Data(images[:16].double(), labels[:16], gallery=gallery, own=own, classes=names, files=files)
    subject = Subject(make_network().double(), data)
    plan = Plan.make(attacks=["GTM", "CA+"], steps=2, eps=0.1, checks="none")
    made = picture(lambda out: Evaluation(subject, plan, out), tmp_path)
    assert len(made.found.pictures) == 12
    for one in made.found.pictures:
        assert one.query.name == files[one.number]
        assert one.query.image == f"query-{one.number:06d}.png"
        assert one.query.label == names[one.number % 5]
        assert np.array_equal(made.pixels(one.query.image), levels(images[one.number]).round())
        for item in (*one.targets, *one.before, *one.after):
            if not getattr(item, "itself", False):
                place = theirs.index(item.name)
                assert item.image == f"gallery-{place:06d}.png"
                assert item.label == names[place % 5]
                assert np.array_equal(made.pixels(item.image), levels(images[place]).round())
        hidden = theirs[int(own[one.number])] if own[one.number] >= 0 else None
        assert all(entry.name != hidden for entry in (*one.before, *one.after))
        itself = [entry.name for entry in (*one.before, *one.after) if entry.itself]
        assert itself == ([one.query.name] * 2 if one.attack == "CA+" else [])
    assert made.found.map.classes == names


def test_images_of_files_are_named_from_their_root(tmp_path: Path) -> None:
    root = runs.make_pictures(tmp_path / "data", classes=6)
    inputs = Inputs(resize=10, crop=10, channels=3)
    (test,) = load_pixels("folder", root, inputs, ["all"], tmp_path / "cache")
    subject = Subject(nn.Flatten(), data_by_marks(test, inputs.crop, relative_files(test, root)))
    plan = Plan.make(attacks=["GTM"], steps=1, checks="none")
    made = picture(lambda out: Evaluation(subject, plan, out), tmp_path / "out")
    for one in made.found.pictures:
        for item in (one.query, *one.targets, *one.before):
            assert item.name.startswith(f"{item.label}/")
            assert np.array_equal(made.pixels(item.image), np.asarray(Image.open(root / item.name)))


STRANGE = [
    "a\x1b[2J",
    "\udcff\udc80.png",
    "‮gnp.exe",
    "two\nlines\tand more",
    "",
    "../../x",
    "<b>&\"'",
    "é" * 3000,
]


def test_strange_names(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    files = [STRANGE[k % len(STRANGE)] + ("" if k < len(STRANGE) else str(k)) for k in range(40)]
    classes = STRANGE[:5]
    subject = Subject(make_network(), Data(images, labels, classes=classes, files=files))
    plan = Plan.make(attacks=["GTM", "CA+"], steps=1, checks="none")
    made = picture(lambda out: Evaluation(subject, plan, out), tmp_path)
    assert load_pictures(tmp_path, made.record) == made.found
    for one in made.found.pictures:
        assert one.query.name == printable(files[one.number])
        assert one.query.label == printable(classes[one.number % 5])
    assert made.found.map.classes == [printable(name) for name in classes]
    written = [path for path in (tmp_path / FOLDER).iterdir() if path.name != LIST]
    assert all(re.fullmatch(r"[a-z]+-[0-9a-z-]+\.png", path.name) for path in written)
    assert "\x1b" not in (tmp_path / FOLDER / LIST).read_text(encoding="utf-8")


OWN = """
from dataclasses import dataclass
from robustmetric.attacks import DISTANCE, Column
from robustmetric.attacks import EmbeddingShift

@dataclass(frozen=True, kw_only=True)
class Mine(EmbeddingShift):
    name = "mine"
    columns = (Column("mine:far", "lower", DISTANCE), Column("mine:odd", None))
    def measure(self, z, target, queries, gallery):
        found = super().measure(z, target, queries, gallery)["ES:D"]
        return {"mine:far": found, "mine:odd": float("nan") * found}
"""


def test_an_attack_of_the_user_s_own(pictured: Callable[..., Made], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    made = pictured(tmp_path / "out", attacks=["GTM", f"{tmp_path}/own.py:Mine", "ES"])
    check = [one for one in made.found.pictures if one.attack == "mine"]
    assert [one.attack for one in made.found.pictures if one.why == "worst"] == ["GTM"] * 2 + ["mine"] * 2 + [
        "ES"
    ] * 2
    rows = {number: row for row, number in enumerate(made.arrays["number"].tolist())}
    for one in check:
        assert one.values["mine:odd"] == (None, None)
        after = float(made.arrays["mine/after/mine:far"][rows[one.number]])
        assert one.values["mine:far"][1] == pytest.approx(after, rel=1e-9)
        assert one.harm == pytest.approx(50 * after, rel=1e-9)
    assert load_pictures(tmp_path / "out", made.record) == made.found


# Image files


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 112, 20), (1, 1, 112), (3, 5, 5)])
def test_small_images_are_kept_to_the_pixel(shape: tuple[int, int, int]) -> None:
    image = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    found = opened(encoded(image))
    assert found.format == "PNG"
    pixels = np.asarray(found)
    wanted = (255 * image).round().permute(1, 2, 0).numpy()
    assert np.array_equal(pixels, wanted[..., 0] if shape[0] == 1 else wanted)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((1, 113, 113), (112, 112)),
        ((3, 224, 224), (112, 112)),
        ((3, 130, 120), (103, 112)),
        ((3, 100, 1000), (112, 11)),
        ((1, 2000, 1), (1, 112)),
    ],
)
def test_large_images_are_reduced(shape: tuple[int, int, int], size: tuple[int, int]) -> None:
    colour = torch.tensor([0.2, 0.5, 0.8])[: shape[0], None, None]
    for smooth in (True, False):
        found = opened(encoded(colour.expand(shape), smooth=smooth))
        assert (found.format, found.size) == ("WEBP", size)
        # One colour stays it, but for the rounding of its brightness and hues.
        pixels = np.asarray(found.convert("RGB"), float)
        assert np.abs(pixels - 255 * colour.expand(3, 1, 1)[:, 0, 0].numpy()).max() <= 3


def test_noise_stays_as_strong_where_pixels_are_left_out() -> None:
    """A difference is mostly noise, which a smooth reduction would average out."""
    noise = 0.5 + 0.25 * torch.randint(0, 2, (1, 448, 448), generator=torch.Generator().manual_seed(0)).mul(
        2
    ).sub(1)
    smooth, sharp = (
        np.asarray(opened(encoded(noise, smooth=kind)).convert("L"), float).std() / 255
        for kind in (True, False)
    )
    assert smooth < 0.1 < 0.2 < sharp


def test_other_channels_are_shown_as_grey() -> None:
    image = torch.rand(4, 6, 5, generator=torch.Generator().manual_seed(0))
    found = rendered(image)
    assert (found.mode, found.size) == ("L", (5, 6))
    assert np.array_equal(np.asarray(found), (255 * image.mean(0)).round().numpy())
    assert rendered(image.double()[:3]).mode == "RGB"
    assert np.asarray(rendered(torch.tensor([[[-1.0, 2.0]]]))).tolist() == [[0, 255]]


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (0.0, 1.0),
        (1e-9, 5e6),
        (1 / 255, 100.0),
        (8 / 255, 10.0),
        (0.25, 2.0),
        (0.26, 1.0),
        (0.5, 1.0),
        (0.9, 1.0),
    ],
)
def test_factors_are_round_and_leave_the_change_in_range(change: float, factor: float) -> None:
    assert nice_factor(change) == factor


def test_large_pictures_of_an_evaluation(tmp_path: Path) -> None:
    images = torch.linspace(0.1, 0.9, 12)[:, None, None, None].expand(12, 3, 150, 120).contiguous()
    network = nn.Sequential(nn.AvgPool2d(30), nn.Flatten(), nn.Linear(60, 4, bias=True))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter.shape)))
            )
    subject = Subject(network, Data(images, torch.arange(12) % 3))
    plan = Plan.make(attacks=["ES"], steps=1, checks="none")
    made = picture(lambda out: Evaluation(subject, plan, out), tmp_path)
    for one in made.found.pictures:
        for name in (one.query.image, one.perturbed, one.difference, *(item.image for item in one.before)):
            assert name.endswith(".webp")
            assert made.pixels(name).shape == (112, 90, 3)
        level = float(255 * images[one.number].mean())
        assert np.abs(made.pixels(one.query.image) - level).max() <= 3


# The list, and what can go wrong


def resealed(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the list as somebody would who knows how its digest is made."""
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps({**content, "sha256": digest_of_entries(content)}), encoding="utf-8")


@pytest.fixture
def copy(whole: Made, tmp_path: Path) -> tuple[Path, Record]:
    """A folder with the list alone."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / LIST).write_bytes((whole.out / FOLDER / LIST).read_bytes())
    return tmp_path, whole.record


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a list of pictures: it is not JSON"),
        (
            b'{"schema": "robustmetric/pictures/2"}',
            "is not a list of pictures of this version: its schema is",
        ),
        (b'{"schema": "robustmetric/pictures/1"}', "is not a whole list of pictures: record: Field required"),
    ],
)
def test_a_list_that_is_none(content: bytes, message: str, copy: tuple[Path, Record]) -> None:
    folder, record = copy
    file = folder / FOLDER / LIST
    file.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{file} {message}")):
        load_pictures(folder, record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["pictures"][0].update(perturbed="../../secret.png"),
            "pictures.0.perturbed: String should",
        ),
        (lambda c: c["map"]["points"].append([0, math.inf, 0]), "Input should be a finite number"),
        (lambda c: c["map"].update(more=1), "map.more: Extra inputs are not permitted"),
    ],
)
def test_a_list_that_holds_what_it_should_not(
    change: Callable[[dict[str, Any]], object], message: str, copy: tuple[Path, Record]
) -> None:
    folder, record = copy
    resealed(folder / FOLDER / LIST, change)
    with pytest.raises(UserError, match="is not a whole list of pictures") as error:
        load_pictures(folder, record)
    assert message in str(error.value)


def test_a_list_that_was_changed_by_hand(copy: tuple[Path, Record]) -> None:
    folder, record = copy
    file = folder / FOLDER / LIST
    file.write_text(file.read_text(encoding="utf-8").replace('"k": 5', '"k": 6'), encoding="utf-8")
    with pytest.raises(DamagedError, match="is damaged, or was changed by hand"):
        load_pictures(folder, record)


def test_pictures_of_another_record_and_none(copy: tuple[Path, Record], tmp_path: Path) -> None:
    folder, record = copy
    with pytest.raises(UserError, match=re.escape(f"{folder / FOLDER / LIST} is of another record")):
        load_pictures(folder, a_record())
    with pytest.raises(FileNotFoundError, match=re.escape(f"there are no pictures in {tmp_path / 'else'}")):
        load_pictures(tmp_path / "else", record)
    (folder / FOLDER / LIST).unlink()
    (folder / FOLDER / LIST).mkdir()
    with pytest.raises(FileNotFoundError, match="there are no pictures in"):
        load_pictures(folder, record)


def test_a_list_that_cannot_be_read(copy: tuple[Path, Record], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(UserError, match=r"pictures.json cannot be read \(Permission denied\)"):
        load_pictures(*copy)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def again(pictured: Callable[..., Made], tmp_path: Path) -> Made:
    """Pictures of few queries, to be made again."""
    return pictured(tmp_path)


def remade(made: Made) -> Pictures:
    return make_pictures(made.evaluation, made.record, made.arrays, made.out)


@pytest.mark.parametrize("call", [1, 5, 9])
def test_an_interruption_leaves_no_list(call: int, again: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = again.out / FOLDER
    before = contents(folder)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", at_call(call, stop, nn.Linear.forward))
        with pytest.raises(KeyboardInterrupt):
            remade(again)
    assert LIST not in contents(folder)
    with pytest.raises(FileNotFoundError, match="there are no pictures"):
        load_pictures(again.out, again.record)
    assert remade(again) == again.found
    assert contents(folder) == before


def test_a_full_disk(again: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        written = at_call(8, full, write_atomically)
        patch.setattr("robustmetric.report.pictures.write_atomically", written)
        with pytest.raises(
            UserError, match=r"\.png cannot be written \(No space left on device\): make room; then"
        ):
            remade(again)
    assert LIST not in contents(again.out / FOLDER)
    assert remade(again) == again.found


def test_old_pictures_are_replaced_and_nothing_else(again: Made) -> None:
    folder = again.out / FOLDER
    before = contents(folder)
    for name in (
        "image-999999.png",
        "attack-77-000001-difference.webp",
        f".{LIST}.0123.tmp",
        "image-000001.png",
    ):
        (folder / name).write_bytes(b"old")
    (folder / LIST).write_bytes(b"old")
    for name in ("notes.txt", "image.png", "image-1.png"):
        (folder / name).write_bytes(b"mine")
    assert remade(again) == again.found
    now = contents(folder)
    assert {name: now.pop(name) for name in ("notes.txt", "image.png", "image-1.png")} == dict.fromkeys(
        ("notes.txt", "image.png", "image-1.png"), b"mine"
    )
    assert now == before


def test_the_list_goes_first_when_pictures_are_replaced(again: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it to go in between, a kill would leave a list of pictures that are gone."""
    gone: list[str] = []
    unlink = Path.unlink

    def noted(path: Path, missing_ok: bool = False) -> None:
        gone.append(path.name)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    remade(again)
    assert gone[0] == LIST


def test_a_folder_that_is_none(again: Made, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    out.mkdir()
    (out / FOLDER).write_bytes(b"")
    with pytest.raises(
        UserError, match=r"pictures/\.lock cannot be written \(File exists\): look at the folder"
    ):
        make_pictures(again.evaluation, again.record, again.arrays, out)
    assert (out / FOLDER).read_bytes() == b""


def test_two_make_pictures_in_one_folder(again: Made) -> None:
    before = contents(again.out / FOLDER)
    with (
        locked(again.out / FOLDER, "pictures"),
        pytest.raises(InUseError, match="is in use: pictures by process"),
    ):
        remade(again)
    assert contents(again.out / FOLDER) == before


# Progress and size


def test_progress_is_told_attack_by_attack(again: Made) -> None:
    told: list[tuple[str, float, int]] = []
    make_pictures(again.evaluation, again.record, again.arrays, again.out, lambda *call: told.append(call))
    assert told == [("pictures", done, 2) for done in (0, 1, 2)]


class Watched:
    """Images that note how many were asked for at once."""

    def __init__(self, images: Tensor) -> None:
        self.images, self.most = images, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Tensor) -> Tensor:
        self.most = max(self.most, len(index))
        return self.images[index]


def test_of_ten_thousand_queries_the_chosen_alone_are_attacked(tmp_path: Path) -> None:
    count, steps = 10_000, 3
    generator = torch.Generator().manual_seed(0)
    images = Watched(torch.rand(count, 1, 3, 3, generator=generator))
    network = Counted(nn.Flatten())
    subject = Subject(network, Data(images, torch.arange(count) % 100))
    plan = Plan.make(attacks=["ES", "CA+", "GTM"], steps=steps, batch=256, checks="none")
    arrays: Arrays = {"number": torch.arange(count)}
    for goal in plan.attacks:
        some = made_up(goal, count, 1)
        arrays |= {key: value for key, value in some.items() if key != "number"}
    found = make_pictures(Evaluation(subject, plan), a_record(), arrays, tmp_path)
    assert len(found.pictures) == 3 * 3 * EACH
    attacked = 3 * 3 * EACH * (steps + 1)
    assert count < network.forwards <= count + attacked
    assert network.backwards <= attacked
    assert images.most <= 256
    assert len(list((tmp_path / FOLDER).iterdir())) < 3 * 3 * EACH * (4 + 2 * K)


def test_an_attack_without_queries_to_show(again: Made) -> None:
    arrays = {
        key: torch.full_like(v, math.nan) if "ES/after" in key else v for key, v in again.arrays.items()
    }
    found = make_pictures(again.evaluation, again.record, arrays, again.out)
    assert {one.attack for one in found.pictures} == {*found.map.moves} == {"CA+"}
