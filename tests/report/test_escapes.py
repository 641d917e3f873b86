"""Texts of records, names and files are shown as they are, and are nothing else."""

from __future__ import annotations

import base64
import csv
import io

import pytest

from robustmetric.report.page import write_report
from robustmetric.text import printable
from tests.helpers.hostile import hostile, write_hostile
from tests.helpers.pages import Element, parsed

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
    heads = [one.one("h2").text for one in page.all("section", "head")]
    assert [head.rpartition("(")[2] for head in heads] == ["2)</script>)", "3)>)"]
    text = page.by_id(section).text
    for place in places:
        assert SPACED[place] in text, place
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_spreadsheet_computes_nothing(page: Element) -> None:
    (link,) = [one for one in page.all("a") if one.attributes.get("download") == "scores.csv"]
    text = base64.b64decode(link["href"].partition(",")[2]).decode()
    assert "\x1b" not in text
    head, *rows = csv.reader(io.StringIO(text))
    assert not [cell for row in (head, *rows) for cell in row if cell.startswith(("=", "+", "-", "@"))]
    assert f"'{printable(hostile('column'))}" in head
    assert rows[0][0].startswith(f"'{printable(hostile('network'))}")
