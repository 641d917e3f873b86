"""The page of a report in Chromium: filters, sorting, themes, keyboard, without JavaScript, on paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Dialog, Page

from robustmetric.evaluation import load_record
from robustmetric.report.page import write_report
from robustmetric.report.pictures import load_pictures
from robustmetric.text import printable
from tests.browser.conftest import Visit
from tests.helpers.browser import DESKTOP, PHONE, Scheme, check_accessibility, check_width
from tests.helpers.command import works
from tests.helpers.hostile import hostile, write_hostile
from tests.helpers.records import a_record, written
from tests.helpers.runs import make_run

pytestmark = pytest.mark.slow

SIZES = [PHONE, DESKTOP]
SCHEMES: list[Scheme] = ["light", "dark"]
LOGGED = "step,loss,hardness/reached,R@1\n10,0.5,-0.2,98.0\n20,0.25,-0.1,97.0\n"
SHOWN = "[...document.querySelectorAll('.shot:not([hidden])')]"


class Made(NamedTuple):
    """The pages of a test, and the folders of the records of the first."""

    whole: str
    bare: str
    hostile: str
    folders: tuple[Path, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Pages: of two tiny networks, one with all scores and curves; of a bare record; of hostile ones."""
    root = tmp_path_factory.mktemp("report")
    runs = [
        make_run(root / "a", "last", defense="N/A[S]"),
        make_run(root / "b", "last", first=3),
    ]
    (runs[0] / "metrics.csv").write_text(LOGGED)
    small = ("--queries", 12, "--steps", 2, "--eps", 0.2)
    suite = "worst-case(goals='misrank', steps=2, restarts=0, targets=1, trials=2)"
    works("evaluate", runs[0], *small, "--suite", suite, "--report", root / "a.html", "--curves")
    works("evaluate", runs[1], *small, "--attacks", "CA+,ES,GTM", "--report", root / "b.html")
    page = write_report(runs, root / "whole.html")
    bare = write_report([written(a_record(attacks=False), root / "bare")], root / "bare.html")
    other = write_report([write_hostile(root / name) for name in "xy"], root / "hostile.html")
    folders = (runs[0] / "evaluation", runs[1] / "evaluation")
    return Made(page.as_uri(), bare.as_uri(), other.as_uri(), folders)


def choose(page: Page, name: str, value: str) -> None:
    page.select_option(f"#{name}", value)


def cards(page: Page) -> list[dict[str, str]]:
    """What is said of the cards that are shown, in their order."""
    found: list[dict[str, str]] = page.evaluate(f"{SHOWN}.map((card) => ({{...card.dataset}}))")
    return found


def count(page: Page) -> str:
    return page.inner_text("#count")


def pictures(made: Made) -> list[tuple[str, str, str]]:
    """The attack, the choice and the network of all pictures."""
    return [
        (picture.attack, str(picture.why), str(place))
        for place, folder in enumerate(made.folders)
        for picture in load_pictures(folder, load_record(folder)).pictures
    ]


# What it looks like


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES, ids=["phone", "desktop"])
def test_it_is_accessible_and_not_too_wide(
    size: tuple[int, int], scheme: Scheme, made: Made, visit: Visit, screenshot: Callable[[Page, str], Path]
) -> None:
    page = visit(made.whole, size, scheme)
    screenshot(page, f"report-{scheme}-{size[0]}")
    check_width(page)
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    check_accessibility(page)
    page.click("#more")
    check_width(page)


def test_every_image_is_one(made: Made, visit: Visit) -> None:
    page = visit(made.whole)
    widths = page.evaluate(
        "() => Promise.all([...document.images].map((i) => i.decode().then(() => i.naturalWidth)))"
    )
    assert len(widths) > 100
    assert set(widths) == {8}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_theme_can_be_chosen(scheme: Scheme, made: Made, visit: Visit) -> None:
    page = visit(made.whole, DESKTOP, scheme)
    own = {"light": "rgb(251, 251, 250)", "dark": "rgb(20, 23, 28)"}

    def back() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert back() == own[scheme]
    for chosen in (scheme, "dark" if scheme == "light" else "light"):
        choose(page, "theme", chosen)
        assert back() == own[chosen]
    check_accessibility(page)
    page.emulate_media(media="print")
    assert back() == own["light"], "paper is light"
    page.emulate_media(media="screen")
    choose(page, "theme", "")
    assert back() == own[scheme]


# The gallery


def test_filters_show_what_they_say(made: Made, visit: Visit) -> None:
    page, every = visit(made.whole), pictures(made)
    assert count(page) == f"12 of {len(every)} queries shown"
    assert len(cards(page)) == 12
    choices = [("by-attack", 0, "ES"), ("by-why", 1, "median"), ("by-network", 2, "1")]
    for name, place, value in choices:
        choose(page, name, value)
        wanted = [one for one in every if one[place] == value]
        shown = cards(page)
        assert len(shown) == min(12, len(wanted))
        assert count(page) == f"{len(shown)} of {len(wanted)} queries shown"
        key = name.removeprefix("by-")
        assert {card[key] for card in shown} == {value}
        choose(page, name, "")
    for name, _, value in choices:
        choose(page, name, value)
    wanted = [one for one in every if one == ("ES", "median", "1")]
    assert [(c["attack"], c["why"], c["network"]) for c in cards(page)] == wanted
    assert count(page) == f"{len(wanted)} of {len(wanted)} queries shown"
    choose(page, "by-attack", "TMA")
    assert count(page) == "0 of 0 queries shown", "the second network was not attacked by TMA"
    assert not page.is_visible("#more")


def test_more_shows_all_that_are_chosen(made: Made, visit: Visit) -> None:
    page, every = visit(made.whole), pictures(made)
    assert page.inner_text("#more") == f"Show {len(every) - 12} more"
    page.click("#more")
    assert count(page) == f"{len(every)} of {len(every)} queries shown"
    assert len(cards(page)) == len(every)
    assert not page.is_visible("#more")
    assert page.evaluate("document.activeElement.dataset.order") == "12", (
        "one reads on where the new ones begin"
    )
    choose(page, "by-why", "worst")
    assert len(cards(page)) == min(12, sum(why == "worst" for _, why, _ in every)), "a new choice begins anew"


def test_cards_are_sorted(made: Made, visit: Visit) -> None:
    page = visit(made.whole)
    page.click("#more")
    for key, down in (("harm", True), ("number", False), ("order", False)):
        choose(page, "sort", key)
        found = [float(card[key]) for card in cards(page)]
        if key != "order":
            page.click("#more")
            found = [float(card[key]) for card in cards(page)]
        assert found == sorted(found, reverse=down)
        assert len(set(found)) > 3


# Tables, maps


def test_the_table_is_sorted_by_each_head(made: Made, visit: Visit) -> None:
    page = visit(made.whole)
    heads = page.locator("table.sortable th[data-kind]")
    assert heads.count() == 3

    def column(place: int) -> list[float | None]:
        texts = page.eval_on_selector_all(
            "table.sortable tbody tr", f"(rows) => rows.map((row) => row.cells[{place}].dataset.value)"
        )
        return [float(text) if text else None for text in texts]

    before = page.inner_text("table.sortable tbody")
    for place in (1, 2, 0):
        for up in (True, False, True):
            heads.nth(place).locator("button").click()
            found = column(place)
            known = [value for value in found if value is not None]
            assert known == sorted(known, reverse=not up)
            assert found[: len(known)] == known, "what was not measured stands last"
            order = [heads.nth(k).get_attribute("aria-sort") for k in range(3)]
            assert order == [("ascending" if up else "descending") if k == place else None for k in range(3)]
    assert None in column(2)
    assert page.inner_text("table.sortable tbody") == before, "sorted by the score it is as it was"


def test_the_map_shows_the_moves_of_the_attack_that_is_chosen(made: Made, visit: Visit) -> None:
    page = visit(made.whole)

    def seen() -> set[str]:
        return set(
            page.evaluate(
                """() => [...document.querySelectorAll("g[id*='-moves-']")].filter((one) =>
                    getComputedStyle(one).visibility === "visible").map((one) => one.id)"""
            )
        )

    every = {f"map-0-moves-{k}" for k in range(9)} | {f"map-1-moves-{k}" for k in (0, 5, 7)}
    assert seen() == {"map-0-moves-0", "map-1-moves-0"}, "one attack at first"
    choose(page, "map-attack", "5")
    assert seen() == {"map-0-moves-5", "map-1-moves-5"}
    choose(page, "map-attack", "8")
    assert seen() == {"map-0-moves-8"}
    choose(page, "map-attack", "")
    assert seen() == every


# Without a pointer, without JavaScript, on paper


def test_the_keyboard_reaches_and_uses_everything(made: Made, visit: Visit) -> None:
    page = visit(made.whole)
    wanted = page.evaluate(
        """() => [...document.querySelectorAll("a[href], button, select, summary, [tabindex='0']")]
            .filter((one) => one.checkVisibility()).map((one, k) => { one.dataset.k = k; return k; })"""
    )
    reached = []
    for _ in wanted:
        page.keyboard.press("Tab")
        number, outline = page.evaluate(
            """() => { const style = getComputedStyle(document.activeElement);
                return [document.activeElement.dataset.k, parseFloat(style.outlineWidth) *
                    (style.outlineStyle !== "none")]; }"""
        )
        reached.append(int(number))
        assert outline >= 2, (
            f"the focus is not seen: {page.evaluate('document.activeElement.outerHTML')[:200]}"
        )
    assert reached == wanted, "in the order of the page"

    page.focus("table.sortable th button")
    page.keyboard.press("Enter")
    assert page.get_attribute("table.sortable th", "aria-sort") == "ascending"
    page.focus("#by-attack")
    page.keyboard.press("E")
    assert {card["attack"] for card in cards(page)} == {"ES"}
    page.focus("#more")
    page.keyboard.press("Space")
    assert not page.is_visible("#more")
    page.focus("#checks summary")
    page.keyboard.press("Enter")
    assert page.locator("#checks details").get_attribute("open") is not None


def test_without_javascript_all_is_there(made: Made, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(made.whole)
        assert page.locator(".shot:visible").count() == len(pictures(made))
        assert page.locator("button:visible, select:visible, input:visible, form:visible").count() == 0
        for name in ("scores", "worst", "checks", "gallery", "curves", "map", "training", "tested", "cite"):
            assert page.is_visible(f"#{name}"), name
        assert page.locator("g[id*='-moves-']").count() == 12
        page.click("#checks summary")
        assert page.is_visible("#checks details table"), "the browser opens it by itself"
        with page.expect_download() as download:
            page.click("a[download='scores.csv']")
        assert download.value.suggested_filename == "scores.csv"
        assert (
            Path(download.value.path())
            .read_text(encoding="utf-8")
            .startswith("network,data,kind,R@1,R@1 low")
        )
    finally:
        context.close()


def test_on_paper_all_queries_are_shown(made: Made, visit: Visit) -> None:
    page, every = visit(made.whole), len(pictures(made))
    choose(page, "by-attack", "ES")
    page.emulate_media(media="print")
    assert page.locator(".shot:visible").count() == every
    assert page.locator("form:visible, nav:visible, select:visible, #more:visible").count() == 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#checks details table:visible").count() == 1
    check_width(page)
    page.emulate_media(media="screen")
    assert page.locator(".shot:visible").count() == min(12, sum(a == "ES" for a, _, _ in pictures(made)))


# Texts that try to be something else


@pytest.mark.parametrize("size", SIZES, ids=["phone", "desktop"])
def test_hostile_texts_do_nothing(
    size: tuple[int, int], made: Made, visit: Visit, screenshot: Callable[[Page, str], Path]
) -> None:
    dialogs: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page = visit("about:blank", size)
    page.on("dialog", dismiss)
    page.goto(made.hostile)
    choose(page, "by-attack", printable(hostile("attack")))
    choose(page, "by-network", "1")
    assert {card["network"] for card in cards(page)} == {"1"}
    choose(page, "map-attack", "0")
    choose(page, "theme", "dark")
    page.locator("table.sortable th button").nth(1).click()
    text = " ".join(page.inner_text("body").split())
    for place in ("network", "column", "check", "says", "data", "file", "class", "attack"):
        assert " ".join(printable(hostile(place)).split()) in text, place
    assert page.evaluate("document.scripts.length") == 1
    assert page.evaluate("document.querySelectorAll('[onerror], [onclick], [onload], [style]').length") == 0
    check_width(page)
    check_accessibility(page)
    screenshot(page, f"report-hostile-{size[0]}")
    assert dialogs == []
