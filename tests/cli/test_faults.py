"""What goes wrong around the command line: signals, kills while writing, full disks, names that attack."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.table import Table
from rich.text import Text

from robustmetric.cli.progress import Progress
from robustmetric.cli.terminal import Terminal, styled
from robustmetric.evaluation.job import Job
from robustmetric.files import digest_of_entries
from robustmetric.locks import LOCK, claimed, locked
from robustmetric.models.c2f2 import C2F2
from tests.cli.tables import ONE, SMALL, contents
from tests.helpers.command import command, refused, works
from tests.helpers.processes import at_call, die, forked, needs_fork, stop_by

ATTACK = ("--attack", "ES", "--queries", 3, "--steps", 1)


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C is heard, as in a terminal; a shell's background jobs ignore it."""
    before = {n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# Damaged files and locks


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_damaged_piece_is_said_and_made_anew(
    devices: int,
    run: Path,
    whole: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: None,
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(Job, "keep", at_call(9, stop_by(signal.SIGINT), Job.keep))
    assert command("evaluate", run, *SMALL, "--out", out).code == 130
    monkeypatch.undo()
    file = sorted((out / "parts").glob("attack*"))[0]
    file.write_bytes(file.read_bytes()[:200] + b"?" + file.read_bytes()[201:])
    printed = works("evaluate", run, *SMALL, "--devices", devices, "--out", out)
    told = re.search(rf"^{re.escape(str(file))} is damaged.*made anew$", printed, re.MULTILINE)
    assert told or devices > 1  # a worker tells of it on its own output
    assert contents(out) == contents(whole[0])


@pytest.mark.parametrize("content", [b"[]", b"{}", b"null", b"\xff", b"[" * 10**5, b"1" * 5000])
def test_a_damaged_record(content: bytes, run: Path, whole: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    (out / "record.json").write_bytes(content)
    said = refused("evaluate", run, *SMALL, "--out", out)
    assert f"remove {out / 'record.json'} and run the same command again" in said
    assert f"{out / 'record.json'} " in refused("report", out, whole[0])
    (out / "plan.json").write_bytes(content)
    assert f"remove {out} and run the same command again" in refused("evaluate", run, *SMALL, "--out", out)


def test_a_folder_that_is_in_use(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(out, "a training"):
        said = refused("evaluate", run, *ONE, "--out", out)
        assert [path.name for path in out.iterdir()] == [LOCK]
    assert f"a training by process {os.getpid()}" in said
    assert said.rstrip().endswith("(--out)")
    works("evaluate", run, *ONE, "--out", out)
    with claimed(tmp_path / "images", "an attack"):
        said = refused("attack", run, *ATTACK, "--out", tmp_path / "images")
    assert f"an attack by process {os.getpid()}" in said


# Attacks that are killed while they write


@pytest.mark.slow
@needs_fork
def test_an_attack_that_is_killed_while_it_writes(run: Path, tmp_path: Path) -> None:
    options = ["attack", str(run), *map(str, ATTACK), "--out"]
    works(*options, tmp_path / "whole")
    wanted = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    out = tmp_path / "out"

    def killed(number: int) -> int:
        def act() -> None:
            torch.set_num_threads(1)
            os.fsync = at_call(number, die, os.fsync)
            sys.argv = ["robustmetric", *options, str(out)]
            from robustmetric import cli

            cli.run()

        return forked(act)[0]

    for number in (1, 9, 14):  # each file is brought to the disk, and then its folder
        assert killed(number) == -signal.SIGKILL
        assert not out.exists()
    works(*options, out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_an_evaluation_on_a_full_disk(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    works("evaluate", run, *ONE, "--out", tmp_path / "whole")
    monkeypatch.setattr(os, "fsync", at_call(5, full, os.fsync))
    said = refused("evaluate", run, *ONE, "--out", tmp_path / "out")
    assert re.search(r"parts/\S+ cannot be written \(No space left on device\)", said)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json", "parts"}
    monkeypatch.undo()
    works("evaluate", run, *ONE, "--out", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# Signals

ENDLESS = ("--queries", 4, "--steps", 10**9)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("search", ["pgd", "spsa(samples=2)"])
@pytest.mark.parametrize("name", ["evaluate", "attack"])
def test_a_long_perturbation_is_stopped_by_one_signal(
    name: str,
    search: str,
    number: signal.Signals,
    code: int,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: None,
) -> None:
    monkeypatch.setattr(C2F2, "forward", at_call(40, stop_by(number), C2F2.forward))
    what = ("--attacks", "ES", "--checks", "none") if name == "evaluate" else ("--attack", "ES")
    said = command(name, run, *what, *ENDLESS, "--search", search, "--out", tmp_path / "out")
    assert said.code == code
    assert said.err.startswith("stopped; ")
    assert (tmp_path / "out" / "plan.json").exists() == (name == "evaluate")


@pytest.mark.parametrize("name", ["evaluate", "attack"])
@pytest.mark.parametrize("again", [(Progress, "__exit__"), (Terminal, "print"), (Path, "unlink")])
def test_a_second_signal(
    again: tuple[type, str],
    name: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: None,
) -> None:
    def stop(*_: object) -> None:
        where, what = again
        monkeypatch.setattr(where, what, at_call(1, stop_by(signal.SIGINT), getattr(where, what)))
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(C2F2, "forward", at_call(20, stop, C2F2.forward))
    what = ("--attacks", "ES", "--checks", "none") if name == "evaluate" else ("--attack", "ES")
    said = command(name, run, *what, *ENDLESS, "--out", tmp_path / "out")
    assert said.code == 130
    assert said.err.startswith("stopped; ")
    assert "Traceback" not in said.out + said.err


# The terminal

HOSTILE = "x[/bold]\x1b[2J\x1b]0;title\x07\u202e[red]:bomb:\x9b31m\udcff"
VISIBLE = r"x[/bold]\x1b[2J\x1b]0;title\x07\x202e[red]:bomb:\x9b31m\xff"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]|\U0001f4a3")


def shown(*things: Any, **options: Any) -> str:
    text = io.StringIO()
    Terminal(file=text, width=200, **options).print(*things)
    return text.getvalue()


@pytest.mark.parametrize(
    "thing",
    [
        HOSTILE,
        Text(HOSTILE),
        styled(("error:", "bold red"), HOSTILE),
        styled((HOSTILE, "dim")),
        Table(HOSTILE),
        Table("", title=HOSTILE),
    ],
    ids=["string", "text", "styled", "style", "heading", "title"],
)
def test_names_do_not_steer_the_terminal(thing: Any) -> None:
    if isinstance(thing, Table):
        thing.add_row(HOSTILE)
    printed = shown(thing)
    assert (VISIBLE.replace(r"\x07", "") if thing == Text(HOSTILE) else VISIBLE) in printed
    assert not RAW.search(printed)
    coloured = shown(thing, force_terminal=True, color_system="truecolor")
    assert not RAW.search(re.sub(r"\x1b\[[0-9;]*m", "", coloured))


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Images whose files and classes have names that attack terminals and spreadsheets."""
    root = tmp_path / "odd"
    for number, name in enumerate(("=1+1", "x[", "esc\x1b[31m", "+a", "-7", "@b", "\tc", "plain")):
        (root / name).mkdir(parents=True)
        for k in range(3):
            pixels = np.random.default_rng([number, k]).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"bold]{k}\x1b[2J.png")
    (root / "x[" / "bro\x1b]0;t\x07ken].png").write_bytes(b"no image")
    return root


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no such names there")
def test_names_of_files_and_classes(odd: Path, tmp_path: Path) -> None:
    given = ["--model", "c2f2", "--dim", 4, "--size", 8, "--data", "folder", "--root", odd, "--split", "all"]
    given += ["--cache", tmp_path / "cache"]
    name = r"x[/bro\x1b]0;t\x07ken].png"
    said = refused("evaluate", *given, *ONE, "--out", tmp_path / "out")
    assert name in said
    assert not RAW.search(said)
    printed = works("evaluate", *given, *ONE, "--skip-broken", "--out", tmp_path / "out")
    assert f"left out, not readable: {odd}/{name}" in printed.replace("\n", "")
    assert not RAW.search(printed)
    options = ["--attack", "TMA", "--queries", 24, "--steps", 1, "--skip-broken"]
    printed = works("attack", *given, *options, "--out", tmp_path / "images")
    assert r"esc\x1b[31m" in printed
    assert not RAW.search(printed)
    text = (tmp_path / "images" / "ranks.csv").read_bytes().decode()
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f]", text)
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert {row["class"] for row in rows} == {
        "'=1+1", "x[", r"esc\x1b[31m", "'+a", "'-7", "'@b", "'\tc", "plain",
    }  # fmt: skip
    for row in rows:
        for key, cell in row.items():
            if key in ("file", "class", "target's file", "target's class"):
                assert not cell.startswith(("=", "+", "-", "@", "\t"))
            else:
                float(cell)


def test_a_hostile_record(whole: tuple[Path, str], tmp_path: Path) -> None:
    text = HOSTILE.replace("\udcff", "")
    content = json.loads((whole[0] / "record.json").read_text(encoding="utf-8"))
    content["network"] |= {"name": text, "weights": text}
    content["data"] |= {"name": text, "skipped": [text]}
    content["settings"]["search"] = text
    content["versions"]["torch"] = text
    content["ers"] |= {"valid": False, "why": text}
    content["scores"][text] = {**content["scores"]["CA+"], "unit": text}
    for check in content["checks"]:
        check |= {"name": text, "says": text, "limit": text, "status": "fail"}
    content["sha256"] = digest_of_entries(content)
    (tmp_path / "record.json").write_text(json.dumps(content), encoding="utf-8")
    for others in ([], [whole[0]]):
        printed = works("report", tmp_path, *others)
        assert printed.count(r"x[/bold]\x1b[2J") > len(content["checks"])
        assert not RAW.search(printed)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no R@1": lambda c: c["retrieval"].pop("R@1"),
    "no shape": lambda c: c["data"].update(shape=[]),
    "no scores": lambda c: c.update(scores={}),
    "huge": lambda c: c["scores"]["CA+"].update(value=10**400),
    "large": lambda c: c["queries"].update(count=10**4000),
    "infinite": lambda c: c["scores"]["CA+"].update(value=float("inf"), low=float("-inf")),
    "half a letter": lambda c: c["network"].update(name="\ud800"),
    "a list": lambda c: c.update(settings=[]),
    "deep": lambda c: c.update(versions={"torch": json.loads("[" * 500 + "]" * 500)}),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_record_of_odd_values(change: str, whole: tuple[Path, str], tmp_path: Path) -> None:
    content = json.loads((whole[0] / "record.json").read_text(encoding="utf-8"))
    CHANGES[change](content)
    with suppress(ValueError):  # there is none of half a letter
        content["sha256"] = digest_of_entries(content)
    (tmp_path / "record.json").write_text(json.dumps(content))
    said = command("report", tmp_path, whole[0])
    assert said.code in (0, 1)
    assert said.code == 0 or said.err.startswith(f"error: {tmp_path / 'record.json'} ")
    assert "unexpected" not in said.err
