"""Networks that cannot learn are refused before images are decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import robustmetric as rm
from robustmetric.training.module import make_network
from robustmetric.training.recipe import make_recipe
from tests.helpers.command import refused, works

NETS = """
import torch
from torch import nn

def fits():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8))

class Blind(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = fits()

    def forward(self, images):
        return self.net(images * 0)

class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = fits()

    def forward(self, images):
        return self.net(images - images.mean(0))[:, :] + self.net(images)

class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 8))

    def forward(self, images):
        return self.net(images)

def untrained():
    return nn.Flatten()

def fixed():
    return fits().requires_grad_(False)

class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = fits()

    def forward(self, images):
        return self.net(images * 0 if self.training else images)

class Nan(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = fits()

    def forward(self, images):
        return self.net(images) * (torch.nan if self.training else 1)
"""


def test_a_network_that_is_collapsed_from_the_start_is_caught(nets: Path) -> None:
    said = refused(*with_network(nets, "Narrow"), "--epochs", 3, "--batch", 128)
    assert "the network collapsed at about step 1" in said
    assert "from the first step on: look at the network" in said
    assert not (nets.parent / "run" / "good.safetensors").exists()


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path / "nets.py"


def with_network(nets: Path, name: str) -> tuple[object, ...]:
    out = nets.parent / "run"
    own = ("--defense", "N/A[R]", "--batch", 512, "--epochs", 1)
    return ("train", *own, "--model", f"{nets}:{name}", "--out", out)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Blind", "4 different images the same embedding: look at its layers"),
        ("Mixing", "depends on the batch it is in"),
        ("untrained", "no parameters that learn"),
        pytest.param("fixed", "no parameters that learn", id="without parameters that learn"),
        ("Nan", "the training began with it, at step 0"),
    ],
)
def test_a_network_that_cannot_learn_is_refused(nets: Path, name: str, told: str) -> None:
    said = refused(*with_network(nets, name))
    assert told in said
    assert not (nets.parent / "run").exists()


def test_a_network_that_mixes_its_batch_in_training_alone_is_none_of_these(nets: Path) -> None:
    works(*with_network(nets, "Statistics"))


@pytest.mark.parametrize(
    ("changes", "resumed", "told"),
    [
        ({"model": "resnet18", "resize": 32, "dim": 4}, False, True),
        ({"model": "resnet18(mean=(0,0,0))", "resize": 32, "dim": 4}, False, True),
        ({"model": "resnet18", "resize": 32, "dim": 4}, True, False),
        ({"model": "resnet18", "resize": 32, "dim": 4, "weights": "resnet18.safetensors"}, False, False),
        ({"model": "c2f2", "dim": 4}, False, False),
    ],
)
def test_a_resnet_without_weights_says_so(
    changes: dict[str, Any], resumed: bool, told: bool, tmp_path: Path
) -> None:
    if "weights" in changes:
        changes = {**changes, "weights": tmp_path / changes["weights"]}
        rm.save_weights(rm.model("resnet18", dim=4), changes["weights"])
    said: list[str] = []
    make_network(make_recipe(changes), torch.device("cpu"), said.append, resumed=resumed)
    assert [line for line in said if "starts from random weights" in line] == said
    assert bool(said) is told
    assert all("give --weights FILE" in line for line in said)
