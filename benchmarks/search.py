"""Exact search in a mapped file against a bare product with topk and against faiss.

    python benchmarks/search.py             # a million vectors of 512 numbers: 2 GB on disk, 7 of memory
    python benchmarks/search.py --count 100000

Times are ratios of programs run in turns in one process, medians. Memory is what a fresh process holds at
its peak beyond the pages of the file. Nothing here needs data: the vectors are drawn around a centre for each
class, on the unit sphere, and the queries in the same way; they are not among the vectors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import robustmetric as rm
from robustmetric.vectors import save_vectors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its wrapper
    import faiss

K = 10
CLASS = 50  # images of a class
Search = Callable[[Tensor], Tensor]
"""Finds the positions (Q, K) of what is nearest to queries (Q, D)."""


def make(count: int, dim: int, queries: int, spread: float) -> tuple[Tensor, Tensor]:
    """Give vectors (N, D) and queries (Q, D) of the same classes, at this spread around their centres."""
    generator = torch.Generator().manual_seed(0)
    classes = max(1, count // CLASS)
    centres = torch.randn(classes, dim, generator=generator)
    made = []
    for some in (count, queries):
        z = torch.randn(some, dim, generator=generator).mul_(spread)
        z += centres[torch.randint(classes, (some,), generator=generator)]
        made.append(F.normalize(z, out=z))
    return made[0], made[1]


def mapped(path: Path) -> Search:
    """Search as this package does, in the file."""
    vectors = rm.load_vectors(path)
    return lambda queries: vectors.search(queries, K).position


def bare(path: Path) -> Search:
    """Multiply all by all, in memory, and take the K largest."""
    z = rm.load_vectors(path).z.clone()
    return lambda queries: (queries @ z.T).topk(K).indices


def flat(path: Path) -> Search:
    """Search as faiss does without an index."""
    z = rm.load_vectors(path).z.numpy()
    index: Any = faiss.IndexFlatIP(z.shape[1])
    for begin in range(0, len(z), 10_000):
        index.add(z[begin : begin + 10_000].copy())
    return lambda queries: torch.from_numpy(index.search(queries.numpy(), K)[1])


PROGRAMS = {"ours": mapped, "product and topk": bare, "faiss IndexFlatIP": flat}


def seconds(program: Callable[[], object]) -> float:
    """Time a program once."""
    begin = time.perf_counter()
    program()
    return time.perf_counter() - begin


def held() -> int:
    """Read the bytes of this process that are not pages of a file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def watch(name: str, path: Path, queries: Tensor, answer: multiprocessing.Queue[int]) -> None:
    """Tell by how much the memory of a fresh process grows while it opens vectors and searches them."""
    before, peak, over = held(), 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not over.wait(0.001):
            peak = max(peak, held())

    thread = threading.Thread(target=look)
    thread.start()
    PROGRAMS[name](path)(queries)
    over.set()
    thread.join()
    answer.put(max(peak, held()) - before)


def peak(name: str, path: Path, queries: Tensor) -> float:
    """Give the peak in GB of a program in a fresh process."""
    context = multiprocessing.get_context("spawn")
    answer: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=watch, args=(name, path, queries, answer))
    process.start()
    found = answer.get()
    process.join()
    return found / 1e9


def agree(x: Tensor, y: Tensor) -> float:
    """Give the share of the positions in `x` that are in the same row of `y`."""
    return float((x[:, :, None] == y[:, None]).any(2).float().mean())


def exact(path: Path, queries: Tensor, rounds: int) -> None:
    """Compare exact searches of one query, and of all at once."""
    searches = {name: program(path) for name, program in PROGRAMS.items()}
    for some in (queries[:1], queries):
        truth = searches["ours"](some)
        shares = {name: agree(truth, search(some)) for name, search in searches.items()}
        times: dict[str, list[float]] = {name: [] for name in searches}
        for _ in range(rounds):
            for name, search in searches.items():
                times[name].append(seconds(lambda search=search, some=some: search(some)))  # type: ignore[misc]
        own = times["ours"]
        for name, others in times.items():
            if name != "ours":
                ratios = [mine / other for mine, other in zip(own, others, strict=True)]
                print(
                    f"{len(some)} queries: {statistics.median(ratios):.2f} times as long as {name} "
                    f"({min(ratios):.2f} to {max(ratios):.2f}), {100 * shares[name]:.2f} % the same",
                    flush=True,
                )
        print(f"{len(some)} queries: {1000 * statistics.median(own):.0f} ms here", flush=True)


def opening(path: Path, queries: Tensor, rounds: int) -> None:
    """Tell how long it takes to open a file, which reads and checks all of it, in searches."""
    vectors = rm.load_vectors(path)
    pairs = [
        (seconds(lambda: rm.load_vectors(path)), seconds(lambda: vectors.search(queries[:1], K)))
        for _ in range(rounds)
    ]
    ratio = statistics.median(load / search for load, search in pairs)
    print(f"opening the file, with its digest checked, takes as long as {ratio:.0f} searches", flush=True)


def main() -> None:
    """Print a line for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="vectors that are searched exactly")

    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument(
        "--spread", type=float, default=2.0, help="of a class: at 1 classes are apart, at 2 not"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", choices=["exact", "memory"])
    arguments = parser.parse_args()
    print(f"{arguments.count:,} x {arguments.dim}, {torch.get_num_threads()} threads, {os.cpu_count()} cores")
    faiss.omp_set_num_threads(torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        z, queries = make(arguments.count, arguments.dim, arguments.queries, arguments.spread)
        path = Path(folder, "vectors.safetensors")
        files = [f"{number}.png" for number in range(arguments.count)]
        save_vectors(path, {}, files, (part.numpy() for part in z.split(1000)))
        del z
        if arguments.only != "memory":
            exact(path, queries, arguments.rounds)
            opening(path, queries, arguments.rounds)
        if arguments.only != "exact":
            for name in PROGRAMS:
                print(f"{name}: {peak(name, path, queries):.2f} GB of memory at the peak", flush=True)


if __name__ == "__main__":
    main()
