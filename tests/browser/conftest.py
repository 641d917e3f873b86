"""A browser for all tests of a file, and pages in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.helpers.browser import DESKTOP, Scheme, launch, opened


class Visit(Protocol):
    """Opens a page; see `opened`."""

    def __call__(self, url: str, size: tuple[int, int] = DESKTOP, scheme: Scheme = "light") -> Page: ...


# One for a file and not for all: as long as it is there, asyncio.run is refused in this process.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium; without one, tests are skipped, and a line in the end says how many."""
    with sync_playwright() as playwright:
        found = launch(playwright)
        yield found
        found.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Open pages that are closed with the test, which fails then if anything was wrong on them."""
    with ExitStack() as stack:

        def open_page(url: str, size: tuple[int, int] = DESKTOP, scheme: Scheme = "light") -> Page:
            return stack.enter_context(opened(browser, url, size, scheme))

        yield open_page


@pytest.fixture
def screenshot(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Page, str], Path]:
    """Write a page as NAME.png into the folder of --screenshots, or into that of the test."""
    folder = Path(request.config.getoption("screenshots") or tmp_path)

    def write(page: Page, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=folder / f"{name}.png", full_page=True)
        return folder / f"{name}.png"

    return write
