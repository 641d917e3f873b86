"""The commands report and evaluate --report as a user sees them."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robustmetric.evaluation import load_record
from robustmetric.models.c2f2 import C2F2
from robustmetric.report.curves import FOLDER as CURVES
from robustmetric.report.pictures import FOLDER, LIST
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


def test_records_become_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        written(a_record(name=name), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    said = works("report", "a", "b", "-o", "page.html")
    without = "no pictures were made: run the same evaluate command again, with --report FILE"
    assert re.fullmatch(rf"a: {without}\nb: {without}\nthe report is page\.html, 0\.\d MB\n", said)
    page = read(tmp_path / "page.html")
    assert [one.one("h2").text for one in page.all("section", "head")] == ["a", "b"]
    assert refused("report", "a", "-o", "page.html") == (
        "error: page.html is there already: give another file, or --force (--out)\n"
    )
    works("report", "b", "--out", "page.html", "--force")
    assert len(read(tmp_path / "page.html").all("section", "head")) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("nowhere", "-o", "page.html"),
            "there is no record nowhere; give a record.json, or a folder that holds one",
        ),
        (("good", "-o", "good"), "good is a folder: give a file, such as good/report.html (--out)"),
        (
            ("good", "-o", "good/record.json/page.html"),
            "the folder good/record.json cannot be written to (Not a directory): give another folder (--out)",
        ),
        (
            ("good", "bad", "-o", "page.html"),
            "bad/record.json is not a record: it is not JSON (Expecting value: line 1 column 1 (char 0)); "
            "evaluate again, or leave bad out",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    arguments: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(a_record(), tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "record.json").touch()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert refused("report", *arguments) == f"error: {told}\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_the_file_of_the_page_has_to_be_given(tmp_path: Path) -> None:
    said = command("report", written(a_record(), tmp_path / "a"))
    assert said.code == 2
    assert "--out" in said.err
    assert command("report", "-o", tmp_path / "page.html").code == 2


def test_the_help_says_what_the_options_do() -> None:
    def told(*arguments: str) -> str:
        return " ".join(re.sub("[│╭╮╰╯─]", " ", command(*arguments, "--help").out).split())

    report = told("report")
    assert (
        "Write one page of HTML with the scores of records, side by side, and pictures of attacks." in report
    )
    assert "Pictures are made by evaluate --report, and curves by evaluate --report --curves." in report
    for option in ("--out -o", "--force"):
        assert option in report
    evaluate = told("evaluate")
    assert "Write a page of HTML with the scores and with pictures of attacks to this file." in evaluate
    assert "Score against ε and against steps as well, for the page." in evaluate
    assert "Overwrite the page if it is there." in evaluate


# evaluate --report


@pytest.mark.slow
def test_an_evaluation_makes_its_page(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = network / "evaluation"
    printed = works("evaluate", network, *SMALL, "--report", tmp_path / "page.html", "--curves")
    assert f"the record is in {out}\nthe report is {tmp_path / 'page.html'}\n" in printed
    assert re.findall(r"^(pictures|curves): done", printed, re.MULTILINE) == ["pictures", "curves"]
    assert {path.name for path in out.iterdir()} == {
        "plan.json", "record.json", "queries.safetensors", FOLDER, CURVES,
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
    works("report", network, "-o", tmp_path / "bare.html")
    bare = read(tmp_path / "bare.html")
    assert not bare.all("article", "shot")
    assert "no pictures were made: run the same evaluate command again, with --report FILE" in bare.text
    works("evaluate", network, *SMALL, "--report", tmp_path / "page.html")
    assert len(read(tmp_path / "page.html").all("article", "shot")) == 12
    assert contents(network / "evaluation") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / LIST).unlink(),
        lambda folder: (folder / LIST).write_text("{}"),
        lambda folder: next(folder.glob("attack-*.png")).unlink(),
        lambda folder: next(folder.glob("image-*.png")).write_bytes(b"\x89PNG"),
    ],
    ids=["no list", "damaged list", "missing image", "damaged image"],
)
def test_spoilt_pictures_are_made_anew(
    spoil: Callable[[Path], object], network: Path, tmp_path: Path
) -> None:
    works("evaluate", network, *ONE, "--report", tmp_path / "page.html")
    folder, before = network / "evaluation" / FOLDER, contents(network / "evaluation")
    pictures = {path.name: path.read_bytes() for path in folder.iterdir()}
    spoil(folder)
    works("evaluate", network, *ONE, "--report", tmp_path / "again.html")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == pictures
    assert contents(network / "evaluation") == before
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def test_a_page_that_cannot_be_is_refused_before_any_work(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch)
    page = tmp_path / "page.html"
    page.write_text("mine")
    told = {
        page: "is there already: give another file, or --force (--report)",
        tmp_path: f"is a folder: give a file, such as {tmp_path / 'report.html'} (--report)",
        page / "in" / "it.html": "cannot be written to (Not a directory): give another folder (--report)",
    }
    for place, message in told.items():
        assert refused("evaluate", network, *ONE, "--report", place).endswith(f"{message}\n")
    assert page.read_text() == "mine"
    assert not (network / "evaluation").exists()


def test_force_overwrites_the_page(network: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    works("evaluate", network, *ONE, "--report", page, "--force")
    assert read(page).has("scores")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--curves"], "curves go with a page: give --report FILE"),
        (["--force"], "force goes with a page: give --report FILE"),
        (["--force", "--curves"], "curves go with a page: give --report FILE"),
    ],
)
def test_options_of_a_page_without_one(options: list[str], told: str, network: Path) -> None:
    assert refused("evaluate", network, *ONE, *options) == f"error: {told}\n"
    assert not (network / "evaluation").exists()


# Interruptions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "call", "number"),
    [
        ("robustmetric.report.pictures.run_attack", 2, signal.SIGTERM),
        ("robustmetric.report.pictures.write_atomically", 3, signal.SIGINT),
        ("robustmetric.report.curves.Evaluation", 4, signal.SIGINT),
        ("robustmetric.report.curves.Evaluation", 12, signal.SIGTERM),
        ("robustmetric.cli.evaluate.write_report", 1, signal.SIGINT),
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


def test_a_page_is_made_after_an_interrupted_evaluation(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*SMALL, "--report", tmp_path / "page.html")
    with monkeypatch.context() as patch:
        patch.setattr(C2F2, "forward", at_call(12, stop_by(signal.SIGINT), C2F2.forward))
        assert command("evaluate", network, *options).code == 130
    assert not (network / "evaluation" / "record.json").exists()
    assert not (network / "evaluation" / FOLDER).exists()
    works("evaluate", network, *options)
    assert len(read(tmp_path / "page.html").all("article", "shot")) == 12
