"""The input path and the training loop: the cache against decoding, Lightning against a bare loop.

Run with `make bench`. Ratios of programs run in turns in one process; the images are written for the
occasion, 224 JPEG files of 500×375 pixels.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import numpy as np
import torch
from PIL import Image

import robustmetric as rm
from robustmetric.data.cache import cached
from robustmetric.data.pairs import PairLoader
from robustmetric.training import MetricModule

STEPS, ROUNDS = 8, 5


def write_images(folder: Path, classes: int = 14, each: int = 16) -> None:
    """Write photographs' worth of JPEG files, a folder a class, for training and as many for testing."""
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for c in range(classes if split == "train" else 2):
            (folder / split / f"{split}{c:02}").mkdir(parents=True)
            for i in range(each):
                coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
                picture = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
                picture.save(folder / split / f"{split}{c:02}" / f"{i}.jpg", quality=90)


def input_path(folder: Path) -> None:
    """Time batches of pairs from the cache, cropped and as floats, against decoding the same files."""
    images = rm.data.load("folder", folder)
    kept = cached(images, folder / "cache", size=(256, 256))
    loader = PairLoader(kept.pixels, kept.labels, pairs=56, seed=0, crop=224, flip=True)
    ratios = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        from_cache = sum(len(images) for images, _ in loader)
        middle = time.perf_counter()
        assert images.files is not None
        for file in images.files[:56]:
            with Image.open(file) as picture:
                pixels = np.asarray(picture.convert("RGB").resize((256, 256), Image.Resampling.BILINEAR))
            torch.from_numpy(pixels[16:240, 16:240].copy()).permute(2, 0, 1).float().div_(255)
        end = time.perf_counter()
        ratios.append(from_cache / (middle - begin) / (56 / (end - middle)))
    print(f"images a second: {statistics.median(ratios):.1f} times as many from the cache as by decoding")


class Watch(L.Callback):
    """Notes how long each step took, from batch to batch."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_train_batch_end(self, *_: object) -> None:
        """Note the moment."""
        self.moments.append(time.perf_counter())


class Waiting:
    """A loader that notes how long its user waited for it."""

    def __init__(self, loader: PairLoader) -> None:
        self.loader, self.waited = loader, 0.0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        batches = iter(self.loader)
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - begin
            if batch is None:
                return
            yield batch


def loops(title: str, name: str, loader: PairLoader, model_name: str, **options: float) -> None:
    """Time steps of the same training through Lightning and in a bare loop, and the wait for data."""
    over, waits = [], []
    for _ in range(ROUNDS):
        times = []
        for lightning in (True, False):
            torch.manual_seed(0)
            model = rm.model(model_name)
            defense = rm.defense(name, steps=8, **options)  # type: ignore[arg-type]
            watched = Waiting(loader)
            if lightning:
                watch = Watch()
                trainer = L.Trainer(
                    accelerator="cpu", max_steps=STEPS, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
                )  # fmt: skip
                trainer.fit(MetricModule(model, defense), watched)
                moments = watch.moments
                waits.append(watched.waited / (moments[-1] - moments[0]) * (STEPS - 1) / STEPS)
            else:
                optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
                moments = []
                while len(moments) < STEPS:
                    for batch in watched:
                        seed = np.random.SeedSequence([0, len(moments), 0]).generate_state(1)[0]
                        defense.generator.manual_seed(int(seed))
                        loss = defense(model, *batch).loss
                        optimiser.zero_grad()
                        loss.backward()
                        optimiser.step()
                        moments.append(time.perf_counter())
                        if len(moments) == STEPS:
                            break
            times.append(moments[-1] - moments[1])
        over.append(times[0] / times[1])
    print(
        f"{title}: a step through Lightning {100 * (statistics.median(over) - 1):+.1f} % over the bare loop; "
        f"waits for data {100 * statistics.median(waits):.2f} % of the time",
        flush=True,
    )


def main() -> None:
    """Print a line for each comparison."""
    import logging
    import warnings

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        input_path(Path(folder))
        pixels = np.random.default_rng(0).integers(0, 256, (1120, 28, 28, 1), dtype=np.uint8)
        small = PairLoader(pixels, torch.arange(1120) % 10, pairs=56, seed=0)
        loops("C2F2 28×28", "HM[S,LGA]&ICS", small, "c2f2", eps=77 / 255, alpha=3 / 255)


if __name__ == "__main__":
    main()
