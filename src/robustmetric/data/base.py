"""What every data set gives: images, as files or as pixels, with their labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Split = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """One split of a data set: N images of known classes, either as files or as pixels in memory.

    `labels` (N,) count the classes of this split from 0, in the order of `classes`; `pixels` are
    (N, H, W, C) with 8 bits.

    >>> import torch
    >>> grey = np.zeros((2, 8, 8, 1), dtype=np.uint8)
    >>> len(ImageSet("tiny", "train", torch.tensor([0, 0]), ("zero",), pixels=grey))
    2
    """

    name: str
    split: Split
    labels: Tensor
    classes: tuple[str, ...]
    files: tuple[Path, ...] | None = None
    pixels: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        if (self.files is None) == (self.pixels is None):
            raise ValueError("an image set holds either files or pixels")
        if len(self) != len(self.labels):
            raise ValueError(
                f"{self.name} has {len(self)} images and {len(self.labels)} labels in its {self.split} split;"
                " each image needs one"
            )

    def __len__(self) -> int:
        return len(self.files if self.files is not None else self.pixels)  # type: ignore[arg-type]
