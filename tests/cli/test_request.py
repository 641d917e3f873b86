"""What cannot be evaluated is refused before anything is computed, in a line."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from robustmetric import load_record, save_weights
from robustmetric.cli.app import COMMANDS
from tests.cli.tables import DIGITS, ONE
from tests.helpers.command import command, refused, works

BAD: list[tuple[list[str], str]] = [
    (["evaluate"], "the folder of a run, or --model NAME with --weights FILE"),
    (["evaluate", "--out", "OUT"], "say what to evaluate: the folder of a run, or --model NAME"),
    (["evaluate", "--model", "c2f2"], "which images? give --data (cars, csv, cub, digits, "),
    (["attack", "--attack", "ES", "--model", "c2f2", "--out", "OUT"], "or FILE.py:NAME of your own)"),
    (["evaluate", "--model", "c2f2", "--data", "digits"], "say where the record goes: give a folder (--out)"),
    (["evaluate", "RUN", "--model", "c2f2"], "leave the model out, or give no run"),
    (["evaluate", "nowhere", "--model", "c2f2"], "a run and a model exclude each other"),
    (["evaluate", "--model", "nets.py", "--data", "cup"], "write FILE.py:FUNCTION, such as nets"),
    (["evaluate", "."], ". is no run, it has no recipe.yaml: give the folder of a run, or a"),
    (["evaluate", "nowhere"], "nowhere is no run"),
    (["evaluate", "RUN", "--weights", "nowhere.pt"], "there is no weights file nowhere.pt: give another"),
    (["evaluate", "RUN", "--attacks", "GTN"], "unknown attack 'GTN' (did you mean "),
    (["evaluate", "RUN", "--attacks", "CA+,CA+"], "an attack was given twice: CA+"),
    (["evaluate", "RUN", "--attacks", "CA+(k=2)"], "its options:"),
    (["evaluate", "RUN", "--attacks", "CA+(w=2"], "has no closing bracket"),
    (["evaluate", "RUN", "--attacks", "CA+(w=0)"], "w must be a whole number of at least 1, not 0"),
    (["evaluate", "RUN", "--attacks", "CA+(w=900)"], "w is 900, too many for a gallery of 797 images"),
    (["evaluate", "RUN", "--attacks", ","], "no attacks were given"),
    (["evaluate", "RUN", "--protocol", "strickt"], "protocol is 'strickt': input should be 'strict'"),
    (["evaluate", "RUN", "--search", "pdg"], "unknown search 'pdg' (did you mean 'pgd'?)"),
    (["evaluate", "RUN", "--search", "pgd(restarts=0)"], "whole number of at least 1, not 0\n"),
    (["evaluate", "RUN", "--search", "nes(sample=3)"], "its options: samples, sigma\n"),
    (["evaluate", "RUN", "--search", "transfer(x)", "--surrogate", "RUN"], "unknown search 'x'; known: apgd"),
    (["evaluate", "RUN", "--search", "psp"], "known: apgd, nes, pgd, spsa, square, transfer\n"),
    (["evaluate", "RUN", "--search", "transfer"], "transfer needs a network to come from: give"),
    (["evaluate", "RUN", "--search", "transfer", "--surrogate", "."],
        ". is no run: a surrogate is the folder of one, which train wrote (--surrogate)"),
    (["evaluate", "RUN", "--checks", "some"], "unknown set of checks 'some'"),
    (["evaluate", "RUN", "--eps", "abc"], "eps must be a number in [0, 1] such as 8/255"),
    (["evaluate", "RUN", "--eps", "8"], "eps must be in [0, 1], not 8.0: "),
    (["evaluate", "RUN", "--eps", "-1"], "such as 8/255 or 0.03, not '-1' (--eps)"),
    (["evaluate", "RUN", "--alpha", "0"], "alpha is 0.0: input should be greater than 0"),
    (["evaluate", "RUN", "--alpha", "1/0"], "alpha must be a number in (0, 1] such as"),
    (["evaluate", "RUN", "--steps", "0"], "steps is 0: input should be greater than or equal to 1"),
    (["evaluate", "RUN", "--device", "nonsense"], "auto, cpu, cuda or mps, not 'nonsense' (--device)"),
    (["evaluate", "RUN", "--data", "cup", "--queries", "0"], "queries is 0: "),
    (["evaluate", "RUN", "--queries", "798"], "queries must be from 1 to the number of images, 797, not 798"),
    (["evaluate", "RUN", "--data", "cup", "--batch", "0"], "batch is 0: "),
    (["evaluate", "RUN", "--data", "cup"], "unknown data set 'cup' (did you mean 'cub'?)"),
    (["evaluate", "--model", "resnet19", "--data", "cup"], "unknown model 'resnet19' (did you mean"),
    (["evaluate", "--model", "nowhere.py:f", "--data", "cup"], "there is no file nowhere.py"),
    (["attack", "RUN", "--attack", "GTN", "--out", "OUT"], "unknown attack 'GTN'"),
    (["attack", "RUN", "--attack", "ES", "--protocol", "x", "--out", "OUT"], "protocol is 'x': "),
    (["attack", "RUN", "--attack", "ES", "--queries", "0", "--out", "OUT"], "queries is 0: "),
    (["attack", "RUN", "--attack", "ES", "--eps", "abc", "--out", "OUT"], "not 'abc' (--eps)"),
    (["attack", "RUN", "--attack", "ES", "--search", "transfer", "--out", "OUT"], "folder of a run (--surr"),
    (["attack", "--attack", "ES", "--out", "OUT"], "say what to evaluate: the folder of a run"),
    (["compare", "nowhere"], "there is no record nowhere; give a record.json, or a folder that holds one"),
    (["evaluate", "RUN", "--device", "mps"], "(--device)"),
    (["evaluate", "RUN", "--device", "cuda:0"], "(--device)"),
    (["evaluate", "RUN", "--device", "meta"], "(--device)"),
    (["evaluate", "RUN", "--devices", "0"], "devices must be at least 1, not 0 (--devices)"),
    (["evaluate", "RUN", "--data", "cup", "--seed", "-1"], "seed is -1: "),
    (["evaluate", "RUN", "--seed", str(2**70)], "(--seed)"),
    (["evaluate", "RUN", "--surrogate", "RUN"], "--surrogate"),
    (["evaluate", "RUN", "--search", "transfr", "--surrogate", "RUN"], "transfer"),
    (["evaluate", "RUN", "--search", "transfer(restarts=9)", "--surrogate", "RUN"], "search"),
    (["evaluate", "RUN", "--out", "FILE"], "FILE is a file: give a folder for the evaluation"),
    (["evaluate", "RUN", "--out", "FILE/x"], "the folder FILE/x cannot be written to (Not a dir"),
    (["evaluate", "RUN", "--split", "train"], "unknown split 'train'; known: all, test"),
    (["evaluate", "RUN", "--out", "LINK"], "LINK cannot be written to (a link that leads nowhere): give"),
    (["evaluate", "--model", "c2f2", "--data", "folder", "--root", "none", "--weights", "none.pth"],
     "there is no weights file none.pth: give another file (--weights)"),
    (["attack", "RUN", "--attack", "ES", "--out", "FILE"], "FILE is not empty: give another folder (--out)"),
    (["attack", "RUN", "--attack", "ES", "--out", "FILE/x/y"], "FILE/x/y cannot be written to (Not a"),
    (["attack", "RUN", "--attack", "ES", "--batch", "0", "--out", "OUT"], "batch is 0: "),
]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="for a CPU alone")
@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_mistakes_are_said_in_a_line(
    arguments: list[str], message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("no folder")
    Path("LINK").symlink_to("nowhere")
    out = [] if "--out" in arguments or arguments[0] != "evaluate" else ["--out", "OUT"]
    if "the record goes" in message or len(arguments) == 1:
        out = []
    if arguments[0] == "evaluate" and arguments[1:]:
        out += [option for pair in zip(ONE[::2], ONE[1::2], strict=True) if pair[0] not in arguments
                for option in pair]  # fmt: skip
    given = [str(run) if argument == "RUN" else argument for argument in arguments]
    said = refused(*given, *out)
    assert message in said
    assert not list(tmp_path.rglob("*.safetensors")), "something was computed before it was refused"


def test_weights_that_do_not_fit_are_listed_all(weights: Path, tmp_path: Path) -> None:
    whole = load_file(weights)
    for name in ("conv1.bias", "fc2.weight"):
        whole[f"other.{name}"] = whole.pop(name)
    save_weights(whole, tmp_path / "odd.safetensors")
    options = ["--weights", tmp_path / "odd.safetensors", "--out", tmp_path / "out"]
    said = refused("evaluate", "--model", "c2f2", *DIGITS, *options)
    assert "missing from the file: conv1.bias, fc2.weight" in said
    assert "not in the model: other.conv1.bias, other.fc2.weight" in said
    assert not (tmp_path / "out").exists()


def test_another_last_layer_is_refused(mine: Path, tmp_path: Path) -> None:
    file = tmp_path / "imagenet.safetensors"
    save_weights({"fc.weight": torch.zeros(1000, 192), "fc.bias": torch.zeros(1000)}, file)
    options = ["--model", f"{mine}:network", *DIGITS, "--weights", file, "--out", tmp_path / "out"]
    said = refused("evaluate", *options)
    assert "another last layer than the network (fc.weight, fc.bias)" in said
    assert "these are not the weights of this embedding" in said


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self.file, "w")


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_pickle_is_refused_and_not_run(form: str, tmp_path: Path) -> None:
    file, trace = tmp_path / "weights.pt", tmp_path / "was-run"
    if form == "torch":
        torch.save({"state_dict": Payload(trace)}, file)
    else:
        file.write_bytes(pickle.dumps(Payload(trace)))
    said = refused("evaluate", "--model", "c2f2", *DIGITS, "--weights", file, "--out", tmp_path / "out")
    assert "is not plain weights: it was refused, and nothing in it was run" in said
    assert not trace.exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("pair", "the network returned a tuple for 1 images; it must return floats of shape (1, D)"),
        ("maps", "the network returned float32 of shape (1, 4, 6, 6) for 1 images; it must return floats"),
        ("needy", "mine.py:needy' missing a required argument: 'k'; its options: k"),
        ("narrow", "the network failed on images of shape (1, 3, 8, 8) and type float32 (RuntimeError: mat1"),
        ("number", "mine.py:number' made a int; it must make a Module"),
        ("nothing", "mine.py: unknown name 'nothing'; known: Network, Twice, broken, maps"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("what", ["evaluate", "attack"])
def test_networks_that_give_something_else(
    function: str, message: str, what: str, mine: Path, tmp_path: Path
) -> None:
    options = ["--model", f"{mine}:{function}", *DIGITS, "--out", tmp_path / "out"]
    said = refused(what, *options, *([] if what == "evaluate" else ["--attack", "ES"]))
    assert message in said


@pytest.mark.parametrize("what", ["evaluate", "attack"])
def test_a_network_that_cannot_be_made_shows_its_own_traceback(what: str, mine: Path, tmp_path: Path) -> None:
    options = ["--model", f"{mine}:broken", *DIGITS, "--out", tmp_path / "out"]
    said = command(what, *options, *([] if what == "evaluate" else ["--attack", "ES"]))
    line = 1 + mine.read_text().splitlines().index('    return {}["layers"]')
    assert said.code == 1
    assert said.err.startswith(f"error: {mine}:broken failed with KeyError: 'layers'\n")
    assert said.err.count("Traceback") == 1
    assert f'File "{mine}", line {line}, in broken' in said.err
    assert not (tmp_path / "out").exists()


def test_weights_of_ones_own_for_a_run_that_has_none(run: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    given = ["--weights", run / "last.safetensors", "--out", tmp_path / "out"]
    works("evaluate", tmp_path / "bare", *given, *ONE)
    assert load_record(tmp_path / "out").network.weights is None
    assert "there are no weights" in refused("evaluate", tmp_path / "bare", *ONE)


def test_weights_of_nan(weights: Path, tmp_path: Path) -> None:
    broken = load_file(weights)
    broken["fc2.bias"][3] = torch.nan
    save_weights(broken, weights)
    said = refused("evaluate", "--model", "c2f2", *DIGITS, "--weights", weights, "--out", tmp_path / "out")
    assert "1 of 1 embeddings hold NaN or infinity" in said
    assert "weights are damaged" in said


def test_a_crop_larger_than_the_images(tmp_path: Path) -> None:
    options = ["--model", "resnet18", *DIGITS, "--crop", 12, "--out", tmp_path / "out", *ONE]
    assert "a crop of 12 does not fit images of 8×8" in refused("evaluate", *options)


def test_a_folder_that_holds_something_else(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("\\section{}")
    said = refused("evaluate", run, "--out", tmp_path / "out")
    assert "is not empty and holds no evaluation: give another folder (--out)" in said
    (tmp_path / "out" / "thesis.tex").rename(tmp_path / "out" / "plan.json")
    assert "plan.json" in refused("evaluate", run, "--out", tmp_path / "out")


def test_brackets_in_a_path_are_printed(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run[bold]1"
    assert f"the record is in {out}" in works("evaluate", run, "--out", out, *ONE)
    out = tmp_path / "images[bold]1"
    printed = works("attack", run, "--attack", "ES", "--queries", 2, "--steps", 1, "--out", out)
    assert f"are in {out}" in printed


def test_only_what_transfers_takes_a_surrogate() -> None:
    takes = {name for name in COMMANDS if "--surrogate" in works(name, "--help")}
    assert takes == {"evaluate", "attack"}
