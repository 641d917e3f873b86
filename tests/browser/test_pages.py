"""What watches pages in the browser finds what is wrong, and lets pass what is right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.conftest import Visit
from tests.helpers.browser import check_accessibility, opened

pytestmark = pytest.mark.slow

GOOD = """<!doctype html><html lang="en"><title>A page</title>
<style>@media (prefers-color-scheme: dark) { html { background: #111; color: #eee } }</style>
<link rel="icon" href="data:,"><main><h1>A page</h1><label>Name <input></label></main></html>"""


@pytest.fixture
def html(tmp_path: Path) -> Callable[[str], str]:
    """Write a page, and return its address."""

    def write(text: str) -> str:
        (tmp_path / "page.html").write_text(text)
        return (tmp_path / "page.html").as_uri()

    return write


def failed() -> AbstractContextManager[pytest.ExceptionInfo[BaseException]]:
    return pytest.raises(pytest.fail.Exception)


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ("<script>console.error('broken')</script>", "an error on the console: broken"),
        ("<script>throw new Error('broken')</script>", "an error of the page: broken"),
        ("<img src='http://a.example/b.png' alt=''>", "leaves for http://a.example/b.png"),
        ("<script>fetch('https://a.example/b').catch(() => 0)</script>", "leaves for https://a.example/b"),
        ("<link rel=preconnect href='https://a.example'>", "leaves for https://a.example/"),
    ],
)
def test_what_is_wrong_is_told_in_the_end(
    added: str, problem: str, html: Callable[[str], str], browser: Browser
) -> None:
    with failed() as told, opened(browser, html(GOOD + added)) as page:
        page.wait_for_load_state("networkidle")
    assert problem in str(told.value)


@pytest.mark.parametrize(
    ("added", "rule"),
    [
        ("<p style='color: #999; background: #fff'>faint</p>", "color-contrast"),
        ("<input style='height: 24px'>", "label"),
        ("<img src='data:,'>", "image-alt"),
    ],
)
def test_a_violation_is_told_but_for_what_is_set_apart(
    added: str, rule: str, html: Callable[[str], str], browser: Browser, visit: Visit
) -> None:
    page = visit(html(f"{GOOD}<div class=theirs>{added}</div>"))
    check_accessibility(page, {rule: ".theirs"})
    with failed() as told:
        check_accessibility(page, {rule: ".others"})
    assert f"1 violations at {page.url}\n{rule} (" in str(told.value)
