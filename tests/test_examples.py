"""The example scripts run as a user would run them, and learn something."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
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
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"R@1 ([\d.]+)  mAP ([\d.]+)", done.stdout)
    assert len(found) == 2, done.stdout
    (_, untrained), (recall, trained) = found
    assert CHANCE < float(recall) <= 100
    # An untrained network finds most digits by their pixels; only mAP shows that this one has learned.
    assert float(trained) > float(untrained) + 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["lightning_trainer.py", "new_attack.py", "plain_loop.py"])
def test_an_example_explains_its_options(name: str) -> None:
    done = subprocess.run(  # noqa: S603
        [sys.executable, EXAMPLES / name, "--help"], capture_output=True, text=True, timeout=600, check=True
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
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    shown = dict(re.findall(r"(R@1|ES:R|away) ([\d.]+)", done.stdout))
    assert float(shown["away"]) < float(shown["R@1"])
    assert not list(tmp_path.iterdir())


# In a process of its own: what a kernel's threads and sockets warn of is no concern of these tests.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
from traitlets.config import Config

files = Config({"ConnectionFileMixin": {"transport": "ipc"}})  # no port that others could take
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, kernel_name="python3", timeout=600, config=files).execute()
nbformat.write(notebook, sys.argv[2])
"""


def test_the_tour_runs(tmp_path: Path) -> None:
    done, env = tmp_path / "done.ipynb", dict(os.environ, OMP_NUM_THREADS="1")
    env.pop("MPLBACKEND", None)
    with tempfile.TemporaryDirectory() as home:  # with a short path: that of a socket is bounded
        names = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")
        subprocess.run(  # noqa: S603
            [sys.executable, "-c", EXECUTE, EXAMPLES / "tour.ipynb", done],
            cwd=tmp_path,
            env=env | dict.fromkeys(names, home),
            timeout=600,
            check=True,
        )
    cells = json.loads(done.read_text(encoding="utf-8"))["cells"]
    outputs = [out for cell in cells for out in cell.get("outputs", ())]
    assert {out.get("name", out["output_type"]) for out in outputs} == {
        "stdout",
        "display_data",
    }  # no warning
    assert sum("image/png" in out.get("data", ()) for out in outputs) == 2
    text = "".join(line for out in outputs for line in out.get("text", ()))
    # A record's line and the line of the comparison have the same scores: R@1 and ERS of either network.
    records = re.findall(r"^R@1 ([\d.]+) .* ERS ([\d.]+)$", text, re.MULTILINE)
    assert re.findall(r": R@1 ([\d.]+), ERS ([\d.]+) ", text) == records
    (_, plain), (recall, defended) = [(float(recall), float(ers)) for recall, ers in records]
    assert 5 * CHANCE < recall <= 100
    assert plain < defended
    assert list(tmp_path.iterdir()) == [done]


def test_the_tour_is_kept_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}  # and nobody's version
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
