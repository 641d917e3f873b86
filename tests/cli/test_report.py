"""The commands report and evaluate --report as a user sees them."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from robustmetric.evaluation import load_record
from robustmetric.experiments.outcome import RESULT
from robustmetric.files import digest_of_entries
from robustmetric.models.c2f2 import C2F2
from robustmetric.report.curves import FOLDER as CURVES
from robustmetric.report.pictures import PICTURES
from tests.cli.tables import ONE, contents
from tests.helpers.command import command, refused, works
from tests.helpers.pages import Element, parsed
from tests.helpers.processes import at_call, stop_by
from tests.helpers.records import a_record, written
from tests.helpers.runs import make_run

SMALL = ("--queries", 6, "--steps", 2, "--checks", "none", "--attacks", "CA+,ES")


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """A run of a network that was not trained."""
    return make_run(tmp_path / "net", "last", defense="N/A[S]")


def read(file: Path) -> Element:
    return parsed(file.read_text(encoding="utf-8"))


def files(folder: Path) -> dict[str, int]:
    """When each file in a folder was written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that asks a network."""

    def asked(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(C2F2, "forward", asked)


# report


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two records, in a and b, in the current folder."""
    for name in "ab":
        written(a_record(name=name), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_records_are_compared_in_a_table_and_on_a_page(records: Path) -> None:
    table = works("report", "a", "b")
    assert "R@1 ↑" in table
    assert "37.2 [36.2, 38.2]" in table
    assert "a: only collapse was checked" in table
    said = works("report", "a", "b", "-o", "page.html")
    assert said.startswith(table)
    assert "a: no pictures were made: run the same evaluate command again, with --report FILE\n" in said
    assert said.endswith("written: page.html\n")
    assert [one.one("h2").text for one in read(records / "page.html").all("section", "head")] == ["a", "b"]
    assert "page.html exists already" in refused("report", "a", "-o", "page.html")
    works("report", "b", "--out", "page.html", "--force")
    assert len(read(records / "page.html").all("section", "head")) == 1


@pytest.mark.parametrize(
    ("file", "to", "begins"),
    [
        ("t.md", None, b"**Records**"), ("t.csv", None, b"network,data,"), ("t.tex", None, b"% \\usepackage"),
        ("t.txt", "md", b"**Records**"), ("t.svg", None, b"<?xml"), ("t.pdf", None, b"%PDF"),
        ("t.png", None, b"\x89PNG"),
    ],
)  # fmt: skip
def test_the_format_is_that_of_the_suffix(file: str, to: str | None, begins: bytes, records: Path) -> None:
    works("report", "a", "b", "-o", file, *(["--to", to] if to else []))
    content = (records / file).read_bytes()
    assert content.startswith(begins)
    works("report", "a", "b", "-o", file, "--force", *(["--to", to] if to else []))
    assert (records / file).read_bytes() == content


def a_cell(folder: Path, **result: Any) -> Path:
    """Write a cell of reproduce, with a run of its own."""
    folder.mkdir()
    run = make_run(folder / "run", "last", defense="N/A[S]")
    (run / "metrics.csv").write_text("step,loss\n10,0.5\n20,0.25\n")
    about = {"cell": "digits N/A[S]", "identity": {"batches": 7}, **result}
    (folder / RESULT).write_text(json.dumps({**about, "sha256": digest_of_entries(about)}))
    return folder


def test_trainings_records_and_samplers_are_plotted(records: Path) -> None:
    counts = [0] * 150 + [7] + [0] * 249
    hardness = {"R": {"mean": -0.4, "variance": 0.1, "variance_within": 0.2, "counts": counts}}
    (records / "cells").mkdir()
    written(a_record(), a_cell(records / "cells" / "one") / "run" / "evaluation")
    a_cell(records / "cells" / "two", hardness=hardness)
    said = works("report", "cells", "-o", "plots.svg")
    names = ["plots-training.svg", "plots-records.svg", "plots-hardness-1.svg"]
    assert [line for line in said.splitlines() if line.startswith("written")] == [
        f"written: {n}" for n in names
    ]
    training, record, samplers = ((records / name).read_text(encoding="utf-8") for name in names)
    assert ">training step</text>" in training
    assert ">c2f2 HM[S,LGA]&amp;ICS</text>" in record
    assert ">digits N/A[S]: hardness in 7 batches, at the start of" in samplers
    works("report", "cells/two", "-o", "alone.svg")
    assert ">hardness of drawn triplets</text>" in (records / "alone.svg").read_text(encoding="utf-8")
    (records / "plots-records.svg").unlink()
    assert "plots-training.svg exists already" in refused("report", "cells", "-o", "plots.svg")
    assert not (records / "plots-records.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("nowhere", "-o", "page.html"),
            "there is no record nowhere; give a record.json, or a folder that holds one",
        ),
        (("a", "-o", "a"), "is no format: give --to html|md"),
        (("a", "-o", "page.doc"), "'.doc' is no format: give --to html|md"),
        (("a", "-o", "b", "--to", "html"), "b is a folder: give the path of a file"),
        (("a", "-o", "new/page.html"), "there is no folder new"),
        (("a", "--to", "md"), "--to is for a file: give --out FILE"),
        (("a", "--force"), "--force is for a file: give --out FILE"),
        (("a", "bad", "-o", "page.html"), "bad/record.json is damaged"),
        (("fresh", "-o", "plot.svg"), "the run fresh has logged nothing yet, and has no record"),
        (("logged", "-o", "page.html"), "there is no record in logged"),
        (("torn", "-o", "plot.svg"), "torn/metrics.csv is no table with a step in each row"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(arguments: tuple[str, ...], told: str, records: Path) -> None:
    (records / "bad").mkdir()
    (records / "bad" / "record.json").touch()
    for name, content in (("fresh", None), ("logged", "step,loss\n10,0.5\n"), ("torn", "loss\n1\n")):
        run = make_run(records / name, "last", defense="N/A[S]")
        if content is not None:
            (run / "metrics.csv").write_text(content)
    before = sorted(records.rglob("*"))
    assert told in refused("report", *arguments)
    assert sorted(records.rglob("*")) == before


# evaluate --report


@pytest.mark.slow
def test_an_evaluation_makes_its_page(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = network / "evaluation"
    printed = works("evaluate", network, *SMALL, "--report", tmp_path / "page.html", "--curves")
    assert f"the record is in {out}\nthe report is {tmp_path / 'page.html'}\n" in printed
    assert re.findall(r"^(pictures|curves): done", printed, re.MULTILINE) == ["pictures", "curves"]
    assert {path.name for path in out.iterdir()} == {
        "plan.json", "record.json", "queries.safetensors", PICTURES, CURVES,
    }  # fmt: skip
    page, record = read(tmp_path / "page.html"), load_record(out)
    assert page.all("section", "head")[0].all("dd")[0].text == record.show("R@1")
    assert len(page.all("article", "shot")) == 12
    assert page.has("curves")
    assert page.has("map")
    assert f"robustmetric evaluate {network} --eps 8/255" in page.by_id("cite").one("pre").text

    before = files(out)
    forbid(monkeypatch)
    again = works("evaluate", network, *SMALL, "--report", tmp_path / "again.html", "--curves")
    assert not re.search("(embed|ES|pictures): done", again), "all of it was there"
    assert files(out) == before
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    works("report", network, "-o", tmp_path / "third.html")
    assert (tmp_path / "third.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def test_a_finished_evaluation_gets_its_pictures_later(network: Path, tmp_path: Path) -> None:
    works("evaluate", network, *SMALL)
    before = contents(network / "evaluation")
    works("evaluate", network, *SMALL, "--report", tmp_path / "page.html")
    assert len(read(tmp_path / "page.html").all("article", "shot")) == 12
    assert contents(network / "evaluation") == before


def test_a_page_that_cannot_be_is_refused_before_any_work(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch)
    page = tmp_path / "page.html"
    page.write_text("mine")
    for place in (page, tmp_path, page / "in" / "it.html"):
        refused("evaluate", network, *ONE, "--report", place)
    assert page.read_text() == "mine"
    assert not (network / "evaluation").exists()


def test_a_page_may_be_in_the_folder_of_the_record(network: Path, tmp_path: Path) -> None:
    page = tmp_path / "out" / "page.html"
    page.parent.mkdir()
    works("evaluate", network, *ONE, "--out", page.parent, "--report", page)
    page.write_text("mine")
    works("evaluate", network, *ONE, "--out", page.parent, "--report", page, "--force")
    assert read(page).has("scores")
    assert not list(page.parent.glob(".*"))


# Interruptions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "call", "number"),
    [
        ("robustmetric.report.pictures.run_attack", 2, signal.SIGTERM),
        ("robustmetric.report.pictures.write_json", 1, signal.SIGINT),
        ("robustmetric.report.curves.Evaluation", 12, signal.SIGTERM),
        ("robustmetric.cli.evaluate.make_page", 1, signal.SIGINT),
    ],
)
def test_an_interrupted_page_is_made_by_the_same_command(
    place: str, call: int, number: signal.Signals, network: Path, tmp_path: Path
) -> None:
    module, _, name = place.rpartition(".")
    options = (*SMALL, "--curves", "--out", network / "one", "--report", tmp_path / "one.html")
    with pytest.MonkeyPatch.context() as patch:
        original: Any = getattr(__import__(module, fromlist=[name]), name)
        patch.setattr(place, at_call(call, stop_by(number), original))
        said = command("evaluate", network, *options)
    assert said.code == 128 + number, (said.out, said.err)
    assert "stopped; what is finished is kept: " in said.out + said.err
    assert "Traceback" not in said.out + said.err
    assert not (tmp_path / "one.html").exists()
    before = contents(network / "one")

    works("evaluate", network, *options)
    assert contents(network / "one") == before
    whole = ("--curves", "--out", network / "two", "--report", tmp_path / "two.html")
    works("evaluate", network, *SMALL, *whole)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
