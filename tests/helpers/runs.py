"""Folders like those of a run, and images to train on, without a training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import robustmetric as rm


def make_run(
    folder: Path, *weights: str, first: int = 0, about: str | None = None, **entries: object
) -> Path:
    """Write a run of c2f2 on digits: its recipe and some of its weights, each of another network.

    They are drawn with seeds that begin with `first`.
    """
    recipe = {"data": "digits", "model": "c2f2", "dim": 16, **entries}
    folder.mkdir()
    (folder / "recipe.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in recipe.items()))
    for number, name in enumerate(weights, first):
        torch.manual_seed(number)
        rm.save_weights(rm.model("c2f2", size=8, dim=recipe["dim"]), folder / f"{name}.safetensors")
    if about is not None:
        (folder / "run.json").write_text(about)
    return folder


def make_pictures(root: Path, classes: int = 12, each: int = 3, *, height: int = 10, width: int = 10) -> Path:
    """Write noise, a folder for each class."""
    for number in range(classes):
        (root / f"class{number:02}").mkdir(parents=True)
        for k in range(each):
            rng = np.random.default_rng(100 * number + k)
            noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / f"class{number:02}" / f"{k}.png")
    return root
