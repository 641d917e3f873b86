"""examples/hm.py, the method in one file with torch alone, is the package's HM[S,LGA]&ICS."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import robustmetric as rm

FILE = Path(__file__).parents[1] / "examples" / "hm.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_hm", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "example_hm", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 16)
    ).double()


@pytest.mark.parametrize("steps", [1, 6])
def test_its_losses_are_the_packages(steps: int, example: ModuleType) -> None:
    ours, theirs = network(), network()
    defense = rm.defense("HM[S,LGA]&ICS", eps=0.1, alpha=0.025, steps=steps, seed=5)
    method = example.HardnessManipulation(
        eps=0.1, alpha=0.025, steps=steps, generator=torch.Generator().manual_seed(5)
    )
    optimisers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(8, (12,), generator=generator).repeat_interleave(2)
    images = torch.rand(24, 1, 8, 8, generator=generator, dtype=torch.float64)
    images[1::2] = 0.8 * images[0::2] + 0.2 * images[1::2]  # near enough for ICS to have an effect
    destinations, terms = set(), 0.0
    for _ in range(12):
        step, loss = defense(ours, images, labels), method(theirs, images, labels)
        # The package keeps the previous loss in single precision.
        assert loss.item() == pytest.approx(step.loss.item(), abs=1e-6)
        assert step.logs["perturbed"] > 0
        destinations.add(step.logs["hardness/destination"])
        terms += step.logs["loss/ICS"]
        for total, optimiser in zip((step.loss, loss), optimisers, strict=True):
            optimiser.zero_grad()
            total.backward()
            optimiser.step()
    assert terms > 0
    assert len(destinations) > 2
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_it_trains_with_torch_alone(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert "robustmetric." not in text
    assert "import robustmetric" not in text
    with torch.random.fork_rng():
        example.main()
    before, after = map(float, re.findall(r"R@1 ([\d.]+)", capsys.readouterr().out))
    assert after > before + 5
