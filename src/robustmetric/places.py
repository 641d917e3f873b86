"""Where wanted images stand in a ranking: exact ranks, counted or sorted, whichever is faster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from robustmetric.squares import keys_of, keys_of_row, positions_of, squares_of

# Up to so many images it is faster to count what is nearer than each; above, to sort.
_FEW = 10


def places(near: Tensor, row: Tensor, wanted: Tensor, relevant: Tensor, pool: ThreadPoolExecutor) -> Tensor:
    """Return the ranks (B, R) of the keys of `wanted` images among the squares `near[row]` (B, N), ascending.

    `row` (B,) are the queries' rows of `near`. Of the keys (B, W) each query's `relevant` (B,) lowest count;
    R is the largest of these. The threads of the `pool` share the queries. The keys may be sorted in place.

    >>> near, row, wanted = torch.tensor([[0.5, 2.0, 1.0]]), torch.tensor([0]), torch.tensor([[1, 2]])
    >>> with ThreadPoolExecutor(1) as pool:
    ...     places(near, row, keys_of(near[row].gather(1, wanted), wanted), torch.tensor([2]), pool)
    tensor([[2, 3]])
    """
    if near.device.type != "cpu":
        return places_by_keys(near[row], wanted)[:, : int(relevant.max())]
    place = torch.ones(len(row), int(relevant.max()), dtype=torch.long)
    squares, threads = near.numpy(), torch.get_num_threads()
    tasks = list(zip(row.tolist(), relevant.tolist(), wanted.numpy(), place.numpy(), strict=True))

    def fill(part: int) -> None:
        for i, count, keys, into in tasks[part::threads]:
            keys.sort()
            into[:count] = places_of_one(squares[i], keys[:count])

    list(pool.map(fill, range(threads)))
    return place


def places_of_one(near: npt.NDArray[np.float32], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the ranks (R,) of the `wanted` keys (R,), ascending, among a query's squares `near` (N,).

    numpy's vectorised sort is several times torch's, and takes half as long for squares as for keys: keys are
    sorted only if many images are equally far.

    >>> near = np.float32([0.5, 2, 2])
    >>> places_of_one(near, keys_of_row(near)[1:]).tolist()
    [2, 3]
    """
    square = squares_of(wanted)
    if len(wanted) <= _FEW:
        place, unsure = np.empty(len(wanted), np.int64), np.arange(len(wanted))
    else:
        ordered = np.sort(near)
        place = ordered.searchsorted(square) + 1
        # If the next is as near, the positions decide.
        unsure = np.flatnonzero(ordered.take(place, mode="clip") == square)
        if len(unsure) > _FEW:
            keys = keys_of_row(near)
            keys.sort()
            return keys.searchsorted(wanted) + 1
    for i in unsure:
        limit, position = square[i], positions_of(wanted[i])
        place[i] = np.count_nonzero(near[:position] <= limit) + np.count_nonzero(near[position:] < limit) + 1
    return place


def places_by_keys(near: Tensor, wanted: Tensor) -> Tensor:
    """Return the ranks (B, R), ascending, of `wanted` keys (B, R) in squares `near` (B, N), to suit a GPU.

    >>> near = torch.tensor([[0.5, 2.0, 2.0]])
    >>> places_by_keys(near, keys_of(near, torch.arange(3))[:, 1:])
    tensor([[2, 3]])
    """
    keys = keys_of(near, torch.arange(near.shape[1], device=near.device))
    return torch.searchsorted(keys.sort(dim=1).values, wanted.sort(dim=1).values).add_(1)
