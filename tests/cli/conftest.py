"""A trained run and networks of a file, for tests of several commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from robustmetric import model, save_weights
from tests.cli.tables import SMALL
from tests.helpers.command import works


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch on digits."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    works("train", "--epochs", 1, "--steps", 1, "--defense", "N/A[S]", "--set", "dim=16", "--out", folder)
    return folder


@pytest.fixture(scope="session")
def whole(run: Path) -> tuple[Path, str]:
    """The run's evaluation as it should be: its folder and what was printed."""
    return run / "evaluation", works("evaluate", run, *SMALL)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of a c2f2 for digits with 512 outputs, drawn at random."""
    torch.manual_seed(3)
    save_weights(model("c2f2", size=8, dim=512), tmp_path / "c2f2.safetensors")
    return tmp_path / "c2f2.safetensors"


NETWORK = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 8)

    def forward(self, images):
        return self.fc(images.flatten(1))

def network():
    return Network()

class Twice(Network):
    def forward(self, images):
        return super().forward(images), images

def pair():
    return Twice()

def broken():
    return {}["layers"]

def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(27, 8))
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(NETWORK)
    return file
