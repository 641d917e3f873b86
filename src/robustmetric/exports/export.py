"""Exporting a run: its file is written, read again and compared before it counts."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from robustmetric.data.pairs import ImageArray
from robustmetric.errors import UserError
from robustmetric.exports.formats import FORMATS, SUFFIXES, Program, first_line
from robustmetric.exports.product import Product, describe
from robustmetric.files import write_atomically, writing
from robustmetric.registry import unknown
from robustmetric.sphere import ROUNDING, BrokenEmbeddingsError, embed
from robustmetric.training import Run

FARTHEST = 1e-3
"""A distance of embeddings that no rounding of a network accounts for: one that is random goes farther."""

_NOISE = 4  # images of noise that a file is tried on


@dataclass(frozen=True)
class Written:
    """A file that was exported, as `export` returns it.

    - `path`: where it is.
    - `to`: its format.
    - `difference`: the largest distance of its embeddings from those of the run, over all images tried.
    - `allowed`: the distance that single precision accounts for.
    - `about`: what stands in the file, as `robustmetric.exports.describe` has it.
    """

    path: Path
    to: str
    difference: float
    allowed: float
    about: dict[str, Any]


def export(run: Run, path: str | os.PathLike[str], *, to: str | None = None, force: bool = False) -> Written:
    """Write the network of a `run`, with its preprocessing, to the file `path`.

    The network in the file takes pixels (N, C, S, S) with 8 bits, decoded and resized, N as it comes, and
    returns embeddings (N, D) of length 1. `to` is ``"onnx"``, ``"torchscript"`` or ``"exported"``
    (torch.export), by default what the name ends in: .onnx, .pt or .ts, .pt2. A file that is there already is
    refused unless `force` says to replace it.

    The file is read again and tried on noise, on black and on white, on one image and on several: if its
    embeddings are farther from the run's than rounding accounts for, that is an error, and no file is left.

    >>> import tempfile
    >>> from torch import nn
    >>> from robustmetric.data import Inputs
    >>> from robustmetric.training import Recipe
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    >>> run = Run(network, Inputs(resize=8, channels=1), Recipe(), None)  # or rm.load_run("runs/mine")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = export(run, Path(folder, "network.pt2"))
    >>> done.about["input"]["shape"], done.difference <= done.allowed
    (['batch', 1, 8, 8], True)
    """
    place = Path(path).expanduser()
    meant = SUFFIXES.get(place.suffix.lower(), to)
    if (to := to or meant) is None:
        known = ", ".join(f"{suffix} ({name})" for suffix, name in SUFFIXES.items())
        raise UserError(
            f"{place.name} ends in {place.suffix!r}, as no format does: give a name that ends in {known}, or "
            f"one of the formats {', '.join(FORMATS)}",
            parameter="to",
        )
    if to not in FORMATS:
        raise UserError(unknown("format", to, FORMATS), parameter="to")
    kind = FORMATS[to]
    _check_place(place, force)
    if meant != to:
        raise UserError(
            f"{place.name} is a name for the format {meant}, and {to} was asked for: give --to {meant}, or "
            "another name",
            parameter="to",
        )
    kind.check()
    product = Product(run.network, run.inputs).eval()
    images, wanted = _samples(run, product)
    allowed = _allowed(run, product, images, wanted)
    about = describe(run, wanted.shape[1])
    content = kind.content(product, images[:2], about)
    difference = 0.0

    def tried(file: BinaryIO) -> None:
        nonlocal difference
        file.write(content)
        file.flush()
        difference = _difference(kind.program(Path(file.name)), images, wanted)
        if not difference <= allowed:
            raise UserError(
                f"the network in the file is not that of the run: its embeddings differ by up to "
                f"{difference:.2g}, and rounding accounts for {allowed:.2g}; no file was left: give another "
                "format, and look for what is random or depends on the values of the image",
                parameter="to",
            )

    with writing(place, "then run it again"):
        write_atomically(place, tried)
    return Written(place, to, difference, allowed, about)


def _check_place(place: Path, force: bool) -> None:
    if place.is_dir():
        raise UserError(f"{place} is a folder: give the name of a file", parameter="out")
    if place.exists() and not force:
        raise UserError(
            f"{place} is there already: give another file, or replace it by --force (in Python, force=True)",
            parameter="out",
        )
    if not place.parent.is_dir():
        raise FileNotFoundError(
            f"there is no folder {place.parent} to write {place.name} in; create it first"
        )


def _samples(run: Run, product: Product) -> tuple[Tensor, Tensor]:
    """Return the pixels (N, C, S, S) that a file is tried on, and the run's embeddings of them."""
    shape = (product.channels, product.size, product.size)
    noise = torch.randint(
        256, (_NOISE, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images, found = [noise], [_embedded(run, product.network, noise)]
    for level in (0, 255):
        edge = torch.full((1, *shape), level, dtype=torch.uint8)
        try:
            found.append(_embedded(run, product.network, edge))
        except BrokenEmbeddingsError:  # it has no direction, there or here
            continue
        images.append(edge)
    return torch.cat(images), torch.cat(found)


def _embedded(run: Run, network: nn.Module, pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Embed pixels as an evaluation of the run does."""
    crop = run.inputs.crop if run.inputs.resize is not None else None
    with torch.no_grad():
        return embed(network, ImageArray(pixels.permute(0, 2, 3, 1).numpy(), crop)[:].to(dtype))


def _allowed(run: Run, product: Product, images: Tensor, wanted: Tensor) -> float:
    """Return how far apart two programs of the network may come by rounding alone.

    Everywhere else embeddings within ROUNDING of each other are those of one image. Where the network's own
    rounding is more, as the same in double precision shows, two programs that each round twice as much in
    another order of their sums are four times as far apart. Beyond FARTHEST it is not rounding.
    """
    try:
        exact = _embedded(run, copy.deepcopy(product.network).double(), images, torch.float64)
    except Exception:  # a network that takes single precision alone
        return ROUNDING
    return min(max(ROUNDING, 4 * float((wanted - exact).norm(dim=1).max())), FARTHEST)


def _difference(program: Program, images: Tensor, wanted: Tensor) -> float:
    """Return the largest distance of a program's embeddings, of one image and of several, to those wanted."""
    apart = []
    for rows in (slice(0, 1), slice(len(images) - 1, None), slice(0, 3), slice(None)):
        part, expected = images[rows], wanted[rows]
        try:
            with torch.no_grad():
                z = program(part)
        except Exception as error:
            raise UserError(
                f"the network in the file fails on {len(part)} images ({first_line(error)}); no file was "
                "left: let the network take any number of images",
                parameter="to",
            ) from error
        if z.shape != expected.shape:
            raise UserError(
                f"the network in the file returns {tuple(z.shape)} for {len(part)} images, not "
                f"{tuple(expected.shape)}; no file was left: let the network take any number of images",
                parameter="to",
            )
        apart.append((z.double() - expected.double()).norm(dim=1))
    return float(torch.cat(apart).max())  # NaN if any is
