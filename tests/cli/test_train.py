"""The commands train and recipes, as a user sees them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from robustmetric import cli
from robustmetric.training import Stopped
from robustmetric.training.recipe import load_recipe, recipe_names, recipe_text
from tests.helpers.command import refused, works

QUICK = ("--defense", "N/A[R]", "--batch", "1024", "--epochs", "2", "--set", "dim=16")


# Recipes


def test_recipes_are_listed_and_shown() -> None:
    lines = works("recipes").splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert works("recipes", "images") == recipe_text("images")
    assert "unknown recipe 'image' (did you mean 'images'?)" in refused("recipes", "image")


# Options


@pytest.mark.slow
def test_size_and_validation_are_in_the_recipe(tmp_path: Path) -> None:
    works("train", *QUICK, "--size", 12, "--validation", 0.3, "--out", tmp_path / "run")
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (recipe.resize, recipe.crop, recipe.validation) == (12, 12, 0.3)


def test_the_recipe_of_a_folder_looks_at_its_images(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / "data" / f"{number}").mkdir(parents=True)
        for k in range(4):
            noise = np.random.default_rng(10 * number + k).integers(0, 256, (24, 30, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / "data" / f"{number}" / f"{k}.png")
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 8))\n"
    )
    options = ["--data", "folder", "--root", tmp_path / "data", "--model", f"{tmp_path / 'nets.py'}:net"]
    options += ["--cache", tmp_path / "cache", "--steps", 1, "--epochs", 1, "--batch", 8]
    shown = works("train", *options, "--out", tmp_path / "looked")
    recipe = load_recipe(tmp_path / "looked" / "recipe.yaml", trust=True)
    assert (recipe.resize, recipe.crop, recipe.schedule) == (27, 24, "cosine")
    assert "recipe images: " in shown
    assert "24×24 pixels" in shown
    works("train", *options, "--recipe", "images", "--set", "crop=20", "--out", tmp_path / "told")
    assert load_recipe(tmp_path / "told" / "recipe.yaml", trust=True).resize == 256


# What is said


def test_a_training_says_what_it_does(tmp_path: Path) -> None:
    out = tmp_path / "run"
    lines = works("train", *QUICK, "--out", out).splitlines()
    assert lines[0].startswith("recipe digits: c2f2, N/A[R], ε = 51/255")
    assert lines[3] == "4 steps: 2 epochs of 2"
    for step in (2, 4):
        told = next(line for line in lines if line.startswith(f"train: {step} of 4"))
        assert re.search(r"loss [\d.]+, 0% perturbed, R@1 \d+\.\d", told)
    lines = [line for line in lines if not line.startswith("train: ")]
    # Two epochs differ by less than 100 images tell.
    assert "the last ones count" in lines[4]
    assert re.fullmatch(
        r"R@1 of the 100 validation images: best \d+\.\d at step \d, last \d+\.\d at step 4", lines[5]
    )
    assert lines[6:] == [
        f"weights: best in {out / 'best.safetensors'} and last in {out / 'last.safetensors'}",
        f"next: robustmetric evaluate {out}",
    ]
    again = works("train", "--epochs", 3, "--resume", "--out", out).splitlines()
    assert again[0].startswith(f"the recipe of {out}: c2f2")
    assert again[2].endswith("resumes at step 4")


def test_without_a_validation_there_is_no_best(tmp_path: Path) -> None:
    out = tmp_path / "run"
    lines = works("train", *QUICK, "--set", "validate_every=5", "--out", out).splitlines()
    assert lines[-2:] == [
        f"weights: last in {out / 'last.safetensors'}",
        f"next: robustmetric evaluate {out}",
    ]


@pytest.mark.parametrize(
    ("options", "again"),
    [
        (["--cache", "my cache"], ["--cache", "my cache"]),
        (["--epochs", "3", "--devices", "2", "--nodes", "1"], ["--devices", "2"]),
        (
            ["--skip-broken", "--after-collapse", "continue", "--device", "cpu", "--nodes", "2"],
            ["--skip-broken", "--after-collapse", "continue", "--device", "cpu", "--nodes", "2"],
        ),
    ],
)
def test_the_way_to_go_on_repeats_what_is_not_in_the_recipe(
    options: list[str], again: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise Stopped("SIGINT")

    monkeypatch.setattr("robustmetric.training.run.train", stopped)
    for name, value in {"NODE_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "a run"
    out.mkdir()
    (out / "recipe.yaml").touch()
    done = CliRunner().invoke(cli.app, ["train", "--out", str(out), *options])
    assert done.exit_code == 130
    told = done.output.partition("resume with: ")[2].strip()
    assert shlex.split(told)[:5] == ["robustmetric", "train", "--out", str(out), "--resume"]
    assert sorted(shlex.split(told)[5:]) == sorted(again)


def test_a_mistyped_folder_is_not_resumed_with_another_training(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["train", "--out", str(tmp_path / "typo"), "--resume"])
    assert f"there is no run in {tmp_path / 'typo'} to resume" in str(result.exception)
    assert not (tmp_path / "typo").exists()


def test_a_run_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits-N-A-R-1").mkdir(parents=True)
    assert "next: robustmetric evaluate runs/digits-N-A-R-2" in works("train", *QUICK)
    assert "give --out" in refused("train", "--resume")


def test_describe_shows_the_data_and_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = works("train", "--data", "digits", "--describe", "--sheet", "digits.png")
    assert re.search(r"images +│ 1,000", said)
    with Image.open("digits.png") as sheet:
        assert sheet.width > 700
    assert [path.name for path in tmp_path.iterdir()] == ["digits.png"]
