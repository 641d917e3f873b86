"""Evaluate with real signals and several workers.

This file is also the program that the tests of interruptions start (see tests/helpers/processes.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from robustmetric import cli
from robustmetric.evaluation.job import Job
from robustmetric.models.c2f2 import C2F2
from tests.cli.tables import DIGITS, SMALL, contents, scores_in
from tests.helpers.command import command, works
from tests.helpers.processes import (
    alive,
    at_call,
    die,
    forked,
    needs_fork,
    needs_proc,
    run_program,
    start,
    stop_by,
    until,
)

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
        "piece": (Job, "keep"),  # a piece is made and not yet kept
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
            "not said": not all("stopped; what is finished is kept" in t for t in told),
            "a traceback": any("Traceback" in text for _, text in ends),
            "pieces left": "parts" in left,
        }
        if any(problems.values()):
            problem = [name for name, found in problems.items() if found]
            wrong[story] = (problem, codes, last, ends[-1][1][:300])
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
    options = ["--queries", "12", "--batch", "3", "--steps", "3", "--checks", "none"]
    options += ["--attacks", "ES,QA+,GTM"]
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
def test_an_error_in_a_worker_is_told_and_leaves_what_is_finished(
    shared: tuple[Path, list[str], dict[str, bytes]],
) -> None:
    folder, arguments, wanted = shared
    (folder / "broken").touch()
    said = command(*arguments, "--devices", 2)
    assert said.code == 1
    assert said.err.startswith("error: the network failed on images of shape (3, 3, 8, 8)")
    assert said.err.count("Traceback") == 1
    assert f'File "{folder / "slow.py"}", line ' in said.err
    assert said.err.endswith("ValueError: this network has no [bold] gradient\n")
    assert "embed-00000.safetensors" in pieces(folder)
    assert not (folder / "out" / "record.json").exists()
    assert until(lambda: not any(map(alive, workers_of(folder))))
    (folder / "broken").unlink()
    works(*arguments)
    assert contents(folder / "out") == wanted


@pytest.mark.slow
@needs_proc
def test_workers_end_with_a_killed_parent_and_the_evaluation_goes_on(
    shared: tuple[Path, list[str], dict[str, bytes]],
) -> None:
    folder, arguments, wanted = shared
    (folder / "slow").touch()
    parent = start(*arguments, "--devices", 2)
    assert until(lambda: len(workers_of(folder)) == 2 and any("attack" in p for p in pieces(folder)))
    assert all(map(alive, workers_of(folder)))
    parent.kill()
    assert parent.wait() == -9
    assert until(lambda: not any(map(alive, workers_of(folder)))), "workers outlive their parent"
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
    parent = start(*arguments, "--devices", 2)
    assert until(lambda: (folder / "out" / "plan.json").exists())
    time.sleep(0.7)  # the workers import what they need
    os.killpg(parent.pid, number)
    out, err = parent.communicate(timeout=600)
    assert parent.returncode == code, (out, err)
    assert "stopped; what is finished is kept" in err
    assert until(lambda: not any(map(alive, workers_of(folder)))), "workers outlive their parent"
    works(*arguments)
    assert contents(folder / "out") == wanted
    assert "Traceback" not in err, err


if __name__ == "__main__":
    print(json.dumps(program(json.loads(sys.argv[1]))))
