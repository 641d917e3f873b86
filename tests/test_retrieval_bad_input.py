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
        ((EYE[0], FOUR), {}, r"the gallery must be floats of shape \(N, D\).* not float32 of shape \(4,\)"),
        ((EYE.long(), FOUR), {}, "the gallery must be floats.* not int64"),
        ((EYE, FOUR[:3]), {}, r"labels must be a tensor of integers of shape \(4,\)"),
        ((EYE, torch.arange(4)), {}, "none of the 4 queries has another image of its class"),
        ((EYE, FOUR, EYE[:2]), {}, "queries have no query_labels"),
        ((EYE, FOUR, EYE[:, :2], FOUR), {}, r"queries have shape \(4, 2\) and the gallery \(4, 4\)"),
        ((EYE, FOUR, EYE[:1], FOUR[:1] + 9), {}, "none of the 1 queries has another image"),
        ((EYE, FOUR), {"query_labels": FOUR}, "describe queries, and none are given"),
        ((EYE, FOUR, EYE, FOUR), {"own": FOUR[:2]}, r"own must .* shape \(4,\).* not int64 of shape \(2,\)"),
        ((EYE, FOUR, EYE, FOUR), {"own": FOUR + 3}, "own holds 4; positions in a gallery of 4 are 0 to 3"),
        ((EYE, FOUR, EYE, FOUR), {"own": FOUR - 2}, "own holds -2; positions in a gallery of 4 are 0 to 3"),
        ((EYE, FOUR, EYE, FOUR), {"cameras": FOUR}, "^cameras of the gallery are given and those of the q"),
        ((EYE, FOUR, EYE, FOUR), {"query_cameras": FOUR}, "^cameras of the queries are given and those of"),
        ((EYE, FOUR), {"cameras": FOUR[:3]}, r"^cameras must .* shape \(4,\).* not int64 of shape \(3,\)"),
        (
            (EYE, FOUR, EYE[:2], FOUR[:2]),
            {"cameras": FOUR, "query_cameras": FOUR[:2].float()},
            r"^query_cameras must be a tensor of integers of shape \(2,\).* not float32",
        ),
        (
            (EYE, FOUR, EYE[:1], FOUR[:1]),
            {"cameras": FOUR, "query_cameras": FOUR[:1]},
            "none of the 1 queries .* by two cameras",
        ),
        ((EYE, FOUR), {"memory": 1000}, "memory=1000 bytes cannot rank 4 images for 4 queries; it takes at"),
    ],
)
def test_bad_input(args: tuple[Any, ...], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank(*args, **more)


def test_k_counts_from_1() -> None:
    with pytest.raises(ValueError, match="k must be a whole number of at least 1, not 0"):
        retrieval_scores(EYE, FOUR, ks=(1, 0), nmi=False)
