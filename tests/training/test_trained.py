"""What a run trained, as a product uses it: vectors of files, Pillow images and tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import robustmetric as rm
from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError
from robustmetric.sphere import ROUNDING
from robustmetric.training import Run, load_recipe
from tests.helpers.runs import make_pictures, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return rm.load_run(make_run(tmp_path_factory.mktemp("trained") / "run", "last"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return sorted(make_pictures(tmp_path_factory.mktemp("pictures") / "all", 4).rglob("*.png"))


def one_by_one(run: Run, files: list[Path]) -> torch.Tensor:
    """The vectors as a plain loop has them."""
    with torch.no_grad():
        z = torch.cat([run.network(run.inputs.tensor(file)) for file in files])
    return z / z.square().sum(1, keepdim=True).sqrt()


def opened(files: list[Path]) -> list[Image.Image]:
    return [Image.open(file) for file in files]


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm(dim=1).max())


@pytest.mark.parametrize("batch", [1, 5, 64])
@pytest.mark.parametrize(
    "given",
    [
        lambda run, files: files,
        lambda run, files: [str(file) for file in files],
        lambda run, files: (file for file in files),
        lambda run, files: opened(files),
        lambda run, files: torch.cat([run.inputs.tensor(file) for file in files]),
        lambda run, files: torch.cat([run.inputs.tensor(file) for file in files]).double(),
    ],
    ids=["paths", "texts", "generator", "pillow", "tensor", "double"],
)
def test_vectors_are_those_of_each_image_alone(
    given: Callable[[Run, list[Path]], Any], batch: int, run: Run, files: list[Path]
) -> None:
    z = run.embed(given(run, files), batch=batch)
    assert z.shape == (len(files), 16)
    assert (z.dtype, z.device.type, z.requires_grad) == (torch.float32, "cpu", False)
    # A batch of another size rounds otherwise, by less than this everywhere in the project.
    assert far(z, one_by_one(run, files)) < ROUNDING


def test_the_network_comes_back_as_it_was() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten()).train()
    network[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    run = Run(network, Inputs(resize=8, channels=1), load_recipe("digits"), None)
    images = torch.rand(6, 1, 8, 8)
    assert torch.equal(run.embed(images), run.embed(images)), "dropout was not switched off"
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(module.training for module in network.modules())
    assert [p.requires_grad for p in network[0].parameters()] == [False, True]


# What is refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.rand(2, 3, 8, 8), "images have 3 channels, and the network takes 1: give (N, 1, H, W), or"),
        (torch.full((1, 1, 8, 8), 255.0), "pixels are in [255, 255]; they must be in [0, 1]: divide 8-bit"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.uint8), "must be a floating-point tensor, not uint8"),
        (torch.rand(1, 8, 8), "images have shape (1, 8, 8); they must have shape (N, C, H, W)"),
        ([], "there are no images to embed: give at least one"),
        (3, "image must be a file or a Pillow image, not 3"),
        ("nowhere.png", "nowhere.png cannot be read: No such file or directory; give an image file"),
    ],
)
def test_what_is_no_image_is_refused(given: Any, said: str, run: Run) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        run.embed(given)


def test_the_files_of_a_generator_are_not_held_all_at_once(run: Run, files: list[Path]) -> None:
    """No more are taken than a batch and as many ahead."""
    taken = 0
    passed: list[int] = []

    def counted() -> Any:
        nonlocal taken
        for file in files * 4:
            taken += 1
            yield file

    handle = run.network.register_forward_hook(lambda *_: passed.append(taken))
    try:
        run.embed(counted(), batch=4)
    finally:
        handle.remove()
    assert passed == [min(len(files) * 4, 4 * (k + 1) + 4) for k in range(len(files))]
