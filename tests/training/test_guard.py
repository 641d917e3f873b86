"""The collapse guard: it catches what collapses and leaves alone what does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import robustmetric as rm
from robustmetric.training import CollapsedError, load_recipe, train

SMALL = {"epochs": 3, "steps": 4, "save_every": 1000}


@pytest.mark.parametrize("defense", ["HM[S,0]", "min-max[S]"])
def test_a_collapse_is_caught_and_the_good_weights_kept(defense: str, tmp_path: Path) -> None:
    with pytest.raises(CollapsedError) as caught:
        train(load_recipe("digits", {**SMALL, "defense": defense}), tmp_path / "run", progress=False)
    message = str(caught.value)
    step = re.search(
        r"the network collapsed at about step (\d+): its embeddings all point the same way", message
    )
    assert step is not None
    assert 1 <= int(step[1]) <= 28
    assert "What usually helps: a softer destination" in message
    good = rm.model("c2f2", size=8)
    assert rm.load_weights(good, tmp_path / "run" / "good.safetensors") == []
    images = torch.from_numpy(rm.data.load("digits", split="test").pixels).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        spread = 1 - rm.embed(good, images).mean(0).square().sum()
    assert spread > 0.01


@pytest.mark.slow
def test_told_to_go_on_it_says_so_and_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    train(
        load_recipe("digits", {**SMALL, "epochs": 2, "defense": "min-max[S]"}),
        tmp_path / "run",
        progress=False,
        go_on_after_collapse=True,
        report=said.append,
    )
    assert len(said) == 1
    assert "the network collapsed" in said[0]
    assert said[0].endswith("Going on, as told")


@pytest.mark.slow
def test_the_gradual_adversary_does_not_collapse(tmp_path: Path) -> None:
    train(load_recipe("digits", {**SMALL, "defense": "HM[S,LGA]"}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "good.safetensors").exists()


def test_a_network_that_diverges_is_caught(tmp_path: Path) -> None:
    recipe = load_recipe("digits", {**SMALL, "defense": "N/A[S]", "lr": 1e18})
    with pytest.raises(CollapsedError, match=r"the network diverged at step 1: .* embeddings hold NaN"):
        train(recipe, tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "good.safetensors").exists()
