"""The command evaluate as a user sees it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robustmetric import attack, load_record, save_weights
from robustmetric.data.inputs import Inputs, load_pixels
from robustmetric.evaluation import Plan
from robustmetric.evaluation.record import load_arrays
from robustmetric.models.c2f2 import C2F2
from robustmetric.training import load_recipe
from tests.cli.tables import DIGITS, ONE, OTHER, SMALL, contents, expected, scores_in
from tests.helpers.command import works
from tests.helpers.runs import make_pictures, make_run


def test_the_table_has_the_paper_columns_and_the_values_of_the_record(whole: tuple[Path, str]) -> None:
    folder, printed = whole
    assert {file.name for file in folder.iterdir()} == {"plan.json", "record.json", "queries.safetensors"}
    record = load_record(folder)
    table = scores_in(printed)
    assert table == expected(record)
    assert len(record.checks) == len(Plan.make(checks="quick").check_names)
    for check in record.checks:
        assert re.search(rf"^│ {check.name} +│ {check.status} ", printed, re.MULTILINE), check.name
    assert record.ers is not None
    assert record.ers.low is not None
    assert record.ers.high is not None
    beside = f"ERS {record['ERS']:.1f} ({record.ers.low:.1f} to {record.ers.high:.1f}) at R@1"
    asked = "12 of 797 images of 10 classes attacked; digits 8×8; strict"
    assert f"c2f2 N/A[S]: {beside} {record['R@1']:.1f}; {asked}" in printed
    assert "ε = 51/255, α = 3/255, η = 3, pgd" in printed
    assert f"the record is in {folder}" in printed
    arrays = load_arrays(folder)
    assert len(arrays["number"]) == 12
    for name in record.scores:
        values = arrays[f"{name.partition(':')[0]}/after/{name}"].double()
        assert record[name] == pytest.approx(float(values.mean()), abs=1e-9)


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


# Networks


def test_a_network_of_a_file_with_its_weights(mine: Path, tmp_path: Path) -> None:
    linear = nn.Linear(192, 8)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(8, 192, generator=torch.Generator().manual_seed(0)))
        linear.bias.zero_()
    file = tmp_path / "w.safetensors"
    save_weights({"fc.weight": linear.weight, "fc.bias": linear.bias}, file)
    out = tmp_path / "out"
    works("evaluate", "--model", f"{mine}:network", *DIGITS, "--weights", file, "--out", out, *ONE)
    record = load_record(out)
    assert (record.network.name, record.network.parameters) == ("mine.py:network w.safetensors", 192 * 8 + 8)
    assert (record.data.name, record.data.shape) == ("digits", [3, 8, 8])
    assert record.settings.eps == load_recipe("digits").eps
    # The same R@1 by a loop: the nearest other image by the product of unit vectors.
    (test,) = load_pixels("digits", None, Inputs(), ["test"])
    colours = (
        torch.from_numpy(np.repeat(test.pixels[:].transpose(0, 3, 1, 2), 3, axis=1).copy()).float() / 255
    )
    with torch.no_grad():
        z = nn.functional.normalize(linear(colours.flatten(1)).double())
    hits = 0
    for i in range(len(z)):
        near = z @ z[i]
        near[i] = -2
        hits += int(test.labels[int(near.argmax())] == test.labels[i])
    assert record["R@1"] == pytest.approx(100 * hits / len(z), abs=0.3)


def test_a_network_by_name_takes_a_length_of_its_embeddings(run: Path, tmp_path: Path) -> None:
    weights = ["--weights", run / "best.safetensors", "--dim", 16]
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
        ([], {"eps": 0.2, "alpha": 3 / 255, "protocol": "strict", "search": "pgd"}),
        (["--search", "spsa(samples=2,sigma=0.1)"], {"search": "spsa(samples=2, sigma=0.1)"}),
        (["--norm", "l2", "--eps", "1.5", "--search", "apgd"], {"norm": "l2", "eps": 1.5, "search": "apgd"}),
        (["--queries", "4", "--seed", "7"], {"queries": 4, "seed": 7}),
        (["--batch", "2", "--checks", "quick"], {"batch": 2, "checks": "quick"}),
        (
            ["--attacks", "CA+(w=3), SP-QA+(m=2,keep=3), QA−"],
            {"attacks": ("CA+(w=3)", attack("SP-QA+(m=2,keep=3)").name, "QA-")},
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


@pytest.mark.slow
def test_all_images_or_those_of_the_test(run: Path, tmp_path: Path) -> None:
    printed = works("evaluate", run, "--split", "all", "--out", tmp_path / "all", *ONE)
    assert "6 of 1797 images of 10 classes attacked; digits (all) 8×8; " in printed
    works("evaluate", run, "--split", "all", "--devices", 2, "--out", tmp_path / "shared", *ONE)
    assert contents(tmp_path / "shared") == contents(tmp_path / "all")


def test_other_images_are_brought_to_the_size_that_was_trained_on(run: Path, tmp_path: Path) -> None:
    root = make_pictures(tmp_path / "photos", classes=4, height=48, width=40)
    works(
        "evaluate", run, "--data", "folder", "--root", root, "--split", "all", *ONE, "--out", tmp_path / "out"
    )
    assert load_record(tmp_path / "out").data.shape == [1, 8, 8]
