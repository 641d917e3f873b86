"""A page on which attacks are tried by hand, for this machine alone; it needs gradio."""

from __future__ import annotations

import os
import socket
import threading
import webbrowser
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from markupsafe import Markup

from robustmetric.attacks import ATTACKS, attack
from robustmetric.errors import UserError, whole
from robustmetric.evaluation import Data, NetworkView, Threat, run_attack
from robustmetric.perturb import Budget
from robustmetric.report.cards import CARD_STYLE, Album, card, encoded

HOST, MOST_STEPS = "127.0.0.1", 64
POLICY = (
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'; form-action 'none'"
)
SILENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    **dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_OFFLINE", "DISABLE_TELEMETRY", "DO_NOT_TRACK"), "1"),
}


class Trial:
    """What the page does: it attacks single queries of a `view` on `data`, as the `threat` allows.

    `chosen` is the attack that the page begins with. Use it inside `frozen` of the network. An error that the
    user can fix is returned as one line of HTML.
    """

    def __init__(self, view: NetworkView, data: Data, threat: Threat, chosen: str = "ES") -> None:
        self.view, self.data, self.threat, self.chosen = view, data, threat, chosen
        self.album = Album(view, data, k=10)
        self.generator = torch.Generator().manual_seed(threat.seed)

    def random(self) -> int:
        """Return the number of an image at random."""
        return int(torch.randint(len(self.data.images), (1,), generator=self.generator))

    def preview(self, number: Any) -> str:
        """Return the image of a `number` as HTML."""
        try:
            rows = torch.tensor([self._number(number)])
        except UserError as error:
            return _told(error)
        label = self.album.class_of(int(self.data.labels[rows]))
        picture = Markup('<img src="{}" alt="the query" width="112" height="112">')
        name = Markup("<p>{}, class {}</p>").format(self.data.called(int(rows)), label)
        return picture.format(encoded(self.data.images[rows][0])) + name

    def attack(self, number: Any, name: str, levels: float, steps: float) -> str:
        """Return what an attack of this `name` does to the query of a `number`: a card as HTML.

        ε is `levels` of 255.
        """
        try:
            rows = torch.tensor([self._number(number)])
            goal = attack(name)
            steps = whole("steps", int(steps), 1, MOST_STEPS)
            budget = Budget(eps=levels / 255, alpha=self.threat.budget.alpha, steps=int(steps))
            threat = Threat(budget, self.threat.search, self.threat.seed, 1)
            result = run_attack(self.view, goal, rows, threat)
        except UserError as error:
            return _told(error)
        (picture,) = self.album.pictures(goal, rows, result)
        return card(picture)

    def _number(self, number: Any) -> int:
        given = int(number) if isinstance(number, float) and number == int(number) else number
        return whole("number", given, 0, len(self.data.images) - 1)


STYLE = ".shot { color: var(--text); } .min_value, .max_value { color: inherit !important; }"
"""The page's own rules, for texts that gradio makes too pale."""


def _told(error: UserError) -> str:
    return Markup('<p role="alert">{}</p>').format(str(error))


def build(gr: Any, trial: Trial) -> Any:
    """Return the page for a `trial`, of gradio's (`gr`) parts."""
    budget, count = trial.threat.budget, len(trial.data.images)
    levels = round(255 * budget.eps)
    with gr.Blocks(title="Try an attack", analytics_enabled=False) as page:
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                number = gr.Number(0, label=f"Image, 0 to {count - 1}", precision=0, minimum=0)
                draw = gr.Button("Random image", size="sm")
                query = gr.HTML(trial.preview(0), elem_id="query")
                name = gr.Dropdown(list(ATTACKS), value=trial.chosen, label="Attack", allow_custom_value=True)
                eps = gr.Slider(0, max(64, 2 * levels), value=levels, step=1, label="ε, in levels of 255")
                steps = gr.Slider(1, MOST_STEPS, value=budget.steps, step=1, label="Steps")
                go = gr.Button("Attack", variant="primary")
            with gr.Column(scale=3, min_width=320):
                shown = gr.HTML(elem_id="shown")
        how = {"api_visibility": "private", "concurrency_id": "network", "concurrency_limit": 1}
        draw.click(trial.random, None, number, **how)
        number.change(trial.preview, number, query, show_progress="hidden", **how)
        go.click(trial.attack, [number, name, eps, steps], shown, scroll_to_output=True, **how)
    page.queue(max_size=8, api_open=False)
    return page


async def at_home(request: Any, call_next: Callable[[Any], Any]) -> Any:
    """Answer requests to this machine by its own name alone, and tell browsers to ask nobody else.

    A page from elsewhere can send a browser here, also by a name of its own for this machine.
    """
    from starlette.responses import PlainTextResponse

    home = {f"{name}:{request.scope['server'][1]}" for name in (HOST, "localhost")}
    origin = request.headers.get("origin")
    if request.headers.get("host") not in home or origin not in {None, *(f"http://{name}" for name in home)}:
        return PlainTextResponse("this page is for its own machine alone", 403)
    response = await call_next(request)
    response.headers["content-security-policy"] = POLICY
    return response


def load_gradio() -> Any:
    """Import gradio so that it reports nothing and takes nothing from the environment."""
    for name in [name for name in os.environ if name.startswith(("GRADIO_", "FASTAPI_", "OTEL_"))]:
        del os.environ[name]
    near = ",".join(filter(None, (os.environ.get("NO_PROXY"), HOST, "localhost")))
    os.environ.update(SILENT, NO_PROXY=near, no_proxy=near)
    try:
        return import_module("gradio")
    except ImportError as error:
        raise UserError(f"the app needs gradio ({error}): pip install 'robustmetric[app]'") from None


def serve(trial: Trial, port: int, say: Callable[[str], object], *, browser: bool = False) -> None:
    """Serve the page of a `trial` at a `port` of this machine until it is interrupted; `say` its address."""
    check_port(port)
    gr = load_gradio()
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware

    page = build(gr, trial)
    guard = {"middleware": [Middleware(BaseHTTPMiddleware, dispatch=at_home)]}
    fonts = {"font": ("system-ui", "sans-serif"), "font_mono": ("monospace",)}
    try:
        page.launch(
            server_name=HOST,
            server_port=port,
            share=False,
            inbrowser=False,
            prevent_thread_lock=True,
            quiet=True,
            footer_links=[],
            enable_monitoring=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            app_kwargs={"docs_url": None, "redoc_url": None, "openapi_url": None, **guard},
            theme=gr.themes.Base(**fonts),
            head=f"<style>{CARD_STYLE}{STYLE}</style>",  # css= would scope the rules of :root
        )
        say(f"the page is at http://{HOST}:{port}, for this machine alone; Ctrl-C stops it")
        if browser:
            webbrowser.open(f"http://{HOST}:{port}")
        threading.Event().wait()
    finally:
        if page.is_running:  # browsers keep connections open
            page.server.config.timeout_graceful_shutdown = 1
        page.close(verbose=False)


def check_port(port: int) -> None:
    """Reject a `port` that cannot be listened at.

    >>> check_port(70000)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: port must be a whole number from 1 to 65535, not 70000
    """
    whole("port", port, 1, 65535)
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used ({error.strerror}): give another one", parameter="port"
            ) from None
