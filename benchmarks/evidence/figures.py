"""The figures of docs/evidence.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.evidence.found import ERS, RECALL, STRICT, WORST, Value, hardness_of, log_of, record_of
from benchmarks.evidence.plan import CLAIM, FASHION, HM, OTHERS, SAMPLERS
from robustmetric.report import plots
from robustmetric.report.style import look, new_figure, plain, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("scores", "trainings", "claim", "samplers")
"""The figures, each ``evidence-NAME.svg``."""


def write(folder: Path) -> list[Path]:
    """Draw the figures of which something is measured; return their files."""
    made = {
        "scores": lambda: plots.records({n.label: r for n in FASHION if (r := record_of(n, "reference"))}),
        "trainings": lambda: plots.training(
            {n.label: log_of(n) for n in FASHION if n.steps is not None and record_of(n, "reference")}
        ),
        "claim": claim,
        "samplers": samplers,
    }
    return [save(made[name](), folder / f"evidence-{name}", ["svg"])[0] for name in NAMES if drawn(name)]


def drawn(name: str) -> bool:
    """Return whether anything of a figure is measured."""
    if name == "samplers":
        return any(map(hardness_of, SAMPLERS))
    return any(record_of(n, "reference") for n in (CLAIM if name == "claim" else FASHION[2:]))


def claim() -> Figure:
    """Draw ERS and worst case against R@1, a mark for each seed."""
    panels: dict[str, Value] = {"ERS, reference": ERS, "ERS, strict": STRICT, "R@1, worst case": WORST}
    names = list(dict.fromkeys(n.defense for n in (*CLAIM, *OTHERS)))
    with styled():
        figure = new_figure(2.6)
        for axes, (title, value) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            for number, name in enumerate(names):
                those = [n for n in (*CLAIM, *OTHERS) if n.defense == name and value.of(n) is not None]
                shape = look(number)
                axes.plot(
                    [RECALL.of(n) for n in those],
                    [value.of(n) for n in those],
                    color=shape.colour,
                    marker=shape.marker,
                    linestyle="none",
                    label=plain(name),
                )
            axes.set(xlabel="R@1", title=title)
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
