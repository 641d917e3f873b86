"""The readers of files that come from outside, each with whole files of its kind to begin with."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import save
from scipy.io import savemat
from torch import nn

import robustmetric as rm
from robustmetric.app.uploads import read_upload
from robustmetric.cli.app import read_changes
from robustmetric.data import load
from robustmetric.data.base import ImageSet
from robustmetric.data.cache import cached
from robustmetric.data.idx import read_idx
from robustmetric.data.inputs import Inputs
from robustmetric.data.pair_lists import read_pairs
from robustmetric.evaluation import (
    Data,
    Evaluation,
    Plan,
    Subject,
    certify,
    load_certificate,
    load_verification,
    verify,
)
from robustmetric.evaluation.job import PARTS, PLAN, check_folder
from robustmetric.evaluation.record import load_arrays, load_record
from robustmetric.files import digest_of_entries, write_sealed
from robustmetric.locks import LOCK, locked
from robustmetric.report.pictures import load_pictures
from robustmetric.training.checkpoint import reached
from robustmetric.training.folder import RunFolder, read_rows
from robustmetric.training.recipe import load_recipe, make_recipe
from robustmetric.vectors import About, Vectors, open_index, save_vectors
from robustmetric.zoo.entries import read_label
from tests.helpers.records import altered, golden, written

Read = Callable[[Path, bytes], object]
"""Reads bytes as the file that they would be, in an empty folder."""


@dataclass(frozen=True)
class Reader:
    """What `read` does with bytes; `seeds` are whole files, `grammar` is the language of made-up ones."""

    name: str
    read: Read
    seeds: tuple[bytes, ...]
    grammar: str | None = None


def _put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _sealed(path: Path, content: bytes, key: bytes = b"") -> None:
    """Somebody who changes a file may know how its digest is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, lambda file: file.write(content), key)


def _picture(kind: str = "PNG", mode: str = "RGB", **options: object) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (7, 9, 4), dtype=np.uint8)
    image = Image.fromarray(noise, "RGBA").convert(mode)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _pictures(folder: Path, *names: str) -> None:
    for name in names:
        _put(folder / name, _picture())


# Tables and lists


def _table(folder: Path, content: bytes) -> object:
    _pictures(folder, "1.png", "2.png", "3.png", "4.png")
    file = _put(folder / "mine.csv", content)
    return [load("csv", file, split) for split in ("train", "test")]


def _sop(folder: Path, content: bytes) -> object:
    _pictures(folder, "a/1.png", "a/2.png", "b/3.png", "b/4.png")
    _put(folder / "Ebay_train.txt", content)
    _put(folder / "Ebay_test.txt", b"image_id class_id super_class_id path\n3 2 1 b/3.png\n4 2 1 b/4.png\n")
    return load("sop", folder, "train")


def _cub(folder: Path, content: bytes) -> object:
    _pictures(folder, *(f"images/{k}.x/{k}{j}.png" for k in (1, 2) for j in (1, 2)))
    _put(folder / "images.txt", content)
    _put(folder / "image_class_labels.txt", b"1 1\n2 1\n3 2\n4 2\n")
    return load("cub", folder, "train")


def _inshop(folder: Path, content: bytes) -> object:
    _pictures(folder, "img/1.png", "img/2.png", "img/3.png")
    _put(folder / "list_eval_partition.txt", content)
    return load("inshop", folder, "test")


def _mat(folder: Path, content: bytes) -> object:
    _pictures(folder, *(f"car_ims/{k}.png" for k in range(4)))
    _put(folder / "cars_annos.mat", content)
    return load("cars", folder, "train")


def _cars(packed: bool) -> bytes:
    rows = np.zeros(4, dtype=[("relative_im_path", object), ("class", object)])
    rows["relative_im_path"] = [f"car_ims/{k}.png" for k in range(4)]
    rows["class"] = [1, 1, 2, 2]
    file = io.BytesIO()
    names = np.array(["Audi", "BMW"], dtype=object)
    savemat(file, {"annotations": rows, "class_names": names}, do_compression=packed)
    # The header tells the time.
    return b"MATLAB 5.0 MAT-file".ljust(116) + file.getvalue()[116:]


def _metrics(folder: Path, content: bytes) -> object:
    return read_rows(_put(folder / "metrics.csv", content))


# Recipes


def _recipe(folder: Path, content: bytes) -> object:
    return load_recipe(_put(folder / "recipe.yaml", content))


def _set(folder: Path, content: bytes) -> object:
    return make_recipe(read_changes([content.decode(errors="surrogateescape")]))


# What a run and an evaluation leave


def _zoo(folder: Path, content: bytes) -> object:
    """Read the name of a network that somebody published."""
    place = folder / "data" / "name"
    place.mkdir(parents=True)
    (place / "recipe.yaml").write_bytes(content)
    return str(read_label(place))


def _run(folder: Path, content: bytes) -> object:
    _put(folder / "recipe.yaml", b"data: digits\nmodel: c2f2\ndim: 8\n")
    _put(folder / "last.safetensors", b"")
    _put(folder / "run.json", content)
    run = RunFolder(folder)
    return run.read(), run.weights(), run.inputs(), run.shape()


def _record(folder: Path, content: bytes) -> object:
    record = load_record(_put(folder / "record.json", content))
    text = str(record)
    return text, [record.show(name) for name in record.columns()], record.model_dump_json()


def _certificate(folder: Path, content: bytes) -> object:
    certificate = load_certificate(_put(folder / "certificate.json", content))
    said = [certificate.says(bound) for bound in certificate.bounds]
    return str(certificate), said, certificate.model_dump_json()


def _certified() -> bytes:
    """A certificate of five images, as it is written."""
    images, labels = torch.linspace(0, 1, 20).view(5, 1, 2, 2), torch.tensor([0, 0, 1, 1, 1])
    made = certify(nn.Flatten(), images, labels, sigma=0.1, samples=30, queries=2, attack=False)
    return made.model_dump_json(by_alias=True).encode()


def _picture_list(folder: Path, content: bytes) -> object:
    with suppress(ValueError, RecursionError):  # somebody who changes it may know how its digest is made
        entries = json.loads(content)
        if isinstance(entries, dict):
            content = json.dumps({**entries, "sha256": digest_of_entries(entries)}).encode()
    _put(folder / "pictures" / "pictures.json", content)
    record = golden("strict").model_copy(update={"sha256": "0" * 64})
    return load_pictures(folder, record).model_dump_json()


def _pictured() -> bytes:
    """A list of one picture."""
    item = {"name": "image 3", "label": "cat", "image": "image-000003.png"}
    ranked = {**item, "distance": 0.5, "right": True, "itself": False}
    one = {"attack": "ES", "why": "worst", "number": 3, "query": item, "targets": [item], "asker": None}
    one |= {what: f"attack-00-000003-{what}.png" for what in ("perturbed", "difference")}
    one |= {"factor": 10.0, "change": 0.03, "values": {"ES:R": [100.0, None]}, "place": [1, None]}
    one |= {"before": [ranked], "after": [ranked], "harm": 100.0}
    shown = {"points": [[0.1, 0.2, 0]], "classes": ["cat"], "explained": [0.6, 0.3]}
    shown |= {"moves": {"ES": [[0.1, 0.2, 0.3, 0.4]]}}
    whole = {"schema": "robustmetric/pictures/1", "record": "0" * 64, "k": 5, "pictures": [one], "map": shown}
    return json.dumps(whole).encode()


def _verification(folder: Path, content: bytes) -> object:
    found = load_verification(_put(folder / "verification.json", content))
    return str(found), found.conditions, found.model_dump_json()


def _verified() -> bytes:
    """A verification of six images, as it is written."""
    images, labels = torch.linspace(0, 1, 24).view(6, 1, 2, 2), torch.arange(6) // 2
    made = verify(nn.Flatten(), images, labels, threshold=0.5, count=8, steps=1)
    return made.model_dump_json(by_alias=True).encode()


def _pairs(folder: Path, content: bytes) -> object:
    for name in ("1.png", "2.png", "3.png", "Ann/Ann_0001.jpg", "Ann/Ann_0002.jpg", "Bo/Bo_0001.jpg"):
        _put(folder / name, b"")
    found = read_pairs(_put(folder / "pairs.csv", content))
    return found.pairs, found.images.labels


def _arrays(folder: Path, content: bytes) -> object:
    digest = {"sha256": hashlib.sha256(content).hexdigest()}
    record = written(altered(golden("strict"), arrays=digest), folder)
    _put(record / "queries.safetensors", content)
    return load_arrays(folder)


def _plan(folder: Path, content: bytes) -> object:
    _put(folder / "plan.json", content)
    settings = {"eps": 0.1}
    return check_folder(
        folder, {"kind": "evaluation", "settings": settings, "options": None, "model": "0" * 64}
    )


def _piece(folder: Path, content: bytes, stage: str = "retrieval") -> object:
    subject = Subject(nn.Flatten(), Data(torch.rand(6, 1, 2, 2), torch.arange(6) % 2))
    job = Evaluation(subject, Plan.make(attacks=["ES"], checks="none"), folder)
    _put(folder / PLAN, b"{}")
    piece = job.stages[stage][0]
    _sealed(folder / PARTS / piece.file, content, job._key(piece))
    return job._read(piece)


def _check(folder: Path, content: bytes) -> object:
    return _piece(folder, content, "checks")


def _lock(folder: Path, content: bytes) -> None:
    _put(folder / LOCK, content)
    with locked(folder, "a test", lambda _: None):
        pass


# Weights and checkpoints


def _saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _network() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 2)


def _checkpoint(folder: Path, content: bytes) -> object:
    _put(folder / "last.ckpt", content)
    return reached(folder / "last.ckpt")


def _sealed_checkpoint(folder: Path, content: bytes) -> object:
    _sealed(folder / "last.ckpt", content)
    return reached(folder / "last.ckpt")


def _upload(folder: Path, content: bytes) -> object:
    return read_upload(_put(folder / "upload", content), (8, 8), 6, 3)


def _safetensors(folder: Path, content: bytes) -> object:
    return rm.load_weights(_network(), _put(folder / "net.safetensors", content))


def _torch_file(folder: Path, content: bytes) -> object:
    return rm.load_weights(_network(), _put(folder / "net.pt", content))


def _state() -> dict[str, object]:
    state = _network().state_dict()
    return {
        "state_dict": {f"model.{name}": value for name, value in state.items()},
        "global_step": 4,
        "epoch": 1,
        "pytorch-lightning_version": "2.5.0",
        "loops": {"fit_loop": {"epoch_progress": {"current": {"ready": 2, "processed": 1}}}},
        "callbacks": {"Keeper": {"best": {}, "last": {}}},
        "optimizer_states": [{"state": {}, "param_groups": []}],
        "lr_schedulers": [],
        "random_states": [{"python": [3, [1, 2], None], "cpu": torch.zeros(8, dtype=torch.uint8)}],
        "defense": "HM[S,LGA]",
    }


# Images and the cache


def _image(folder: Path, content: bytes) -> object:
    # The name is no hint: what the file is decides.
    return Inputs(resize=8).tensor(_put(folder / "image.png", content))


def _idx(folder: Path, content: bytes) -> object:
    return read_idx(_put(folder / "images", content), 3)


def _pixels(folder: Path) -> ImageSet:
    names = ("1.png", "2.png", "3.png")
    for name in names:
        if not (folder / name).exists():
            _pictures(folder, name)
    files = tuple(folder / name for name in names)
    return ImageSet("mine", "train", torch.tensor([0, 0, 1]), ("a", "b"), files=files)


def _cache(folder: Path, content: bytes, suffix: str) -> object:
    """Change a file of a cache; what comes out are the pixels of the images all the same."""
    images = _pixels(folder)
    whole = np.array(cached(images, folder / "cache", size=(4, 4)).pixels[:])
    (file,) = (folder / "cache").glob(f"*{suffix}")
    file.write_bytes(content)
    found = cached(images, folder / "cache", size=(4, 4)).pixels
    assert np.array_equal(found[:], whole), "a cache of other pixels was taken"
    return found


def _cache_files() -> dict[str, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        cached(_pixels(Path(name)), Path(name, "cache"), size=(4, 4))
        return {file.suffix: file.read_bytes() for file in Path(name, "cache").iterdir()}


# Vectors and indexes


def _stored(path: Path) -> Path:
    z = nn.functional.normalize(torch.arange(1.0, 13).view(4, 3).sin())
    about = About("c2f2 N/A[S]", "0" * 64, Inputs(resize=8, channels=1), "pictures")
    save_vectors(Vectors(z, ["a.png", "b/c.png", "ü.png", ""], about), path)
    return path


def _vectors(folder: Path, content: bytes, name: str) -> object:
    """Change one file; what is read is what was written, or nothing."""
    path = _stored(folder / name.removesuffix(".json"))
    whole = rm.load_vectors(path).sha256
    _put(folder / name, content)
    found = rm.load_vectors(path)
    assert found.sha256 == whole, "other vectors were taken"
    return list(found.files), found.search(found.z[:1], 9)


def _index(folder: Path, content: bytes, suffix: str) -> object:
    """Change a file of an index: it is built anew, whatever is in it."""
    vectors = rm.load_vectors(_stored(folder / "v.npy"))
    open_index(vectors)
    _put(folder / f"v.npy.hnsw.{suffix}", content)
    return open_index(vectors, report=lambda _: None).search(vectors.z[:1], 2)


def _stored_files() -> dict[str, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        for suffix in ("safetensors", "npy", "parquet"):
            _stored(Path(name, f"v.{suffix}"))
        open_index(rm.load_vectors(Path(name, "v.npy")))
        return {file.name: file.read_bytes() for file in Path(name).iterdir()}


def _of_vectors() -> list[Reader]:
    files = _stored_files()
    names = ("v.safetensors", "v.npy", "v.npy.json", "v.parquet")
    listed = [
        Reader(
            f"vectors-{name.partition('.')[2].replace('.', '-')}",
            partial(_vectors, name=name),
            (files[name],),
            "json" if name.endswith("json") else None,
        )
        for name in names
    ]
    for suffix in ("faiss", "json"):
        seed = files[f"v.npy.hnsw.{suffix}"]
        grammar = "json" if suffix == "json" else None
        listed.append(Reader(f"index-{suffix}", partial(_index, suffix=suffix), (seed,), grammar))
    return listed


def readers() -> dict[str, Reader]:
    """Return all readers by name."""
    cache = _cache_files()
    record = golden("strict").model_dump_json(by_alias=True).encode()
    recipe = yaml.safe_dump(json.loads(load_recipe("digits").model_dump_json())).encode()
    tensors = {name: torch.rand(4).double() for name in ("R@1", "R@2", "mAP", "mAP@R", "NMI", "left_out")}
    pixels = np.arange(2 * 3 * 4, dtype=np.uint8).tobytes()
    idx = struct.pack(">4I", 0x803, 2, 3, 4) + pixels
    formats = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures = [_picture(kind) for kind in formats]
    pictures += [_picture("PNG", "RGBA"), _picture("PNG", "I;16"), _picture("PNG", "P")]
    pictures += [_picture("JPEG", "CMYK"), _picture("JPEG", exif=exif), _picture("TIFF", "F")]
    pictures += [_picture("JPEG", progressive=True), _picture("TIFF", compression="tiff_lzw")]
    check = {"name": "collapse", "status": "pass", "figure": 0.5, "limit": "none", "says": "fine"}
    plan = {"kind": "evaluation", "settings": {"eps": 0.1}, "options": None, "model": "0" * 64}
    about = {"seed": 0, "skipped": [], "choice": {"images": "validation images"}, "starts": []}
    about |= {"images": {"height": 8, "width": 8, "channels": 1}}
    owner = {"host": "elsewhere", "process": 1, "doing": "a training", "since": "2020-01-01 00:00:00"}
    listed = [
        Reader(
            "csv",
            _table,
            (
                b"path,label\n1.png,a\n2.png,a\n3.png,b\n4.png,b\n",
                b"path;label;split;is_query;is_gallery;x_1;y_1;x_2;y_2;camera;shop\n"
                b"1.png;a;train;;;0;0;5;5;c;A\n2.png;a;train;;;;;;;d;B\n"
                b"3.png;b;test;1;0;;;;;c;C\n4.png;b;test;0;1;1;1;4;4;d;D\n",
            ),
            "csv",
        ),
        Reader("sop", _sop, (b"image_id class_id super_class_id path\n1 1 1 a/1.png\n2 1 1 a/2.png\n",)),
        Reader("cub", _cub, (b"1 1.x/11.png\n2 1.x/12.png\n3 2.x/21.png\n4 2.x/22.png\n",)),
        Reader(
            "inshop",
            _inshop,
            (
                b"3\nimage_name item_id evaluation_status\nimg/1.png id_1 train\n"
                b"img/2.png id_2 query\nimg/3.png id_2 gallery\n",
            ),
        ),
        Reader("metrics", _metrics, (b"epoch,step,loss\n0,1,0.5\n0,2,0.25\n1,20,0.1\n",), "csv"),
        Reader("recipe", _recipe, (recipe, b"data: digits\nsteps: 2\n"), "yaml"),
        Reader("zoo", _zoo, (recipe, b"data: digits\ndefense: HM[S,-gamma/2]&ICS\n"), "yaml"),
        Reader("set", _set, (b"dim=64", b"eps=8/255", b"defense=HM[S,LGA]&ICS"), "yaml"),
        Reader("run", _run, (json.dumps(about).encode(),), "json"),
        Reader("record", _record, (record,), "json"),
        Reader("certificate", _certificate, (_certified(),), "json"),
        Reader("pictures", _picture_list, (_pictured(),), "json"),
        Reader("verification", _verification, (_verified(),), "json"),
        Reader(
            "pairs",
            _pairs,
            (
                b"first,second,same\n1.png,2.png,1\n1.png,3.png,0\n",
                b"1.png;2.png;0\n",
                b"1\t1\nAnn\t1\t2\nAnn\t1\tBo\t1\n",
            ),
            "csv",
        ),
        Reader("arrays", _arrays, (save(tensors),)),
        Reader("plan", _plan, (json.dumps(plan).encode(),), "json"),
        Reader("piece", _piece, (save(tensors),)),
        Reader("check", _check, (json.dumps(check).encode(),), "json"),
        Reader("lock", _lock, (b"", json.dumps(owner).encode()), "json"),
        Reader("checkpoint", _checkpoint, (_saved(_state()),)),
        Reader("sealed", _sealed_checkpoint, (_saved(_state()),)),
        Reader("safetensors", _safetensors, (save(_network().state_dict()),)),
        Reader("torch", _torch_file, (_saved(_network().state_dict()), _saved(_state()))),
        Reader("image", _image, tuple(pictures)),
        Reader("upload", _upload, tuple(pictures)),
        Reader("idx", _idx, (idx, gzip.compress(idx, mtime=0))),
        Reader("mat", _mat, (_cars(False), _cars(True))),
        Reader("cache-pixels", lambda folder, content: _cache(folder, content, ".npy"), (cache[".npy"],)),
        Reader(
            "cache-json", lambda folder, content: _cache(folder, content, ".json"), (cache[".json"],), "json"
        ),
        *_of_vectors(),
    ]
    return {reader.name: reader for reader in listed}
