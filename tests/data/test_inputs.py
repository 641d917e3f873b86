"""What a network takes of images: the same pixels from a set, a cache, a file and a Pillow image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from robustmetric.data import decode as decoding
from robustmetric.data import load
from robustmetric.data.inputs import Inputs, load_pixels, relative_files, usual_inputs
from robustmetric.errors import UserError
from robustmetric.training.recipe import load_recipe, usual_recipe
from tests.helpers.runs import make_pictures


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Four classes of three images of 10×9, the first two of which are trained on."""
    return make_pictures(tmp_path / "data", classes=4, width=9)


# One image


@pytest.mark.parametrize(
    "inputs", [Inputs(), Inputs(12, 7, fit="pad"), Inputs(crop=5), Inputs(12, 8, 1, "crop")]
)
def test_a_file_gives_what_evaluation_feeds_the_network(
    inputs: Inputs, pictures: Path, tmp_path: Path
) -> None:
    images = load("folder", pictures, "test")
    fed = inputs.images(inputs.pixels(images, tmp_path / "cache"))[:]
    assert images.files is not None
    for file, expected in zip(images.files, fed, strict=True):
        assert torch.equal(inputs.tensor(file), expected[None])
        assert torch.equal(inputs.tensor(str(file)), expected[None])
        with Image.open(file) as image:
            assert torch.equal(inputs.tensor(image), expected[None])


def test_a_pillow_image_is_turned_upright_and_laid_on_white() -> None:
    turned = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.getexif()[0x0112] = 6
    found = Inputs(channels=1).tensor(turned)
    assert torch.equal((found * 255).round().int()[0, 0], torch.arange(12).reshape(3, 4).rot90(-1).int())
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert bool((Inputs().tensor(clear) == 1).all())


def test_images_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"bad\.png cannot be read: is not PNG.* give an image file"):
        Inputs().tensor(tmp_path / "bad.png")
    with pytest.raises(UserError, match=r"nowhere\.png cannot be read: No such file"):
        Inputs().tensor("nowhere.png")
    with pytest.raises(UserError, match=r"image must be a file or a Pillow image, not float32 of shape"):
        Inputs().tensor(torch.rand(1, 3, 8, 8))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a crop of 9 does not fit images of 8×8: .* at most 8") as caught:
        Inputs(8, 9).tensor(Image.new("L", (8, 8)))
    assert caught.value.parameter == "size"


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"resize": 0}, "resize must be from 1 to 16384, or None, not 0"),
        ({"crop": -1}, "crop must be from 1 to 16384, or None, not -1"),
        ({"channels": 4}, "channels is 4; it must be 1, 3 or None"),
    ],
)
def test_inputs_that_cannot_be(entries: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Inputs(**entries)


def test_the_first_readable_image_is_decoded_alone(pictures: Path) -> None:
    (pictures / "class00" / "0.png").write_bytes(b"")
    (pictures / "class00" / "1.png").write_bytes(b"no image")
    found = Inputs(12).first(load("folder", pictures))
    expected = decoding.decoded(pictures / "class00" / "2.png", None, (12, 12), 3)
    assert np.array_equal(found.pixels, expected[None])
    assert found.labels.tolist() == [0]
    assert Inputs(12).first(load("folder", pictures, "test")).classes[0] == "class02"
    for file in pictures.rglob("*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(
        ValueError, match=r"no train image of folder can be read; the last one tried: .*2\.png"
    ):
        Inputs(12).first(load("folder", pictures))


def test_grey_pixels_in_memory_have_the_channels_that_are_asked_for() -> None:
    digits = load("digits")
    assert Inputs().first(digits).pixels.shape == (1, 8, 8, 1)
    assert Inputs(32, channels=3).first(digits).pixels.shape == (1, 32, 32, 3)
    assert Inputs(32, 24).shape(Inputs(32, 24).first(digits)) == (1, 24)


# Several splits


def test_splits_come_in_the_order_asked_for() -> None:
    both = load_pixels("digits", None, Inputs(), ["train", "test"])
    assert [len(split) for split in both] == [1000, 797]
    assert [len(split) for split in load_pixels("digits", None, Inputs(), ["test", "train"])] == [797, 1000]
    (whole,) = load_pixels("digits", None, Inputs(), ["all"])
    assert np.array_equal(whole.pixels, np.concatenate([split.pixels for split in both]))
    assert torch.equal(whole.labels, torch.cat([split.labels for split in both]))


def test_all_images_of_files_with_their_classes_and_names(pictures: Path, tmp_path: Path) -> None:
    (pictures / "class00" / "1.png").write_bytes(b"no image")
    splits = {"class03": "test", "class00": "train", "class02": "train"}
    rows = [f"{name}/{k}.png,{name},{split}" for name, split in splits.items() for k in range(3)]
    (pictures / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    for data, root in (("folder", pictures), ("csv", pictures / "list.csv")):
        decoded: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = {}
        for split in ("test", "train", "all"):
            (found,) = load_pixels(data, root, Inputs(8), [split], tmp_path / "cache", skip_broken=True)
            names = relative_files(found, root)
            assert names is not None
            assert len(names) == len(set(names)) == len(found)
            for name, image, label in zip(names, found.pixels[:], found.labels.tolist(), strict=True):
                assert (pictures / name).is_file()
                assert found.classes[label] == Path(name).parts[0]
                assert np.array_equal(decoded.setdefault(name, image), image)
        assert len(decoded) == len(found) == {"folder": 11, "csv": 8}[data]
        kept = sorted(file.name for file in (tmp_path / "cache").rglob(f"{data}-*.npy"))
        assert len(kept) == 3, "the images of one split took the place of another's"


# What is usual


@pytest.mark.parametrize("data", ["digits", "mnist", "fashion-mnist", "cub", "cars", "sop"])
def test_usual_inputs_are_those_of_the_usual_recipe(data: str) -> None:
    recipe = load_recipe(usual_recipe(data))
    channels = None if recipe.model == "c2f2" else 3
    assert usual_inputs(data, None, recipe.model) == Inputs(recipe.resize, recipe.crop, channels)  # type: ignore[arg-type]
    assert usual_inputs(data, None, "resnet18").channels == 3


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (16, 14)),
        ({"resize": 40}, (40, 35)),
        ({"crop": 8}, (16, 8)),
        ({"resize": 30, "crop": 30}, (30, 30)),
        ({"resize": 30, "crop": None}, (30, None)),
    ],
)
def test_usual_inputs_look_at_images_of_ones_own(
    given: dict[str, int | None], sizes: tuple[int, int | None], pictures: Path
) -> None:
    assert usual_inputs("folder", pictures, "resnet18", given) == Inputs(*sizes, channels=3, fit="pad")
