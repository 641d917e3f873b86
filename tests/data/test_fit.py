"""How images of another aspect become squares: squeezed, cropped or padded, the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import robustmetric as rm
from robustmetric.data import load_pixels
from robustmetric.data.decode import Fit, resized
from robustmetric.data.inputs import Inputs, usual_inputs
from robustmetric.training.folder import RunFolder
from robustmetric.training.parts import inputs_of, suited_recipe
from robustmetric.training.recipe import load_recipe, make_recipe
from tests.helpers.command import works
from tests.helpers.runs import make_pictures

FITS: tuple[Fit, ...] = get_args(Fit)


def noise(height: int, width: int, channels: int = 3) -> Any:
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


@pytest.mark.parametrize("channels", [1, 3])
def test_without_scaling_crop_and_pad_move_pixels_alone(channels: Any) -> None:
    image = noise(4, 8, channels)
    whole = image.reshape(4, 8, channels)
    for tall in (False, True):

        def fitted(size: int, fit: Fit, tall: bool = tall) -> Any:
            given = Image.fromarray(image.swapaxes(0, 1).copy() if tall else image)
            found = resized(given, (size, size), channels, fit)
            return found.swapaxes(0, 1) if tall else found

        assert np.array_equal(fitted(4, "crop"), whole[:, 2:6])
        padded = fitted(8, "pad")
        assert np.array_equal(padded[2:6], whole)
        assert (np.delete(padded, np.s_[2:6], axis=0) == 255).all()


@given(height=st.integers(1, 90), width=st.integers(1, 90), size=st.integers(1, 40))
def test_what_a_fit_keeps(height: int, width: int, size: int) -> None:
    image = Image.fromarray(noise(height, width) // 2)  # nothing is white
    found = {fit: resized(image, (size, size), 3, fit) for fit in FITS}
    assert {pixels.shape for pixels in found.values()} == {(size, size, 3)}
    if height == width:
        assert all(np.array_equal(pixels, found["squeeze"]) for pixels in found.values())
    assert found["crop"].max() <= 127
    # What is not white is the whole image, in its aspect.
    inner = np.asarray((found["pad"] < 255).all(axis=2))
    rows, columns = int(inner.any(axis=1).sum()), int(inner.any(axis=0).sum())
    assert max(rows, columns) == size
    longer, shorter = max(height, width), min(height, width)
    assert abs(min(rows, columns) - max(1, size * shorter / longer)) <= 0.5
    top, left = int(inner.any(axis=1).argmax()), int(inner.any(axis=0).argmax())
    assert abs((size - rows) - 2 * top) <= 1
    assert abs((size - columns) - 2 * left) <= 1
    if longer <= shorter * size:  # thinner ones are squeezed to a line
        alone = resized(image, (rows, columns), 3)
        assert np.array_equal(found["pad"][top : top + rows, left : left + columns], alone)


def test_an_unknown_fit_is_refused() -> None:
    with pytest.raises(rm.UserError, match=r"fit is 'stretch'.*squeeze, crop or pad"):
        Inputs(8, fit="stretch")  # type: ignore[arg-type]
    with pytest.raises(rm.UserError, match=r"fit is 'stretch'.*'squeeze', 'crop' or 'pad'"):
        make_recipe({"fit": "stretch"})


# What is usual


def test_images_of_ones_own_are_kept_whole(tmp_path: Path) -> None:
    root = make_pictures(tmp_path / "data")
    assert suited_recipe({"data": "folder", "root": root}).fit == "pad"
    assert suited_recipe({"data": "folder", "root": root, "fit": "squeeze"}).fit == "squeeze"
    assert usual_inputs("folder", root, "resnet18", {"fit": "crop"}).fit == "crop"
    for data in ("digits", "fashion-mnist", "cub", "cars", "sop"):
        assert suited_recipe({"data": data}).fit == usual_inputs(data, None, "c2f2").fit == "squeeze"
    sizes = {"resize": 8, "crop": 8}
    for data in ("inshop", "market1501"):
        assert suited_recipe({"data": data, **sizes}).fit == "squeeze"
    assert load_recipe("images").fit == "pad"
    # A recipe of before, which says nothing of it.
    assert inputs_of(make_recipe({"data": "folder", **sizes})).fit == "squeeze"


# Runs


@pytest.fixture
def wide(tmp_path: Path) -> tuple[object, ...]:
    """A training on images in a folder that are twice as wide as high."""
    root = make_pictures(tmp_path / "data", each=4, height=10, width=20)
    model = ("--model", "c2f2", "--defense", "N/A[R]", "--batch", 64, "--epochs", 1)
    return ("train", "--data", "folder", "--root", root, *model, "--size", 12, "--cache", tmp_path / "cache")


def fed(run: Path) -> tuple[str, Any, torch.Tensor]:
    """The fit of a run, and how it shows an image of its own."""
    loaded = rm.load_run(run, trust=True)
    file = next(Path(str(loaded.recipe.root)).rglob("*.png"))
    return loaded.inputs.fit, loaded.embed(file), loaded.inputs.tensor(file)


@pytest.mark.slow
def test_a_run_keeps_its_fit_everywhere(wide: tuple[object, ...], tmp_path: Path) -> None:
    few = ("--trust", "--steps", 1, "--checks", "none", "--attacks", "ES", "--cache", tmp_path / "cache")
    works(*wide, "--out", tmp_path / "run")
    assert RunFolder(tmp_path / "run", trust=True).recipe().fit == "pad"
    fit, z, image = fed(tmp_path / "run")
    assert fit == "pad"
    assert (image[0, :, [0, 1, -1]] == 1).all(), "above and below is white"
    assert torch.allclose(z, rm.embed(rm.load_run(tmp_path / "run", trust=True).network, image))
    works("evaluate", tmp_path / "run", *few, "--out", tmp_path / "own")
    works("evaluate", tmp_path / "run", *few, "--fit", "crop", "--out", tmp_path / "crop")
    recipe = RunFolder(tmp_path / "run", trust=True).recipe()
    others: dict[str, Fit] = {"own": "pad", "crop": "crop"}
    for out, other in others.items():
        inputs = Inputs(12, 12, 3, other)
        (test,) = load_pixels("folder", recipe.root, inputs, ["test"], tmp_path / "cache")
        expected = rm.Data(inputs.images(test), test.labels).fingerprint
        assert rm.load_record(tmp_path / out).data.sha256 == expected.sha256
