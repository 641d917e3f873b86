"""Search on the command line."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from pathlib import Path

import pytest
from PIL import Image

import robustmetric as rm
from robustmetric.vectors import index
from tests.helpers.command import cells, command, refused, works
from tests.helpers.runs import make_pictures, make_run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, pictures and their vectors."""
    home = tmp_path_factory.mktemp("search")
    make_run(home / "run", "last")
    make_pictures(home / "pictures", 6)
    works("embed", home / "run", home / "pictures", "-o", home / "v.safetensors")
    return home


def expected(home: Path, images: list[Path], k: int) -> list[tuple[str, int, str, float]]:
    vectors = rm.load_vectors(home / "v.safetensors")
    found = vectors.search(rm.load_run(home / "run").embed(images), k)
    return [
        (str(image), rank, vectors.files[int(place)], float(distance))
        for image, places, distances in zip(images, found.position, found.distance, strict=True)
        for rank, (place, distance) in enumerate(zip(places, distances, strict=True), 1)
    ]


def test_a_table_of_what_is_nearest(home: Path) -> None:
    images = [home / "pictures" / name for name in ("class01/2.png", "class04/0.png")]
    told = works("search", home / "run", *images, "--in", home / "v.safetensors", "-k", 3)
    rows = [cells(line) for line in told.splitlines() if line.startswith("│")]
    wanted = expected(home, images, 3)
    assert [row[1:] for row in rows] == [[str(rank), file, f"{far:.4f}"] for _, rank, file, far in wanted]
    assert [row[0] for row in rows] == [str(images[0]), "", "", str(images[1]), "", ""]
    assert [row[2] for row in rows][::3] == ["class01/2.png", "class04/0.png"]


def test_json_and_csv(home: Path) -> None:
    images = [home / "pictures" / "class01" / "2.png", home / "pictures" / "class02" / "0.png"]
    arguments = ("search", home / "run", *images, "--in", home / "v.safetensors")
    wanted = expected(home, images, 10)
    found = json.loads(works(*arguments, "--json"))
    assert [tuple(hit.values()) for hit in found] == wanted
    assert list(found[0]) == ["image", "rank", "file", "distance"]
    head, *rows = csv.reader(io.StringIO(works(*arguments, "--csv")))
    assert head == ["image", "rank", "file", "distance"]
    assert [(a, int(b), c) for a, b, c, _ in rows] == [hit[:3] for hit in wanted]
    # Six digits behind the point.
    assert all(abs(float(row[3]) - hit[3]) <= 5.1e-7 for row, hit in zip(rows, wanted, strict=True))
    assert "json and csv exclude each other" in refused(*arguments, "--json", "--csv")


def test_k_may_be_more_than_there_are(home: Path) -> None:
    image = home / "pictures" / "class01" / "2.png"
    arguments = ("search", home / "run", image, "--in", home / "v.safetensors", "-k")
    assert len(json.loads(works(*arguments, 100, "--json"))) == 18
    assert refused(*arguments, 0) == "error: k must be a whole number of at least 1, not 0 (-k)\n"


def test_strange_names_are_shown_as_they_are(home: Path, tmp_path: Path) -> None:
    names = ["=1+1.png", "esc\x1b[2J.png", "new\nline.png", os.fsdecode(b"byte\xff.png"), "[red]a.png"]
    (tmp_path / "images").mkdir()
    for number, name in enumerate(names):
        Image.new("L", (8, 8), 40 * number).save(tmp_path / "images" / name, "png")
    works("embed", home / "run", tmp_path / "images", "-o", tmp_path / "v.safetensors")
    arguments = ("search", home / "run", tmp_path / "images" / names[1], "--in", tmp_path / "v.safetensors")
    told = works(*arguments)
    rows = [cells(line) for line in told.splitlines() if line.startswith("│")]
    assert sorted(row[2] for row in rows) == [
        "=1+1.png",
        "[red]a.png",
        "byte\\xff.png",
        "esc\\x1b[2J.png",
        "new\\nline.png",
    ]
    sheet = works(*arguments, "--csv")
    found = [row[2] for row in csv.reader(io.StringIO(sheet))][1:]
    assert sorted(found) == ["'=1+1.png", "[red]a.png", "byte\\xff.png", "esc\\x1b[2J.png", "new\nline.png"]
    data = works(*arguments, "--json")
    assert sorted(hit["file"] for hit in json.loads(data)) == sorted(names)
    assert "\x1b" not in told + sheet + data
    assert data.isascii()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_an_index_is_built_once_and_says_what_it_finds(
    kind: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = home / "pictures" / "class03" / "1.png"
    arguments = ("search", home / "run", image, "--in", home / "v.safetensors", "-k", 4)
    first = command(*arguments, "--index", kind)
    assert first.err == f"{kind} finds 100.0 % of what exact search does (recall@4 of 18 stored vectors)\n"
    assert first.out == works(*arguments)
    monkeypatch.setattr(index, "_built", lambda *_: pytest.fail("an index was built again"))
    assert command(*arguments, "--index", kind) == first
    (home / f"v.safetensors.{kind}.faiss").write_bytes(b"IHNf" + bytes(100))
    monkeypatch.undo()
    again = command(*arguments, "--index", kind)
    assert again.err.splitlines()[0].endswith("does not match the digest beside it: it is built anew")
    assert again.out == first.out


def test_faiss_means_a_graph(home: Path) -> None:
    image = home / "pictures" / "class03" / "1.png"
    said = command("search", home / "run", image, "--in", home / "v.safetensors", "--index", "faiss", "-k", 2)
    assert "hnsw finds 100.0 % " in said.err


def test_what_cannot_be_searched_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, vectors = home / "pictures" / "class03" / "1.png", home / "v.safetensors"
    other = make_run(tmp_path / "other", "last", first=9)
    said = refused("search", other, image, "--in", vectors)
    for run in (other, home / "run"):
        assert f"c2f2 HM[S,LGA]&ICS (SHA-256 {rm.load_run(run).digest[:12]})" in said
    damaged = tmp_path / "damaged.safetensors"
    content = bytearray(vectors.read_bytes())
    content[-300] ^= 1
    damaged.write_bytes(content)
    assert "damaged.safetensors is damaged: its content" in refused(
        "search", home / "run", image, "--in", damaged
    )
    assert "nowhere.npy; make one with" in refused("search", home / "run", image, "--in", "nowhere.npy")
    assert "recipe.yaml cannot be read: is not PNG" in refused(
        "search", home / "run", home / "run" / "recipe.yaml", "--in", vectors
    )
    said = refused("search", home / "run", image, "--in", vectors, "--index", "lsh")
    assert said == "error: unknown index 'lsh'; known: faiss, hnsw, ivf (--index)\n"
    monkeypatch.setitem(sys.modules, "faiss", None)
    said = refused("search", home / "run", image, "--in", vectors, "--index", "ivf")
    assert said == (
        "error: an index needs faiss, which is not installed: pip install 'robustmetric[faiss]' (--index)\n"
    )
