"""Evaluations that are killed at any moment and run again: as if nothing had happened.

This file is also the program that the tests start (see tests/helpers/processes.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from robustmetric.evaluation import Data, Evaluation, Plan, Subject
from robustmetric.evaluation.job import Job
from tests.helpers.processes import at_call, die, forked, run_program

Ending = tuple[str, float]  # what ends the attempt, and when; ("none", 0) lets it finish
SUITE = "worst-case(goals='misrank,shift', steps=2, targets=1, trials=3)"
FILES = ("record.json", "queries.safetensors")


# The program: attempts in processes of their own


def evaluation(out: Path) -> Evaluation:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    data = Data(torch.rand(30, 1, 6, 6, generator=generator), torch.arange(30) % 4)
    how: dict[str, Any] = {"eps": 0.1, "alpha": 0.03, "steps": 3, "queries": 20, "batch": 8, "suite": SUITE}
    plan = Plan.make(**how, attacks=["CA-", "ES", "GTM"], checks="quick")
    return Evaluation(Subject(model, data), plan, out)


def prepare(work: Evaluation, kind: str, number: float) -> None:
    """Arrange for this process to be killed as planned."""
    model = work.subject.model
    keep, replace, unlink, rmdir = Job.keep, Path.replace, Path.unlink, Path.rmdir

    def kept(job: Any, piece: Any, value: Any) -> None:
        keep(job, piece, value)
        die()

    def renamed(draft: Path, final: Path) -> None:
        replace(draft, final)
        die()

    def half(draft: Path, final: Path) -> None:
        """Leave half of a file that was not yet put in its place."""
        draft.write_bytes(draft.read_bytes()[: draft.stat().st_size // 2])
        die()

    patch: Any = {
        "keep": lambda: (Job, "keep", at_call(number, kept, keep)),
        "rename": lambda: (Path, "replace", at_call(number, renamed, replace)),
        "half": lambda: (Path, "replace", at_call(number, half, replace)),
        "fsync": lambda: (os, "fsync", at_call(number, die, os.fsync)),
        "remove": lambda: (Path, "unlink", at_call(number, die, unlink)),
        "rmdir": lambda: (Path, "rmdir", at_call(number, die, rmdir)),
        "forward": lambda: (model, "forward", at_call(number, die, model.forward)),
    }
    if kind != "none":
        where, name, replacement = patch[kind]()
        if isinstance(where, type):
            setattr(where, name, lambda *args, **kwargs: replacement(*args, **kwargs))
        else:
            setattr(where, name, replacement)


def attempt(out: Path, plan: Ending) -> tuple[str, int]:
    """Evaluate in a new process until it ends or is killed; say how it ended, and the pieces on disk."""

    def act() -> None:
        work = evaluation(out)
        prepare(work, *plan)
        work.run()
        print("finished")

    code, text = forked(act)
    parts = len(list((out / "parts").glob("[a-z]*")))
    return "killed" if code == -signal.SIGKILL else text.strip().rpartition("\n")[2], parts


def program(folder: Path) -> dict[str, list[tuple[str, int]]]:
    """Make an evaluation as it should be, then those of each scenario, and let the last attempt finish."""
    torch.set_num_threads(1)
    found = {"whole": [attempt(folder / "whole", ("none", 0))]}
    for name, plans in scenarios().items():
        found[name] = [attempt(folder / name, plan) for plan in [*plans, ("none", 0)]]
    return found


# The tests


def scenarios() -> dict[str, list[Ending]]:
    pieces = count_pieces()
    return {
        "everywhere": [
            ("rename", 1),  # the plan is there and nothing else
            ("forward", 1),
            ("keep", 1),  # the embeddings
            ("half", 1),  # retrieval
            ("keep", 2),  # and a block of the first attack
            ("forward", 2),
            ("half", 2),
            ("fsync", 1),
            ("fsync", 2),
            ("forward", 9),
            ("keep", 5),
            ("forward", 7),  # the suite
            ("keep", 1),
            ("half", 1),
            ("keep", 3),  # checks from here on
            ("half", 2),
            ("forward", 30),
            ("fsync", 4),
            ("keep", 4),
        ],
        # The plan and the pieces are written; then come the arrays, and the record.
        "record": [("half", pieces + 2), ("half", 1), ("rename", 1), ("half", 2), ("rename", 2)],
        # What was written has had a draft, which is "removed" as well; the pieces come after all of these.
        "tidying": [("remove", pieces + 3 + 3)],
        "tidied": [("rmdir", 1)],
        "plan half written": [("half", 1)],
        "plan not on disk": [("fsync", 1)],
    }


def count_pieces() -> int:
    return len(evaluation(Path("nowhere")).pieces)


Result = Callable[[str], tuple[list[str], list[int]]]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Run the program once; how the attempts of a scenario ended, and how many pieces each left behind."""
    if not hasattr(os, "fork"):
        pytest.skip("SIGKILL and fork are POSIX's")
    folder = tmp_path_factory.mktemp("killed")
    found = run_program(__file__, str(folder))
    assert found["whole"] == [["finished", 0]]

    def of(name: str) -> tuple[list[str], list[int]]:
        """Check the last attempt against the uninterrupted one, and tell of the others."""
        *before, last = found[name]
        assert last[0] == "finished", found[name]
        for file in FILES:
            mine, wanted = ((folder / f / file).read_bytes() for f in (name, "whole"))
            assert mine == wanted, f"{name}: {file} differs from the uninterrupted one's"
        left = sorted(f.name for f in (folder / name).iterdir())
        assert left == ["plan.json", *sorted(FILES)], "something stays behind"
        return [end for end, _ in before], [parts for _, parts in before]

    return of


@pytest.mark.slow
def test_killed_at_any_moment(result: Result) -> None:
    ends, parts = result("everywhere")
    assert ends == ["killed"] * 19, (ends, parts)
    assert parts == sorted(parts), "a piece was lost"
    assert parts[0] == 0
    assert parts[-1] < count_pieces()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "times"),
    [("record", 5), ("tidying", 1), ("tidied", 1), ("plan half written", 1), ("plan not on disk", 1)],
)
def test_killed_while_files_are_written_or_removed(result: Result, scenario: str, times: int) -> None:
    ends, parts = result(scenario)
    assert ends == ["killed"] * times, (ends, parts)
    assert scenario != "record" or parts == [count_pieces()] * times


if __name__ == "__main__":
    print(json.dumps(program(Path(json.loads(sys.argv[1])))))
