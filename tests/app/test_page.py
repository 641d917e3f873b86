"""What the parts of the page do, without a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from robustmetric.app import Trial
from robustmetric.app.drawing import frames
from robustmetric.app.page import ANY, NONE, Handlers

Make = Callable[..., Trial]


def silent(*_: object) -> None:
    pass


def text(page: str) -> str:
    return re.sub(r"<[^>]*>", "", page)


def test_a_class_is_chosen_by_its_name(make_trial: Make) -> None:
    do = Handlers(make_trial())
    assert do.first_of("2", 0) == 2
    assert do.first_of("2", None) == 2
    assert do.first_of("2", 14) is None
    assert do.first_of(ANY, 5) is None
    assert do.first_of(ANY, 99) == 0
    drawn = [do.random_of("3") for _ in range(20)]
    assert {number % 4 for number in drawn} == {3}
    assert len(set(drawn)) > 3
    assert {number % 4 for number in (do.random_of(ANY) for _ in range(40))} == {0, 1, 2, 3}


def test_random_images_depend_on_the_seed(make_trial: Make) -> None:
    first, again, other = (Handlers(make_trial("one", seed=seed)) for seed in (1, 1, 2))
    numbers = [[do.random_of(ANY) for _ in range(8)] for do in (first, again, other)]
    assert numbers[0] == numbers[1] != numbers[2]


def test_an_upload_goes_before_the_number(make_trial: Make, tmp_path: Path) -> None:
    do = Handlers(make_trial())
    file = tmp_path / "a.png"
    Image.new("L", (12, 12), 200).save(file)
    query = do.query(7, str(file), "2")
    assert (query.number, query.label) == (None, 2)
    assert torch.allclose(query.image, torch.tensor(200 / 255))
    assert do.query(7, str(file), NONE).label == -1
    assert do.query(7.0, None, "2").number == 7


def test_what_can_be_mended_is_told_on_the_page(make_trial: Make, tmp_path: Path) -> None:
    do = Handlers(make_trial())
    (tmp_path / "a.png").write_text("no image")
    for number, file, told in (
        (99.0, None, "the images have the numbers 0 to 59; there is no 99"),
        (None, None, "the images have the numbers 0 to 59; there is no None"),
        (0.0, str(tmp_path / "a.png"), "the upload cannot be read as an image: it is not PNG, "),
    ):
        preview, sentence = do.preview(number, file, NONE)
        assert preview == ""
        assert 'role="alert"' in sentence
        assert text(sentence).startswith(told)
        result, sentence = do.attack(silent, number, file, NONE, "ES", 8, 4, 3)
        assert result is None
        assert text(sentence).startswith(told)
        assert do.show(result, 0) == ""
    result, sentence = do.attack(silent, 0, None, NONE, "ES", 300, 4, 3)
    assert text(sentence).startswith("eps must be in [0, 1]")


def test_an_attack_is_told_and_shown_at_each_frame(make_trial: Make) -> None:
    do = Handlers(make_trial())
    told: list[tuple[str, int, int]] = []
    found, sentence = do.attack(lambda *one: told.append(one), 5, None, NONE, "ES", 51, 20, 3)
    assert found is not None
    query, walks, eps = found
    assert (query.number, eps) == (5, 0.2)
    assert re.fullmatch(r"ES: 20 steps on plain; 20 steps on defended; \d+\.\d s\.", text(sentence))
    assert told == [(name, step, 20) for name in ("plain", "defended") for step in range(1, 21)]
    for place, step in enumerate(frames(walks)):
        assert f"After step {step} of 20" in do.show(found, place) or step == 0
    assert do.show(found, 10**6) == do.show(found, len(frames(walks)) - 1)
    assert do.show(found, -3) == do.show(found, 0)


def test_that_the_time_was_up_is_told(make_trial: Make) -> None:
    do = Handlers(make_trial(seconds=1e-9))
    found, sentence = do.attack(silent, 5, None, NONE, "ES", 51, 20, 3)
    assert found is not None
    assert 'role="alert"' in sentence
    assert text(sentence) == "The time is up, 1e-09 s: what was found by then is shown."
    assert "Stopped after step 0 of 20: the time was up" in do.show(found, 0)
