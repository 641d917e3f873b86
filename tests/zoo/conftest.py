"""A run on images of its own whose files are full of paths, and what was published of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import robustmetric as rm
from robustmetric.evaluation import Record
from robustmetric.files import digest_of_entries
from tests.helpers.records import a_record, altered, written
from tests.helpers.runs import make_run

HOME = "/home/somebody/secret"
ABOUT = {
    "seed": 0,
    "skipped": [f"{HOME}/birds/wren/3.jpg", "secret-below/4.jpg"],
    "choice": {"images": "validation images", "count": 40},
    "starts": [
        {
            "command": [
                "train", "--data", "folder", "--root", f"{HOME}/birds", f"--out={HOME}/runs/a", "--set",
                f"weights={HOME}/first.safetensors", "--defense", "HM[S,LGA]&ICS",
            ],
            "python": "3.11.7",
            "torch": "2.13.0",
        },
        {"command": ["train", "--resume", "--out", f"{HOME}/runs/a"], "python": "3.11.8"},
    ],
    "origin": {
        "workers": 1,
        "files": [f"{HOME}/nets.py"],
        "images": {"training images": {"count": 1234, "classes": 40, "labels": "a" * 64, "pixels": "b" * 64}},
        "code": {},
    },
    "images": {"height": 8, "width": 8, "channels": 1},
}  # fmt: skip


def about(**changes: object) -> str:
    content = {**ABOUT, **changes}
    return json.dumps({**content, "sha256": digest_of_entries(content)})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a defense with η = 8, with both kinds of weights, and a pickle that nobody should get."""
    folder = make_run(
        tmp_path / "run", "last", "best", about=about(), data="folder", root=f"{HOME}/birds",
        weights=f"{HOME}/first.safetensors", eps=12 / 255, alpha=12.03125 / 255, seed=7,
    )  # fmt: skip
    (folder / "last.ckpt").write_bytes(b"a pickle")
    (folder / "metrics.csv").write_text("epoch,step,loss\n0,10,0.2\n")
    return folder


def record_of(run: Path, *, protocol: str = "strict", skipped: list[str] | None = None) -> Record:
    """A record of the network in the folder of a run, with figures of its own, a warning and a suite."""
    goal = {
        "value": 7.4, "low": 4.3, "high": 10.6, "before": 98.4, "alone": 7.4, "better": "higher", "unit": "%",
        "queries": 9, "forward": 9, "backward": 9, "undropped": 9, "attacks": [],
    }  # fmt: skip
    check = {"name": "noise", "status": "warn", "figure": 1.0, "limit": "none", "says": "noise | does better"}
    return altered(
        a_record({"R@1": 61.23456789}, protocol=protocol),
        network={"sha256": rm.load_run(run).digest},
        data={"skipped": skipped or []},
        suite={"goals": {"misrank": goal}},
        checks=[{"name": "collapse", "status": "pass", "figure": 0.0, "limit": "", "says": ""}, check],
    )


def with_record(run: Path, name: str = "evaluation", **how: object) -> Record:
    """Write a record of a run into it."""
    record = record_of(run, **how)  # type: ignore[arg-type]
    written(record, run / name)
    (run / name / "queries.safetensors").write_bytes(b"the values of each query")
    return record


def texts(folder: Path) -> dict[str, str]:
    """Return all files of a folder that are no weights, by their paths there."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".safetensors"]
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in files}
