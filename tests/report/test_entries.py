"""What stands beside a record: its run, its curves, and their plots on the page."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from robustmetric.evaluation import Plan, Record
from robustmetric.report.curves import FOLDER, load_curves
from robustmetric.report.entries import gather
from tests.helpers.pages import Element
from tests.helpers.pictured import pictured
from tests.helpers.records import a_record, altered, written
from tests.helpers.runs import make_run
from tests.report.conftest import Show

LOGGED = "step,loss,hardness/reached,R@1\n10,0.5,-0.2,\n20,0.25,-0.1,98.0\n30,nan,,97.0\n"


def planned(name: str = "c2f2 N/A[S]", attacks: tuple[str, ...] | None = None, **how: Any) -> Record:
    """A record of a plan with 8 steps, of these columns alone if some are given."""
    plan = Plan.make(**{"eps": 16 / 255, "steps": 8, "queries": 9, "checks": "none", **how})
    record = altered(a_record(name=name), settings=plan.settings.model_dump(mode="json"))
    if attacks is None:
        return record
    kept = {name: score for name, score in record.scores.items() if name in attacks}
    return altered(record.model_copy(update={"scores": kept, "ers": None}))


def with_curves(record: Record, folder: Path) -> Path:
    """Write a record with all points of its curves, whose ERS is a tenth of ε in levels, or of the steps."""
    written(record, folder)
    how = record.settings
    for share in (0.25, 0.5, 1.0, 1.5, 2.0):
        alpha = max(how.alpha, 1.25 * share * how.eps / how.steps)
        point = altered(record, settings={"eps": share * how.eps, "alpha": alpha})
        written(point, folder / FOLDER / f"eps-{share:g}")
    for steps in (1, 2, 4, 8, 16, 32, 64):
        alpha = max(how.alpha, 1.25 * how.eps / steps)
        point = altered(record, settings={"steps": steps, "alpha": min(alpha, 1.0)})
        written(point, folder / FOLDER / f"steps-{steps}")
    return folder


def plots(page: Element, name: str) -> dict[str, Element]:
    """The plots of a section, by their titles."""
    return {one.all("title")[0].text: one for one in page.by_id(name).all("svg")} if page.has(name) else {}


def points(plot: Element, network: str) -> list[str]:
    """What is told of the points of a network, on hovering."""
    return [
        one.text.removeprefix(f"{network}, ") for one in plot.all("title") if one.text.startswith(network)
    ]


# The run


def test_a_record_in_a_run_comes_with_its_training(tmp_path: Path, show: Show) -> None:
    run = make_run(tmp_path / "my run", "last", defense="N/A[S]")
    (run / "metrics.csv").write_text(LOGGED)
    written(planned(), run / "evaluation")
    page = show(run)
    found = plots(page, "training")
    assert [*found] == [
        "Loss over the steps of training", "Hardness reached over the steps of training",
        "R@1 over the steps of training",
    ]  # fmt: skip
    loss, _, recall = found.values()
    assert points(loss, "c2f2 N/A[S]") == ["training step 10: 0.5", "training step 20: 0.25"]
    assert points(recall, "c2f2 N/A[S]") == ["training step 20: 98", "training step 30: 97"]
    assert page.by_id("cite").one("pre").text == (
        f"robustmetric evaluate '{run}' --eps 16/255 --steps 8 --queries 9 --checks none"
    )


@pytest.mark.parametrize("where", [".", "..", "evaluation", "evaluation/record.json", "../evaluation"])
def test_the_run_is_found_from_any_place(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", "last", defense="N/A[S]")
    folder = written(planned(), run / "evaluation")
    (folder / "deeper").mkdir()
    here = {".": folder, "..": folder / "deeper", "../evaluation": folder}.get(where, run)
    monkeypatch.chdir(here)
    (entry,) = gather([Path(where)])
    assert entry.run is not None
    assert Path(entry.run.folder).samefile(run)
    assert entry.run.data == "digits"


def test_a_run_of_another_network_is_not_taken_for_the_record_s(tmp_path: Path, show: Show) -> None:
    run = make_run(tmp_path / "run", "last", defense="N/A[S]")
    (run / "metrics.csv").write_text(LOGGED)
    written(planned("resnet18 mine.pth"), run / "other")
    page = show(run / "other")
    assert not page.has("training")
    assert page.by_id("cite").one("pre").text.startswith("robustmetric evaluate RUN --data digits ")


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00", b"loss\n1\n", b"step,loss\nx,y\n"])
def test_a_log_that_cannot_be_read(content: bytes | None, tmp_path: Path, show: Show) -> None:
    run = make_run(tmp_path / "run", "last", defense="N/A[S]")
    if content is not None:
        (run / "metrics.csv").write_bytes(content)
    written(planned(), run / "evaluation")
    assert not show(run).has("training")


def test_a_recipe_that_cannot_be_read_is_not_needed(tmp_path: Path, show: Show) -> None:
    run = make_run(tmp_path / "run", "last", defense="N/A[S]", model="own.py:Network")
    (run / "own.py").write_text("raise SystemExit('run')\n")
    (run / "metrics.csv").write_text(LOGGED)
    written(planned(), run / "evaluation")
    assert show(run).has("training"), "code that is not trusted is not run, and not needed"
    (run / "recipe.yaml").write_text("{")
    assert show(run).has("training")


def test_a_network_keeps_its_colour_where_others_have_no_training(tmp_path: Path, show: Show) -> None:
    run = make_run(tmp_path / "run", "last", defense="N/A[S]")
    (run / "metrics.csv").write_text(LOGGED)
    written(planned(), run / "evaluation")
    page = show(written(planned("other"), tmp_path / "other"), run)
    plot = plots(page, "training")["Loss over the steps of training"]
    assert "other" not in plot.one("g", "legend").text
    (mark,) = plot.one("g", "legend").all(kind="mark")
    assert mark["class"] == "mark s1"
    assert page.all("section", "head")[1]["class"] == "head s1"


# Curves


def test_curves_stand_at_their_budgets(tmp_path: Path, show: Show) -> None:
    record = planned()
    page = show(with_curves(record, tmp_path / "a"))
    found = plots(page, "curves")
    assert [*found] == [
        "ERS against ε, in levels of 255", "ES:R against ε, in levels of 255", "ERS against steps",
        "ES:R against steps",
    ]  # fmt: skip
    across = [
        text.partition(":")[0] for text in points(found["ERS against ε, in levels of 255"], "c2f2 N/A[S]")
    ]
    assert across == [f"ε, in levels of 255 {x}" for x in (4, 8, 16, 24, 32)]
    across = [text.partition(":")[0] for text in points(found["ES:R against steps"], "c2f2 N/A[S]")]
    assert across == [f"steps {x}" for x in (1, 2, 4, 8, 16, 32, 64)]
    values = {
        text.partition(": ")[2].partition(" ")[0]
        for text in points(found["ERS against steps"], "c2f2 N/A[S]")
    }
    assert {round(float(value), 1) for value in values} == {round(record["ERS"], 1)}
    assert "Each point attacks 9 queries, " in page.by_id("curves").text


def test_curves_of_l2_have_an_axis_of_their_own(tmp_path: Path, show: Show) -> None:
    folder = tmp_path / "b"
    record = planned("b", norm="l2", eps=2.0, search="apgd")
    page = show(with_curves(planned("a"), tmp_path / "a"), with_curves(record, folder))
    found = plots(page, "curves")
    assert "ERS against ε, a length (L2)" in found
    lengths = [t.partition(":")[0] for t in points(found["ERS against ε, a length (L2)"], "b")]
    assert lengths == [f"ε, a length (L2) {x}" for x in ("0.5", "1", "2", "3", "4")]
    assert not points(found["ERS against ε, in levels of 255"], "b")
    assert len(points(found["ERS against steps"], "b")) == 7


def test_curves_of_other_attacks_show_these(tmp_path: Path, show: Show) -> None:
    record = planned("a", attacks=("CA+", "TMA", "GTM"))
    page = show(with_curves(record, tmp_path / "a"))
    assert [*plots(page, "curves")] == [
        f"{score} against {axis}" for axis in ("ε, in levels of 255", "steps") for score in ("CA+", "TMA")
    ]


def test_points_that_are_missing_or_damaged(tmp_path: Path, show: Show) -> None:
    folder = with_curves(planned(), tmp_path / "a")
    shutil.rmtree(folder / FOLDER / "steps-4")
    written(altered(planned(), network={"sha256": "1" * 64}), folder / FOLDER / "steps-2")
    page = show(folder)
    shown = {t.partition(":")[0] for t in points(plots(page, "curves")["ERS against steps"], "c2f2 N/A[S]")}
    assert {"steps 4", "steps 2"}.isdisjoint(shown)
    assert "steps 1" in shown
    (folder / FOLDER / "steps-64" / "record.json").write_text("{}")
    page = show(folder)
    lines = [one.text for one in page.by_id("curves").all("p", "left-out")]
    assert any("steps-64/record.json is damaged" in line for line in lines)
    assert all(line.startswith("c2f2 N/A[S]: a point is left out: ") for line in lines)
    assert "steps 1" in str([*points(plots(page, "curves")["ERS against steps"], "c2f2 N/A[S]")])


def test_no_curves_at_all(tmp_path: Path, show: Show) -> None:
    page = show(planned())
    assert not page.has("curves")
    assert list(load_curves(tmp_path / "records" / "0", planned())) == []


# Maps


def test_the_moves_of_all_records_can_be_chosen(tmp_path: Path, show: Show) -> None:
    paths = []
    for name, attacks in (("a", ["ES"]), ("b", ["GTM", "ES"]), ("c", ["LTM"])):
        paths.append(written(a_record(name=name), tmp_path / name))
        if name != "c":
            pictured(paths[-1], a_record(name=name), attacks)
    page = show(*paths)
    assert [one["value"] for one in page.by_id("map-attack").all("option")] == ["", "ES", "GTM"]
    figures = page.by_id("map").all("figure")
    assert [one.one("figcaption").text for one in figures] == [
        "a: 70 % of the variance is in this plane.", "b: 70 % of the variance is in this plane.",
    ]  # fmt: skip
    groups = [[g["data-attack"] for g in one.all("g", "moves")] for one in figures]
    assert groups == [["ES"], ["GTM", "ES"]]


def test_names_with_bytes_that_are_no_text(tmp_path: Path, show: Show) -> None:
    folders = [os.fsdecode(os.fsencode(tmp_path) + part) for part in (b"/a\xff", b"/b\xfe")]
    paths = [written(a_record(), Path(folder)) for folder in folders]
    page = show(*paths)
    assert [one.one("h2").text for one in page.all("section", "head")] == [
        r"c2f2 HM[S,LGA]&ICS (a\xff)", r"c2f2 HM[S,LGA]&ICS (b\xfe)",
    ]  # fmt: skip
