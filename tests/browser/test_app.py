"""The app in a browser: a query is chosen and attacked, the ranking changes, nothing leaves the machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visit
from tests.helpers.browser import DESKTOP, PATIENCE, PHONE, Scheme, check_accessibility, check_width
from tests.helpers.runs import make_pictures, make_run

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE)

# Runs the command line, and writes down whom it wants to speak to.
PROGRAM = """
import json, sys
log = open(sys.argv.pop(1), "a", buffering=1)
asks = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")
def note(event, arguments):
    if event in asks:
        print(json.dumps([event, [str(a) for a in arguments[0 if "get" in event else 1:]]]), file=log)
sys.addaudithook(note)
from robustmetric.cli import run
run()
"""
HOME = ("127.0.0.1", "localhost", "::1")

# What a part of gradio's breaks and no style sheet can mend: the field for uploads is not named by its text.
GRADIO = {"label-content-name-mismatch": ".upload-container"}


@dataclass
class App:
    """An app that runs: its address, its process, what it printed and whom it wanted to speak to."""

    url: str
    process: subprocess.Popen[str]
    asked: Path

    def outside(self) -> list[str]:
        """List what it wanted of others than this machine."""
        lines = [json.loads(line) for line in self.asked.read_text().splitlines()]
        assert lines, "gradio asks itself whether it runs"
        return [str(line) for line in lines if not any(f"'{home}'" in str(line[1]) for home in HOME)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def started(folder: Path, *arguments: object) -> Iterator[App]:
    """Start the app in a process, with its temporary files in a folder, and stop it in the end."""
    port, asked = free_port(), folder / "asked"
    (folder / "tmp").mkdir()
    options = [*map(str, arguments), "--port", str(port), "--cache", str(folder / "cache")]
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", PROGRAM, str(asked), "app", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), "GRADIO_SHARE": "true"},
    )
    assert process.stdout is not None
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if "the page is at" in line:
                break
        else:
            pytest.fail("".join(said))
        yield App(f"http://127.0.0.1:{port}", process, asked)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=600)
    assert rest == "stopped; the same command starts it again\n"
    assert process.returncode == 130
    assert not list((folder / "tmp").glob("robustmetric-app-*")), "uploads are left behind"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """The app with two networks on digits beside each other."""
    folder = tmp_path_factory.mktemp("app")
    plain = make_run(folder / "plain", "last", defense="N/A[S]")
    defended = make_run(folder / "defended", "last", first=3, defense="HM[S,LGA]&ICS")
    with started(folder, plain, "--beside", defended, "--steps", 20) as found:
        yield found
        assert not found.outside()


def attack(page: Page) -> None:
    """Press the button, and wait until all steps were gone through."""
    page.get_by_role("button", name="Attack", exact=True).click()
    expect(page.locator("#rm-told")).to_contain_text(" s.")
    slider = page.get_by_label("range slider for Go through the steps")
    last = slider.get_attribute("max")
    assert last is not None
    expect(slider).to_have_value(last)


def choose(page: Page, label: str, option: str) -> None:
    page.get_by_label(label, exact=True).click()
    page.get_by_role("option", name=option, exact=True).click()


def rankings(page: Page) -> list[str]:
    """The texts of all rankings: before and now of each network."""
    return page.locator(".rm-ranking").all_inner_texts()


def open_app(visit: Visit, app: App, size: tuple[int, int] = DESKTOP, scheme: Scheme = "light") -> Page:
    page = visit(app.url, size, scheme)
    expect(page.get_by_role("button", name="Attack", exact=True)).to_be_visible(timeout=PATIENCE)
    return page


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_ranking_changes_step_by_step(
    size: tuple[int, int],
    scheme: Scheme,
    app: App,
    visit: Visit,
    screenshot: Callable[[Page, str], Path],
) -> None:
    page = open_app(visit, app, size, scheme)
    check_width(page)
    check_accessibility(page, GRADIO)
    choose(page, "Class of the query", "7")
    expect(page.locator("#rm-query")).to_contain_text("class 7")
    expect(page.locator("#rm-query")).to_contain_text("image 9class 7")
    drawn = {"image 9class 7"}
    for _ in range(5):  # the first of them may be drawn as well
        page.get_by_role("button", name="Random image").click()
        page.wait_for_timeout(300)
        expect(page.locator("#rm-query")).to_contain_text("class 7")
        drawn.add(page.locator("#rm-query").inner_text())
    assert len(drawn) > 2
    choose(page, "Attack", "ES")
    attack(page)
    expect(page.locator(".rm-panel")).to_have_count(2)
    expect(page.locator(".rm-panel h2").nth(1)).to_contain_text("HM[S,LGA]&ICS")
    expect(page.locator(".rm-when")).to_have_text(["After step 20 of 20"] * 2)
    before, now = rankings(page)[::2], rankings(page)[1::2]
    assert before != now
    assert all("✓ right" in text for text in before)
    check_width(page)
    check_accessibility(page, GRADIO)
    screenshot(page, f"app-{scheme}-{size[0]}")

    slider = page.get_by_label("range slider for Go through the steps")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator(".rm-when")).to_have_text(["Before the attack"] * 2)
    assert rankings(page)[::2] == rankings(page)[1::2] == before
    page.keyboard.press("End")
    expect(page.locator(".rm-when")).to_have_text(["After step 20 of 20"] * 2)
    assert rankings(page)[1::2] == now
    tops = page.locator(".rm-panel").evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    assert (tops[0] == tops[1]) == (size == DESKTOP), "side by side where there is room"


def test_what_was_asked_for_last_is_shown(app: App, visit: Visit) -> None:
    """While steps are gone through: another attack ends that, and so does who goes by hand."""
    page = open_app(visit, app)
    go, now = page.get_by_role("button", name="Attack", exact=True), page.locator(".rm-when").first
    value = page.locator(".rm-scroll tbody th").first
    choose(page, "Attack", "ES")
    go.click()
    expect(value).to_contain_text("ES:D")
    choose(page, "Attack", "GTM")
    go.click()
    expect(page.locator("#rm-told")).to_contain_text("GTM: ")
    expect(now).to_have_text("After step 20 of 20")
    expect(value).to_contain_text("GTM")
    choose(page, "Attack", "ES")
    go.click()
    expect(value).to_contain_text("ES:D")
    expect(now).to_contain_text("After step ")
    page.get_by_label("range slider for Go through the steps").focus()
    page.keyboard.press("Home")
    expect(now).to_have_text("Before the attack")
    page.wait_for_timeout(1000)
    expect(now).to_have_text("Before the attack")


def test_an_upload_that_is_no_image_is_told(
    app: App, visit: Visit, screenshot: Callable[[Page, str], Path], tmp_path: Path
) -> None:
    page = open_app(visit, app, PHONE)
    page.get_by_text("Or upload an image").click()
    check_accessibility(page, GRADIO)
    field = page.locator("input[type=file]")
    field.set_input_files({"name": "photo.png", "mimeType": "image/png", "buffer": b"no image"})
    told = page.locator("#rm-told [role=alert]")
    expect(told).to_have_text(
        "the upload cannot be read as an image: it is not PNG, JPEG, WebP, BMP, GIF, TIFF or PPM, or damaged"
    )
    check_accessibility(page, GRADIO)
    check_width(page)
    screenshot(page, "app-no-image")
    page.get_by_role("button", name="Attack", exact=True).click()
    expect(told).to_contain_text("cannot be read")
    expect(page.locator(".rm-panel")).to_have_count(0)


def test_an_upload_is_attacked_as_a_new_image(
    app: App, visit: Visit, screenshot: Callable[[Page, str], Path], tmp_path: Path
) -> None:
    page = open_app(visit, app)
    Image.linear_gradient("L").convert("RGB").resize((64, 48)).save(tmp_path / "photo.jpg")
    page.get_by_text("Or upload an image").click()
    page.locator("input[type=file]").set_input_files(tmp_path / "photo.jpg")
    expect(page.locator("#rm-query")).to_contain_text("your upload")
    expect(page.locator("#rm-query")).to_contain_text("class not known")
    choose(page, "Attack", "misrank")
    page.get_by_role("button", name="Attack", exact=True).click()
    expect(page.locator("#rm-told [role=alert]")).to_contain_text(
        "misrank is about images of the query's class"
    )
    choose(page, "Attack", "promote")
    attack(page)
    expect(page.locator(".rm-mark")).to_have_count(0)
    expect(page.locator(".rm-targets figure")).to_have_count(2)
    choose(page, "Class of the upload", "3")
    expect(page.locator("#rm-query")).to_contain_text("class 3")
    attack(page)
    expect(page.locator(".rm-mark").first).to_be_visible()
    screenshot(page, "app-upload")


def test_nothing_but_the_page_is_given_out(app: App) -> None:
    def status(path: str, **headers: str) -> int:
        request = urllib.request.Request(f"{app.url}{path}", headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request) as answer:  # noqa: S310
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status("/") == 200
    for path in ("/docs", "/redoc", "/openapi.json", "/monitoring", "/gradio_api/file=/etc/passwd"):
        assert status(path) in (403, 404), path
    assert status("/", Host="evil.example") == 403
    assert status("/", Origin="https://evil.example") == 403
    # Another address of this machine, at which who listens everywhere would answer.
    with pytest.raises(OSError, match=r"refused|assign|timed out"):
        socket.create_connection(("127.0.0.2", int(app.url.rpartition(":")[2])), timeout=10).close()


def test_foreign_names_are_shown_as_text(tmp_path: Path, visit: Visit) -> None:
    """Names of classes and files that would run in a page, or be computed by its templates."""
    names = ["<img src=x onerror=console.error(1)>", "${console.error(2)}", "{{ 7 * 7 }}", "&amp; so on"]
    make_pictures(tmp_path / "made", classes=4, each=4, height=8, width=8)
    for place, name in enumerate(names):
        (tmp_path / "made" / f"class{place:02}").rename(tmp_path / "made" / name)
    network = tmp_path / "nets.py"
    network.write_text("from torch import nn\ndef flat():\n    return nn.Flatten()\n")
    folder = tmp_path / "app"
    folder.mkdir()
    options = (
        "--data",
        "folder",
        "--root",
        tmp_path / "made",
        "--split",
        "all",
        "--size",
        8,
        "--attacks",
        "ES",
    )
    with started(folder, "--model", f"{network}:flat", *options) as app:
        page = open_app(visit, app)
        for name in names:
            choose(page, "Class of the query", name)
            expect(page.locator("#rm-query")).to_contain_text(f"class {name}")
        attack(page)
        shown = " ".join(page.locator(".rm-class").all_inner_texts())
        assert any(name in shown for name in names)
        assert "49" not in shown.replace("image 49", "")
        assert not app.outside()
