"""Margins, and who is nearest, against plain loops: ties, cameras, blocks, and what is not kept."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import Gallery, Queries, margin
from robustmetric.attacks.margin import rivals, smooth_margin

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("chunk", [1, 7, 8192])
def test_what_is_too_much_to_keep_is_computed_anew(
    chunk: int, asked: Queries, seen: Gallery, moved: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, weights = replace(seen, chunk=chunk), torch.arange(1.0, 19.0, dtype=torch.float64)
    passes, real = [], margin._distances

    def noted(*args: Any) -> Any:
        passes.append(1)
        return real(*args)

    monkeypatch.setattr(margin, "_distances", noted)

    def computed() -> tuple[Tensor, Tensor, Tensor]:
        leaf = moved.clone().requires_grad_()
        value, near = smooth_margin(leaf, asked, cut, 0.05)
        return value.detach(), near, torch.autograd.grad((weights * value).sum(), leaf)[0]

    monkeypatch.setattr(margin, "_KEPT", 18 * 40)
    kept = computed()
    assert len(passes) == 1
    monkeypatch.setattr(margin, "_KEPT", 18 * 40 - 1)
    torch.testing.assert_close(computed(), kept, rtol=0, atol=0)
    assert len(passes) == 3


def test_a_smooth_margin_is_sharp_where_the_temperature_is_low(
    asked: Queries, seen: Gallery, moved: Tensor
) -> None:
    """Of m distances the soft minimum lies below the least, by τ · log m at most."""
    found = rivals(moved, asked, seen)
    gap = (2 - 2 * found.wrong_cosine).sqrt() - (2 - 2 * found.right_cosine).sqrt()
    for tau in (0.5, 0.05, 0.005):
        value, _ = smooth_margin(moved, asked, seen, tau)
        assert (value - gap)[found.answered].abs().max() <= tau * math.log(40)
        assert not value[~found.answered].any()


def test_single_precision_keeps_the_smooth_margin_of_a_copy(gallery: Gallery, queries: Queries) -> None:
    """A copy's square is 1e-7 off: the distance may come out as 1e-3 and not as 0, and no number breaks."""
    single, q = replace(gallery, z=gallery.z.float()), replace(queries, z=queries.z.float())
    leaf = q.z.clone().requires_grad_()
    value, near = smooth_margin(leaf, q, single, 0.05)
    wanted, exactly = smooth_margin(queries.z, queries, gallery, 0.05)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    torch.testing.assert_close(value.double(), wanted, rtol=0, atol=2e-3)
    assert slope.isfinite().all()
    assert torch.equal(near, exactly)
