"""Folders of images into files of vectors, on the command line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from PIL import Image

import robustmetric as rm
from robustmetric.models.c2f2 import C2F2
from robustmetric.vectors import blocks
from tests.helpers.command import command, refused, works
from tests.helpers.processes import at_call, stop_by
from tests.helpers.runs import make_pictures, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", "last", "best")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return make_pictures(tmp_path / "pictures", 4)


@pytest.mark.parametrize("suffix", ["safetensors", "npy", "parquet"])
def test_a_folder_becomes_a_file(suffix: str, run: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / f"v.{suffix}"
    assert works("embed", run, pictures, "-o", out).endswith(f"12 vectors are in {out}\n")
    vectors = rm.load_vectors(out)
    vectors.check(rm.load_run(run))
    assert len(vectors) == 12


def test_the_weights_that_are_asked_for(run: Path, pictures: Path, tmp_path: Path) -> None:
    for name in ("last", "best", run / "last.safetensors"):
        out = tmp_path / f"{Path(name).stem}-{len(str(name))}.npy"
        works("embed", run, pictures, "--out", out, "--weights", name)
        rm.load_vectors(out).check(rm.load_run(run, name))
    assert rm.load_run(run, "last").digest != rm.load_run(run, "best").digest
    said = refused("embed", run, pictures, "-o", tmp_path / "v.npy", "--weights", "first")
    assert said == "error: there is no weights file first: give another file (--weights)\n"


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_stops_it_and_the_same_command_goes_on(
    name: str, code: int, run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", 4)
    arguments = ("embed", run, pictures, "--batch", 4, "-o")
    works(*arguments, tmp_path / "whole.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(C2F2, "forward", at_call(2, stop_by(signal.Signals[name]), C2F2.forward))
        said = command(*arguments, tmp_path / "v.safetensors")
    assert said.code == code
    assert said.out == "stopped; what is finished is kept: the same command resumes\n"
    told = works(*arguments, tmp_path / "v.safetensors")
    assert told.startswith("4 of 12 images are embedded already: going on from there\n")
    whole, found = (tmp_path / f"{name}.safetensors" for name in ("whole", "v"))
    assert whole.read_bytes() == found.read_bytes()


def test_a_file_that_is_there_is_replaced_only_by_force(run: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.npy"
    works("embed", run, pictures / "class00", "-o", out)
    said = refused("embed", run, pictures, "-o", out)
    assert said == f"error: {out} is there already: give another file, or replace it with force (--force)\n"
    works("embed", run, pictures, "-o", out, "--force")
    assert len(rm.load_vectors(out)) == 12


def test_broken_images_are_listed_without_steering_the_terminal(
    run: Path, pictures: Path, tmp_path: Path
) -> None:
    (pictures / "esc\x1b[2J.png").write_text("no image")
    (pictures / os.fsdecode(b"byte\xff.png")).write_text("no image")
    out = tmp_path / "v.safetensors"
    said = refused("embed", run, pictures, "-o", out)
    assert said.startswith(f"error: 2 of the 14 images below {pictures} cannot be read:\n")
    assert "  byte\\xff.png: is not PNG, " in said
    assert "  esc\\x1b[2J.png: is not PNG, " in said
    assert "leave them out with --skip-broken" in said
    told = works("embed", run, pictures, "-o", out, "--skip-broken").splitlines()
    assert told[0] == "14 of 14 images are embedded already: going on from there"
    assert "left out: esc\\x1b[2J.png: is not PNG, JPEG, WebP, BMP, GIF, TIFF or PPM, or damaged" in told
    assert told[-1] == f"12 vectors are in {out}"
    assert "\x1b" not in said + "".join(told)


def test_many_broken_images_are_counted(run: Path, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(25):
        (tmp_path / "many" / f"{number:02}.png").touch()
    Image.new("L", (8, 8), 99).save(tmp_path / "many" / "x.png")
    told = works("embed", run, tmp_path / "many", "-o", tmp_path / "v.npy", "--skip-broken").splitlines()
    assert sum(line.startswith("left out: ") for line in told) == 20
    assert told[-2:] == ["and 5 more were left out", f"1 vectors are in {tmp_path / 'v.npy'}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("RUN", "PICTURES", "-o", "v.txt"), "are kept as .safetensors, .npy or .parquet; give a name that"),
        (("RUN", "nowhere", "-o", "v.npy"), "there is no folder nowhere of images; give one, or a CSV file"),
        (("nowhere", "PICTURES", "-o", "v.npy"), "nowhere is no run, it has no recipe.yaml: give the folder"),
        (("RUN", "PICTURES", "-o", "v.npy", "--batch", "0"), "number of at least 1, not 0 (--batch)"),
        (("RUN", "PICTURES", "-o", "v.npy", "--device", "tpu"), "cpu, cuda or mps, not 'tpu' (--device)"),
        (("RUN", "RUN", "-o", "v.npy"), "there are no images below"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: tuple[str, ...],
    said: str,
    run: Path,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"RUN": run, "PICTURES": pictures}
    assert said in refused("embed", *(places.get(argument, argument) for argument in arguments))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "pictures"}


def test_code_of_a_run_is_run_only_if_it_is_trusted(tmp_path: Path, pictures: Path) -> None:
    code = "from torch import nn\n\ndef flattened():\n    return nn.Flatten()\n"
    run = tmp_path / "theirs"
    (run / "code").mkdir(parents=True)
    (run / "code" / "nets.py").write_text(code)
    (run / "recipe.yaml").write_text("data: digits\nmodel: code/nets.py:flattened\n")
    rm.save_weights({}, run / "last.safetensors")
    said = refused("embed", run, pictures, "-o", tmp_path / "v.npy")
    assert "nets.py" in said
    assert "--trust" in said
    works("embed", run, pictures, "-o", tmp_path / "v.npy", "--trust")
