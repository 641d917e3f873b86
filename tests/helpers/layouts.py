"""Writers of tiny data sets in the original layouts, for more than one room of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def write_image(path: Path, seed: int, size: tuple[int, int] = (20, 16)) -> None:
    """Write a small colour image of noise, in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


def write_cub(root: Path, counts: Sequence[int] = (3, 2, 2, 3)) -> Path:
    """Write CUB-200-2011 with so many images for each class."""
    root.mkdir(parents=True, exist_ok=True)
    names = [f"{number:03}.Bird_{number}" for number in range(1, len(counts) + 1)]
    images = [
        (number, f"{names[number - 1]}/Bird_{number}_{i:04}.jpg")
        for number, count in enumerate(counts, start=1)
        for i in range(count)
    ]
    for seed, (_, path) in enumerate(images):
        write_image(root / "images" / path, seed)
    files: dict[str, Sequence[object]] = {
        "images.txt": [path for _, path in images],
        "image_class_labels.txt": [number for number, _ in images],
        "train_test_split.txt": [i % 2 for i in range(len(images))],
        "bounding_boxes.txt": ["1.0 1.0 8.0 8.0" for _ in images],
        "classes.txt": names,
    }
    for file, lines in files.items():
        (root / file).write_text("".join(f"{i} {line}\n" for i, line in enumerate(lines, start=1)))
    return root
