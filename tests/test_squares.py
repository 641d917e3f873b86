"""Squared distances that are the same on every processor: against a plain loop, and under other kernels."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from robustmetric import squares
from robustmetric.squares import (
    DistanceKernel,
    distances,
    keys_of,
    keys_of_row,
    positions_of,
    square_distance,
    squares_of,
)

pytestmark = pytest.mark.kernels

# What other processors' kernels add in another order: see the Makefile.
KERNELS = [
    {},
    {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
]


def sphere(count: int, dim: int, seed: int = 0, spread: float = math.inf) -> Tensor:
    """Points on the unit sphere, everywhere or around one; from numpy, which is the same everywhere."""
    drawn = np.random.Generator(np.random.PCG64(seed)).standard_normal((count, dim))
    if spread < math.inf:
        drawn = np.eye(dim)[0] + spread * drawn / math.sqrt(dim)
    return torch.from_numpy(drawn / np.sqrt((drawn**2).sum(1, keepdims=True))).float()


def by_loop(x: Tensor, y: Tensor) -> float:
    """Add the halves of the squares to each other until one is left; an odd one waits behind them."""
    term = [(a - b) ** 2 for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    while len(term) > 1:
        half = len(term) // 2
        term = [a + b for a, b in zip(term[:half], term[half : 2 * half], strict=True)] + term[2 * half :]
    return float(np.float32(term[0])) if term[0] > 1e-14 else 0.0


@pytest.mark.parametrize("spread", [math.inf, 1e-2, 1e-5, 1e-7])
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 64, 100])
def test_each_distance_is_that_of_a_loop_to_the_bit(dim: int, spread: float) -> None:
    x, y = sphere(9, dim, 1, spread), sphere(30, dim, 2, spread)
    y[10:14], y[20] = x[3], y[4]
    wanted = [[by_loop(a, b) for b in y] for a in x]
    assert distances(x, y).tolist() == wanted
    for i, row in enumerate(wanted):
        assert square_distance(x[i], y).tolist() == row


def test_copies_are_equally_far_however_near_the_query_is() -> None:
    """A product rounds a column by its place: of queries 1e-4 away most saw copies at different distances."""
    gallery = sphere(10_000, 512)
    where = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))[:40]
    gallery[where] = gallery[where[0]].clone()
    for off in (1e-1, 1e-3, 1e-4, 1e-5):
        queries = gallery[where[0]] + off / math.sqrt(512) * torch.from_numpy(
            np.random.default_rng(1).standard_normal((64, 512))
        )
        found = distances(queries.float(), gallery)[:, where]
        assert (found > 0).all()
        assert torch.equal(found, found[:, :1].expand(64, 40))


@pytest.mark.parametrize("spread", [math.inf, 1e-1, 1e-3, 1e-6])
def test_few_distances_are_summed_again_also_where_all_images_lie_together(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = []
    kept = squares._sum_of_squares

    def counted(x: Tensor, y: Tensor) -> Tensor:
        again.append(len(x))
        return kept(x, y)

    monkeypatch.setattr(squares, "_sum_of_squares", counted)
    distances(sphere(200, 128, 1, spread), sphere(3000, 128, 2, spread))
    assert sum(again) < 1e-3 * 200 * 3000


@pytest.mark.parametrize("spread", [math.inf, 1e-3])
def test_what_is_not_summed_again_lies_within_the_bound(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval that a product gives holds the distance, and is as narrow as it says."""
    gallery = sphere(200, 300, 0, spread)
    made = DistanceKernel(gallery, 200)
    seen = []
    kept = torch.mm

    def watched(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        seen.append(kept(left, right, out=out).clone())
        return out

    monkeypatch.setattr(torch, "mm", watched)
    made.write(torch.empty(200, 200), gallery, made.gallery_lengths, 1.0)
    exact = (gallery.double()[:, None] - gallery.double()).square().sum(2)
    (low,) = seen
    width = 2 * made.rounding * 4 * made.gallery_lengths.max()
    assert (low <= exact).all()
    assert (exact <= low + width).all()
    assert width < 1e-9 * exact[exact > 0].mean()


PROGRAM = """
import hashlib, sys, torch
sys.path.insert(0, {tests!r})
from test_squares import sphere
from robustmetric.retrieval import rank
from robustmetric.squares import distances

torch.set_num_threads({threads})
gallery = sphere(3000, 200)
gallery[::7] = gallery[0]
queries = gallery[:50] + 1e-5
found = [distances(queries, gallery), distances(queries[:3], gallery[5:900])]
ranking = rank(gallery, torch.arange(3000) % 50)
found += [ranking.first.float(), rank(gallery, torch.arange(3000) % 50, memory=10**8).first.float()]
print(hashlib.sha256(b"".join(f.numpy().tobytes() for f in found)).hexdigest())
"""


@pytest.mark.slow
def test_the_same_bits_come_out_of_every_kernel() -> None:
    seen = set()
    for threads, kernel in [(1, KERNELS[0]), (2, KERNELS[0]), (1, KERNELS[1]), (2, KERNELS[2])]:
        program = PROGRAM.format(tests=str(Path(__file__).parent), threads=threads)
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-c", program],
            env={**os.environ, **kernel},
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
        seen.add(done.stdout)
    assert len(seen) == 1


@given(st.lists(st.sampled_from([0.0, 1e-45, 1e-30, 1.0, 2.0, 4.0, math.inf]) | st.floats(0, 4, width=32)))
def test_keys_are_in_the_order_of_distance_and_then_position(values: list[float]) -> None:
    square = torch.tensor(values, dtype=torch.float32).abs()
    ranking = sorted(range(len(values)), key=lambda i: (square[i].item(), i))
    keys = keys_of(square, torch.arange(len(values)))
    assert keys.argsort().tolist() == ranking
    assert keys_of_row(square.numpy()).tolist() == keys.tolist()
    assert positions_of(keys).tolist() == list(range(len(values)))
    assert np.array_equal(squares_of(keys.numpy()), square.numpy())
