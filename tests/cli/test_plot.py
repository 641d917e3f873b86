"""The command plot: runs, records and cells, and what cannot be plotted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from robustmetric.experiments.cells import Cell, Samplers, Scale
from robustmetric.experiments.outcome import write_result
from robustmetric.experiments.samplers import DRAWN
from robustmetric.report.style import FORMATS
from tests.cli.tables import ONE
from tests.helpers.command import refused, works


@pytest.fixture
def places(whole: tuple[Path, str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a run that holds a record."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("last.ckpt"))
    return tmp_path


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_a_run_with_a_record_gives_both_plots(places: Path) -> None:
    printed = works("plot", "run")
    names = {f"{name}.{ending}" for name in ("training", "records") for ending in FORMATS}
    assert files_in(places / "plots") == names
    assert "training: plots/training.svg, plots/training.pdf, plots/training.png" in printed
    text = (places / "plots" / "training.svg").read_text(encoding="utf-8")
    assert ">N/A[S]</text>" in text
    assert ">c2f2 N/A[S] (ERS not valid)</text>" in (places / "plots" / "records.svg").read_text(
        encoding="utf-8"
    )
    first = {name: (places / "plots" / name).read_bytes() for name in names}
    works("plot", "run")  # again, over what is there
    assert first == {name: (places / "plots" / name).read_bytes() for name in names}


@pytest.mark.slow
def test_one_plot_is_named_by_the_beginning_that_is_given(places: Path) -> None:
    works("plot", "run/evaluation", "--out", "figures/v1.0", "--format", "png, SVG,png")
    assert files_in(places / "figures") == {"v1.0.png", "v1.0.svg"}
    works("plot", "run", "--out", "figures/v1.0", "--format", "pdf")
    assert files_in(places / "figures") == {
        "v1.0.png", "v1.0.svg", "v1.0-training.pdf", "v1.0-records.pdf",
    }  # fmt: skip


@pytest.mark.slow
def test_runs_of_one_defense_are_told_apart(places: Path) -> None:
    shutil.copytree("run", "other")
    shutil.rmtree("other/evaluation")
    printed = works("plot", "run", "other", "run/evaluation/record.json", "--out", "new/", "--format", "svg")
    assert len(printed.splitlines()) == 2
    text = (places / "new" / "training.svg").read_text(encoding="utf-8")
    assert ">N/A[S] (run)</text>" in text
    assert ">N/A[S] (other)</text>" in text


@pytest.mark.slow
def test_cells_of_reproduce_are_plotted(places: Path) -> None:
    scale = Scale(epochs=1, batches=2)
    shutil.move("run", "cell/run")
    write_result(Cell("digits", "N/A[S]"), scale, Path("cell"))
    counts = [0] * 195 + [3] * 10 + [0] * 195
    known = {"mean": 0.0, "variance": 0.0001, "variance_within": 0.01, "counts": counts}
    hardness = dict.fromkeys(DRAWN, known)
    for name, weights in (("one", None), ("two", "run/last.safetensors")):
        write_result(Samplers("digits"), scale, Path(name), hardness=hardness, weights=weights)
    works("plot", "cell", "one", "--format", "svg")
    assert files_in(places / "plots") == {"training.svg", "records.svg", "hardness.svg"}
    told = Path("plots/hardness.svg").read_text(encoding="utf-8")
    assert "digits samplers seed 0: hardness in 2 batches, at the" in told
    assert "Softhard p≠a" in told
    works("plot", "one/cell.json", "two", "--format", "svg", "--out", "both/")
    assert files_in(places / "both") == {"hardness-1.svg", "hardness-2.svg"}
    assert "weights run/last.safetensors" in Path("both/hardness-2.svg").read_text(encoding="utf-8")
    write_result(Cell("digits", "N/A[S]"), scale, Path("fell"), collapsed="R@1 fell to 1 %")
    assert "there is nothing to plot in fell" in refused("plot", "fell")


def test_what_is_not_there_or_cannot_be_plotted_is_told(places: Path) -> None:
    Path("empty").mkdir()
    wanted = (
        "give the folder of a run, a record (record.json or a folder that holds one), or the folder of a cell"
    )
    assert f"there is no nowhere; {wanted}" in refused("plot", "nowhere")
    assert f"there is nothing to plot in empty; {wanted}" in refused("plot", "run", "empty")
    shutil.rmtree("run/evaluation")
    Path("run/metrics.csv").unlink()
    assert "the run run has logged nothing yet" in refused("plot", "run")
    assert "run/recipe.yaml is not a record: it is not JSON" in refused("plot", "run/recipe.yaml")
    assert not Path("plots").exists()


def test_formats_and_places_are_checked_before_anything_is_read(places: Path) -> None:
    assert "unknown format 'gif'; known: pdf, png, svg (--format)" in refused(
        "plot", "run", "--format", "svg,gif"
    )
    assert "no format is given" in refused("plot", "run", "--format", ",")
    Path("file").touch()
    for out in ("file/", "file/stem"):
        assert "the folder file cannot be written to" in refused("plot", "run", "--out", out)


def test_damaged_files_are_named(places: Path) -> None:
    record = Path("run/evaluation/record.json")
    record.write_text(record.read_text().replace("N/A[S]", "N/A[R]"))
    assert "record.json is damaged" in refused("plot", "run")
    metrics = Path("run/metrics.csv")
    content = metrics.read_bytes()
    metrics.write_bytes(b"\xff\xff\x00")
    shutil.move("run/evaluation", "aside")
    assert "run/metrics.csv cannot be read as a table with a step in each row" in refused("plot", "run")
    assert metrics.read_bytes() == b"\xff\xff\x00"  # a plot puts nothing aside
    shutil.move("aside", "run/evaluation")
    metrics.write_bytes(content)
    Path("run/recipe.yaml").write_text("defense: [")
    assert "recipe.yaml, line 1" in refused("plot", "run")
    Path("cell").mkdir()
    Path("cell/cell.json").write_text("{}")
    assert "cell/cell.json is damaged" in refused("plot", "cell")
    assert not Path("plots").exists()


def test_records_of_different_protocols_are_refused(places: Path) -> None:
    works("evaluate", "run", "--out", "other", *ONE, "--protocol", "reference")
    told = refused("plot", "run", "other")
    assert "records of different protocols are never compared: run is strict, other is reference" in told


def test_what_cannot_be_plotted_does_not_keep_the_rest_from_it(places: Path) -> None:
    """A training that has logged nothing to draw, or whose table is damaged, beside its record."""
    metrics = Path("run/metrics.csv")
    metrics.write_text("step,epoch\n1,0\n")
    said = works("plot", "run", "--format", "svg")
    assert "left out: there is nothing to plot of N/A[S]: no row has any of" in " ".join(said.split())
    assert [file.name for file in Path("plots").iterdir()] == ["records.svg"]
    metrics.write_bytes(b"\xff\xff\x00")
    assert "left out: run/metrics.csv cannot be read" in works("plot", "run", "--format", "svg")


def test_a_folder_of_cells_is_plotted_whole(places: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        cell = tmp_path / "cells" / name
        shutil.copytree("run", cell / "run")
        write_result(Cell("digits", "N/A[S]"), Scale(), cell)
    works("plot", tmp_path / "cells", "--out", "all/", "--format", "svg")
    assert {file.name for file in Path("all").iterdir()} == {"records.svg", "training.svg"}
