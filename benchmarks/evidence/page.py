"""Write docs/evidence.md, its figures and results/README.md from the records.

python -m benchmarks.evidence.page
"""

from __future__ import annotations

import re
from pathlib import Path

import jinja2

from benchmarks.evidence import figures, found, plan
from robustmetric.report.records import eps_of
from robustmetric.report.tables import DRAWN
from robustmetric.report.verdict import RECALLS
from robustmetric.training.folder import RunFolder

ROOT = Path(__file__).parents[2]
PAGES = {"evidence.md.j2": ROOT / "docs" / "evidence.md", "results.md.j2": plan.RESULTS / "README.md"}
"""The templates, next to this file, and the pages that are made of them."""
IMAGES = ROOT / "docs" / "images"

RANKED = ("R@1", "R@2", "mAP", "NMI")
"""The scores without attacks."""


def figure(name: str, says: str) -> str:
    """Return the place of a figure and its caption."""
    return f"![{says}](images/evidence-{name}.svg)\n\n*{says}.*"


def before(network: plan.Network) -> float:
    """Return R@1 of the attacked queries without an attack."""
    suite = found.record(network, "strict").suite
    assert suite is not None
    return suite.goals["misrank"].before or 0.0


def difference(value: found.Value, old: str, new: str) -> str:
    """Return by how much a figure differs between two defenses, as text."""
    change = found.added(value, old, new)
    return "–" if change is None else change.show(value.digits)


def filled(template: str) -> str:
    """Return the text of a `template`, filled with what is measured."""
    environment = jinja2.Environment(  # noqa: S701  # it is Markdown
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "one": lambda figure: f"{figure:.1f}",
        "signed": lambda figure: found.minus(f"{figure:+.1f}"),
        "value": lambda network, value: value.of(network),
        "passes": found.passes,
        "squares": found.squares,
    }
    record, printed = found.record(plan.FULL, "reference"), found.published_of(plan.FULL)
    assert printed is not None
    text = environment.get_template(template).render(
        **vars(plan) | vars(found),  # SCORES and published among them
        DRAWN=DRAWN,
        RANKED=RANKED,
        RECALLS=RECALLS,
        eps_of=eps_of,
        before=before,
        difference=difference,
        figure=figure,
        gap=max(abs(record[name] - printed.scores[name]) for name in RANKED),
        planned=len(list(plan.tasks())) + len(plan.SAMPLERS),
        last_step=RunFolder(plan.RESULTS / plan.FULL.name).read()["choice"]["last"]["step"],
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def main() -> None:
    """Write all."""
    figures.write(IMAGES)
    for template, file in PAGES.items():
        file.write_text(filled(template), encoding="utf-8")


if __name__ == "__main__":
    main()
