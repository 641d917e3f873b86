"""Retrieval in bounded memory: exact ranks of the relevant images, and the scores R@K, mAP, mAP@R and NMI."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from robustmetric.distance import BrokenEmbeddingsError, wide_dtype
from robustmetric.registry import is_number
from robustmetric.triplets import check_labels

# Squares below this share of the gallery's largest squared length are rounding: the points are the same.
_SAME = 1e-14
# More queries at once make the product no faster, and fewer than the least would mostly convert the gallery.
_MOST_ROWS, _LEAST_ROWS = 256, 8
# Numbers of the gallery in double precision at once, and images: what is small stays in the cache.
_BLOCK, _WIDTH = 2**20, 2048
# Images on a side of a tile, where each pair of images is computed once but for the tiles on the diagonal.
_TILE = 1024
# Up to so many images it is faster to count what is nearer than each; above, to sort.
_FEW = 10
# Behind every key.
_NONE = torch.iinfo(torch.long).max
# Above this many classes k-means++ alone would take hours: see `nmi`.
_MANY_CLASSES, _FEW_ROUNDS = 1000, 20


@torch.no_grad()
def distances(queries: Tensor, gallery: Tensor) -> Tensor:
    """Squared Euclidean distances for ranking: (B, D) queries and (N, D) gallery to (B, N), in float32.

    The product runs in double precision and is rounded once, so that copies of an image in the gallery are
    equally far. Squares below 1e-14 of the gallery's largest squared length, which is 1 on the unit sphere,
    are 0. A gallery in double precision is not copied; another is converted in blocks.

    >>> distances(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]]))
    tensor([[0., 2., 4.]])
    """
    _check_embeddings(gallery, "the gallery")
    _check_queries(queries, gallery)
    squares = _Squares(gallery, min(len(queries), _MOST_ROWS))
    lengths = squares.lengths(queries, "queries")
    longest = float(squares.gallery_lengths.max().sqrt() + lengths.max().sqrt())
    if longest**2 > torch.finfo(torch.float32).max:
        raise ValueError(
            f"embeddings are up to {longest:.3g} apart and the square of that is no float32: divide queries "
            "and gallery by the largest length"
        )
    result = torch.empty(len(queries), len(gallery), dtype=torch.float32, device=gallery.device)
    for begin, end in _blocks(len(queries), _MOST_ROWS):
        squares.write(result[begin:end], queries[begin:end], lengths[begin:end], 1.0)
    return result


@dataclass(frozen=True, eq=False)
class Ranking:
    """Where the queries find the images of their class.

    `query` are the (Q,) positions of the queries that have an answer, ascending, `first` the rank of each
    one's first relevant image, from 1. `average_precision` is over the whole ranking, and
    `average_precision_at_r` is (1/R)·Σ P(i)·rel(i) over its first R places, where R is the query's number of
    relevant images. `left_out` counts the queries that have no answer.

    >>> found = rank(torch.tensor([[0.0], [1.0], [3.0], [9.0]]), torch.tensor([5, 7, 5, 8]))
    >>> found.query, found.first, found.left_out
    (tensor([0, 2]), tensor([2, 2]), 2)
    >>> found.recall(1), found.recall(2)
    (0.0, 1.0)
    """

    query: Tensor
    first: Tensor
    average_precision: Tensor
    average_precision_at_r: Tensor
    left_out: int

    def __post_init__(self) -> None:
        shape = (len(self.query),)
        for name in ("query", "first", "average_precision", "average_precision_at_r"):
            value: Tensor = getattr(self, name)
            if value.shape != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {shape}, as query")
        if shape == (0,):
            raise ValueError("a ranking without queries has no scores: give a query that has an answer")
        if self.query.min() < 0 or (self.query.diff() <= 0).any():
            raise ValueError("query must be ascending positions, each once: sort all results by their query")
        if self.first.min() < 1:
            raise ValueError(f"first holds the rank {int(self.first.min())}; ranks are counted from 1")
        for name in ("average_precision", "average_precision_at_r"):
            value = getattr(self, name)
            if not ((value >= 0) & (value <= 1)).all():
                raise ValueError(f"{name} must be in [0, 1], not from {value.min():g} to {value.max():g}")
        if not is_number(self.left_out, Integral) or self.left_out < 0:
            raise ValueError(f"left_out must be a count of queries, 0 or more, not {self.left_out!r}")

    def recall(self, k: int) -> float:
        """R@K: the share of queries with a relevant image among the first `k`."""
        if not is_number(k, Integral) or k < 1:
            raise ValueError(
                f"k must be a whole number, 1 or more, not {k!r}: R@1 looks at the nearest image"
            )
        return int((self.first <= k).sum()) / len(self.first)


@torch.no_grad()
def rank(
    gallery: Tensor,
    labels: Tensor,
    queries: Tensor | None = None,
    query_labels: Tensor | None = None,
    *,
    own: Tensor | None = None,
    memory: int = 10**9,
) -> Ranking:
    """Rank the (N, D) gallery with (N,) labels for each query, by distance and then by position.

    Without `queries`, each image queries all others: query i is left out of its own ranking by its index, and
    copies of it stay. With (Q, D) `queries` and (Q,) `query_labels`, each ranks the whole gallery but for its
    `own` (Q,) position in it, −1 for none. Embeddings are floats of any precision and length.

    What is allocated beyond the embeddings stays below `memory` bytes. A smaller budget is slower; it changes
    a rank only where two distances differ by no more than the rounding of float32.

    >>> gallery, labels = torch.tensor([[0.0], [1.0], [3.0], [9.0]]), torch.tensor([0, 1, 0, 1])
    >>> rank(gallery, labels).first
    tensor([2, 3, 2, 2])
    >>> rank(gallery, labels, torch.tensor([[1.1], [8.0]]), torch.tensor([1, 0])).average_precision
    tensor([0.7500, 0.5000], dtype=torch.float64)
    """
    _check_embeddings(gallery, "the gallery")
    check_labels(labels, len(gallery))
    if queries is None:
        if query_labels is not None or own is not None:
            raise ValueError("query_labels and own describe queries, and none are given: pass queries too")
        queries, query_labels = gallery, labels
        own = torch.arange(len(gallery), device=gallery.device)
    _check_queries(queries, gallery)
    if query_labels is None:
        raise ValueError("queries have no query_labels: pass one class for each, to know what is relevant")
    check_labels(query_labels, len(queries))
    labels, query_labels = (x.to(gallery.device, torch.long).contiguous() for x in (labels, query_labels))
    own = _check_own(own, len(queries), len(gallery)).to(gallery.device)

    task = _Task.of(labels, query_labels, own)
    # The largest classes first: the queries of a chunk have about as many relevant images.
    order = task.relevant.argsort(descending=True, stable=True)
    order = order[: int((task.relevant > 0).sum())]
    rows, whole = _plan(len(queries), gallery, int(task.relevant.max()), memory)
    # Two images that query each other are as far apart both ways: half of the product gives all squares.
    mutual = whole and queries is gallery and 2 * len(order) > len(gallery)
    squares = _Squares(gallery, _side(*gallery.shape) if mutual else rows)
    lengths = squares.gallery_lengths if queries is gallery else squares.lengths(queries, "queries")
    # By a power of two, which rounds nothing: squares of any length fit into float32.
    longest = max(float(lengths.max()), float(squares.gallery_lengths.max()))
    scale = 2.0 ** -math.frexp(longest)[1]

    pieces = order.tensor_split(-(-len(order) // rows))
    near = torch.empty(len(gallery) if mutual else len(pieces[0]), len(gallery), device=gallery.device)
    if mutual:
        squares.write_mutual(near, scale)
    wide = wide_dtype(gallery.device)
    kinds = (torch.long, wide, wide)
    found = [torch.empty(len(order), dtype=kind, device=gallery.device) for kind in kinds]
    begin = 0
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for piece in pieces:
            if mutual:
                row = piece
            else:
                row = torch.arange(len(piece), device=gallery.device)
                squares.write(near[: len(piece)], queries[piece], lengths[piece], scale)
            for into, part in zip(found, _ranks(near, row, task, piece, pool), strict=True):
                into[begin : begin + len(piece)] = part
            begin += len(piece)
    query, back = order.sort()
    first, precision, precision_at_r = (x[back] for x in found)
    return Ranking(query, first, precision, precision_at_r, len(queries) - len(query))


def retrieval_scores(
    embeddings: Tensor,
    labels: Tensor,
    *,
    queries: Tensor | None = None,
    query_labels: Tensor | None = None,
    ks: Sequence[int] = (1, 2),
    nmi: bool = True,
    memory: int = 10**9,
) -> dict[str, float]:
    """R@K for each K of `ks`, mAP, mAP@R and NMI of (N, D) embeddings with (N,) labels, all in [0, 1].

    Each image queries all others, or, with `queries`, each query the embeddings: see `rank`. mAP is over the
    whole ranking; a query without an answer is left out. NMI is that of the embeddings, whatever the queries;
    `nmi=False` leaves it out, which saves most of the time where there are many classes.

    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> retrieval_scores(z, torch.tensor([0, 0, 1, 1]))
    {'R@1': 1.0, 'R@2': 1.0, 'mAP': 1.0, 'mAP@R': 1.0, 'NMI': 1.0}
    """
    found = rank(embeddings, labels, queries, query_labels, memory=memory)
    scores = {f"R@{k}": found.recall(k) for k in ks}
    scores["mAP"] = float(found.average_precision.mean())
    scores["mAP@R"] = float(found.average_precision_at_r.mean())
    if nmi:
        scores["NMI"] = _nmi(embeddings, labels)
    return scores


@torch.no_grad()
def nmi(embeddings: Tensor, labels: Tensor, *, seed: int = 0) -> float:
    """Compare the classes (N,) with as many k-means clusters of (N, D) embeddings: 1 if they agree.

    The mutual information is divided by the mean of both entropies. Up to 1,000 classes the clusters begin
    with k-means++ and move until they rest. Above, where k-means++ would take hours, they begin at random
    images and move 20 times at most. k-means holds two copies of the embeddings.

    >>> nmi(torch.tensor([[0.0], [0.1], [5.0], [5.1]]), torch.tensor([3, 3, 8, 8]))
    1.0
    """
    # These take two seconds, which no command that fails early need wait for.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import normalized_mutual_info_score

    _check_embeddings(embeddings, "embeddings")
    check_labels(labels, len(embeddings))
    _Squares(embeddings, 1)
    classes = len(labels.unique())
    rule = {} if classes <= _MANY_CLASSES else {"init": "random", "max_iter": _FEW_ROUNDS}
    z = embeddings.detach().to("cpu", torch.promote_types(embeddings.dtype, torch.float32)).numpy()
    with warnings.catch_warnings():
        # Fewer distinct points than classes leave clusters empty: the score says it.
        warnings.simplefilter("ignore", ConvergenceWarning)
        clusters = KMeans(classes, n_init=1, random_state=seed, **rule).fit_predict(z)
    return float(normalized_mutual_info_score(labels.cpu().numpy(), clusters))


_nmi = nmi  # the function, where an argument has its name


@dataclass(frozen=True)
class _Task:
    """What each query looks for: `members[begin : begin + size]`, where its own image may be among them."""

    members: Tensor  # (N,) positions of the gallery, class by class
    begin: Tensor  # (Q,)
    size: Tensor  # (Q,)
    own: Tensor  # (Q,) position of the query in the gallery, -1 for none
    relevant: Tensor  # (Q,) how many images are relevant

    @classmethod
    def of(cls, labels: Tensor, query_labels: Tensor, own: Tensor) -> _Task:
        ordered, members = labels.sort(stable=True)
        begin = torch.searchsorted(ordered, query_labels)
        size = torch.searchsorted(ordered, query_labels, right=True) - begin
        relevant = size - ((own >= 0) & (labels[own] == query_labels)).long()
        if not relevant.any():
            if len(labels) == len(query_labels) and torch.equal(labels, query_labels):
                raise ValueError(
                    f"no two of the {len(labels)} images share a class; no query has an answer to find: give "
                    "at least two images of some class"
                )
            raise ValueError(
                f"none of the {len(query_labels)} queries has an image of its class in the gallery of "
                f"{len(labels)} (besides itself); no query has an answer to find: look at both labels"
            )
        return cls(members, begin, size, own, relevant)


def _ranks(
    near: Tensor, row: Tensor, task: _Task, piece: Tensor, pool: ThreadPoolExecutor
) -> tuple[Tensor, Tensor, Tensor]:
    """Give first rank and both average precisions (B,) of queries whose squares are in `near[row]` (B, N)."""
    own, relevant = task.own[piece], task.relevant[piece]
    column = torch.arange(int(task.size[piece].max()), device=near.device)
    # Behind the end of its class a query looks at itself and at others' images: both are struck out.
    member = task.members[(task.begin[piece, None] + column).clamp_max(len(task.members) - 1)]
    wanted = _keys(near[row[:, None], member], member)
    wanted.masked_fill_((member == own[:, None]) | (column >= task.size[piece, None]), _NONE)
    del member
    near[row[own >= 0], own[own >= 0]] = torch.inf
    place = _places(near, row, wanted, relevant, pool)
    first = place[:, 0].clone()
    column = column[: place.shape[1]]
    count = relevant[:, None]
    precision = (column + 1) / place.to(wide_dtype(near.device))
    precision.masked_fill_(column >= count, 0)
    average = precision.sum(1) / relevant
    precision.masked_fill_(place > count, 0)
    return first, average, precision.sum(1) / relevant


def _places(near: Tensor, row: Tensor, wanted: Tensor, relevant: Tensor, pool: ThreadPoolExecutor) -> Tensor:
    """Give the ranks (B, R) of the wanted keys in `near[row]` (B, N), ascending; may sort the keys."""
    if near.device.type != "cpu":
        return _places_by_keys(near[row], wanted)[:, : int(relevant.max())]
    place = torch.ones(len(row), int(relevant.max()), dtype=torch.long)
    squares, threads = near.numpy(), torch.get_num_threads()
    tasks = list(zip(row.tolist(), relevant.tolist(), wanted.numpy(), place.numpy(), strict=True))

    def fill(part: int) -> None:
        for i, count, keys, into in tasks[part::threads]:
            keys.sort()
            into[:count] = _places_of_one(squares[i], keys[:count])

    list(pool.map(fill, range(threads)))
    return place


def _places_of_one(near: npt.NDArray[np.float32], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Give the ranks (R,) of the wanted keys, ascending, among a query's squares (N,).

    numpy's vectorised sort is several times torch's, and takes half as long for squares as for keys: keys are
    sorted only if many images are equally far.
    """
    square = (wanted >> 32).astype(np.int32).view(np.float32)
    if len(wanted) <= _FEW:
        place, unsure = np.empty(len(wanted), np.int64), np.arange(len(wanted))
    else:
        ordered = np.sort(near)
        place = ordered.searchsorted(square) + 1
        # If the next is as near, the positions decide.
        unsure = np.flatnonzero(ordered.take(place, mode="clip") == square)
        if len(unsure) > _FEW:
            keys = near.view(np.int32).astype(np.int64)
            keys <<= 32
            keys |= np.arange(len(near))
            keys.sort()
            return keys.searchsorted(wanted) + 1
    for i in unsure:
        limit, position = square[i], wanted[i] & 0xFFFFFFFF
        place[i] = np.count_nonzero(near[:position] <= limit) + np.count_nonzero(near[position:] < limit) + 1
    return place


def _places_by_keys(near: Tensor, wanted: Tensor) -> Tensor:
    """Give the ranks (B, R), ascending, of the wanted keys in squares (B, N), in steps that suit a GPU."""
    keys = _keys(near, torch.arange(near.shape[1], device=near.device))
    return torch.searchsorted(keys.sort(dim=1).values, wanted.sort(dim=1).values).add_(1)


def _keys(square: Tensor, position: Tensor) -> Tensor:
    """Give the bits of each square above its image's position: unique, and ordered as the ranking is."""
    return square.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(position)


class _Squares:
    """Squared distances to an (N, D) gallery, block by block, through buffers that are allocated once."""

    def __init__(self, gallery: Tensor, rows: int) -> None:
        wide, device = wide_dtype(gallery.device), gallery.device
        width = _width(*gallery.shape)
        self.gallery = gallery
        self.left = torch.empty(rows, gallery.shape[1], dtype=wide, device=device)
        self.right = torch.empty(width, gallery.shape[1], dtype=wide, device=device)
        self.square = torch.empty(rows * width, dtype=wide, device=device)
        self.rest = torch.empty_like(self.square)
        self.gallery_lengths = self.lengths(gallery, "the gallery")
        self.least = _SAME * float(self.gallery_lengths.max())

    def lengths(self, embeddings: Tensor, what: str) -> Tensor:
        """Squared lengths (N,) of embeddings; refuses those that are no numbers."""
        lengths = torch.empty(len(embeddings), dtype=self.right.dtype, device=self.right.device)
        for begin, end in _blocks(len(embeddings), len(self.right)):
            right = self.right[: end - begin].copy_(embeddings[begin:end])
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
        """Write the distances of (B, D) queries, times a power of two, into a float32 tensor (B, N)."""
        left = self.left[: len(queries)].copy_(queries)
        for begin, end in _blocks(len(self.gallery), len(self.right)):
            out[:, begin:end] = self._block(left, lengths, begin, end, scale)

    def write_mutual(self, out: Tensor, scale: float) -> None:
        """Write the distances within the gallery, times a power of two, into a float32 tensor (N, N)."""
        blocks = _blocks(len(self.gallery), len(self.left))
        for i, (top, bottom) in enumerate(blocks):
            left = self.left[: bottom - top].copy_(self.gallery[top:bottom])
            for begin, end in blocks[i:]:
                square = self._block(left, self.gallery_lengths[top:bottom], begin, end, scale)
                out[top:bottom, begin:end] = square
                if begin > top:
                    out[begin:end, top:bottom] = out[top:bottom, begin:end].T

    def _block(self, left: Tensor, lengths: Tensor, begin: int, end: int, scale: float) -> Tensor:
        """Give the distances of (B, D) rows to `gallery[begin:end]`, in a buffer."""
        right = self.gallery[begin:end]
        if right.dtype != self.right.dtype:
            right = self.right[: end - begin].copy_(right)
        square = self.square[: len(left) * len(right)].view(len(left), len(right))
        torch.addmm(square, left, right.T, beta=0, alpha=scale, out=square)
        # (|x|² − xy) + (|y|² − xy): rounded alike whichever is the query, and least if they are near.
        rest = self.rest[: square.numel()].view(square.shape)
        torch.sub(self.gallery_lengths[begin:end] * scale, square, out=rest)
        torch.sub(lengths[:, None] * scale, square, out=square).add_(rest)
        return torch.threshold_(square, self.least * scale, 0.0)


def _width(images: int, dim: int) -> int:
    """Give how many images to compare at once: at most 2,048, and 8 MB in double precision."""
    return min(images, max(16, min(_WIDTH, _BLOCK // dim)))


def _blocks(images: int, width: int) -> list[tuple[int, int]]:
    """Split positions evenly: a product with a few rows is rounded in another order, and copies must tie."""
    count = -(-images // width)
    return [(images * i // count, images * (i + 1) // count) for i in range(count)]


def _side(images: int, dim: int) -> int:
    """Give how many images a tile has on a side."""
    return min(_TILE, _width(images, dim))


def _plan(queries: int, gallery: Tensor, relevant: int, memory: int) -> tuple[int, bool]:
    """Give how many queries to rank at once in so many bytes, and whether all squares of the gallery fit."""
    images, dim = gallery.shape
    width, side = _width(images, dim), _side(images, dim)
    # What is there once: buffers of the libraries, positions and lengths, results, a block of the gallery,
    # and what each thread sorts.
    fixed = 2**25 + (64 + 24 * torch.get_num_threads()) * images + 160 * queries + 8 * width * dim
    # A square for each image; positions, keys, ranks and precisions of the relevant ones; two blocks; the
    # query. Another device sorts the keys of all queries at once.
    each = (4 if gallery.device.type == "cpu" else 40) * images + 64 * (relevant + 1) + 16 * width + 16 * dim
    rows = _MOST_ROWS
    least = fixed + _LEAST_ROWS * each
    if not is_number(memory) or memory < least:
        raise ValueError(
            f"memory={memory!r} bytes cannot rank {images} images for {queries} queries; it takes at least "
            f"{least}: raise memory"
        )
    while fixed + rows * each > memory:
        rows //= 2
    return rows, fixed + rows * each + 8 * side * (2 * side + dim) + 4 * images**2 <= memory


def _check_embeddings(embeddings: Tensor, what: str) -> None:
    if not isinstance(embeddings, Tensor) or not embeddings.is_floating_point():
        found = embeddings.dtype if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise ValueError(f"{what} must be a tensor of floats, not {found}: pass (N, D) embeddings")
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ValueError(
            f"{what} has shape {tuple(embeddings.shape)}; it must be (N, D), a row for each image"
        )


def _check_queries(queries: Tensor, gallery: Tensor) -> None:
    _check_embeddings(queries, "queries")
    if queries.shape[1] != gallery.shape[1]:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)} and the gallery {tuple(gallery.shape)}; their "
            "rows must be equally long: embed both with one network"
        )
    if queries.device != gallery.device:
        raise ValueError(f"queries are on {queries.device} and the gallery is on {gallery.device}: move one")


def _check_own(own: Tensor | None, queries: int, images: int) -> Tensor:
    if own is None:
        return torch.full((queries,), -1)
    if own.is_floating_point() or own.shape != (queries,):
        raise ValueError(
            f"own is {own.dtype} of shape {tuple(own.shape)} for {queries} queries; it must be integers of "
            f"shape ({queries},): each query's position in the gallery, -1 for none"
        )
    if own.min() < -1 or own.max() >= images:
        wrong = int(own.min() if own.min() < -1 else own.max())
        raise ValueError(
            f"own holds {wrong}; positions in a gallery of {images} are 0 to {images - 1}, and -1 for none"
        )
    return own.long()
