"""A run's folder: its weights, its network for use elsewhere, and the user's code that goes with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import robustmetric as rm
from robustmetric.data import Inputs
from robustmetric.errors import UserError
from robustmetric.training.folder import RunFolder, Weights
from robustmetric.training.recipe import load_recipe
from robustmetric.training.run import train
from tests.helpers.runs import make_run

QUICK: dict[str, Any] = {"defense": "N/A[R]", "batch": 1024, "epochs": 1, "validation": 0}


def equal(network: nn.Module, file: Path) -> bool:
    wanted = load_file(file)
    return all(torch.equal(value, wanted[name]) for name, value in network.state_dict().items())


# Weights

ON_TEST, ON_VALIDATION = (
    json.dumps({"choice": {"images": f"{which} images"}}) for which in ("test", "validation")
)
UNDECIDED = '{"choice": {"images": "validation images", "weights": "last"}}'


@pytest.mark.parametrize(
    ("about", "share", "which", "taken", "chosen"),
    [
        (None, 0.1, None, "best", "chosen on validation images"),
        (None, 0, None, "last", "last weights"),
        (None, 0, "best", "best", "chosen on test images"),
        (None, 0.1, "last", "last", "last weights"),
        (ON_VALIDATION, 0.1, None, "best", "chosen on validation images"),
        (UNDECIDED, 0.1, None, "last", "last weights"),
        (UNDECIDED, 0.1, "best", "best", "chosen on validation images"),
        (ON_TEST, 0.1, None, "last", "last weights"),  # nothing could be set apart
        (ON_TEST, 0.1, "best", "best", "chosen on test images"),
        ('{"choice": 3}', 0.1, None, "best", "chosen on validation images"),  # edited by hand
    ],
)
def test_weights_of_a_run(
    about: str | None, share: float, which: Any, taken: str, chosen: str, tmp_path: Path
) -> None:
    run = RunFolder(make_run(tmp_path / "run", "last", "best", about=about, validation=share))
    file = run.path / f"{taken}.safetensors"
    assert run.weights(which) == Weights(file, chosen)
    assert equal(run.source(which).make(1, 8), file)
    loaded = rm.load_run(run.path, which)
    assert loaded.chosen == chosen
    assert equal(loaded.network, file)


def test_weights_that_are_given_are_of_unknown_choice(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run", "last", "best", "mine"))
    assert run.choose(run.path / "mine.safetensors") == Weights(run.path / "mine.safetensors", None)
    loaded = rm.load_run(run.path, run.path / "mine.safetensors")
    assert loaded.chosen is None
    assert equal(loaded.network, run.path / "mine.safetensors")


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    run = RunFolder(make_run(tmp_path / "run", "last"))
    told = r"no weights .*best\.safetensors: the folder holds last weights; ask for others"
    with pytest.raises(FileNotFoundError, match=told):
        run.weights("best")
    with pytest.raises(
        FileNotFoundError, match=r"no weights .*best\.safetensors: the folder holds no weights"
    ):
        RunFolder(make_run(tmp_path / "new")).weights("best")
    with pytest.raises(FileNotFoundError, match=r"no weights file .*nowhere\.safetensors"):
        run.source(tmp_path / "nowhere.safetensors")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for ask in (RunFolder(tmp_path).recipe, RunFolder(tmp_path).weights, lambda: rm.load_run(tmp_path)):
        with pytest.raises(FileNotFoundError, match=r"is not a run folder: no recipe\.yaml in it"):
            ask()


# What a product needs


def test_a_run_on_grey_images_takes_them_from_colour_files(tmp_path: Path) -> None:
    train(load_recipe("digits", QUICK), tmp_path / "run", progress=False)
    run = rm.load_run(tmp_path / "run")
    assert RunFolder(tmp_path / "run").inputs() == Inputs(channels=1)
    assert run.inputs == Inputs(resize=8, channels=1), "any image is brought to what was trained on"
    for size in (8, 20):
        assert run.network(run.inputs.tensor(Image.new("RGB", (size, size), "red"))).shape == (1, 512)
    # One that did not write down the shape of its images looks at them.
    about = json.loads(RunFolder(tmp_path / "run").about.read_text())
    assert about.pop("images") == {"height": 8, "width": 8, "channels": 1}
    RunFolder(tmp_path / "run").about.write_text(json.dumps(about))
    assert rm.load_run(tmp_path / "run").inputs == Inputs(resize=8, channels=1)


# The user's code goes with the run

NET = """
from helper import WIDTH
from parts.layers import layers

def build(dim=WIDTH):
    from late import scale
    return layers(dim * scale)
"""
FILES = {
    "net.py": NET,
    "helper.py": "from deeper import WIDTH\n",
    "deeper.py": "WIDTH = 6\n",
    "late.py": "scale = 1\n",
    "unrelated.py": "raise RuntimeError\n",
    "parts/__init__.py": "",
    "parts/layers.py": "from torch import nn\nfrom .more import SIDE\n\n"
    "def layers(dim):\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, dim))\n",
    "parts/more.py": "SIDE = 8\n",
    "sets.py": """
import torch
from robustmetric.data import ImageSet, load

def mine(root, split, first=400):
    some = load("digits", root, split).take(range(first))
    return ImageSet("mine", split, some.labels, some.classes, pixels=some.pixels)
""",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with code of the user's."""
    for name, text in FILES.items():
        (tmp_path / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / name).write_text(text)
    return tmp_path / "home"


def trained(home: Path, out: Path, **changes: Any) -> RunFolder:
    entries = {**QUICK, "data": f"{home}/sets.py:mine(first=300)", "model": f"{home}/net.py:build", **changes}
    train(load_recipe("digits", entries), out, progress=False)
    return RunFolder(out, trust=True)


def test_files_are_copied_with_what_they_import(home: Path, tmp_path: Path) -> None:
    run = trained(home, tmp_path / "run")
    copied = {str(path.relative_to(run.code)) for path in run.code.rglob("*.py")}
    assert copied == FILES.keys() - {"unrelated.py"}
    text = run.recipe_file.read_text()
    assert "model: code/net.py:build  #" in text
    assert "data: code/sets.py:mine(first=300)  #" in text
    assert run.recipe().model == f"{run.code.absolute()}/net.py:build"
    assert run.name == "net.py:build N/A[R]"


def test_a_run_needs_neither_the_files_nor_the_working_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(home, tmp_path / "run")
    before = rm.load_run(run.path, trust=True).network.state_dict()
    shutil.rmtree(home)
    moved = RunFolder(shutil.move(run.path, tmp_path / "moved"), trust=True)
    monkeypatch.chdir("/")
    loaded = rm.load_run(moved.path, trust=True)
    assert loaded.network(torch.rand(2, 3, 8, 8)).shape == (2, 6)
    assert all(torch.equal(value, before[name]) for name, value in loaded.network.state_dict().items())
    assert moved.train_classes() == tuple("0123456789")
    train(moved.recipe({"epochs": 2}), moved.path, resume=True, progress=False)
    assert "epochs: 2" in moved.recipe_file.read_text()
    assert "model: code/net.py:build  #" in moved.recipe_file.read_text()


def test_copies_are_the_files_that_the_user_names(home: Path, tmp_path: Path) -> None:
    run = trained(home, tmp_path / "run")
    own = {"data": f"{home}/sets.py:mine(first=300)", "model": f"{home}/net.py:build"}
    entries = {**QUICK, **own, "epochs": 2}
    train(load_recipe("digits", entries), run.path, resume=True, progress=False)
    (home / "deeper.py").write_text("WIDTH = 9\n")
    with pytest.raises(UserError, match=r"holds other code than the files that you name \(deeper\.py\)"):
        train(load_recipe("digits", {**entries, "epochs": 3}), run.path, resume=True, progress=False)
    (run.code / "late.py").write_text("scale = 3\n")
    recipe = load_recipe("digits", {**entries, "epochs": 3})
    for use in (lambda: rm.load_run(run.path, trust=True), lambda: train(recipe, run.path, resume=True)):
        with pytest.raises(UserError, match=r"code were changed since the training.*restore them"):
            use()
