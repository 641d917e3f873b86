"""What cannot work is refused in a sentence, before images are decoded, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import robustmetric as rm
from robustmetric import cli
from robustmetric.training.module import make_network
from robustmetric.training.parts import suited_recipe
from robustmetric.training.recipe import load_recipe, make_recipe
from robustmetric.training.run import train
from tests.helpers.runs import make_pictures

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 8))

    def forward(self, images):
        return self.net(images)

def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(27, 8))

def maps():
    return nn.Conv2d(3, 4, 3)

def fixed():
    return Net().requires_grad_(False)

def normalised():
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 8))

class Blind(Net):
    def forward(self, images):
        return self.net(images.detach())

class Constant(Net):
    def forward(self, images):
        return self.net(images * 0)

class Mixing(Net):
    def forward(self, images):
        return self.net(images - images.mean(0)) + self.net(images)

class Late(Net):
    def forward(self, images):
        if self.training:
            raise KeyError("only in training")
        return self.net(images)

class Nan(Net):
    def forward(self, images):
        return self.net(images) * (torch.nan if self.training else 1)
"""


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Twelve classes of four images of 20×16 pixels."""
    return make_pictures(tmp_path / "data", each=4, height=16, width=20)


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    file = tmp_path / "nets.py"
    file.write_text(NETS)
    return file


def command(tmp_path: Path, *arguments: object) -> Any:
    fixed = ["--out", tmp_path / "run", "--cache", tmp_path / "cache", "--data", "folder"]
    fixed += ["--root", tmp_path / "data", "--epochs", 1, "--steps", 1, "--batch", 8]
    return CliRunner().invoke(cli.app, ["train", *map(str, [*fixed, *arguments])])


WRONG: list[tuple[list[object], str]] = [
    (
        ["--set", "resize=64", "--set", "crop=224"],
        "a crop of 224 does not fit images of 64×64: give one size",
    ),
    (["--defense", "HM[Q,LGA]"], "unknown sampler 'Q'"),
    (["--model", "gone.py:net"], "there is no file gone.py"),
    (["--model", "NETS:narrow"], "the network failed on images of shape (1, 3, 16, 16) and type float32 ("),
    (["--model", "NETS:maps"], "the network returned float32 of shape (1, 4, 14, 14)"),
    (["--model", "NETS:Blind"], "the embeddings do not depend on the images"),
    (["--model", "NETS:Constant"], "4 different images the same embedding: look at its layers"),
    (["--model", "NETS:Mixing"], "depends on the batch it is in"),
    (["--model", "NETS:fixed"], "no parameters that learn"),
    (["--weights", "gone.pth"], "there is no weights file "),
    (["--weights", "OTHER"], "does not fit this C2F2"),
    (["--device", "cuda"], "give another device, number of devices or precision"),
    (["--validation", "0.7"], "validation is 0.7"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_refused_before_images_are_decoded(
    arguments: list[object], message: str, tmp_path: Path, pictures: Path, nets: Path
) -> None:
    rm.save_weights(nn.Linear(2, 3), tmp_path / "other.safetensors")
    places = {"NETS": nets, "OTHER": tmp_path / "other.safetensors"}
    for name, path in places.items():
        arguments = [str(a).replace(name, str(path)) for a in arguments]
    usual = [] if "--model" in arguments else ["--model", "c2f2"]
    usual += [] if {"--set", "--model", "--size"} & {*map(str, arguments)} else ["--size", "8"]
    done = command(tmp_path, *usual, *arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, (ValueError, FileNotFoundError))
    assert message in str(done.exception)
    assert "\n" not in str(done.exception) or "--defense" in arguments  # which points at the letter
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


# A start that fails nevertheless


class Fails(L.Callback):
    """Raises at a moment of the training."""

    def __init__(self, moment: str) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("failed")

        setattr(self, moment, fail)


QUICK = {"defense": "N/A[R]", "batch": 1024, "epochs": 1, "dim": 16}
MOMENTS = ["setup", "on_train_start", "on_before_optimizer_step"]


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_start_that_fails_before_its_first_step_leaves_nothing(
    moment: str, there: bool, tmp_path: Path
) -> None:
    from robustmetric.training.loggers import make_logger

    out = tmp_path / "run"
    if there:
        out.mkdir()
    loggers = [make_logger("tensorboard", out)]
    recipe = load_recipe("digits", QUICK)
    with pytest.raises(RuntimeError, match="failed"):
        train(recipe, out, progress=False, callbacks=[Fails(moment)], loggers=loggers)
    assert out.exists() == there
    assert not there or not list(out.iterdir())
    train(recipe, out, progress=False)


@pytest.mark.parametrize(
    ("name", "told"), [("Late", "only in training"), ("Nan", "the training began with it, at step 0")]
)
def test_a_network_that_fails_in_its_first_step_leaves_nothing(
    name: str, told: str, tmp_path: Path, nets: Path
) -> None:
    recipe = load_recipe("digits", {**QUICK, "dim": None, "model": f"{nets}:{name}"})
    with pytest.raises(rm.UserError, match=told):
        train(recipe, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_network_that_mixes_its_batch_in_training_alone_is_trained(tmp_path: Path, nets: Path) -> None:
    train(
        load_recipe("digits", {**QUICK, "dim": None, "model": f"{nets}:normalised"}),
        tmp_path / "run",
        progress=False,
    )


def test_a_network_of_nan_leaves_nothing(tmp_path: Path) -> None:
    damaged = rm.model("c2f2", size=8, dim=16)
    with torch.no_grad():
        next(damaged.parameters()).fill_(torch.nan)
    rm.save_weights(damaged, tmp_path / "nan.safetensors")
    recipe = load_recipe("digits", {**QUICK, "weights": tmp_path / "nan.safetensors"})
    with pytest.raises(ValueError, match=r"1 of 1 embeddings hold NaN"):
        train(recipe, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


# The network is tried


@pytest.mark.parametrize(
    ("model", "resumed", "told"),
    [("resnet18(mean=(0,0,0))", False, 1), ("resnet18", True, 0), ("c2f2", False, 0)],
)
def test_a_resnet_without_weights_says_so(model: str, resumed: bool, told: int) -> None:
    said: list[str] = []
    recipe = make_recipe({"resize": 32, "dim": 4, "model": model})
    make_network(recipe, torch.device("cpu"), said.append, resumed=resumed)
    assert sum("starts from random weights" in line for line in said) == told == len(said)


# The usual recipe


@pytest.mark.parametrize(
    ("model", "frozen"), [("resnet18", True), ("resnet50", True), ("c2f2", False), ("n.py:f", False)]
)
def test_the_usual_recipe_freezes_what_can_be_frozen(model: str, frozen: bool) -> None:
    assert suited_recipe({"data": "cub", "model": model}).freeze_bn is frozen
    assert suited_recipe({"data": "cub", "model": model, "freeze_bn": True}).freeze_bn
