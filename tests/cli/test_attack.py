"""The command attack: images before and after, with their ranks."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from robustmetric import attack
from robustmetric.data.inputs import Inputs, load_pixels
from robustmetric.training.trained import load_run
from tests.helpers.command import refused, works
from tests.helpers.pages import parsed

KINDS = ["CA+(w=3)", "QA-", "TMA", "ES", "LTM", "GTM", "GTT", "SP-QA+(m=2,keep=3)"]


def nearer(z: Tensor, to: Tensor, gallery: Tensor, without: Sequence[int]) -> float:
    """Count by a loop the images nearer to z than a point; equal ones count half."""
    level, count = float((z - to).square().sum()), 0.0
    for k, other in enumerate(gallery):
        if k not in without:
            square = float((z - other).square().sum())
            count += 1.0 if square < level else 0.5 if square == level else 0.0
    return count


def values_of(
    kind: str, z: Tensor, benign: Tensor, own: int, target: list[int], gallery: Tensor, labels: Tensor
) -> dict[str, float]:
    """Compute by a loop what an attack reports of a query with the embedding z."""
    name, left = attack(kind).name, len(gallery) - 2
    if name.startswith("CA"):
        ranks = [nearer(gallery[q], z, gallery, (own, q)) / left for q in target]
        return {name: 100 * sum(ranks) / len(ranks)}
    if "QA" in name:
        ranks = [100 * nearer(z, gallery[c], gallery, (own, c)) / left for c in target]
        if name.startswith("SP"):
            chosen = 2 if "m=2" in kind else 1
            return {
                name: sum(ranks[:chosen]) / chosen,
                f"{name}:keep": sum(ranks[chosen:]) / (len(ranks) - chosen),
            }
        return {name: sum(ranks) / len(ranks)}
    if name == "TMA":
        return {"TMA": float(z @ gallery[target[0]])}
    if name == "GTT":
        return {"GTT": 100.0 * (nearer(z, gallery[target[0]], gallery, (own, target[0])) < 4)}
    hit = 100.0 * bool(labels[nearest_other(z, own, gallery)] == labels[own])
    if name == "ES":
        return {"ES:D": float((z - benign).norm()), "ES:R": hit}
    return {name: hit}


def nearest_other(z: Tensor, own: int, gallery: Tensor) -> int:
    return min((k for k in range(len(gallery)) if k != own), key=lambda k: float((z - gallery[k]).norm()))


def first_of_class(z: Tensor, own: int, gallery: Tensor, labels: Tensor) -> int:
    others = sorted(
        (k for k in range(len(gallery)) if k != own), key=lambda k: float((z - gallery[k]).norm())
    )
    return 1 + next(place for place, k in enumerate(others) if labels[k] == labels[own])


@pytest.fixture(scope="module")
def seen(run: Path) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """The run's network as a function, all embeddings, and the labels."""
    (test,) = load_pixels("digits", None, Inputs(), ["test"])
    network = load_run(run).network

    def embedded(images: Tensor) -> Tensor:
        with torch.no_grad():
            return nn.functional.normalize(network(images).double())

    everything = torch.from_numpy(test.pixels[:].transpose(0, 3, 1, 2).copy()).float() / 255
    return embedded, embedded(everything), test.labels


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_attack_leaves_images_arrays_and_ranks(
    kind: str, run: Path, tmp_path: Path, seen: tuple[Callable[[Tensor], Tensor], Tensor, Tensor]
) -> None:
    embedded, gallery, labels = seen
    kept = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    out, eps = tmp_path / "images", 0.1
    options = ["--queries", 2, "--steps", 3, "--eps", eps, "--alpha", 0.05, "--seed", 2, "--batch", 1]
    printed = works("attack", run, "--attack", kind, "--out", out, *options)
    assert f"images, arrays and ranks of 2 queries are in {out}" in printed.replace("\n", " ")
    assert {file: file.read_bytes() for file in run.iterdir() if file.is_file()} == kept

    arrays = load_file(out / "images.safetensors")
    numbers, before, after = arrays["number"].tolist(), arrays["before"], arrays["after"]
    drawn = torch.randperm(797, generator=torch.Generator().manual_seed(2))[:2]
    assert numbers == sorted(drawn.tolist())
    assert before.dtype == after.dtype == torch.float32
    (test,) = load_pixels("digits", None, Inputs(), ["test"])
    assert torch.equal(
        before, torch.from_numpy(test.pixels[numbers].transpose(0, 3, 1, 2).copy()).float() / 255
    )
    change = (after - before).abs().flatten(1).amax(1)
    assert float(change.max()) <= eps + 1e-6
    assert float(after.min()) >= 0
    assert float(after.max()) <= 1
    if kind != "LTM":  # whose hinge may be closed from the beginning
        assert float(change.min()) > 0

    files = {f"{n:06d}-{when}.png" for n in numbers for when in ("before", "after")}
    assert {file.name for file in out.iterdir()} == {*files, "images.safetensors", "ranks.csv", "attack.html"}
    for k, number in enumerate(numbers):
        read = [np.asarray(Image.open(out / f"{number:06d}-{w}.png"), float) for w in ("before", "after")]
        assert np.array_equal(read[0], test.pixels[number, :, :, 0])
        assert np.abs(read[1] - read[0]).max() <= 255 * eps + 0.5
        assert np.abs(read[1] - 255 * after[k, 0].numpy()).max() <= 0.5 + 1e-4

    with (out / "ranks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["image"]) for row in rows] == numbers
    for k, row in enumerate(rows):
        number, target = numbers[k], arrays["target"][k].tolist()
        assert row["class"] == test.classes[int(labels[number])]
        assert ("target" in row) == bool(target) == (kind not in ("ES", "LTM"))
        if target:
            assert row["target"] == " ".join(map(str, target))
            assert row["target's class"] == " ".join(test.classes[int(labels[t])] for t in target)
        for when, z in (("before", gallery[number]), ("after", embedded(after[k : k + 1])[0])):
            values = values_of(kind, z, gallery[number], number, target, gallery, labels)
            for name, value in values.items():
                shown = float(row[f"{name} {when}"])
                assert shown == pytest.approx(value, abs=0.00051 if name in ("TMA", "ES:D") else 0.0501), name
            if kind.startswith("CA"):
                ahead = nearer(gallery[target[0]], z, gallery, (number, target[0]))
                assert int(row[f"its place {when}"]) == 1 + ahead
            else:
                assert int(row[f"first of its class {when}"]) == first_of_class(z, number, gallery, labels)
        place = "its place" if kind.startswith("CA") else "first of its class"
        assert set(row) - {"image", "class", "target", "target's class"} == {
            f"{name} {when}" for name in (*values, place) for when in ("before", "after")
        }


def test_an_attack_wants_a_new_folder(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "images"
    (tmp_path / ".images.tmp").mkdir()  # of an attack that was killed
    (tmp_path / ".images.tmp" / "ranks.csv").touch()
    options = ["--attack", "ES", "--out", out, "--queries", 2, "--steps", 1]
    works("attack", run, *options)
    assert [file.name for file in tmp_path.iterdir()] == ["images"]
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert f"{out} exists already: give another folder (--out)" in refused("attack", run, *options)
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before


def test_the_page_has_a_card_for_each_query(run: Path, tmp_path: Path) -> None:
    works("attack", run, "--attack", "CA+", "--queries", 5, "--steps", 1, "--out", tmp_path / "out")
    page = parsed((tmp_path / "out" / "attack.html").read_text(encoding="utf-8"))
    with (tmp_path / "out" / "ranks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cards = page.all("article", "shot")
    assert [card["data-number"] for card in cards] == [row["image"] for row in rows]
    for card, row in zip(cards, rows, strict=True):
        assert f"{row['CA+ before']} → {row['CA+ after']}" in card.text
        assert f"{row['its place before']} → {row['its place after']}" in card.text
    assert "CA+ on c2f2" in page.one("header").text


@pytest.mark.parametrize("split", ["test", "all"])
def test_images_of_files_are_named(split: str, tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    for name in ("ant", "bee", "cat", "dog"):
        (root / name).mkdir(parents=True)
        for k in range(4):
            noise = np.random.default_rng([*name.encode(), k]).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / name / f"{k}.png")
    (root / "cat" / "1.png").write_bytes(b"no image")
    (root / "dog" / "1.png").unlink()
    options = ["--data", "folder", "--root", root, "--split", split, "--cache", tmp_path / "cache"]
    network = ["--model", "c2f2", "--size", 8, "--dim", 4]
    count = {"test": 6, "all": 14}[split]
    how = ["--skip-broken", "--attack", "GTM", "--queries", count, "--steps", 1, "--out", tmp_path / "out"]
    works("attack", *network, *options, *how)
    with (tmp_path / "out" / "ranks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len({row["file"] for row in rows}) == count
    for row in rows:
        written = np.asarray(Image.open(tmp_path / "out" / f"{int(row['image']):06d}-before.png"))
        assert np.array_equal(written, np.asarray(Image.open(root / row["file"])))
        assert Path(row["file"]).parent.name == row["class"]
        assert row["target's file"] == rows[int(row["target"])]["file"]
        assert Path(row["target's file"]).parent.name == row["target's class"]
