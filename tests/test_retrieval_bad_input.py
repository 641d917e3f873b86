"""What cannot be ranked is refused, with the value and what it must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from robustmetric.retrieval import distances, nmi, rank, retrieval_scores
from robustmetric.sphere import BrokenEmbeddingsError


def broken(value: float) -> Tensor:
    z = torch.eye(4)
    z[2, 1] = value
    return z


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_embeddings(value: float) -> None:
    labels = torch.tensor([0, 0, 1, 1])
    for call in (rank, retrieval_scores, nmi):
        with pytest.raises(BrokenEmbeddingsError, match=r"1 of 4 embeddings of .* hold NaN, infinity"):
            call(broken(value), labels)
    with pytest.raises(BrokenEmbeddingsError, match="1 of 4 embeddings of queries hold NaN"):
        rank(torch.eye(4), labels, broken(value), labels)
    with pytest.raises(BrokenEmbeddingsError, match="1 of 4 embeddings of queries hold NaN"):
        distances(broken(value), torch.eye(4))


EYE, FOUR = torch.eye(4), torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("args", "more", "message"),
    [
        ((EYE[0], FOUR), {}, r"the gallery has shape \(4,\); it must be \(N, D\), a row for each image"),
        ((EYE[:0], FOUR[:0]), {}, r"the gallery has shape \(0, 4\); it must be \(N, D\)"),
        ((EYE.long(), FOUR), {}, "the gallery must be a tensor of floats, not torch.int64"),
        ((EYE.tolist(), FOUR), {}, "the gallery must be a tensor of floats, not list"),
        ((EYE, FOUR[:3]), {}, r"labels have shape \(3,\) for 4 images"),
        ((EYE, FOUR.float()), {}, "labels must be a tensor of integers, not torch.float32"),
        ((EYE, torch.arange(4)), {}, "no two of the 4 images share a class; no query has an answer to find"),
        ((EYE, FOUR, EYE[:2]), {}, "queries have no query_labels: pass one class for each"),
        ((EYE, FOUR, EYE[:, :2], FOUR), {}, r"queries have shape \(4, 2\) and the gallery \(4, 4\)"),
        ((EYE, FOUR, EYE[0], FOUR), {}, r"queries has shape \(4,\); it must be \(N, D\)"),
        ((EYE, FOUR, EYE, FOUR[:2]), {}, r"labels have shape \(2,\) for 4 images"),
        (
            (EYE, FOUR, EYE[:1], FOUR[:1] + 9),
            {},
            "none of the 1 queries has an image of its class in the gall",
        ),
        (
            (EYE, FOUR),
            {"query_labels": FOUR},
            "query_labels, own and query_cameras describe queries, and none are given",
        ),
        (
            (EYE, FOUR),
            {"own": FOUR},
            "query_labels, own and query_cameras describe queries, and none are given",
        ),
        ((EYE, FOUR, EYE, FOUR), {"own": FOUR[:2]}, r"own is torch.int64 of shape \(2,\) for 4 queries"),
        (
            (EYE, FOUR, EYE, FOUR),
            {"own": FOUR.float()},
            r"own is torch.float32 of shape \(4,\) for 4 queries",
        ),
        ((EYE, FOUR, EYE, FOUR), {"own": FOUR + 3}, "own holds 4; positions in a gallery of 4 are 0 to 3"),
        ((EYE, FOUR, EYE, FOUR), {"own": FOUR - 2}, "own holds -2; positions in a gallery of 4 are 0 to 3"),
        ((EYE, FOUR), {"query_cameras": FOUR}, "query_cameras describe queries, and none are given"),
        (
            (EYE, FOUR, EYE, FOUR),
            {"cameras": FOUR},
            "^cameras of the gallery are given and those of the queries are not",
        ),
        (
            (EYE, FOUR, EYE, FOUR),
            {"query_cameras": FOUR},
            "^cameras of the queries are given and those of the gallery are not",
        ),
        (
            (EYE, FOUR),
            {"cameras": FOUR[:3]},
            r"^cameras are torch.int64 of shape \(3,\); they must be integers of shape \(4,\), a camera",
        ),
        (
            (EYE, FOUR, EYE[:2], FOUR[:2]),
            {"cameras": FOUR, "query_cameras": FOUR[:2].float()},
            r"^query_cameras are torch.float32 of shape \(2,\); they must be integers of shape \(2,\)",
        ),
        (
            (EYE, FOUR, EYE[:1], FOUR[:1] + 9),
            {"cameras": FOUR, "query_cameras": FOUR[2:3]},
            "none of the 1 queries has an image of its class in the gallery",
        ),
        (
            (EYE, FOUR, EYE[:1], FOUR[:1]),
            {"cameras": FOUR, "query_cameras": FOUR[:1]},
            "none of the 1 queries has an image of its class in the gallery",
        ),
        ((EYE, FOUR), {"memory": 1000}, "memory=1000 bytes cannot rank 4 images for 4 queries; it takes at"),
        ((EYE, FOUR), {"memory": "2 GB"}, "memory='2 GB' bytes cannot rank 4 images"),
    ],
)
def test_bad_input(args: tuple[Any, ...], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank(*args, **more)


def test_k_counts_from_1() -> None:
    with pytest.raises(ValueError, match="k must be a whole number of at least 1, not 0"):
        retrieval_scores(EYE, FOUR, ks=(1, 0), nmi=False)
