"""R@1 against a plain loop."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from robustmetric.retrieval import recall_at_1


def by_loop(gallery: Tensor, labels: list[int], queries: Tensor) -> float:
    hits = []
    for i in range(len(gallery)):
        if labels.count(labels[i]) == 1:
            continue
        others = [j for j in range(len(gallery)) if j != i]
        best = min(others, key=lambda j: float((queries[i] - gallery[j]).norm()))
        hits.append(labels[best] == labels[i])
    return sum(hits) / len(hits)


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("seed", range(5))
def test_against_a_loop(seed: int, chunk: int) -> None:
    g = torch.Generator().manual_seed(seed)
    gallery = F.normalize(torch.randn(40, 3, generator=g))
    labels = torch.randint(0, 6, (40,), generator=g)
    labels[0] = 99  # the only image of its class
    queries = F.normalize(gallery + 0.3 * torch.randn(40, 3, generator=g))
    assert recall_at_1(gallery, labels, chunk=chunk) == by_loop(gallery, labels.tolist(), gallery)
    assert recall_at_1(gallery, labels, queries, chunk=chunk) == by_loop(gallery, labels.tolist(), queries)


def test_the_query_is_left_out_by_its_index_and_not_by_its_distance() -> None:
    # Image 1 is a copy of image 0 in another class: it is the nearest of image 0, at distance zero.
    gallery = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 1.0]]))
    labels = torch.tensor([0, 1, 0, 1, 1])
    # Images 0 and 1 find each other, 2 finds the first of the two, 3 and 4 find each other.
    assert recall_at_1(gallery, labels) == 3 / 5


def test_a_query_must_have_an_answer() -> None:
    with pytest.raises(ValueError, match="no two of the 3 images share a class; no query has an answer"):
        recall_at_1(torch.eye(3), torch.tensor([0, 1, 2]))
    assert recall_at_1(torch.eye(3), torch.tensor([4, 4, 4])) == 1


def test_queries_must_be_the_images_of_the_gallery() -> None:
    with pytest.raises(ValueError, match=r"queries have shape \(2, 3\) and the gallery \(4, 3\)"):
        recall_at_1(torch.eye(4)[:, :3], torch.tensor([0, 0, 1, 1]), torch.eye(3)[:2])
