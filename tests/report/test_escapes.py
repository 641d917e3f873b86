"""Texts of records, names and files are shown as they are, and are nothing else."""

from __future__ import annotations

import base64
import csv
import io
from pathlib import Path

import pytest

from robustmetric.report.page import write_report
from robustmetric.text import printable
from tests.helpers.hostile import hostile, write_hostile
from tests.helpers.pages import Element, parsed
from tests.helpers.records import a_record, written

PLACES = (
    "network", "data", "weights", "check", "limit", "says", "version", "package", "column", "attack",
    "search", "suite", "goal", "breaker", "by", "file", "class", "class 1",
)  # fmt: skip
SPACED = {place: " ".join(printable(hostile(place)).split()) for place in PLACES}
HELD = ("data:image/png;base64,", "data:text/csv", "data:application/json", "data:,", "#")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Element:
    """The page of two records of which everything is hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = [
        write_hostile(folder / name) for name in ("<script>alert(2)</script>", "'\"><b onclick=alert(3)>")
    ]
    return parsed(write_report(paths, folder / "report.html").read_text(encoding="utf-8"))


def test_nothing_is_an_element_that_is_not_the_page_s_own(page: Element) -> None:
    assert len(page.all("script")) == len(page.all("style")) == len(page.one("head").all("title")) == 1
    assert not page.all("textarea")
    for one in page.every():
        assert "style" not in one.attributes
        assert not [name for name in one.attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert one.attributes.get(name, "#").startswith(HELD)
    assert all("href" in one.attributes for one in page.all("a"))


@pytest.mark.parametrize(
    ("section", "places"),
    [
        ("scores", ["network", "column"]),
        ("worst", ["network", "goal", "breaker", "by"]),
        ("checks", ["network", "check", "limit", "says"]),
        ("gallery", ["network", "attack", "file", "class", "column"]),
        ("map", ["network", "attack", "class 1"]),
        ("tested", ["network", "data", "weights", "attack", "search", "suite", "package", "version"]),
        ("cite", ["network", "data", "search", "suite"]),
    ],
)
def test_texts_are_shown_as_they_are(section: str, places: list[str], page: Element) -> None:
    text = page.by_id(section).text
    for place in places:
        assert SPACED[place] in text, place
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_names_of_folders_are_shown_as_they_are(page: Element) -> None:
    heads = [one.one("h2").text for one in page.all("section", "head")]
    assert heads[0].endswith("(<script>alert(2)</script>)")
    assert heads[1].endswith("('\"><b onclick=alert(3)>)")
    assert SPACED["network"] in page.by_id("verdict").text


def test_a_spreadsheet_computes_nothing(page: Element) -> None:
    (link,) = [one for one in page.all("a") if one.attributes.get("download") == "scores.csv"]
    text = base64.b64decode(link["href"].partition(",")[2]).decode()
    assert "\x1b" not in text
    head, *rows = csv.reader(io.StringIO(text))
    assert not [cell for row in (head, *rows) for cell in row if cell.startswith(("=", "+", "-", "@"))]
    assert f"'{printable(hostile('column'))}" in head
    assert rows[0][0].startswith(f"'{printable(hostile('network'))}")


@pytest.mark.parametrize("name", ["  two  spaces ", "tab\tand\nline", "", "\u200b", "名前", "a" * 3000])
def test_odd_names(name: str, tmp_path: Path) -> None:
    paths = [written(a_record(name=name), tmp_path / "a"), written(a_record(name="other"), tmp_path / "b")]
    page = parsed(write_report(paths, tmp_path / "report.html").read_text(encoding="utf-8"))
    shown = " ".join(name.split()) or "network"
    assert page.all("section", "head")[0].one("h2").text == shown
    told = "2 networks" if len(name) > 80 else f"{shown} and other"
    assert page.one("h1").text == f"Robustness of {told}"
