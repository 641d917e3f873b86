"""Leave-one-out retrieval: each image queries all others."""

from __future__ import annotations

import torch
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
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
    answered = _answered(labels)
    nearest = [_to_others(queries, gallery, index).argmin(1) for index in answered.split(chunk)]
    hits = labels[torch.cat(nearest)] == labels[answered]
    return int(hits.sum()) / len(hits)


def retrieval_scores(embeddings: Tensor, labels: Tensor, *, chunk: int = 512) -> dict[str, float]:
    """R@1, R@2, mAP and NMI of (N, D) embeddings with (N,) labels, each image querying all others.

    mAP is over the whole ranking, with ties broken by index; a query whose class has no other image is left
    out. NMI compares the classes with as many k-means clusters, from a fixed seed. All are in [0, 1].

    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> retrieval_scores(z, torch.tensor([0, 0, 1, 1]))
    {'R@1': 1.0, 'R@2': 1.0, 'mAP': 1.0, 'NMI': 1.0}
    """
    check_labels(labels, len(embeddings))
    labels = labels.to(embeddings.device)
    answered = _answered(labels)
    at_1, at_2, precision = [], [], []
    place = torch.arange(1, len(labels), device=embeddings.device)
    for index in answered.split(chunk):
        ranking = _to_others(embeddings, embeddings, index).argsort(dim=1, stable=True)[:, :-1]
        hit = labels[ranking] == labels[index, None]
        at_1.append(hit[:, 0])
        at_2.append(hit[:, :2].any(1))
        found = hit.cumsum(1) / place
        precision.append((found * hit).sum(1) / hit.sum(1))
    clusters = KMeans(len(labels.unique()), n_init=1, random_state=0).fit_predict(embeddings.cpu().numpy())
    return {
        "R@1": torch.cat(at_1).float().mean().item(),
        "R@2": torch.cat(at_2).float().mean().item(),
        "mAP": torch.cat(precision).mean().item(),
        "NMI": float(normalized_mutual_info_score(labels.cpu().numpy(), clusters)),
    }


def _answered(labels: Tensor) -> Tensor:
    """Give the positions of the images whose class has another image."""
    _, kind, count = labels.unique(return_inverse=True, return_counts=True)
    answered: Tensor = (count[kind] > 1).nonzero().squeeze(1)
    if len(answered) == 0:
        raise ValueError(f"no two of the {len(labels)} images share a class; no query has an answer to find")
    return answered


def _to_others(queries: Tensor, gallery: Tensor, index: Tensor) -> Tensor:
    """Give the distances (B, N) of some queries to all images, infinite to the query's own."""
    dist = cross_distance(queries[index], gallery)
    dist[torch.arange(len(index), device=dist.device), index] = torch.inf
    return dist
