"""The app in a browser: a query is chosen and attacked, the ranking changes, nothing leaves the machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visit
from tests.helpers.browser import DESKTOP, PATIENCE, PHONE, Scheme, check_accessibility, check_width
from tests.helpers.runs import make_run

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE)

# Runs the command line, and writes down whom it wants to speak to.
PROGRAM = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
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
    assert rest.startswith("stopped; ")
    assert process.returncode == 130


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("app")
    run = make_run(folder / "run", "last", defense="N/A[S]")
    with started(folder, run, "--steps", 20) as found:
        yield found
        assert not found.outside()


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_query_is_attacked(
    size: tuple[int, int], scheme: Scheme, app: App, visit: Visit, screenshot: Callable[[Page, str], Path]
) -> None:
    page = visit(app.url, size, scheme)
    go = page.get_by_role("button", name="Attack", exact=True)
    expect(go).to_be_visible(timeout=PATIENCE)
    page.get_by_label("Image, 0 to 796").fill("9")
    page.get_by_label("Image, 0 to 796").press("Tab")
    expect(page.locator("#query")).to_contain_text("image 9")
    go.click()
    card = page.locator("#shown article.shot")
    expect(card).to_contain_text("ES: image 9")
    expect(card.locator(".ranking")).to_have_count(2)
    expect(card.locator(".ranking li").first).to_be_visible()
    check_width(page)
    check_accessibility(page)
    screenshot(page, f"app-{scheme}-{size[0]}")


def test_an_error_is_told_on_the_page(app: App, visit: Visit) -> None:
    page = visit(app.url, DESKTOP, "light")
    page.get_by_label("Image, 0 to 796").fill("797")
    page.get_by_label("Image, 0 to 796").press("Tab")
    expect(page.get_by_role("alert")).to_contain_text("from 0 to 796, not 797")
