"""Queries, galleries, cameras and weights on the command line; what is refused before decoding; progress."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from robustmetric import load_record
from robustmetric.evaluation import Record
from robustmetric.evaluation.identity import digest_of
from robustmetric.models.c2f2 import C2F2
from tests.helpers.command import refused, works

SHORT = ("--steps", 2, "--checks", "none", "--attacks", "ES,GTT", "--size", 8)
NETWORKS = """
from torch import nn

def pooled():
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())

"""


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("code") / "nets.py"
    file.write_text(NETWORKS)
    return file


@dataclass(frozen=True)
class Shot:
    """An image, its class and its camera."""

    file: Path
    label: str
    camera: int = 0


def draw(file: Path, label: int, number: int, size: int = 8, tint: int | None = None) -> Path:
    """Write an image that looks a little like the others of its class, and more like those of its tint."""
    file.parent.mkdir(parents=True, exist_ok=True)
    middle = np.random.default_rng(label).integers(60, 196, (1, 1, 3))
    noise = np.random.default_rng([label, number]).integers(-60, 60, (size, size, 3))
    noise += np.random.default_rng([label, number if tint is None else tint, 1]).integers(-60, 60, (1, 1, 3))
    Image.fromarray((middle + noise).clip(0, 255).astype(np.uint8)).save(file)
    return file


def write_folder(root: Path, counts: dict[str, int], first: int = 0) -> list[Shot]:
    """Write a directory for each class, and list what is in them as they are sorted."""
    return [
        Shot(draw(root / name / f"{k}.png", ord(name[0]), k), name)
        for name, count in sorted(counts.items())
        for k in range(first, first + count)
    ]


def embedded(shots: Sequence[Shot]) -> torch.Tensor:
    """What the network `pooled` makes of images of 8×8: the mean of each quarter, as directions."""
    found = []
    for shot in shots:
        pixels = np.asarray(Image.open(shot.file).convert("RGB")).astype(np.float64) / 255
        quarters = pixels.reshape(2, 4, 2, 4, 3).mean((1, 3)).transpose(2, 0, 1)
        found.append(quarters.reshape(-1) / np.linalg.norm(quarters))
    return torch.tensor(np.stack(found))


def first_places(asked: Sequence[Shot], ranked: Sequence[Shot], cameras: bool = False) -> list[int | None]:
    """Rank by a loop: the place of the first of each query's class; a file that asks does not find itself."""
    places: list[int | None] = []
    for mine, z in zip(asked, embedded(asked), strict=True):
        others = [
            (float((z - other).square().sum()), shot.label == mine.label)
            for shot, other in zip(ranked, embedded(ranked), strict=True)
            if shot.file != mine.file
            and not (cameras and shot.label == mine.label and shot.camera == mine.camera)
        ]
        right = [hit for _, hit in sorted(others)]
        places.append(right.index(True) + 1 if any(right) else None)
    return places


def recall(asked: Sequence[Shot], ranked: Sequence[Shot], cameras: bool = False) -> tuple[float, int]:
    """R@1 in % by a loop, and how many queries have no answer."""
    places = [place for place in first_places(asked, ranked, cameras) if place is not None]
    return 100 * sum(place == 1 for place in places) / len(places), len(asked) - len(places)


def assert_found(record: Record, wanted: tuple[float, int], images: int, gallery: int | None) -> None:
    assert (record["R@1"], record.queries.left_out) == pytest.approx(wanted)
    assert 0 < record["R@1"] < 100, "says nothing"
    assert (record.data.images, record.data.gallery) == (images, gallery)


# Tables and layouts


def write_table(root: Path, columns: Sequence[str]) -> tuple[list[Shot], list[Shot]]:
    """Write a table of 24 test images and some that train; list its queries and its gallery."""
    lines, asked, ranked = [";".join(("label", *columns, "path", "split"))], [], []
    for label, name in enumerate(("ant", "bee", "cow", "dog")):
        for k in range(6):
            # What a camera took looks alike, so that its rule is seen.
            tint = k % 2 if "camera" in columns else None
            shot = Shot(draw(root / "shots" / f"{name}{k}.png", label, k, tint=tint), name, k % 2)
            known = {"is_query": str(k < 3), "is_gallery": str(k > 0), "camera": ("hall", "door")[k % 2]}
            lines.append(";".join((name, *(known[c] for c in columns), f"shots/{name}{k}.png", "test")))
            asked += [shot] if k < 3 or "is_query" not in columns else []
            ranked += [shot] if k > 0 or "is_gallery" not in columns else []
    lines.append(";".join(("elk", *("" if c != "camera" else "hall" for c in columns), "no.png", "train")))
    draw(root / "no.png", 9, 0)
    (root / "shots.csv").write_text("\n".join(lines) + "\n")
    return asked, ranked


@pytest.mark.slow
@pytest.mark.parametrize(
    "columns",
    [("is_query", "is_gallery", "camera"), ("is_query", "is_gallery"), ("is_gallery",), ("camera",), ()],
)
def test_a_table_says_who_asks_who_is_ranked_and_who_took_it(
    columns: tuple[str, ...], nets: Path, tmp_path: Path
) -> None:
    asked, ranked = write_table(tmp_path, columns)
    network = ("--model", f"{nets}:pooled", "--data", "csv", "--root", tmp_path / "shots.csv")
    out, cache = tmp_path / "out", tmp_path / "cache"
    printed = works("evaluate", *network, "--out", out, "--cache", cache, *SHORT)
    record = load_record(out)
    parted = {*columns} & {"is_query", "is_gallery"}
    wanted = recall(asked, ranked, "camera" in columns)
    assert_found(record, wanted, len(asked), len(ranked) if parted else None)
    assert record.scores["ES:R"].before == pytest.approx(wanted[0])
    assert record.data.cameras is ("camera" in columns)
    assert ("images of a query's class and camera do not count" in one_line(printed)) == ("camera" in columns)
    assert record.data.shape == [3, 8, 8]
    attacked = ("--attack", "GTM", "--queries", len(asked), "--steps", 1, "--size", 8, "--cache", cache)
    works("attack", *network, *attacked, "--out", tmp_path / "images")
    with (tmp_path / "images" / "ranks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == [str(shot.file.relative_to(tmp_path)) for shot in asked]
    assert [row["class"] for row in rows] == [shot.label for shot in asked]
    places = first_places(asked, ranked, "camera" in columns)
    assert [row["first of its class before"] for row in rows] == [str(place or "-") for place in places]
    shown = {True: "100.0", False: "0.0"}
    assert [row["GTM before"] for row in rows if row["first of its class before"] != "-"] == [
        shown[place == 1] for place in places if place is not None
    ]
    for row in rows:
        target = ranked[int(row["target"])]
        assert target.label == row["target's class"] != row["class"]


# Queries from one place, a gallery from another


def test_queries_and_galleries_of_folders(nets: Path, tmp_path: Path) -> None:
    # One image a class asks; the gallery has a class more.
    asked = write_folder(tmp_path / "asked", {"ant": 1, "bee": 1, "cow": 1, "dog": 1})
    ranked = write_folder(tmp_path / "ranked", {"ant": 3, "bee": 3, "cow": 3, "elk": 3, "dog": 3}, first=10)
    common = ("--model", f"{nets}:pooled", "--cache", tmp_path / "cache", *SHORT)
    sides = ("--queries-from", tmp_path / "asked", "--gallery", tmp_path / "ranked")
    works("evaluate", *common, *sides, "--out", tmp_path / "both")
    assert_found(load_record(tmp_path / "both"), recall(asked, ranked), 4, 15)
    # A folder's own test images, the second half of its classes, ask or are ranked.
    other = write_folder(tmp_path / "other", {"ant": 2, "bee": 2, "cow": 4, "dog": 4}, first=20)
    test = [shot for shot in other if shot.label in ("cow", "dog")]
    given = ("--data", "folder", "--root", tmp_path / "other")
    works("evaluate", *common, *given, "--gallery", tmp_path / "ranked", "--out", tmp_path / "gallery")
    assert_found(load_record(tmp_path / "gallery"), recall(test, ranked), 8, 15)
    works("evaluate", *common, *given, "--queries-from", tmp_path / "ranked", "--out", tmp_path / "queries")
    assert_found(load_record(tmp_path / "queries"), recall(ranked, test), 15, 8)
    works(
        "evaluate", *common, *given, "--split", "all", "--queries-from", tmp_path / "asked",
        "--out", tmp_path / "all",
    )  # fmt: skip
    assert_found(load_record(tmp_path / "all"), recall(asked, other), 4, 12)


def test_copies_and_what_is_left_out_are_named(nets: Path, tmp_path: Path) -> None:
    asked = write_folder(tmp_path / "asked", {"ant": 3, "bee": 3})
    ranked = write_folder(tmp_path / "ranked", {"ant": 3, "bee": 3}, first=10)
    (ranked[1].file).write_bytes(ranked[4].file.read_bytes())
    (tmp_path / "ranked" / "ant" / "9.png").write_bytes(b"no image")
    network = ("--model", f"{nets}:pooled", "--size", 8, "--steps", 1, "--attacks", "TMA")
    cache = ("--cache", tmp_path / "cache")
    sides = ("--queries-from", tmp_path / "asked", "--gallery", tmp_path / "ranked")
    broken = tmp_path / "ranked" / "ant" / "9.png"
    assert str(broken) in one_line(refused("evaluate", *network, *sides, *cache, "--out", tmp_path / "out"))
    printed = works("evaluate", *network, *sides, *cache, "--skip-broken", "--out", tmp_path / "out")
    record = load_record(tmp_path / "out")
    assert f"left out, not readable: {broken}" in one_line(printed).replace("- ", "-")
    assert record.data.skipped == [str(broken)]
    copies = next(check for check in record.checks if check.name == "copies")
    assert copies.says.endswith("1 of another class: bee/11.png = ant/11.png")
    # A query that is in the gallery by another name.
    ranked[1].file.write_bytes(asked[2].file.read_bytes())
    works("evaluate", *network, *sides, *cache, "--skip-broken", "--out", tmp_path / "again")
    (copies,) = [check for check in load_record(tmp_path / "again").checks if check.name == "copies"]
    assert copies.says.endswith("find themselves: ant/2.png = ant/11.png")


# Sizes


@pytest.mark.parametrize(("options", "size"), [(("--size", 8), 8), (("--resize", 12, "--crop", 10), 10)])
def test_the_size_of_images(options: tuple[object, ...], size: int, nets: Path, tmp_path: Path) -> None:
    for label, name in enumerate(("ant", "bee", "cow", "dog")):
        for k in range(3):
            draw(tmp_path / "shots" / name / f"{k}.png", label, k, size=20)
    given = ("--model", f"{nets}:pooled", "--data", "folder", "--root", tmp_path / "shots")
    how = ("--steps", 1, "--checks", "none", "--attacks", "TMA", "--cache", tmp_path / "cache")
    printed = works("evaluate", *given, *how, *options, "--out", tmp_path / "out")
    assert load_record(tmp_path / "out").data.shape == [3, size, size]
    assert f"folder {size}×{size}" in one_line(printed)


# Weights


ONE = ("--queries", 4, "--steps", 1, "--checks", "none", "--attacks", "TMA")
TRAIN = ("train", "--recipe", "digits", "--steps", 1, "--epochs", 2, "--defense", "N/A[S]", "--set", "dim=8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights validation images chose."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    works(*TRAIN, "--validation", 0.1, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best weights test images chose."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    works(*TRAIN, "--validation", 0, "--out", folder)
    return folder


def digest_in(file: Path) -> str:
    model = C2F2(dim=8, size=8, channels=1)
    model.load_state_dict(load_file(file))
    return digest_of(model)


CAREFUL = "careful: these images chose the weights"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "weights", "file", "chosen"),
    [
        ("run", None, "last", "last weights"),  # validation does not tell them apart
        ("run", "best", "best", "chosen on validation images"),
        ("run", "last", "last", "last weights"),
        ("tested", None, "last", "last weights"),
        ("tested", "last", "last", "last weights"),
        ("tested", "best", "best", "chosen on test images"),
        ("run", "file", "last", None),
    ],
)
def test_which_weights_of_a_run(
    kind: str,
    weights: str | None,
    file: str,
    chosen: str | None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder: Path = request.getfixturevalue(kind)
    given: list[object] = [] if weights is None else ["--weights", weights]
    if weights == "file":
        (tmp_path / "mine.safetensors").write_bytes((folder / "last.safetensors").read_bytes())
        given = ["--weights", tmp_path / "mine.safetensors"]
    printed = one_line(works("evaluate", folder, *given, *ONE, "--out", tmp_path / "out"))
    record = load_record(tmp_path / "out")
    assert record.network.weights == chosen
    assert record.network.sha256 == digest_in(folder / f"{file}.safetensors")
    for sentence in ("last weights", "weights chosen on validation images", "weights chosen on test images"):
        assert (f"pgd; {sentence}" in printed) == (chosen is not None and sentence.endswith(chosen))
    assert (CAREFUL in printed) == (chosen == "chosen on test images")
    # A finished evaluation says it again.
    assert (CAREFUL in one_line(works("evaluate", folder, *given, *ONE, "--out", tmp_path / "out"))) == (
        chosen == "chosen on test images"
    )


# Refused before anything is decoded


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    write_folder(tmp_path / "shots", {"ant": 3, "bee": 3, "cow": 3, "dog": 3})
    return tmp_path / "shots"


def test_another_evaluation_is_refused_before_an_image_is_decoded(
    shots: Path, nets: Path, tmp_path: Path
) -> None:
    given: list[object] = ["--model", f"{nets}:pooled", "--data", "folder", "--root", shots, "--size", 8]
    given += ["--attacks", "TMA", "--checks", "none", "--out", tmp_path / "out"]
    works("evaluate", *given, "--steps", 1, "--cache", tmp_path / "cache")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    for more, told in (
        (("--steps", 2), "steps was 1, is 2"),
        (("--steps", 1, "--search", "nes"), "search was 'pgd', is 'nes'"),
        (("--steps", 1, "--eps", 0.1), "eps was"),
        (("--steps", 1, "--batch", 64), "batch was 128, is 64"),
    ):
        says = refused("evaluate", *given, *more, "--cache", tmp_path / "other")
        assert f"{tmp_path / 'out'} holds another evaluation: {told}" in one_line(says)
    assert not (tmp_path / "other").exists()
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == before
    works("evaluate", *given, "--steps", 1, "--cache", tmp_path / "cache")
