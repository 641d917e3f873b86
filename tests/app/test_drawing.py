"""What the page shows: the images, the marks and the values of an attack, and foreign names as text."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from robustmetric.app import Trial, Walk
from robustmetric.app.drawing import LARGE, Drawing, as_picture, drawn, frames

Make = Callable[..., Trial]
WICKED = ['<script>alert("1")</script>', "${1 + 1}{{ 2 }}", "\"onerror='x'", "& so on"]


class Read(HTMLParser):
    """The texts of a page by their class, and all its tags with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(filter(None, self.texts))


def attacked(trial: Trial, number: int = 5, name: str = "ES", steps: int = 6) -> tuple[Walk, ...]:
    return trial.attack(trial.query(number), name, eps=0.2, steps=steps, k=4)


def test_each_ranking_has_its_marks_classes_and_distances(make_trial: Make) -> None:
    trial = make_trial()
    walks = attacked(trial)
    for step in frames(walks):
        page = Drawing(trial).result(trial.query(5), walks, step, 0.2)
        cards = re.findall(
            r'<li class="rm-(right|wrong)">.*?> ([a-z]+)</span>.*?class (\d)</span>.*?</span>([\d.]+)</span>',
            page,
            re.DOTALL,
        )
        wanted = []
        for walk in walks:
            for one in (*walk.shots[0].after, *walk.at(step).after):
                mark = "right" if one.right else "wrong"
                label = str(int(trial.data.labels[one.position]))
                wanted.append((mark, mark, label, f"{one.distance:.3f}"))
        assert cards == wanted
        assert page.count("✓") + page.count("✗") == len(wanted)
        assert f"After step {step} of 6" in page or step == 0
        for walk in walks:
            place = walk.at(step).place[1]
            assert f"The first right image is at place {place} of 59." in page
            assert f"perturbed, by at most {255 * walk.at(step).change:.3g}/255" in page
        assert "the difference, 2 times as large" in page


def test_the_table_has_the_values_before_and_after(make_trial: Make) -> None:
    trial = make_trial()
    walks = attacked(trial)
    read = Read(Drawing(trial).result(trial.query(5), walks, 0, 0.2)).text
    first, last = ([walk.shots[-1].values["ES:D"][when] for walk in walks] for when in (0, 1))
    cells = " ".join(f"{a:.3f} {b:.3f}" for a, b in zip(first, last, strict=True))
    assert f"ES:D ↓ (distance) {cells} ES:R ↑ (%) " in read
    places = " ".join(f"{walk.shots[-1].place[0]} {walk.shots[-1].place[1]}" for walk in walks)
    assert f"place of the first right image {places} largest change" in read
    assert "value before after before after" in read


def picture(address: str) -> Tensor:
    content = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(content)) as image:
        return torch.from_numpy(np.array(image)).long()


def test_the_pictures_are_the_images(make_trial: Make) -> None:
    trial = make_trial("one")
    (walk,) = walks = attacked(trial)
    shot = walk.shots[-1]
    page = Drawing(trial).result(trial.query(5), walks, 6, 0.2)
    addresses = [str(attributes["src"]) for tag, attributes in Read(page).tags if tag == "img"]
    before, after, difference = map(picture, addresses[:3])
    assert torch.equal(before, (255 * shot.image[0]).round().long())
    assert torch.equal(after, (255 * shot.perturbed[0]).round().long())
    # Twice as large around a middle grey, within the rounding of both pictures to 8 bits.
    wanted = 127.5 + 2 * (after - before)
    assert (difference - wanted).abs().max() <= 3


def test_large_pictures_are_reduced() -> None:
    content = base64.b64decode(as_picture(torch.rand(3, 600, 900)).partition(",")[2])
    with Image.open(io.BytesIO(content)) as image:
        assert max(image.size) == LARGE


def test_where_an_attack_ended_early_that_is_said(make_trial: Make) -> None:
    trial = make_trial()
    one, other = attacked(trial, steps=9)
    query = trial.query(5)
    early = replace(one, objective=one.objective[:5], shots=one.shots[:5], steps=one.steps[:5])
    draw = Drawing(trial).result
    page = draw(query, (early, other), 9, 0.2)
    assert "Stopped after step 4 of 9: there is nothing more to gain" in page
    assert "After step 9 of 9" in page
    assert "Stopped after step 4 of 9: the time was up" in draw(
        query, (replace(early, late=True), other), 9, 0.2
    )
    assert frames((early, other)) == list(range(10))
    before = draw(query, (early, other), 0, 0.2)
    assert before.count("Before the attack") == 2
    assert "Stopped" not in before


def test_the_plots_have_a_point_for_each_step(make_trial: Make) -> None:
    trial = make_trial()
    walks = attacked(trial)
    page = Drawing(trial).result(trial.query(5), walks, 3, 0.2)
    lines = re.findall(r'<polyline class="rm-line rm-line-(\d)" points="([^"]*)"', page)
    assert [number for number, _ in lines] == ["1", "2", "1", "2"]
    for (_, points), walk in zip(lines, (*walks, *walks), strict=True):
        xs = [float(point.split(",")[0]) for point in points.split()]
        assert len(xs) == len(walk.objective) == len(walk.shots)
        assert all(b - a == pytest.approx(xs[1] - xs[0], abs=0.11) for a, b in pairwise(xs))
    for (_, points), walk in zip(lines, walks, strict=False):
        heights = [float(point.split(",")[1]) for point in points.split()]
        # The lower the objective, the lower it stands, which is a larger number.
        assert [a < b for a, b in pairwise(heights)] == [a > b for a, b in pairwise(walk.objective)]
    told = f"plain: from {walks[0].objective[0]:.4g} to {walks[0].objective[-1]:.4g}"
    assert told in page


def test_of_a_query_of_no_class_nothing_is_marked(make_trial: Make) -> None:
    trial = make_trial()
    query = replace(trial.query(5), number=None, label=-1)
    page = Drawing(trial).result(query, trial.attack(query, "ES", eps=0.1, steps=2, k=3), 2, 0.1)
    assert "✓" not in page
    assert "✗" not in page
    assert "first right image" not in page
    assert page.count("<polyline") == 2
    assert "class not known" in Drawing(trial).preview(query)


def test_an_image_that_is_ranked_is_shown_in_the_ranking_of_who_asks(make_trial: Make) -> None:
    trial = make_trial("one")
    (walk,) = walks = trial.attack(trial.query(5), "CA-", eps=0.3, steps=4, k=4)
    page = Drawing(trial).result(trial.query(5), walks, 0, 0.3)
    assert "Below is the ranking of the first of these" in page
    place = walk.shots[0].place[1]
    assert place is not None
    assert f"The perturbed image is at place {place} of 59." in page
    assert ("itself, class 1" in page) == (place <= 4)


@pytest.mark.parametrize("name", ["ES", "CA+", "SP-QA+"])
def test_foreign_names_are_text(name: str, make_trial: Make, images: tuple[Tensor, Tensor]) -> None:
    trial = make_trial("<b>plain</b>", "<i>defended</i>")
    files = [f"<img src=x onerror=alert({n})>" for n in range(60)]
    trial.data = replace(trial.data, classes=WICKED, name="<u>data</u>", files=files)
    draw = Drawing(trial)
    walks = trial.attack(trial.query(5), name, eps=0.2, steps=2, k=20)
    title = drawn("title", networks=list(trial.views), images=60, ranked=60, data=trial.data.name)
    page = draw.result(trial.query(5), walks, 2, 0.2) + draw.preview(trial.query(5)) + title
    read = Read(page)
    assert {tag for tag, _ in read.tags} <= {
        "div", "section", "header", "h1", "h2", "h3", "p", "figure", "img", "figcaption", "ol", "li", "span",
        "svg", "line", "text", "polyline", "circle", "rect", "table", "thead", "tbody", "tr", "th", "td",
        "strong",
    }  # fmt: skip
    assert all(not key.startswith("on") for _, attributes in read.tags for key in attributes)
    assert all(str(a["src"]).startswith("data:image/") for tag, a in read.tags if tag == "img")
    assert "<b>plain</b>" in read.texts
    assert any(WICKED[1] in text for text in read.texts)


def test_what_is_told_is_an_alert_if_it_is_wrong() -> None:
    assert drawn("told", text="<x>", wrong=True) == (
        '<p class="rm-told rm-wrong-told" role="alert">&lt;x&gt;</p>'
    )
