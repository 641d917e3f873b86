"""Vectors as a value: searched, and compared with a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import robustmetric as rm
from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError
from robustmetric.training import Run
from robustmetric.vectors import About, Vectors
from tests.helpers.runs import make_run
from tests.vectors.conftest import ABOUT, stored, unit


def test_a_file_is_searched_without_a_copy(tmp_path: Path) -> None:
    z = unit(40, 6)
    vectors = stored(tmp_path / "v.safetensors", z)
    before = vectors.path.read_bytes() if vectors.path else b""
    found = vectors.search(z[3:5], 4)
    assert found.position[:, 0].tolist() == [3, 4]
    assert found.distance.shape == (2, 4)
    assert torch.equal(found.position, Vectors(z, [""] * 40).search(z[3:5], 4).position)
    vectors.z[:] = 0  # a mistake that the file does not take part in
    assert (tmp_path / "v.safetensors").read_bytes() == before


def test_k_may_be_more_than_there_are() -> None:
    found = Vectors(unit(3, 4), ["a", "b", "c"]).search(unit(2, 4, seed=1), k=10)
    assert found.position.shape == found.distance.shape == (2, 3)
    assert sorted(found.position[0].tolist()) == [0, 1, 2]
    assert (found.distance.diff() >= 0).all()


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "3"])
def test_k_is_a_number_of_places(k: Any) -> None:
    with pytest.raises(UserError, match="k must be a whole number of at least 1, not"):
        Vectors(unit(3, 4), ["a", "b", "c"]).search(unit(1, 4), k)


@pytest.mark.parametrize(
    ("z", "said"),
    [
        (unit(1, 5), "z has vectors of 5 numbers, and these have 4: embed both with one network"),
        (unit(2, 4)[0], r"z must be floats of shape \(N, D\).* not float32 of shape \(4,\)"),
        (
            torch.ones(1, 4),
            "some vectors are not of length 1, or hold NaN: take what a run embeds, or divide",
        ),
        (torch.full((1, 4), torch.nan), "some vectors are not of length 1, or hold NaN"),
        (torch.ones(1, 4, dtype=torch.long), "z must be floats of shape .* not int64"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(z: torch.Tensor, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Vectors(unit(3, 4), ["a", "b", "c"]).search(z)


@pytest.mark.parametrize(
    ("z", "names", "said"),
    [
        (unit(3, 4), ["a", "b"], "there are 3 vectors and 2 names; each needs one"),
        (unit(3, 4).double(), ["a", "b", "c"], r"z is torch.float64 on cpu; it must be float32 on the CPU"),
        (unit(3, 4)[:0], [], r"z must be .* not float32 of shape \(0, 4\)"),
    ],
)
def test_what_are_no_vectors_is_refused(z: torch.Tensor, names: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Vectors(z, names)


def test_vectors_that_are_not_on_the_sphere_are_not_searched() -> None:
    with pytest.raises(UserError, match="some vectors are not of length 1"):
        Vectors(torch.ones(2, 4), ["a", "b"]).search(unit(1, 4))


def test_vectors_of_another_run_are_refused(run: Run, tmp_path: Path) -> None:
    z, names = unit(2, 16), ["a", "b"]
    mine = About(run.name, run.digest, run.inputs)
    Vectors(z, names, mine).check(run)
    other = rm.load_run(make_run(tmp_path / "other", "last", first=7, defense="N/A[S]"))
    told = (
        rf"this holds vectors of another network: they are of c2f2 HM\[S,LGA\]&ICS \(SHA-256 "
        rf"{run.digest[:12]}\), and the run is c2f2 N/A\[S\] \(SHA-256 {other.digest[:12]}\); give the run"
    )
    with pytest.raises(UserError, match=told):
        Vectors(z, names, mine).check(other)
    prepared = replace(mine, inputs=Inputs(resize=9, channels=1))
    with pytest.raises(UserError, match=r"brought to Inputs\(resize=9.*and the run takes Inputs\(resize=8"):
        Vectors(z, names, prepared).check(run)
    with pytest.raises(UserError, match="do not say which network they are of"):
        Vectors(z, names).check(run)


def test_vectors_say_what_they_are(tmp_path: Path) -> None:
    vectors = stored(tmp_path / "v.npy", unit(1200, 4))
    assert len(vectors) == 1200
    assert repr(vectors) == f"Vectors(1,200 of 4, {tmp_path / 'v.npy'})"
    assert vectors.about == ABOUT
