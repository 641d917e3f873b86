"""The gallery of a report: its cards, its room, and what becomes of pictures that are missing."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import robustmetric as rm
from robustmetric import UserError
from robustmetric.evaluation import Data, Evaluation, Plan, Record, Subject, load_arrays
from robustmetric.report import page as pages
from robustmetric.report.page import MOST_BYTES, write_report
from robustmetric.report.pictures import FOLDER, LIST, encoded, make_pictures
from tests.helpers.pages import Element, parsed
from tests.helpers.pictured import noise, pictured, seal
from tests.helpers.records import a_record, altered, written
from tests.report.conftest import Show

AGAIN = "run the same evaluate command again, with --report FILE"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A record with pictures of two attacks, four for each choice."""
    folder = written(a_record(name="mine"), tmp_path / "mine")
    pictured(folder, a_record(name="mine"), ["ES", "GTM"])
    return folder


def cards(page: Element) -> list[Element]:
    return page.by_id("gallery").all("article", "shot")


def left_out(page: Element) -> list[str]:
    return [one.text for one in page.by_id("gallery").all("p", "left-out")]


def test_a_card_has_the_values_of_its_picture(folder: Path, show: Show) -> None:
    page = show(folder)
    found = cards(page)
    assert len(found) == 12
    assert not left_out(page)
    listed = json.loads((folder / FOLDER / LIST).read_text())["pictures"]
    for order, (card, picture) in enumerate(zip(found, listed, strict=True)):
        assert (card["data-attack"], card["data-why"]) == (picture["attack"], picture["why"])
        assert (card["data-order"], card["data-number"]) == (str(order), str(picture["number"]))
        assert card["data-network"] == "0"
        assert float(card["data-harm"]) == picture["harm"]
        assert card.one("h3").text == f"{picture['attack']}: {picture['query']['name']} {picture['why']}"
        said = " ".join(one.text for one in card.all("p", "about"))
        assert f"Class {picture['query']['label']};" in said
        assert "first of its class at place 1 → 2" in said
        if picture["attack"] == "ES":
            assert "Wanted: this image is to look to the network like anything else than itself." in said
            assert "ES:D ↓ 100.000 → 0.000; ES:R ↑ 100.0 → 0.0;" in said
        captions = [one.text for one in card.all("figcaption")]
        assert captions == [
            "image",
            "perturbed",
            "difference ×10",
            f"target, class {(picture['number'] + 1) % 10}",
        ]
        before, after = card.all("ol")
        for ranking, items in ((before, picture["before"]), (after, picture["after"])):
            rows = ranking.all("li")
            assert [row["class"] for row in rows] == ["right" if i["right"] else "wrong" for i in items]
            assert [row.one("span", "class").text for row in rows] == [i["label"] for i in items]
            assert [row.one("span", "far").text for row in rows] == [f"{i['distance']:.3f}" for i in items]
            assert [row.one("img")["alt"] for row in rows] == [i["name"] for i in items]
    assert all(one["src"].startswith("data:image/png;base64,iVBOR") for one in page.all("img"))
    assert all(one["alt"] for one in page.all("img"))
    choice = [one.text for one in page.by_id("by-attack").all("option")]
    assert choice == ["all", "ES", "GTM"]
    assert not page.has("by-network"), "there is but one"
    assert [one.text for one in page.by_id("map-attack").all("option")] == ["all", "ES", "GTM"]


def test_an_image_that_is_ranked_stands_among_the_others(folder: Path, show: Show) -> None:
    file = folder / FOLDER / LIST
    content = json.loads(file.read_text())
    for picture in content["pictures"]:
        picture |= {"attack": "CA+", "asker": picture["targets"][0], "place": [317, 1], "values": {}}
        picture["after"][0]["itself"] = True
    seal(folder, content)
    card = cards(show(folder))[0]
    said = " ".join(one.text for one in card.all("p", "about"))
    assert "Wanted: this image is to come to the front of the target's ranking." in said
    assert "place of this image 317 → 1" in said
    assert "Ranked for the target image 1 of class 1:" in said
    before, after = card.all("ol")
    assert not before.all("li", "itself")
    assert after.all("li")[0].one("span", "this").text == "this image, place 1"


def test_cards_of_several_records_stand_side_by_side(tmp_path: Path, show: Show) -> None:
    paths = []
    for name in ("a", "b"):
        paths.append(written(a_record(name=name), tmp_path / name))
        pictured(paths[-1], a_record(name=name), ["ES", "GTM"])
    page = show(*paths)
    keys = [(c["data-why"], c["data-attack"], c["data-network"]) for c in cards(page)]
    one = [
        ("ES", "0"),
        ("ES", "1"),
        ("ES", "0"),
        ("ES", "1"),
        ("GTM", "0"),
        ("GTM", "1"),
        ("GTM", "0"),
        ("GTM", "1"),
    ]
    assert keys == [(why, *pair) for why in ("worst", "median", "random") for pair in one]
    assert [(o["value"], o.text) for o in page.by_id("by-network").all("option")] == [
        ("", "all"), ("0", "a"), ("1", "b"),
    ]  # fmt: skip
    assert [c.all("p", "about")[0].text for c in cards(page)[:2]] == ["a", "b"]


# The page stays small


def test_pictures_of_the_largest_size_leave_the_page_under_its_limit(tmp_path: Path) -> None:
    largest = encoded(noise(0, 112, 3))  # of noise, which no format makes smaller
    assert len(largest) > 35_000
    paths = []
    for name in ("a", "b", "c"):
        record = a_record(name=name)
        paths.append(written(record, tmp_path / name))
        pictured(paths[-1], record, ["ES", "GTM"], image=largest)
    out = write_report(paths, tmp_path / "report.html")
    size = out.stat().st_size
    assert MOST_BYTES == 10_000_000
    page = parsed(out.read_text(encoding="utf-8"))
    one = max(len(card.all("img")) for card in cards(page)) * len(largest) * 4 // 3
    assert MOST_BYTES - 2 * one < size < MOST_BYTES, "as many as fit, and no more"
    shown = len(cards(page))
    assert 0 < shown < 36
    assert left_out(page) == [f"{36 - shown} more queries are left out, to keep the page small."]
    assert {card["data-why"] for card in cards(page)[:12]} == {"worst"}, "these say the most"
    assert {card["data-network"] for card in cards(page)} == {"0", "1", "2"}


@pytest.mark.parametrize("most", [150_000, 300_000])
def test_many_small_pictures_leave_the_page_under_its_limit(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small ones the text around them weighs more."""
    monkeypatch.setattr(pages, "MOST_BYTES", most)
    record = a_record()
    folder = written(record, tmp_path / "a")
    pictured(folder, record, ["CA+", "QA+", "ES", "LTM", "GTM", "GTT"], each=3)
    out = write_report([folder], tmp_path / "report.html")
    shown = len(cards(parsed(out.read_text(encoding="utf-8"))))
    assert 0 < shown < 54
    assert most - 40_000 < out.stat().st_size < most


def test_one_picture_more_is_told_as_one(folder: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    page = show(folder)
    whole = len((folder.parent / "report.html").read_bytes())
    monkeypatch.setattr(pages, "MOST_BYTES", whole + pages._FRAME - 1500)
    page = show(folder)
    assert len(cards(page)) == 11
    assert left_out(page) == ["1 more query is left out, to keep the page small."]


def test_records_that_do_not_fit_on_a_page_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST_BYTES", 60_000)
    told = (
        r"a page of these 3 records would have 0\.\d MB without a picture, and 0.06 are the most: give fewer"
    )
    with pytest.raises(UserError, match=told):
        write_report([folder] * 3, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_records_that_are_too_large_are_no_download(show: Show, tmp_path: Path) -> None:
    record = altered(a_record(), data={"skipped": [f"class/{k:08}.png" for k in range(100_000)]})
    page = show(record)
    assert [one["download"] for one in page.all("a") if "download" in one.attributes] == ["scores.csv"]
    assert (
        page.by_id("cite").all("p")[-1].text.endswith("scores.csv; the records are too large for this page.")
    )
    assert (tmp_path / "report.html").stat().st_size < 200_000


def evaluated(folder: Path, images: int) -> Record:
    """Evaluate a linear network on noise, all images of it queries, with pictures."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8)).eval()
    pixels = torch.rand(images, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    subject = Subject(network, Data(pixels, torch.arange(images) % 10))
    plan = Plan.make(attacks=["ES"], steps=1, eps=0.1, checks="none", batch=2500)
    record = Evaluation(subject, plan, folder).run()
    make_pictures(Evaluation(subject, plan), record, load_arrays(folder), folder)
    return record


@pytest.mark.slow
def test_memory_does_not_grow_with_the_queries(tmp_path: Path) -> None:
    peaks, sizes = {}, {}
    for count in (500, 500, 10_000):  # the first one imports and compiles what it needs
        folder = tmp_path / str(count)
        if not folder.exists():
            assert evaluated(folder, count).queries.count == count
        tracemalloc.start()
        out = write_report([folder], tmp_path / "report.html", force=True)
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        sizes[count] = out.stat().st_size
    # Both show 6 queries and 400 points; numbers have more digits, and noise is another.
    assert peaks[10_000] < 1.1 * peaks[500]
    assert sizes[10_000] < 1.1 * sizes[500]
    assert peaks[10_000] < 20_000_000


# What is missing or damaged


def test_without_pictures(show: Show) -> None:
    page = show(a_record(name="mine"))
    assert not cards(page)
    assert not page.all("img")
    assert not page.has("by-attack")
    assert left_out(page) == [f"mine: no pictures were made: {AGAIN}."]
    assert not page.has("map")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(b""), "is damaged"),
        (lambda file: file.write_bytes(file.read_bytes()[:-30]), "is damaged"),
        (lambda file: file.write_bytes(b"<svg onload='alert(1)'/>"), "is damaged"),
        (lambda file: file.write_bytes(b"GIF89a" + file.read_bytes()), "is damaged"),
        (lambda file: file.write_bytes(b"RIFF" + file.read_bytes()), "is damaged"),
        (lambda file: file.write_bytes(file.read_bytes() + bytes(2_000_000)), "is damaged"),
    ],
    ids=["missing", "empty", "cut", "svg", "gif", "no webp", "huge"],
)  # fmt: skip
def test_an_image_that_is_missing_or_damaged(
    spoil: Callable[[Path], object], told: str, folder: Path, show: Show
) -> None:
    file = folder / FOLDER / "attack-00-000000-perturbed.png"
    spoil(file)
    page = show(folder)
    assert len(cards(page)) == 11
    assert [card["data-order"] for card in cards(page)] == [str(k) for k in range(11)]
    assert left_out(page) == [
        f"1 query is left out, because pictures are missing or damaged, the first of them: {file} {told}. To "
        f"make them anew, {AGAIN}."
    ]


def test_all_images_are_missing(folder: Path, show: Show) -> None:
    for file in (folder / FOLDER).glob("*.png"):
        file.unlink()
    page = show(folder)
    assert not cards(page)
    assert not page.has("by-attack")
    (told,) = left_out(page)
    assert told.startswith(
        "12 queries are left out, because pictures are missing or damaged, the first of them: "
    )
    assert page.has("map"), "it needs no files"


def changed(content: str) -> str:
    return content.replace('"place": [1, 2]', '"place": [1, 1]')


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda _: "", "is not a list of pictures"),
        (lambda _: "{}", "is not a list of pictures"),
        (lambda _: "[]", "is not a list of pictures"),
        (lambda text: text[:-9], "is not a list of pictures"),
        (changed, "is damaged, or was changed by hand: its digest does not match"),
        (lambda text: text.replace("pictures/1", "pictures/9"), "is not a list of pictures"),
    ],
    ids=["empty", "no entries", "no object", "cut", "changed", "version"],
)  # fmt: skip
def test_a_list_that_is_damaged(spoil: Callable[[str], str], told: str, folder: Path, show: Show) -> None:
    file = folder / FOLDER / LIST
    file.write_text(spoil(file.read_text()))
    page = show(folder)
    assert not cards(page)
    (line,) = left_out(page)
    assert line.startswith(f"mine: no pictures are shown, for {file} {told}")
    assert line.endswith(f": {AGAIN}.")
    assert page.has("scores")


def test_pictures_of_another_record(folder: Path, show: Show) -> None:
    written(a_record({"R@1": 1.0}, name="mine"), folder)
    page = show(folder)
    assert not cards(page)
    assert left_out(page) == [
        f"mine: no pictures are shown, for {folder / FOLDER / LIST} is of another record: {AGAIN}."
    ]


@pytest.mark.parametrize("name", ["../secret.png", "/secret/pictures/secret.png", "a/../secret.png"])
def test_files_of_other_folders_are_not_read(name: str, folder: Path, show: Show) -> None:
    secret = folder / "secret.png"
    secret.write_bytes(encoded(noise(7)))
    place = name.replace("/secret/", f"{folder}/", 1) if name.startswith("/") else name
    content = json.loads((folder / FOLDER / LIST).read_text())
    for picture in content["pictures"]:
        picture["perturbed"] = place
    (folder / FOLDER / "secret.png").write_bytes(secret.read_bytes())
    seal(folder, content)
    page = show(folder)
    assert not cards(page)
    assert len(left_out(page)) == 1
    assert not page.all("img")


def test_the_network_is_not_asked(folder: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "__call__", None)
    monkeypatch.setattr(rm, "load_run", None)
    assert len(cards(show(folder))) == 12
