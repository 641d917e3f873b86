"""Retrieval scores against pytorch-metric-learning, against the bare distances, and as the gallery grows.

Run with `make bench`. Times are ratios of programs run in turns in one process, medians, on the wall where a
line does not say CPU; peaks of memory are those of a fresh process, beyond its embeddings. Nothing here needs
data: the embeddings are drawn around a centre for each class, on the unit sphere. On a busy machine,
`--threads 1` gives steadier ratios.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor
from torch.nn import functional as F

from robustmetric.retrieval import distances, nmi, rank, retrieval_scores

BUDGET = 10**9
QUERIES = 2048  # where all would take minutes
NAMES = {"R@1": "precision_at_1", "mAP": "mean_average_precision", "mAP@R": "mean_average_precision_at_r"}


def make(images: int, classes: int, dim: int = 512) -> tuple[Tensor, Tensor]:
    """Give embeddings (N, D) and labels (N,), all classes equally large up to one image."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(images) % classes
    z = torch.randn(images, dim, generator=generator).mul_(2.5)
    z += torch.randn(classes, dim, generator=generator)[labels]
    return F.normalize(z, out=z), labels


def ours(z: Tensor, labels: Tensor) -> dict[str, float]:
    """Score with this package."""
    return retrieval_scores(z, labels, nmi=False, memory=BUDGET)


def theirs(z: Tensor, labels: Tensor) -> dict[str, float]:
    """Score with pytorch-metric-learning; R@2 is not among its scores."""
    knn = CustomKNN(LpDistance(normalize_embeddings=False))
    calculator = AccuracyCalculator(include=tuple(NAMES.values()), k=None, knn_func=knn)
    found = calculator.get_accuracy(z, labels)
    return {name: float(found[key]) for name, key in NAMES.items()}


def bare(z: Tensor, queries: Tensor | None = None, rows: int = 256) -> None:
    """Compute all distances in single precision, in chunks, and do nothing with them."""
    for part in (z if queries is None else queries).split(rows):
        torch.cdist(part, z)


def some(z: Tensor, labels: Tensor) -> None:
    """Rank for some of the images, drawn at random."""
    own = torch.randperm(len(z), generator=torch.Generator().manual_seed(1))[:QUERIES]
    rank(z, labels, z[own], labels[own], own=own, memory=BUDGET)


def seconds(program: Callable[[], object]) -> float:
    """Time a program once."""
    begin = time.perf_counter()
    program()
    return time.perf_counter() - begin


def both(program: Callable[[], object], times: int = 1) -> list[float]:
    """Time a program on the wall and on all processors, medians."""
    found = []
    for _ in range(times):
        begin = time.perf_counter(), time.process_time()
        program()
        found.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    return [statistics.median(x) for x in zip(*found, strict=True)]


def status(name: str) -> int:
    """Read this process's memory in bytes: VmRSS, or its peak, VmHWM."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def watch(
    program: Callable[[Tensor, Tensor], object], images: int, classes: int, answer: multiprocessing.Queue[int]
) -> None:
    """Tell by how much the memory grew while a program ran."""
    z, labels = make(images, classes)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    program(z, labels)
    answer.put(status("VmHWM") - before)


def peak(program: Callable[[Tensor, Tensor], object], images: int, classes: int) -> float:
    """Give the peak memory in GB of a program in a fresh process, beyond its embeddings."""
    context = multiprocessing.get_context("spawn")
    answer: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=watch, args=(program, images, classes, answer))
    process.start()
    found = answer.get()
    process.join()
    return found / 1e9


def reference(rounds: int) -> None:
    """Compare with pytorch-metric-learning: 10,000 images of 100 classes."""
    z, labels = make(10_000, 100)
    ours(z[:500], labels[:500])
    faster, less, over, gap = [], [], [], 0.0
    for _ in range(rounds):
        expected: dict[str, float] = {}
        mine, bound = both(lambda: ours(z, labels), 3), both(lambda: bare(z), 3)
        other = both(lambda into=expected: into.update(theirs(z, labels)))  # type: ignore[misc]
        faster.append(other[0] / mine[0])
        less.append(other[1] / mine[1])
        over.append(mine[0] / bound[0])
        found = ours(z, labels)
        gap = max(gap, *(abs(found[name] - expected[name]) for name in NAMES))
    own, their = peak(ours, 10_000, 100), peak(theirs, 10_000, 100)
    print(
        f"10,000 x 512, 100 classes: {statistics.median(faster):.1f}x as fast as pytorch-metric-learning "
        f"({min(faster):.1f} to {max(faster):.1f}; {statistics.median(less):.1f} in CPU time), "
        f"{statistics.median(over):.1f} times the bare float32 distances; peak {own:.2f} GB, theirs "
        f"{their:.2f} GB; scores agree to {gap:.0e}",
        flush=True,
    )


def products() -> None:
    """Rank as many images, in as many classes, as Stanford Online Products has for its test."""
    z, labels = make(60_502, 11_316)
    queries = z[:QUERIES]
    over, wide = [], []
    for _ in range(5):
        mine = seconds(lambda: some(z, labels))
        over.append(mine / seconds(lambda: bare(z, queries)))
        wide.append(mine / seconds(lambda: [distances(part, z) for part in queries.split(256)]))
    print(
        f"60,502 x 512, 11,316 classes: {statistics.median(over):.1f} times the bare float32 distances, "
        f"{statistics.median(wide):.2f} times ours, for {QUERIES:,} queries; all queries peak at "
        f"{peak(ours, 60_502, 11_316):.2f} GB of a budget of {BUDGET / 1e9:.2f} GB",
        flush=True,
    )


def growth() -> None:
    """Double the gallery for a fixed number of queries, with 100 images a class."""
    sets = [make(images, images // 100) for images in (5_000, 10_000, 20_000)]
    times: list[list[float]] = [[] for _ in sets]
    for _ in range(7):
        for (z, labels), into in zip(sets, times, strict=True):
            into.append(seconds(lambda z=z, labels=labels: some(z, labels)))  # type: ignore[misc]
    for low, high, name in ((0, 1, "5,000 to 10,000"), (1, 2, "10,000 to 20,000")):
        ratio = statistics.median(b / a for a, b in zip(times[low], times[high], strict=True))
        print(
            f"a gallery of {name} images costs {ratio:.2f} times as much a query, for {QUERIES:,} queries",
            flush=True,
        )


def clusters() -> None:
    """Time NMI at the size of Stanford Online Products (overlapping classes take more rounds)."""
    z, labels = make(60_502, 11_316)
    product = statistics.median(seconds(lambda: z @ z[:11_316].T) for _ in range(3))
    whole = seconds(lambda: nmi(z, labels))
    print(
        f"NMI, 60,502 x 512, 11,316 classes: {whole / product:.0f} times the bare float32 product of images "
        f"and centres ({whole:.0f} s here)",
        flush=True,
    )


def main() -> None:
    """Print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["reference", "products", "growth", "clusters"])
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of pytorch-metric-learning, half a minute each"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    parts = {"reference": lambda: reference(arguments.rounds), "products": products, "growth": growth}
    for name, part in {**parts, "clusters": clusters}.items():
        if arguments.only in (None, name):
            part()


if __name__ == "__main__":
    main()
