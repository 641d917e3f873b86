"""The command export as a user sees it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import robustmetric as rm
from robustmetric.sphere import ROUNDING
from tests.helpers.command import refused, works
from tests.helpers.runs import make_run

ABOUT = '{"images": {"height": 8, "width": 8, "channels": 1}}'


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", "last", "best", about=ABOUT, validation=0.1)


def first(file: Path, **inputs: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0])


@pytest.mark.slow
def test_a_run_is_exported_and_told(made: Path, tmp_path: Path) -> None:
    said = works("export", made, "-o", tmp_path / "net.onnx").splitlines()
    assert said[0].startswith("c2f2 HM[S,LGA]&ICS, last weights: 1.3 MB in ")
    assert said[0].endswith("net.onnx, as onnx")
    assert said[1].startswith("takes uint8 (N, 1, 8, 8), grey: decode, and turn upright")
    assert said[2].startswith("returns float32 (N, 16) of length 1, at most ")
    assert said[2].endswith("tried alone and together; rounding accounts for 1e-05")
    images = np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8)).astype(np.uint8)
    with torch.no_grad():
        wanted = rm.embed(rm.load_run(made).network, torch.from_numpy(images) / 255).numpy()
    found = first(tmp_path / "net.onnx", images=images)
    assert np.linalg.norm(found - wanted, axis=1).max() < ROUNDING
    again = refused("export", made, "-o", tmp_path / "net.onnx")
    assert "net.onnx is there already: give another file, or replace it by --force" in again
    assert again.endswith("(--out)\n")
    works("export", made, "-o", tmp_path / "net.onnx", "--force")


@pytest.mark.parametrize("which", ["last", "best", "file"])
def test_the_weights_that_are_asked_for(which: str, made: Path, tmp_path: Path) -> None:
    given = made / "best.safetensors" if which == "file" else which
    said = works("export", made, "--to", "torchscript", "-o", tmp_path / "net.pt", "--weights", given)
    told = {"last": "last weights", "best": "chosen on test images", "file": "weights that were given"}
    assert f"c2f2 HM[S,LGA]&ICS, {told[which]}: " in said


def test_what_cannot_be_exported_is_said(made: Path, tmp_path: Path) -> None:
    said = refused("export", made, "-o", tmp_path / "net", "--to", "tflite")
    assert "unknown format 'tflite'; known: exported, onnx, torchscript (--to)" in said
    said = refused("export", tmp_path / "nowhere", "-o", tmp_path / "net")
    assert "is no run, it has no recipe.yaml: give the folder of a run" in said
    said = refused("export", made, "-o", tmp_path / "net", "--weights", tmp_path / "gone")
    assert "there is no weights file" in said
    said = refused("export", made, "-o", tmp_path / "net.xyz")
    assert all(part in said for part in ("'.xyz'", ".onnx (onnx)", ".pt2 (exported)", "(--to)"))
    assert not (tmp_path / "net.xyz").exists()


def test_without_the_extra(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    said = refused("export", made, "-o", tmp_path / "net.onnx")
    assert "pip install 'robustmetric[onnx]', or export to torchscript or exported (--to)" in said


@pytest.mark.parametrize("name", ["[bold]run\x1b[2J", "-o", "räume und $(touch x)", "run.onnx"])
def test_strange_names_of_runs(name: str, made: Path, tmp_path: Path) -> None:
    run = made.rename(tmp_path / name)
    said = works("export", "--to", "torchscript", "-o", run / "net[b].pt", "--", run)
    assert "\x1b" not in said
    assert "net[b].pt, as torchscript" in said


NETS = """
import torch
from torch import nn

def eigen():
    return Eigen()

class Eigen(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, x):
        return self.scale * torch.linalg.svdvals(x[:, 0]) + 1

def small(channels=1):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, 8))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of somebody else's with a network of a file."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    run = make_run(tmp_path / "own", model="code/nets.py:small", dim=None, about=ABOUT)
    (run / "code").mkdir()
    (run / "code" / "nets.py").write_text(NETS)
    rm.save_weights(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8)), run / "last.safetensors")
    return run


@pytest.mark.slow
def test_a_network_of_a_file(own: Path, tmp_path: Path) -> None:
    """Code that came with a run needs a word of the user's; what was exported needs no code."""
    said = refused("export", own, "-o", tmp_path / "net.onnx")
    assert "brings code that did not come from you" in said
    assert not (tmp_path / "net.onnx").exists()
    said = works("export", own, "-o", tmp_path / "net.onnx", "--trust")
    assert said.startswith("nets.py:small HM[S,LGA]&ICS, last weights")
    images = np.full((2, 1, 8, 8), 9, np.uint8)
    with torch.no_grad():
        wanted = rm.embed(rm.load_run(own).network, torch.from_numpy(images) / 255).numpy()
    shutil.rmtree(own)
    assert np.linalg.norm(first(tmp_path / "net.onnx", images=images) - wanted, axis=1).max() < ROUNDING


@pytest.mark.slow
def test_an_operator_that_onnx_does_not_have(own: Path, tmp_path: Path) -> None:
    text = (own / "recipe.yaml").read_text()
    (own / "recipe.yaml").write_text(text.replace("nets.py:small", "nets.py:eigen"))
    rm.save_weights({"scale": torch.tensor(2.0)}, own / "last.safetensors")
    said = refused("export", own, "-o", tmp_path / "net.onnx", "--trust")
    assert (
        "ONNX has no operator for aten._linalg_svd, which the network uses: export it to torchscript" in said
    )
    works("export", own, "-o", tmp_path / "net.pt2", "--to", "exported")
    extra = {"robustmetric.json": ""}
    torch.export.load(tmp_path / "net.pt2", extra_files=extra)
    assert json.loads(extra["robustmetric.json"])["name"] == "nets.py:eigen HM[S,LGA]&ICS"
