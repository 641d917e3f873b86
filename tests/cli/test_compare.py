"""The command compare: records side by side."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from robustmetric import load_record
from tests.cli.tables import ONE, scores_in
from tests.helpers.command import cells, refused, works
from tests.helpers.records import altered, written


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
    other = {"name": "other", "sha256": "0" * 64, "shape": [3, 32, 32], "images": 20, "classes": 4}
    written(altered(load_record(folder / "plain"), data=other), folder / "data")
    return {name: folder / name for name in [*changes, "data"]}


@pytest.mark.slow
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


def test_a_run_without_a_record_is_to_be_evaluated(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "not yet"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("evaluation*"))
    assert f"robustmetric evaluate '{copy}'" in refused("compare", copy)


@pytest.mark.slow
def test_a_record_is_found_in_its_run(run: Path, whole: tuple[Path, str], records: dict[str, Path]) -> None:
    printed = works("compare", run, records["plain"])
    first, second = (list(row.values()) for row in scores_in(printed).values())
    assert "-" not in first
    assert second.count("-") == 10  # nine of the ten scores, and the ERS
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
        ('{"schema": "robustmetric/record/1"}', "is not a whole record: "),
    ]:
        file.write_text(text)
        said = refused("compare", records["plain"], file)
        assert f"{file} {message}" in said or message in said
    file.write_bytes(b"\xff\xfe\x00")
    assert "is not a record: it is not JSON" in refused("compare", file)
    assert "there is no record" in refused("compare", tmp_path / "nowhere")
