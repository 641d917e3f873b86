"""Exact search: the nearest of many vectors on the unit sphere, in the order that all rankings have.

A product in float32 tells each distance within a bound. Whatever may be among the nearest by that is measured
again as `robustmetric.squares` does it, so that ranks and ties are those of every other ranking: by distance,
and then by position.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robustmetric.squares import keys_of, positions_of, square_distance, squares_of
from robustmetric.vectors.content import Floats

_NONE = torch.iinfo(torch.long).max  # behind every key
_ROWS = 256  # queries at once
_NUMBERS = 1 << 22  # of the vectors at once
_AGAIN = 1 << 17  # numbers that are measured again at once


def nearest(
    z: Floats, off: float, queries: Floats, off_queries: float, k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return positions and squared distances (Q, k) of the k nearest of `z` (N, D) to `queries` (Q, D).

    `off` and `off_queries` say how far their squared lengths are from 1 at most; `k` is at most N. What is
    allocated does not depend on N.

    >>> z = np.float32([[1, 0], [0, 1], [0.6, 0.8]])
    >>> nearest(z, 0.0, z[:1], 0.0, 2)
    (array([[0, 2]]), array([[0. , 0.8]], dtype=float32))
    """
    rows, bound = max(1, min(_ROWS, _NUMBERS // k)), _bound(z.shape[1], off + off_queries)
    parts = [queries[begin : begin + rows] for begin in range(0, len(queries), rows)]
    keys = torch.cat([_best(z, part, k, bound) for part in parts])
    return positions_of(keys).numpy(), squares_of(keys.numpy())


def _bound(dim: int, off: float) -> float:
    """Return how far |x|² + |y|² − 2⟨x, y⟩ is from 2 − 2p at most, with p the product in float32."""
    unit = 2.0**-24
    # A product of D numbers, in whatever order, is off by D units of |x|·|y| < 1.01; squared lengths by as
    # much, which were summed in float32 too. The rest is for what is rounded once.
    return off + 1.01 * 4 * dim * unit + 16 * unit


def _best(z: Floats, queries: Floats, k: int, bound: float) -> Tensor:
    """Return the keys (Q, k) of the nearest, ascending."""
    best = torch.full((len(queries), k), _NONE)
    width = max(1, _NUMBERS // z.shape[1])
    for begin in range(0, len(z), width):
        block = z[begin : begin + width]
        product = queries @ block.T
        least = _least(best[:, -1], bound)
        row, column = np.nonzero(product >= least[:, None])
        if len(row) > 8 * k * len(queries):
            # The k-th of the block leaves few, but for those that are as near.
            last = min(k, len(block))
            kth = np.partition(product, -last, axis=1)[:, -last]
            row, column = np.nonzero(product >= np.maximum(least, kth - np.float32(bound))[:, None])
        if len(row):
            best = _merged(best, torch.from_numpy(row), _keys(queries, block, row, column, begin))
    return best


def _least(keys: Tensor, bound: float) -> Floats:
    """Return the least product (Q,) of what may be as near as the k-th of so far."""
    square = squares_of(keys.numpy()).astype(np.float64)
    # Fewer than k are found: the bits of the last key are no number.
    square[keys.numpy() == _NONE] = np.inf
    return (1 - (square + bound) / 2).astype(np.float32)


def _keys(
    queries: Floats, block: Floats, row: NDArray[np.int64], column: NDArray[np.int64], begin: int
) -> Tensor:
    """Measure pairs again: queries `row` and vectors `column` of the block that begins at `begin`."""
    each = max(1, _AGAIN // block.shape[1])
    found = []
    for start in range(0, len(row), each):
        some = slice(start, start + each)
        pair = torch.from_numpy(queries[row[some]]), torch.from_numpy(block[column[some]])
        found.append(keys_of(square_distance(*pair), torch.from_numpy(column[some] + begin)))
    return torch.cat(found)


def _merged(best: Tensor, row: Tensor, keys: Tensor) -> Tensor:
    """Merge new keys (n,) of queries `row` (n,), ascending, into the best (Q, k)."""
    count = torch.bincount(row, minlength=len(best))
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    fresh = torch.full((len(best), int(count.max())), _NONE)
    fresh[row, place] = keys
    return torch.cat([best, fresh], 1).sort(1).values[:, : best.shape[1]]
