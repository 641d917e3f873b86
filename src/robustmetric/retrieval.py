"""Leave-one-out retrieval: each image queries all others."""

from __future__ import annotations

import torch
from torch import Tensor

from robustmetric.distance import cross_distance
from robustmetric.triplets import check_labels


def recall_at_1(
    gallery: Tensor, labels: Tensor, queries: Tensor | None = None, *, chunk: int = 1024
) -> float:
    """Share of queries whose nearest other image is of their class.

    `gallery` holds the (N, D) embeddings of all images, `labels` their (N,) classes. `queries` are the
    images' embeddings in the query's role, perturbed for instance; they default to the gallery itself.
    Query i is never compared with image i, ties go to the first, and a query whose class has no other
    image is left out.

    >>> recall_at_1(torch.eye(3), torch.tensor([0, 0, 1]))
    1.0
    """
    check_labels(labels, len(gallery))
    queries = gallery if queries is None else queries
    if queries.shape != gallery.shape:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)} and the gallery {tuple(gallery.shape)}; they must be "
            "the same images in the same order"
        )
    labels = labels.to(gallery.device)
    _, kind, count = labels.unique(return_inverse=True, return_counts=True)
    answered = count[kind] > 1
    if not answered.any():
        raise ValueError(f"no two of the {len(labels)} images share a class; no query has an answer to find")
    nearest = []
    for index in torch.arange(len(gallery), device=gallery.device).split(chunk):
        dist = cross_distance(queries[index], gallery)
        dist[torch.arange(len(index), device=dist.device), index] = torch.inf
        nearest.append(dist.argmin(1))
    hits = (labels[torch.cat(nearest)] == labels)[answered]
    return int(hits.sum()) / len(hits)
