"""A recipe with `reference`: what reaches the training, what it says, and going on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from robustmetric.data.pairs import draw_pairs, random
from robustmetric.training.folder import RunFolder
from robustmetric.training.module import make_network
from robustmetric.training.parts import source_of
from robustmetric.training.recipe import make_recipe
from robustmetric.training.sets import PairData, load_sets
from tests.helpers.command import refused, works

QUICK = ("--data", "digits", "--defense", "HM[S,LGA]&ICS", "--steps", 1, "--batch", 512, "--set", "dim=16")


class Halfway:
    """As much of a trainer as the batches ask for."""

    global_rank, world_size, current_epoch = 0, 1, 0

    class fit_loop:  # noqa: N801
        class epoch_loop:  # noqa: N801
            class batch_progress:  # noqa: N801
                class current:  # noqa: N801
                    ready = 0


@pytest.mark.parametrize("reference", [False, True])
def test_pairs_of_a_recipe(reference: bool) -> None:
    recipe = make_recipe({"data": "digits", "reference": reference, "seed": 3})
    data = PairData(load_sets(recipe), recipe)
    data.trainer = Halfway()  # type: ignore[assignment]
    loader = data.train_dataloader()
    wanted = draw_pairs(loader.labels, random(3, 0, 0), itself=reference)
    assert (loader.order(0).pairs == wanted).all()
    assert bool((wanted[:, 0] == wanted[:, 1]).any()) is reference


@pytest.mark.parametrize(
    ("changes", "frozen"),
    [
        ({}, True),
        ({"reference": True}, True),
        ({"defense": "EST[S]"}, True),
        ({"defense": " EST [S]", "reference": True}, False),
        ({"defense": "ACT[S]", "reference": True}, True),
        ({"defense": "EST[S]", "reference": True, "freeze_bn": False}, False),
    ],
)
def test_batchnorm_of_est_is_not_frozen_by_the_reference(changes: dict[str, Any], frozen: bool) -> None:
    recipe = make_recipe({"model": "resnet18", "dim": 4, "freeze_bn": True, "resize": 32, **changes})
    assert source_of(recipe).freeze_bn is frozen
    said: list[str] = []
    network = make_network(recipe, torch.device("cpu"), said.append).train()
    norms = [part for part in network.modules() if isinstance(part, nn.BatchNorm2d)]
    assert {norm.training for norm in norms} == {not frozen}
    told = "BatchNorm is not frozen: reference trains EST so, whatever freeze_bn says"
    assert (told in said) is (recipe.freeze_bn and not frozen)


@pytest.mark.slow
def test_a_run_by_the_reference_says_so_counts_its_last_weights_and_goes_on(tmp_path: Path) -> None:
    option = ("--set", "reference=true", "--set", "save_every=1")
    said = works("train", *QUICK, *option, "--epochs", 2, "--out", tmp_path / "whole")
    assert "η = 1, reference" in said
    works("train", *QUICK, *option, "--epochs", 1, "--out", tmp_path / "parts")
    assert "reference was True, is False" in refused(
        "train", "--out", tmp_path / "parts", "--resume", "--set", "reference=false"
    )
    works("train", "--out", tmp_path / "parts", "--resume", "--epochs", 2)
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    assert whole.recipe().reference
    for file in ("last.safetensors", "metrics.csv", "recipe.yaml"):
        assert (whole.path / file).read_bytes() == (parts.path / file).read_bytes()
    assert whole.best.is_file()
    assert whole.weights().file == whole.last
    works("train", *QUICK, "--epochs", 2, "--out", tmp_path / "otherwise")
    assert whole.last.read_bytes() != (tmp_path / "otherwise" / "last.safetensors").read_bytes()
