"""What a command line asks for: resolved, or rejected in a line before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from robustmetric import load_record, save_weights
from robustmetric.cli.app import COMMANDS
from tests.cli.tables import DIGITS, ONE
from tests.helpers.command import command, refused, works

BAD: list[tuple[str, str]] = [
    ("evaluate", "no network: give the folder of a run, or --model NAME"),
    ("evaluate --model c2f2", "no images: give --data NAME, and its --root (--data)"),
    ("evaluate --model c2f2 --data digits", "give a folder for the evaluation (--out)"),
    ("evaluate RUN --model c2f2 --out OUT", "a run has its own network: leave c2f2 out"),
    ("evaluate RUN --dim 8 --out OUT", "(--dim)"),
    ("evaluate --model nets.py --data cup --out OUT", "write FILE.py:FUNCTION, such as nets"),
    ("evaluate nowhere", "'nowhere' is not a run folder: no recipe.yaml in it"),
    ("evaluate RUN --weights nowhere.pt --out OUT", "there is no weights file nowhere.pt"),
    ("evaluate RUN --attacks CA+(w=900) --out OUT", "w is 900, too many for a gallery of 797 images"),
    ("evaluate RUN --search transfer --out OUT", "transfer needs a surrogate: give the folder"),
    ("evaluate RUN --surrogate RUN --out OUT", "needs the search transfer or a suite, not 'pgd' alone"),
    ("evaluate RUN --queries 798 --out OUT", "from 1 to the number of images, 797, not 798"),
    ("evaluate RUN --data cup --out OUT", "unknown data set 'cup' (did you mean 'cub'?)"),
    ("evaluate RUN --gallery nowhere --out OUT", "there is no nowhere to take images from"),
    ("evaluate RUN --curves --out OUT", "give --report FILE"),
    ("evaluate RUN --out FILE", "FILE is a file: give a folder for the evaluation"),
    ("evaluate RUN --out LINK", "LINK cannot be written to (a link that leads nowhere)"),
    ("evaluate RUN --device mps --out OUT", "torch finds no mps here: use cpu (--device)"),
    ("certify RUN", "give the standard deviation of the noise, such as 0.25 (--sigma)"),
    ("certify RUN --sigma 0.25 --failure-probability 0.6", "(--failure-probability)"),
    ("certify RUN --sigma 0", "(--sigma)"),
    ("certify RUN --sigma 1 --radii 1,0.5", "such as 0.25,0.5,1, not '1,0.5'"),
    ("certify RUN --sigma 1 --samples 14", "nothing can be certified with fewer than 15"),
    ("certify RUN --sigma 1 --search nes", "search 'nes' has no budget of the norm l2"),
    ("verify RUN --eps 8", "eps must be in [0, 1], not 8.0"),
    ("verify RUN --pairs nowhere.csv", "there is no list of pairs nowhere.csv"),
    ("verify RUN --pairs x --gallery .", "pairs name their images: leave --gallery"),
    ("verify RUN --far 0.01 --threshold 1", "(--far)"),
    ("attack RUN --attack GTN --out OUT", "unknown attack 'GTN'"),
]


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="for a CPU alone")
@pytest.mark.parametrize(("line", "message"), BAD)
def test_what_cannot_be_is_rejected_in_a_line(
    line: str, message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("no folder")
    Path("LINK").symlink_to("nowhere")
    assert message in refused(*(str(run) if word == "RUN" else word for word in line.split()))
    assert not list(tmp_path.rglob("*.safetensors")), "something was computed before it was rejected"


@pytest.mark.parametrize("what", ["evaluate", "attack"])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("pair", "the network returned a tuple for 1 images; it must return floats of shape (1, D)"),
        ("narrow", "the network failed on images of shape (1, 3, 8, 8) and type float32 (RuntimeError: mat1"),
    ],
)
def test_networks_are_tried_before_images_are_decoded(
    function: str, message: str, what: str, mine: Path, tmp_path: Path
) -> None:
    options = ["--model", f"{mine}:{function}", *DIGITS, "--out", tmp_path / "out"]
    assert message in refused(what, *options, *([] if what == "evaluate" else ["--attack", "ES"]))


def test_a_network_that_cannot_be_made_shows_its_own_traceback(mine: Path, tmp_path: Path) -> None:
    said = command("evaluate", "--model", f"{mine}:broken", *DIGITS, "--out", tmp_path / "out")
    line = 1 + mine.read_text().splitlines().index('    return {}["layers"]')
    assert said.code == 1
    assert said.err.count("Traceback") == 1
    assert f'File "{mine}", line {line}, in broken' in said.err


def test_weights_of_the_user_for_a_run_that_has_none(run: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    works(
        "evaluate", tmp_path / "bare", "--weights", run / "last.safetensors", "--out", tmp_path / "out", *ONE
    )
    assert load_record(tmp_path / "out").network.weights is None
    assert "there are no weights" in refused("evaluate", tmp_path / "bare", *ONE)


def test_a_folder_that_holds_something_else(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("\\section{}")
    said = refused("evaluate", run, "--out", tmp_path / "out")
    assert "is not empty and holds no evaluation: give another folder (--out)" in said
    (tmp_path / "out" / "thesis.tex").rename(tmp_path / "out" / "plan.json")
    assert "plan.json" in refused("evaluate", run, "--out", tmp_path / "out")


def test_a_surrogate_of_another_size_is_rejected(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "own.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(144, 4))\n"
    )
    save_weights({"1.weight": torch.ones(4, 144), "1.bias": torch.zeros(4)}, there / "best.safetensors")
    (there / "recipe.yaml").write_text(f"data: digits\nmodel: {there}/own.py:net\ncrop: 12\nresize: 12\n")
    how = ["--suite", "worst-case(goals='shift')", "--surrogate", there, "--trust"]
    said = refused("evaluate", run, "--out", tmp_path / "out", *ONE, *how)
    assert said.startswith("error: the surrogate does not fit the images: ")
    assert not (tmp_path / "out").exists()


def test_only_what_transfers_takes_a_surrogate() -> None:
    assert {name for name in COMMANDS if "--surrogate" in works(name, "-h")} == {"evaluate", "attack"}
