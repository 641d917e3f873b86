"""A run goes on with what it began with, alone in its folder: the same images, files and workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import robustmetric as rm
from robustmetric.locks import LOCK, locked
from tests.helpers.command import refused, works
from tests.helpers.runs import make_pictures
from tests.training.conftest import QUICK, contents, resume


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return make_pictures(tmp_path / "data", each=4)


NET = """
from torch import nn

def net():
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, WIDTH))

WIDTH = 8
"""


@pytest.fixture
def own(pictures: Path, tmp_path: Path) -> Path:
    """A run on images in a folder, with a network of the user's."""
    (tmp_path / "nets.py").write_text(NET)
    options = ["--data", "folder", "--root", pictures, "--model", f"{tmp_path / 'nets.py'}:net"]
    options += ["--defense", "N/A[R]", "--batch", 64, "--size", 10, "--epochs", 1]
    works("train", *options, "--cache", tmp_path / "cache", "--out", tmp_path / "run")
    return tmp_path / "run"


def noise(file: Path) -> None:
    Image.fromarray(np.random.default_rng(7).integers(0, 256, (10, 10, 3), dtype=np.uint8)).save(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "told"),
    [
        (lambda data: noise(data / "class03" / "9.png"), "24 of 6 classes, are 25 of 6"),
        (lambda data: (data / "class03" / "1.png").unlink(), "24 of 6 classes, are 23 of 6"),
        (lambda data: noise(data / "class03" / "1.png"), "some have other pixels"),
        (
            lambda data: (data / "class03" / "3.png").rename(data / "class04" / "0a.png"),
            "some are in other classes",
        ),
    ],
)
def test_other_images_are_noticed(own: Path, tmp_path: Path, do: Callable[[Path], object], told: str) -> None:
    shutil.copytree(tmp_path / "data", tmp_path / "kept", copy_function=shutil.copy2)
    before = contents(own)
    do(tmp_path / "data")
    again = resume(own, 2, "--cache", tmp_path / "cache", "--trust")
    said = refused(*again)
    assert "training images" in said
    assert "restore them; or begin a new run" in said
    assert f"--weights {own / 'last.safetensors'}" in said
    assert told in said
    assert contents(own) == before
    # Restored, it goes on.
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(tmp_path / "kept", tmp_path / "data", copy_function=shutil.copy2)
    works(*again)


@pytest.mark.slow
def test_another_number_of_workers_is_refused(run: Path) -> None:
    before = contents(run)
    said = refused(*resume(run, 3, "--devices", 2, "--device", "cpu"))
    assert "the number of workers was 1, is 2: give --devices 1" in said
    assert contents(run) == before


# The recipe


def edit(run: Path, entry: str, value: object) -> None:
    text = (run / "recipe.yaml").read_text()
    edited, count = re.subn(rf"(?m)^{entry}: \S+", f"{entry}: {value}", text)
    assert count == 1
    (run / "recipe.yaml").write_text(edited)


@pytest.mark.parametrize("by", ["option", "edit"])
def test_images_that_lie_elsewhere_are_the_same_images(own: Path, tmp_path: Path, by: str) -> None:
    (tmp_path / "data").rename(tmp_path / "moved")
    if by == "edit":
        edit(own, "root", tmp_path / "moved")
    more = ["--root", tmp_path / "moved"] if by == "option" else []
    works(*resume(own, 2, "--cache", tmp_path / "cache", "--trust", *more))
    assert rm.load_run(own, trust=True).recipe.root == tmp_path / "moved"


@pytest.mark.parametrize(("entry", "value"), [("seed", 5), ("defense", "N/A[S]"), ("epochs", 9), ("dim", 8)])
def test_an_edited_recipe_is_noticed(run: Path, entry: str, value: object) -> None:
    edit(run, entry, value)
    before = contents(run)
    said = [refused("evaluate", run)]
    if entry != "epochs":  # of which more may be trained
        said.append(refused("train", "--out", run, "--resume"))
    for text in said:
        assert f"{run / 'recipe.yaml'} is not the recipe that this run began with: {entry} is" in text
    assert contents(run) == before


def test_run_json_may_be_edited_but_not_damaged(run: Path) -> None:
    about = run / "run.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "note": "the good one"}))
    assert "resumes at step 8" in works(*resume(run))
    text = about.read_text()
    about.write_text(text.replace('"workers": 1', '"workers": 3'))
    assert "the number of workers was 3, is 1" in refused(*resume(run, 4))
    about.write_text(text[:-1])
    for arguments in (resume(run, 4), ("evaluate", run)):
        assert f"{about} is damaged" in refused(*arguments)
    about.unlink()
    assert f"{about} is missing" in refused(*resume(run, 4))


# Epochs


def test_fewer_epochs_than_were_done_are_refused(run: Path) -> None:
    before = contents(run)
    said = refused(*resume(run, 1))
    assert "is in epoch 2, and epochs=1 is fewer: give at least 2 (--epochs)" in said
    assert contents(run) == before
    assert "has done its 2 epochs: nothing is left to do" in works(*resume(run, 2))
    assert "resumes at step 8" in works(*resume(run, 3))


# Two programs


def test_a_folder_in_which_another_program_trains_is_refused(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    for out, arguments in (
        (run, resume(run)),
        (tmp_path / "new", ("train", *QUICK, "--out", tmp_path / "new")),
    ):
        with locked(out, "a training"):
            said = refused(*arguments)
        assert f"{out} is in use: a training by process {os.getpid()} on {socket.gethostname()}" in said
        assert "--out" in said
    assert contents(run) == before


def test_a_run_left_by_a_killed_program_is_told_and_resumed(run: Path) -> None:
    (run / LOCK).write_text("a training by process 1 on elsewhere since noon")
    said = works(*resume(run))
    assert "was left by a training by process 1 on elsewhere" in said
    assert "resumes at step 8" in said
    assert not (run / LOCK).exists()
