"""Evaluate, attack and compare as a user does it: through the entry point, with real signals.

This file is also the program that the tests of interruptions start (see tests/helpers/processes.py).
"""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from robustmetric import attack, cli, load_record, model, save_weights
from robustmetric.cli.show import Watch, arrow, show_scores
from robustmetric.evaluation import COLUMNS, Record
from robustmetric.evaluation.checks import CHECKS
from robustmetric.evaluation.record import load_arrays, show
from robustmetric.evaluation.store import Store
from robustmetric.evaluation.workers import WorkerError
from robustmetric.models.c2f2 import C2F2
from robustmetric.training import load_recipe
from robustmetric.training.inputs import Subject, pixels
from tests.helpers.command import Clock, cells, command, refused, works
from tests.helpers.processes import (
    alive,
    at_call,
    die,
    forked,
    needs_fork,
    needs_proc,
    run_program,
    stop_by,
    until,
)
from tests.helpers.runs import make_run

PAPER = "R@1 ↑,R@2 ↑,mAP ↑,NMI ↑,CA+ ↑,CA− ↓,QA+ ↑,QA− ↓,TMA ↓,ES:D ↓,ES:R ↑,LTM ↑,GTM ↑,GTT ↑,ERS ↑"
SMALL = ("--queries", "12", "--steps", "3", "--batch", "5")
DIGITS = ("--data", "digits")
OTHER: dict[str, Any] = {"dim": 12, "defense": "N/A[S]", "eps": 0.1}
ONE = ("--queries", "6", "--steps", "2", "--checks", "none", "--attacks", "CA+")


def scores_in(text: str) -> dict[str, dict[str, str]]:
    """Read the tables of scores: for each network, the cells by their heads."""
    found: dict[str, dict[str, str]] = {}
    head: list[str] = []
    for line in text.splitlines():
        if line.startswith("┃"):
            head = cells(line)[1:]
        elif line.startswith("│"):
            name, *values = cells(line)
            found.setdefault(name, {}).update(zip(head, values, strict=True))
    return found


BEFORE = "before the attack"


def expected(record: Record) -> dict[str, dict[str, str]]:
    """What the paper's columns of a record must show, by row."""
    found, before = {}, {}
    for head in PAPER.split(","):
        name = head.split()[0].replace("−", "-")
        if name in {**record.retrieval, **record.scores}:
            found[head] = show(name, record[name])
            before[head] = show(name, record.scores[name].before) if name in record.scores else ""
    if record.ers is not None:
        found["ERS ↑"] = show("ERS", record.ers.value) + ("" if record.ers.valid else " invalid")
        before["ERS ↑"] = ""
    return {record.network.name: found, BEFORE: before}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("record.json", "queries.safetensors")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch on digits."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    works("train", "--epochs", 1, "--steps", 1, "--defense", "N/A[S]", "--set", "dim=16", "--out", folder)
    return folder


@pytest.fixture(scope="module")
def whole(run: Path) -> tuple[Path, str]:
    """The run's evaluation as it should be: its folder and what was printed."""
    return run / "evaluation", works("evaluate", run, *SMALL)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of a c2f2 for digits with 512 outputs, drawn at random."""
    torch.manual_seed(3)
    save_weights(model("c2f2", size=8, dim=512), tmp_path / "c2f2.safetensors")
    return tmp_path / "c2f2.safetensors"


# What is printed and kept


def test_the_table_has_the_paper_columns_and_the_values_of_the_record(whole: tuple[Path, str]) -> None:
    folder, printed = whole
    assert {file.name for file in folder.iterdir()} == {"plan.json", "record.json", "queries.safetensors"}
    record = load_record(folder)
    table = scores_in(printed)
    assert table == expected(record)
    assert list(table["c2f2 N/A[S]"]) == PAPER.split(",")
    assert len(record.checks) == sum(check.level <= 1 for check in CHECKS.values())
    for check in record.checks:
        assert re.search(rf"^ {check.name} +{check.status} ", printed, re.MULTILINE), check.name
    assert record.ers is not None
    low, high = (show("ERS", value) for value in (record.ers.low, record.ers.high))
    beside = f"ERS {record['ERS']:.1f} ({low} to {high}) at R@1"
    asked = "12 of 797 images of 10 classes attacked; digits 8×8; strict"
    assert f"c2f2 N/A[S]: {beside} {record['R@1']:.1f}; {asked}" in printed
    assert "ε = 51/255, α = 3/255, η = 3, pgd" in printed
    assert f"the record is in {folder}" in printed
    arrays = load_arrays(folder)
    assert len(arrays["number"]) == 12
    for name in record.scores:
        (attack,) = {COLUMNS[name].attack}
        values = arrays[f"{attack}/after/{name}"].double()
        assert record[name] == pytest.approx(float(values.mean()), abs=1e-9)


def test_the_stages_are_told_once_each(whole: tuple[Path, str]) -> None:
    told = re.findall(r"^(\S+): done(, about \d+ s left)?$", whole[1], re.MULTILINE)
    attacks = ["CA+", "CA-", "QA+", "QA-", "TMA", "ES", "LTM", "GTM", "GTT"]
    assert [stage for stage, _ in told] == ["embed", "retrieval", *attacks, "checks"]
    assert [stage for stage, left in told if left] == attacks[:-1]


@pytest.mark.parametrize(
    ("stages", "done", "left"),
    [
        # Each block takes 60 s: what is left counts all attacks, from the first block on.
        ({"A": (0, 2), "B": (0, 2)}, ["A"], "about 3 min left"),
        ({"A": (0, 2), "B": (0, 2)}, ["A", "A"], "about 2 min left"),
        ({"A": (0, 1), "B": (0, 1)}, ["A"], "about 60 s left"),
        # What was there when a resumed evaluation began took no time, and none is known at first.
        ({"A": (5, 6), "B": (0, 1)}, ["A"], "about 60 s left"),
        ({"A": (6, 6), "B": (5, 8)}, ["B"], "about 2 min left"),
        ({"A": (6, 6), "B": (5, 8)}, [], ""),
        ({"A": (0, 1)}, ["A"], ""),
    ],
)
@pytest.mark.parametrize("terminal", [True, False])
def test_the_time_left_is_that_of_all_attacks(
    stages: dict[str, tuple[int, int]], done: list[str], left: str, terminal: bool
) -> None:
    text, clock = io.StringIO(), Clock()
    watch = Watch(Console(file=text, force_terminal=terminal, width=100), clock)
    resumed = any(count for count, _ in stages.values())
    begun = (int(resumed), 1)
    first = {"embed": begun, "retrieval": begun, **stages, "checks": (0, 1), "none": (0, 0)}
    for stage, (count, total) in first.items():
        watch(stage, count, total)
    for stage in () if resumed else ("embed", "retrieval"):
        clock.now += 1000
        watch(stage, 1, 1)
    counts = {stage: count for stage, (count, _) in stages.items()}
    for stage in done:
        clock.now += 60
        counts[stage] += 1
        watch(stage, counts[stage], stages[stage][1])
    assert [task.fields["left"] for task in watch.bar.tasks if task.fields["left"]] == [left] * bool(left)
    told = text.getvalue().splitlines()
    assert not any(line.startswith("none") for line in told)
    whole = [stage for stage in done[-1:] if counts[stage] == stages[stage][1]]
    assert terminal or not whole or told[-1] == ", ".join(filter(None, (f"{whole[0]}: done", left)))


@pytest.mark.parametrize(
    ("score", "shown"),
    [
        ("QA-(m=5)", "QA−(m=5) ↓"),
        ("CA-(w=5)", "CA−(w=5) ↓"),
        ("CA+(w=5)", "CA+(w=5) ↑"),
        ("QA+", "QA+ ↑"),
        ("SP-QA+(m=2)", "SP-QA+(m=2) ↑"),
        ("SP-QA-", "SP-QA− ↓"),
        ("SP-QA-(m=2):keep", "SP-QA-(m=2):keep"),
        ("ES:D", "ES:D ↓"),
        ("mAP", "mAP ↑"),
        ("a distance of my own", "a distance of my own"),
    ],
)
def test_arrows_point_to_the_better_side(score: str, shown: str) -> None:
    assert arrow(score) == shown


def test_a_finished_evaluation_is_shown_at_once(
    run: Path, whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first = whole
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}

    def no_more(*_: object) -> Tensor:
        raise AssertionError("the network was asked again")

    monkeypatch.setattr(C2F2, "forward", no_more)
    second = works("evaluate", run, *SMALL)
    assert "done" not in second
    assert first.endswith(second)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_other_settings_do_not_go_into_the_same_folder(run: Path, whole: tuple[Path, str]) -> None:
    before = contents(whole[0])
    said = refused("evaluate", run, *SMALL[:-2], "--batch", 6, "--eps", "8/255", "--attacks", "CA+")
    assert "holds another evaluation" in said
    for difference in ("eps was 0.2, is 0.0313", "batch was 5, is 6", "attacks was"):
        assert difference in said
    assert "give another --out folder" in said
    assert contents(whole[0]) == before


def shown(record: Record, width: int) -> str:
    text = io.StringIO()
    show_scores(Console(width=width, file=text, force_terminal=True, color_system=None), [record])
    return re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())


@pytest.mark.parametrize(("width", "count"), [(160, 1), (110, 2)])
def test_a_narrow_terminal_gets_two_tables(whole: tuple[Path, str], width: int, count: int) -> None:
    record = load_record(whole[0])
    text = shown(record, width)
    assert text.count("┏") == count
    rows = scores_in(text)
    assert rows["c2f2 N/A[S]"] == expected(record)["c2f2 N/A[S]"]
    assert rows[BEFORE]["TMA ↓"] == expected(record)[BEFORE]["TMA ↓"]
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 100, 125, 131, 133, 135, 137])
def test_no_figure_is_cut_at_any_width(whole: tuple[Path, str], width: int) -> None:
    record = load_record(whole[0])
    text = shown(record, width)
    assert "…" not in text
    for row in expected(record).values():
        for value in row.values():
            for word in value.split():
                assert word in text


def test_the_width_of_the_terminal_counts(whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "110", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert works("compare", whole[0]).count("┏") == 2
    monkeypatch.setenv("COLUMNS", "170")
    assert works("compare", whole[0]).count("┏") == 1


def test_a_terminal_gets_bars(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "170", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    printed = works("evaluate", run, "--out", tmp_path / "out", *ONE)
    assert "CA+: done" not in printed
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed)
    assert re.search(r"embed +━+ 1/1", plain)
    assert re.search(r"CA\+ +━+ 1/1", plain)


# Networks


NETWORK = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 8)

    def forward(self, images):
        return self.fc(images.flatten(1))

def network():
    return Network()

class Twice(Network):
    def forward(self, images):
        return super().forward(images), images

def pair():
    return Twice()

def maps():
    return nn.Conv2d(3, 4, 3)

def number():
    return 3

def needy(k):
    return Network()

def broken():
    return {}["layers"]

def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(27, 8))
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(NETWORK)
    return file


def test_a_network_of_a_file_with_its_weights(mine: Path, tmp_path: Path) -> None:
    linear = nn.Linear(192, 8)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(8, 192, generator=torch.Generator().manual_seed(0)))
        linear.bias.zero_()
    file = tmp_path / "w.safetensors"
    save_weights({"fc.weight": linear.weight, "fc.bias": linear.bias}, file)
    out = tmp_path / "out"
    printed = works("evaluate", "--model", f"{mine}:network", *DIGITS, "--weights", file, "--out", out, *ONE)
    assert "no weights were given" not in printed
    record = load_record(out)
    assert (record.network.name, record.network.parameters) == (f"{mine}:network w.safetensors", 192 * 8 + 8)
    assert (record.data.name, record.data.shape) == ("digits", [3, 8, 8])
    assert record.settings.eps == load_recipe("digits").eps
    # The same R@1 by a loop: the nearest other image by the product of unit vectors.
    (test,) = pixels(load_recipe("digits"), splits=["test"])
    colours = torch.from_numpy(np.repeat(test.pixels.transpose(0, 3, 1, 2), 3, axis=1).copy()).float() / 255
    with torch.no_grad():
        z = nn.functional.normalize(linear(colours.flatten(1)).double())
    hits = 0
    for i in range(len(z)):
        near = z @ z[i]
        near[i] = -2
        hits += int(test.labels[int(near.argmax())] == test.labels[i])
    assert record["R@1"] == pytest.approx(100 * hits / len(z), abs=0.3)


def test_a_network_by_name_with_and_without_weights(weights: Path, tmp_path: Path) -> None:
    printed = works(
        "evaluate", "--model", "c2f2", *DIGITS, "--weights", weights, "--out", tmp_path / "with", *ONE
    )
    assert "no weights were given" not in printed
    record = load_record(tmp_path / "with")
    assert record.network.name == "c2f2 c2f2.safetensors"
    printed = works("evaluate", "--model", "c2f2", "--data", "digits", "--out", tmp_path / "without", *ONE)
    assert "no weights were given: the network is as it is made" in printed
    other = load_record(tmp_path / "without")
    assert other.network.name == "c2f2"
    assert other.network.sha256 != record.network.sha256
    assert other.data.sha256 == record.data.sha256


def test_other_weights_of_a_run(run: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    save_weights(model("c2f2", size=8, dim=16), tmp_path / "other.safetensors")
    works("evaluate", run, "--weights", tmp_path / "other.safetensors", "--out", tmp_path / "out", *ONE)
    works("evaluate", run, "--out", tmp_path / "own", *ONE)
    other, own = load_record(tmp_path / "out"), load_record(tmp_path / "own")
    assert other.network.sha256 != own.network.sha256
    assert other["R@1"] < own["R@1"]


def test_a_network_by_name_takes_entries_of_its_recipe(run: Path, tmp_path: Path) -> None:
    weights = ["--weights", run / "best.safetensors", "--set", "dim=16"]
    works("evaluate", "--model", "c2f2", *DIGITS, *weights, "--out", tmp_path / "by-name", *ONE)
    works("evaluate", run, "--out", tmp_path / "run", *ONE)
    by_name, of_run = load_record(tmp_path / "by-name"), load_record(tmp_path / "run")
    assert by_name.network.sha256 == of_run.network.sha256
    assert (by_name.retrieval, by_name.scores) == (of_run.retrieval, of_run.scores)


# Options


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--protocol", "reference"], {"protocol": "reference"}),
        (["--eps", "8/255", "--alpha", "1/255"], {"eps": 8 / 255, "alpha": 1 / 255, "steps": 2}),
        (["--steps", "3"], {"eps": 0.2, "steps": 3}),
        (["--eps", "0.05"], {"eps": 0.05, "alpha": 3 / 255}),
        ([], {"eps": 0.2, "protocol": "strict", "search": "pgd"}),
        (["--search", "pgd(restarts=2)"], {"search": "pgd(restarts=2)"}),
        (["--search", "nes(samples=2)"], {"search": "nes(samples=2)"}),
        (["--search", "spsa(samples=2,sigma=0.1)"], {"search": "spsa(samples=2, sigma=0.1)"}),
        (["--queries", "4", "--seed", "7"], {"queries": 4, "seed": 7}),
        (["--batch", "2", "--checks", "quick"], {"batch": 2, "checks": "quick"}),
        (
            ["--attacks", "CA+(w=3), SP-QA+(m=2,keep=3), QA−"],
            {"attacks": ["CA+(w=3)", attack("SP-QA+(m=2,keep=3)").name, "QA-"]},
        ),
    ],
)  # fmt: skip
def test_options_reach_the_record(
    options: list[str], wanted: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    printed = works("evaluate", run, "--out", tmp_path / "out", *ONE, *options)
    record = load_record(tmp_path / "out")
    assert {name: getattr(record.settings, name) for name in wanted} == wanted
    assert record.queries.count == wanted.get("queries", 6)
    arrays = load_arrays(tmp_path / "out")
    drawn = torch.randperm(797, generator=torch.Generator().manual_seed(wanted.get("seed", 0)))
    assert arrays["number"].tolist() == sorted(drawn[: record.queries.count].tolist())
    for name in record.settings.attacks:
        assert float(arrays[f"{name}/change"].max()) <= record.settings.eps + 1e-6
    # Not all ten scores: no ERS, and no word of one.
    assert record.ers is None
    assert "ERS" not in printed
    assert f"{record.settings.protocol} protocol" in printed
    assert (len(record.checks) > 1) == ("quick" in options) == (" repeat " in printed)
    row = scores_in(printed)["c2f2 N/A[S]"]
    assert [float(value) for value in row.values()][:4] == [
        round(record[n], 1) for n in ("R@1", "R@2", "mAP", "NMI")
    ]
    assert len(row) == 4 + len(record.scores)


def test_the_batch_changes_no_score(run: Path, tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []
    for batch in (4, 128):
        options = ["--batch", batch, "--attacks", "QA+,ES,TMA"]
        works("evaluate", run, "--out", tmp_path / f"{batch}", *ONE, *options)
        found.append(load_arrays(tmp_path / f"{batch}"))
    # Ranks in %: one of 797 images may change places by rounding.
    allowed = {"QA+/after/QA+": 0.2, "ES/after/ES:D": 1e-3, "TMA/after/TMA": 1e-3, "QA+/target": 0}
    for name, most in {**allowed, "retrieval/R@1": 0}.items():
        first, second = (arrays[name].double() for arrays in found)
        assert torch.allclose(first, second, rtol=0, atol=most), name


def test_other_seeds_draw_other_targets(run: Path, tmp_path: Path) -> None:
    found: list[Path] = []
    for seed in (0, 0, 1):
        out = tmp_path / f"{len(found)}"
        works("evaluate", run, "--out", out, *ONE, "--queries", 40, "--steps", 1, "--seed", seed)
        found.append(out)
    assert contents(found[0]) == contents(found[1])
    first, other = (load_arrays(found[k]) for k in (0, 2))
    assert not torch.equal(first["number"], other["number"])
    assert (first["CA+/target"] != other["CA+/target"]).float().mean() > 0.9


def test_transfer_comes_from_the_surrogate(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", "best", first=1, **OTHER)
    direct, there = tmp_path / "direct", tmp_path / "there"
    options = [*ONE, "--attacks", "ES", "--queries", 20]
    works("evaluate", run, "--out", direct, *options)
    works("evaluate", run, "--out", there, *options, "--search", "transfer", "--surrogate", other)
    record = load_record(there)
    assert record.settings.search == "transfer(pgd)"
    assert record.network.sha256 == load_record(direct).network.sha256
    assert record.network.surrogate not in (None, record.network.sha256)
    assert 0 < record["ES:D"] < load_record(direct)["ES:D"]


def test_a_surrogate_is_the_network_of_its_own_run(mine: Path, tmp_path: Path) -> None:
    # A network of the same images, three channels, with a recipe of its own.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "recipe.yaml").write_text("data: digits\nmodel: resnet18\ndim: 8\n")
    save_weights(model("resnet18", dim=8), tmp_path / "other" / "best.safetensors")
    options = ["--search", "transfer", "--surrogate", tmp_path / "other", *ONE, "--attacks", "ES"]
    works("evaluate", "--model", f"{mine}:network", *DIGITS, "--out", tmp_path / "out", *options)
    assert load_record(tmp_path / "out").network.surrogate is not None


@pytest.mark.parametrize(("grey", "told"), [
    (True, "best.safetensors is of a c2f2 for images with 1 channel, and these have 3: c2f2 gets one"),
    (False, "images have shape (1, 1, 8, 8); this network takes (B, 3, H, W)"),
])  # fmt: skip
def test_a_surrogate_for_images_with_other_channels(
    grey: bool, told: str, run: Path, mine: Path, tmp_path: Path
) -> None:
    other = tmp_path / "colour"
    other.mkdir()
    (other / "recipe.yaml").write_text("data: digits\nmodel: resnet18\ndim: 8\n")
    save_weights(model("resnet18", dim=8), other / "best.safetensors")
    attacked = ["--model", f"{mine}:network", *DIGITS] if grey else [run]
    transfer = ["--search", "transfer", "--surrogate", run if grey else other]
    said = refused("evaluate", *attacked, *transfer, "--out", tmp_path / "out", *ONE)
    assert said.startswith("error: the surrogate does not fit the images: ")
    assert told in said


@pytest.mark.slow
def test_all_images_or_those_of_the_test(run: Path, tmp_path: Path) -> None:
    printed = works("evaluate", run, "--split", "all", "--out", tmp_path / "all", *ONE)
    assert "6 of 1797 images of 10 classes attacked; digits (all) 8×8; " in printed
    works("evaluate", run, "--split", "all", "--devices", 2, "--out", tmp_path / "shared", *ONE)
    assert contents(tmp_path / "shared") == contents(tmp_path / "all")


def test_options_of_an_attack_are_part_of_the_evaluation(run: Path, tmp_path: Path) -> None:
    works("evaluate", run, "--out", tmp_path / "out", *ONE, "--attacks", "SP-QA+(keep=3)")
    before = contents(tmp_path / "out")
    said = command("evaluate", run, "--out", tmp_path / "out", *ONE, "--attacks", "SP-QA+(keep=9)")
    assert said.code == 1, "the record of keep=3 was given for keep=9"
    assert "holds another evaluation" in said.err
    assert contents(tmp_path / "out") == before


# Mistakes


BAD: list[tuple[list[str], str]] = [
    (["evaluate"], "the folder of a run, or --model NAME with --weights FILE"),
    (["evaluate", "--out", "OUT"], "say what to evaluate: the folder of a run, or --model NAME"),
    (["evaluate", "--model", "c2f2"], "which images? give --data (digits, mnist, fashion-mnist, cub, "),
    (["attack", "--attack", "ES", "--model", "c2f2", "--out", "OUT"], "folder, csv) and --root"),
    (["evaluate", "--model", "c2f2", "--data", "digits"], "say where the record goes: --out FOLDER"),
    (["evaluate", "RUN", "--model", "c2f2"], "leave --model out, or give no run"),
    (["evaluate", "nowhere", "--model", "c2f2"], "a run and --model exclude each other"),
    (["evaluate", "--model", "nets.py", "--data", "cup"], "write --model FILE.py:FUNCTION, such"),
    (["evaluate", "."], ". is no run, it has no recipe.yaml: give the folder of a run, or --model"),
    (["evaluate", "nowhere"], "nowhere is no run"),
    (["evaluate", "RUN", "--weights", "nowhere.pt"], "there is no weights file nowhere.pt"),
    (["evaluate", "RUN", "--attacks", "GTN"], "unknown attack 'GTN' (did you mean "),
    (["evaluate", "RUN", "--attacks", "CA+,CA+"], "an attack was given twice: CA+"),
    (["evaluate", "RUN", "--attacks", "CA+(k=2)"], "its options:"),
    (["evaluate", "RUN", "--attacks", "CA+(w=2"], "has no closing bracket"),
    (["evaluate", "RUN", "--attacks", "CA+(w=0)"], "w must be a whole number of at least 1, not 0"),
    (["evaluate", "RUN", "--attacks", "CA+(w=900)"], "w is 900, too many for a gallery of 797 images"),
    (["evaluate", "RUN", "--attacks", ","], "no attacks were given"),
    (["evaluate", "RUN", "--protocol", "strickt"], "unknown protocol 'strickt' (did you mean 'strict'?)"),
    (["evaluate", "RUN", "--search", "pdg"], "unknown search 'pdg' (did you mean 'pgd'?)"),
    (["evaluate", "RUN", "--search", "pgd(restarts=0)"], "whole number of at least 1, not 0\n"),
    (["evaluate", "RUN", "--search", "nes(sample=3)"], "its options: samples, sigma\n"),
    (["evaluate", "RUN", "--search", "transfer(x)", "--surrogate", "RUN"], "known: nes, pgd, spsa\n"),
    (["evaluate", "RUN", "--search", "psp"], "nes, pgd, spsa; or transfer, with --surrogate\n"),
    (["evaluate", "RUN", "--search", "transfer"], "transfer needs a network to come from: give --surrogate"),
    (["evaluate", "RUN", "--search", "transfer", "--surrogate", "."],
        ". is no run, it has no recipe.yaml: --surrogate takes the folder of a run, which robustmetric"),
    (["evaluate", "RUN", "--checks", "some"], "unknown set of checks 'some'"),
    (["evaluate", "RUN", "--eps", "abc"], "--eps must be a number in [0, 1] such as 8/255 or"),
    (["evaluate", "RUN", "--eps", "8"], "--eps must be in [0, 1], not 8.0"),
    (["evaluate", "RUN", "--eps", "-1"], "--eps must be a number in [0, 1] such as 8/255 or 0.03, not '-1'"),
    (["evaluate", "RUN", "--alpha", "0"], "--alpha must be in (0, 1], not 0.0"),
    (["evaluate", "RUN", "--alpha", "1/0"], "--alpha must be a number in (0, 1] such as"),
    (["evaluate", "RUN", "--steps", "0"], "--steps must be a whole number of at least 1, not 0"),
    (["evaluate", "RUN", "--device", "nonsense"], "--device is auto, cpu, cuda or mps, not 'nonsense'"),
    (["evaluate", "RUN", "--data", "cup", "--queries", "0"], "--queries must be a whole number of at least"),
    (["evaluate", "RUN", "--queries", "798"], "queries must be from 1 to the number of images, 797, not 798"),
    (["evaluate", "RUN", "--data", "cup", "--batch", "0"], "--batch must be a whole number of at least 1"),
    (["evaluate", "RUN", "--data", "cup"], "unknown data set 'cup' (did you mean 'cub'?)"),
    (["evaluate", "--model", "resnet19", "--data", "cup"], "unknown model 'resnet19' (did you mean"),
    (["evaluate", "--model", "nowhere.py:f", "--data", "cup"], "there is no file nowhere.py"),
    (["attack", "RUN", "--attack", "GTN", "--out", "OUT"], "unknown attack 'GTN'"),
    (["attack", "RUN", "--attack", "ES", "--protocol", "x", "--out", "OUT"], "unknown protocol 'x'"),
    (["attack", "RUN", "--attack", "ES", "--queries", "0", "--out", "OUT"], "--queries must be a whole"),
    (["attack", "RUN", "--attack", "ES", "--eps", "abc", "--out", "OUT"], "--eps must be a number in"),
    (["attack", "RUN", "--attack", "ES", "--search", "transfer", "--out", "OUT"], "give --surrogate RUN"),
    (["attack", "--attack", "ES", "--out", "OUT"], "say what to evaluate: the folder of a run"),
    (["compare", "nowhere"], "there is no record nowhere; give a record.json, or a folder that holds one"),
    (["evaluate", "RUN", "--device", "mps"], "--device"),
    (["evaluate", "RUN", "--device", "cuda:0"], "--device"),
    (["evaluate", "RUN", "--device", "meta"], "--device"),
    (["evaluate", "RUN", "--devices", "0"], "devices"),
    (["evaluate", "RUN", "--data", "cup", "--seed", "-1"], "--seed must be a whole number of at least 0"),
    (["evaluate", "RUN", "--seed", str(2**70)], "seed"),
    (["evaluate", "RUN", "--recipe", "nonsense"], "--recipe"),
    (["evaluate", "RUN", "--surrogate", "RUN"], "--surrogate"),
    (["evaluate", "RUN", "--search", "transfr", "--surrogate", "RUN"], "transfer"),
    (["evaluate", "RUN", "--search", "transfer(restarts=9)", "--surrogate", "RUN"], "search"),
    (["evaluate", "RUN", "--out", "FILE"], "FILE is a file: give a folder for the record"),
    (["evaluate", "RUN", "--out", "FILE/x"], "the folder FILE/x cannot be written to (Not a dir"),
    (["evaluate", "RUN", "--split", "train"], "unknown split 'train'; known: all, test"),
    (["evaluate", "RUN", "--out", "LINK"], "LINK cannot be written to (a link that leads nowhere): give"),
    (["evaluate", "--model", "c2f2", "--data", "folder", "--root", "none", "--weights", "none.pth"],
     "there is no weights file none.pth: give another --weights"),
    (["attack", "RUN", "--attack", "ES", "--out", "FILE"], "FILE is not empty: give another --out"),
    (["attack", "RUN", "--attack", "ES", "--out", "FILE/x/y"], "FILE/x/y cannot be written to (Not a"),
    (["attack", "RUN", "--attack", "ES", "--batch", "0", "--out", "OUT"], "batch must be"),
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
        ("pair", "the network returned a tuple; it must return one (N, D) tensor of embeddings: wrap it"),
        ("maps", "the network returned a tensor of shape (1, 4, 6, 6) for 1 images; it must return "
                 "(1, D): flatten or pool its features"),
        ("needy", "mine.py:needy cannot be called without arguments (missing a required argument: 'k')"),
        ("broken", "mine.py:broken raised KeyError in line 33 of "),
        ("narrow", "the network failed on an image of shape (1, 3, 8, 8) (RuntimeError: mat1"),
        ("number", "returned a int; it must return a torch.nn.Module"),
        ("nothing", "has no function 'nothing'; write --model FILE.py:FUNCTION"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("what", ["evaluate", "attack"])
def test_networks_that_give_something_else(
    function: str, message: str, what: str, mine: Path, tmp_path: Path
) -> None:
    options = ["--model", f"{mine}:{function}", *DIGITS, "--out", tmp_path / "out"]
    said = refused(what, *options, *([] if what == "evaluate" else ["--attack", "ES"]))
    assert message in said


def test_weights_of_nan(weights: Path, tmp_path: Path) -> None:
    broken = load_file(weights)
    broken["fc2.bias"][3] = torch.nan
    save_weights(broken, weights)
    said = refused("evaluate", "--model", "c2f2", *DIGITS, "--weights", weights, "--out", tmp_path / "out")
    assert "1 of 1 embeddings hold NaN or infinity" in said
    assert "weights are damaged" in said


def test_a_crop_larger_than_the_images(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("data: digits\ncrop: 12\n")
    options = ["--model", "resnet18", "--recipe", tmp_path / "large.yaml", "--out", tmp_path / "out", *ONE]
    assert "a crop of 12 does not fit images of 8×8" in refused("evaluate", *options)


def test_a_folder_that_holds_something_else(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("\\section{}")
    said = refused("evaluate", run, "--out", tmp_path / "out")
    assert "is not empty and holds no evaluation: give another --out folder" in said
    (tmp_path / "out" / "thesis.tex").rename(tmp_path / "out" / "plan.json")
    assert "plan.json" in refused("evaluate", run, "--out", tmp_path / "out")


def test_brackets_in_a_path_are_printed(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run[bold]1"
    assert f"the record is in {out}" in works("evaluate", run, "--out", out, *ONE)
    out = tmp_path / "images[bold]1"
    printed = works("attack", run, "--attack", "ES", "--queries", 2, "--steps", 1, "--out", out)
    assert f"are in {out}" in printed


# Images under attack

KINDS = ["CA+(w=3)", "CA-", "QA+", "QA-", "TMA", "ES", "LTM", "GTM", "GTT", "SP-QA+(m=2,keep=3)", "SP-QA-"]


def nearer(z: Tensor, to: Tensor, gallery: Tensor, without: Sequence[int]) -> float:
    """Count by a loop the images nearer to z than a point; equal ones count half."""
    level, count = float((z - to).square().sum()), 0.0
    for k, other in enumerate(gallery):
        if k not in without:
            square = float((z - other).square().sum())
            count += 1.0 if square < level else 0.5 if square == level else 0.0
    return count


def values_of(
    kind: str, z: Tensor, benign: Tensor, own: int, target: list[int], gallery: Tensor, labels: Tensor
) -> dict[str, float]:
    """Compute by a loop what an attack reports of a query with the embedding z."""
    name, left = attack(kind).name, len(gallery) - 2
    if name.startswith("CA"):
        ranks = [nearer(gallery[q], z, gallery, (own, q)) / left for q in target]
        return {name: 100 * sum(ranks) / len(ranks)}
    if "QA" in name:
        ranks = [100 * nearer(z, gallery[c], gallery, (own, c)) / left for c in target]
        if name.startswith("SP"):
            chosen = 2 if "m=2" in kind else 1
            return {
                name: sum(ranks[:chosen]) / chosen,
                f"{name}:keep": sum(ranks[chosen:]) / (len(ranks) - chosen),
            }
        return {name: sum(ranks) / len(ranks)}
    if name == "TMA":
        return {"TMA": float(z @ gallery[target[0]])}
    if name == "GTT":
        return {"GTT": 100.0 * (nearer(z, gallery[target[0]], gallery, (own, target[0])) < 4)}
    hit = 100.0 * bool(labels[nearest_other(z, own, gallery)] == labels[own])
    if name == "ES":
        return {"ES:D": float((z - benign).norm()), "ES:R": hit}
    return {name: hit}


def nearest_other(z: Tensor, own: int, gallery: Tensor) -> int:
    return min((k for k in range(len(gallery)) if k != own), key=lambda k: float((z - gallery[k]).norm()))


def first_of_class(z: Tensor, own: int, gallery: Tensor, labels: Tensor) -> int:
    others = sorted(
        (k for k in range(len(gallery)) if k != own), key=lambda k: float((z - gallery[k]).norm())
    )
    return 1 + next(place for place, k in enumerate(others) if labels[k] == labels[own])


@pytest.fixture(scope="module")
def seen(run: Path) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """The run's network as a function, all embeddings, and the labels."""
    subject = Subject.of_run(run, {})
    (test,) = pixels(subject.recipe, splits=["test"])
    network = subject.network(like=test).eval()

    def embedded(images: Tensor) -> Tensor:
        with torch.no_grad():
            return nn.functional.normalize(network(images).double())

    everything = torch.from_numpy(test.pixels.transpose(0, 3, 1, 2).copy()).float() / 255
    return embedded, embedded(everything), test.labels


@pytest.mark.parametrize("kind", KINDS)
def test_an_attack_leaves_images_arrays_and_ranks(
    kind: str, run: Path, tmp_path: Path, seen: tuple[Callable[[Tensor], Tensor], Tensor, Tensor]
) -> None:
    embedded, gallery, labels = seen
    kept = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    out, eps = tmp_path / "images", 0.1
    options = ["--queries", 2, "--steps", 3, "--eps", eps, "--alpha", 0.05, "--seed", 2, "--batch", 1]
    printed = works("attack", run, "--attack", kind, "--out", out, *options)
    assert f"images, arrays and ranks of 2 queries are in {out}" in printed.replace("\n", " ")
    assert {file: file.read_bytes() for file in run.iterdir() if file.is_file()} == kept

    arrays = load_file(out / "images.safetensors")
    numbers, before, after = arrays["number"].tolist(), arrays["before"], arrays["after"]
    drawn = torch.randperm(797, generator=torch.Generator().manual_seed(2))[:2]
    assert numbers == sorted(drawn.tolist())
    assert before.dtype == after.dtype == torch.float32
    (test,) = pixels(Subject.of_run(run, {}).recipe, splits=["test"])
    assert torch.equal(
        before, torch.from_numpy(test.pixels[numbers].transpose(0, 3, 1, 2).copy()).float() / 255
    )
    change = (after - before).abs().flatten(1).amax(1)
    assert float(change.max()) <= eps + 1e-6
    assert float(after.min()) >= 0
    assert float(after.max()) <= 1
    if kind != "LTM":  # whose hinge may be closed from the beginning
        assert float(change.min()) > 0

    files = {f"{n:06d}-{when}.png" for n in numbers for when in ("before", "after")}
    assert {file.name for file in out.iterdir()} == {*files, "images.safetensors", "ranks.csv"}
    for k, number in enumerate(numbers):
        read = [np.asarray(Image.open(out / f"{number:06d}-{w}.png"), float) for w in ("before", "after")]
        assert np.array_equal(read[0], test.pixels[number, :, :, 0])
        assert np.abs(read[1] - read[0]).max() <= 255 * eps + 0.5
        assert np.abs(read[1] - 255 * after[k, 0].numpy()).max() <= 0.5 + 1e-4

    with (out / "ranks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["image"]) for row in rows] == numbers
    for k, row in enumerate(rows):
        number, target = numbers[k], arrays["target"][k].tolist()
        assert row["class"] == test.classes[int(labels[number])]
        assert ("target" in row) == bool(target) == (kind not in ("ES", "LTM"))
        if target:
            assert row["target"] == " ".join(map(str, target))
            assert row["target's class"] == " ".join(test.classes[int(labels[t])] for t in target)
        for when, z in (("before", gallery[number]), ("after", embedded(after[k : k + 1])[0])):
            values = values_of(kind, z, gallery[number], number, target, gallery, labels)
            for name, value in values.items():
                shown = float(row[f"{name} {when}"])
                assert shown == pytest.approx(value, abs=0.00051 if name in ("TMA", "ES:D") else 0.0501), name
            assert int(row[f"first of its class {when}"]) == first_of_class(z, number, gallery, labels)
        assert set(row) - {"image", "class", "target", "target's class"} == {
            f"{name} {when}" for name in (*values, "first of its class") for when in ("before", "after")
        }


def test_an_attack_wants_an_empty_folder(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "images"
    out.mkdir()
    options = ["--attack", "ES", "--out", out, "--queries", 2, "--steps", 1]
    works("attack", run, *options)
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert f"{out} is not empty: give another --out" in refused("attack", run, *options)
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before


@pytest.mark.parametrize("split", ["test", "all"])
def test_images_of_files_are_named(split: str, tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    for name in ("ant", "bee", "cat", "dog"):
        (root / name).mkdir(parents=True)
        for k in range(4):
            noise = np.random.default_rng([*name.encode(), k]).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / name / f"{k}.png")
    (root / "cat" / "1.png").write_bytes(b"no image")
    (root / "dog" / "1.png").unlink()
    options = ["--data", "folder", "--root", root, "--split", split, "--cache", tmp_path / "cache"]
    network = ["--model", "c2f2", "--set", "resize=8", "--set", "crop=8", "--set", "dim=4"]
    count = {"test": 6, "all": 14}[split]
    how = ["--skip-broken", "--attack", "GTM", "--queries", count, "--steps", 1, "--out", tmp_path / "out"]
    works("attack", *network, *options, *how)
    with (tmp_path / "out" / "ranks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len({row["file"] for row in rows}) == count
    for row in rows:
        written = np.asarray(Image.open(tmp_path / "out" / f"{int(row['image']):06d}-before.png"))
        assert np.array_equal(written, np.asarray(Image.open(root / row["file"])))
        assert Path(row["file"]).parent.name == row["class"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_attack_that_is_stopped(
    number: signal.Signals, code: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(C2F2, "forward", at_call(12, stop_by(number), C2F2.forward))
    before = {n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        options = ["--queries", 4, "--batch", 2, "--steps", 3, "--out", tmp_path / "out"]
        said = command("attack", run, "--attack", "ES", *options)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler, "not put back"
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert said.code == code
    assert "stopped; nothing was written: run the same command again" in said.out
    assert not (tmp_path / "out").exists()


def test_an_attack_that_is_stopped_while_it_writes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image.Image, "save", at_call(5, stop_by(signal.SIGTERM), Image.Image.save))
    out = tmp_path / "out"
    said = command("attack", run, "--attack", "ES", "--queries", 4, "--steps", 1, "--out", out)
    assert said.code == 143
    assert not out.exists()
    monkeypatch.undo()
    works("attack", run, "--attack", "ES", "--queries", 4, "--steps", 1, "--out", out)
    assert len(list(out.glob("*.png"))) == 8


def test_an_attack_by_transfer(run: Path, tmp_path: Path) -> None:
    other, out = make_run(tmp_path / "other", "best", first=1, **OTHER), tmp_path / "images"
    options = ["--search", "transfer", "--surrogate", other, "--queries", 2, "--steps", 2]
    works("attack", run, "--attack", "GTM", "--out", out, *options)
    assert (out / "ranks.csv").exists()
    assert {file.name for file in other.iterdir()} == {"recipe.yaml", "best.safetensors"}


# Records side by side


@pytest.fixture(scope="module")
def records(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Evaluations that differ in one thing each."""
    folder = tmp_path_factory.mktemp("records")
    changes: dict[str, list[str]] = {
        "plain": [],
        "same": ["--checks", "quick"],
        "eps": ["--eps", "8/255"],
        "queries": ["--queries", "4"],
        "reference": ["--protocol", "reference"],
    }
    for name, options in changes.items():
        works("evaluate", run, "--out", folder / name, *ONE, *options)
    (folder / "data").mkdir()
    content = json.loads((folder / "plain" / "record.json").read_text())
    other = {"name": "other", "sha256": "0" * 64, "shape": [3, 32, 32], "images": 20, "classes": 4}
    content["data"] |= other
    (folder / "data" / "record.json").write_text(json.dumps(content))
    return {name: folder / name for name in [*changes, "data"]}


def test_records_under_the_same_conditions(records: dict[str, Path]) -> None:
    printed = works("compare", records["plain"], records["same"] / "record.json")
    assert "careful" not in printed
    (head,) = [cells(line) for line in printed.splitlines() if line.startswith("┃")]
    assert head == ["", "R@1 ↑", "R@2 ↑", "mAP ↑", "NMI ↑", "CA+ ↑"]
    rows = [cells(line) for line in printed.splitlines() if line.startswith("│")]
    assert len(rows) == 2
    assert rows[0][1:] == rows[1][1:]
    for name, (row, *_) in zip(["plain", "same/record.json"], rows, strict=True):
        assert row == f"c2f2 N/A[S] ({name})"
        assert re.search(rf"^c2f2 N/A\[S\] \({name}\): 6 of 797", printed, re.MULTILINE)
    assert "(plain)" not in works("compare", records["plain"]), "nothing to tell it apart from"
    record = load_record(records["same"])
    for check in record.checks:
        if check.status in ("warn", "fail"):
            assert re.search(rf"{check.name} +{check.status} ", printed)


def test_a_record_is_found_in_its_run(run: Path, whole: tuple[Path, str], records: dict[str, Path]) -> None:
    printed = works("compare", run, records["plain"])
    rows = [cells(line) for line in printed.splitlines() if line.startswith("│")]
    assert "-" not in rows[0]
    assert rows[1].count("-") == 10  # nine of the ten scores, and the ERS
    assert "they differ in η: " in printed
    assert "they differ in queries: " in printed


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("eps", "careful: they differ in ε: {plain}: 51/255, {eps}: 8/255"),
        ("queries", "careful: they differ in queries: {plain}: 6 of 797, seed 0, {queries}: 4 of"),
        ("data", "{data}: other 32×32, 20 images of 4 classes, SHA-256 000000000000"),
    ],
)  # fmt: skip
def test_other_conditions_are_told(other: str, told: str, records: dict[str, Path]) -> None:
    printed = works("compare", records["plain"], records[other])
    assert "".join(told.format(**records).split()) in "".join(printed.split())
    assert printed.count("careful:") == 1
    assert [printed.count(f"│ c2f2 N/A[S] ({name})") for name in ("plain", other)] == [1, 1]


def test_records_of_different_protocols_are_not_compared(records: dict[str, Path]) -> None:
    said = refused("compare", records["plain"], records["reference"])
    assert "records of different protocols are never compared" in said
    assert f"{records['plain']} is strict, {records['reference']} is reference" in said


def test_what_is_no_record(records: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    for text, message in [
        ("no JSON", "is not a record: it is not JSON"),
        ("[1]", "is not a record of this version: its schema is None"),
        ('{"schema": "robustmetric/record/9"}', "its schema is 'robustmetric/record/9', not"),
        ('{"schema": "robustmetric/record/1"}', "is not a whole record: network: "),
    ]:
        file.write_text(text)
        said = refused("compare", records["plain"], file)
        assert f"{file} {message}" in said or message in said
    file.write_bytes(b"\xff\xfe\x00")
    assert "is not a record: it is not JSON" in refused("compare", file)
    assert "there is no record" in refused("compare", tmp_path / "nowhere")


# Interruptions of one process: the program, with attempts in processes of their own

Plan = tuple[str, float]  # what ends the attempt, and when; ("none", 0) lets it finish


def arm(kind: str, number: float) -> None:
    """Prepare the end of this process."""

    replace = Path.replace

    def renamed(draft: Path, final: Path) -> Path:
        done = replace(draft, final)
        renamings.append(final.name)
        if kind == f"after {final.name}" or (kind == "rename" and len(renamings) == number):
            die()
        return done

    renamings: list[str] = []
    act = stop_by(signal.Signals[kind.split()[0]]) if kind.startswith("SIG") else die
    patched: dict[str, tuple[Any, str]] = {
        "forward": (C2F2, "forward"),
        "piece": (Store, "keep"),  # a piece is made and not yet kept
        "fsync": (os, "fsync"),  # a file is written and not in its place, or the folder's entry not safe
    }
    if (what := kind.split()[-1]) in patched:
        owner, name = patched[what]
        setattr(owner, name, at_call(number, act, getattr(owner, name)))
    Path.replace = renamed  # type: ignore[method-assign, assignment]


def attempt(arguments: list[str], plan: Plan) -> tuple[int, str]:
    """Run the command in a new process; return its exit code, −9 if it was killed, and what it said."""

    def act() -> None:
        os.dup2(1, 2)
        arm(*plan)
        sys.argv = ["robustmetric", *arguments]
        cli.run()

    return forked(act)


STORIES: dict[str, list[Plan]] = {
    "killed": [
        ("rename", 1),  # the plan has just been written
        ("forward", 2),  # among the first embeddings
        ("fsync", 1),
        ("piece", 2),
        ("rename", 2),
        ("forward", 40),
        ("fsync", 9),
        ("piece", 22),  # among the checks
        ("after queries.safetensors", 0),
    ],
    "interrupted": [("SIGINT forward", 30), ("SIGINT piece", 4), ("SIGINT forward", 25)],
    "terminated": [("SIGTERM forward", 30), ("SIGTERM piece", 4)],
    "killed while the plan is written": [("fsync", 1)],
    "killed before the pieces are removed": [("after record.json", 0)],
}


def program(order: dict[str, Any]) -> dict[str, list[tuple[int, str]]]:
    """Do the planned attempts of each story in a folder of its own, and one more that may finish."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    ends: dict[str, list[tuple[int, str]]] = {}
    for story, plans in STORIES.items():
        arguments = [*order["arguments"], "--out", str(Path(order["folder"]) / story)]
        ends[story] = [attempt(arguments, plan) for plan in [*plans, ("none", 0.0)]]
    return ends


@pytest.mark.slow
@needs_fork
def test_killed_or_interrupted_at_any_moment_the_same_command_goes_on(
    run: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    order = {"folder": str(tmp_path), "arguments": ["evaluate", str(run), *SMALL]}
    wrong = {}
    for story, ends in run_program(__file__, order).items():
        stopped = {"interrupted": 130, "terminated": 143}.get(story)
        *codes, last = (code for code, _ in ends)
        told = [text for _, text in ends[:-1]] if stopped else []
        left = {file.name for file in (tmp_path / story).iterdir()}
        problems = {
            "ended otherwise": codes != [stopped or -9] * len(STORIES[story]),
            "did not go on": last != 0,
            "another record": last == 0 and contents(tmp_path / story) != contents(whole[0]),
            "another table": last == 0 and scores_in(ends[-1][1]) != scores_in(whole[1]),
            "not said": not all("stopped; what is finished is kept: the same command" in t for t in told),
            "a traceback": any("Traceback" in text for _, text in ends),
            "pieces left": "parts" in left,
        }
        if any(problems.values()):
            wrong[story] = (
                [name for name, found in problems.items() if found],
                codes,
                last,
                ends[-1][1][:300],
            )
    assert not wrong


# Several workers

SLOW = """
import multiprocessing, os, time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 8)

    def forward(self, images):
        if images.requires_grad and multiprocessing.parent_process() is not None:
            if (HERE / "broken").exists():
                raise ValueError("this network has no [bold] gradient")
            if (HERE / "slow").exists():
                time.sleep(0.1)
        return self.fc(images.flatten(1))

def network():
    if multiprocessing.parent_process() is not None:
        (HERE / f"worker-{os.getpid()}").touch()
    return Network()
"""


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, list[str], dict[str, bytes]]:
    """A network whose workers leave their numbers, a command, and what it gives without workers."""
    (tmp_path / "slow.py").write_text(SLOW)
    options = [
        "--queries",
        "12",
        "--batch",
        "3",
        "--steps",
        "3",
        "--checks",
        "none",
        "--attacks",
        "ES,QA+,GTM",
    ]
    arguments = ["evaluate", "--model", f"{tmp_path / 'slow.py'}:network", *DIGITS, *options, "--out"]
    works(*arguments, tmp_path / "whole")
    return tmp_path, [*arguments, str(tmp_path / "out")], contents(tmp_path / "whole")


def workers_of(folder: Path) -> list[int]:
    return [int(file.name.partition("-")[2]) for file in folder.glob("worker-*")]


def pieces(folder: Path) -> set[str]:
    return {file.name for file in (folder / "out" / "parts").glob("[a-z]*.safetensors")}


@pytest.mark.slow
def test_workers_give_the_same_bytes(run: Path, whole: tuple[Path, str], tmp_path: Path) -> None:
    printed = works("evaluate", run, *SMALL, "--devices", 2, "--out", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(whole[0])
    assert scores_in(printed) == scores_in(whole[1])
    told = re.findall(r"^(\S+): done", printed, re.MULTILINE)
    assert len(told) == len(set(told)), "a stage was told more than once"


@pytest.mark.slow
def test_an_error_in_a_worker_is_said_in_a_line_and_leaves_what_is_finished(
    shared: tuple[Path, list[str], dict[str, bytes]],
) -> None:
    folder, arguments, wanted = shared
    (folder / "broken").touch()
    assert refused(*arguments, "--devices", 2) == "error: this network has no [bold] gradient\n"
    assert "embed-00000.safetensors" in pieces(folder)
    assert not (folder / "out" / "record.json").exists()
    assert until(lambda: not any(map(alive, workers_of(folder))), 10)
    (folder / "broken").unlink()
    works(*arguments)
    assert contents(folder / "out") == wanted


def test_a_worker_that_was_killed_is_said_in_a_line(
    shared: tuple[Path, list[str], dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise WorkerError("worker 0 of 2 ended with code -9; what was finished is kept")

    monkeypatch.setattr("robustmetric.cli.evaluate.run_workers", killed)
    assert "worker 0 of 2 ended with code -9" in refused(*shared[1], "--devices", 2)


ENTRY = """
import signal
from robustmetric.cli import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
run()
"""


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start the command in a session of its own, as a terminal does."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", ENTRY, *arguments, "--devices", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


@pytest.mark.slow
@needs_proc
def test_workers_end_with_a_killed_parent_and_the_evaluation_goes_on(
    shared: tuple[Path, list[str], dict[str, bytes]],
) -> None:
    folder, arguments, wanted = shared
    (folder / "slow").touch()
    parent = start(arguments)
    assert until(lambda: len(workers_of(folder)) == 2 and any("attack" in p for p in pieces(folder)))
    assert all(map(alive, workers_of(folder)))
    parent.kill()
    assert parent.wait() == -9
    assert until(lambda: not any(map(alive, workers_of(folder))), 10), "workers outlive their parent"
    parent.communicate()
    left = pieces(folder)
    assert 1 < len(left) < 2 + 3 * 4
    works(*arguments)
    assert contents(folder / "out") == wanted


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_ends_workers_that_have_just_been_started(
    number: signal.Signals, code: int, shared: tuple[Path, list[str], dict[str, bytes]]
) -> None:
    folder, arguments, wanted = shared
    (folder / "slow").touch()
    parent = start(arguments)
    assert until(lambda: (folder / "out" / "plan.json").exists())
    time.sleep(0.7)  # the workers import what they need
    os.killpg(parent.pid, number)
    out, err = parent.communicate(timeout=60)
    assert parent.returncode == code, (out, err)
    assert "stopped; what is finished is kept: the same command goes on from there" in out
    assert until(lambda: not any(map(alive, workers_of(folder))), 10), "workers outlive their parent"
    works(*arguments)
    assert contents(folder / "out") == wanted
    assert "Traceback" not in err, err


if __name__ == "__main__":
    print(json.dumps(program(json.loads(sys.argv[1]))))
