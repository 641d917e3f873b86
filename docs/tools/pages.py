"""What MkDocs needs beside the pages of docs/, which are written for GitHub too.

Files beside docs/ become pages as well: those that `extra: outside` of mkdocs.yml names. Links between all of
them lead, in the repository, from file to file; here they are led from page to page.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
ITEM = re.compile(r"[-*] |\d+\. |\|")
FENCE = re.compile(r"\s*```")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files from outside of docs/ to the `files` of the site."""
    for source, target in config.extra["outside"].items():
        path = Path(config.docs_dir).parent / source
        if target.endswith(".md"):
            files.append(File.generated(config, target, content=as_markdown(path)))
        else:
            files.append(File.generated(config, target, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a `page`, and end its paragraphs where GitHub ends them."""
    return end_paragraphs(lead_links(markdown, page.file.src_uri, config.extra["outside"]))


def as_markdown(path: Path) -> str:
    """Return a file as the text of a page: a script as its code, a notebook as what its cells say."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return f"# {path.name}\n```python\n{text}```\n"
    if path.suffix == ".ipynb":
        return "\n\n".join(cells(text))
    return text


def cells(notebook: str) -> Iterator[str]:
    """Yield the cells of a notebook as Markdown."""
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"


def lead_links(text: str, page: str, outside: dict[str, str]) -> str:
    """Return the `text` of a `page` with its links from file to file as links from page to page.

    `outside` says which files beside docs/ are which pages. A link to another file stays: MkDocs refuses it.
    """
    source = next((file for file, target in outside.items() if target == page), f"docs/{page}")

    def lead(found: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        target = outside.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if target is None:
            return found[0]
        return f"]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{found[2] or ''})"

    return LINK.sub(lead, text)


def end_paragraphs(text: str) -> str:
    """Return `text` with an empty line before each list and table, without which Markdown here sees none."""
    lines: list[str] = []
    inside = False  # a block of code
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        if ITEM.match(line) and not inside and before.strip() and not ITEM.match(before) and before[0] != " ":
            lines.append("")
        if FENCE.match(line):
            inside = not inside
        lines.append(line)
    return "\n".join(lines)
