"""A folder of images into a file of vectors: interrupted, damaged, changed, and always the same in the end.

This file is also the program that the test of kills starts (see tests/helpers/processes.py).
"""

from __future__ import annotations

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
import pytest
import torch
from PIL import Image
from torch import nn

import robustmetric as rm
from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError
from robustmetric.files import DamagedError
from robustmetric.locks import InUseError, locked
from robustmetric.models.c2f2 import C2F2
from robustmetric.sphere import ROUNDING, BrokenEmbeddingsError
from robustmetric.training import Run
from robustmetric.vectors import blocks, embed_folder
from tests.helpers.networks import Counted
from tests.helpers.processes import at_call, die, forked, needs_fork, run_program
from tests.helpers.runs import make_pictures, make_run

STRANGE = ["new\nline.png", "'quote\".png", "esc\x1b[2J.png", os.fsdecode(b"byte\xff.png"), "ü 漢.png"]


class Stop(BaseException):
    """As Ctrl-C is."""


def stop_at(done: int) -> Callable[[int, int], None]:
    def watch(now: int, total: int) -> None:
        if now >= done:
            raise Stop

    return watch


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", 4)


@pytest.fixture
def counted(run: Run) -> Run:
    """The run, with a network that counts the images that go through it."""
    return Run(Counted(run.network), run.inputs, run.recipe, run.chosen)


def passed(run: Run) -> int:
    assert isinstance(run.network, Counted)
    return run.network.forwards


def quiet(_: str) -> None:
    pass


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".parquet"])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_vectors_are_those_of_each_file(
    suffix: str, batch: int, run: Run, pictures: Path, tmp_path: Path
) -> None:
    out = tmp_path / f"v{suffix}"
    told: list[tuple[int, int]] = []
    done = embed_folder(run, pictures, out, batch=batch, progress=lambda *now: told.append(now))
    assert (done.count, done.skipped, done.listed) == (30, 0, {})
    vectors = rm.load_vectors(out)
    assert list(vectors.files) == sorted(str(p.relative_to(pictures)) for p in pictures.rglob("*.png"))
    alone = torch.cat([run.embed(pictures / name) for name in vectors.files])
    assert float((vectors.z - alone).norm(dim=1).max()) < ROUNDING
    vectors.check(run)
    assert vectors.about is not None
    assert (vectors.about.run, vectors.about.folder) == (run.name, str(pictures))
    assert told[0] == (0, 30)
    assert told[-1] == (30, 30)
    assert told == sorted(told)
    assert not list(tmp_path.glob("*unfinished*"))


def test_strange_names_are_kept(run: Run, tmp_path: Path) -> None:
    for number, name in enumerate(STRANGE):
        Image.new("L", (8, 8), 50 * number).save(tmp_path / name, "png")
    embed_folder(run, tmp_path, tmp_path / "v.safetensors")
    vectors = rm.load_vectors(tmp_path / "v.safetensors")
    assert sorted(vectors.files) == sorted(STRANGE)
    for number, name in enumerate(STRANGE):
        z = run.embed(Image.new("L", (8, 8), 50 * number))
        assert vectors.files[int(vectors.search(z, 1).position)] == name


def test_a_table_of_files(run: Run, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("path,label\npictures/class01/1.png,x\npictures/class00/2.png,x\n")
    embed_folder(run, tmp_path / "mine.csv", tmp_path / "v.npy")
    vectors = rm.load_vectors(tmp_path / "v.npy")
    assert sorted(vectors.files) == ["pictures/class00/2.png", "pictures/class01/1.png"]
    assert vectors.about is not None
    assert vectors.about.folder == str(tmp_path)


# Interruptions


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".parquet"])
def test_an_interrupted_embedding_goes_on(suffix: str, counted: Run, pictures: Path, tmp_path: Path) -> None:
    embed_folder(counted, pictures, tmp_path / f"whole{suffix}", batch=4)
    out, before = tmp_path / f"v{suffix}", passed(counted)
    told: list[str] = []
    for done in (5, 14, 29):
        with pytest.raises(Stop):
            embed_folder(counted, pictures, out, batch=4, progress=stop_at(done), report=told.append)
        assert not out.exists()
    embed_folder(counted, pictures, out, batch=4, report=told.append)
    # A block is lost with each interruption.
    assert passed(counted) - before == 30 + 4 * 2 + 2
    assert told == [f"{n} of 30 images are embedded already: going on from there" for n in (4, 12, 28)]
    for file in tmp_path.glob(f"whole{suffix}*"):
        assert file.read_bytes() == (tmp_path / file.name.replace("whole", "v")).read_bytes()
    assert not list(tmp_path.glob("*unfinished*"))


def test_another_batch_may_go_on(counted: Run, pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        embed_folder(counted, pictures, tmp_path / "v.npy", batch=8, progress=stop_at(20), report=quiet)
    before = passed(counted)
    embed_folder(counted, pictures, tmp_path / "v.npy", batch=3, report=quiet)
    assert passed(counted) - before == 30 - 16, "blocks of 8, of which two were finished"
    z = rm.load_vectors(tmp_path / "v.npy").z
    embed_folder(counted, pictures, tmp_path / "w.npy", batch=64)
    assert float((z - rm.load_vectors(tmp_path / "w.npy").z).norm(dim=1).max()) < ROUNDING


@pytest.mark.parametrize("change", ["cut", "flip", "other", "gone"])
def test_a_damaged_block_is_made_anew(change: str, counted: Run, pictures: Path, tmp_path: Path) -> None:
    embed_folder(counted, pictures, tmp_path / "whole.npy", batch=4)
    with pytest.raises(Stop):
        embed_folder(counted, pictures, tmp_path / "v.npy", batch=4, progress=stop_at(17), report=quiet)
    first, second = (tmp_path / "v.npy.unfinished" / f"0000000{k}.block" for k in (1, 2))
    content = bytearray(first.read_bytes())
    if change == "flip":
        content[len(content) // 2] ^= 1
    changed = {"cut": bytes(content[:40]), "flip": bytes(content), "other": second.read_bytes()}
    first.unlink()
    if change in changed:
        first.write_bytes(changed[change])
    before = passed(counted)
    embed_folder(counted, pictures, tmp_path / "v.npy", batch=4, report=quiet)
    assert passed(counted) - before == 30 - 12, "one of the four blocks that were finished"
    assert (tmp_path / "v.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()


def test_blocks_of_changed_images_are_made_anew(counted: Run, pictures: Path, tmp_path: Path) -> None:
    out, files = tmp_path / "v.npy", sorted(pictures.rglob("*.png"))
    for file in (files[5], files[9]):
        file.write_bytes(file.read_bytes().ljust(1000, b"\0"))  # what is behind a PNG is not looked at
    with pytest.raises(Stop):
        embed_folder(counted, pictures, out, batch=4, progress=stop_at(29), report=quiet)
    shutil.copy(files[9], files[5])  # in the second block, and as long as before
    os.utime(files[5], ns=(1, 1))
    files[29].unlink()  # in the last, which was not finished
    before = passed(counted)
    embed_folder(counted, pictures, out, batch=4, report=quiet)
    assert passed(counted) - before == 4 + 1
    vectors = rm.load_vectors(out)
    assert len(vectors) == 29
    assert torch.allclose(vectors.z[5], vectors.z[9], atol=ROUNDING)


def test_a_block_is_of_the_files_as_they_were_read(run: Run, pictures: Path, tmp_path: Path) -> None:
    """An image that changes while its block is made is seen to have changed."""
    files = sorted(pictures.rglob("*.png"))

    def change(now: int, total: int) -> None:
        if now == 3:  # the first is read, and its block is not yet finished
            shutil.copy(files[20], files[0])
        if now == 9:
            raise Stop

    with pytest.raises(Stop):
        embed_folder(run, pictures, tmp_path / "v.npy", batch=1, progress=change, report=quiet)
    embed_folder(run, pictures, tmp_path / "v.npy", batch=1, report=quiet)
    z = rm.load_vectors(tmp_path / "v.npy").z
    assert torch.equal(z[0], z[20])


def test_blocks_of_something_else_are_refused(run: Run, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.npy"
    with pytest.raises(Stop):
        embed_folder(run, pictures, out, batch=4, progress=stop_at(20), report=quiet)
    other = rm.load_run(make_run(tmp_path / "other", "last", first=5))
    both = f"network was {run.digest[:12]}, is {other.digest[:12]}"
    told = rf"v\.npy\.unfinished holds blocks of something else \({both}\)"
    with pytest.raises(
        UserError, match=rf"{told}: finish that first, give another file, or remove them with force"
    ):
        embed_folder(other, pictures, out)
    shutil.copytree(pictures, tmp_path / "copy")
    with pytest.raises(UserError, match=rf"\(folder was {pictures}, is {tmp_path / 'copy'}\)"):
        embed_folder(run, tmp_path / "copy", out)
    embed_folder(other, pictures, out, force=True, report=quiet)
    rm.load_vectors(out).check(other)
    assert not list(tmp_path.glob("*unfinished*"))


def test_a_damaged_plan_is_named(run: Run, pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        embed_folder(run, pictures, tmp_path / "v.npy", batch=4, progress=stop_at(20), report=quiet)
    plan = tmp_path / "v.npy.unfinished" / "plan.json"
    plan.write_text(plan.read_text().replace('"block": 4', '"block": 5'))
    with pytest.raises(
        DamagedError, match=r"plan\.json is damaged: remove .* and run the same command again"
    ):
        embed_folder(run, pictures, tmp_path / "v.npy")


def test_a_folder_of_somebody_else_is_left_alone(run: Run, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "v.npy.unfinished").mkdir()
    (tmp_path / "v.npy.unfinished" / "mine").touch()
    with pytest.raises(UserError, match=r"v\.npy\.unfinished is not empty, and holds no blocks: look at it"):
        embed_folder(run, pictures, tmp_path / "v.npy")


def test_one_at_a_time(run: Run, pictures: Path, tmp_path: Path) -> None:
    with (
        locked(tmp_path / "v.npy.unfinished", "an embedding"),
        pytest.raises(InUseError, match="is in use: an emb"),
    ):
        embed_folder(run, pictures, tmp_path / "v.npy")


ATTEMPTS = [
    ("forward", 2),
    ("fsync", 1),
    ("fsync", 4),
    ("rename", 3),
    ("forward", 2),
    ("rename", 3),
    ("fsync", 1),
]
LAST = {  # among the writing of the file itself
    ".safetensors": [("rename", 1)],
    ".npy": [("rename", 1), ("fsync", 3), ("rename", 2)],
}


def arm(kind: str, number: int) -> None:
    """Let this process be killed."""
    owner: Any = {"forward": C2F2, "fsync": os}.get(kind, Path)
    name = {"rename": "replace"}.get(kind, kind)
    setattr(owner, name, at_call(number, die, getattr(owner, name)))


def program(order: dict[str, Any]) -> list[tuple[int, str]]:
    """Embed in processes that are killed, and in a last one that is not."""
    torch.set_num_threads(1)
    blocks._BLOCK = 4
    run = rm.load_run(order["run"])

    def attempt(plan: tuple[str, int] | None) -> Callable[[], object]:
        def act() -> None:
            if plan is not None:
                arm(*plan)
            embed_folder(run, order["folder"], order["out"], batch=4)

        return act

    return [forked(attempt(plan)) for plan in [*order["attempts"], None]]


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("suffix", [".safetensors", ".npy"])
def test_killed_at_any_moment_the_same_call_goes_on(suffix: str, tmp_path: Path) -> None:
    folder = make_pictures(tmp_path / "pictures", 10)
    run = make_run(tmp_path / "run", "last")
    embed_folder(rm.load_run(run), folder, tmp_path / f"whole{suffix}", batch=4)
    attempts = [*ATTEMPTS, *LAST[suffix]]
    order = {
        "run": str(run),
        "folder": str(folder),
        "out": str(tmp_path / f"v{suffix}"),
        "attempts": attempts,
    }
    *ends, last = run_program(__file__, order)
    assert [code for code, _ in ends] == [-9] * len(attempts), ends
    assert last[0] == 0, last
    for file in tmp_path.glob(f"whole{suffix}*"):
        assert file.read_bytes() == (tmp_path / file.name.replace("whole", "v")).read_bytes()
    beside = {file.name for file in tmp_path.iterdir() if not file.name.startswith("whole")}
    assert beside == {"pictures", "run", *(f.name.replace("whole", "v") for f in tmp_path.glob("whole*"))}


def test_stopped_behind_the_end_it_says_what_is_left(
    run: Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Stop

    out, place = tmp_path / "v.npy", tmp_path / "v.npy.unfinished"
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "_clear", stop)
        with pytest.raises(Stop):
            embed_folder(run, pictures, out, batch=4)
    content = out.read_bytes()
    with pytest.raises(
        UserError, match=rf"already \({place} is what an interruption left: remove it\): give ano"
    ):
        embed_folder(run, pictures, out, batch=4)
    embed_folder(run, pictures, out, batch=4, force=True, report=quiet)
    assert (out.read_bytes(), place.exists()) == (content, False)


# Images that cannot be read


def broken_ones(pictures: Path) -> list[str]:
    (pictures / "class00" / "0.png").write_bytes(b"")
    (pictures / "class03" / "9.jpg").write_text("no image")
    (pictures / "class05" / "0.png").write_bytes((pictures / "class05" / "1.png").read_bytes()[:50])
    (pictures / "gone.png").symlink_to(pictures / "nowhere.png")
    return ["class00/0.png", "class03/9.jpg", "class05/0.png", "gone.png"]


def test_broken_images_are_listed_and_the_others_kept(counted: Run, pictures: Path, tmp_path: Path) -> None:
    names, out = broken_ones(pictures), tmp_path / "v.npy"
    with pytest.raises(UserError) as caught:
        embed_folder(counted, pictures, out)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"4 of the 32 images below {pictures} cannot be read:"
    assert [line.split(":")[0].strip() for line in lines[1:5]] == names
    assert lines[1].endswith("is empty (0 bytes)")
    assert lines[5] == (
        "Repair or replace them and run again, or leave them out with skip_broken. The others are embedded "
        "and kept."
    )
    assert not out.exists()
    before = passed(counted)
    done = embed_folder(counted, pictures, out, skip_broken=True, report=quiet)
    assert passed(counted) == before, "all others were embedded already"
    assert (done.count, done.skipped, list(done.listed)) == (28, 4, names)
    vectors = rm.load_vectors(out)
    assert not set(names) & set(vectors.files)
    alone = torch.cat([counted.embed(pictures / name) for name in vectors.files])
    assert float((vectors.z - alone).norm(dim=1).max()) < ROUNDING


def test_an_image_that_is_mended_is_embedded(run: Run, pictures: Path, tmp_path: Path) -> None:
    broken = pictures / "class00" / "0.png"
    whole = broken.read_bytes()
    about = broken.stat()
    broken.write_bytes(b"x" * len(whole))
    os.utime(broken, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(UserError, match="1 of the 30 images"):
        embed_folder(run, pictures, tmp_path / "v.npy")
    broken.write_bytes(whole)  # as a changed permission does: length and time stay
    os.utime(broken, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert embed_folder(run, pictures, tmp_path / "v.npy", report=quiet).count == 30


def test_many_broken_images_are_counted(run: Run, tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.png").touch()
    for skip in (False, True):
        with pytest.raises(
            UserError, match=r"30 of the 30 images .* cannot be read:(.*\n){21}  and 10 more\n"
        ):
            embed_folder(run, tmp_path, tmp_path / "v.npy", skip_broken=skip, report=quiet)
    Image.new("L", (8, 8)).save(tmp_path / "30.png")
    done = embed_folder(run, tmp_path, tmp_path / "v.npy", skip_broken=True, report=quiet)
    assert (done.count, done.skipped, len(done.listed)) == (1, 30, 20)
    assert list(rm.load_vectors(tmp_path / "v.npy").files) == ["30.png"]


def test_images_that_the_network_is_dead_for(run: Run, tmp_path: Path) -> None:
    dead = Run(nn.Flatten(), Inputs(resize=8, channels=1), run.recipe, None)
    for number in range(6):
        Image.new("L", (8, 8), 0 if number == 2 else 100).save(tmp_path / f"{number}.png")
    with pytest.raises(
        UserError, match=r"1 of the 6 images .*\n  2.png: the network gives it a vector of zeros, NaN"
    ):
        embed_folder(dead, tmp_path, tmp_path / "v.npy")
    assert embed_folder(dead, tmp_path, tmp_path / "v.npy", skip_broken=True, report=quiet).count == 5
    diverged = Run(nn.Sequential(nn.Flatten(), nn.Threshold(2, torch.nan)), dead.inputs, run.recipe, None)
    with pytest.raises(BrokenEmbeddingsError, match="6 of 6 embeddings hold NaN"):
        embed_folder(diverged, tmp_path, tmp_path / "w.npy")


# What is refused before anything is done


def test_a_file_that_is_there_is_replaced_only_by_force(counted: Run, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.npy"
    embed_folder(counted, pictures / "class00", out)
    before = passed(counted)
    with pytest.raises(
        UserError, match=r"v\.npy is there already: give another file, or replace it with force"
    ):
        embed_folder(counted, pictures, out)
    with pytest.raises(Stop):
        embed_folder(counted, pictures, out, batch=4, force=True, progress=stop_at(9))
    assert len(rm.load_vectors(out)) == 3, "the old file stays until the new one is whole"
    assert passed(counted) > before
    embed_folder(counted, pictures, out, batch=4, force=True, report=quiet)
    assert len(rm.load_vectors(out)) == 30


def test_what_cannot_be_is_refused_at_once(run: Run, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "empty").mkdir()
    for folder, out, said in (
        (pictures, "folder.npy", "is a folder; give a file for the vectors"),
        (pictures, "v.pt", "vectors are kept as .safetensors, .npy or .parquet; give a name that ends so"),
        (tmp_path / "empty", "v.npy", "there are no images below"),
        (pictures, Path("/dev/null/v.npy"), "the folder /dev/null cannot be written to"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            embed_folder(run, folder, tmp_path / out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "folder.npy", "pictures"]


def test_names_that_parquet_cannot_have_are_refused_at_once(counted: Run, tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / os.fsdecode(b"byte\xff.png"))
    with pytest.raises(UserError, match="is not UTF-8, as texts in Parquet are"):
        embed_folder(counted, tmp_path, tmp_path / "v.parquet")
    assert passed(counted) == 0


def test_a_full_disk_is_told(
    run: Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", at_call(4, full, os.fsync))
        with pytest.raises(
            UserError, match=r"\.block cannot be written \(No space left on device\): make room; then"
        ):
            embed_folder(run, pictures, tmp_path / "v.npy", batch=4)
    told: list[str] = []
    embed_folder(run, pictures, tmp_path / "v.npy", batch=4, report=told.append)
    assert told == ["4 of 30 images are embedded already: going on from there"]


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
    """Vectors of 4,096 numbers: those of the many would take 33 MB, their pixels as floats 31 MB."""
    run = make_run(tmp_path / "run", "last", dim=4096)
    rng = np.random.default_rng(0)
    for name, count in (("few", 300), ("many", 2000)):
        (tmp_path / name).mkdir()
        for number in range(count):
            pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number:05}.png", compress_level=0)
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", PEAK, str(run), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    few, many = (1024 * int(line) for line in done.stdout.split())
    # A block of 256 vectors is 4 MB, and is written through two copies of it.
    assert many - few < 12 * 10**6, (few, many)
    assert len(rm.load_vectors(tmp_path / "many.safetensors")) == 2000


if __name__ == "__main__":
    print(json.dumps(program(json.loads(sys.argv[1]))))
