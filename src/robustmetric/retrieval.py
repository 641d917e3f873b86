"""Retrieval in bounded memory: exact ranks of the relevant images, and the scores R@K, mAP, mAP@R and NMI."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from robustmetric.errors import UserError, is_number, whole
from robustmetric.gallery import count_relevant
from robustmetric.labels import check_integers, check_labels
from robustmetric.squares import (
    MOST_ROWS,
    DistanceKernel,
    block_width,
    check_embeddings,
    check_queries,
    distances,
    keys_of,
    keys_of_row,
    positions_of,
    squares_of,
)

__all__ = ["Ranking", "distances", "nmi", "rank", "retrieval_scores"]

# With fewer queries at once most of the time would go into converting the gallery.
_LEAST_ROWS = 8
# Images on a side of a tile, where each pair of images is computed once but for the tiles on the diagonal.
_TILE = 1024
# Up to so many images it is faster to count what is nearer than each; above, to sort.
_FEW = 10
# After every key.
_NONE = torch.iinfo(torch.long).max
# Above this many classes k-means++ alone would take hours: see `nmi`.
_MANY_CLASSES, _FEW_ROUNDS = 1000, 20


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
    (0.0, 100.0)
    """

    query: Tensor
    first: Tensor
    average_precision: Tensor
    average_precision_at_r: Tensor
    left_out: int

    def recall(self, k: int) -> float:
        """Return R@K: the share of queries with a relevant image among the first `k`, in %."""
        return 100 * int((self.first <= whole("k", k, 1)).sum()) / len(self.first)


@torch.no_grad()
def rank(
    gallery: Tensor,
    labels: Tensor,
    queries: Tensor | None = None,
    query_labels: Tensor | None = None,
    *,
    own: Tensor | None = None,
    cameras: Tensor | None = None,
    query_cameras: Tensor | None = None,
    memory: int = 10**9,
) -> Ranking:
    """Return where queries find the images of their class in the (N, D) `gallery` with (N,) `labels`.

    Images are ranked by distance and then by position. Without `queries`, each image queries all others:
    query i is left out of its own ranking by its index, and copies of it stay. With (Q, D) `queries` and (Q,)
    `query_labels`, each ranks the whole gallery but for its `own` (Q,) position in it, −1 for none.
    Embeddings are floats of any precision and length. With the `cameras` (N,) that took the images, and the
    `query_cameras` (Q,) of the queries, an image of the query's class from the query's camera is left out of
    its ranking: the rule of re-identification.

    What is allocated beyond the embeddings stays below `memory` bytes; a smaller budget is slower and changes
    nothing else. The ranking is the same on every processor: see `robustmetric.squares`. On a device without
    double precision it is computed, and returned, on the CPU.

    >>> gallery, labels = torch.tensor([[0.0], [1.0], [3.0], [9.0]]), torch.tensor([0, 1, 0, 1])
    >>> rank(gallery, labels).first
    tensor([2, 3, 2, 2])
    >>> rank(gallery, labels, torch.tensor([[1.1], [8.0]]), torch.tensor([1, 0])).average_precision
    tensor([0.7500, 0.5000], dtype=torch.float64)
    """
    check_embeddings(gallery, "the gallery")
    check_labels(labels, len(gallery))
    if queries is None:
        if query_labels is not None or own is not None or query_cameras is not None:
            raise UserError(
                "query_labels, own and query_cameras describe queries, and none are given: pass queries too"
            )
        queries, query_labels, query_cameras = gallery, labels, cameras
        own = torch.arange(len(gallery), device=gallery.device)
    check_queries(queries, gallery)
    if query_labels is None:
        raise UserError("queries have no query_labels: pass one class for each, to know what is relevant")
    check_labels(query_labels, len(queries))
    check_cameras(cameras, query_cameras, len(gallery), len(queries))
    if gallery.device.type == "mps":
        mutual = queries is gallery
        gallery = gallery.cpu()
        queries = gallery if mutual else queries.cpu()
    labels, query_labels = (x.to(gallery.device, torch.long).contiguous() for x in (labels, query_labels))
    own = check_own(own, len(queries), len(gallery)).to(gallery.device)

    task, relevant = _task(labels, query_labels, own, cameras, query_cameras)
    # The largest classes first: the queries of a chunk have about as many relevant images.
    order = relevant.argsort(descending=True, stable=True)
    order = order[: int((relevant > 0).sum())]
    rows, whole = _plan(len(queries), gallery, int(task.size.max()), memory)
    # Two images that query each other are as far apart both ways: half of the product gives all squares.
    mutual = whole and queries is gallery and 2 * len(order) > len(gallery)
    squares = DistanceKernel(gallery, _side(*gallery.shape) if mutual else rows)
    lengths = squares.gallery_lengths if queries is gallery else squares.lengths(queries, "queries")
    # By a power of two, which rounds nothing: squares of any length fit into float32.
    longest = max(float(lengths.max()), float(squares.gallery_lengths.max()))
    scale = 2.0 ** -math.frexp(longest)[1]

    pieces = order.tensor_split(-(-len(order) // rows))
    size = (len(gallery) if mutual else len(pieces[0]), len(gallery))
    near = torch.empty(size, dtype=torch.float32, device=gallery.device)
    if mutual:
        squares.write_mutual(near, scale)
    kinds = (torch.long, torch.float64, torch.float64)
    found = [torch.empty(len(order), dtype=kind, device=gallery.device) for kind in kinds]
    begin = 0
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for piece in pieces:
            if mutual:
                row = piece
            else:
                row = torch.arange(len(piece), device=gallery.device)
                squares.write(near[: len(piece)], queries[piece], lengths[piece], scale)
            for into, part in zip(found, _ranks(near, row, task, piece, relevant[piece], pool), strict=True):
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
    """Return R@K for each K of `ks`, mAP, mAP@R and NMI of (N, D) `embeddings` with (N,) `labels`, in %.

    Each image queries all others, or, with `queries` (Q, D) of `query_labels` (Q,), each query the
    embeddings, within `memory` bytes: see `rank`. mAP is over the whole ranking; a query without an answer is
    left out. NMI is that of the embeddings, whatever the queries; `nmi=False` leaves it out, which saves most
    of the time where there are many classes.

    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> retrieval_scores(z, torch.tensor([0, 0, 1, 1]))
    {'R@1': 100.0, 'R@2': 100.0, 'mAP': 100.0, 'mAP@R': 100.0, 'NMI': 100.0}
    """
    found = rank(embeddings, labels, queries, query_labels, memory=memory)
    scores = {f"R@{k}": found.recall(k) for k in ks}
    scores["mAP"] = 100 * float(found.average_precision.mean())
    scores["mAP@R"] = 100 * float(found.average_precision_at_r.mean())
    if nmi:
        scores["NMI"] = 100 * _nmi(embeddings, labels)
    return scores


@torch.no_grad()
def nmi(embeddings: Tensor, labels: Tensor, *, seed: int = 0) -> float:
    """Return how well (N,) `labels` agree with as many k-means clusters of (N, D) `embeddings`: 1 at best.

    The mutual information is divided by the mean of both entropies. Up to 1,000 classes the clusters begin
    with k-means++ and move until they converge. Above, where k-means++ would take hours, they begin at random
    images and move 20 times at most. The `seed` is that of k-means, which holds two copies of the embeddings.

    >>> nmi(torch.tensor([[0.0], [0.1], [5.0], [5.1]]), torch.tensor([3, 3, 8, 8]))
    1.0
    """
    # These take two seconds, which a command that fails early should not wait for.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import normalized_mutual_info_score

    check_embeddings(embeddings, "embeddings")
    check_labels(labels, len(embeddings))
    DistanceKernel(embeddings.cpu(), 1)  # which rejects what is not a number
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
    """What each query looks for: `members[begin : begin + size]`, of which some may not count."""

    members: Tensor  # (N,) positions of the gallery, class by class
    begin: Tensor  # (Q,)
    size: Tensor  # (Q,)
    own: Tensor  # (Q,) position of the query in the gallery, -1 for none
    cameras: Tensor | None  # (N,)
    query_cameras: Tensor | None  # (Q,) the images of its class from this camera do not count

    def look(self, piece: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return images of the classes of some queries, `piece` (B,), which of them count, and which do not.

        The rule is that of `robustmetric.gallery.exclude`, without a look at the whole gallery. All are
        (B, W); after the end of its class, images of a query neither count nor do not.
        """
        column = torch.arange(int(self.size[piece].max()), device=piece.device)
        inside = column < self.size[piece, None]
        member = self.members[(self.begin[piece, None] + column).clamp_max(len(self.members) - 1)]
        hidden = member == self.own[piece, None]
        if self.cameras is not None and self.query_cameras is not None:
            hidden |= self.cameras[member] == self.query_cameras[piece, None]
        return member, inside & ~hidden, inside & hidden


def _task(
    labels: Tensor, query_labels: Tensor, own: Tensor, cameras: Tensor | None, query_cameras: Tensor | None
) -> tuple[_Task, Tensor]:
    """Return what each query looks for, and how many images are relevant (Q,); reject queries without any."""
    ordered, members = labels.sort(stable=True)
    begin = torch.searchsorted(ordered, query_labels)
    size = torch.searchsorted(ordered, query_labels, right=True) - begin
    seen = [c if c is None else c.to(labels.device) for c in (cameras, query_cameras)]
    relevant = count_relevant(labels, query_labels, own, *seen)
    if not relevant.any():
        raise UserError(
            f"none of the {len(query_labels)} queries has another image of its class in the gallery of "
            f"{len(labels)}, so none has an answer to find: give at least two images of some class"
            + ("" if cameras is None else ", by two cameras")
        )
    return _Task(members, begin, size, own, *seen), relevant


def _ranks(
    near: Tensor, row: Tensor, task: _Task, piece: Tensor, relevant: Tensor, pool: ThreadPoolExecutor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return first rank and both average precisions (B,) of queries with squares in `near[row]` (B, N)."""
    member, counts, hidden = task.look(piece)
    wanted = keys_of(near[row[:, None], member], member).masked_fill_(~counts, _NONE)
    query, place = hidden.nonzero(as_tuple=True)
    near[row[query], member[query, place]] = torch.inf
    own = task.own[piece]
    near[row[own >= 0], own[own >= 0]] = torch.inf  # of whichever class
    del member, counts, hidden
    place = places(near, row, wanted, relevant, pool)
    first = place[:, 0].clone()
    column, count = torch.arange(place.shape[1], device=near.device), relevant[:, None]
    precision = (column + 1) / place.double()
    precision.masked_fill_(column >= count, 0)
    average = precision.sum(1) / relevant
    precision.masked_fill_(place > count, 0)
    return first, average, precision.sum(1) / relevant


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


def _side(images: int, dim: int) -> int:
    """Return how many images a tile has on a side."""
    return min(_TILE, block_width(images, dim))


def _plan(queries: int, gallery: Tensor, relevant: int, memory: int) -> tuple[int, bool]:
    """Return how many queries to rank at once within these bytes, whether the gallery's squares all fit."""
    images, dim = gallery.shape
    width, side = block_width(images, dim), _side(images, dim)
    # What is there once: buffers of the libraries, positions and lengths, results, a block of the gallery,
    # and what each thread sorts.
    fixed = 2**25 + (96 + 24 * torch.get_num_threads()) * images + 160 * queries + 8 * width * dim
    # A square for each image; positions, keys, ranks and precisions of the relevant ones; two blocks and
    # what is compared of them; the query. Another device sorts the keys of all queries at once.
    each = (4 if gallery.device.type == "cpu" else 40) * images + 72 * (relevant + 1) + 24 * width + 16 * dim
    rows = MOST_ROWS
    least = fixed + _LEAST_ROWS * each
    if not is_number(memory) or memory < least:
        raise UserError(
            f"memory={memory!r} bytes cannot rank {images} images for {queries} queries; it takes at least "
            f"{least}: raise memory"
        )
    while fixed + rows * each > memory:
        rows //= 2
    return rows, fixed + rows * each + 8 * side * (3 * side + dim) + 4 * images**2 <= memory


def check_own(own: Tensor | None, queries: int, images: int) -> Tensor:
    """Return the positions `own` (Q,) in a gallery, −1 for each if none are given; reject what cannot be.

    `queries` and `images` are how many there are.

    >>> check_own(None, 2, 5)
    tensor([-1, -1])
    """
    if own is None:
        return torch.full((queries,), -1)
    check_integers("own", own, queries, "each query's position in the gallery, -1 for none")
    own, low, high = own.long(), int(own.min()), int(own.max())
    if low < -1 or high >= images:
        raise UserError(
            f"own holds {low if low < -1 else high}; positions in a gallery of {images} are 0 to "
            f"{images - 1}, and -1 for none"
        )
    return own


def check_cameras(cameras: Tensor | None, query_cameras: Tensor | None, images: int, queries: int) -> None:
    """Reject `cameras` (N,) of the images and `query_cameras` (Q,) that are not there for each.

    `images` and `queries` are how many there are.
    """
    if cameras is None and query_cameras is None:
        return
    if cameras is None or query_cameras is None:
        given, missing = ("gallery", "queries") if query_cameras is None else ("queries", "gallery")
        raise UserError(
            f"cameras of the {given} are given and those of the {missing} are not: give both, or neither"
        )
    check_integers("cameras", cameras, images, "a camera for each image")
    check_integers("query_cameras", query_cameras, queries, "a camera for each query")
