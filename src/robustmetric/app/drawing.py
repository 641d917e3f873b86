"""What the page shows, as HTML: everything that comes from files and names is escaped by the templates."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import torch
from PIL import Image
from torch import Tensor

from robustmetric.app.trial import Query, Trial, Walk
from robustmetric.evaluation.images import Images
from robustmetric.report.cards import encoded, nice_factor
from robustmetric.report.shots import Ranked, Shot

HERE = Path(__file__).parent
LARGE = 320  # pixels of a side that a picture is reduced to
TARGETS = 6  # images that are aimed at, at the most
_WIDTH, _HEIGHT = 320, 180  # of a plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 12, 34  # its margins


@cache
def templates() -> jinja2.Environment:
    """Return the templates of the page, which escape what they are given."""
    loader = jinja2.FileSystemLoader(HERE)
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def drawn(part: str, **values: object) -> str:
    """Return a `part` of the page, a macro of its templates, with these `values`.

    >>> drawn("told", text="a < b", wrong=False)
    '<p class="rm-told" role="status">a &lt; b</p>'
    """
    page: Any = templates().get_template("page.html").module
    return str(getattr(page, part)(**values)).strip()


def as_picture(image: Tensor) -> str:
    """Return an `image` (C, H, W) in [0, 1] as the address of a PNG that is in the address itself.

    >>> as_picture(torch.zeros(1, 8, 8))[:30]
    'data:image/png;base64,iVBORw0K'
    """
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((LARGE, LARGE))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return _address(buffer.getvalue(), "png")


def _address(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


class Drawing:
    """Draws the queries of a `trial` and what became of them."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.data = trial, trial.data
        self.apart = self.data.gallery is not None
        ranked: Images = self.data.ranked.images
        labels = self.data.ranked.labels

        @lru_cache(maxsize=4096)
        def item(position: int) -> dict[str, str]:
            return {
                "picture": encoded(ranked[torch.tensor([position])][0]),
                "name": self.data.called(position, gallery=self.apart),
                "class": trial.class_of(int(labels[position])),
            }

        self.item = item

    def preview(self, query: Query) -> str:
        """Return the image of a `query` as the networks get it, with what is known of it."""
        known = "class not known" if query.label < 0 else f"class {self.trial.class_of(query.label)}"
        name = "your upload" if query.number is None else self.data.called(query.number)
        channels, height, width = query.image.shape[1:]
        size = f"{width} x {height} pixels, {'grey' if channels == 1 else 'colour'}"
        return drawn("preview", picture=as_picture(query.image[0]), name=name, known=known, size=size)

    def result(self, query: Query, walks: Sequence[Walk], step: int, eps: float) -> str:
        """Return what became of a `query` by a `step` of each of the `walks`, within `eps`."""
        goal = self.trial.attacks[walks[0].shots[0].attack]
        ranked_itself = goal.perturbs == "candidate"
        judged = query.label >= 0 or ranked_itself
        panels = [self._panel(walk, query, step, eps, judged) for walk in walks]
        return drawn(
            "result",
            panels=panels,
            table=self._table(goal.columns, walks, ranked_itself, query),
            plots=_plots(walks, step, ranked_itself),
        )

    def _panel(self, walk: Walk, query: Query, step: int, eps: float, judged: bool) -> dict[str, object]:
        shot = walk.at(step)
        factor = nice_factor(eps)
        now = walk.steps[walk.shots.index(shot)]
        before, perturbed = as_picture(shot.image), as_picture(shot.perturbed)
        ranked = len(self.data.ranked.labels) - (shot.asker is not None or query.number is not None)
        return {
            "network": walk.network,
            "when": _when(walk, now),
            "image": before,
            "perturbed": perturbed,
            "change": f"{255 * shot.change:.3g}",
            "difference": as_picture(0.5 + factor * (shot.perturbed - shot.image)),
            "factor": f"{factor:g}",
            "targets": [self.item(position) for position in shot.targets[:TARGETS]],
            "asker": shot.asker is not None,
            "more": max(0, len(shot.targets) - TARGETS),
            "before": [self._card(one, before, query, judged) for one in shot.before],
            "after": [self._card(one, perturbed, query, judged) for one in shot.after],
            "place": _place(shot, ranked, judged),
        }

    def _card(self, one: Ranked, itself: str, query: Query, judged: bool) -> dict[str, object]:
        if one.itself:
            known = "not known" if query.label < 0 else self.trial.class_of(query.label)
            item = {"picture": itself, "name": "the perturbed image", "class": known}
        else:
            item = self.item(one.position)
        mark = None if not judged else ("right" if one.right else "wrong")
        return {**item, "mark": mark, "far": f"{one.distance:.3f}", "itself": one.itself}

    def _table(
        self, columns: Sequence[Any], walks: Sequence[Walk], ranked_itself: bool, query: Query
    ) -> dict[str, object]:
        rows = []
        for column in columns:
            cells = [column.show(v) for walk in walks for v in walk.shots[-1].values[column.name]]
            rows.append((f"{column.heading} ({column.unit.name})", cells))
        if ranked_itself or query.label >= 0:
            places = [p for walk in walks for p in walk.shots[-1].place]
            name = "place of the perturbed image" if ranked_itself else "place of the first right image"
            rows.append((name, ["-" if p is None else str(p) for p in places]))
        rows.append(
            (
                "largest change of a pixel (of 255)",
                [text for walk in walks for text in ("0", f"{255 * walk.shots[-1].change:.3g}")],
            )
        )
        return {"networks": [walk.network for walk in walks], "rows": rows}


def _when(walk: Walk, now: int) -> str:
    if now < walk.taken or walk.taken == walk.asked:
        return "Before the attack" if now == 0 else f"After step {now} of {walk.asked}"
    why = "the time was up" if walk.late else "there is nothing more to gain"
    return f"Stopped after step {now} of {walk.asked}: {why}"


def _place(shot: Shot, ranked: int, judged: bool) -> str:
    place = shot.place[1]
    if shot.asker is not None:
        return f"The perturbed image is at place {place} of {ranked}."
    if not judged:
        return ""
    if place is None:
        return "No image of its class can be found."
    return f"The first right image is at place {place} of {ranked}."


def frames(walks: Sequence[Walk]) -> list[int]:
    """Return the steps that at least one of the `walks` has a shot of, ascending."""
    return sorted({step for walk in walks for step in walk.steps})


def _plots(walks: Sequence[Walk], step: int, ranked_itself: bool) -> list[dict[str, object]]:
    """Draw the objective, and the place that the attack is about, over the steps."""
    objective = {walk.network: list(enumerate(walk.objective)) for walk in walks}
    plots = [_plot("Objective: the attack wants it low", objective, step, log=False)]
    places = {
        walk.network: [
            (when, float(shot.place[1]))
            for shot, when in zip(walk.shots, walk.steps, strict=True)
            if shot.place[1] is not None
        ]
        for walk in walks
    }
    if all(places.values()):
        who = "the perturbed image" if ranked_itself else "the first right image"
        plots.append(_plot(f"Place of {who}: 1 is the front", places, step, log=True))
    return plots


def _plot(title: str, lines: dict[str, list[tuple[int, float]]], step: int, log: bool) -> dict[str, object]:
    """Lay out a plot: lines through (step, value), ticks on both axes, and where the page is now."""
    last = max(1, max(x for line in lines.values() for x, _ in line))
    values = [y for line in lines.values() for _, y in line]
    low, high = (1.0, max(10.0, *values)) if log else (min(values), max(values))
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    ticks = _powers(high) if log else [low + (high - low) * part / 3 for part in range(4)]

    def across(x: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / last

    def down(y: float) -> float:
        share = math.log(y / low) / math.log(high / low) if log else (high - y) / (high - low)
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * share

    def place(x: float, y: float) -> tuple[float, float]:
        return round(across(x), 1), round(down(y), 1)

    told = "; ".join(f"{name}: from {line[0][1]:.4g} to {line[-1][1]:.4g}" for name, line in lines.items())
    return {
        "title": title,
        "told": f"{title}. {told}.",
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "top": _TOP,
        "bottom": _HEIGHT - _BOTTOM,
        "now": round(across(min(step, last)), 1),
        "xs": [(round(across(x), 1), x) for x in sorted({0, last // 2, last})],
        "ys": [(round(down(y), 1), f"{y:.0f}" if log else f"{y:.3g}") for y in ticks],
        "lines": [
            (name, [place(*one) for one in line], place(*[one for one in line if one[0] <= step][-1]))
            for name, line in lines.items()
        ],
    }


def _powers(high: float) -> list[float]:
    return [10.0**power for power in range(int(math.log10(high)) + 1)]
