"""The example scripts run as a user would run them, and learn something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each test starts a process that imports everything

EXAMPLES = Path(__file__).parents[1] / "examples"
CHANCE = 10  # ten digits, about equally common


@pytest.mark.parametrize("name", ["plain_loop.py", "lightning_trainer.py"])
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    tiny = ["--epochs", "1", "--steps", "1", "--batch", "64"]
    done = subprocess.run(  # noqa: S603
        [sys.executable, EXAMPLES / name, *tiny],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"R@1 ([\d.]+)  mAP ([\d.]+)", done.stdout)
    assert len(found) == 2, done.stdout
    (_, untrained), (recall, trained) = found
    assert CHANCE < float(recall) <= 100
    # An untrained network finds most digits by their pixels; only mAP shows that this one has learned.
    assert float(trained) > float(untrained) + 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_an_example_explains_its_options(script: Path) -> None:
    done = subprocess.run(  # noqa: S603
        [sys.executable, script, "--help"], capture_output=True, text=True, timeout=300, check=True
    )
    for option in ("--epochs", "--batch", "--lr", "--defense", "--eps", "--steps", "--seed"):
        assert option in done.stdout


def test_a_new_attack_stands_beside_the_others(tmp_path: Path) -> None:
    tiny = ["--epochs", "1", "--steps", "2", "--queries", "32"]
    done = subprocess.run(  # noqa: S603
        [sys.executable, EXAMPLES / "new_attack.py", *tiny],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shown = dict(re.findall(r"(R@1|ES:R|away) ([\d.]+)", done.stdout))
    assert float(shown["away"]) < float(shown["R@1"])
    assert not list(tmp_path.iterdir())
