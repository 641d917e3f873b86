"""The site of the documentation in a browser: it fits, is legible, and asks for nothing from elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import Visit
from tests.helpers.browser import DESKTOP, PHONE, check_accessibility, check_width
from tests.helpers.site import build_site

pytestmark = pytest.mark.slow


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *_: object) -> None:
        """Leave out the line for each request."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address that the site is served at."""
    folder = tmp_path_factory.mktemp("built") / "site"
    build_site(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("page", ["index", "evaluate", "api/index"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_and_is_legible(
    page: str, size: tuple[int, int], scheme: str, address: str, visit: Visit,
    screenshot: Callable[[Page, str], Path],
) -> None:  # fmt: skip
    shown = visit(f"{address}/{page}.html", size, "dark" if scheme == "dark" else "light")
    assert shown.evaluate("document.body.dataset.mdColorScheme") == (
        "slate" if scheme == "dark" else "default"
    )
    screenshot(shown, f"site-{page.replace('/', '-')}-{scheme}-{size[0]}")
    check_width(shown)
    # Chromium lets the keyboard scroll what the theme wraps wide tables in.
    check_accessibility(shown, {"scrollable-region-focusable": ".md-typeset__scrollwrap"})


def test_a_name_is_found_by_the_search(address: str, visit: Visit) -> None:
    page = visit(f"{address}/index.html")
    page.click(".md-search__input")
    page.get_by_text("Type to start searching").wait_for()  # what is typed before the index is there is lost
    page.keyboard.type("load_certificate")
    page.click(".md-search-result__link >> nth=0")
    assert page.url.partition("?")[0] == f"{address}/api/index.html"
    assert page.locator("[id='robustmetric.load_certificate']").is_visible()
