"""A run goes on with what it began with, alone in its folder: the same images, files and workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from PIL import Image

import robustmetric as rm
from robustmetric.locks import LOCK, locked
from robustmetric.training import callbacks as training_callbacks
from robustmetric.training import load_recipe
from robustmetric.training.origins import differences, images_of
from robustmetric.training.recipe import Recipe
from robustmetric.training.run import train
from robustmetric.training.sets import load_sets
from tests.helpers.command import command, refused, works
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


def add(data: Path) -> None:
    noise(data / "class03" / "9.png")


def remove(data: Path) -> None:
    (data / "class03" / "1.png").unlink()


def change(data: Path) -> None:
    noise(data / "class03" / "1.png")


def move(data: Path) -> None:
    (data / "class03" / "3.png").rename(data / "class04" / "0a.png")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "told"),
    [
        (add, "24 of 6 classes, are 25 of 6"),
        (remove, "24 of 6 classes, are 23 of 6"),
        (change, "some have other pixels"),
        (move, "some are in other classes"),
    ],
)
def test_other_images_are_noticed(own: Path, tmp_path: Path, do: Callable[[Path], None], told: str) -> None:
    shutil.copytree(tmp_path / "data", tmp_path / "kept", copy_function=shutil.copy2)
    before = contents(own)
    do(tmp_path / "data")
    again = resume(own, 2, "--cache", tmp_path / "cache")
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


@pytest.mark.parametrize(
    ("do", "told"),
    [
        (lambda code: (code / "nets.py").write_text(NET + "#"), "its copy code/nets.py was changed"),
        (lambda code: (code / "more.py").write_text("import os"), "code/more.py was added"),
        (lambda code: (code / "nets.py").rename(code / "net.txt"), "its copy code/nets.py is gone"),
    ],
)
def test_a_changed_copy_is_another_run_also_if_it_is_trusted(
    own: Path, tmp_path: Path, do: Callable[[Path], object], told: str
) -> None:
    do(own / "code")
    said = refused(*resume(own, 2, "--cache", tmp_path / "cache", "--trust"))
    assert told in said
    assert "or begin a new run in another folder with --weights" in said


@pytest.mark.slow
def test_another_number_of_workers_is_refused(run: Path) -> None:
    before = contents(run)
    said = refused(*resume(run, 3, "--devices", 2, "--accelerator", "cpu"))
    assert "the number of workers was 1, is 2: give --devices 1" in said
    assert contents(run) == before


def test_a_run_of_before_is_resumed_and_gets_its_digests(run: Path) -> None:
    about = json.loads((run / "run.json").read_text())
    del about["sha256"]
    origin = about.pop("origin")
    assert origin["workers"] == 1
    assert origin["images"]["training images"]["count"] == 1000
    (run / "run.json").write_text(json.dumps(about))
    works(*resume(run))
    assert json.loads((run / "run.json").read_text())["origin"] == origin


@pytest.mark.parametrize("named", [False, True])
def test_a_changed_file_of_the_user_is_told(own: Path, tmp_path: Path, named: bool) -> None:
    (tmp_path / "nets.py").write_text(NET.replace("= 8", "= 9"))
    more = ["--model", f"{tmp_path / 'nets.py'}:net"] if named else []
    said = works(*resume(own, 2, "--cache", tmp_path / "cache", *more))
    assert said.count(f"{tmp_path / 'nets.py'} is not what the run began with: its copy counts") == 1


def test_digests_tell_sets_apart() -> None:
    recipe = load_recipe("digits", {"validation": 0})
    sets = load_sets(recipe)
    found = images_of(sets)
    assert found.keys() == {"training images", "test images"}
    assert found == images_of(load_sets(recipe))
    assert differences({"images": found}, {"images": found}) == []
    other = {
        "training images": found["training images"],
        "test images": {**found["test images"], "pixels": "0"},
    }
    assert differences({"images": found}, {"images": other}) == [
        "of the test images, 797 of 10 classes, some have other pixels: restore them"
    ]


# The recipe

OTHER = {
    "data": "mnist", "model": "resnet18", "weights": "first.safetensors", "dim": 8, "freeze_bn": "true",
    "defense": "N/A[S]", "reference": "true", "eps": 0.05, "alpha": 0.5, "steps": 3, "margin": 0.3,
    "epochs": 9, "batch": 64, "lr": 0.5, "schedule": "cosine", "warmup": 7, "clip": 1.0, "weight_decay": 0.1,
    "resize": 16, "fit": "pad", "crop": 8, "flip": "true", "zoom": 0.5, "jitter": 0.2, "validation": 0.3,
    "validate_by": "robust", "validate_every": 2, "save_every": 77, "save_minutes": 3.0,
    "precision": "64-true", "seed": 5,
}  # fmt: skip


def edit(run: Path, entry: str, value: object) -> None:
    text = (run / "recipe.yaml").read_text()
    edited, count = re.subn(rf"(?m)^{entry}: \S+", f"{entry}: {value}", text)
    assert count == 1
    (run / "recipe.yaml").write_text(edited)


@pytest.mark.parametrize("entry", sorted(Recipe.model_fields.keys() - {"root"}))
def test_an_edited_recipe_is_noticed(run: Path, tmp_path: Path, entry: str) -> None:
    was = rm.load_run(run).recipe.model_dump(mode="json")[entry]
    edit(run, entry, OTHER[entry])
    before = contents(run)
    with pytest.raises(rm.UserError) as loaded:
        rm.load_run(run)
    with pytest.raises(rm.UserError) as published:
        rm.publish(run, tmp_path / "given")
    said = [str(loaded.value), str(published.value), refused("evaluate", run)]
    if entry != "epochs":  # of which more may be trained
        said.append(refused("train", "--out", run, "--resume"))
    now = load_recipe(run / "recipe.yaml").model_dump(mode="json")[entry]
    for text in said:
        assert f"{run / 'recipe.yaml'} is not the recipe" in text
        assert f": {entry} is {now!r}, was {was!r}; restore it" in text
        assert "in another folder" in text
    assert contents(run) == before


def test_another_layout_of_a_recipe_is_no_edit(run: Path) -> None:
    file = run / "recipe.yaml"
    lines = [line.partition("  #")[0] for line in file.read_text().splitlines()]
    file.write_text("# a remark\n" + "\n".join(reversed(lines)).replace("eps: 0.2", "eps: 2/10"))
    assert rm.load_run(run).recipe.eps == 0.2
    assert "goes on from step 8" in works(*resume(run))


@pytest.mark.parametrize("by", ["option", "edit"])
def test_images_that_lie_elsewhere_are_the_same_images(own: Path, tmp_path: Path, by: str) -> None:
    (tmp_path / "data").rename(tmp_path / "moved")
    if by == "edit":
        edit(own, "root", tmp_path / "moved")
    more = ["--root", tmp_path / "moved"] if by == "option" else []
    works(*resume(own, 2, "--cache", tmp_path / "cache", *more))
    assert rm.load_run(own).recipe.root == tmp_path / "moved"


# Epochs


def test_fewer_epochs_than_were_done_are_refused(run: Path) -> None:
    before = contents(run)
    said = refused(*resume(run, 1))
    assert "has done 2 epochs, and epochs=1 is fewer: give at least 2 (--epochs)" in said
    assert contents(run) == before
    assert "has done its 2 epochs: nothing is left to do" in works(*resume(run, 2))
    assert "goes on from step 8" in works(*resume(run, 3))


def test_a_run_that_blocked_itself_goes_on(run: Path) -> None:
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("epochs: 2 ", "epochs: 1 "))
    assert "give at least 2 (--epochs)" in refused("train", "--out", run, "--resume")
    assert "goes on from step 8" in works(*resume(run, 3))


def test_an_epoch_that_was_begun_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(keeper: Any, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            keeper.signals.stop = "SIGTERM"

    monkeypatch.setattr(training_callbacks.Keeper, "on_train_batch_start", stop)
    assert command("train", *QUICK, "--epochs", 3, "--out", tmp_path / "run").code == 143
    assert "is in its epoch 2, and epochs=1 is fewer: give at least 2" in refused(
        *resume(tmp_path / "run", 1)
    )


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


def test_a_training_holds_its_folder_until_its_end(tmp_path: Path) -> None:
    out, said = tmp_path / "run", []

    class Second(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                said.append(refused("train", "--out", out, "--resume"))

    changes = {"defense": "N/A[R]", "batch": 512, "epochs": 1, "dim": 16}
    train(load_recipe("digits", changes), out, callbacks=[Second()], progress=False)
    assert "is in use: a training by process" in said[0]
    assert not (out / LOCK).exists()


def test_a_run_left_by_a_killed_program_is_told_and_resumed(run: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = {"host": socket.gethostname(), "process": ended.pid, "doing": "a training", "since": "noon"}
    (run / LOCK).write_text(json.dumps(owner))
    said = works(*resume(run))
    assert f"was left by a training by process {ended.pid}" in said
    assert "goes on from step 8" in said
    assert not (run / LOCK).exists()


def test_a_start_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    refused("train", *QUICK, "--out", tmp_path / "a" / "b", "--weights", tmp_path / "gone")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("damage", ["flip", "", "{", "[]"])
def test_a_damaged_run_json(run: Path, damage: str) -> None:
    about = run / "run.json"
    text = about.read_text()
    about.write_text(text.replace('"workers": 1', '"workers": 3') if damage == "flip" else damage)
    before = contents(run)
    for arguments in (resume(run), ("evaluate", run)):
        said = refused(*arguments)
        assert str(about) in said
        assert "restore it" in said
    assert contents(run) == before


def test_a_run_json_that_is_gone(run: Path) -> None:
    (run / "run.json").unlink()
    assert f"{run / 'run.json'} is gone" in refused(*resume(run))


def test_an_entry_is_given_once(tmp_path: Path) -> None:
    said = refused("train", "--data", "digits", "--epochs", 1, "--set", "epochs=3", "--out", tmp_path / "run")
    assert "epochs: given by an option and by --set" in said


def test_an_unknown_entry_names_its_file(run: Path) -> None:
    file = run / "recipe.yaml"
    file.write_text(file.read_text().replace("schedule:", "schedude:"))
    assert f"{file}: unknown recipe entry 'schedude'" in refused("evaluate", run)
