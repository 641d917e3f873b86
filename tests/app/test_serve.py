"""The page is for its own machine alone: who is let in, what is said of a port, what gradio hears."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import pytest

from robustmetric.app import serve as module
from robustmetric.app.serve import POLICY, AtHome, check_port
from robustmetric.errors import UserError


def asked(**headers: str) -> tuple[int, dict[bytes, bytes]]:
    """Ask the guard of port 7860, behind which everybody is welcome; return the status and the headers."""
    said: list[dict[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b"welcome"})

    async def send(message: Any) -> None:
        said.append(message)

    scope = {"type": "http", "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    asyncio.run(AtHome(inner, 7860)(scope, None, send))  # type: ignore[arg-type]
    return said[0]["status"], dict(said[0]["headers"])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:7860"}, 200),
        ({"host": "localhost:7860", "origin": "http://localhost:7860"}, 200),
        pytest.param({"host": "evil.example:7860"}, 403),
        ({"host": "127.0.0.1:7860", "origin": "https://evil.example"}, 403),
        ({"host": "127.0.0.1:7860", "origin": "null"}, 403),
        ({"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:8000"}, 403),
        ({"host": "127.0.0.1"}, 403),
        ({}, 403),
    ],
)  # fmt: skip
def test_only_this_machine_s_own_page_is_let_in(headers: dict[str, str], status: int) -> None:
    found, more = asked(**headers)
    assert found == status
    assert more.get(b"content-security-policy") == (POLICY.encode() if status == 200 else None)
    assert (more.get(b"x") == b"y") == (status == 200)


def test_a_port_that_is_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError) as error:
            check_port(port)
    assert str(error.value) == (
        f"port {port} is in use by another program: give another one, such as {port % 65535 + 1}, or stop "
        "that program"
    )
    assert error.value.parameter == "port"
    check_port(port)  # now it is free


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(UserError, match=f"port must be from 1 to 65535, not {port}"):
        check_port(port)


def test_a_port_of_the_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(UserError, match="port 80 is for the system alone: give one from 1024 on"):
        check_port(80)


def test_gradio_hears_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    wished = {
        "GRADIO_SHARE": "true",
        "GRADIO_ALLOWED_PATHS": "/",
        "GRADIO_SERVER_NAME": "0.0.0.0",  # noqa: S104
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a.example",
        "FASTAPI_OTEL_AUTO_CONFIGURE": "true",
        "NO_PROXY": "b.example",
    }
    for name, value in wished.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with module._alone("/uploads"):
        found = {k: v for k, v in os.environ.items() if k.startswith(("GRADIO_", "OTEL_", "FASTAPI_"))}
        assert found == {
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_TEMP_DIR": "/uploads",
            "OTEL_SDK_DISABLED": "true",
        }
        assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "b.example,127.0.0.1,localhost"
        assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert dict(os.environ) == before


def test_without_gradio_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(UserError, match=r"pip install 'robustmetric\[app\]'"):
        module._gradio()
