"""What a file of vectors says of them, and the digest of all that is in it, the same in every format."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robustmetric.data.cache import cores
from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError, brief
from robustmetric.files import digest_of_entries
from robustmetric.sphere import BrokenEmbeddingsError
from robustmetric.vectors.names import Names

FORMAT, VERSION = "robustmetric vectors", "1"
PIECE = 1 << 22  # bytes of vectors that have a digest of their own: threads share them
LONGEST = 1e-3
"""How far a squared length may be from 1."""

Floats = NDArray[np.float32]
Read = tuple["About", Names, Floats, str]
"""What a file says of its vectors, their names, the vectors (N, D) and the digest of all of it."""


@dataclass(frozen=True)
class About:
    """Where vectors come from.

    - `run`: the name of the run; `network`: the SHA-256 of its network.
    - `inputs`: what images were brought to.
    - `folder`: where the images were, as text.

    >>> About("c2f2 N/A[S]", "0" * 64, Inputs(resize=8, channels=1)).inputs_digest[:8]
    'ee2718a3'
    """

    run: str
    network: str
    inputs: Inputs
    folder: str = ""

    @property
    def inputs_digest(self) -> str:
        """The SHA-256 of resize, crop, channels and a fit that does not squeeze."""
        return digest_of_entries(self.inputs.entries())

    def entries(self) -> dict[str, str]:
        """Return all of it as texts, with the format and its version."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "run": self.run,
            "network": self.network,
            "inputs": json.dumps(self.inputs.entries(), sort_keys=True),
            "inputs_sha256": self.inputs_digest,
            "folder": self.folder,
        }

    @classmethod
    def read(cls, entries: Mapping[str, Any]) -> About:
        """Read what `entries` returned; anything else raises a ValueError that says why.

        >>> About.read(About("run", "0" * 64, Inputs()).entries()).inputs
        Inputs(resize=None, crop=None, channels=None, fit='squeeze')
        """
        if entries.get("format") != FORMAT:
            raise ValueError("it holds no vectors of robustmetric")
        if entries.get("version") != VERSION:
            raise ValueError(
                f"it is of version {brief(entries.get('version'))}, and this is of {VERSION}: take the "
                "robustmetric that wrote it, or embed again"
            )
        texts = [entries.get(name) for name in ("run", "network", "folder")]
        try:
            sizes = json.loads(str(entries.get("inputs")))
            inputs = Inputs(**sizes)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"its inputs are none ({error})") from None
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("run, network or folder is missing")
        run, network, folder = map(str, texts)
        found = cls(run, network, inputs, folder)
        if entries.get("inputs_sha256") != found.inputs_digest:
            raise ValueError("its inputs do not match their digest")
        return found


class Hashed:
    """The digest of vectors that come one after the other, piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._piece, self._room = hashlib.sha256(), PIECE

    def update(self, vectors: Floats) -> None:
        """Take in the next `vectors` (n, D)."""
        rest = np.ascontiguousarray(vectors).data.cast("B") if vectors.size else memoryview(b"")
        while rest:
            part, rest = rest[: self._room], rest[self._room :]
            self._piece.update(part)
            self._room -= len(part)
            if not self._room:
                self._pieces.append(self._piece.digest())
                self._piece, self._room = hashlib.sha256(), PIECE

    def digest(self) -> bytes:
        """Return the digest of all."""
        rest = [self._piece.digest()] if self._room < PIECE else []
        return hashlib.sha256(b"".join(self._pieces + rest)).digest()


def digest_of(about: About, shape: tuple[int, ...], vectors: bytes, names: Names) -> str:
    """Return the SHA-256 of all content: what is said, the `shape` and digest of vectors, and their names."""
    whole = hashlib.sha256(json.dumps([about.entries(), list(shape)], sort_keys=True).encode())
    whole.update(vectors)
    for part in (names.text, names.ends.astype("<i8", copy=False)):
        whole.update(hashlib.sha256(np.ascontiguousarray(part).data).digest())
    return whole.hexdigest()


def looked_at(vectors: Floats) -> tuple[bytes, float]:
    """Return the digest of `vectors` (N, D), as `Hashed` has it, and how far squared lengths are from 1.

    >>> digest, off = looked_at(np.float32([[1, 0], [0.6, 0.8]]))
    >>> off < 1e-6
    True
    """
    flat, dim, each = vectors.reshape(-1), vectors.shape[1], PIECE // 4

    def look(begin: int) -> tuple[bytes, float]:
        end = min(begin + each, len(flat))
        # A row that goes on in the next piece is looked at twice.
        return hashlib.sha256(flat[begin:end].data).digest(), _off(vectors[begin // dim : -(-end // dim)])

    with ThreadPoolExecutor(cores()) as pool:
        found = list(pool.map(look, range(0, len(flat), each)))
    digest = hashlib.sha256(b"".join(digest for digest, _ in found)).digest()
    return digest, max(off for _, off in found)


def check_length(vectors: Floats) -> float:
    """Return how far the squared lengths of `vectors` (N, D) are from 1; far ones raise an error.

    >>> check_length(np.float32([[3, 4]]))
    Traceback (most recent call last):
    ...
    robustmetric.sphere.BrokenEmbeddingsError: some vectors are not of length 1, or hold NaN: ...
    """
    each = max(1, PIECE // 4 // vectors.shape[1])
    return near(max(_off(vectors[begin : begin + each]) for begin in range(0, len(vectors), each)))


def _off(rows: Floats) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        off = float(np.abs(np.einsum("ij,ij->i", rows, rows) - 1).max())
    return math.inf if math.isnan(off) else off


def near(off: float) -> float:
    """Return how far squared lengths are from 1, `off`, if that is near.

    >>> near(1e-6)
    1e-06
    """
    if off > LONGEST:
        raise BrokenEmbeddingsError(
            "some vectors are not of length 1, or hold NaN: take what a run embeds, or divide each by its "
            "length"
        )
    return off


def check_sizes(shape: tuple[int, ...], names: Names) -> None:
    """Refuse a `shape` that is no (N, D) of at least one vector with a name each."""
    if len(shape) != 2 or 0 in shape:
        raise UserError(f"vectors have shape {tuple(shape)}; they must be (N, D), a row for each image")
    if len(names) != shape[0]:
        raise UserError(f"there are {shape[0]} vectors and {len(names)} names; each needs one")
