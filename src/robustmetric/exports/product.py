"""What is exported: a network from 8-bit pixels to unit vectors, and what a program has to know of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError
from robustmetric.evaluation.identity import digest_of, versions
from robustmetric.training import Run
from robustmetric.training.parts import perturbs
from robustmetric.training.recipe import bare

INPUT, OUTPUT = "images", "embeddings"
"""What the input and the output of an exported network are called."""


class Product(nn.Module):
    """A `network` with all of its preprocessing that can be written down as operators.

    Pixels (N, C, S, S) with 8 bits, decoded and resized, to embeddings (N, D) of length 1: they are divided
    by 255, cut to what `inputs` crops, embedded and normalised. The network is copied to the CPU, in
    evaluation mode and without gradients.

    >>> product = Product(nn.Flatten(), Inputs(resize=6, crop=4, channels=1))
    >>> product(torch.full((2, 1, 6, 6), 255, dtype=torch.uint8))[0, :3]
    tensor([0.2500, 0.2500, 0.2500])
    """

    def __init__(self, network: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).cpu().eval().requires_grad_(False)
        for tensor in (*self.network.parameters(), *self.network.buffers()):
            tensor.data = tensor.data.contiguous()  # torch.export is not sure of tensors in another order
        self.channels, self.size = inputs.channels or 3, size_of(inputs)
        self.crop = inputs.crop or self.size
        self.begin = (self.size - self.crop) // 2

    def forward(self, images: Tensor) -> Tensor:
        """Embed `images` (N, C, S, S)."""
        middle = images.narrow(2, self.begin, self.crop).narrow(3, self.begin, self.crop)
        z: Tensor = self.network(middle.float() / 255).float()
        unit: Tensor = z / torch.linalg.vector_norm(z, dim=1, keepdim=True)
        return unit


def size_of(inputs: Inputs) -> int:
    """Return the height and width of the pixels that an exported network takes, of its `inputs`.

    Images that are not resized are cut before: their size is not known.

    >>> size_of(Inputs(resize=256, crop=224)), size_of(Inputs(crop=24))
    (256, 24)
    """
    size = inputs.resize or inputs.crop
    if size is None:
        raise UserError(f"{inputs} says nothing of the size of images: give resize or crop")
    return size


_FITS = {
    "squeeze": "resize to {} as Pillow does with BILINEAR",
    "crop": "cut the middle square, resized to {}, as Pillow's ImageOps.fit does with BILINEAR",
    "pad": "resize to fit into {} and pad with white, as Pillow's ImageOps.pad does with BILINEAR",
}


def describe(run: Run, dim: int) -> dict[str, Any]:
    """Return what stands in an exported file of a `run` with embeddings of length `dim`, as JSON's types.

    `before` says in order what is left to do with an image before it is given to the network.

    >>> from robustmetric.training import Recipe
    >>> run = Run(nn.Flatten(), Inputs(resize=8, channels=1), Recipe(defense="N/A[S]"), None)
    >>> about = describe(run, dim=64)
    >>> about["name"], about["input"]["shape"], about["before"][-1], about["eps"]
    ('c2f2 N/A[S]', ['batch', 1, 8, 8], 'resize to 8 x 8 as Pillow does with BILINEAR', None)
    """
    inputs, size, channels = run.inputs, size_of(run.inputs), run.inputs.channels or 3
    entries = bare(run.recipe.model_dump())
    colours = "RGB" if channels == 3 else "grey"
    before = [
        "decode, and turn upright by the EXIF orientation",
        "lay on white what is transparent",
        f"convert to {colours}" if channels == 3 else "convert to grey as Pillow does with L",
        _FITS[inputs.fit].format(f"{size} x {size}")
        if inputs.resize is not None
        else f"take the middle {size} x {size}",
    ]
    return {
        "schema": "robustmetric/export/1",
        "name": f"{entries['model']} {entries['defense']}",
        "sha256": digest_of(run.network),
        "weights": run.chosen,
        "defense": entries["defense"],
        "eps": run.recipe.eps if perturbs(run.recipe) else None,
        "dim": dim,
        "resize": inputs.resize,
        "fit": inputs.fit,
        "crop": inputs.crop,
        "channels": channels,
        "colours": colours,
        "before": before,
        "input": {"name": INPUT, "type": "uint8", "shape": ["batch", channels, size, size]},
        "output": {"name": OUTPUT, "type": "float32", "shape": ["batch", dim], "length": 1},
        "versions": versions("robustmetric", "torch"),
    }
