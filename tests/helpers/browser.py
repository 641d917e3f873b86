"""Pages in headless Chromium: opened, watched for what goes wrong, measured and photographed.

Tests in `tests/browser` take the fixtures `visit` and `screenshot` of its conftest.py, made of this.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:  # the conftest.py of all tests imports this
    from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, Request, WebSocket

ROOT = Path(__file__).parents[2]
AXE = ROOT / ".venv" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
NAMES = ("chromium", "chromium-browser", "google-chrome")

PATIENCE = 120_000
"""Milliseconds that a page may take on a busy machine."""
PHONE, DESKTOP = (390, 844), (1280, 900)
Scheme = Literal["light", "dark"]

LEFT_OUT = "in a browser: "
"""Begins the reason of every test that is skipped because there is no browser, or no axe-core."""
NO_BROWSER = f"{LEFT_OUT}there is no Chromium; apt-get install chromium"
NO_AXE = f"{LEFT_OUT}there is no axe-core; npm install axe-core --prefix .venv/npm"

SILENT = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    # No name but that of this machine is found: what wants to leave fails, and is told by `Watched`.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)  # fmt: skip

WCAG = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa")
_VIOLATIONS = """async ([tags, apart]) => {
    const found = await axe.run(document, {runOnly: {type: "tag", values: tags}});
    const ours = (rule) => (node) => {
        const place = document.querySelector(node.target[0]);
        return !(rule in apart) || place === null || place.closest(apart[rule]) === null;
    };
    return found.violations.flatMap((rule) => rule.nodes.filter(ours(rule.id)).map((node) =>
        `${rule.id} (${rule.help})\\n    ${node.html.slice(0, 200)}\\n    ${
            node.failureSummary.split("\\n").slice(1).join("; ").trim()}`));
}"""
_HINTS = """() => [...document.querySelectorAll("link[rel][href]")].filter((link) =>
    /prefetch|preconnect|preload/.test(link.rel)).map((link) => link.href)"""


def launch(playwright: Playwright) -> Browser:
    """Start the Chromium that is installed; skip the test if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(NO_BROWSER)
    return playwright.chromium.launch(executable_path=found, args=list(SILENT), timeout=PATIENCE)


@dataclass
class Watched:
    """What goes wrong on a page that is at home at an `origin`; `problems` has a line for each."""

    origin: str
    problems: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Listen to a page: its console, its errors, and all that it asks for."""
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.problems.append(f"an error of the page: {error}"))
        page.on("request", self._asked)
        page.on("websocket", self._connected)

    def look(self, page: Page) -> None:
        """Look for hints to connect to other places, which are followed without a request that is told."""
        for address in page.evaluate(_HINTS):
            self._goes_to(address)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.problems.append(f"an error on the console: {message.text} ({message.location['url']})")

    def _asked(self, request: Request) -> None:
        self._goes_to(request.url)

    def _connected(self, socket: WebSocket) -> None:
        self._goes_to(socket.url)

    def _goes_to(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("file", "data", "blob", "about") and parts.netloc != self.origin:
            self.problems.append(f"leaves for {address}")


@contextmanager
def opened(
    browser: Browser, url: str, size: tuple[int, int] = DESKTOP, scheme: Scheme = "light"
) -> Iterator[Page]:
    """Open a page at a width and height, in a colour scheme; fail in the end if anything was wrong on it.

    Wrong are errors on the console and of the page, and requests for any place but the page's own.
    """
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    watched = Watched(urlsplit(url).netloc)
    try:
        page = context.new_page()
        watched.watch(page)
        page.goto(url)
        yield page
        watched.look(page)
    finally:
        context.close()
    if watched.problems:
        pytest.fail("\n".join(dict.fromkeys(watched.problems)), pytrace=False)


def check_accessibility(page: Page, apart: Mapping[str, str] | None = None) -> None:
    """Fail with a list of what breaks the rules A and AA of WCAG 2 on a page, as it is now.

    `apart` has, by the name of a rule, a CSS selector: the rule does not count for what is inside of it.
    """
    if not AXE.is_file():
        pytest.skip(NO_AXE)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    if found := page.evaluate(_VIOLATIONS, [list(WCAG), dict(apart or {})]):
        pytest.fail(f"{len(found)} violations at {page.url}\n" + "\n".join(found), pytrace=False)


def check_width(page: Page) -> None:
    """Fail if a page has to be scrolled sideways, and name what is too wide."""
    wide = page.evaluate(
        """() => document.documentElement.scrollWidth <= innerWidth + 1 ? [] :
            [...document.querySelectorAll("body *")].filter((e) =>
                e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 120))"""
    )
    if wide:
        pytest.fail(f"{page.url} is too wide for its window:\n" + "\n".join(wide[:10]), pytrace=False)
