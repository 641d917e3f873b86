"""A run, pictures, and vectors of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import robustmetric as rm
from robustmetric.data.inputs import Inputs
from robustmetric.training import Run
from robustmetric.vectors import About, Vectors, save_vectors
from tests.helpers.runs import make_pictures, make_run

ABOUT = About("c2f2 N/A[S]", "a" * 64, Inputs(resize=8, channels=1), "pictures")


def unit(count: int, dim: int, seed: int = 0) -> Tensor:
    """Vectors of length 1, drawn at random."""
    return F.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)))


def stored(path: Path, z: Tensor, names: list[str] | None = None) -> Vectors:
    """Vectors from a file."""
    save_vectors(Vectors(z, names or [f"{k}.png" for k in range(len(z))], ABOUT), path)
    return rm.load_vectors(path)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A c2f2 for grey images of 8 × 8."""
    return rm.load_run(make_run(tmp_path_factory.mktemp("vectors") / "run", "last"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Thirty pictures in ten folders."""
    return make_pictures(tmp_path / "pictures", 10)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
