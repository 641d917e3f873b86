"""The site of the documentation: it builds without a warning, and all that is public is in its reference."""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from mkdocs.config import load_config

import robustmetric as rm
from docs.tools.pages import as_markdown, end_paragraphs, lead_links
from robustmetric.evaluation import Settings
from tests.helpers.site import CONFIG, build_site

ROOT = Path(__file__).parents[1]
PACKAGES = ("attacks", "data", "defenses", "evaluation", "models", "retrieval", "training")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "site"
    build_site(out)
    return out


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    config = load_config(str(CONFIG))
    pages = [str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")]
    pages += [target for target in config.extra["outside"].values() if target.endswith(".md")]
    assert sorted(leaves(config.nav)) == sorted(pages), "a page of docs/ is a line in nav of mkdocs.yml"


@pytest.mark.slow
def test_tables_and_lists_are_seen_as_such(site: Path) -> None:
    for file in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        built = article(site / f"{file.stem}.html")
        assert built.count("<table") == len(re.findall(r"^\|[-:| ]+\|$", text, re.MULTILINE)), file.name
        assert built.count("<h2") == len(re.findall(r"^## ", text, re.MULTILINE)), file.name
    for page in site.rglob("*.html"):
        left = re.search(r"^\s*[-*] |\|---|```|\]\(|\*\*|^\| |>>>|:::|:\w+:`", prose(page), re.MULTILINE)
        assert left is None, f"{page.name}: {left}"
        assert "<blockquote>" not in article(page), page.name  # what Markdown makes of >>>


def article(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]


def prose(page: Path) -> str:
    """The text of a page without its code."""
    return plain(re.sub(r"<(pre|code)\b.*?</\1>", "", article(page), flags=re.DOTALL))


def plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", text))


class Loaded(HTMLParser):
    """What a page loads, which a link is not until somebody follows it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "a":
            self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset") and value]


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not [found for found in Loaded(page).addresses if re.match(r"[a-z]+:|//", found)], page.name
        # The theme's script would fetch a library for these.
        assert not re.search(r'class="(mermaid|arithmatex)|data-md-component="source"', article(page))
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.fixture(scope="module")
def reference(site: Path) -> dict[str, str]:
    """The text below each heading of the API reference, by the name that it is about."""
    found = {}
    for page in (site / "api").glob("*.html"):
        _, *parts = re.split(r'<h\d id="([^"]+)" class="doc doc-heading">', article(page))
        found.update({name: plain(text) for name, text in zip(parts[::2], parts[1::2], strict=True)})
    return found


def resolve(path: str) -> Any:
    parts = path.split(".")
    value: Any = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join(parts[:end]))
    return value


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(rm.__all__))
def test_what_the_package_offers_is_in_the_reference(
    name: str, reference: dict[str, str], site: Path
) -> None:
    value = getattr(rm, name)
    if inspect.ismodule(value):
        assert (site / "api" / f"{name}.html").exists()
        return
    assert f"robustmetric.{name}" in reference, "add it to docs/api/index.md"
    text = reference[f"robustmetric.{name}"]
    if callable(value):
        assert value.__doc__ is not None
        first = value.__doc__.partition("\n")[0].replace("``", "").replace("`", "")
        assert first in text
    if inspect.isfunction(value):
        signature = text.partition(first)[0]
        for parameter in inspect.signature(value).parameters:
            assert re.search(rf"\b{parameter}\b", signature), parameter


def imported() -> Iterator[tuple[str, str]]:
    """What the code of the pages and of the examples imports: the module and the name."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    blocks = [b for p in pages for b in re.findall(r"```python\n(.*?)```", p.read_text("utf-8"), re.DOTALL)]
    blocks += [file.read_text("utf-8") for file in (ROOT / "examples").glob("*.py")]
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("robustmetric"):
                yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.slow
def test_what_the_documentation_uses_is_in_the_reference(reference: dict[str, str]) -> None:
    pages = [page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    shown = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    assert set(shown) <= reference.keys()
    assert len(shown) == len(set(shown))
    known = {id(resolve(name)) for name in shown}
    used = set(imported())
    for package in PACKAGES:
        module = importlib.import_module(f"robustmetric.{package}")
        used |= {(module.__name__, name) for name in module.__all__}
    lacking = [f"{module}.{name}" for module, name in used if id(resolve(f"{module}.{name}")) not in known]
    assert not sorted(lacking), "add a line ::: NAME to a page of docs/api"


@pytest.mark.slow
def test_a_setting_is_described(reference: dict[str, str]) -> None:
    steps = Settings.model_fields["steps"]
    text = reference["robustmetric.evaluation.Settings.steps"]
    assert f"steps: int = {steps.default}" in text
    assert f"{steps.description}." in text


OUTSIDE = {"README.md": "index.md", "examples/tour.ipynb": "examples/tour.md"}


@pytest.mark.parametrize(
    ("page", "link", "led"),
    [
        ("method.md", "protocol.md#ers", "protocol.md#ers"),
        ("method.md", "../README.md", "index.md"),
        ("method.md", "../examples/tour.ipynb", "examples/tour.md"),
        ("method.md", "record.schema.json", "record.schema.json"),
        ("api/data.md", "../your-data.md", "../your-data.md"),
        ("index.md", "docs/worst-case.md#what-it-costs", "worst-case.md#what-it-costs"),
        ("examples/tour.md", "../docs/method.md", "../method.md"),
        ("examples/tour.md", "../README.md#names", "../index.md#names"),
        ("method.md", "../Makefile", "../Makefile"),
        ("method.md", "#samplers", "#samplers"),
        ("method.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_a_link_between_files_leads_from_page_to_page(page: str, link: str, led: str) -> None:
    assert lead_links(f"see [it]({link}), and", page, OUTSIDE) == f"see [it]({led}), and"


def test_a_list_and_a_table_end_a_paragraph() -> None:
    text = "so:\n- a\n  b\n- c\n\n1. x\n```\nso:\n- d\n```\n| e |\n|---|\n| f |\ng"
    ended = "so:\n\n- a\n  b\n- c\n\n1. x\n```\nso:\n- d\n```\n\n| e |\n|---|\n| f |\ng"
    assert end_paragraphs(text) == ended


def test_a_notebook_is_a_page(tmp_path: Path) -> None:
    file = tmp_path / "some.ipynb"
    cells = [
        {"cell_type": "markdown", "source": ["# Some\n", "words"]},
        {"cell_type": "code", "source": "1 + 1"},
    ]
    file.write_text(json.dumps({"cells": cells}))
    assert as_markdown(file) == "# Some\nwords\n\n```python\n1 + 1\n```"
