"""Write docs/evidence.md, its figures and results/README.md from the records.

python -m benchmarks.evidence.page
"""

from __future__ import annotations

import re
from pathlib import Path

import jinja2

from benchmarks.evidence import figures, found, reasons, tables
from benchmarks.evidence.plan import (
    ATTACKED,
    CHEAP,
    FASHION,
    HM,
    MNIST,
    MNIST_LONGER,
    QUERIES,
    RESULTS,
    SEEDS,
    SMALL,
)

ROOT = Path(__file__).parents[2]
PAGES = {"evidence.md.j2": ROOT / "docs" / "evidence.md", "results.md.j2": RESULTS / "README.md"}
"""The templates, beside this file, and the pages that are made of them."""
IMAGES = ROOT / "docs" / "images"


def figure(name: str, says: str) -> str:
    """Return the place of a figure and its caption; nothing if nothing of it is measured yet."""
    return f"![{says}](images/evidence-{name}.svg)\n\n*{says}.*" if figures.drawn(name) else ""


def filled(template: str) -> str:
    """Return the text of a `template`, filled with what is measured."""
    source = (Path(__file__).parent / template).read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)  # noqa: S701  # it is Markdown
    text = environment.from_string(source).render(
        tables=tables,
        reasons=reasons,
        figure=figure,
        eps=ATTACKED,
        small=SMALL,
        alpha=1.25 * ATTACKED / CHEAP,
        queries=f"{QUERIES:,}",
        epochs=FASHION[0].epochs,
        hm=HM,
        few=CHEAP,
        seeds=len(SEEDS),
        fashion=FASHION,
        mnist=MNIST,
        mnist_longer=[network for network in MNIST_LONGER if network in found.measured()],
    )
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def main() -> None:
    """Write all."""
    figures.write(IMAGES)
    for template, file in PAGES.items():
        file.write_text(filled(template), encoding="utf-8")


if __name__ == "__main__":
    main()
