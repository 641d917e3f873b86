"""What an attack did to a query: as data that holds its pictures, and as the card of HTML that shows it."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from pydantic import Field, FiniteFloat
from torch import Tensor

from robustmetric.attacks import Attack, Column
from robustmetric.evaluation.attack import AttackResult, NetworkView
from robustmetric.evaluation.data import Data
from robustmetric.evaluation.document import FrozenModel, Number
from robustmetric.report.rankings import ITSELF, Ranking, rank_candidates, rank_for_queries
from robustmetric.report.words import aim
from robustmetric.text import printable

K = 5  # of a ranking
SIDE = 112  # pixels of a picture: larger images are reduced
TEMPLATES = Path(__file__).parent / "templates"

Why = Literal["worst", "median", "random"]
Address = Annotated[str, Field(pattern="^data:image/(png|webp);base64,[A-Za-z0-9+/=]+$")]


class Item(FrozenModel):
    """An image: its name, the name of its class, and its picture as the address of a link."""

    name: str
    label: str
    image: Address


class Listed(Item):
    """An image in a ranking; `right` is None where the class of the query is not known."""

    distance: FiniteFloat
    right: bool | None
    itself: bool = Field(False, description="whether it is the perturbed image")


class Picture(FrozenModel):
    """A query under an attack, with all that its card shows.

    An image that queries has its own ranking, and `place` is where the first of its class stands before and
    after. An image that is ranked for its targets is shown in the ranking of the first, the `asker`, and
    `place` is its own. `values` are the headings of columns with their values before and after.
    """

    attack: str
    why: Why | None = Field(description="how the query was chosen")
    number: int
    query: Item
    perturbed: Address
    difference: Address = Field(description="the change, `factor` times as large, around a middle grey")
    factor: FiniteFloat
    change: FiniteFloat = Field(description="the largest change of a pixel")
    targets: list[Item]
    asker: Item | None
    values: list[tuple[str, str, str]]
    before: list[Listed]
    after: list[Listed]
    place: tuple[int | None, int | None]
    harm: Number = Field(description="how much the attack changed for the worse, in points of 100")


def card(picture: Picture, *, network: str = "", series: int = 0, order: int = 0) -> Markup:
    """Return the card of a `picture`: query, perturbation, targets, the ranking before and after, as HTML.

    It is an `<article class="shot">` that holds its images and escapes all text; its rules are `CARD_STYLE`.
    `network` is named where a page shows several, in the colour of its `series`; `order` is the card's place.

    >>> item = {"name": "a<b", "label": "3", "image": "data:image/png;base64,iVBO"}
    >>> picture = Picture(attack="ES", why=None, number=7, query=item, perturbed=item["image"], factor=10,
    ...     difference=item["image"], change=0.01, targets=[], asker=None, values=[("ES:R ↑", "100", "0")],
    ...     before=[], after=[{**item, "distance": 0.5, "right": False}], place=(1, 2), harm=100)
    >>> "<h3>ES: a&lt;b</h3>" in card(picture)
    True
    """
    template: Any = templates().get_template("card.html").module
    return Markup(template.card(picture, aim(picture.attack), network, series, order))  # noqa: S704


@cache
def templates() -> Environment:
    """Return the templates of pages: they escape text, and make visible what would steer a page."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )


CARD_STYLE = (TEMPLATES / "card.css").read_text(encoding="utf-8")
"""The rules of cards, and the colours of the light and the dark page."""


class Album:
    """Draws what attacks do to the queries of a `view` on `data`, with `k` images of a ranking."""

    def __init__(self, view: NetworkView, data: Data, k: int = K) -> None:
        self.view, self.data, self.k = view, data, k
        self._ranked: dict[int, Item] = {}

    @torch.no_grad()
    def pictures(
        self, attack: Attack, numbers: Tensor, result: AttackResult, why: Mapping[int, Why] | None = None
    ) -> list[Picture]:
        """Return pictures of what an `attack` did to the queries with these `numbers` (B,).

        `result` is what `run_attack` returned for them in this view; `why` says how each was chosen.
        """
        view, gallery = self.view, self.view.ranking_gallery
        where = gallery.z.device
        queries, index = view.asking(numbers).to(where), result.target.index.to(where)
        ranked = attack.perturbs == "candidate" and index.shape[1] > 0
        before, after = (
            rank_candidates(index[:, 0], z, queries, gallery, self.k)
            if ranked
            else rank_for_queries(view, z, queries, self.k)
            for z in (queries.z, result.z.to(where))
        )
        images = zip(result.originals.cpu(), result.images.detach().cpu(), strict=True)
        rows = zip(
            numbers.tolist(), queries.labels.tolist(), images, index.tolist(), before, after, strict=True
        )
        found = []
        for row, (number, label, (image, perturbed), targets, first, last) in enumerate(rows):
            values = {
                column: (float(result.before[column.name][row]), float(result.after[column.name][row]))
                for column in attack.columns
            }
            change = float((perturbed - image).abs().max())
            factor = nice_factor(change)
            query = self._item(number, label, image)
            moved = query.model_copy(update={"image": encoded(perturbed)})
            found.append(
                Picture(
                    attack=attack.name,
                    why=(why or {}).get(number),
                    number=number,
                    query=query,
                    perturbed=moved.image,
                    difference=encoded(0.5 + factor * (perturbed - image), smooth=False),
                    factor=factor,
                    change=change,
                    targets=[self.ranked(position) for position in targets[: self.k]],
                    asker=self.ranked(targets[0]) if ranked else None,
                    values=[(c.heading, c.show(one), c.show(other)) for c, (one, other) in values.items()],
                    before=self._listed(first, query, known=label >= 0),
                    after=self._listed(last, moved, known=label >= 0),
                    place=(first.place, last.place),
                    harm=harm_of(values),
                )
            )
        return found

    def ranked(self, position: int) -> Item:
        """Return the image at a `position` in the gallery."""
        if position not in self._ranked:
            images = self.view.images if self.view.ranked is None else self.view.ranked
            label = int(self.data.ranked.labels[position])
            self._ranked[position] = self._item(
                position, label, images[torch.tensor([position])][0], ranked=True
            )
        return self._ranked[position]

    def class_of(self, label: int) -> str:
        """Return the name of a class by its `label`; one below 0 is not known."""
        names = self.data.classes
        return "not known" if label < 0 else str(label) if names is None else printable(names[label])

    def _item(self, number: int, label: int, image: Tensor, *, ranked: bool = False) -> Item:
        name = self.data.called(number, gallery=ranked and self.view.ranked is not None)
        return Item(name=printable(name), label=self.class_of(label), image=encoded(image))

    def _listed(self, ranking: Ranking, own: Item, *, known: bool) -> list[Listed]:
        """List a ranking, in which `own` may be; what its class decides is open where that is not `known`."""
        among = any(one.position == ITSELF for one in ranking.first)
        found = []
        for position, distance, right in ranking.first:
            itself = position == ITSELF
            item = own if itself else self.ranked(position)
            judged = right if known or itself != among else None
            found.append(Listed(**item.model_dump(), distance=distance, right=judged, itself=itself))
        return found


def harm_of(values: Mapping[Column, tuple[Any, Any]]) -> Any:
    """Return how much `values` before and after, by column, changed for the worse, in points of 100.

    They are all numbers or all tensors.

    >>> import robustmetric as rm
    >>> far, recall = rm.attack("ES").columns
    >>> harm_of({far: (0.0, 0.5), recall: (100.0, 0.0)})
    125.0
    """
    signs = {"higher": 1, "lower": -1, None: None}
    return sum(
        sign * column.unit.points * (before - after)
        for column, (before, after) in values.items()
        if (sign := signs[column.better]) is not None
    )


def encoded(image: Tensor, *, smooth: bool = True) -> str:
    """Return an `image` (C, H, W) in [0, 1] as an address: of a PNG, or of a reduced WebP where it is large.

    It is reduced `smooth`, or by leaving out pixels, which shows how much noise changes single ones.

    >>> encoded(torch.zeros(1, 8, 8))[:22], encoded(torch.zeros(3, 224, 224))[:23]
    ('data:image/png;base64,', 'data:image/webp;base64,')
    """
    picture, buffer = rendered(image), io.BytesIO()
    kind = "png" if max(picture.size) <= SIDE else "webp"
    if kind == "png":
        picture.save(buffer, kind, optimize=True)
    else:
        picture.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST)
        picture.save(buffer, kind, quality=82, method=6)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def rendered(image: Tensor) -> Image.Image:
    """Return an `image` (C, H, W) in [0, 1] as a picture of 8 bits: in colour if C is 3, else grey."""
    shown = image if len(image) in (1, 3) else image.mean(0, keepdim=True)
    pixels = (shown.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def nice_factor(change: float) -> float:
    """Return the largest of 1, 2, 5, 10, … by which a `change` of pixels grows to at most 1/2.

    What 8 bits do not tell from 1/2 is no more than that: a change of ε is, but for rounding, one of ε.

    >>> nice_factor(8 / 255), nice_factor(77 / 255), nice_factor(0.1 + 1e-8), nice_factor(0.0)
    (10.0, 1.0, 5.0, 1.0)
    """
    if not 0 < change <= 0.5:
        return 1.0
    steps = [float(f"{digit}e{power}") for power in range(7) for digit in (1, 2, 5)]
    return max(step for step in steps if step * change <= 0.5 + 0.5 / 255)
