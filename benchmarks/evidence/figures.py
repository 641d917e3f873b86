"""The figures of docs/evidence.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.evidence.found import CLAIMED, RECALL, hardness_of, log_of, record, seeds_of
from benchmarks.evidence.plan import CLAIM, FASHION, HM, OTHERS, SAMPLERS
from robustmetric.report import plots
from robustmetric.report.plots import look, new_figure, plain, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 1.75
"""How much larger figures are than those of a paper."""

LOOKS = {"ACT[R]": 0, HM: 2, "HM[S,M]": 3, "HM[S,LGA]": 4, "EST[R]": 5, "HM[R,M]": 6}
"""How short trainings look, by the number of a series: two of them as in the figures of the long ones."""


def write(folder: Path) -> list[Path]:
    """Draw the figures; return their files."""
    # Defended ones first, so that each has the same colour in both figures.
    defended = [network for network in FASHION if network.steps is not None]
    made = {
        "scores": plots.records({n.label: record(n, "reference") for n in (*defended, *FASHION[:2])}),
        "trainings": plots.training({n.label: log_of(n) for n in defended}),
        "claim": claim(),
        "samplers": plots.hardness_histograms(
            hardness_of(SAMPLERS[-1]), f"{SAMPLERS[-1].data}, {SAMPLERS[-1].label}"
        ),
    }
    files = [save(figure, folder / f"evidence-{name}", ["svg"])[0] for name, figure in made.items()]
    for file in files:
        enlarge(file)
    return files


def enlarge(file: Path) -> None:
    """Make a figure that is a column of a paper wide fit a page on a screen."""
    text = file.read_text(encoding="utf-8")
    larger = re.sub(r'="([\d.]+)pt"', lambda size: f'="{SCALE * float(size[1]):.2f}pt"', text, count=2)
    file.write_text(larger, encoding="utf-8")


def claim() -> Figure:
    """Draw ERS and worst case against R@1, a mark for each seed, of what is measured."""
    groups = {name: seeds_of(name) for name in dict.fromkeys(n.defense for n in (*CLAIM, *OTHERS))}
    panels = [v for v in CLAIMED[1:] if any(v.of(n) for n in (*CLAIM, *OTHERS))]  # 0 for all says nothing
    with styled():
        rows, columns = (len(panels) + 1) // 2, min(len(panels), 2)
        figure = new_figure(0.8 + 1.8 * rows)
        for place, value in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, place)
            for name, seeds in groups.items():
                points = [(RECALL.of(n), value.of(n)) for n in seeds]
                known = [(x, y) for x, y in points if x is not None and y is not None]
                shape = look(LOOKS[name])
                axes.plot(
                    [x for x, _ in known],
                    [y for _, y in known],
                    color=shape.colour,
                    marker=shape.marker,
                    linestyle="none",
                    label=plain(name),
                )
            axes.set(xlabel="R@1", title=value.title)
            axes.locator_params(axis="x", nbins=4)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2)
    return figure
