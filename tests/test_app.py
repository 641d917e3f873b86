"""The app: what its page shows, whom it answers, and what it rejects."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from robustmetric import app
from robustmetric.app import POLICY, Trial, at_home, check_port, load_gradio
from robustmetric.attacks import PGD, attack
from robustmetric.cli import app_page
from robustmetric.errors import UserError
from robustmetric.evaluation import Data, Subject, Threat, run_attack
from robustmetric.evaluation.attack import embed_all
from robustmetric.perturb import Budget, frozen
from robustmetric.report.cards import Album, card
from tests.helpers.command import refused, works
from tests.helpers.runs import make_run


@pytest.fixture
def trial() -> Iterator[Trial]:
    drawn = torch.Generator().manual_seed(5)
    torch.manual_seed(0)
    labels, images = torch.arange(40) % 4, torch.rand(40, 1, 6, 6, generator=drawn)
    network, data = nn.Sequential(nn.Flatten(), nn.Linear(36, 8)), Data(images, labels)
    view = Subject(network, data).view(network, embed_all(network, images, torch.arange(40), 16))
    with frozen(network):
        yield Trial(view, data, Threat(Budget(eps=0.1, alpha=2 / 255, steps=4), PGD(), seed=3))


@pytest.mark.parametrize("name", ["ES", "CA+(w=2)", "QA-(m=3)", "misrank"])
def test_the_page_shows_what_the_attack_finds(name: str, trial: Trial) -> None:
    goal, rows = attack(name), torch.tensor([7])
    threat = Threat(Budget(eps=16 / 255, alpha=2 / 255, steps=6), PGD(), seed=3)
    result = run_attack(trial.view, goal, rows, threat)
    assert (result.images - result.originals).abs().max() <= 16 / 255 + 1e-6
    (wanted,) = Album(trial.view, trial.data, k=10).pictures(goal, rows, result)
    assert trial.attack(7.0, name, 16, 6.0) == card(wanted)
    assert "class 3" in trial.preview(7)
    assert len({trial.random() for _ in range(20)} & set(range(40))) > 5


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((40, "ES", 8, 4), "number must be a whole number from 0 to 39, not 40"),
        ((None, "ES", 8, 4), "not None"),
        ((1.5, "ES", 8, 4), "not 1.5"),
        ((1, "SE", 8, 4), "unknown attack"),
        ((1, "ES", 300, 4), "eps must be in [0, 1]"),
        ((1, "ES", 8, 65), "steps must be a whole number from 1 to 64, not 65"),
        ((1, "<b>", 8, 4), "&lt;b&gt;"),
    ],
)
def test_an_error_is_one_line_on_the_page(asked: tuple[Any, ...], told: str, trial: Trial) -> None:
    shown = trial.attack(*asked)
    assert shown.startswith('<p role="alert">')
    assert told in shown
    assert "<b>" not in shown


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:7860"}, 200),
        ({"host": "localhost:7860", "origin": "http://localhost:7860"}, 200),
        ({"host": "evil.example:7860"}, 403),
        ({"host": "127.0.0.1:7860", "origin": "https://evil.example"}, 403),
        ({"host": "127.0.0.1:7860", "origin": "null"}, 403),
        ({"host": "127.0.0.1"}, 403),
        ({}, 403),
    ],
)
def test_only_the_page_of_this_machine_is_answered(headers: dict[str, str], status: int) -> None:
    requests, responses = (
        pytest.importorskip("starlette.requests"),
        pytest.importorskip("starlette.responses"),
    )

    async def answer(_: Any) -> Any:
        return responses.PlainTextResponse("welcome")

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    request = requests.Request({"type": "http", "headers": raw, "server": ("127.0.0.1", 7860)})
    response = asyncio.run(at_home(request, answer))
    assert response.status_code == status
    assert response.headers.get("content-security-policy") == (POLICY if status == 200 else None)


def test_gradio_is_silent_and_takes_nothing_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADIO_SHARE", "GRADIO_ALLOWED_PATHS", "OTEL_EXPORTER_OTLP_ENDPOINT", *app.SILENT):
        monkeypatch.setenv(name, "wished")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "b.example")
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(UserError, match=r"pip install 'robustmetric\[app\]'"):
        load_gradio()
    found = {name for name in os.environ if name.startswith(("GRADIO_", "OTEL_"))}
    assert found == {"GRADIO_ANALYTICS_ENABLED"}
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
    assert os.environ["no_proxy"] == "b.example,127.0.0.1,localhost"


def test_a_port_that_cannot_be_used_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            check_port(port)
    check_port(port)


def test_the_command_serves_a_run_with_its_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: dict[str, Any] = {}
    monkeypatch.setattr(
        app_page, "serve", lambda trial, port, *_, **__: served.update(trial=trial, port=port)
    )
    monkeypatch.setattr(app_page, "check_port", lambda _: None)
    monkeypatch.setattr(app_page, "load_gradio", lambda: None)
    run = make_run(tmp_path / "run", "last", eps=0.1)
    works("app", run, "--attack", "QA+(m=3)", "--steps", 8, "--alpha", "2/255", "--seed", 4, "--port", 7999)
    trial, budget = served["trial"], served["trial"].threat.budget
    assert (trial.chosen, trial.threat.seed, served["port"]) == ("QA+(m=3)", 4, 7999)
    assert (budget.eps, budget.alpha, budget.steps) == (0.1, 2 / 255, 8)
    assert (len(trial.data.images), trial.view.gallery.z.shape) == (797, (797, 16))
    assert "from 1 to 64, not 65 (--steps)" in refused("app", run, "--steps", 65)
