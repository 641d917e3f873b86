"""The command attack: images before and after, with their ranks."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from robustmetric.data.inputs import Inputs, load_pixels
from robustmetric.training.trained import load_run
from tests.helpers.command import refused, works
from tests.helpers.pages import parsed


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
    rows = rows_in(tmp_path / "out")
    assert len({row["file"] for row in rows}) == count
    for row in rows:
        written = np.asarray(Image.open(tmp_path / "out" / f"{int(row['image']):06d}-before.png"))
        assert np.array_equal(written, np.asarray(Image.open(root / row["file"])))
        assert Path(row["file"]).parent.name == row["class"]
        assert row["target's file"] == rows[int(row["target"])]["file"]
        assert Path(row["target's file"]).parent.name == row["target's class"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["CA+(w=3)", "TMA", "ES"])
def test_an_attack_leaves_images_arrays_ranks_and_a_page(
    kind: str, run: Path, tmp_path: Path, seen: tuple[Callable[[Tensor], Tensor], Tensor, Tensor]
) -> None:
    embedded, gallery, labels = seen
    kept = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    out, eps = tmp_path / "images", 0.1
    options = ["--queries", 2, "--steps", 3, "--eps", eps, "--alpha", 0.05, "--seed", 2, "--batch", 1]
    works("attack", run, "--attack", kind, "--out", out, *options)
    assert {file: file.read_bytes() for file in run.iterdir() if file.is_file()} == kept

    arrays = load_file(out / "images.safetensors")
    numbers, before, after = arrays["number"].tolist(), arrays["before"], arrays["after"]
    drawn = torch.randperm(797, generator=torch.Generator().manual_seed(2))[:2]
    assert numbers == sorted(drawn.tolist())
    (test,) = load_pixels("digits", None, Inputs(), ["test"])
    assert torch.equal(
        before, torch.from_numpy(test.pixels[numbers].transpose(0, 3, 1, 2).copy()).float() / 255
    )
    change = (after - before).abs().flatten(1).amax(1)
    assert 0 < float(change.min()) <= float(change.max()) <= eps + 1e-6
    assert 0 <= float(after.min()) <= float(after.max()) <= 1

    files = {f"{n:06d}-{when}.png" for n in numbers for when in ("before", "after")}
    assert {file.name for file in out.iterdir()} == {*files, "images.safetensors", "ranks.csv", "attack.html"}
    for k, number in enumerate(numbers):
        read = [np.asarray(Image.open(out / f"{number:06d}-{w}.png"), float) for w in ("before", "after")]
        assert np.array_equal(read[0], test.pixels[number, :, :, 0])
        assert np.abs(read[1] - 255 * after[k, 0].numpy()).max() <= 0.5 + 1e-4

    rows = rows_in(out)
    cards = parsed((out / "attack.html").read_text(encoding="utf-8")).all("article", "shot")
    assert [card["data-number"] for card in cards] == [row["image"] for row in rows] == [*map(str, numbers)]
    for k, (row, card) in enumerate(zip(rows, cards, strict=True)):
        number, target = numbers[k], arrays["target"][k].tolist()
        assert row["class"] == test.classes[int(labels[number])]
        assert ("target" in row) == bool(target) == (kind != "ES")
        if target:
            assert row["target"] == " ".join(map(str, target))
            assert row["target's class"] == " ".join(test.classes[int(labels[t])] for t in target)
        for name in (kind, "its place") if "CA" in kind else ():
            assert f"{row[f'{name} before']} → {row[f'{name} after']}" in card.text
        for when, z in (("before", gallery[number]), ("after", embedded(after[k : k + 1])[0])):
            if kind == "CA+(w=3)":
                square = (gallery[target[0]] - gallery).square().sum(1)
                nearer = square < (gallery[target[0]] - z).square().sum()
                nearer[[number, target[0]]] = False
                assert int(row[f"its place {when}"]) == 1 + int(nearer.sum())
                continue
            assert int(row[f"first of its class {when}"]) == first_of_class(z, number, gallery, labels)
            name, value = (
                ("TMA", z @ gallery[target[0]]) if target else ("ES:D", (z - gallery[number]).norm())
            )
            assert float(row[f"{name} {when}"]) == pytest.approx(float(value), abs=0.00051)


def rows_in(out: Path) -> list[dict[str, str]]:
    with (out / "ranks.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
