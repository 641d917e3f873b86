"""What digests cost, as a share of the time of what they protect: caches, checkpoints, weights, pieces.

Run with `make bench`. Each share is the time that digests add, over the time of the work that they protect:
of a cache, one pass over its images, from embedding them once to an epoch of a defense; of a checkpoint and
weights, the steps between two of them; of an evaluation's pieces, the evaluation. Both are measured in turns
in one process, as processor time with one thread of torch, which other programs on the machine disturb the
least; disks are left out of it, on both sides. A pass and the steps are counted from one batch.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

import robustmetric as rm
from robustmetric.data.cache import Pixels
from robustmetric.data.pairs import PairLoader
from robustmetric.evaluation.job import PARTS, Job, Piece
from robustmetric.files import read_sealed, write_atomically, write_sealed
from robustmetric.models.weights import digest_of

ROUNDS, SAVE_EVERY, LIMIT = 5, 100, 0.02
# Undefended, and one that takes all steps whatever the network: triplets of HM drop out that are hard enough.
DEFENSES = ("N/A[R]", "EST[R]")


def seconds(work: Callable[[], object]) -> float:
    """Return how much processor time the work takes, of all threads."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def shares(title: str, digest: Callable[[], float], work: Callable[[], float]) -> None:
    """Print what the digest takes of the work's time, measured in turns."""
    times = [(digest(), work()) for _ in range(ROUNDS)]
    found = [one / other for one, other in times]
    added, whole = (statistics.median(column) for column in zip(*times, strict=True))
    over = "" if statistics.median(found) <= LIMIT else f", MORE THAN {LIMIT:.0%}"
    print(
        f"{title}: {statistics.median(found):.3%}, at most {max(found):.3%}{over} "
        f"({added * 1e3:.1f} ms of {whole:.1f} s)",
        flush=True,
    )


class Steps:
    """Steps of a training, the loader's work included."""

    def __init__(self, model: nn.Module, defense: str, loader: PairLoader) -> None:
        self.model, self.loader, self.batches = model, loader, iter(loader)
        eps, alpha = (77 / 255, 3 / 255) if loader.pixels.shape[3] == 1 else (8 / 255, 1 / 255)
        self.defense = rm.defense(defense, eps=eps, alpha=alpha, steps=8)
        self.optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)

    def one(self) -> None:
        """Take a step."""
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        loss = self.defense(self.model, *batch).loss
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()


def cache(folder: Path, shape: tuple[int, int, int, int], network: str, crop: int | None, pairs: int) -> None:
    """Digest all pixels against one pass over them, and checkpoints against the steps of that."""
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    labels = torch.arange(shape[0]) % 50
    loader = PairLoader(pixels, labels, pairs=pairs, seed=0, crop=crop, flip=True)
    (images, _), model = next(iter(loader)), rm.model(network)

    def check() -> float:
        return seconds(lambda: Pixels(pixels, labels, ()).digest)

    def embed() -> float:
        with torch.no_grad():
            return seconds(lambda: model(images)) * shape[0] / len(images)

    title = f"cache of {shape[0]:,} images of {shape[1]}×{shape[2]}"
    shares(f"{title}, embedded once by {network}", check, embed)
    for name in DEFENSES:
        training = Steps(model, name, loader)

        def epoch(training: Steps = training) -> float:
            return seconds(training.one) * shape[0] / pairs  # every image is an anchor once

        training.one()
        shares(f"{title}, an epoch of {name} with {network}", check, epoch)
        checkpoint(folder / "last.ckpt", training, f"{name} with {network}")


def checkpoint(file: Path, training: Steps, title: str) -> None:
    """Write a checkpoint with and without its digest, and digest weights, against the steps between two."""
    weights = training.model.state_dict()
    content = {"state_dict": weights, "optimizer_states": [training.optimiser.state_dict()]}

    def more() -> float:
        plain, sealed = [], []
        for _ in range(ROUNDS):  # what writing itself takes comes and goes by as much as the digest
            plain.append(seconds(lambda: write_atomically(file, lambda out: torch.save(content, out))))
            sealed.append(seconds(lambda: write_sealed(file, lambda out: torch.save(content, out))))
        return min(sealed) - min(plain) + seconds(lambda: digest_of(weights))

    def between() -> float:
        return seconds(training.one) * SAVE_EVERY

    shares(f"checkpoint and weights every {SAVE_EVERY} steps, {title}", more, between)


def pieces(folder: Path) -> None:
    """Write an evaluation's pieces and read them twice, with and without digests, against making them."""
    (test,) = rm.data.load_pixels("digits", None, rm.data.Inputs(), ["test"])
    images = torch.from_numpy(test.pixels[:].copy()).permute(0, 3, 1, 2).float() / 255
    model, plan = rm.model("c2f2", size=8), rm.Plan.make(steps=4, queries=64, checks="none")
    kept: list[bytes] = []
    keep, file = Job.keep, folder / "piece"

    def keeping(job: Job[Any, Any], piece: Piece, value: object) -> None:
        keep(job, piece, value)
        kept.append((folder / "evaluation" / PARTS / piece.file).read_bytes())

    def evaluate() -> float:
        shutil.rmtree(folder / "evaluation", ignore_errors=True)
        return seconds(lambda: rm.evaluate(model, images, test.labels, plan=plan, out=folder / "evaluation"))

    def more() -> float:
        sealed = seconds(lambda: [_through(file, one, write_sealed, read_sealed) for one in kept])
        return sealed - seconds(
            lambda: [_through(file, one, write_atomically, Path.read_bytes) for one in kept]
        )

    Job.keep = keeping  # type: ignore[method-assign, assignment]
    try:
        evaluate()
    finally:
        Job.keep = keep  # type: ignore[method-assign]
    size, queries = sum(map(len, kept)), plan.settings.queries
    shares(f"{len(kept)} pieces, {size:,} bytes, of {queries} queries of digits", more, evaluate)


def _through(
    file: Path,
    content: bytes,
    write: Callable[[Path, Callable[[BinaryIO], object]], None],
    read: Callable[[Path], bytes],
) -> bool:
    write(file, lambda out: out.write(content))
    return read(file) == read(file) == content


def main() -> None:
    """Print a line for each comparison."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cache(Path(folder), (60_000, 28, 28, 1), "c2f2", None, 56)
        cache(Path(folder), (2_000, 256, 256, 3), "resnet18", 224, 4)
        pieces(Path(folder))


if __name__ == "__main__":
    main()
