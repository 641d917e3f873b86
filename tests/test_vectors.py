"""Vectors of a folder: interrupted, damaged, changed, always the same in the end; and searched exactly."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

import robustmetric as rm
from robustmetric import vectors as module
from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError
from robustmetric.files import DamagedError
from robustmetric.locks import InUseError, claimed
from robustmetric.sphere import ROUNDING, BrokenEmbeddingsError
from robustmetric.squares import distances
from robustmetric.training import Run
from robustmetric.vectors import Vectors, embed_folder, images_below, save_vectors
from tests.helpers.command import cells, refused, works
from tests.helpers.networks import Counted
from tests.helpers.runs import make_pictures, make_run

BYTES = os.fsdecode(b"byte\xff.png")
STRANGE = ["=1+1.png", "new\nline.png", "'quote\".png", "esc\x1b[2J.png", BYTES, "ü 漢.png"]
ABOUT = {"run": "c2f2 N/A[S]", "network": "a" * 64}
BLOCK = 4


class StopError(BaseException):
    """As Ctrl-C is."""


def stop_at(done: int) -> Callable[[int, int], None]:
    def watch(now: int, total: int) -> None:
        if now >= done:
            raise StopError

    return watch


def quiet(_: str) -> None:
    pass


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", BLOCK)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("vectors") / "run", "last", "best")


@pytest.fixture
def run(folder: Path) -> Run:
    """A c2f2 for grey images of 8 × 8, which counts the images that go through it."""
    loaded = rm.load_run(folder)
    return Run(Counted(loaded.network), loaded.inputs, loaded.recipe, loaded.chosen)


def passed(run: Run) -> int:
    assert isinstance(run.network, Counted)
    return run.network.forwards


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Thirty pictures in ten folders."""
    return make_pictures(tmp_path / "pictures", 10)


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name not in ("pictures", "run"))


# Embed


def test_the_vectors_are_those_of_each_file_whatever_the_batch(
    run: Run, pictures: Path, tmp_path: Path
) -> None:
    for batch in (1, 3, 64):
        out = tmp_path / f"{batch}.safetensors"
        done = embed_folder(run, pictures, out, batch=batch)
        assert (done.count, done.skipped) == (30, 0)
        vectors = rm.load_vectors(out)
        assert list(vectors.files) == sorted(str(p.relative_to(pictures)) for p in pictures.rglob("*.png"))
        alone = torch.cat([run.embed(pictures / name) for name in vectors.files])
        assert float((vectors.z - alone).norm(dim=1).max()) < ROUNDING
        vectors.check(run)
        assert (vectors.about["run"], vectors.about["folder"]) == (run.name, str(pictures))
    assert left(tmp_path) == ["1.safetensors", "3.safetensors", "64.safetensors"]


def test_others_read_the_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for number, name in enumerate(STRANGE):
        Image.new("L", (8, 8), 40 * number).save(tmp_path / "pictures" / name, "png")
    for to in ("safetensors", "npy", "parquet"):
        embed_folder(run, tmp_path / "pictures", tmp_path / f"v-{to}", to=to)
    vectors = rm.load_vectors((tmp_path / "v-safetensors").rename(tmp_path / "v.safetensors"))
    assert sorted(vectors.files) == sorted(STRANGE)
    z = vectors.z.numpy()
    with safe_open(tmp_path / "v.safetensors", "np") as file:
        assert np.array_equal(file.get_tensor("vectors"), z)
        text, ends = file.get_tensor("names").tobytes(), file.get_tensor("ends").tolist()
        names = [os.fsdecode(text[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        said = file.metadata()
    assert names == list(vectors.files)
    assert said.pop("sha256") != "0" * 64
    assert (said["format"], said["run"]) == ("robustmetric vectors 2", run.name)
    assert np.array_equal(np.load(tmp_path / "v-npy"), z)
    beside = json.loads((tmp_path / "v-npy.json").read_text())
    assert (beside.pop("files"), beside) == (names, said)
    table = pyarrow.parquet.read_table(tmp_path / "v-parquet")
    assert table["file"].to_pylist() == [name.replace("\udcff", "\\udcff") for name in names]
    assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), z)


def test_a_table_of_files(run: Run, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("path,label\npictures/class01/1.png,x\npictures/class00/2.png,x\n")
    embed_folder(run, tmp_path / "mine.csv", tmp_path / "v.safetensors")
    vectors = rm.load_vectors(tmp_path / "v.safetensors")
    assert sorted(vectors.files) == ["pictures/class00/2.png", "pictures/class01/1.png"]
    (tmp_path / "boxes.csv").write_text("path,label,x_1,y_1,x_2,y_2\npictures/class00/1.png,x,0,0,4,4\n")
    with pytest.raises(UserError, match="has boxes"):
        images_below(tmp_path / "boxes.csv")


# Interruptions


@pytest.mark.parametrize("suffix", ["safetensors", "npy", "parquet"])
def test_an_interrupted_embedding_resumes_to_the_same_bytes(
    suffix: str, run: Run, pictures: Path, tmp_path: Path
) -> None:
    embed_folder(run, pictures, tmp_path / f"whole.{suffix}", batch=4)
    out, before = tmp_path / f"v.{suffix}", passed(run)
    told: list[str] = []
    for done in (5, 14, 29):
        with pytest.raises(StopError):
            embed_folder(run, pictures, out, batch=4, progress=stop_at(done), report=told.append)
        assert not out.exists()
    embed_folder(run, pictures, out, batch=4, report=told.append)
    assert passed(run) - before == 30 + 4 * 2 + 2, "a block is lost with each interruption"
    assert told == [f"{n} of 30 images are embedded already: resuming" for n in (4, 12, 28)]
    for file in tmp_path.glob(f"whole.{suffix}*"):
        assert file.read_bytes() == (tmp_path / file.name.replace("whole", "v")).read_bytes()
    assert not list(tmp_path.glob("*unfinished*"))


@pytest.mark.parametrize("change", ["cut", "flip", "other", "gone"])
def test_a_damaged_block_is_made_again(change: str, run: Run, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.safetensors"
    embed_folder(run, pictures, tmp_path / "whole.safetensors", batch=4)
    with pytest.raises(StopError):
        embed_folder(run, pictures, out, batch=4, progress=stop_at(17), report=quiet)
    first, second = (tmp_path / "v.safetensors.unfinished" / f"0000000{k}.block" for k in (1, 2))
    content = bytearray(first.read_bytes())
    if change == "flip":
        content[len(content) // 2] ^= 1
    changed = {"cut": bytes(content[:40]), "flip": bytes(content), "other": second.read_bytes()}
    first.unlink()
    if change in changed:
        first.write_bytes(changed[change])
    before = passed(run)
    embed_folder(run, pictures, out, batch=4, report=quiet)
    assert passed(run) - before == 30 - 12, "one of the four blocks that were finished"
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_blocks_of_changed_images_are_made_again(run: Run, pictures: Path, tmp_path: Path) -> None:
    """Also of those that change while they are embedded."""
    out, files = tmp_path / "v.safetensors", sorted(pictures.rglob("*.png"))

    def change(now: int, total: int) -> None:
        if now == 12:  # the images of this block are read, and its vectors not yet written
            shutil.copy(files[20], files[10])
        if now > 24:
            raise StopError

    with pytest.raises(StopError):
        embed_folder(run, pictures, out, batch=4, progress=change, report=quiet)
    about = files[5].stat()
    shutil.copy(files[21], files[5])
    os.utime(files[5], ns=(about.st_atime_ns, about.st_mtime_ns))
    before = passed(run)
    embed_folder(run, pictures, out, batch=4, report=quiet)
    assert passed(run) - before == 6 + 4 + 4
    z = rm.load_vectors(out).z
    assert torch.allclose(z[10], z[20], atol=ROUNDING)
    assert torch.allclose(z[5], z[21], atol=ROUNDING)


def test_blocks_of_something_else_are_refused(run: Run, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.safetensors"
    with pytest.raises(StopError):
        embed_folder(run, pictures, out, batch=4, progress=stop_at(20), report=quiet)
    other = rm.load_run(make_run(tmp_path / "run", "last", first=5))
    shutil.copytree(pictures, tmp_path / "copy")
    for network, folder in ((other, pictures), (run, tmp_path / "copy")):
        with pytest.raises(UserError, match="holds blocks of another network or folder"):
            embed_folder(network, folder, out)
    plan = tmp_path / "v.safetensors.unfinished" / "plan.json"
    plan.write_text(plan.read_text().replace("c2f2", "c2f3"))
    with pytest.raises(DamagedError, match=r"plan\.json is damaged"):
        embed_folder(run, pictures, out)
    embed_folder(other, pictures, out, force=True, report=quiet)
    rm.load_vectors(out).check(other)
    (tmp_path / "w.npy.unfinished").mkdir()
    (tmp_path / "w.npy.unfinished" / "mine").touch()
    with pytest.raises(UserError, match="holds blocks of another"):
        embed_folder(run, pictures, tmp_path / "w.npy")
    assert (tmp_path / "w.npy.unfinished" / "mine").exists()


def test_one_at_a_time(run: Run, pictures: Path, tmp_path: Path) -> None:
    with claimed(tmp_path / "v.npy", "an embedding"), pytest.raises(InUseError) as caught:
        embed_folder(run, pictures, tmp_path / "v.npy")
    assert "remove" not in str(caught.value)


# Images without a vector


def test_broken_images_are_listed_and_the_others_kept(run: Run, pictures: Path, tmp_path: Path) -> None:
    (pictures / "class00" / "0.png").write_bytes(b"")
    (pictures / "class03" / "9.jpg").write_text("no image")
    broken = pictures / "class05" / "0.png"
    content = broken.read_bytes()
    broken.write_bytes(content[:50])
    names, out = ["class00/0.png", "class03/9.jpg", "class05/0.png"], tmp_path / "v.safetensors"
    with pytest.raises(UserError, match="3 of the 31 images") as caught:
        embed_folder(run, pictures, out)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:4]] == names
    assert lines[1].endswith("is empty (0 bytes)")
    before = passed(run)
    done = embed_folder(run, pictures, out, skip_broken=True, report=quiet)
    assert passed(run) == before, "all others were embedded already"
    assert (done.count, done.skipped, list(done.listed)) == (28, 3, names)
    vectors = rm.load_vectors(out)
    assert not set(names) & set(vectors.files)
    alone = torch.cat([run.embed(pictures / name) for name in vectors.files])
    assert float((vectors.z - alone).norm(dim=1).max()) < ROUNDING
    broken.write_bytes(content)
    with pytest.raises(UserError, match="2 of the 31 images"):
        embed_folder(run, pictures, tmp_path / "w.safetensors")


def test_images_that_the_network_is_dead_for(run: Run, tmp_path: Path) -> None:
    dead = Run(nn.Flatten(), Inputs(resize=8, channels=1), run.recipe, None)
    for number in range(6):
        Image.new("L", (8, 8), 0 if number == 2 else 100).save(tmp_path / f"{number}.png")
    with pytest.raises(UserError, match=r"1 of the 6 images .*\n  2.png: the network returns zeros"):
        embed_folder(dead, tmp_path, tmp_path / "v.npy")
    assert embed_folder(dead, tmp_path, tmp_path / "v.npy", skip_broken=True, report=quiet).count == 5
    diverged = Run(nn.Sequential(nn.Flatten(), nn.Threshold(2, torch.nan)), dead.inputs, run.recipe, None)
    with pytest.raises(BrokenEmbeddingsError):
        embed_folder(diverged, tmp_path, tmp_path / "w.npy")


# Images below a folder


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_images_are_found_below_all_folders(tmp_path: Path) -> None:
    images = ["a-1.jpg", "a.bmp", "a/1.jpeg", "b.png/1.png", "b/10.PNG", "b/2.png", "b/c/1.webp", "z.gif"]
    strange = [f"fo\nlder/{name}" for name in STRANGE]
    put(tmp_path, *images, *strange, "notes.txt", ".hidden.png", ".hidden/1.png", "png")
    put(tmp_path, "b/photo.svg")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
    told: list[str] = []
    assert images_below(tmp_path, told.append) == sorted([*images, *strange])
    assert told == [f"not read below {tmp_path}: 1 .svg, 1 .txt, 1 without an ending; convert images to .png"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no images below"):
        images_below(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        images_below(tmp_path / "nowhere")


def test_links_are_followed_but_not_in_a_circle(run: Run, tmp_path: Path) -> None:
    put(tmp_path, "photos/a/1.png", "elsewhere/2.png")
    photos, other = tmp_path / "photos", tmp_path / "elsewhere"
    links = {
        "a/up": photos,
        "b": other,
        "c": other,
        "3.png": other / "2.png",
        "gone.png": tmp_path / "nowhere",
    }
    for name, target in {**links, "itself": photos / "itself", "self.png": photos / "self.png"}.items():
        (photos / name).symlink_to(target)
    told: list[str] = []
    assert images_below(photos, told.append) == ["3.png", "a/1.png", "b/2.png", "c/2.png"]
    assert told == ["links without a file are left out: gone.png, itself, self.png"]


# Files


def unit(count: int, dim: int, seed: int = 0) -> Tensor:
    """Vectors of length 1, drawn at random."""
    return F.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)))


def stored(path: Path, z: Tensor) -> Vectors:
    save_vectors(path, ABOUT, [f"{k}.png" for k in range(len(z))], (part.numpy() for part in z.split(3)))
    return rm.load_vectors(path)


def test_a_file_is_mapped_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 64)
    path, z = tmp_path / "v.safetensors", unit(40, 6)
    vectors = stored(path, z)
    assert torch.equal(vectors.z, z)
    assert (vectors.about["run"], vectors.path, vectors.files[3]) == ("c2f2 N/A[S]", path, "3.png")
    before = path.read_bytes()
    vectors.z[:] = 0  # a mistake that the file does not take part in
    assert path.read_bytes() == before


def test_no_flipped_bit_and_no_missing_byte_goes_unnoticed(tmp_path: Path) -> None:
    file = tmp_path / "v.safetensors"
    stored(file, unit(4, 3))
    content = file.read_bytes()
    changes = [content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
               for place in range(len(content))]  # fmt: skip
    for changed in [*changes, b"", content[:9], content[:-1], content + b"\0"]:
        file.write_bytes(changed)
        with pytest.raises(DamagedError, match=re.escape(str(file))):
            rm.load_vectors(file)


def test_what_are_no_vectors_is_refused(tmp_path: Path) -> None:
    rm.save_weights(nn.Linear(2, 2), tmp_path / "net.safetensors")
    with pytest.raises(DamagedError, match="cannot be read as vectors"):
        rm.load_vectors(tmp_path / "net.safetensors")
    np.save(tmp_path / "v.npy", unit(2, 3).numpy())
    with pytest.raises(UserError, match="cannot be searched"):
        rm.load_vectors(tmp_path / "v.npy")
    with pytest.raises(FileNotFoundError, match="make one with robustmetric embed"):
        rm.load_vectors(tmp_path / "nowhere.safetensors")
    for z, names in ((unit(3, 4), ["a", "b"]), (unit(3, 4).double(), ["a"] * 3), (unit(3, 4)[:0], []),
                     (torch.ones(2, 4), ["a"] * 2), (torch.full((2, 4), torch.nan), ["a"] * 2)):  # fmt: skip
        with pytest.raises(UserError):
            Vectors(z, names)


def test_what_cannot_be_written_is_refused_at_once(
    run: Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "mine.npy.json").write_text("mine")
    (tmp_path / "mine.safetensors").write_text("mine")
    before = left(tmp_path)
    for name in ("folder.npy", "v.pt", "mine.npy", "mine.safetensors", "nowhere/v.npy"):
        with pytest.raises(UserError):
            embed_folder(run, pictures, tmp_path / name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'robustmetric\[parquet\]'"):
        embed_folder(run, pictures, tmp_path / "v.parquet")
    assert (passed(run), left(tmp_path)) == (0, before)
    with pytest.raises(StopError):
        embed_folder(
            run, pictures, tmp_path / "mine.safetensors", force=True, progress=stop_at(9), report=quiet
        )
    assert (tmp_path / "mine.safetensors").read_text() == "mine", "it stays until the new one is whole"


# Search


def same(z: Tensor, queries: Tensor, k: int) -> None:
    """Compare a search with sorting all by squared distance and then by position."""
    found = Vectors(z, [""] * len(z)).search(queries, k)
    for row, position, distance in zip(
        distances(queries, z).tolist(), found.position, found.distance, strict=True
    ):
        order = sorted(range(len(row)), key=lambda place: (row[place], place))[:k]
        assert position.tolist() == order
        assert distance.tolist() == np.sqrt(np.array([row[place] for place in order], np.float32)).tolist()


@pytest.fixture(params=[64, 1 << 22], ids=["blocks", "whole"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search a few vectors at a time, and all at once."""
    monkeypatch.setattr(module, "_NUMBERS", request.param)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(("count", "dim", "queries", "k"), [(200, 8, 20, 5), (50, 3, 7, 60), (9, 1, 3, 4)])
def test_the_nearest_of_random_vectors(count: int, dim: int, queries: int, k: int) -> None:
    same(unit(count, dim), unit(queries, dim, seed=1), k)


@pytest.mark.usefixtures("_blocks")
def test_copies_are_ranked_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    z = unit(7, 5)[torch.randint(7, (120,), generator=torch.Generator().manual_seed(1))]
    same(z, unit(9, 5, seed=2), 30)
    monkeypatch.setattr(module, "_ROWS", 4)
    same(z, z[:9], 30)
    same(unit(1, 6).expand(90, -1).clone(), unit(3, 6, seed=1), 4)
    angle = torch.linspace(0, 3, 150)  # each block is nearer than all before it
    same(torch.stack([angle.cos(), angle.sin()], 1).flip(0), torch.tensor([[1.0, 0.0]]), 6)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("dim", [4, 300])
def test_what_float32_cannot_tell_apart_is_told_apart(dim: int) -> None:
    """Vectors that differ in their last bits: their products round to the same numbers, or to wrong ones."""
    z = unit(1, dim) + 1e-7 * torch.randn(300, dim, generator=torch.Generator().manual_seed(0))
    z = z / z.double().norm(dim=1, keepdim=True).float()
    same(z, F.normalize(unit(1, dim) + 0.3 * unit(6, dim, seed=1)), 20)


@pytest.mark.parametrize("dim", [1, 2, 17, 512])
def test_the_product_is_as_near_to_the_truth_as_is_said(dim: int) -> None:
    x, y = unit(200, dim) * (1 + 4e-5), unit(200, dim, seed=1) * (1 - 4e-5)
    y[:100] = x[:100]
    y[100:150] = -x[100:150]
    product = (x.numpy() @ y.numpy().T).astype(np.float64)
    truth = torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist").square().numpy()
    assert np.abs(truth - (2 - 2 * product)).max() <= module._bound(dim)


@pytest.mark.parametrize(
    ("z", "k"),
    [(unit(1, 4), 0), (unit(1, 4), 1.5), (unit(1, 5), 1), (unit(2, 4)[0], 1), (torch.ones(1, 4), 1),
     (torch.full((1, 4), torch.nan), 1), (torch.ones(1, 4, dtype=torch.long), 1)],
)  # fmt: skip
def test_what_cannot_be_searched_for_is_refused(z: Tensor, k: Any) -> None:
    with pytest.raises(UserError):
        Vectors(unit(3, 4), ["a", "b", "c"]).search(z, k)


# Commands


def test_the_commands_find_images_with_strange_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    images, out = Path("images"), Path("v.safetensors")
    images.mkdir()
    for number, name in enumerate(STRANGE):
        Image.new("L", (8, 8), 40 * number).save(images / name, "png")
    (images / "broken\x1b[2J.png").write_text("no image")
    assert "--skip-broken" in refused("embed", folder, images, "-o", out)
    told = works("embed", folder, images, "-o", out, "--skip-broken")
    arguments = ("search", out, images / STRANGE[3], images / STRANGE[0], "--run", folder, "-k", 4)
    vectors = rm.load_vectors(out)
    found = vectors.search(rm.load_run(folder).embed([images / STRANGE[3], images / STRANGE[0]]), 4)
    wanted = [vectors.files[int(place)] for row in found.position for place in row]
    data = works(*arguments, "--to", "json")
    assert [hit["file"] for hit in json.loads(data)] == wanted
    assert [hit["distance"] for hit in json.loads(data)] == [float(d) for row in found.distance for d in row]
    table, sheet = works(*arguments), works(*arguments, "--to", "csv")
    rows = [cells(line) for line in table.splitlines() if line.startswith("│")]
    assert [row[3] for row in rows if row[1]] == [f"{float(d):.4f}" for row in found.distance for d in row]
    shown = {"=1+1.png": "'=1+1.png", BYTES: "byte\\xff.png", STRANGE[3]: "esc\\x1b[2J.png"}
    assert [row[2] for row in csv.reader(io.StringIO(sheet))][1:] == [
        shown.get(name, name) for name in wanted
    ]
    assert "\x1b" not in told + table + sheet + data
    other = make_run(tmp_path / "other", "last", first=9)
    assert "give that run" in refused("search", out, images / STRANGE[0], "--run", other)


# Memory

PEAK = """
import resource, sys
from pathlib import Path
import robustmetric as rm
from robustmetric.vectors import embed_folder

run = rm.load_run(sys.argv[1])
home = Path(sys.argv[2])
for name in ("few", "many"):
    embed_folder(run, home / name, home / f"{name}.safetensors")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is in kilobytes on Linux")
def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    """Vectors of 4,096 numbers: those of the many would take 49 MB."""
    run = make_run(tmp_path / "run", "last", dim=4096)
    rng = np.random.default_rng(0)
    for name, count in (("few", 600), ("many", 3000)):
        (tmp_path / name).mkdir()
        for number in range(count):
            pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number:05}.png", compress_level=0)
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", PEAK, str(run), str(tmp_path)],
        capture_output=True, text=True, timeout=600, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    few, many = (1024 * int(line) for line in done.stdout.split())
    assert many - few < 20 * 10**6, (few, many)
    assert len(rm.load_vectors(tmp_path / "many.safetensors")) == 3000
