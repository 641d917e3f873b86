"""Writers of tiny data sets in the layouts and file formats of the originals.

Each fixture gives a function that writes a data set into a directory and returns what `load` takes as root.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from tests.helpers.layouts import write_cub, write_image

Maker = Callable[..., Path]


@pytest.fixture(scope="session")
def make_image() -> Callable[..., None]:
    """Write one image: make_image(path, seed)."""
    return write_image


@pytest.fixture(scope="session")
def make_idx() -> Maker:
    """Write one split as idx files: make_idx(root, labels, split="train", mark="-", packed=True)."""

    def make(
        root: Path, labels: Sequence[int], *, split: str = "train", mark: str = "-", packed: bool = True
    ) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(len(labels)).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
        prefix = {"train": "train", "test": "t10k"}[split]
        for kind, dimensions, content in (
            ("images", 3, struct.pack(">4I", 0x803, *pixels.shape) + pixels.tobytes()),
            ("labels", 1, struct.pack(">2I", 0x801, len(labels)) + bytes(labels)),
        ):
            path = root / f"{prefix}-{kind}{mark}idx{dimensions}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
        return root

    return make


@pytest.fixture(scope="session")
def make_cub() -> Maker:
    """Write CUB-200-2011: make_cub(root, counts=(3, 2, 2, 3)) with so many images for each class."""
    return write_cub


@pytest.fixture(scope="session")
def make_cars() -> Maker:
    """Write Cars-196: make_cars(root, counts=(2, 3, 3, 2)) with so many images for each class."""

    def make(root: Path, counts: Sequence[int] = (2, 3, 3, 2), *, packed: bool = True) -> Path:
        labels = [number for number, count in enumerate(counts, start=1) for _ in range(count)]
        fields = ("relative_im_path", "bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "test")
        annotations = np.empty((1, len(labels)), dtype=[(field, object) for field in fields])
        (root / "car_ims").mkdir(parents=True, exist_ok=True)
        for i, label in enumerate(labels):
            path = f"car_ims/{i + 1:06}.jpg"
            write_image(root / path, i)
            box = [np.uint8(value) for value in (1, 1, 18, 14)]
            annotations[0, i] = (path, *box, np.uint8(label), np.uint8(i % 2))
        names = np.empty((1, len(counts)), dtype=object)
        names[0, :] = [f"Make Model {number} Sedan 2012" for number in range(1, len(counts) + 1)]
        variables = {"annotations": annotations, "class_names": names}
        savemat(root / "cars_annos.mat", variables, do_compression=packed)
        return root

    return make


@pytest.fixture(scope="session")
def make_sop() -> Maker:
    """Write Stanford Online Products: make_sop(root, train=(2, 3), test=(3, 2)), images for each class."""

    def make(root: Path, train: Sequence[int] = (2, 3), test: Sequence[int] = (3, 2)) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        image = label = 0
        for split, counts in (("train", train), ("test", test)):
            lines = ["image_id class_id super_class_id path"]
            for count in counts:
                label += 1
                for i in range(count):
                    image += 1
                    path = f"bicycle_final/{111085122870 + label}_{i}.JPG"
                    write_image(root / path, image)
                    lines.append(f"{image} {label} 1 {path}")
            (root / f"Ebay_{split}.txt").write_text("\n".join(lines) + "\n")
        return root

    return make


@pytest.fixture(scope="session")
def make_inshop() -> Maker:
    """Write In-Shop: make_inshop(root, train=(2, 3), test=(3, 2)); the first image of a test item is a query.

    The list goes to Eval/ and the images to Img/, as they are published.
    """

    def make(root: Path, train: Sequence[int] = (2, 3), test: Sequence[int] = (3, 2)) -> Path:
        lines = []
        for item, count in enumerate((*train, *test), start=1):
            name = f"id_{item:08}"
            for i in range(count):
                path = f"img/WOMEN/Dresses/{name}/0{i + 1}_1_front.jpg"
                write_image(root / "Img" / path, 100 * item + i)
                status = "train" if item <= len(train) else "gallery" if i else "query"
                lines.append(f"{path:<70} {name} {status}")
        (root / "Eval").mkdir(parents=True, exist_ok=True)
        header = f"{len(lines)}\nimage_name item_id evaluation_status"
        (root / "Eval" / "list_eval_partition.txt").write_text("\n".join([header, *lines]) + "\n")
        return root

    return make


@pytest.fixture(scope="session")
def make_market1501() -> Maker:
    """Write Market-1501: make_market1501(root, train=(2, 3), test=(3, 2)), images for each identity.

    Cameras take turns; the first image of each identity that tests is a query.
    """

    def make(root: Path, train: Sequence[int] = (2, 3), test: Sequence[int] = (3, 2)) -> Path:
        for folder in ("bounding_box_train", "bounding_box_test", "query"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for identity, count in enumerate((*train, *test), start=1):
            for i in range(count):
                test_folder = "bounding_box_test" if i else "query"
                folder = "bounding_box_train" if identity <= len(train) else test_folder
                name = f"{identity:04}_c{i % 6 + 1}s1_{identity:06}_0{i}.jpg"
                write_image(root / folder / name, 100 * identity + i)
        return root

    return make


@pytest.fixture(scope="session")
def make_folder() -> Maker:
    """Write a directory for each class: make_folder(root, {"cat": 3, "dog": 2}, suffix=".png").

    Names may hold a directory more, for splits: {"train/cat": 2, "test/cat": 2}.
    """

    def make(root: Path, counts: Mapping[str, int] | None = None, *, suffix: str = ".png") -> Path:
        counts = {"bird": 2, "cat": 3, "dog": 2, "emu": 2} if counts is None else counts
        for number, (name, count) in enumerate(counts.items()):
            for i in range(count):
                write_image(root / name / f"{i}{suffix}", 100 * number + i)
        return root

    return make


@pytest.fixture(scope="session")
def make_csv() -> Maker:
    """Write a table of images: make_csv(root, ["cat", "cat", "dog", "dog"], splits=None) with images in it.

    One image for each label, pictures/0.png and so on; returns the CSV file.
    """

    def make(
        root: Path,
        labels: Sequence[str] = ("cat", "dog", "cat", "dog"),
        splits: Sequence[str] | None = None,
    ) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        lines = ["path,label" if splits is None else "path,label,split"]
        for i, label in enumerate(labels):
            path = f"pictures/{i}.png"
            write_image(root / path, i)
            lines.append(f'{path},"{label}"' + (f",{splits[i]}" if splits is not None else ""))
        file = root / "images.csv"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    return make


@pytest.fixture(scope="session")
def make_any(request: pytest.FixtureRequest) -> Maker:
    """Write a data set by its name: make_any("cub", root, …)."""
    return lambda name, *rest: request.getfixturevalue(f"make_{name}")(*rest)
