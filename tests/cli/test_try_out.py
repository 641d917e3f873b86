"""The command app: what it shows on its page, and what it refuses before it begins."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from robustmetric import load_run, model, save_weights
from robustmetric.app import Trial
from robustmetric.attacks import ATTACKS
from robustmetric.cli import try_out
from robustmetric.cli.request import Request
from robustmetric.sphere import embed
from tests.helpers.command import refused, works
from tests.helpers.runs import make_pictures, make_run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keep what would be shown, in the place of showing it."""
    kept: dict[str, Any] = {}

    def serve(trial: Trial, **options: Any) -> None:
        kept.update(options, trial=trial)
        kept["frozen"] = [not s.model.training for s in trial.views.values()]
        options["ready"]("http://127.0.0.1:7860")

    monkeypatch.setattr(try_out, "serve", serve)
    monkeypatch.setattr(try_out, "check_port", lambda _: None)
    return kept


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs on digits, of other weights and other embeddings."""
    plain = make_run(tmp_path / "plain", "last", eps=0.1)
    return plain, make_run(tmp_path / "defended", "last", first=7, dim=12, defense="HM[S,LGA]&ICS")


def test_two_runs_are_shown_on_the_same_images_each_with_its_own_embeddings(
    runs: tuple[Path, Path], served: dict[str, Any], tmp_path: Path
) -> None:
    said = works(
        "app", runs[0], "--beside", runs[1], "--cache", tmp_path / "cache", "--seed", 4, "--seconds", 9
    )
    assert "the page is at http://127.0.0.1:7860, for this machine alone; Ctrl-C stops it" in said
    trial = served["trial"]
    first, second = trial.views.values()
    assert len(trial.views) == 2
    assert served["frozen"] == [True, True]
    assert (served["eps"], served["steps"], served["port"], served["show"]) == (0.1, 32, 7860, False)
    assert (trial.seed, trial.seconds, list(trial.attacks)) == (4, 9.0, list(ATTACKS))
    assert torch.equal(first.images[torch.arange(797)], second.images[torch.arange(797)])
    for view, run in zip((first, second), runs, strict=True):
        z = embed(load_run(run).network, view.images[torch.arange(40)])
        assert torch.allclose(view.gallery.z[:40], z, atol=1e-5)
    assert first.gallery.z.shape == (797, 16)
    assert second.gallery.z.shape == (797, 12)
    assert trial.data.classes == [str(digit) for digit in range(10)]


def test_a_network_by_name_and_options_of_the_page(served: dict[str, Any], tmp_path: Path) -> None:
    options = (
        "--attacks",
        "ES,QA+(m=3)",
        "--eps",
        "16/255",
        "--steps",
        8,
        "--alpha",
        "2/255",
        "--port",
        7999,
    )
    works("app", "--model", "c2f2", "--data", "digits", *options, "--open", "--cache", tmp_path / "cache")
    trial = served["trial"]
    assert list(trial.attacks) == ["ES", "QA+(m=3)"]
    assert (served["eps"], served["steps"], served["port"], served["show"]) == (16 / 255, 8, 7999, True)
    assert (trial.alpha, list(trial.views)) == (2 / 255, ["c2f2"])


def test_networks_of_the_same_name_are_told_apart(served: dict[str, Any], tmp_path: Path) -> None:
    one, other = (make_run(tmp_path / name, "last", first=n) for n, name in enumerate(("a", "b")))
    works("app", one, "--beside", other, "--cache", tmp_path / "cache")
    names = list(served["trial"].views)
    assert names[0].endswith(f"({one})")
    assert names[1].endswith(f"({other})")


def test_networks_that_take_other_images_are_refused_unless_a_size_is_given(
    served: dict[str, Any], tmp_path: Path
) -> None:
    root = make_pictures(tmp_path / "pictures", classes=6)
    one = make_run(tmp_path / "one", "last", data="folder", root=str(root), resize=8, crop=8)
    other = make_run(tmp_path / "other", "last", data="folder", root=str(root), resize=10, crop=8)
    for run in (one, other):
        torch.manual_seed(0)
        save_weights(model("c2f2", size=8, dim=16, channels=3), run / "last.safetensors")
    both = ("app", one, "--beside", other, "--split", "all", "--cache", tmp_path / "cache")
    told = refused(*both)
    assert "side by side two networks must take the same images: " in told
    assert "takes resize 8, crop 8, RGB and " in told
    assert "takes resize 10, crop 8, RGB; give " in told
    assert all(option in told for option in ("--resize", "--crop", "--fit"))
    assert "(--beside)" in told
    works(*both, "--resize", 9, "--crop", 8, "--fit", "pad")
    assert len(served["trial"].views) == 2
    assert served["trial"].fit == "pad"
    third = make_run(tmp_path / "third", data="folder", root=str(root), resize=8, crop=8, fit="pad")
    shutil.copy(one / "last.safetensors", third)
    assert "takes resize 8 by pad, crop 8, RGB; give " in refused(*both[:3], third, *both[4:])


def test_what_cannot_be_is_refused_before_images_are_decoded(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Request, "images", lambda *_: pytest.fail("images were decoded"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} is in use by another program: give another one" in refused(
            "app", runs[0], "--port", port
        )
    assert "seconds must be more than 0, not -1 (--seconds)" in refused("app", runs[0], "--seconds", -1)
    assert "steps must be at most 64 here, not 65 (--steps)" in refused("app", runs[0], "--steps", 65)
    assert f"{tmp_path} is no run" in refused("app", runs[0], "--beside", tmp_path)
    assert "unknown attack 'SE'" in refused("app", runs[0], "--attacks", "SE")
    monkeypatch.setattr(try_out, "find_spec", lambda _: None)
    assert "the app needs gradio: pip install 'robustmetric[app]'" in refused("app", runs[0])
