"""The page itself, of gradio's parts; it is shown on this machine alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from robustmetric.app.drawing import HERE, Drawing, drawn, frames
from robustmetric.app.trial import MOST_K, MOST_STEPS, Query, Tell, Trial, Walk
from robustmetric.app.uploads import MEGABYTES, MEGAPIXELS
from robustmetric.errors import UserError

WAITING = 8  # requests that may wait for the one that is worked on
ANY, NONE = "any class", "not known"
USUAL = ("misrank", "ES")  # the attack that is chosen at first, if it is offered
HINT = "Ready."

HALT = "(...asked) => { clearInterval(window.rmPlaying); return asked; }"
PLAY = """() => {
    const halt = () => clearInterval(window.rmPlaying);
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const step = () => {
        const slider = document.querySelector("#rm-frame input[type=range]");
        if (slider === null || +slider.value >= +slider.max) return halt();
        for (const touched of ["pointerdown", "keydown"]) slider.addEventListener(touched, halt);
        slider.value = still ? slider.max : +slider.value + 1;
        slider.dispatchEvent(new Event("input", {bubbles: true}));
    };
    halt();
    window.rmPlaying = setInterval(step, 150);
}"""
"""Moves the slider from the first step to the last, until it is touched or another attack is asked for."""

Result = tuple[Query, tuple[Walk, ...], float]
"""What was attacked, what came of it, and ε."""


class Handlers:
    """What the parts of the page do; none of them knows gradio.

    `trial` does the work; images are drawn at random from its seed on. What a person can mend is told on the
    page.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial, self.drawing = trial, Drawing(trial)
        self.generator = torch.Generator().manual_seed(trial.seed)
        self.labels = trial.data.labels.cpu()
        present = self.labels.unique().tolist()
        self.by_name = {trial.class_of(label): label for label in present}

    def first_of(self, kind: str, number: float | None) -> int | None:
        """Return the first image of a class, by its name; None where the `number` is already of one.

        A page tells twice that a class was chosen: what was drawn meanwhile stays.
        """
        numbers = self._of(kind).tolist()
        return None if number in numbers else int(numbers[0])

    def random_of(self, kind: str) -> int:
        """Return the number of an image at random, of a class by its name, or of all."""
        numbers = self._of(kind)
        return int(numbers[int(torch.randint(len(numbers), (1,), generator=self.generator))])

    def _of(self, kind: str) -> torch.Tensor:
        if kind not in self.by_name:
            return torch.arange(len(self.labels))
        found: torch.Tensor = (self.labels == self.by_name[kind]).nonzero()[:, 0]
        return found

    def query(self, number: float | None, file: str | None, kind: str) -> Query:
        """Return the query: the upload if there is one, else the image of a number."""
        if file is not None:
            return self.trial.upload(Path(file), self.by_name.get(kind, -1))
        whole = number if number is None or number != int(number) else int(number)
        return self.trial.query(whole)  # type: ignore[arg-type]

    def preview(self, number: float | None, file: str | None, kind: str) -> tuple[str, str]:
        """Return the picture of the query and what there is to say."""
        try:
            return self.drawing.preview(self.query(number, file, kind)), drawn("told", text=HINT)
        except UserError as error:
            return "", drawn("told", text=str(error), wrong=True)

    def attack(
        self,
        tell: Tell,
        number: float | None,
        file: str | None,
        kind: str,
        name: str,
        levels: float,
        steps: float,
        k: float,
    ) -> tuple[Result | None, str]:
        """Attack the query; return what came of it, and a sentence about it."""
        begin = time.monotonic()
        try:
            query = self.query(number, file, kind)
            walks = self.trial.attack(query, name, eps=levels / 255, steps=int(steps), k=int(k), tell=tell)
        except UserError as error:
            return None, drawn("told", text=str(error), wrong=True)
        if any(walk.late for walk in walks):
            limit = f"The time is up, {self.trial.seconds:g} s: what was found by then is shown."
            return (query, walks, levels / 255), drawn("told", text=limit, wrong=True)
        took = "; ".join(
            f"{walk.taken} step{'' if walk.taken == 1 else 's'} on {walk.network}" for walk in walks
        )
        text = f"{name}: {took}; {time.monotonic() - begin:.1f} s."
        return (query, walks, levels / 255), drawn("told", text=text)

    def show(self, result: Result | None, frame: float) -> str:
        """Return the page's lower part, at one of the frames of what was found."""
        if result is None:
            return ""
        query, walks, eps = result
        steps = frames(walks)
        return self.drawing.result(query, walks, steps[max(0, min(int(frame), len(steps) - 1))], eps)


def build(gr: Any, trial: Trial, eps: float, steps: int) -> Any:
    """Return the page for a `trial` as Blocks of gradio, `gr`; `eps` and `steps` are what it has at first."""
    do, data = Handlers(trial), trial.data
    classes, attacks = list(do.by_name), list(trial.attacks)
    usual = next((name for name in USUAL if name in attacks), attacks[0])
    levels, plain = round(255 * eps), {"apply_default_css": False}
    with gr.Blocks(title="Try an attack", analytics_enabled=False, fill_width=True) as page:
        result = gr.State(None, time_to_live=3600)
        gr.HTML(
            drawn(
                "title",
                networks=list(trial.views),
                images=len(data.images),
                ranked=len(data.ranked.labels),
                data=data.name,
            ),
            **plain,
        )
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=300):
                with gr.Group():
                    kind = gr.Dropdown([ANY, *classes], value=ANY, label="Class of the query")
                    number = gr.Number(
                        0, label=f"Its number, 0 to {len(data.images) - 1}", precision=0, minimum=0
                    )
                    draw = gr.Button("Random image", size="sm")
                preview = gr.HTML(do.preview(0, None, NONE)[0], elem_id="rm-query", **plain)
                with gr.Accordion("Or upload an image", open=False):
                    file = gr.File(
                        label=f"At most {MEGABYTES} MB and {MEGAPIXELS} megapixels",
                        type="filepath",
                        height=120,
                    )
                    known = gr.Dropdown([NONE, *classes], value=NONE, label="Class of the upload")
                with gr.Group():
                    name = gr.Dropdown(attacks, value=usual, label="Attack")
                    change = gr.Slider(
                        0, min(255, max(64, 2 * levels)), value=levels, step=1, label="ε, in levels of 255"
                    )
                    count = gr.Slider(1, MOST_STEPS, value=min(steps, MOST_STEPS), step=1, label="Steps")
                    k = gr.Slider(1, MOST_K, value=5, step=1, label="k, images shown of a ranking")
                go = gr.Button("Attack", variant="primary")
            with gr.Column(scale=3, min_width=320):
                told = gr.HTML(drawn("told", text=HINT), elem_id="rm-told", **plain)
                frame = gr.Slider(
                    0, 1, value=0, step=1, label="Go through the steps", visible=False, elem_id="rm-frame"
                )
                shown = gr.HTML(drawn("guide", networks=list(trial.views)), elem_id="rm-shown", **plain)

        bar = gr.Progress  # on the page, where nothing is markup

        def attack(*asked: Any, progress: Any = bar()) -> tuple[Any, str, Any, str]:  # noqa: B008
            def tell(network: str, done: int, total: int) -> None:
                progress((done, total), desc=network, unit="steps")

            found, sentence = do.attack(tell, *asked)
            last = 0 if found is None else len(frames(found[1])) - 1
            slider = gr.Slider(maximum=max(last, 1), value=0, visible=last > 0)
            return found, sentence, slider, do.show(found, 0)

        def first(kind: str, number: float | None) -> Any:
            found = do.first_of(kind, number)
            return gr.skip() if found is None else found

        private = {"api_visibility": "private"}
        asked = [number, file, known]
        kind.change(first, [kind, number], number, show_progress="hidden", **private)
        draw.click(do.random_of, kind, number, show_progress="hidden", **private)
        for part in asked:
            part.change(
                do.preview,
                asked,
                [preview, told],
                show_progress="hidden",
                concurrency_id="network",
                **private,
            )
        done = go.click(
            attack,
            [*asked, name, change, count, k],
            [result, told, frame, shown],
            show_progress="minimal",
            scroll_to_output=True,
            concurrency_id="network",
            concurrency_limit=1,
            js=HALT,
            **private,
        )
        frame.input(
            do.show, [result, frame], shown, show_progress="hidden", trigger_mode="always_last", **private
        )
        done.then(None, js=PLAY, **private)
    page.queue(max_size=WAITING, default_concurrency_limit=1, api_open=False)
    return page


def style() -> str:
    """Return the style sheet of the page."""
    return (HERE / "page.css").read_text(encoding="utf-8")
