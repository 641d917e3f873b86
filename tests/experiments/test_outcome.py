"""Cells on disk: made once, found again, and refused if they are of something else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import robustmetric.experiments.outcome as outcome_module
from robustmetric.errors import UserError
from robustmetric.evaluation.record import load_record
from robustmetric.experiments.cells import Cell, Job, Samplers, Scale
from robustmetric.experiments.outcome import (
    RESULT,
    evaluation_of,
    find_folders,
    read_outcome,
    run_of,
    write_result,
)
from robustmetric.experiments.sets import check_data, check_same
from robustmetric.experiments.work import make
from robustmetric.files import DamagedError, load_entries, save_entries
from robustmetric.training import CollapsedError, train
from robustmetric.training.checkpoint import reached
from tests.helpers.layouts import write_cub

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


@pytest.mark.slow
def test_a_cell_is_a_run_and_the_record_of_its_last_weights(made: Path, tiny: Scale) -> None:
    found = read_outcome(CELL, tiny, made)
    assert found is not None
    assert found.record == load_record(evaluation_of(made, tiny))
    assert found.record is not None
    assert found.record.network.weights == "last weights"
    assert found.record.settings == tiny.plan(CELL).settings
    assert run_of(made).recipe().reference


def test_a_finished_cell_is_not_made_again(made: Path, tiny: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robustmetric.experiments.work.train", None)
    monkeypatch.setattr("robustmetric.experiments.work.Evaluation", None)
    assert make(Job(CELL, tiny, made), silent) == read_outcome(CELL, tiny, made)


@pytest.mark.slow
def test_a_network_that_collapses_is_trained_to_the_end_and_scored(tmp_path: Path, tiny: Scale) -> None:
    """As the published HM[S,0] was; a training that was ended by its collapse goes on."""
    scale = replace(tiny, epochs=8, changes={"batch": 250, "dim": 16, "lr": 0.05})
    job = Job(Cell("digits", "HM[S,2]", 4), scale, tmp_path / "cell")
    run = run_of(job.folder)
    with pytest.raises(CollapsedError):
        train(scale.recipe(job.task), run.path, progress=False, report=silent)
    assert 0 < reached(run.checkpoint).done < 8
    found = make(job, silent)
    assert found is not None
    assert found.record is not None
    assert found.record.ers is not None
    assert not found.record.ers.valid
    assert found.collapsed == found.record.ers.why != ""
    assert reached(run.checkpoint).done == 8
    assert read_outcome(job.task, scale, job.folder) == found


def test_a_network_that_diverges_has_no_scores(tmp_path: Path, tiny: Scale) -> None:
    scale = replace(tiny, changes={"batch": 250, "dim": 16, "lr": 1e6})
    job = Job(CELL, scale, tmp_path / "cell")
    found = make(job, silent)
    assert found is not None
    assert found.record is None
    assert "diverged" in (found.collapsed or "")
    assert read_outcome(job.task, scale, job.folder) == found


def test_the_samplers_are_measured_once(tmp_path: Path, tiny: Scale) -> None:
    job = Job(Samplers("digits"), tiny, tmp_path / "cell")
    found = make(job, silent)
    assert found is not None
    assert found.hardness is not None
    assert list(found.hardness) == ["R", "M", "S", "S(itself=False)", "D", "H"]
    assert {sum(one["counts"]) for one in found.hardness.values()} == {2 * 125}
    assert read_outcome(job.task, tiny, job.folder) == found


def test_nothing_there_is_nothing_made(tmp_path: Path, tiny: Scale) -> None:
    assert read_outcome(CELL, tiny, tmp_path) is None
    write_result(CELL, tiny, tmp_path)
    assert read_outcome(CELL, tiny, tmp_path) is None


def other_recipe(folder: Path, patch: pytest.MonkeyPatch) -> Scale:
    return Scale(epochs=1, steps=1, queries=8, batches=2, changes={"batch": 250, "dim": 8})


def other_version(folder: Path, patch: pytest.MonkeyPatch) -> Scale | None:
    patch.setattr(outcome_module, "__version__", "9.9")
    return None


def record_of_another(folder: Path, patch: pytest.MonkeyPatch) -> Scale | None:
    (file,) = folder.glob("run/evaluation*/record.json")
    content = load_entries(file)
    save_entries(file, {**content, "network": {**content["network"], "name": "another"}})
    return None


def no_description(folder: Path, patch: pytest.MonkeyPatch) -> Scale | None:
    (folder / RESULT).unlink()
    return None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_recipe, "dim was 16, is 8"),
        (other_version, "version was '0.1.0', is '9.9'"),
        (no_description, "has no cell.json"),
        (record_of_another, "its record.json is another one than was made"),
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


def test_a_description_may_be_edited_where_that_changes_nothing(cell: Path, tiny: Scale) -> None:
    before, file = read_outcome(CELL, tiny, cell), cell / RESULT
    content = {**json.loads(file.read_text(encoding="utf-8")), "note": "from the cellar"}
    file.write_text(json.dumps(content), encoding="utf-8")
    assert read_outcome(CELL, tiny, cell) == before


@pytest.mark.parametrize("text", ["", "[]", '{"cell": "digits N/A[S] seed 0"'])
def test_a_damaged_description_is_refused(cell: Path, tiny: Scale, text: str) -> None:
    (cell / RESULT).write_text(text, encoding="utf-8")
    with pytest.raises(DamagedError, match=r"cell\.json is damaged"):
        read_outcome(CELL, tiny, cell)


def test_two_records_for_one_cell_are_refused(tmp_path: Path, tiny: Scale) -> None:
    for machine in ("a", "b"):
        write_result(CELL, tiny, tmp_path / machine / "name", records={"evaluation": machine})
    with pytest.raises(UserError, match="2 records for one cell") as error:
        find_folders(tmp_path, ["name"])
    assert all(str(tmp_path / machine / "name") in str(error.value) for machine in ("a", "b"))


def test_a_copy_of_a_cell_and_one_that_is_not_finished_do_no_harm(tmp_path: Path, tiny: Scale) -> None:
    for machine in ("a", "b"):
        write_result(CELL, tiny, tmp_path / machine / "name", records={"evaluation": "same"})
    write_result(CELL, tiny, tmp_path / "name")
    assert find_folders(tmp_path, ["name"]) == {"name": tmp_path / "a" / "name"}


def test_a_damaged_record_is_refused(cell: Path, tiny: Scale) -> None:
    (file,) = cell.glob("run/evaluation*/record.json")
    file.write_text(file.read_text(encoding="utf-8").replace("N/A", "n/a"), encoding="utf-8")
    with pytest.raises(UserError, match=r"its digest does not match; move .* away, and run the same"):
        read_outcome(CELL, tiny, cell)


def test_another_scale_of_the_evaluation_keeps_the_training(
    cell: Path, tiny: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("robustmetric.experiments.work.train", None)
    more = replace(tiny, queries=9)
    assert read_outcome(CELL, more, cell) is None
    found = make(Job(CELL, more, cell), silent)
    assert found is not None
    assert found.record is not None
    assert found.record.queries.count == 9
    before = read_outcome(CELL, tiny, cell)
    assert before is not None
    assert before.record is not None
    assert before.record.queries.count == 8


def test_cells_of_other_images_are_refused(made: Path, tiny: Scale, tmp_path: Path) -> None:
    found = read_outcome(CELL, tiny, made)
    assert found is not None
    scale = replace(tiny, roots={"cub": write_cub(tmp_path, (2, 2, 2, 2))})
    with pytest.raises(UserError, match=r"797 test images of 10 classes, and .* has 4 of 2"):
        check_same(scale, {Job(Cell("cub", "N/A[S]"), scale, made): found})


def test_more_queries_than_images_are_refused() -> None:
    with pytest.raises(UserError, match="queries must be at most 797, the test images of digits, not 798"):
        check_data("digits", None, 798)


def test_records_of_several_machines_are_found_where_they_were_copied_to(tmp_path: Path) -> None:
    (tmp_path / "machine" / "one").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    assert find_folders(tmp_path, ["one", "two", "three"]) == {
        "one": tmp_path / "machine" / "one",
        "two": tmp_path / "two",
        "three": tmp_path / "three",
    }
