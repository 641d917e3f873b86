"""What a report says in words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from robustmetric.attacks import ATTACKS
from robustmetric.cli import request
from robustmetric.errors import UserError
from robustmetric.evaluation import CHECKS, COLUMNS, Plan, Settings
from robustmetric.evaluation.suite import GOALS
from robustmetric.report.words import CHECK_MEANINGS, COLUMN_MEANINGS, aim, command, goal_meaning
from robustmetric.text import command_line
from tests.helpers.command import refused
from tests.helpers.records import a_record, altered


def asked(line: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[request.Tested, Settings]:
    """Run a command as far as its options are read, and return what they ask for."""
    seen: list[tuple[request.Tested, Settings]] = []

    def stop(tested: request.Tested, settings: Mapping[str, Any]) -> request.Request:
        seen.append((tested, Plan.make(**settings).settings))
        raise UserError("read")

    monkeypatch.setattr(request.Request, "of", stop)
    program, *words = shlex.split(line)
    assert program == "robustmetric"
    assert refused(*words, "--out", out) == "error: read\n"
    return seen[0]


PLANS: dict[str, dict[str, Any]] = {
    "usual": {},
    "levels": {"eps": 77 / 255, "alpha": 1.5 / 255},
    "no levels": {"eps": 0.1, "alpha": 1 / 3},
    "tiny": {"eps": 1e-05, "alpha": 3e-07},
    "none": {"eps": 0.0},
    "l2": {"norm": "l2", "eps": 1.5, "alpha": 0.25, "search": "apgd"},
    "long": {"norm": "l2", "eps": 16 / 255 * 7, "search": "apgd(restarts=3)"} ,
    "reference": {"protocol": "reference", "queries": 12, "seed": 2**32 - 1, "batch": 7, "steps": 1},
    "attacks": {"attacks": ["SP-QA+", "SP-QA-(m=2)", "CA+(w=3)", "GTT"], "checks": "none"},
    "search": {"search": "nes(samples=8)", "checks": "full"},
    "suite": {"suite": "worst-case"},
    "goals": {"suite": "worst-case(goals=\"misrank,promote(k=2,side='candidate')\", steps=5)"},
    "transfer": {"search": "transfer(pgd)"},
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_the_command_asks_for_the_same_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.make(**PLANS[name]).settings
    record = altered(a_record(), settings=plan.model_dump(mode="json"))
    assert record.settings == plan
    tested, found = asked(command(record, "runs/my run"), tmp_path / "out", monkeypatch)
    assert found == plan
    assert tested.run == Path("runs/my run")
    assert (tested.data, tested.split, tested.surrogate) == (None, "test", None)


def test_the_command_names_what_is_of_the_user_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    own = "from robustmetric.attacks import EmbeddingShift\n\nclass Mine(EmbeddingShift):\n"
    file.write_text(f"{own}    name = 'Mine'\n")
    monkeypatch.chdir(tmp_path)
    plan = Plan.make(attacks=[f"{file}:Mine", "GTM"]).settings
    record = altered(a_record(), settings=plan.model_dump(mode="json"), data={"name": "sets.py:birds(k=2)"})
    line = command(record)
    assert "--data 'sets.py:birds(k=2)'" in line
    tested, found = asked(line, tmp_path / "out", monkeypatch)
    assert found.attacks == plan.attacks == ("mine.py:Mine", "GTM")
    assert tested.data == "sets.py:birds(k=2)"


@pytest.mark.parametrize(
    ("data", "trained", "words"),
    [
        ("digits", "digits", []),
        ("digits", None, []),
        ("digits (all)", "digits", ["--split", "all"]),
        ("mnist", "digits", ["--data", "mnist"]),
        ("sets.py:birds", "/home/me/sets.py:birds", []),
        ("my photos", "digits", ["--data", "DATA"]),
    ],
)
def test_the_command_names_images_that_the_run_was_not_trained_on(
    data: str, trained: str | None, words: list[str]
) -> None:
    record = altered(a_record(data=data), settings=Plan.make(eps=8 / 255).settings.model_dump(mode="json"))
    assert command(record, "runs/a", trained) == shlex.join(
        ["robustmetric", "evaluate", "runs/a", *words, "--eps", "8/255"]
    )


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("HM[S,LGA]&ICS", "'HM[S,LGA]&ICS'"),
        ("worst-case(goals='misrank')", "\"worst-case(goals='misrank')\""),
        *((f"it's {sign}x", f"'it'\"'\"'s {sign}x'") for sign in '"$`\\!'),  # a shell reads these in "", too
    ],
)
def test_a_word_of_a_command_is_quoted_as_one_types_it(word: str, typed: str) -> None:
    assert command_line(["robustmetric", word]) == f"robustmetric {typed}"
    assert shlex.split(command_line([word, "b"])) == [word, "b"]


def test_every_part_of_the_package_is_explained() -> None:
    assert {*COLUMNS, "R@1", "R@2", "mAP", "mAP@R", "NMI", "ERS"} == COLUMN_MEANINGS.keys()
    assert set(CHECKS) == CHECK_MEANINGS.keys()
    for name in ATTACKS:
        assert aim(name) or name in GOALS
    for name in GOALS:
        assert goal_meaning(name)
