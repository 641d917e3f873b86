"""Pictures that are looked for in larger ones."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

Pixels = NDArray[np.uint8]


def blown_up(image: Tensor) -> Pixels:
    """Repeat each pixel by a loop, so often that the picture has 112 at most."""
    pixels = (image * 255).round().to(torch.uint8).numpy()
    _, height, width = pixels.shape
    times = 112 // max(height, width)
    large = np.zeros((height * times, width * times, 3), np.uint8)
    for y in range(height * times):
        for x in range(width * times):
            large[y, x] = pixels[:, y // times, x // times]
    return large


def places_of(whole: Image.Image, part: Pixels) -> list[tuple[int, int]]:
    """Find all places (x, y) of a part in a picture."""
    pixels, part = (np.asarray(each).astype(int) @ [1, 256, 256**2] for each in (whole, part))
    height, width = part.shape
    lines, columns = pixels.shape[0] - height + 1, pixels.shape[1] - width + 1
    fits = np.ones((lines, columns), bool)
    for y, x in ((0, 0), (0, width - 1), (height - 1, 0), (height - 1, width - 1)):
        fits &= pixels[y : y + lines, x : x + columns] == part[y, x]
    places = [(int(x), int(y)) for y, x in zip(*np.nonzero(fits), strict=True)]
    return [(x, y) for x, y in places if np.array_equal(pixels[y : y + height, x : x + width], part)]
