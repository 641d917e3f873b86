"""Files of vectors: what was written is read, and what is damaged is not."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from safetensors import safe_open

import robustmetric as rm
from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError
from robustmetric.files import DamagedError
from robustmetric.vectors import About, Names, Vectors, formats, parquet, save_vectors
from robustmetric.vectors.content import PIECE, Hashed, looked_at
from tests.vectors.conftest import ABOUT, stored, unit

SUFFIXES = [".safetensors", ".npy", ".parquet"]
NAMES = ["a/new\nline.png", "'quote\".png", "esc\x1b[2J.png", "ü 漢.png", ""]
every = pytest.mark.parametrize("suffix", SUFFIXES)


@every
def test_vectors_come_back(suffix: str, tmp_path: Path) -> None:
    z = unit(5, 3)
    vectors = stored(tmp_path / f"v{suffix}", z, NAMES)
    assert torch.equal(vectors.z, z)
    assert list(vectors.files) == NAMES
    assert vectors.about == ABOUT
    assert vectors.path == tmp_path / f"v{suffix}"
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_the_digest_is_the_same_in_every_format_and_of_everything(tmp_path: Path) -> None:
    z = unit(5, 3)
    digests = {stored(tmp_path / f"v{suffix}", z, NAMES).sha256 for suffix in SUFFIXES}
    assert len(digests) == 1
    others = [
        Vectors(z.flip(0), NAMES, ABOUT),
        Vectors(z, NAMES[::-1], ABOUT),
        Vectors(z, ["a/new\nline.png'quote\".png", "", *NAMES[2:]], ABOUT),
        *(
            Vectors(z, NAMES, about)
            for about in (replace(ABOUT, run="b"), replace(ABOUT, network="b"), replace(ABOUT, folder="b"))
        ),
        Vectors(z, NAMES, replace(ABOUT, inputs=Inputs(resize=9, channels=1))),
    ]
    for number, other in enumerate(others):
        save_vectors(other, tmp_path / f"{number}.npy")
        digests.add(rm.load_vectors(tmp_path / f"{number}.npy").sha256)
    assert len(digests) == 1 + len(others)


@pytest.mark.parametrize("suffix", [".safetensors", ".npy"])
def test_bytes_that_are_no_text_come_back(suffix: str, tmp_path: Path) -> None:
    names = [os.fsdecode(b"byte\xff.png"), "b.png"]
    assert list(stored(tmp_path / f"v{suffix}", unit(2, 3), names).files) == names


def test_parquet_takes_texts_alone() -> None:
    parquet.check(Names.of(NAMES))
    with pytest.raises(
        UserError, match=r"is not UTF-8, as texts in Parquet are: rename it, or write \.safetensors"
    ):
        parquet.check(Names.of([*NAMES, os.fsdecode(b"byte\xff.png")]))


def test_others_read_the_files(tmp_path: Path) -> None:
    z = unit(4, 6)
    for suffix in SUFFIXES:
        stored(tmp_path / f"v{suffix}", z, NAMES[:4])
    with safe_open(tmp_path / "v.safetensors", "np") as file:
        assert np.array_equal(file.get_tensor("vectors"), z.numpy())
        text, ends = file.get_tensor("names").tobytes(), file.get_tensor("ends").tolist()
        assert [text[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)] == NAMES[:4]
        said = file.metadata()
    assert (said["format"], said["version"], said["run"]) == ("robustmetric vectors", "1", "c2f2 N/A[S]")
    assert json.loads(said["inputs"]) == {"resize": 8, "crop": None, "channels": 1}
    assert np.array_equal(np.load(tmp_path / "v.npy"), z.numpy())
    beside = json.loads((tmp_path / "v.npy.json").read_text())
    assert beside.pop("files") == NAMES[:4]
    assert beside == said
    table = pyarrow.parquet.read_table(tmp_path / "v.parquet")
    assert table.column_names == ["file", "vector"]
    assert table["file"].to_pylist() == NAMES[:4]
    assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), z.numpy())
    assert table.schema.field("vector").type.list_size == 6
    kept = pyarrow.parquet.read_metadata(tmp_path / "v.parquet").metadata
    assert {k.decode(): v.decode() for k, v in kept.items() if k != b"ARROW:schema"} == said


@every
def test_a_fit_that_does_not_squeeze_is_kept(suffix: str, tmp_path: Path) -> None:
    about = replace(ABOUT, inputs=Inputs(resize=8, channels=1, fit="pad"))
    save_vectors(Vectors(unit(2, 4), ["a", "b"], about), tmp_path / f"v{suffix}")
    assert rm.load_vectors(tmp_path / f"v{suffix}").about == about
    assert json.loads(about.entries()["inputs"])["fit"] == "pad"
    assert about.inputs_digest != ABOUT.inputs_digest


@every
def test_blocks_of_any_size_make_the_same_file(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many vectors as several row groups and pieces have."""
    monkeypatch.setattr("robustmetric.vectors.content.PIECE", 256)
    monkeypatch.setattr("robustmetric.vectors.parquet._AT_ONCE", 70)
    z, names = unit(90, 7), Names.of(f"{k}.png" for k in range(90))
    for size in (1, 13, 90):
        path = tmp_path / f"{size}{suffix}"
        formats.format_of(path).write(path, ABOUT, names, 7, (part.numpy() for part in z.split(size)))
        assert torch.equal(rm.load_vectors(path).z, z)


@pytest.mark.parametrize("count", [1, 1000, PIECE // 4 // 100 + 1, PIECE // 4 // 100 * 2 + 3])
def test_the_digest_of_vectors_does_not_depend_on_how_they_come(count: int) -> None:
    z = unit(count, 100).numpy()
    hashed = Hashed()
    for begin in range(0, count, 777):
        hashed.update(z[begin : begin + 777])
    digest, off = looked_at(z)
    assert hashed.digest() == digest
    truth = float(np.abs(np.square(z.astype(np.float64)).sum(1) - 1).max())
    assert abs(off - truth) < 101 * 2.0**-24  # a sum of 100 numbers in float32


# Damage


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    file = tmp_path / "v.safetensors"
    stored(file, unit(4, 3))
    content = file.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        file.write_bytes(changed)
        with pytest.raises(DamagedError, match=re.escape(str(file))):
            rm.load_vectors(file)


@every
def test_a_file_that_is_cut_is_refused(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"v{suffix}"
    stored(file, unit(6, 4))
    content = file.read_bytes()
    cut = [
        content[:length] for length in {0, 1, 7, 8, 9, len(content) // 3, len(content) // 2, len(content) - 1}
    ]
    for changed in [*cut, content + b"\0" * 16]:
        file.write_bytes(changed)
        with pytest.raises(DamagedError, match=re.escape(str(file))):
            rm.load_vectors(file)


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_changed_numbers_are_found(suffix: str, tmp_path: Path) -> None:
    file, z = tmp_path / f"v{suffix}", unit(6, 4)
    stored(file, z)
    content = file.read_bytes()
    place = content.index(z.numpy().tobytes()[:8])
    file.write_bytes(
        content[:place] + content[place + 4 : place + 8] + content[place : place + 4] + content[place + 8 :]
    )
    with pytest.raises(
        DamagedError, match="is damaged: its content does not match the digest in it; embed the"
    ):
        rm.load_vectors(file)


def test_names_beside_an_array_that_do_not_fit(tmp_path: Path) -> None:
    stored(tmp_path / "v.npy", unit(3, 4))
    stored(tmp_path / "w.npy", unit(2, 4))
    beside = tmp_path / "v.npy.json"
    content = beside.read_text()
    for changed, said in {
        content.replace("1.png", "7.png"): "is damaged: its content does not match the digest in it",
        content.replace(
            '"version": "1"', '"version": "2"'
        ): "it is of version '2', and this is of 1: take the",
        content.replace("robustmetric vectors", "something"): "it holds no vectors of robustmetric",
        content.replace('"files"', '"names"'): "lists no files",
        content.replace('"1.png"', "1"): "has names that are no texts",
        content.replace('\\"resize\\": 8', '\\"resize\\": 9'): "its inputs do not match their digest",
        content.replace('\\"resize\\": 8', '\\"resize\\": 0'): "its inputs are none",
        content[:-20]: "cannot be read as vectors",
        "[" * 100_000: "cannot be read as vectors",
        (tmp_path / "w.npy.json").read_text(): "there are 3 vectors and 2 names; each needs one",
    }.items():
        beside.write_text(changed)
        with pytest.raises(DamagedError, match=re.escape(said)):
            rm.load_vectors(tmp_path / "v.npy")
    beside.unlink()
    with pytest.raises(FileNotFoundError, match=r"v\.npy\.json is gone, which has the names of the files of"):
        rm.load_vectors(tmp_path / "v.npy")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 4)),
        np.zeros((3, 4), np.float32).T.copy().T,
        np.zeros(3, np.float32),
        np.array([None] * 3),
    ],
    ids=["double", "fortran", "flat", "objects"],
)
def test_arrays_of_another_kind_are_refused(array: np.ndarray, tmp_path: Path) -> None:
    stored(tmp_path / "v.npy", unit(3, 4))
    np.save(tmp_path / "v.npy", array, allow_pickle=True)
    with pytest.raises(DamagedError, match="cannot be read as vectors"):
        rm.load_vectors(tmp_path / "v.npy")


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.5])
def test_vectors_that_are_not_on_the_sphere_are_refused(value: float, tmp_path: Path) -> None:
    z = unit(3, 4)
    z[1, 2] = value
    names = ["a", "b", "c"]
    save_vectors(Vectors(z, names, ABOUT), tmp_path / "v.safetensors")
    with pytest.raises(UserError, match=r"v\.safetensors: some vectors are not of length 1, or hold NaN"):
        rm.load_vectors(tmp_path / "v.safetensors")


def test_what_is_no_file_of_vectors(tmp_path: Path) -> None:
    rm.save_weights(torch.nn.Linear(2, 2), tmp_path / "net.safetensors")
    (tmp_path / "v.parquet").write_bytes(b"PAR1 no table PAR1")
    pyarrow.parquet.write_table(pyarrow.table({"file": ["a"]}), tmp_path / "w.parquet")
    for name in ("net.safetensors", "v.parquet", "w.parquet"):
        with pytest.raises(DamagedError, match=rf"{name} cannot be read as vectors: it "):
            rm.load_vectors(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"no file of vectors .*; make one with robustmetric embed"):
        rm.load_vectors(tmp_path / "nowhere.npy")
    with pytest.raises(
        UserError, match=r"v\.csv: vectors are kept as \.safetensors, \.npy or \.parquet; give"
    ):
        rm.load_vectors(tmp_path / "v.csv")


# What is there, and what is not


@every
def test_a_file_that_is_there_is_replaced_only_by_force(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"v{suffix}"
    stored(file, unit(3, 4))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = Vectors(unit(2, 4), ["a", "b"], ABOUT)
    with pytest.raises(UserError, match="is there already: give another file, or replace it with force"):
        save_vectors(other, file)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save_vectors(other, file, force=True)
    assert list(rm.load_vectors(file).files) == ["a", "b"]


def test_a_json_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "v.npy.json").write_text("mine")
    with pytest.raises(UserError, match=r"v\.npy\.json is there already"):
        save_vectors(Vectors(unit(2, 4), ["a", "b"], ABOUT), tmp_path / "v.npy")


def test_parquet_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "v.parquet", unit(2, 4))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    told = r"Parquet needs pyarrow, which is not installed: pip install 'robustmetric\[parquet\]', or write"
    with pytest.raises(UserError, match=told):
        rm.load_vectors(tmp_path / "v.parquet")
    with pytest.raises(UserError, match=told):
        save_vectors(Vectors(unit(2, 4), ["a", "b"], ABOUT), tmp_path / "w.parquet")
    assert not (tmp_path / "w.parquet").exists()


def test_where_vectors_come_from_is_kept() -> None:
    about = About("mine", "0" * 64, Inputs(resize=3, crop=2, channels=3), "somewhere")
    assert About.read(about.entries()) == about
    with pytest.raises(ValueError, match="run, network or folder is missing"):
        About.read({key: value for key, value in about.entries().items() if key != "run"})
