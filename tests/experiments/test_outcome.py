"""Cells on disk: made once, found again, and refused if they are of something else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import robustmetric.experiments.outcome as outcome_module
from robustmetric.evaluation.record import load_record
from robustmetric.experiments.cells import Cell, Job, Samplers, Scale
from robustmetric.experiments.outcome import (
    RESULT,
    find_folders,
    read_outcome,
    run_of,
    write_result,
)
from robustmetric.experiments.work import make
from robustmetric.files import DamagedError, digest_of_entries
from robustmetric.validate import UserError
from tests.helpers.faults import fault

CELL = Cell("digits", "N/A[S]")


def silent(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cells") / "cell"
    scale = Scale(epochs=1, steps=1, queries=8, batches=2, changes={"batch": 250, "dim": 16})
    make(Job(CELL, scale, folder), silent)
    return folder


@pytest.fixture
def cell(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "cell"))


def test_a_cell_is_a_run_and_the_record_of_its_last_weights(made: Path, tiny: Scale) -> None:
    found = read_outcome(CELL, tiny, made)
    assert found is not None
    assert found.record == load_record(run_of(made).evaluation)
    assert found.record is not None
    assert found.record.network.weights == "last weights"
    assert found.record.settings == tiny.plan(CELL)
    assert run_of(made).recipe().reference
    assert found.seconds is not None
    assert found.seconds.keys() == {"train", "evaluate"}


def test_a_finished_cell_is_not_made_again(made: Path, tiny: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robustmetric.experiments.work.train", None)
    monkeypatch.setattr("robustmetric.experiments.work.Evaluation", None)
    assert make(Job(CELL, tiny, made), silent) == read_outcome(CELL, tiny, made)


def test_a_network_that_collapses_is_a_result(tmp_path: Path, tiny: Scale) -> None:
    scale = replace(tiny, epochs=30, changes={"batch": 250, "dim": 16, "lr": 0.05})
    job = Job(Cell("digits", "HM[S,2]", 4), scale, tmp_path / "cell")
    found = make(job, silent)
    assert found is not None
    assert found.record is None
    assert found.collapsed is not None
    assert "collapsed" in found.collapsed
    assert read_outcome(job.task, scale, job.folder) == found


def test_the_samplers_are_measured_once(tmp_path: Path, tiny: Scale) -> None:
    job = Job(Samplers("digits"), tiny, tmp_path / "cell")
    found = make(job, silent)
    assert found is not None
    assert found.hardness is not None
    assert list(found.hardness) == list("RMSDH")
    assert {sum(one["counts"]) for one in found.hardness.values()} == {2 * 125}
    assert read_outcome(job.task, tiny, job.folder) == found


def test_nothing_there_is_nothing_made(tmp_path: Path, tiny: Scale) -> None:
    assert read_outcome(CELL, tiny, tmp_path) is None
    write_result(CELL, tiny, tmp_path)
    assert read_outcome(CELL, tiny, tmp_path) is None


def other_recipe(folder: Path, patch: pytest.MonkeyPatch) -> Scale:
    return Scale(epochs=1, steps=1, queries=8, batches=2, changes={"batch": 250, "dim": 8})


def other_protocol(folder: Path, patch: pytest.MonkeyPatch) -> Scale | None:
    change_record(folder, lambda record: record["settings"].update(protocol="strict"))
    return None


def other_version(folder: Path, patch: pytest.MonkeyPatch) -> Scale | None:
    patch.setattr(outcome_module, "__version__", "9.9")
    return None


def other_weights(folder: Path, patch: pytest.MonkeyPatch) -> Scale | None:
    change_record(folder, lambda record: record["network"].update(weights="chosen on test images"))
    return None


def no_description(folder: Path, patch: pytest.MonkeyPatch) -> Scale | None:
    (folder / RESULT).unlink()
    return None


def change_record(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = run_of(folder).evaluation / "record.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content.pop("sha256")
    change(content)
    file.write_text(json.dumps({**content, "sha256": digest_of_entries(content)}), encoding="utf-8")


@fault("reproduction", "the record of a cell is of another recipe, protocol, version or choice of weights",
       "refused with the reason; nothing is changed")  # fmt: skip
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_recipe, "dim was 16, is 8"),
        (other_protocol, "protocol was"),
        (other_version, "version was '0.1.0', is '9.9'"),
        (other_weights, "the weights are chosen on test images, not the last ones"),
        (no_description, "has no cell.json"),
    ],
)
def test_what_is_not_of_a_cell_is_refused(
    cell: Path, tiny: Scale, change: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = change(cell, monkeypatch) or tiny
    with pytest.raises(UserError, match="does not belong to its cell") as error:
        read_outcome(CELL, scale, cell)
    assert why in str(error.value)
    assert "move it away" in str(error.value)


@fault("reproduction", "a cell.json is cut short or changed by hand", "refused, with what to do")
@pytest.mark.parametrize("text", ["", "[]", '{"cell": "digits N/A[S] seed 0"', "{}"])
def test_a_damaged_description_is_refused(cell: Path, tiny: Scale, text: str) -> None:
    (cell / RESULT).write_text(text, encoding="utf-8")
    with pytest.raises(DamagedError, match=r"cell\.json is damaged"):
        read_outcome(CELL, tiny, cell)


@fault("reproduction", "two folders hold a record of one cell", "refused; both are named")
def test_two_records_for_one_cell_are_refused(tmp_path: Path) -> None:
    for machine in ("a", "b"):
        (tmp_path / machine / "name").mkdir(parents=True)
    with pytest.raises(UserError, match="2 records for one cell") as error:
        find_folders(tmp_path, ["name"])
    assert all(str(tmp_path / machine / "name") in str(error.value) for machine in ("a", "b"))


def test_records_of_several_machines_are_found_where_they_were_copied_to(tmp_path: Path) -> None:
    (tmp_path / "machine" / "one").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    assert find_folders(tmp_path, ["one", "two", "three"]) == {
        "one": tmp_path / "machine" / "one",
        "two": tmp_path / "two",
        "three": tmp_path / "three",
    }
