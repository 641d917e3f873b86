"""The figures of docs/evidence.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.evidence.found import CLAIMED, RECALL, hardness_of, log_of, measured, record_of
from benchmarks.evidence.plan import CLAIM, FASHION, HM, LONGER, OTHERS, SAMPLERS, Network
from robustmetric.report import plots
from robustmetric.report.plots import look, new_figure, plain, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 1.75
"""How much larger figures are than those of a paper."""
NAMES = ("scores", "trainings", "claim", "samplers")
"""The figures, each ``evidence-NAME.svg``."""

LOOKS = {"ACT[R]": 0, HM: 2, "HM[S,M]": 3, "HM[S,LGA]": 4, "EST[R]": 5, "HM[R,M]": 6}
"""How short trainings look, by the number of a series: two of them as in the figures of the long ones."""


def write(folder: Path) -> list[Path]:
    """Draw the figures of which something is measured; return their files."""
    # Defended ones first, so that each has the same colour in both figures.
    ordered = sorted(FASHION, key=lambda network: network.steps is None)
    made = {
        "scores": lambda: plots.records({n.label: r for n in ordered if (r := record_of(n, "reference"))}),
        "trainings": lambda: plots.training(
            {n.label: log_of(n) for n in FASHION if n.steps is not None and record_of(n, "reference")}
        ),
        "claim": claim,
        "samplers": samplers,
    }
    files = [save(made[name](), folder / f"evidence-{name}", ["svg"])[0] for name in NAMES if drawn(name)]
    for file in files:
        enlarge(file)
    return files


def enlarge(file: Path) -> None:
    """Make a figure that is a column of a paper wide fit a page on a screen."""
    text = file.read_text(encoding="utf-8")
    larger = re.sub(r'="([\d.]+)pt"', lambda size: f'="{SCALE * float(size[1]):.2f}pt"', text, count=2)
    file.write_text(larger, encoding="utf-8")


def drawn(name: str) -> bool:
    """Return whether anything of a figure is measured."""
    if name == "samplers":
        return any(map(hardness_of, SAMPLERS))
    return any(record_of(n, "reference") for n in (CLAIM if name == "claim" else FASHION[2:]))


def claim() -> Figure:
    """Draw ERS and worst case against R@1, a mark for each seed, of what is measured."""
    networks = [n for n in (*CLAIM, *LONGER, *OTHERS) if n in measured()]
    panels = [value for value in CLAIMED[1:] if any(value.of(n) for n in networks)]  # 0 for all says nothing
    groups: dict[str, list[Network]] = {}
    for network in networks:
        name = network.defense if network.epochs == 1 else f"{network.defense}, {network.length}"
        groups.setdefault(name, []).append(network)
    with styled():
        rows, columns = (len(panels) + 1) // 2, min(len(panels), 2)
        figure = new_figure(0.8 + 1.8 * rows)
        for place, value in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, place)
            for name, seeds in groups.items():
                points = [(RECALL.of(n), value.of(n)) for n in seeds]
                known = [(x, y) for x, y in points if x is not None and y is not None]
                shape = look(LOOKS[seeds[0].defense] if seeds[0].epochs == 1 else len(LOOKS) + LOOKS[HM])
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


def samplers() -> Figure:
    """Draw the hardness that each sampler draws with the network that was trained last."""
    found = [(one, h) for one in SAMPLERS if (h := hardness_of(one)) is not None]
    one, hardness = next(
        ((one, h) for one, h in found if one.network and one.network.defense == HM), found[-1]
    )
    return plots.hardness_histograms(hardness, f"{one.data}, {one.label}")
