"""The worst case on the command line: what is printed, on narrow terminals too, and what is refused."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from robustmetric import load_record, save_weights
from robustmetric.cli.show import show_suite
from robustmetric.cli.terminal import Terminal
from robustmetric.evaluation import Record, load_arrays
from tests.cli.tables import ONE, OTHER
from tests.helpers.command import cells, refused, works
from tests.helpers.runs import make_run

SUITE = "worst-case(steps=2, targets=1, trials=4)"
SMALL = ("--queries", 12, "--steps", 2, "--checks", "none", "--attacks", "ES,GTM")


@pytest.fixture(scope="module")
def evaluated(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("worst") / "one"
    return out, works("evaluate", run, "--out", out, *SMALL, "--suite", SUITE)


@pytest.fixture(scope="module")
def other(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network with a suite of fewer goals and a larger ε."""
    out = tmp_path_factory.mktemp("worst") / "two"
    few = "worst-case(goals='misrank,shift', steps=2, targets=1, trials=4)"
    works("evaluate", run, "--out", out, *SMALL, "--suite", few, "--eps", "0.3")
    return out


def shown(records: list[Record], width: int, rows: list[str] | None = None) -> str:
    file = io.StringIO()
    console: Console = Terminal(file=file, width=width, force_terminal=True, color_system=None)
    show_suite(console, records, rows)
    return file.getvalue()


def table_in(text: str) -> dict[str, list[str]]:
    """Read the tables with lines: what stands behind each goal."""
    rows = [cells(line) for line in text.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows if row[0].endswith(("↑", "↓"))}


@pytest.mark.slow
def test_the_tables_have_the_values_of_the_record(evaluated: tuple[Path, str]) -> None:
    out, printed = evaluated
    record = load_record(out)
    assert record.suite is not None
    rows = {k: v for k, v in table_in(printed).items() if len(v) == 4}
    wanted = {}
    for name, goal in record.suite.goals.items():
        column = record.goal_column(name)
        before, value, low, high, alone = (
            column.show(v) for v in (goal.before, goal.value, goal.low, goal.high, goal.alone)
        )
        wanted[column.heading] = [before, value, f"{low} to {high}", alone]
    assert rows == wanted
    assert len(rows) == 8
    spent, whole = record.suite.forward, record.suite.undropped
    assert f"{SUITE}; {spent:,} passes, {100 * spent / whole:.0f} % of the {whole:,} it takes" in printed
    # Who broke what: all that broke anything, and the rest in one line, so that passes add up.
    behind = printed.partition("goal and its attacks")[2].splitlines()[1:]
    listed: dict[str, list[str]] = {}
    goal_name = ""
    for line in behind:
        if line.startswith("   "):
            listed[goal_name].append(line.strip())
        elif re.fullmatch(r" \S.* [\d,]+ *", line):
            goal_name = line.split()[0]
            listed[goal_name] = []
    assert [*listed] == [*record.suite.goals]
    for name, goal in record.suite.goals.items():
        broke = [a for a in goal.attacks if a.broke]
        idle = [a for a in goal.attacks if not a.broke and a.forward]
        assert len(listed[name]) == len(broke) + bool(idle)
        for line, attempt in zip(listed[name], broke, strict=False):
            called = attempt.attack if attempt.search is None else f"{attempt.attack} by {attempt.search}"
            assert line.startswith(f"{called}  ")
            assert f" {attempt.broke:.1f} %" in line
        figures = [line.rpartition("%")[2].strip().replace(",", "") for line in listed[name]]
        assert sum(int(figure or 0) for figure in figures) == goal.forward


def test_stages_of_the_suite_are_told(evaluated: tuple[Path, str]) -> None:
    told = re.findall(r"^(.+): done", evaluated[1], re.MULTILINE)
    assert told[:5] == ["embed", "retrieval", "ES", "GTM", "worst misrank"]
    assert told[-2:] == ["worst demote(side='candidate')", "checks"]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_nothing_is_cut_on_a_terminal(width: int, evaluated: tuple[Path, str], other: Path) -> None:
    records = [load_record(evaluated[0]), load_record(other)]
    suite = records[0].suite
    assert suite is not None
    for given in (records[:1], records):
        text = shown(given, width, [f"a network with a long name {k}" for k in range(len(given))])
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        table = table_in(text)
        for name in suite.goals:
            assert records[0].goal_column(name).heading in table, "the name of a goal is broken"
    (row,) = {len(v) for v in table_in(shown(records, 160)).values()}
    assert row == 2, "where there is room, records stand side by side"


def test_compare_puts_suites_side_by_side(evaluated: tuple[Path, str], other: Path, run: Path) -> None:
    printed = works("compare", evaluated[0], other)
    records = [load_record(path) for path in (evaluated[0], other)]
    squeezed = "".join(printed.split())
    assert "careful:theydifferinsuite:" in squeezed
    rows = {name: values for name, values in table_in(printed).items() if len(values) == 2}
    assert len(rows) == 8
    for name in ("misrank", "shift"):
        for record, value in zip(records, rows[record_heading(records[0], name)], strict=True):
            assert record.suite is not None
            goal, column = record.suite.goals[name], record.goal_column(name)
            assert value == f"{column.show(goal.value)} ({column.show(goal.low)} to {column.show(goal.high)})"
    assert rows["promote ↓"][1] == "-", "the other did not try it"
    assert printed.count(" passes, ") == 2
    assert "broke first" not in printed


def record_heading(record: Record, name: str) -> str:
    return record.goal_column(name).heading


def test_a_record_without_a_suite_says_nothing_of_one(
    run: Path, evaluated: tuple[Path, str], tmp_path: Path
) -> None:
    assert "worst" not in works("evaluate", run, "--out", tmp_path / "plain", *SMALL)
    printed = works("compare", tmp_path / "plain", evaluated[0])
    assert len([v for v in table_in(printed).values() if len(v) == 4]) == 8
    assert printed.count(" passes, ") == 1


@pytest.mark.slow
def test_a_ball_of_l2(run: Path, tmp_path: Path) -> None:
    how = [
        "--norm",
        "l2",
        "--eps",
        "1.0",
        "--search",
        "apgd",
        "--suite",
        "worst-case(steps=2,trials=3,targets=0)",
    ]
    printed = works("evaluate", run, "--out", tmp_path / "out", *SMALL, *how)
    assert "ε = 1 (L2)" in printed
    assert "η = 2, apgd" in printed
    record = load_record(tmp_path / "out")
    assert (record.settings.norm, record.settings.eps) == ("l2", 1.0)
    for name, change in load_arrays(tmp_path / "out").items():
        assert not name.endswith("/change") or change.max() <= 1 + 1e-6


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--suite", "worst"], "unknown suite 'worst' (did you mean 'worst-case'?)"),
        (
            ["--suite", "worst-case(steps=0)"],
            "steps of the suite must be a whole number of at least 1, not 0",
        ),
        (["--suite", "worst-case(goals='ES')"], "ES cannot be a goal"),
        (["--suite", "worst-case(goals='shift,shift')"], "a goal was given twice: shift"),
        (
            ["--suite", "worst-case(goals='promote(k=9999)')"],
            "k is 9999, too many for a gallery of 797 images",
        ),
        (["--norm", "l2"], "eps is not given, and with the norm l2 there is no usual one"),
        (
            ["--norm", "l2", "--eps", "1"],
            "the search 'pgd' has no budget of the norm l2; give one that has: ap",
        ),
    ],
)
def test_what_cannot_be(options: list[str], told: str, run: Path, tmp_path: Path) -> None:
    said = refused("evaluate", run, "--out", tmp_path / "out", *ONE, *options)
    assert told in said
    flag = {"--suite": "--suite", "eps is": "--eps", "the se": "--search"}
    assert said.endswith(f"({flag.get(options[0]) or flag[told[:6]]})\n")
    assert not (tmp_path / "out").exists()


def test_a_surrogate_of_a_run_helps_the_suite(run: Path, tmp_path: Path) -> None:
    there = make_run(tmp_path / "there", "best", first=1, **OTHER)
    how = [*ONE, "--suite", "worst-case(goals='shift',steps=2,trials=3)"]
    printed = works("evaluate", run, "--out", tmp_path / "with", *how, "--surrogate", there)
    works("evaluate", run, "--out", tmp_path / "without", *how)
    record, plain = load_record(tmp_path / "with"), load_record(tmp_path / "without")
    assert record.suite is not None
    assert [a.search for a in record.suite.goals["shift"].attacks] == [
        "apgd", "apgd(random_start=True)", "transfer(apgd)", "square(trials=3)",
    ]  # fmt: skip
    assert record.scores == plain.scores
    assert "apgd" in printed


def test_a_surrogate_of_another_size_is_refused(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "own.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(144, 4))\n"
    )
    save_weights({"1.weight": torch.ones(4, 144), "1.bias": torch.zeros(4)}, there / "best.safetensors")
    (there / "recipe.yaml").write_text(f"data: digits\nmodel: {there}/own.py:net\ncrop: 12\nresize: 12\n")
    how = ["--suite", "worst-case(goals='shift')", "--surrogate", there, "--trust"]
    said = refused("evaluate", run, "--out", tmp_path / "out", *ONE, *how)
    assert said.startswith("error: the surrogate does not fit the images: ")
    assert said.endswith("(--surrogate)\n")
    assert not (tmp_path / "out").exists()


def test_a_surrogate_without_a_suite_or_transfer_is_refused(run: Path, tmp_path: Path) -> None:
    said = refused("evaluate", run, "--out", tmp_path / "out", *ONE, "--surrogate", run)
    assert "a surrogate needs the search transfer or a suite, not 'pgd' alone" in said


@pytest.mark.parametrize(
    ("name", "search"),
    [("misrank", "apgd"), ("promote(k=10)", "square"), ("demote(side='candidate')", "square(trials=9)")],
)
def test_goals_are_attacks_too(name: str, search: str, run: Path, tmp_path: Path) -> None:
    options = ["--attack", name, "--search", search, "--queries", 4, "--eps", "0.3", "--steps", 3]
    printed = works("attack", run, "--out", tmp_path / "out", *options)
    assert "ranks of 4 queries are in" in printed
    head = (tmp_path / "out" / "ranks.csv").read_text().splitlines()[0]
    assert all(f"{name} {when}" in head.replace('"', "") for when in ("before", "after"))


@pytest.mark.slow
def test_two_workers_write_the_same_record(run: Path, evaluated: tuple[Path, str], tmp_path: Path) -> None:
    works("evaluate", run, "--out", tmp_path / "out", *SMALL, "--suite", SUITE, "--devices", 2)
    for name in ("record.json", "queries.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (evaluated[0] / name).read_bytes()
