"""Indexes of faiss: built once, measured, and read only if they are what was written."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from robustmetric.errors import UserError
from robustmetric.squares import distances
from robustmetric.vectors import Index, Vectors, index, open_index
from tests.vectors.conftest import stored, unit

faiss = index._faiss()
every = pytest.mark.parametrize("kind", ["hnsw", "ivf"])


@pytest.fixture
def vectors(tmp_path: Path) -> Vectors:
    """Two thousand vectors in heaps, as classes are, some of them twice."""
    z = torch.nn.functional.normalize(unit(40, 12).repeat(50, 1) + 0.2 * unit(2000, 12, seed=1))
    z[1500:1600] = z[:100]
    return stored(tmp_path / "v.safetensors", z)


def no_build(*_: object) -> None:
    pytest.fail("an index was built")


def recall_by_hand(found: Index, k: int) -> float:
    """The share of the k nearest others that are found, by a loop over the sample."""
    z = found.vectors.z
    drawn = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))[:100].tolist()
    hits = 0
    for own in drawn:
        square = distances(z[own : own + 1], z)[0]
        others = sorted(float(square[place]) for place in range(len(z)) if place != own)
        near = [p for p in found.search(z[own : own + 1], k + 1).position[0].tolist() if p != own][:k]
        hits += sum(p >= 0 and float(square[p]) <= others[k - 1] for p in near)
    return hits / (k * len(drawn))


@every
def test_what_an_index_finds_is_told_as_exact_search_tells_it(kind: str, vectors: Vectors) -> None:
    told: list[tuple[int, int]] = []
    made = open_index(vectors, kind, 10, progress=lambda *now: told.append(now))
    assert made.recalls[10] == made.measure(10) >= 0.99
    assert told[0] == (0, 2000)
    assert told[-1] == (2000, 2000)
    queries = unit(20, 12, seed=2)
    found, exact = made.search(queries, 10), vectors.search(queries, 10)
    both = 0
    for row in range(20):
        far = dict(zip(exact.position[row].tolist(), exact.distance[row].tolist(), strict=True))
        for place, distance in zip(found.position[row].tolist(), found.distance[row].tolist(), strict=True):
            both += place in far
            assert far.get(place, distance) == distance, "the same numbers, measured in the same way"
    assert both > 0
    assert (found.distance.diff() >= 0).all()


@every
def test_faiss_that_takes_tensors_finds_the_same(kind: str, vectors: Vectors) -> None:
    queries = unit(20, 12, seed=2)
    before = open_index(vectors, kind, 10).search(queries, 10)
    importlib.import_module("faiss.contrib.torch_utils")  # puts functions of its own in the place of faiss's
    after = open_index(vectors, kind, 10).search(queries, 10)
    assert torch.equal(after.position, before.position)


@every
@pytest.mark.parametrize("effort", [1, 1000])
def test_recall_is_what_a_loop_counts(kind: str, effort: int, vectors: Vectors) -> None:
    made = open_index(vectors, kind, 10)
    made.effort = effort if kind == "hnsw" else min(effort, made.engine.nlist)
    assert made.measure(10) == pytest.approx(recall_by_hand(made, 10), abs=1e-9)
    if effort == 1000 and kind == "ivf":
        assert made.measure(10) == 1, "all cells were searched"
    if effort == 1 and kind == "ivf":
        assert made.measure(10) < 0.99, "a test that every recall passes says nothing"


def test_copies_are_ranked_by_position(vectors: Vectors) -> None:
    made = open_index(vectors, "ivf")
    made.effort = made.engine.nlist
    found = made.search(vectors.z[1505:1506], 3)
    assert found.position[0, :2].tolist() == [5, 1505]
    assert found.distance[0, :2].tolist() == [0, 0]


@every
def test_an_index_is_built_once(kind: str, vectors: Vectors, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_index(vectors, kind, 10)
    assert vectors.path is not None
    beside = [vectors.path.with_name(f"v.safetensors.{kind}.{suffix}") for suffix in ("faiss", "json")]
    assert all(file.is_file() for file in beside)
    monkeypatch.setattr(index, "_built", no_build)
    again = open_index(vectors, kind, 10)
    assert (again.recalls, again.effort) == (first.recalls, first.effort)
    queries = unit(5, 12, seed=3)
    assert torch.equal(again.search(queries).position, first.search(queries).position)
    # Another k is measured, and kept too.
    assert open_index(vectors, kind, 3).recalls.keys() == {10, 3}
    assert json.loads(beside[1].read_text())["recalls"].keys() == {"10", "3"}


@every
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty"])
def test_a_damaged_index_is_not_read(
    kind: str, damage: str, vectors: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_index(vectors, kind)
    assert vectors.path is not None
    file = vectors.path.with_name(f"v.safetensors.{kind}.faiss")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    whole = file.read_bytes()
    file.write_bytes(
        {"flip": bytes(content), "cut": whole[:-1], "longer": whole + b"\0", "empty": b""}[damage]
    )
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(faiss, "read_index", lambda *_: pytest.fail("faiss read it"))
        open_index(vectors, kind, report=told.append)
    assert told == [f"{file} is damaged: its content does not match the digest beside it: it is built anew"]
    monkeypatch.setattr(index, "_built", no_build)
    open_index(vectors, kind)


def test_an_index_of_other_vectors_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "v.npy"
    open_index(stored(file, unit(60, 4)))
    file.unlink()
    (tmp_path / "v.npy.json").unlink()
    vectors = stored(file, unit(60, 4, seed=1))
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(faiss, "read_index", lambda *_: pytest.fail("faiss read it"))
        open_index(vectors, report=told.append)
        about = tmp_path / "v.npy.hnsw.json"
        content = about.read_text()
        for changed in (content.replace('"seed": 0', '"seed": 1'), content[:-9], "[]", "[" * 100_000, ""):
            about.write_text(changed)
            open_index(vectors, report=told.append)
    faissed = tmp_path / "v.npy.hnsw.faiss"
    assert told[0] == f"{faissed} is of other vectors than {file}: it is built anew"
    assert told[1:] == [f"{about} is damaged, or of another version: it is built anew"] * 5


def test_an_index_that_faiss_cannot_read_is_built_anew(
    vectors: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of another version may be, though its bytes are those that were written."""
    open_index(vectors)

    def fail(*_: object) -> None:
        raise RuntimeError("Error in faiss: unknown format")

    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(faiss, "read_index", fail)
        open_index(vectors, report=told.append)
    assert told == ["Error in faiss: unknown format: it is built anew"]


@every
@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_vectors(kind: str, count: int, tmp_path: Path) -> None:
    vectors = stored(tmp_path / "v.npy", unit(count, 4))
    made = open_index(vectors, kind, 10)
    found, exact = (some.search(unit(3, 4, seed=1), 10) for some in (made, vectors))
    assert torch.equal(found.position, exact.position)
    assert torch.equal(found.distance, exact.distance)
    assert made.recalls == {10: 1.0}


def test_what_is_not_found_is_marked(vectors: Vectors) -> None:
    """One cell has fewer vectors than are asked for."""
    made = open_index(vectors, "ivf")
    made.effort = 1
    found = made.search(unit(4, 12, seed=2), 1000)
    missing = found.position < 0
    assert missing.any()
    assert torch.equal(missing, found.distance.isinf())
    assert torch.equal(missing, missing.sort(1).values), "they come last"
    assert (found.position >= 0).sum(1).min() > 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("hnws", r"unknown index 'hnws' \(did you mean 'hnsw'\?\); known: faiss, hnsw, ivf"),
        ("faiss", None),
    ],
)
def test_what_an_index_is_called(kind: str, said: str | None, vectors: Vectors) -> None:
    if said is None:
        assert open_index(vectors, kind).kind == "hnsw"
        return
    with pytest.raises(UserError, match=said) as caught:
        open_index(vectors, kind)
    assert caught.value.parameter == "index"


@pytest.mark.parametrize("k", [0, -3])
def test_k_is_a_number_of_places(k: int, vectors: Vectors) -> None:
    with pytest.raises(UserError, match="k must be a whole number of at least 1"):
        open_index(vectors).search(vectors.z[:1], k)
    with pytest.raises(UserError, match="k must be a whole number of at least 1"):
        open_index(vectors, "ivf", k)


def test_vectors_without_a_file_have_no_index() -> None:
    with pytest.raises(
        UserError, match="an index stands beside the file of its vectors: load them from a file"
    ):
        open_index(Vectors(unit(3, 4), ["a", "b", "c"]))


def test_faiss_is_an_extra(vectors: Vectors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        UserError, match=r"an index needs faiss, which is not installed: pip install 'robustmetric\[faiss\]'"
    ):
        open_index(vectors)


def test_a_full_disk_is_told(vectors: Vectors, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, write: object, *_: object) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(faiss, "PyCallbackIOWriter", Full)
    with pytest.raises(
        UserError, match=r"hnsw\.faiss cannot be written \(No space left on device\): make room"
    ):
        open_index(vectors)
    assert vectors.path is not None
    assert {file.name for file in vectors.path.parent.iterdir()} == {"v.safetensors"}


def test_own_vectors_are_left_out() -> None:
    """The query itself goes, or where copies push it out of what was found, the last."""
    position = np.array([[4, 2, 9], [5, 6, 7], [3, 8, -1]])
    square = np.array([[0, 1, 2], [0, 0.5, 4], [1, 2, np.inf]], np.float32)
    others = index._others(np.array([4, 1, 8]), position, square)
    assert others.tolist() == [[1, 2], [0, 0.5], [1, np.inf]]
