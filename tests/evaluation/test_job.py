"""Work in pieces: kept, resumed, shared, and put together to the same bytes whatever goes wrong meanwhile."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from robustmetric.attacks import Problem, Search, Transfer
from robustmetric.errors import UserError
from robustmetric.evaluation import Certification, CertifyPlan, Data, Evaluation, Plan, Subject
from robustmetric.evaluation.job import PARTS, PLAN, Job, Piece, Ticks, check_folder
from robustmetric.evaluation.record import RECORD
from robustmetric.evaluation.verify import Verifying
from robustmetric.evaluation.verify_pairs import VerifyPlan
from robustmetric.files import DamagedError, save_entries
from robustmetric.locks import InUseError, locked
from tests.evaluation.conftest import Tiny, make_network

KINDS = ("evaluation", "certification", "verification")
HOW: dict[str, Any] = {"steps": 1, "queries": 8, "batch": 4, "attacks": ["ES", "GTT"], "checks": "quick"}
FILES = (RECORD, "queries.safetensors")


class World(NamedTuple):
    """What jobs of all kinds are made of."""

    images: Tensor
    labels: Tensor

    def job(
        self, kind: str, out: Path | None = None, model: nn.Module | None = None, **changes: Any
    ) -> Job[Any, Any]:
        """Set up a job of a kind with at least two pieces of most stages."""
        given = {name: changes.pop(name) for name in ("progress", "report", "classes") if name in changes}
        data = Data(self.images, self.labels, classes=given.pop("classes", None))
        few: dict[str, Any] = {"steps": 1, "batch": 16, **changes}
        model = model or make_network()
        if kind == "verification":
            plan = VerifyPlan.make(**{"count": 40, **few})
            return Verifying(Subject(model, data), plan, out=out, **given)
        if kind == "certification":
            noise = {"choose": 5, "gallery_samples": 5, "attack_samples": 2, "queries": 16}
            made = CertifyPlan.make(**{"sigma": 0.1, "samples": 50, **noise, **few})
            return Certification(Subject(model, data), made, out, **given)
        suite = "worst-case(goals='misrank,shift', steps=1, trials=2)"
        usual = {**HOW, "search": "transfer", "suite": suite, **changes}
        return Evaluation(Subject(model, data, surrogate=nn.Flatten()), Plan.make(**usual), out, **given)


@pytest.fixture(scope="module")
def world(images: Tensor, labels: Tensor) -> World:
    return World(images, labels)


@pytest.fixture(scope="module", params=KINDS)
def done(
    request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    """Of each kind: a finished folder, and one with all its pieces and without a document."""
    folder = tmp_path_factory.mktemp(request.param)
    world.job(request.param, folder / "whole").run()
    world.job(request.param, folder / "pieces").work(0, 1)
    return request.param, folder / "whole", folder / "pieces"


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same of an evaluation with all quick checks."""
    folder = tmp_path_factory.mktemp("made")
    tiny(out=folder / "whole", **HOW).run()
    tiny(out=folder / "pieces", **HOW).work(0, 1)
    return folder / "whole", folder / "pieces"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def stamps(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*")}


def flip(file: Path, place: float = 0.5, bit: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= bit
    file.write_bytes(bytes(content))


def after_keep(patch: pytest.MonkeyPatch, act: Callable[[Job[Any, Any], Piece], None]) -> None:
    """Let something happen as soon as a piece is kept."""
    keep = Job.keep

    def kept(job: Job[Any, Any], piece: Piece, value: Any) -> None:
        keep(job, piece, value)
        act(job, piece)

    patch.setattr(Job, "keep", kept)


# Pieces


# Interruptions


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_interrupted_after_each_piece_and_resumed(
    error: BaseException, done: tuple[str, Path, Path], world: World, tmp_path: Path
) -> None:
    kind, whole, _ = done
    out, kept = tmp_path / "out", dict[str, int]()

    def stop(job: Job[Any, Any], piece: Piece) -> None:
        raise error

    for _ in world.job(kind).pieces:
        with pytest.MonkeyPatch.context() as patch:
            after_keep(patch, stop)
            with pytest.raises(type(error)):
                world.job(kind, out).run()
        now = stamps(out / PARTS)
        assert len(now) == len(kept) + 1
        assert kept.items() <= now.items(), "a finished piece was made again"
        kept = now
    world.job(kind, out).run()
    assert contents(out) == contents(whole)
    assert not (out / PARTS).exists()


def test_a_finished_document_is_read_and_nothing_computed(
    done: tuple[str, Path, Path], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, whole, _ = done
    before, job = stamps(whole), world.job(kind, whole)
    for name in ("probe", "keep"):
        monkeypatch.setattr(type(job), name, lambda *_: pytest.fail("it was computed again"))
    assert job.run() == job.form.read(whole)
    job.work(0, 2)
    assert stamps(whole) == before
    with locked(whole, "something else"):
        assert job.run() == job.form.read(whole), "it takes no lock to read"


# Damage


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "another piece", "another seed"])
def test_each_damaged_or_exchanged_piece_is_made_anew(
    how: str, done: tuple[str, Path, Path], world: World, tmp_path: Path
) -> None:
    kind, whole, pieces = done
    out, said = tmp_path / "out", list[str]()
    shutil.copytree(pieces, out)
    files = sorted((out / PARTS).iterdir(), key=lambda file: (file.suffix, file.name))
    assert len(files) >= 4
    before = contents(out / PARTS)
    if how == "another seed":
        world.job(kind, tmp_path / "other", seed=1).work(0, 1)
    for k, (file, another) in enumerate(zip(files, [files[-1], *files[:-1]], strict=True)):
        if how == "flipped":
            flip(file, (k + 0.5) / len(files))
        elif how in ("cut", "empty"):
            file.write_bytes(before[file.name][: -1 if how == "cut" else 0])
        elif how == "another piece":
            file.write_bytes(before[another.name])
        else:
            file.write_bytes((tmp_path / "other" / PARTS / file.name).read_bytes())
    world.job(kind, out, report=said.append).run()
    assert len(said) == len(files)
    for file in files:
        assert any(str(file) in line and "made anew" in line for line in said)
    assert contents(out) == contents(whole)


# Workers


def in_threads(jobs: list[Job[Any, Any]]) -> None:
    """Let jobs share their work, each with a network of its own."""
    errors: list[BaseException] = []

    def work(job: Job[Any, Any], share: int) -> None:
        try:
            job.work(share, len(jobs))
        except BaseException as error:
            errors.append(error)

    # A folder is made once, as a command does before it starts workers.
    jobs[0]._begin()
    threads = [threading.Thread(target=work, args=(job, k), daemon=True) for k, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive(), "a worker waits for what never comes"
    assert not errors, errors


@pytest.mark.parametrize("shares", [2, 3])
def test_workers_share_the_pieces(
    shares: int, done: tuple[str, Path, Path], world: World, tmp_path: Path
) -> None:
    kind, whole, pieces = done
    out, kept = tmp_path / "out", list[tuple[int, str]]()
    with pytest.MonkeyPatch.context() as patch:
        after_keep(patch, lambda _, piece: kept.append((threading.get_ident(), piece.file)))
        in_threads([world.job(kind, out) for _ in range(shares)])
        by_worker = [{file for who, file in kept if who == me} for me in {who for who, _ in kept}]
        assert len(by_worker) == shares
        assert sum(map(len, by_worker)) == len({file for _, file in kept}), "a piece was made twice"
        assert max(map(len, by_worker)) - min(map(len, by_worker)) <= 1
        assert contents(out / PARTS) == contents(pieces / PARTS)
        kept.clear()
        world.job(kind, out).run()
        assert kept == []
    assert contents(out) == contents(whole)
    world.job(kind, out).work(0, shares)  # who comes late finds nothing to do


def test_a_worker_that_waits_ends_when_the_document_is_there(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces that it waits for are gone; what they were made for is there."""
    waits, over = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        waits.set()
        over.wait(600)

    slow = tiny(out=tmp_path, **HOW)
    monkeypatch.setitem(Job._make.__globals__, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    worker = threading.Thread(target=slow.work, args=(0, 2), daemon=True)
    worker.start()
    assert waits.wait(600)
    tiny(out=tmp_path, **HOW).run()
    over.set()
    worker.join(600)
    assert not worker.is_alive(), "a worker waits for ever for pieces that are no longer needed"


# The folder


IDENTITY: dict[str, Any] = {"kind": "evaluation", "settings": {"eps": 0.1, "steps": 2}, "options": {"k": "1"}}
IDENTITY |= {"data": "a" * 64}


def test_a_folder_that_is_free_or_of_the_same_work(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "none", IDENTITY) is False
    assert not (tmp_path / "none").exists()
    assert check_folder(tmp_path, IDENTITY) is False
    save_entries(tmp_path / PLAN, IDENTITY)
    assert check_folder(tmp_path, IDENTITY) is True
    some = {key: IDENTITY[key] for key in ("kind", "settings")}
    assert check_folder(tmp_path, some) is True, "the rest is not compared"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"settings": {"eps": 0.1, "steps": 3}, "options": {"k": "2"}}, ": steps was 2, is 3; give"),
        ({"options": {"k": "2"}}, ": k was '1', is '2'; give"),
        ({"data": "b" * 64}, ": data was 'aaaaaaaaaaaa', is 'bbbbbbbbbbbb'; give"),
        ({"more": 1}, ": more was None, is 1; give"),
        ({"kind": "verification"}, "another kind of work, 'evaluation'"),
    ],
)
def test_other_work_is_refused_with_what_differs(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    save_entries(tmp_path / PLAN, IDENTITY)
    with pytest.raises(UserError, match="give another folder") as refused:
        check_folder(tmp_path, {**IDENTITY, **change})
    assert told in str(refused.value)
    assert refused.value.parameter == "out"


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("three years")
    for out, told in (
        (tmp_path, "holds no evaluation: give another"),
        (tmp_path / "thesis.tex", "is a file"),
    ):
        with pytest.raises(UserError, match=told) as refused:
            check_folder(out, IDENTITY)
        assert refused.value.parameter == "out"
    assert (tmp_path / "thesis.tex").read_text() == "three years"


def test_pieces_are_not_kept_behind_a_link(tiny: Tiny, made: tuple[Path, Path], tmp_path: Path) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.mkdir()
    (mine / "letter.txt").write_text("mine")
    shutil.copytree(made[0], out)
    (out / PARTS).symlink_to(mine)
    with pytest.raises(UserError, match="is a link"):
        tiny(out=out, **HOW).run()
    assert (mine / "letter.txt").read_text() == "mine"


@dataclass(frozen=True, kw_only=True)
class Nudge(Search):
    """A search whose name does not tell its options."""

    follows_gradient: ClassVar[bool] = False
    name: ClassVar[str] = "nudge"
    size: float

    def minimise(self, problem: Problem) -> Tensor:
        return (problem.images + self.size * problem.budget.eps).clamp(0, 1)


def carried(size: float) -> dict[str, Any]:
    return {"search": Transfer(surrogate=nn.Flatten(), search=Nudge(size=size))}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({}, {"eps": 0.25}, "eps was 0.0627450980392156.*, is 0.25"),
        ({}, {"seed": 5, "queries": None}, "queries was 8, is None; seed was 0, is 5"),
        ({}, {"images": torch.rand(40, 1, 6, 6)}, "data was '[0-9a-f]{12}', is '[0-9a-f]{12}'"),
        ({}, {"model": make_network(1)}, "network was '[0-9a-f]{12}', is '[0-9a-f]{12}'"),
        (carried(0.1), carried(0.2), r"search\.search\.size was '0\.1', is '0\.2'"),
    ],
)
def test_another_evaluation_does_not_go_into_the_folder(
    one: dict[str, Any], other: dict[str, Any], told: str, finished: bool, tiny: Tiny, tmp_path: Path
) -> None:
    few: dict[str, Any] = {**HOW, "checks": "none", "attacks": ["ES", "GTT"], **one}
    if finished:
        record = tiny(out=tmp_path, **few).run()
    else:
        tiny(out=tmp_path, **few)._begin()
    before = stamps(tmp_path)
    with pytest.raises(UserError, match=f"holds another evaluation: {told}; give another folder"):
        tiny(out=tmp_path, **{**few, **other}).run()
    assert stamps(tmp_path) == before
    again = tiny(out=tmp_path, **few).run()
    assert not finished or again == record


def test_two_programs_do_not_write_into_one_folder(
    done: tuple[str, Path, Path], world: World, tmp_path: Path
) -> None:
    kind, whole, _ = done
    out, told = tmp_path / "out", list[str]()

    def second(stage: str, count: float, total: int) -> None:
        if stage != "embed" and not told:
            with pytest.raises(InUseError) as refused:
                world.job(kind, out).run()
            told.append(str(refused.value))

    world.job(kind, out, progress=second).run()
    assert f"{kind} by process {os.getpid()}" in told[0]
    assert contents(out) == contents(whole)


def test_a_network_that_fails_leaves_no_folder(world: World, tmp_path: Path) -> None:
    for kind in KINDS:
        with pytest.raises(UserError, match="failed on images"):
            world.job(kind, tmp_path / "a" / "b", nn.Linear(3, 3)).run()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk(
    code: int, tiny: Tiny, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fsync, calls, stops = tmp_path / "out", os.fsync, itertools.count(1), list[str]()

    def full(number: int) -> None:
        if next(calls) % 7 == 0:
            raise OSError(code, os.strerror(code))
        fsync(number)

    monkeypatch.setattr(os, "fsync", full)
    for _ in range(40):
        try:
            tiny(out=out, **HOW).run()
        except UserError as error:
            stops.append(str(error))
            assert not [path for path in out.rglob("*") if path.name.endswith(".tmp") or path.name == ".lock"]
        else:
            break
    assert len(stops) > 3
    for line in stops:
        assert line.startswith(str(out))
        assert os.strerror(code) in line
        assert "the same command" in line
    assert contents(out) == contents(made[0])


# Documents


@pytest.mark.parametrize(("place", "bit"), [(0.02, 1), (0.2, 2), (0.4, 16), (0.6, 1), (0.8, 2), (0.99, 16)])
def test_damaged_or_edited_documents_are_refused(
    place: float, bit: int, done: tuple[str, Path, Path], world: World, tmp_path: Path
) -> None:
    kind, whole, _ = done
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    job = world.job(kind, out)
    form, before = job.form, job.form.read(whole)
    file, arrays = out / form.file, out / before.arrays.file
    remedy = rf"remove .*{form.file} and run the same command again"

    flip(file, place, bit)
    try:
        found = form.read(out)
    except UserError:
        with pytest.raises(UserError, match=remedy):
            job.run()
    else:  # a bit of the layout of the file
        assert found == before

    content = json.loads((whole / form.file).read_text())
    file.write_text(json.dumps(content, indent=4))
    assert form.read(out) == before, "the layout is no part of it"
    content["data"]["images"] += 1
    file.write_text(json.dumps(content))
    with pytest.raises(DamagedError, match=rf"{form.file} is damaged, or was changed by hand"):
        form.read(out)

    shutil.copy(whole / form.file, file)
    flip(arrays, place, bit)
    with pytest.raises(UserError, match=rf"{arrays.name} .*{remedy}"):
        job.run()
    with pytest.raises(DamagedError):
        form.read_arrays(out)
    if (place, bit) == (0.02, 1):
        file.unlink()
        job.run()
        assert contents(out) == contents(whole), "what it advises leads to the same document"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"NaN", b"\xff\xfe{", b'{"settings": {', b"9" * 5000, b"[" * 10**5]
)
def test_what_is_no_document_and_no_plan(
    content: bytes, done: tuple[str, Path, Path], world: World, tmp_path: Path
) -> None:
    kind, whole, _ = done
    shutil.copytree(whole, tmp_path / "out")
    job = world.job(kind, tmp_path / "out")
    (tmp_path / "out" / job.form.file).write_bytes(content)
    with pytest.raises(UserError, match=rf"{job.form.file} .* remove .*{job.form.file} and run the same"):
        job.run()
    (tmp_path / "out" / PLAN).write_bytes(content)
    with pytest.raises(UserError, match=r"plan\.json is damaged.*; remove .*out and run the same command"):
        job.run()


# Progress


def test_progress_is_told_from_nothing_to_all(done: tuple[str, Path, Path], world: World) -> None:
    told: list[tuple[str, float, int]] = []
    job = world.job(done[0], progress=lambda *of: told.append(of))
    job.run()
    for stage, pieces in job.stages.items():
        whole = [(count, of) for s, count, of in told if s == stage and count == int(count)]
        assert whole == [(k, len(pieces)) for k in range(len(pieces) + 1)], stage


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever somebody looks at the clock, 0.3 s have passed."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.3 * next(ticks), sleep=lambda _: None)
    monkeypatch.setitem(Ticks.__init__.__globals__, "time", clock)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("search", ["pgd", "nes(samples=2)", "pgd(restarts=3)"])
def test_a_block_in_the_making_counts_by_its_share(search: str, tiny: Tiny) -> None:
    told: list[tuple[str, float, int]] = []
    how: dict[str, Any] = {"attacks": ["ES", "TMA"], "search": search}
    record = tiny(**how, progress=lambda *of: told.append(of)).run()
    for stage in ("ES", "TMA"):
        shares = [count for s, count, of in told if s == stage and of == 3]
        assert shares == sorted(shares)
        assert [count for count in shares if count == int(count)] == [0, 1, 2, 3]
        for block in range(3):
            parts = [count - block for count in shares if block < count < block + 1]
            assert len(parts) >= 2
            assert max(parts) <= 0.99 + 1e-9
    assert record == tiny(**how).run(), "telling changes no score"
