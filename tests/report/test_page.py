"""The page of a report: what it says is what the records say, and it says what is missing."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from robustmetric import UserError
from robustmetric.attacks import Column
from robustmetric.evaluation import COLUMNS, Plan, Record
from robustmetric.locks import InUseError
from robustmetric.report import page as pages
from robustmetric.report.cards import encoded
from robustmetric.report.curves import FOLDER
from robustmetric.report.page import make_page, write_report
from tests.conftest import GOLDEN
from tests.helpers.pages import Element, parsed
from tests.helpers.pictured import a_picture, noise, pictured
from tests.helpers.records import GOAL, a_record, altered, golden, written
from tests.helpers.runs import make_run
from tests.report.conftest import Show

RECORDS = sorted(path.name for path in (GOLDEN / "records").iterdir())
LOGGED = "step,loss,hardness/reached,R@1\n10,0.5,-0.2,\n20,0.25,-0.1,98.0\n30,nan,,97.0\n"

BROKE: list[dict[str, Any]] = [
    {"attack": "before", "broke": 1.6},
    {"attack": "misrank", "search": "apgd", "broke": 80.25, "forward": 90, "backward": 80},
    {"attack": "misrank", "search": "square", "broke": 0.0, "forward": 9},
    {"attack": "LTM", "broke": 0.5},
]
SHIFT = {"value": 0.7321, "low": None, "high": None, "before": 0.0, "better": "lower", "unit": "distance"}
SUITE = {"goals": {"misrank": {**GOAL, "attacks": BROKE}, "shift": {**GOAL, **SHIFT}}}


def shown(column: Column, value: float | None) -> str:
    return "-" if value is None else f"{value:.{column.unit.digits}f}"


def cell(column: Column, found: Any, before: float | None = None) -> str:
    """What a cell of the table of scores must say."""
    text = shown(column, found.value)
    if found.low is not None and found.high is not None:
        text += f" {shown(column, found.low)} to {shown(column, found.high)}"
    return text if before is None else f"{text} before {shown(column, before)}"


def expected(record: Record) -> dict[str, str]:
    """What the table of scores must say of a record, by its heads."""
    found: dict[str, str] = {}
    for name, score in record.retrieval.items():
        found[f"{name} ↑"] = cell(Column(name, "higher"), score)
    ours = [name for name in COLUMNS if name in record.scores]
    for name in [*ours, *(name for name in record.scores if name not in COLUMNS)]:
        column = record.column(name)
        found[column.heading] = cell(column, record.scores[name], record.scores[name].before)
    if record.ers is not None:
        text = cell(Column("ERS", "higher"), record.ers)
        value, _, rest = text.partition(" ")
        found["ERS ↑"] = text if record.ers.valid else f"{value} not valid {rest}".rstrip()
    return found


def scores(page: Element, place: int = 0) -> dict[str, str]:
    rows = page.by_id("scores").rows()[1:]
    return {row[0].text: row[1 + place].text for row in rows}


def facts(page: Element, place: int = 0) -> dict[str, str]:
    rows = page.by_id("tested").all("tbody")[0].rows()
    return {row[0].text: row[1 + place].text for row in rows}


def checks(page: Element) -> list[list[str]]:
    tables = page.by_id("checks").one("details").all("tbody")
    return [[one.text for one in row] for row in tables[0].rows()] if tables else []


def downloaded(page: Element, name: str) -> str:
    (link,) = [one for one in page.all("a") if one.attributes.get("download") == name]
    head, _, content = link["href"].partition(";base64,")
    assert head == f"data:{'text/csv' if name.endswith('csv') else 'application/json'};charset=utf-8"
    return base64.b64decode(content, validate=True).decode()


@pytest.mark.parametrize("name", RECORDS)
def test_the_values_are_those_of_the_record(name: str, show: Show) -> None:
    record = golden(name)
    page = show(record)
    assert list(scores(page).items()) == list(expected(record).items())
    for row in page.by_id("scores").rows()[1:]:
        number = record[row[0].text.split()[0].replace("−", "-")]
        assert float(row[1]["data-value"]) == number, "what it is sorted by"
    head = page.one("section", "head")
    assert head.one("h2").text == record.network.name
    firsts = [record.show("R@1"), *([record.show("ERS")] if record.ers else [])]
    assert [one.all("dd")[0].text for one in head.all("div")] == firsts
    assert page.one("head").one("title").text == page.one("h1").text == f"Robustness of {record.network.name}"
    assert not page.has("worst")
    assert not page.all("section", "careful")


@pytest.mark.parametrize("name", RECORDS)
def test_checks_facts_and_citation_are_those_of_the_record(name: str, show: Show) -> None:
    record = golden(name)
    page = show(record)
    assert [row[0] for row in checks(page)] == [check.name for check in record.checks]
    for row, check in zip(checks(page), record.checks, strict=True):
        assert check.status in row[1]
        assert row[2].startswith(f"{check.says} allowed: {check.limit}")
    told, cited = facts(page), page.by_id("cite").one("p", "citation").text
    network, data, how = record.network, record.data, record.settings
    assert (told["network SHA-256"], told["data SHA-256"]) == (network.sha256, data.sha256)
    assert told.get("surrogate SHA-256") == network.surrogate
    assert ("the gallery has" in told["data"]) == (data.gallery is not None)
    assert ("camera" in told["data"]) == data.cameras
    assert (told["protocol"], told["checks"]) == (how.protocol, how.checks)
    assert told["budget"] == f"ε = 16/255, α = 3/255, {how.steps} steps"
    assert told["attacks"] == ", ".join(how.attacks)
    assert told["queries"] == f"{record.queries.count} of {data.images} images, seed {how.seed}"
    for package, version in record.versions.items():
        assert f"{package} {version}" in told["versions"]
    for part in (network.name, f"R@1 {record.show('R@1')}", network.sha256, data.sha256, f"seed {how.seed}",
                 f"{how.protocol} protocol", "ε = 16/255", f"{how.steps} steps", how.search):  # fmt: skip
        assert part in cited
    if record.ers is not None:
        assert f"ERS {record['ERS']:.1f} ({record.ers.low:.1f} to " in cited


@pytest.mark.parametrize("name", RECORDS)
def test_downloads_hold_the_numbers_of_the_record_exactly(name: str, show: Show) -> None:
    record = golden(name)
    page = show(record)
    assert json.loads(downloaded(page, "records.json")) == [record.model_dump(mode="json", by_alias=True)]
    (row,) = csv.DictReader(io.StringIO(downloaded(page, "scores.csv")))
    ers = {"ERS": record.ers} if record.ers else {}
    every: dict[str, Any] = {**record.retrieval, **record.scores, **ers}
    for name, score in every.items():
        for end, number in (("", score.value), (" low", score.low), (" high", score.high)):
            assert (row.get(f"{name}{end}") or None) == (None if number is None else str(number))


def test_records_keep_their_order_side_by_side(show: Show) -> None:
    names = ["third", "first", "second"]
    made = [a_record({"R@1": 10.0 * k}, name=name) for k, name in enumerate(names, 1)]
    page = show(*made)
    for name in ("scores", "tested"):
        heads = [one.text for one in page.by_id(name).all("thead")[0].all("th")]
        assert [head for head in heads if head in names] == names
    assert [one.one("h2").text for one in page.all("section", "head")] == names
    for place, record in enumerate(made):
        assert scores(page, place) == expected(record)
        assert facts(page, place)["network"].startswith(names[place])
    assert [one.text.split()[0] for one in page.all("p", "citation")] == names
    assert not page.all("section", "careful")
    rows = list(csv.reader(io.StringIO(downloaded(page, "scores.csv"))))
    assert [row[0] for row in rows[1:]] == names
    assert [one["network"]["name"] for one in json.loads(downloaded(page, "records.json"))] == names


def test_other_conditions_are_told(show: Show) -> None:
    one = a_record(name="one")
    other = altered(a_record(name="other"), settings={"steps": 8, "seed": 3}, data={"sha256": "1" * 64})
    told = [line.text for line in show(one, other).one("section", "careful").all("li")]
    assert [line.partition(":")[0] for line in told] == ["data", "η", "queries"]
    assert told[1] == "η: one: 32, other: 8"


def test_records_of_the_same_name_are_told_apart(show: Show, tmp_path: Path) -> None:
    paths = [written(a_record(), tmp_path / name) for name in ("a", "b")]
    page = show(*paths, paths[0])
    heads = [one.one("h2").text for one in page.all("section", "head")]
    name = "c2f2 HM[S,LGA]&ICS"
    assert heads == [f"{name} (a)", f"{name} (b)", f"{name} (a) #2"]
    assert all(len(row) == 5 for row in page.by_id("scores").rows())


# Records that lack something


@pytest.mark.parametrize("unknown", [None, float("nan")])
def test_values_and_intervals_that_are_not_known(unknown: float | None, show: Show) -> None:
    record = altered(
        a_record(),
        scores={"TMA": {"low": unknown}, "LTM": {"value": unknown, "low": unknown, "high": unknown}},
        retrieval={"R@1": {"high": unknown}},
        ers={"low": unknown, "high": unknown},
    )
    page = show(record)
    assert scores(page) == expected(record)
    assert (scores(page)["R@1 ↑"], scores(page)["TMA ↓"], scores(page)["LTM ↑"]) == ("37.2", "0.806", "-")
    (row,) = [row for row in page.by_id("scores").rows() if row[0].text == "LTM ↑"]
    assert row[1]["data-value"] == ""
    said = f"{page.one('header').text} {page.one('main').text}"
    assert not re.search(r"\b(nan|NaN|None)\b", said)
    assert "ERS 33.5 of 100" in page.by_id("verdict").text


def test_a_suite(show: Show) -> None:
    record = altered(
        a_record(name="one"), suite=SUITE, settings={"suite": "worst-case(goals='misrank,shift')"}
    )
    page = show(record, a_record(name="other"))
    rows = [[one.text for one in row] for row in page.by_id("worst").all("tbody")[0].rows()]
    assert [row[:3] for row in rows] == [
        ["worst misrank ↑", "7.4 4.3 to 10.6 before 98.4", "-"],
        ["worst shift ↓", "0.732 before 0.000", "-"],
    ]
    heads = [[one.text for one in head.all("dt")] for head in page.all("section", "head")]
    assert heads == [["R@1", "ERS", "R@1, worst case"], ["R@1", "ERS"]]
    broke = page.by_id("worst").one("details").all("tbody")[0].rows()
    assert [[one.text for one in row[1:]] for row in broke] == [
        ["misrank", "before", "1.6 %"],
        ["misrank", "misrank by apgd", "80.2 %"],
        ["misrank", "LTM", "0.5 %"],
    ]


def test_checks_that_warn_or_fail_stand_first(show: Show) -> None:
    found = [
        {"name": name, "status": status, "figure": 0.3051, "limit": "1 %", "says": f"{name} says"}
        for name, status in (("repeat", "pass"), ("last", "warn"), ("gradient", "fail"), ("own", "warn"))
    ]
    page = show(altered(a_record(), checks=found))
    first = page.by_id("checks").all("tbody")[0].rows()
    assert [row[0].text for row in first] == ["gradient", "last", "own"]
    assert first[0][2].text.startswith("gradient says allowed: 1 % The network hides its gradient")
    assert [row[0] for row in checks(page)] == ["repeat", "last", "gradient", "own"]


# The page itself


def test_the_policy_lets_through_the_page_s_own_script_alone(show: Show) -> None:
    page = show(a_record())
    (policy,) = [one["content"] for one in page.all("meta") if one.attributes.get("http-equiv")]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("img-src") == "data:"
    for tag in ("script", "style"):
        digest = hashlib.sha256(page.one(tag).raw.encode()).digest()
        assert rules.pop(f"{tag}-src") == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}


def test_links_lead_to_what_is_there(show: Show) -> None:
    page = show(altered(a_record(), suite=SUITE))
    names = [one["href"][1:] for one in page.all("a") if one["href"].startswith("#")]
    assert {"scores", "checks", "gallery", "tested", "cite", "content"} == set(names)
    for name in names:
        assert page.by_id(name)
    ids = [one["id"] for one in page.every() if "id" in one.attributes]
    assert len(ids) == len(set(ids))


# What is refused


@pytest.mark.parametrize("content", ["", "[" * 9999, None])
def test_what_is_no_record_is_refused(content: str | None, tmp_path: Path) -> None:
    good = written(a_record(name="good"), tmp_path / "good")
    bad = written(a_record(name="bad"), tmp_path / "bad")
    if content is None:
        content = (bad / "record.json").read_text().replace("37.2", "97.2")
    (bad / "record.json").write_text(content)
    with pytest.raises(UserError, match="is damaged") as error:
        write_report([good, bad], tmp_path / "report.html")
    assert str(error.value).endswith(f"; evaluate again, or leave {bad} out")
    assert not (tmp_path / "report.html").exists()


def test_of_two_reports_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = written(a_record(), tmp_path / "a"), tmp_path / "report.html"

    def second(*_: Any, **__: Any) -> str:
        with pytest.raises(InUseError, match=r"report\.html is in use"):
            write_report([folder], out)
        return "the first"

    monkeypatch.setattr(pages, "make_page", second)
    write_report([folder], out)
    assert out.read_text() == "the first"


def test_a_record_is_not_overwritten(tmp_path: Path) -> None:
    folder = written(a_record(), tmp_path / "a")
    before = (folder / "record.json").read_bytes()
    with pytest.raises(UserError, match=r"record\.json is a record itself: give another file"):
        write_report([folder], folder / "record.json", force=True)
    assert (folder / "record.json").read_bytes() == before
    assert not list(folder.glob(".*"))


# Pictures


def cards(page: Element) -> list[Element]:
    return page.by_id("gallery").all("article", "shot")


def left_out(page: Element) -> list[str]:
    return [one.text for one in page.by_id("gallery").all("p", "left-out")]


def test_cards_of_several_records_stand_side_by_side(tmp_path: Path, show: Show) -> None:
    paths = [written(a_record(name=name), tmp_path / name) for name in "ab"]
    for path, name in zip(paths, "ab", strict=True):
        pictured(path, a_record(name=name), ["ES", "GTM"])
    page = show(*paths)
    keys = [(c["data-why"], c["data-attack"], c["data-network"]) for c in cards(page)]
    pairs = [("ES", "0"), ("ES", "1")] * 2 + [("GTM", "0"), ("GTM", "1")] * 2
    assert keys == [(why, *pair) for why in ("worst", "median", "random") for pair in pairs]
    options = {
        name: [(o["value"], o.text) for o in page.by_id(name).all("option")]
        for name in ("by-network", "by-attack", "map-attack")
    }
    assert options == {
        "by-network": [("", "all"), ("0", "a"), ("1", "b")],
        "by-attack": [("", "all"), ("ES", "ES"), ("GTM", "GTM")],
        "map-attack": [("", "all"), ("0", "ES"), ("1", "GTM")],
    }
    maps = [one.one("figcaption").text for one in page.by_id("map").all("figure")]
    assert maps == [f"{name}: 70 % of the variance is in this plane." for name in "ab"]


def test_pictures_that_do_not_fit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 300_000
    monkeypatch.setattr(pages, "MOST_BYTES", most)
    largest = encoded(noise(0))  # no format makes noise smaller
    listed = [{**one, "image": largest} for one in a_picture()["before"]]
    images = {"perturbed": largest, "difference": largest, "before": listed, "after": listed}
    told: list[str] = []
    paths = [written(a_record(name=name), tmp_path / name) for name in "abc"]
    for path, name in zip(paths, "abc", strict=True):
        pictured(path, a_record(name=name), ["ES", "GTM"], each=4, **images)
    text = make_page(paths, told.append)
    page = parsed(text)
    assert most * 0.8 < len(text.encode()) < most
    shown = len(cards(page))
    assert 0 < shown < 72
    assert left_out(page) == [f"{72 - shown} more queries are left out, to keep the page small."]
    assert {card["data-why"] for card in cards(page)[:12]} == {"worst"}, "these say the most"
    assert told == [f"{72 - shown} cards are left out, to keep the page small"]


def test_records_that_do_not_fit_on_a_page_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST_BYTES", 60_000)
    with pytest.raises(
        UserError, match=r"would have 0\.\d MB without a picture, and 0.06 are the most: give fewer"
    ):
        write_report([written(a_record(), tmp_path / "a")] * 3, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_damaged_pictures_and_those_of_another_record(tmp_path: Path, show: Show) -> None:
    folder = written(a_record(name="mine"), tmp_path / "a")
    file = pictured(folder, a_record(name="mine"))
    whole = file.read_text()
    for content, told in (
        ("", "is damaged"),
        (whole[:-9], "is damaged"),
        (whole.replace('"place": [1, 2]', '"place": [1, 1]'), "is damaged, or was changed by hand"),
    ):
        file.write_text(content)
        page = show(folder)
        assert not cards(page)
        (line,) = left_out(page)
        assert line.startswith(f"mine: no pictures are shown, for {file} {told}")
    file.write_text(whole)
    written(a_record({"R@1": 1.0}, name="mine"), folder)
    assert "is of another record" in left_out(show(folder))[0]


# The run, and curves


def planned(name: str = "c2f2 N/A[S]") -> Record:
    plan = Plan.make(eps=16 / 255, steps=8, queries=9, checks="none")
    return altered(a_record(name=name), settings=plan.settings.model_dump(mode="json"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an evaluation, whose network is in a file that must not be run."""
    run = make_run(tmp_path / "run", "last", defense="N/A[S]", model="own.py:Network")
    (run / "own.py").write_text("raise SystemExit('run')\n")
    (run / "metrics.csv").write_text(LOGGED)
    written(planned(), run / "evaluation")
    return run


def test_a_record_in_a_run_comes_with_its_training(run: Path, tmp_path: Path, show: Show) -> None:
    page = show(run)
    assert {"loss", "hardness", "R@1"} <= {one.text for one in page.by_id("training").all("text")}
    command = f"robustmetric evaluate {run} --eps 16/255 --steps 8 --queries 9 --checks none"
    assert page.by_id("cite").one("pre").text.startswith(command)
    both = show(written(planned("other"), tmp_path / "other"), run)
    strokes = {one.attributes.get("stroke") for one in both.by_id("training").one("svg").every()}
    assert "var(--s0)" not in strokes, "the second keeps its colour"
    (run / "recipe.yaml").write_text("{")
    assert show(run).has("training")


@pytest.mark.parametrize("where", [".", "..", "evaluation", "evaluation/record.json", "../evaluation"])
def test_the_run_is_found_from_any_place(where: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run / "evaluation"
    (folder / "deeper").mkdir()
    monkeypatch.chdir({".": folder, "..": folder / "deeper", "../evaluation": folder}.get(where, run))
    assert 'id="training"' in make_page([Path(where)])


def test_a_run_of_another_network_is_not_taken_for_the_record_s(tmp_path: Path, show: Show) -> None:
    run = make_run(tmp_path / "run", "last", defense="N/A[S]")
    (run / "metrics.csv").write_text(LOGGED)
    page = show(written(planned("resnet18 mine.pth"), run / "other"))
    assert not page.has("training")
    assert page.by_id("cite").one("pre").text.startswith("robustmetric evaluate RUN --data digits ")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"loss\n1\n", b"step,loss\nx,y\n"])
def test_a_log_that_cannot_be_read(content: bytes, run: Path, show: Show) -> None:
    (run / "metrics.csv").write_bytes(content)
    assert not show(run).has("training")


def test_curves_are_plotted_and_damaged_points_told(tmp_path: Path, show: Show) -> None:
    folder = written(planned(), tmp_path / "a")
    for steps in (1, 64):
        settings = {"steps": steps, "alpha": max(planned().settings.alpha, 20 / 255 / steps)}
        written(altered(planned(), settings=settings), folder / FOLDER / f"steps-{steps}")
    (plot,) = show(folder).by_id("curves").all("svg")
    assert {"steps", "ERS ↑", "ES:R ↑", "1", "64"} <= {one.text for one in plot.all("text")}
    (folder / FOLDER / "steps-64" / "record.json").write_text("{}")
    page = show(folder)
    assert "Each point attacks 9 queries" in page.by_id("curves").text
    assert any("steps-64/record.json is damaged" in line for line in left_out(page))
    assert not show(planned()).has("curves")


def test_records_of_different_protocols_are_refused(tmp_path: Path) -> None:
    paths = [written(a_record(protocol=name), tmp_path / name) for name in ("strict", "reference")]
    with pytest.raises(UserError, match="records of different protocols are never compared"):
        write_report(paths, tmp_path / "report.html")
