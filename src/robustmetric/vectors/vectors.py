"""Vectors of images with the names of their files: to be searched, exactly or by an index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from robustmetric.errors import UserError, brief, is_number
from robustmetric.squares import check_embeddings
from robustmetric.training.trained import Run
from robustmetric.vectors import formats
from robustmetric.vectors.content import About, Floats, check_length, check_sizes
from robustmetric.vectors.exact import nearest
from robustmetric.vectors.names import Names

K = 10
"""How many are found, unless told otherwise."""

_BLOCK = 1024  # vectors that are written at once


def check_k(k: int) -> None:
    """Refuse a `k` that is no number of places.

    >>> check_k(0)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: k must be a whole number of at least 1, not 0
    """
    if not is_number(k, Integral) or k < 1:
        raise UserError(f"k must be a whole number of at least 1, not {brief(k)}", parameter="k")


class Found(NamedTuple):
    """What is nearest to each of Q queries, as `search` returns it.

    `position` (Q, K) are places among the vectors, the nearest first, and `distance` (Q, K) how far they are
    on the unit sphere, from 0 to 2. Where an index found fewer than K, they end with −1 and infinity.
    """

    position: Tensor
    distance: Tensor


class Vectors:
    """N vectors of length 1, `z` (N, D) in float32, with the `files` that they are of.

    `load_vectors` returns them as they are in a file, mapped into memory and not copied; `path` is that
    file, `sha256` the digest of all that is in it, and `about` says where they come from. `off` is how far
    their squared lengths are from 1 at most; it is looked at if it is not given.

    >>> vectors = Vectors(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), ["a.png", "b.png", "c.png"])
    >>> found = vectors.search(torch.tensor([[0.0, 1.0]]), k=2)
    >>> [vectors.files[place] for place in found.position[0]], found.distance
    (['b.png', 'c.png'], tensor([[0.0000, 0.6325]]))
    """

    def __init__(
        self,
        z: Tensor,
        files: Sequence[str],
        about: About | None = None,
        *,
        path: Path | None = None,
        sha256: str | None = None,
        off: float | None = None,
    ) -> None:
        check_embeddings(z, "z")
        if z.dtype != torch.float32 or z.device.type != "cpu":
            raise UserError(
                f"z is {z.dtype} on {z.device}; it must be float32 on the CPU: use z.float().cpu()"
            )
        self.z = z.contiguous()
        self.files = files if isinstance(files, Names) else Names.of(files)
        check_sizes(tuple(z.shape), self.files)
        self.about, self.path, self.sha256 = about, path, sha256
        self._given = off

    def __len__(self) -> int:
        return len(self.z)

    def __repr__(self) -> str:
        return f"Vectors({len(self):,} of {self.z.shape[1]}{'' if self.path is None else f', {self.path}'})"

    @cached_property
    def off(self) -> float:
        """How far squared lengths are from 1 at most; vectors that are not of length 1 are refused."""
        return check_length(self.z.numpy()) if self._given is None else self._given

    def search(self, z: Tensor, k: int = K) -> Found:
        """Return the `k` vectors, or all if there are fewer, that are nearest to each of `z` (Q, D).

        They are ranked as everywhere: by distance, and by position where that is equal. `z` are vectors of
        length 1, as `robustmetric.training.Run.embed` returns them, of the same network; see
        `check`. A search reads all vectors once, in blocks.
        """
        queries, off = self.queries(z, k)
        position, square = nearest(self.z.numpy(), self.off, queries, off, min(k, len(self)))
        return Found(torch.from_numpy(position), torch.from_numpy(np.sqrt(square)))

    def queries(self, z: Tensor, k: int) -> tuple[Floats, float]:
        """Return queries `z` (Q, D) as an array, and how far their squared lengths are from 1.

        What cannot be searched for, or a `k` that is no number of places, is refused.
        """
        check_k(k)
        check_embeddings(z, "z")
        if z.shape[1] != self.z.shape[1]:
            raise UserError(
                f"z has vectors of {z.shape[1]} numbers, and these have {self.z.shape[1]}: embed both with "
                "one network"
            )
        found = np.ascontiguousarray(z.detach().to("cpu", torch.float32).numpy())
        return found, check_length(found)

    def check(self, run: Run) -> None:
        """Refuse a `run` whose network, or preprocessing, is not the one that the vectors are of."""
        if self.about is None:
            raise UserError("these vectors do not say which network they are of: load them from a file")
        where = "this" if self.path is None else str(self.path)
        digest = run.digest
        if digest != self.about.network:
            raise UserError(
                f"{where} holds vectors of another network: they are of {self.about.run} (SHA-256 "
                f"{self.about.network[:12]}), and the run is {run.name} (SHA-256 {digest[:12]}); give the "
                "run, and the weights, that they were made with, or embed the images again"
            )
        if run.inputs != self.about.inputs:
            raise UserError(
                f"{where} holds vectors of images that were brought to {self.about.inputs}, and the run "
                f"takes {run.inputs}: embed the images again"
            )


def load_vectors(path: Path | str) -> Vectors:
    """Load the vectors that `robustmetric embed` wrote to `path`, and check them against their digest.

    A .safetensors or .npy file is mapped into memory: it may be larger than that. A .parquet file is read.

    >>> import tempfile
    >>> from robustmetric.data import Inputs
    >>> from robustmetric.vectors import save_vectors
    >>> vectors = Vectors(torch.eye(3), ["a.png", "b.png", "c.png"], About("mine", "0" * 64, Inputs()))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_vectors(vectors, Path(folder, "vectors.safetensors"))
    ...     load_vectors(Path(folder, "vectors.safetensors")).search(torch.eye(3)[1:2], k=1).position
    tensor([[1]])
    """
    path = Path(path).expanduser()
    content = formats.read(path)
    return Vectors(
        torch.from_numpy(content.z),
        content.names,
        content.about,
        path=path,
        sha256=content.sha256,
        off=content.off,
    )


def save_vectors(vectors: Vectors, path: Path | str, *, force: bool = False) -> None:
    """Write `vectors` to the file `path`: .safetensors, .npy or .parquet; see `load_vectors`.

    A file that is there is replaced only with `force`.

    >>> save_vectors(Vectors(torch.eye(2), ["a", "b"]), "vectors.npy")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: these vectors do not say which network they are of: make them with an About
    """
    if vectors.about is None:
        raise UserError("these vectors do not say which network they are of: make them with an About")
    path = Path(path).expanduser()
    formats.check_free(path, force)
    blocks = (part.numpy() for part in vectors.z.split(_BLOCK))
    formats.format_of(path).write(path, vectors.about, vectors.files, vectors.z.shape[1], blocks)
