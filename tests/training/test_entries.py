"""What a recipe file or --set can hold, through the command line: one sentence with the place, at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from robustmetric.errors import UserError
from robustmetric.training.entries import LARGEST, read_entries, read_value
from robustmetric.training.recipe import load_recipe
from tests.helpers.command import refused

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def refused_file(tmp_path: Path, content: bytes) -> str:
    """Return what is said of a recipe file, which is little however large the file is."""
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    said = refused("train", "--recipe", path, "--out", tmp_path / "out")
    assert len(said) < 1000
    assert not (tmp_path / "out").exists()
    return said


@pytest.mark.parametrize(
    ("content", "line", "about"),
    [
        (BOMB.encode(), 1, "'a' has an anchor"),
        (b"dim: &a 3\nsteps: *a", 1, "write the value alone"),
        (b"dim: 3\nsteps: *a", 2, "is an alias"),
        (b"dim: 3\nsteps: !!binary aGk=", 2, "tag"),
        (b"x: !!python/name:os.system ''", 1, "tag"),
        (b"dim: 3\n" + b"steps: " + b"[" * 900_000, 2, "write a single value"),
        (b"? " * 10_000, 1, ""),
        (b"{" * 10_000, 1, ""),
        (b"dim: 3\nsteps: 4\ndim: 5", 3, "'dim' is given twice"),
        (b"3: dim", 1, "'3' is no name"),
        (b"<<: {dim: 3}", 1, "single value"),
        ("dim: 3\nsteps: 4".encode("utf-16"), 1, "save it as UTF-8"),
        (b"dim: 3\nroot: \xff", 2, "save it as UTF-8"),
        (b"dim: 3\nroot: a\x00b", 2, "0x0"),
        (b'root: "a\\0b"', 1, "NUL"),
        (b'root: "\\ud800"', 1, "cannot be read"),
        (b'root: "\\UFFFFFFFF"', 1, "not YAML"),
        (b"root: " + b"a" * 900_000, 1, "900,000 characters"),
        (b"dim: " + b"9" * 900_000, 1, "900,000 characters"),
        (b"dim: 0b_", 1, "'0b_', which cannot be read"),
        (b"dim: 3\n---\ndim: 4", 3, "a second document"),
        (b"", 1, "nothing in it"),
        (b"- epochs: 3", 1, "one in each line"),
        (b"epochs=3", 1, "one in each line"),
        (b"dim: 3\na: b: c", 2, "not YAML"),
        (b"\tdim: 3", 1, "not YAML"),
    ],
)
def test_a_file_that_is_no_recipe(content: bytes, line: int, about: str, tmp_path: Path) -> None:
    said = refused_file(tmp_path, content)
    assert f"mine.yaml, line {line}: " in said
    assert about in said


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    assert f"mine.yaml is larger than {LARGEST:,} bytes" in refused_file(tmp_path, b"#" * 5_000_000)


@pytest.mark.parametrize(
    "value",
    [
        ".inf",
        ".nan",
        "9" * 400,
        "2001-02-03",
        "2001-99-99",
        "=",
    ],
)
@pytest.mark.parametrize(
    "entry", ["dim", "lr", "eps", "clip", "validation", "epochs", "batch", "seed", "resize"]
)
def test_a_value_that_cannot_be(entry: str, value: str, tmp_path: Path) -> None:
    said = refused_file(tmp_path, f"{entry}: {value}\n".encode())
    assert f"{entry} is " in said


def test_a_mark_of_windows_and_a_folder_called_by_a_date(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"\xef\xbb\xbfroot: 2001-02-03\ndim: 3\n")
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert (recipe.root, recipe.dim) == (Path("2001-02-03"), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [
        "dim=[",
        "dim=[3]",
        "dim=&a [*a]",
        "dim=" + "[" * 100_000,
        "dim=" + "9" * 10_000,
        "dim=!!python/name:os.system ''",
        "dim=3: 4",
    ],
)
def test_a_value_of_set_that_is_none(pair: str, tmp_path: Path) -> None:
    said = refused("train", "--set", pair, "--out", tmp_path / "out")
    assert said.startswith("error: --set dim: ")
    assert len(said) < 1000


def test_set_twice(tmp_path: Path) -> None:
    assert "--set dim is given twice" in refused(
        "train", "--set", "dim=3", "--set", "dim=4", "--out", tmp_path / "out"
    )


TEXTS = st.text(
    st.sampled_from("ab:-?[]{},&*!|>%@`'\"#\n\t 0123_.e+~<=\\Uxu\0\x85\ufeff"), max_size=60
) | st.text(max_size=30)


@given(TEXTS)
@example("--- |0\n")
@example("%YAML 1.99999999999999999999999999999\n--- a")
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (read_entries, read_value):
        try:
            found = read(text, "mine.yaml")
        except UserError as error:
            assert str(error).startswith("mine.yaml, line ")  # noqa: PT017
            continue
        for key, value in found.items() if isinstance(found, dict) else [("", found)]:
            assert isinstance(key, str)
            assert value is None or isinstance(value, bool | int | float | str)
