"""Serve the page on this machine: nobody else is let in, and nothing is sent out."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from robustmetric.app.page import build, style
from robustmetric.app.trial import Trial
from robustmetric.app.uploads import MEGABYTES
from robustmetric.errors import UserError

HOST = "127.0.0.1"
FONTS = ("system-ui", "sans-serif")
POLICY = (
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'; form-action 'none'"
)
SILENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "OTEL_SDK_DISABLED": "true",
}

Message = MutableMapping[str, Any]


def check_port(port: int) -> None:
    """Refuse a `port` that cannot be listened at.

    >>> check_port(70000)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: port must be from 1 to 65535, not 70000
    """
    if not 1 <= port <= 65535:
        raise UserError(f"port must be from 1 to 65535, not {port}", parameter="port")
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except PermissionError:
            raise UserError(
                f"port {port} is for the system alone: give one from 1024 on", parameter="port"
            ) from None
        except OSError:
            raise UserError(
                f"port {port} is in use by another program: give another one, such as {port % 65535 + 1}, or "
                "stop that program",
                parameter="port",
            ) from None


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Let gradio hear nothing of the environment but that it is to be silent, and where uploads go.

    The environment may ask for a public address, another host, further folders to give out, and places that
    are to be told of every request. Those to this machine go to no proxy.
    """
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("GRADIO_", "FASTAPI_", "OTEL_"))]:
        del os.environ[name]
    here = ",".join(filter(None, (os.environ.get("NO_PROXY"), os.environ.get("no_proxy"), HOST, "localhost")))
    os.environ.update({**SILENT, "GRADIO_TEMP_DIR": folder, "NO_PROXY": here, "no_proxy": here})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class AtHome:
    """Answers requests to this machine by its own name alone, and tells browsers to ask nobody else.

    A page from elsewhere can send a browser here, also by a name of its own for this machine. `app` is what
    answers, `port` where.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}".encode() for name in (HOST, "localhost")}
        self.origins = {b"http://" + host for host in self.hosts}

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if headers.get(b"host") not in self.hosts or (origin is not None and origin not in self.origins):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"this page is for its own machine alone"})
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [
                    (b"content-security-policy", POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await self.app(scope, receive, guarded)


def serve(
    trial: Trial, *, eps: float, steps: int, port: int, ready: Callable[[str], None], show: bool = False
) -> None:
    """Serve the page of a `trial` at a `port` of this machine until it is interrupted.

    `eps` and `steps` are what the page has at first. `ready` is told the address, and a browser is opened if
    it is to `show`.
    """
    check_port(port)
    with tempfile.TemporaryDirectory(prefix="robustmetric-app-") as folder, _alone(folder):
        gr = _gradio()
        from starlette.middleware import Middleware

        page = build(gr, trial, eps, steps)
        theme = gr.themes.Base(
            primary_hue="blue", secondary_hue="blue", neutral_hue="zinc", font=FONTS, font_mono=("monospace",)
        ).set(
            # With the usual one the text on a button is too faint.
            button_primary_background_fill="*primary_700",
            button_primary_background_fill_hover="*primary_800",
            button_primary_background_fill_dark="*primary_700",
            button_primary_background_fill_hover_dark="*primary_800",
        )
        try:
            page.launch(
                server_name=HOST,
                server_port=port,
                share=False,
                inline=False,
                inbrowser=False,
                prevent_thread_lock=True,
                quiet=True,
                show_error=False,
                footer_links=[],
                run_history=False,
                enable_monitoring=False,
                ssr_mode=False,
                pwa=False,
                mcp_server=False,
                max_threads=4,
                max_file_size=f"{MEGABYTES}mb",
                state_session_capacity=32,
                allowed_paths=[],
                app_kwargs={
                    "docs_url": None,
                    "redoc_url": None,
                    "openapi_url": None,
                    "middleware": [Middleware(AtHome, port=port)],
                },
                theme=theme,
                css=style(),
            )
            address = f"http://{HOST}:{port}"
            ready(address)
            if show:
                webbrowser.open(address)
            threading.Event().wait()
        finally:
            trial.stopped.set()
            _hurry(page)
            page.close(verbose=False)


def _hurry(page: Any) -> None:
    """Let the server wait no longer than a second for browsers, which keep connections open for ever."""
    if page.is_running:
        page.server.config.timeout_graceful_shutdown = 1
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it would tell of each connection


def _gradio() -> Any:
    try:
        return import_module("gradio")
    except ImportError as error:
        raise UserError(
            f"the app needs gradio, which cannot be imported here ({error}): pip install 'robustmetric[app]'"
        ) from None
