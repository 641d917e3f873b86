"""The workflow calls what is there, may do little, and tries the oldest Python that is promised."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPT = ".ci/run"


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def commands(workflow: dict[str, Any]) -> list[str]:
    """Every line that a job runs, those of the matrix and of the script included."""
    lines: list[str] = []
    for job in workflow["jobs"].values():
        lines += job["strategy"]["matrix"]["command"]
        lines += [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    if SCRIPT in lines:
        lines += (ROOT / SCRIPT).read_text(encoding="utf-8").splitlines()
    return lines


def test_what_is_called_is_there(workflow: dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    called = {
        found[1] for line in commands(workflow) if (found := re.match(r"make (?:-\S+ )*([a-z-]+)", line))
    }
    assert {"test", "demo", "wheel", "docs"} <= called <= targets
    assert SCRIPT in commands(workflow)
    assert os.access(ROOT / SCRIPT, os.X_OK)


def test_it_may_read_and_no_more(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[a-z-]+@v\d+(\.\d+)*", name) for name in used)
        (checkout,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert checkout["with"] == {"persist-credentials": False}


def test_the_oldest_python_is_tried(workflow: dict[str, Any]) -> None:
    stated = re.search(
        r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert stated is not None
    for job in workflow["jobs"].values():
        assert min(job["strategy"]["matrix"]["python"], key=lambda v: [*map(int, v.split("."))]) == stated[1]
