"""Squared distances to rank by, and the order of what is equally far: the same on every processor.

Whatever the block, the batch or the threads, a ranking is by distance and then by position.

A matrix product rounds in an order of its own on each processor, and copies of an image by their place in it.
It tells the distance of two points within a bound that holds for every order. Where the ends of that
interval round to different float32, the distance is summed again in one fixed order. So each distance is that
of the fixed order, rounded once: copies of an image are equally far, and ties go by position.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from robustmetric.errors import UserError, describe
from robustmetric.sphere import BrokenEmbeddingsError

SAME = 1e-14
"""Squares up to this share of the largest squared length count as 0: the points are the same."""

# The part of a key that is the position.
_POSITION = 2**32 - 1
# More queries at once make the product no faster.
MOST_ROWS = 256
# Numbers of the gallery in double precision at once, and images: what is small stays in the cache.
_BLOCK, _WIDTH = 2**20, 2048
# Numbers that are summed again at once.
_AGAIN = 2**17


@torch.no_grad()
def distances(queries: Tensor, gallery: Tensor) -> Tensor:
    """Return squared distances to rank by: `queries` (B, D) and `gallery` (N, D) to (B, N), in float32.

    Each is the sum in double precision in a fixed order, rounded once. Squares up to 1e-14 of the gallery's
    largest squared length, to the nearest power of two, are 0. On a device without double precision they
    are computed on the CPU.

    >>> distances(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]]))
    tensor([[0., 2., 4.]])
    """
    check_embeddings(gallery, "the gallery")
    check_queries(queries, gallery)
    if gallery.device.type == "mps":
        return distances(queries.cpu(), gallery.cpu()).to(gallery.device)
    squares = DistanceKernel(gallery, min(len(queries), MOST_ROWS))
    lengths = squares.lengths(queries, "queries")
    longest = float(squares.gallery_lengths.max().sqrt() + lengths.max().sqrt())
    if longest**2 > torch.finfo(torch.float32).max:
        raise UserError(
            f"embeddings are up to {longest:.3g} apart and the square of that is no float32: divide queries "
            "and gallery by the largest length"
        )
    result = torch.empty(len(queries), len(gallery), dtype=torch.float32, device=gallery.device)
    for begin, end in blocks(len(queries), MOST_ROWS):
        squares.write(result[begin:end], queries[begin:end], lengths[begin:end], 1.0)
    return result


@torch.no_grad()
def square_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return squares on the unit sphere row by row, `x` and `y` (…, D) to (…,), exactly as `distances`.

    >>> z = torch.nn.functional.normalize(torch.randn(3, 7))
    >>> bool(square_distance(z[:1], z).equal(distances(z[:1], z)[0]))
    True
    """
    if x.device.type == "mps":
        return square_distance(x.cpu(), y.cpu()).to(x.device)
    return torch.threshold_(_sum_of_squares(x, y).float(), SAME, 0.0)


def _sum_of_squares(x: Tensor, y: Tensor) -> Tensor:
    """Sum (x − y)² over the last axis in double precision, in the same order on every processor."""
    term = x.double().sub(y).square_()
    width = term.shape[-1]
    # Each step adds numbers one by one to others: there is nothing to put in another order.
    while width > 1:
        half = width // 2
        term[..., :half] += term[..., half : 2 * half]
        if width % 2:
            term[..., half] = term[..., 2 * half]
        width = half + width % 2
    return term[..., 0]


class DistanceKernel:
    """Squared distances to a `gallery` (N, D), block by block, through buffers that are allocated once.

    The buffers hold `rows` queries at a time. Points that lie together are taken relative to their centre:
    the nearer it is, the less is rounded.

    >>> squares = DistanceKernel(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), rows=1)
    >>> out, query = torch.empty(1, 2), torch.tensor([[1.0, 0.0]])
    >>> squares.write(out, query, squares.lengths(query, "queries"), 1.0)
    >>> out
    tensor([[0., 2.]])
    """

    def __init__(self, gallery: Tensor, rows: int) -> None:
        images, dim = gallery.shape
        width = block_width(images, dim)
        self.gallery = gallery
        # Behind the coordinates of a point are its squared length and 1, or 1 and its squared length: the
        # product of two is their squared distance.
        self.left, self.right = (gallery.new_empty(n, dim + 2, dtype=torch.float64) for n in (rows, width))
        self.square = gallery.new_empty(rows * width, dtype=torch.float64)
        self.high = gallery.new_empty(rows * width, dtype=torch.float32)
        self.centre: Tensor | None = None
        self.gallery_lengths = self.lengths(gallery, "the gallery")
        longest = float(self.gallery_lengths.max())
        # To a power of two, which parts of a gallery on the unit sphere agree on, however they are rounded.
        self.least = SAME * 2.0 ** round(math.log2(longest)) if longest else 0.0
        middle = gallery[:: max(1, images // 256)].mean(0).double()  # of some: any point will do
        if 0.5 * longest < float(middle.square().sum()) < math.inf:
            self.centre = middle
            self.gallery_lengths = self.lengths(gallery, "the gallery")
        # A product of D numbers is off by D units of |x|·|y| at most, in whatever order, and so are lengths;
        # the rest is for the centre, the last additions and the sum in the fixed order.
        self.rounding = (2 * dim + 60) * torch.finfo(torch.float64).eps / 2

    def _relative(self, embeddings: Tensor, into: Tensor) -> Tensor:
        """Write embeddings (n, D), relative to the centre if there is one."""
        into.copy_(embeddings)
        return into if self.centre is None else into.sub_(self.centre)

    def lengths(self, embeddings: Tensor, what: str) -> Tensor:
        """Return squared lengths (N,) of `embeddings` from the centre; an error calls them `what`."""
        lengths = torch.empty(len(embeddings), dtype=self.right.dtype, device=self.right.device)
        dim = embeddings.shape[1]
        for begin, end in blocks(len(embeddings), len(self.right)):
            right = self._relative(embeddings[begin:end], self.right[: end - begin, :dim])
            torch.sum(right.square_(), dim=1, out=lengths[begin:end])
        bad = int((~lengths.isfinite()).sum())
        if bad:
            raise BrokenEmbeddingsError(
                f"{bad} of {len(embeddings)} embeddings of {what} hold NaN, infinity or numbers whose "
                "squares are infinite: the network has diverged or its weights are damaged; go back to its "
                "last good weights"
            )
        return lengths

    def write(self, out: Tensor, queries: Tensor, lengths: Tensor, scale: float) -> None:
        """Write the distances of `queries` (B, D), times `scale`, into `out` (B, N), a float32 tensor.

        `lengths` (B,) are those that the method of this name returns; `scale` is a power of two.
        """
        bound = self._prepare(queries, lengths, scale)
        for begin, end in blocks(len(self.gallery), len(self.right)):
            self._block(out[:, begin:end], queries, bound, begin, scale)

    def write_mutual(self, out: Tensor, scale: float) -> None:
        """Write distances within the gallery, times `scale`, a power of two, into `out` (N, N), float32."""
        tiles = blocks(len(self.gallery), len(self.left))
        for i, (top, bottom) in enumerate(tiles):
            queries = self.gallery[top:bottom]
            bound = self._prepare(queries, self.gallery_lengths[top:bottom], scale)
            for begin, end in tiles[i:]:
                tile = out[top:bottom, begin:end]
                self._block(tile, queries, bound, begin, scale, mutual=begin == top)
                if begin > top:
                    out[begin:end, top:bottom] = tile.T

    def _prepare(self, queries: Tensor, lengths: Tensor, scale: float) -> Tensor:
        """Fill the left factors of (B, D) queries; return how far off their squares may be: (B, 1)."""
        left, dim = self.left[: len(queries)], queries.shape[1]
        self._relative(queries, left[:, :dim]).mul_(-2 * scale)
        bound = self.rounding * (lengths.sqrt() + self.gallery_lengths.max().sqrt()).square_()
        # Less the bound, so that the product is the lower end.
        left[:, dim] = (lengths - bound) * scale
        left[:, dim + 1] = scale
        return (2 * scale) * bound[:, None]

    def _block(
        self, out: Tensor, queries: Tensor, bound: Tensor, begin: int, scale: float, mutual: bool = False
    ) -> None:
        """Write the distances of prepared (B, D) queries to the gallery's next n, `mutual` ones: (B, n)."""
        images, dim = self.gallery[begin : begin + out.shape[1]], queries.shape[1]
        right = self.right[: len(images)]
        self._relative(images, right[:, :dim])
        right[:, dim] = 1
        right[:, dim + 1] = self.gallery_lengths[begin : begin + len(images)]
        square, high = (b[: out.numel()].view(out.shape) for b in (self.square, self.high))
        torch.mm(self.left[: len(queries)], right.T, out=square)
        out.copy_(square)
        high.copy_(square.add_(bound))
        if mutual:
            for end in (out, high):
                end.fill_diagonal_(0)
        # Few rows have anything that is not settled: only those are searched.
        some = high.sub_(out).amax(1).nonzero()[:, 0]
        row, column = high[some].nonzero(as_tuple=True)
        row = some[row]
        for part in torch.arange(len(row), device=row.device).split(max(1, _AGAIN // dim)):
            i, j = row[part], column[part]
            out[i, j] = (_sum_of_squares(queries[i], images[j]) * scale).float()
        torch.threshold_(out, self.least * scale, 0.0)


Keys = TypeVar("Keys", Tensor, npt.NDArray[np.int64])


def keys_of(square: Tensor, position: Tensor) -> Tensor:
    """Return keys that are ordered as the ranking is: by distance, and by position where that is equal.

    The bits of a positive float are in the order of its value: those of each float32 `square` (…, N) stand
    above its image's `position`, (…, N) or (N,). All keys of a row differ.

    >>> keys_of(torch.tensor([2.0, 1.0, 2.0]), torch.arange(3)).argsort()
    tensor([1, 0, 2])
    """
    return square.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(position)


def keys_of_row(square: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the keys (N,) of a whole row `square` (N,), as `keys_of` does, without torch's threads.

    >>> keys_of_row(np.float32([2, 1, 2])).argsort().tolist()
    [1, 0, 2]
    """
    keys = square.view(np.int32).astype(np.int64)
    keys <<= 32
    keys |= np.arange(len(square))
    return keys


def squares_of(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return the squares in `keys` (…,).

    >>> squares_of(keys_of_row(np.float32([0.5, 4]))).tolist()
    [0.5, 4.0]
    """
    return (keys >> 32).astype(np.int32).view(np.float32)


def positions_of(keys: Keys) -> Keys:
    """Return the positions in `keys` (…,).

    >>> positions_of(keys_of(torch.tensor([0.5, 4.0]), torch.tensor([7, 3])))
    tensor([7, 3])
    """
    return keys & _POSITION


def block_width(images: int, dim: int) -> int:
    """Return how many of `images` of length `dim` to compare at once: at most 2,048, and 8 MB of doubles.

    >>> block_width(10_000, 512), block_width(100, 512)
    (2048, 100)
    """
    return min(images, max(16, min(_WIDTH, _BLOCK // dim)))


def blocks(images: int, width: int) -> list[tuple[int, int]]:
    """Return the beginnings and ends of equal blocks of at most `width` that cover N `images`.

    >>> blocks(10, 4)
    [(0, 3), (3, 6), (6, 10)]
    """
    count = -(-images // width)
    return [(images * i // count, images * (i + 1) // count) for i in range(count)]


def check_embeddings(embeddings: Tensor, what: str) -> None:
    """Reject `embeddings` that are not an (N, D) tensor of floats; `what` is their name in the message.

    >>> check_embeddings(torch.zeros(3), "the gallery")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the gallery must be floats of shape (N, D), a row for each image, not float32 ...
    """
    if not (
        isinstance(embeddings, Tensor)
        and embeddings.is_floating_point()
        and embeddings.ndim == 2
        and 0 not in embeddings.shape
    ):
        raise UserError(
            f"{what} must be floats of shape (N, D), a row for each image, not {describe(embeddings)}"
        )


def check_queries(queries: Tensor, gallery: Tensor) -> None:
    """Reject `queries` that cannot be compared with a `gallery` (N, D).

    >>> check_queries(torch.zeros(1, 3), torch.zeros(2, 4))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: queries have shape (1, 3) and the gallery (2, 4); their rows must be equally ...
    """
    check_embeddings(queries, "queries")
    if queries.shape[1] != gallery.shape[1]:
        raise UserError(
            f"queries have shape {tuple(queries.shape)} and the gallery {tuple(gallery.shape)}; their "
            "rows must be equally long: embed both with one network"
        )
    if queries.device != gallery.device:
        raise UserError(f"queries are on {queries.device} and the gallery is on {gallery.device}: move one")
