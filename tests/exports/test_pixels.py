"""The lines of the docs that make pixels of a file: the very ones that the run itself sees."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from robustmetric.data import Inputs
from robustmetric.exports import Product

PAGE = Path(__file__).parents[2] / "docs" / "export.md"


@pytest.fixture(scope="module")
def pixels() -> Callable[..., Any]:
    """The function of the page."""
    (block,) = re.findall(r"```python\n(.*?def pixels.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102
    return names["pixels"]  # type: ignore[no-any-return]


def noise(*shape: int) -> Any:
    return np.random.default_rng(3).integers(0, 256, shape).astype(np.uint8)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


IMAGES: dict[str, Callable[[Path], None]] = {
    "colour.png": lambda file: Image.fromarray(noise(30, 41, 3)).save(file),
    "colour.jpg": lambda file: Image.fromarray(noise(30, 41, 3)).save(file),
    "small.png": lambda file: Image.fromarray(noise(5, 3, 3)).save(file),
    "right.png": lambda file: Image.fromarray(noise(16, 16, 3)).save(file),
    "grey.png": lambda file: Image.fromarray(noise(30, 41)).save(file),
    "turned.jpg": lambda file: Image.fromarray(noise(30, 41, 3)).save(file, exif=turned(6)),
    "mirrored.jpg": lambda file: Image.fromarray(noise(30, 41, 3)).save(file, exif=turned(2)),
    "transparent.png": lambda file: Image.fromarray(noise(30, 41, 4)).save(file),
    "grey and transparent.png": lambda file: Image.fromarray(noise(30, 41, 2), "LA").save(file),
    "palette.gif": lambda file: Image.fromarray(noise(30, 41, 3)).quantize(16).save(file),
    "palette and transparent.png": lambda file: (
        Image.fromarray(noise(30, 41, 3)).quantize(16).save(file, transparency=3)
    ),
    "two levels.png": lambda file: Image.fromarray(noise(30, 41)).convert("1").save(file),
    "print.jpg": lambda file: Image.fromarray(noise(30, 41, 4), "CMYK").save(file),
    "photo.webp": lambda file: Image.fromarray(noise(30, 41, 3)).save(file),
}


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", IMAGES)
def test_the_lines_of_the_docs_make_the_pixels_of_the_run(
    name: str, channels: Any, pixels: Callable[..., Any], tmp_path: Path
) -> None:
    IMAGES[name](tmp_path / name)
    mode = "RGB" if channels == 3 else "L"
    for fit in ("crop", "pad"):
        fitted = torch.from_numpy(pixels(tmp_path / name, 16, mode, fit).copy()).float() / 255
        assert torch.equal(fitted, Inputs(16, None, channels, fit).tensor(tmp_path / name))
    found = pixels(tmp_path / name, 16, mode)
    assert (found.dtype, found.shape) == (np.uint8, (1, channels, 16, 16))
    whole = Inputs(16, None, channels).tensor(tmp_path / name)
    assert torch.equal(torch.from_numpy(found.copy()).float() / 255, whole)
    # And what the exported network makes of them before it normalises: to the last bit, cropped too.
    inputs = Inputs(16, 11, channels)
    seen: list[torch.Tensor] = []

    class Seen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return x.flatten(1)

    Product(Seen(), inputs)(torch.from_numpy(found.copy()))
    assert torch.equal(seen[0], inputs.tensor(tmp_path / name))
