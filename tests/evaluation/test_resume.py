"""Evaluations that are killed at any moment and run again: as if nothing had happened.

This file is also the program that the tests start (see tests/helpers/processes.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from robustmetric.attacks import EmbeddingShift, Gallery, Problem, Queries, Search, Target, Transfer
from robustmetric.evaluation import Evaluation, Plan, Record, Subject
from robustmetric.evaluation.store import Store
from tests.helpers.processes import at_call, die, forked, run_program

Tiny = Callable[..., Evaluation]
Ending = tuple[str, float]  # what ends the attempt, and when; ("none", 0) lets it finish

FEW: dict[str, Any] = {"steps": 2, "queries": 12, "batch": 4, "attacks": ["CA+", "ES", "GTT"]}
SUITE = "worst-case(goals='misrank,shift', steps=2, targets=1, trials=3)"
FILES = ("record.json", "queries.safetensors")


# The program: attempts in processes of their own


def evaluation(out: Path, **changes: Any) -> Evaluation:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    images = torch.rand(30, 1, 6, 6, generator=generator)
    settings: dict[str, Any] = {
        "eps": 0.1,
        "alpha": 0.03,
        "steps": 3,
        "queries": 20,
        "batch": 8,
        "checks": "quick",
    }
    settings |= {"attacks": ["CA-", "ES", "GTM"], "suite": SUITE, **changes}
    return Evaluation(Subject(model, images, torch.arange(30) % 4), Plan.make(**settings), out)


def prepare(work: Evaluation, kind: str, number: float) -> None:
    """Arrange for this process to be killed as planned."""
    model = work.subject.model
    keep, replace, unlink, rmdir = Store.keep, Path.replace, Path.unlink, Path.rmdir

    def kept(store: Store, piece: Any, value: Any) -> None:
        keep(store, piece, value)
        die()

    def renamed(draft: Path, final: Path) -> None:
        replace(draft, final)
        die()

    def half(draft: Path, final: Path) -> None:
        """Leave half of a file that was not yet put in its place."""
        draft.write_bytes(draft.read_bytes()[: draft.stat().st_size // 2])
        die()

    def wait_and_die() -> None:
        time.sleep(number)
        die()

    patch: Any = {
        "keep": lambda: (Store, "keep", at_call(number, kept, keep)),
        "rename": lambda: (Path, "replace", at_call(number, renamed, replace)),
        "half": lambda: (Path, "replace", at_call(number, half, replace)),
        "fsync": lambda: (os, "fsync", at_call(number, die, os.fsync)),
        "remove": lambda: (Path, "unlink", at_call(number, die, unlink)),
        "rmdir": lambda: (Path, "rmdir", at_call(number, die, rmdir)),
        "forward": lambda: (model, "forward", at_call(number, die, model.forward)),
    }
    if kind == "time":
        threading.Thread(target=wait_and_die, daemon=True).start()
    elif kind != "none":
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
    begin = time.monotonic()
    found = {"whole": [attempt(folder / "whole", ("none", 0))]}
    took = time.monotonic() - begin
    for name, plans in scenarios().items():
        found[name] = [attempt(folder / name, plan) for plan in [*plans, ("none", 0)]]
    # Others die at random moments, until there were ten; after each that gets through comes a new one.
    rng, kills, number = random.Random(3), 0, 0  # noqa: S311
    while kills < 10 and number < 10:
        ends = found.setdefault(f"random {number}", [])
        ends.append(attempt(folder / f"random {number}", ("time", rng.uniform(0.02, 0.5) * took)))
        kills += ends[-1][0] == "killed"
        number += ends[-1][0] == "finished"
        if ends[-1][0] not in ("killed", "finished"):
            break
    found[f"random {number}"] = [
        *found.get(f"random {number}", []),
        attempt(folder / f"random {number}", ("none", 0)),
    ]
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
    return sum(len(stage.pieces) for stage in evaluation(Path("nowhere")).materials.stages)


Result = Callable[[str], tuple[list[str], list[int]]]  # "random" stands for all whose name begins so


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Run the program once; how the attempts of a scenario ended, and how many pieces each left behind."""
    if not hasattr(os, "fork"):
        pytest.skip("SIGKILL and fork are POSIX's")
    folder = tmp_path_factory.mktemp("killed")
    found = run_program(__file__, str(folder))
    assert found["whole"] == [["finished", 0]]

    def of(scenario: str) -> tuple[list[str], list[int]]:
        """Check the last attempts against the uninterrupted one, and tell of the others."""
        names = [name for name in found if name.startswith(scenario)]
        assert names
        for name in names:
            assert found[name][-1][0] == "finished", found[name]
            for file in FILES:
                mine, wanted = ((folder / f / file).read_bytes() for f in (name, "whole"))
                assert mine == wanted, f"{name}: {file} differs from the uninterrupted one's"
            if scenario.startswith("tid"):
                left = sorted(f.name for f in (folder / name).iterdir())
                assert left == ["plan.json", *sorted(FILES)], "something stays behind"
        before = [attempt for name in names for attempt in found[name][:-1]]
        return [end for end, _ in before], [parts for _, parts in before]

    return of


@pytest.mark.slow
def test_killed_at_random_moments(result: Result) -> None:
    assert result("random")[0] == ["killed"] * 10


@pytest.mark.slow
def test_killed_between_pieces_in_the_network_and_while_writing(result: Result) -> None:
    ends, parts = result("everywhere")
    assert ends == ["killed"] * 19, (ends, parts)
    assert parts == sorted(parts), "a piece was lost"
    assert parts[0] == 0
    assert parts[-1] < count_pieces()


@pytest.mark.slow
def test_killed_while_the_record_is_put_together(result: Result) -> None:
    ends, parts = result("record")
    assert ends == ["killed"] * 5, (ends, parts)
    assert parts == [count_pieces()] * 5


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["tidying", "tidied"])
def test_killed_while_tidying_up_leaves_nothing_behind(result: Result, scenario: str) -> None:
    assert result(scenario)[0] == ["killed"]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["plan half written", "plan not on disk"])
def test_killed_before_the_plan_is_written(result: Result, scenario: str) -> None:
    assert result(scenario)[0] == ["killed"]


# In this process


class Counting(nn.Module):
    """Counts the images that it is given, and fails or is interrupted at a call if told so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.images = self.calls = 0
        self.at: int | None = None
        self.error: BaseException = KeyboardInterrupt()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.images += len(x)
        if self.calls == self.at:
            raise self.error
        z: Tensor = self.inner(x)
        return z


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_what_was_finished_before_an_error_is_not_computed_again(
    tiny: Tiny, network: nn.Module, tmp_path: Path, error: BaseException
) -> None:
    whole = Counting(network)
    tiny(whole, out=tmp_path / "whole", **FEW).run()
    out, model = tmp_path / "out", Counting(network)
    model.error = error
    kept: dict[str, int] = {}
    stops = 0
    for at in (3, 12, 6, 11, 5):  # the first two calls are trials, the next ten embed all images
        model.calls, model.at = 0, at
        with contextlib.suppress(type(error)):
            tiny(model, out=out, **FEW).run()
            break
        stops += 1
        stamps = {f.name: f.stat().st_mtime_ns for f in (out / "parts").glob("*")} if stops > 1 else {}
        assert {n: stamps[n] for n in kept} == kept, "a finished piece was made again"
        assert len(stamps) > len(kept) or at == 3
        kept = stamps
    assert stops == 5
    assert len(kept) >= 5
    model.calls = model.images = 0
    model.at = None
    tiny(model, out=out, **FEW).run()
    assert 0 < model.images < whole.images
    for name in FILES:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_all_that_is_missing_is_computed_and_nothing_else(tiny: Tiny, tmp_path: Path) -> None:
    """Take any piece away before the end: it is made again as it was, and alone."""
    out, settings = tmp_path / "out", {**FEW, "checks": "quick"}
    evaluation = tiny(out=out, **settings)
    evaluation.work(0, 1)
    parts = out / "parts"
    before = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in parts.iterdir()}
    assert {n.partition("-")[0] for n in before} == {"embed", "retrieval.safetensors", "attack", "check"}
    for name in ("embed-00000", "retrieval", "attack-01-00002", "check-eps-0"):
        next(parts.glob(f"{name}.*")).unlink()
        tiny(out=out, **settings).work(0, 1)
        for file in parts.iterdir():
            content, stamp = before[file.name]
            assert file.read_bytes() == content, file.name
            if file.stem == name:
                before[file.name] = content, file.stat().st_mtime_ns
            else:
                assert file.stat().st_mtime_ns == stamp, f"{file.name} was made again"


def test_a_finished_folder_gives_its_record_without_computing(
    tiny: Tiny, network: nn.Module, tmp_path: Path
) -> None:
    model = Counting(network)
    first = tiny(model, out=tmp_path, **FEW).run()
    calls, stamps = model.calls, {f.name: f.stat().st_mtime_ns for f in tmp_path.iterdir()}
    again = tiny(model, out=str(tmp_path), **FEW).run()
    tiny(model, out=tmp_path, **FEW).work(0, 2)
    assert model.calls == calls
    assert again.model_dump_json() == first.model_dump_json()
    assert {f.name: f.stat().st_mtime_ns for f in tmp_path.iterdir()} == stamps


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eps": 0.25}, "eps was 0.0627450980392156.*, is 0.25"),
        ({"steps": 3}, "steps was 2, is 3"),
        ({"seed": 5, "queries": None}, "queries was 12, is None; seed was 0, is 5"),
        ({"attacks": ["CA+", "GTT"]}, r"attacks was \['CA\+', 'ES', 'GTT'\], is \['CA\+', 'GTT'\]"),
        ({"protocol": "reference"}, "protocol was 'strict', is 'reference'"),
        ({"search": "pgd(restarts=2)"}, r"search was 'pgd', is 'pgd\(restarts=2\)'"),
        ({"checks": "quick"}, "checks was 'none', is 'quick'"),
        ({"batch": 5}, "batch was 4, is 5"),
        ({"images": "another"}, "data was '[0-9a-f]{12}', is '[0-9a-f]{12}'"),
        ({"labels": "another"}, "data was '[0-9a-f]{12}', is '[0-9a-f]{12}'"),
        ({"model": "another"}, "network was '[0-9a-f]{12}', is '[0-9a-f]{12}'"),
    ],
)
def test_another_evaluation_in_the_folder_is_refused_with_what_differs(
    tiny: Tiny,
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    tmp_path: Path,
    change: dict[str, Any],
    says: str,
    finished: bool,
) -> None:
    evaluation = tiny(network, out=tmp_path / "out", **FEW)
    if finished:
        evaluation.run()
    else:
        evaluation.begin()
    before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")}
    change = dict(change)
    for name, value in (("images", 1 - images), ("labels", labels.flip(0))):
        if name in change:
            change[name] = value
    if change.pop("model", None):
        with torch.no_grad():
            next(network.parameters())[0, 0] += 1
    with pytest.raises(ValueError, match=rf"holds another evaluation: {says}; give another .*folder"):
        tiny(network, out=tmp_path / "out", **{**FEW, **change}).run()
    assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")} == before


@dataclass(frozen=True, kw_only=True)
class Farther(EmbeddingShift):
    """An attack whose name does not tell its options."""

    times: int = 1

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        return self.times * super().objective(z, target, queries, gallery)


@dataclass(frozen=True, kw_only=True)
class Nudge(Search):
    """A search whose name does not tell its options."""

    follows_gradient: ClassVar[bool] = False
    size: float = 0.1

    @property
    def name(self) -> str:
        return "nudge"

    def minimise(self, problem: Problem) -> Tensor:
        return (problem.images + self.size * problem.budget.eps).clamp(0, 1)


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ({"attacks": [Farther()]}, {"attacks": [Farther(times=3)]}, r"attacks\.ES\.times was '1', is '3'"),
        ({"search": Nudge()}, {"search": Nudge(size=0.2)}, r"search\.size was '0\.1', is '0\.2'"),
        (
            {"search": Transfer(surrogate=nn.Flatten(), search=Nudge())},
            {"search": Transfer(surrogate=nn.Flatten(), search=Nudge(size=0.2))},
            r"search\.search\.size was '0\.1', is '0\.2'",
        ),
    ],
)
def test_options_that_no_name_tells_are_part_of_the_plan(
    tiny: Tiny, tmp_path: Path, one: dict[str, Any], other: dict[str, Any], says: str
) -> None:
    first = tiny(out=tmp_path / "out", **{**FEW, **one}).run()
    with pytest.raises(ValueError, match=rf"holds another evaluation: {says}; give another"):
        tiny(out=tmp_path / "out", **{**FEW, **other}).run()
    assert tiny(out=tmp_path / "out", **{**FEW, **one}).run().model_dump_json() == first.model_dump_json()


def test_images_of_another_precision_are_other_data(tiny: Tiny, tmp_path: Path, images: Tensor) -> None:
    tiny(nn.Flatten(), images=images.half(), out=tmp_path / "out", **FEW).run()
    with pytest.raises(ValueError, match="holds another evaluation: data was"):
        tiny(nn.Flatten(), images=images.half().float(), out=tmp_path / "out", **FEW).run()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "another"},
        {"data": "other images"},
        {"classes": ["a", "b"], "train_classes": ["b"], "checks": "quick"},
    ],
)
def test_what_a_record_says_besides_is_part_of_the_plan(
    tiny: Tiny, tmp_path: Path, change: dict[str, Any]
) -> None:
    """A finished record is not given for a call that would have said something else."""
    settings = {**FEW, "checks": change.get("checks", "none")}
    tiny(out=tmp_path, **settings).run()
    wanted = tiny(**{**settings, **change}).run()
    found: Record | None = None
    with contextlib.suppress(ValueError):
        found = tiny(out=tmp_path, **{**settings, **change}).run()
    assert found is None or found.model_dump_json() == wanted.model_dump_json()


def test_a_folder_with_other_things_is_refused_and_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("three years")
    with pytest.raises(ValueError, match=r"is not empty and holds no evaluation: give another .*folder"):
        tiny(out=tmp_path, **FEW).run()
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "three years"
    deep = tmp_path / "a" / "b" / "c"
    tiny(out=deep, **FEW).run()
    assert (deep / "record.json").is_file()


def test_a_plan_that_is_damaged_is_named(tiny: Tiny, tmp_path: Path) -> None:
    tiny(out=tmp_path, **FEW).begin()
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json"):
        tiny(out=tmp_path, **FEW).run()


def test_a_worker_that_is_still_there_when_the_record_is_made_ends(tiny: Tiny, tmp_path: Path) -> None:
    """The pieces that it waits for are gone; what they were made for is there."""
    settings = {**FEW, "steps": 1}
    slow = tiny(out=tmp_path, **settings)
    waits = threading.Event()
    wait = slow.store.wait

    def late(pieces: Sequence[Any]) -> bool:
        if any(piece.file.startswith("attack") for piece in pieces):
            waits.set()
            time.sleep(1)
        return wait(pieces)

    slow.store.wait = late  # type: ignore[method-assign]
    worker = threading.Thread(target=slow.work, args=(0, 2), daemon=True)
    worker.start()
    assert waits.wait(30)
    tiny(out=tmp_path, **settings).run()
    worker.join(5)
    stuck = worker.is_alive()
    slow.store.has = lambda piece: True  # type: ignore[method-assign]
    worker.join(5)
    assert not stuck, "a worker waits for ever for pieces that are no longer needed"


if __name__ == "__main__":
    print(json.dumps(program(Path(json.loads(sys.argv[1])))))
