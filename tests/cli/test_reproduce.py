"""Every table and figure of the paper through the command line: killed, resumed, shared out, and refused."""

from __future__ import annotations

import csv
import hashlib
import json
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from robustmetric.data import DATA
from robustmetric.errors import UserError
from robustmetric.experiments import engine
from robustmetric.experiments.paper import all_cells, experiment, experiment_names
from robustmetric.experiments.work import make
from robustmetric.training.folder import read_rows
from tests.helpers.command import command, refused, works
from tests.helpers.layouts import write_cub
from tests.helpers.processes import alive, needs_proc, start, until
from tests.helpers.runs import make_run

NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "net.py").write_text(NET)
    return folder


def tiny(place: Path, out: str, *more: object, epochs: int = 1) -> list[str]:
    """Options of a scale at which a cell takes half a second."""
    scale = ["--epochs", epochs, "--queries", 8, "--steps", 1, "--batches", 2, "--threads", 1]
    net = ["--set", "batch=250", "--set", f"model={place / 'net.py'}:net"]
    return [*map(str, ["--data", "digits", *scale, *net, "--out", place / out, *more])]


RECORD = "run/evaluation*/record.json"
LONG = ("--set", "save_every=100000")
"""Trainings that have no checkpoint before they are stopped."""


def last_step(file: Path) -> int:
    return max((int(row["step"]) for row in read_rows(file)), default=0)


def steps_in(out: Path) -> list[int]:
    """The last logged steps of all trainings in a folder."""
    return [last_step(file) for file in out.glob("*/run/metrics.csv")]


def process_in(lock: Path) -> int:
    """The process that holds a lock, as the lock says."""
    return int(lock.read_text().partition("process ")[2].split()[0])


def cells_in(out: Path) -> list[Path]:
    return sorted(file.parent for file in out.glob("*/cell.json"))


def result_of(cell: Path) -> dict[str, bytes]:
    """What a cell came to, byte for byte."""
    files = [cell / "cell.json", *cell.glob("run/last.safetensors"), *cell.glob("run/evaluation*/*")]
    return {str(file.relative_to(cell)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def whole(place: Path) -> tuple[Path, str, Path | None]:
    """All tables and figures: killed in the midst of a cell, and gone on with; and which cell that was."""
    out = place / "whole"
    arguments = ["reproduce", "all", *tiny(place, "whole")]
    with start(*arguments) as first:
        assert until(lambda: len(cells_in(out)) >= 4)
        until(lambda: (cells_in(out)[-1] / "run" / "last.ckpt").exists(), 1)
        first.kill()
    begun = [cell for cell in cells_in(out) if not list(cell.glob(RECORD))]
    return out, works(*arguments), next((cell for cell in begun if "samplers" not in cell.name), None)


@pytest.mark.slow
def test_every_cell_of_every_table_and_figure_is_made_once(whole: tuple[Path, str, Path | None]) -> None:
    out, said, _ = whole
    tasks = all_cells(["digits"])
    assert len(cells_in(out)) == len(tasks) == 73
    assert sorted(task.slug for task in tasks) == [cell.name.rpartition("-")[0] for cell in cells_in(out)]
    for name in experiment_names():
        table = experiment(name, ["digits"])
        assert f"{table.heading} on digits: {table.title} (" in said
    assert "(1 epoch, 8 queries, attacks of 1 step, 1 worker, batch = 250" in " ".join(said.split())


@pytest.mark.slow
def test_tables_hold_the_figures_of_their_records(whole: tuple[Path, str, Path | None]) -> None:
    out, _, _ = whole
    with (out / "table6-digits.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "ours"]
    table = experiment("table6", ["digits"])
    assert [row["defense"] for row in rows] == [row.defense for row in table.rows]
    slugs = {cell.name.rpartition("-")[0]: cell for cell in cells_in(out)}
    for line, row in zip(rows, table.rows, strict=True):
        record = json.loads(next(slugs[row.tasks[0].slug].glob(RECORD)).read_text("utf-8"))
        assert float(line["R@1"]) == pytest.approx(record["retrieval"]["R@1"]["value"])
        assert float(line["ERS"]) == pytest.approx(record["ers"]["value"])
        assert record["settings"]["protocol"] == "reference"


@pytest.mark.slow
def test_figures_and_tables_are_files(whole: tuple[Path, str, Path | None]) -> None:
    out, _, _ = whole
    names = [f"{name}-digits" for name in experiment_names()]
    wanted = {f"{name}.{ending}" for name in names for ending in ("md", "tex", "csv")}
    drawn = [name for name in names if name.startswith("figure")] + ["table1-digits-histograms"]
    wanted |= {f"{name}.{ending}" for name in drawn for ending in ("svg", "pdf", "png")}
    assert {path.name for path in out.iterdir() if path.is_file()} == wanted


@pytest.mark.slow
def test_a_killed_cell_is_the_same_as_one_made_by_its_own_command(
    place: Path, whole: tuple[Path, str, Path | None]
) -> None:
    out, _, killed = whole
    some = ([killed] if killed else []) + cells_in(out)[:1]
    lines = works("reproduce", "all", *tiny(place, "alone"), "--dry-run").splitlines()
    commands = {shlex.split(line)[-1]: shlex.split(line)[1:] for line in lines}
    assert sorted(commands) == [cell.name for cell in cells_in(out)]
    for cell in some:
        works(*commands[cell.name])
        assert result_of(place / "alone" / cell.name) == result_of(cell)
    # What is made is not printed again.
    assert len(works("reproduce", "all", *tiny(place, "alone"), "--dry-run").splitlines()) == 73 - len(some)


@pytest.mark.slow
def test_what_is_there_is_shown_without_its_images(
    place: Path, whole: tuple[Path, str, Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that were copied from several machines, put together where no images are."""
    out, _, _ = whole
    merged = place / "merged"
    names = [cell for cell in cells_in(out) if "ICS" in cell.name]
    for number, cell in enumerate(names):
        shutil.copytree(cell, merged / f"machine{number % 2}" / cell.name)
    for name in list(DATA):
        monkeypatch.delitem(DATA, name)
    works("reproduce", "table10", *tiny(place, "merged"), "--to", "md")
    assert [file.name for file in merged.glob("table10-*")] == ["table10-digits.md"]
    assert (merged / "table10-digits.md").read_text("utf-8") == (out / "table10-digits.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray has its own
@pytest.mark.parametrize("on", ["local", "ray"])
def test_processes_that_share_the_cores_make_the_same(
    place: Path, whole: tuple[Path, str, Path | None], on: str
) -> None:
    out, _, _ = whole
    works("reproduce", "table7", *tiny(place, on), "--jobs", 2, "--on", on)
    assert len(cells_in(place / on)) == 2
    for cell in cells_in(place / on):
        assert result_of(cell) == result_of(out / cell.name)


@pytest.mark.slow
def test_a_stop_reaches_all_processes(place: Path) -> None:
    """There are more cells than processes: none begins after the stop."""
    out = place / "stopped"
    with start(
        "reproduce", "table9", *tiny(place, "stopped", *LONG, epochs=100000), "--jobs", "2"
    ) as running:
        assert until(lambda: len(steps_in(out)) == 2 and min(steps_in(out)) >= 10)
        running.send_signal(signal.SIGINT)
        said = "".join(running.communicate(timeout=600))
    assert running.returncode == 128 + signal.SIGINT, said
    assert "run the same command again" in said
    assert "Traceback" not in said
    assert len(list(out.glob("*/run/last.ckpt"))) == 2
    assert len(cells_in(out)) == 2
    assert not list(out.glob("*/run/.lock"))


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_training_of_several_workers_ends_with_what_started_it(place: Path, number: signal.Signals) -> None:
    out = place / number.name
    options = [*tiny(place, number.name, *LONG, epochs=100000), "--devices", "2"]
    with start("reproduce", "table7", *options) as running:
        assert until(lambda: max(steps_in(out), default=0) >= 10)
        (cell,) = cells_in(out)
        trains = process_in(cell / "run" / ".lock")
        running.send_signal(number)
        running.wait(600)
    assert until(lambda: not alive(trains))
    assert running.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert cells_in(out) == [cell]
    assert (cell / "run" / "last.ckpt").exists()
    assert not (cell / "run" / ".lock").exists()


@pytest.mark.slow
def test_a_training_of_two_workers_is_a_program_of_its_own(place: Path) -> None:
    line = works("reproduce", "table8", *tiny(place, "pair"), "--devices", 2, "--dry-run").splitlines()[0]
    said = works(*shlex.split(line)[1:])
    (cell,) = cells_in(place / "pair")
    about = json.loads((cell / "run" / "run.json").read_text(encoding="utf-8"))
    assert about["origin"]["workers"] == 2
    assert list(cell.glob(RECORD))
    assert "1 of 1: digits HM[S,LGA]&ICS η=8 seed 0: R@1 " in said


@pytest.mark.slow
def test_a_training_of_two_workers_that_diverges_is_a_collapse(place: Path) -> None:
    options = ["--data", "digits", "--epochs", 1, "--set", "batch=250", "--set", "lr=1e6", "--threads", 1]
    said = works("reproduce", "table10", *options, "--devices", 2, "--out", place / "diverged")
    assert said.count("collapse: the network diverged at step") == 2


@pytest.mark.slow
def test_published_figures_stand_beside_ours_on_the_paper_s_data(place: Path) -> None:
    root = write_cub(place / "cub", (6, 6, 6, 6))
    sizes = ["--set", "resize=8", "--set", "crop=8", "--set", "batch=8"]
    net = ["--set", f"model={place / 'net.py'}:net", "--cache", place / "cache", "--devices", 1]
    scale = ["--epochs", 1, "--queries", 4, "--steps", 1, "--threads", 1]
    said = works(
        "reproduce", "table7", "--root", f"cub={root}", *sizes, *net, *scale, "--out", place / "birds"
    )
    assert "careful: cub has 2 of 100 training classes and 2 of 100 test classes" in said
    assert "1 worker (published: 2), from random weights (published: ImageNet's)" in " ".join(said.split())
    with (place / "birds" / "table7-cub.csv").open(encoding="utf-8", newline="") as file:
        ours, theirs, difference = list(csv.DictReader(file))[:3]
    assert (ours["kind"], theirs["kind"], difference["kind"]) == ("ours", "published", "difference")
    assert (theirs["R@1"], theirs["ERS"]) == ("38.0", "32.4")
    assert float(difference["ERS"]) == pytest.approx(float(ours["ERS"]) - 32.4)


@pytest.mark.slow
def test_samplers_are_measured_at_the_start_and_after_training(tmp_path: Path) -> None:
    """Both measurements are kept in one folder, and their titles tell them apart."""
    make_run(tmp_path / "run", "last", first=7)
    out, last = tmp_path / "out", tmp_path / "run" / "last.safetensors"
    options = ["--data", "digits", "--batches", 2, "--set", "dim=16", "--threads", 1, "--out", out]
    begins, trained = (
        " ".join(works("reproduce", "table1", *options, *more).split()) for more in ([], ["--weights", last])
    )
    title = "Table 1 on digits: Mean and variance of the hardness that samplers draw"
    assert f"{title} (2 batches, at the start of training, dim = 16)" in begins
    assert f"{title} (2 batches, from the weights run/last.safetensors, dim = 16)" in trained
    assert "| Softhard | Softhard p≠a | Distance |" in (out / "table1-digits.md").read_text(encoding="utf-8")
    assert len(cells_in(out)) == 2
    digest = hashlib.sha256(last.read_bytes()).hexdigest()
    tables = [out / f"table1-digits{which}.csv" for which in ("", f"-weights-{digest[:8]}")]
    means = []
    for file in tables:
        assert file.with_name(f"{file.stem}-histograms.svg").is_file()
        with file.open(encoding="utf-8", newline="") as opened:
            means.append(next(csv.DictReader(opened)))
    assert means[0]["scale"].startswith("2 batches, at the start of training")
    assert means[1]["scale"].startswith("2 batches, from the weights run/last.safetensors")
    assert all(means[0][name] != means[1][name] for name in ("R", "M", "S", "S(itself=False)", "D", "H"))
    # What is there is not measured again.
    assert not works("reproduce", "table1", *options, "--dry-run")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["table7", "--queries", "0"], "queries must be a whole number of at least 1, not 0 (--queries)"),
        (["table7", "--set", "defense=N/A[R]"], "defense cannot be set"),
        (["table7", "--set", "dimm=3"], "unknown recipe entry 'dimm' (did you mean 'dim'?)"),
        (["table7", "--root", "somewhere"], "give one root for each data set"),
        (["table7", "--root", "cub=a", "--root", "cub=b"], "give one root for each data set"),
        (["table7", "--data", "digit"], "unknown data set 'digit' (did you mean 'digits'?)"),
        (["table7", "--data", "digits", "--cell", "nothing"], "unknown cell 'nothing'"),
        (["table7", "--data", "cub"], "cub needs a root"),
        (["table1", "--data", "digits", "--weights", "none.pt"], "none.pt: give another file"),
        (["table1", "--data", "digits", "--weights", "."], "is a folder, not a file of weights"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(tmp_path: Path, arguments: list[str], told: str) -> None:
    assert told in refused("reproduce", *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_data_set_that_lacks_classes_is_refused(tmp_path: Path) -> None:
    write_cub(tmp_path / "cub", (3, 3))
    said = refused(
        "reproduce", "table7", "--data", "cub", "--root", tmp_path / "cub", "--out", tmp_path / "out"
    )
    assert "the train split of cub has 1 class, and each cell needs at least 2" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_cell_that_fails_does_not_keep_the_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: object, *_: object) -> object:
        if "u=2.2" in job.task.label:  # type: ignore[attr-defined]
            raise UserError("the disk is full")
        return make(job, lambda _: None)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "make", failing)
    said = command("reproduce", "table7", *tiny(place, "failing"))
    assert said.code == 1
    assert "not made: digits HM[S,LGA(u=2.2)] η=8 seed 0: the disk is full" in said.out
    assert "1 of 2 cells were not made; run the same command again" in said.err
    assert len(list((place / "failing").glob(f"*/{RECORD}"))) == 1
