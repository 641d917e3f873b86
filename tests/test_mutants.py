"""The list of planted bugs fits the code: make mutants can plant each, and has tests to run."""

import ast
import shlex
from pathlib import Path

import pytest

from tests.mutants.bugs import BUGS, Bug, misplaced, planted

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.file}: {bug.wrong}")
def test_a_bug_can_be_planted(bug: Bug) -> None:
    content = (ROOT / "src" / "robustmetric" / bug.file).read_text(encoding="utf-8")
    assert not misplaced(bug, content)
    assert ast.dump(ast.parse(planted(bug, content))) != ast.dump(ast.parse(content))
    file, *options = shlex.split(bug.tests)
    path, *names = file.split("::")
    assert (ROOT / path).exists()
    assert options[:1] in ([], ["-k"])
    text = (ROOT / path).read_text(encoding="utf-8")
    assert all(f"def {name}(" in text for name in names)


def test_each_bug_is_another() -> None:
    assert len({(bug.file, bug.text, bug.planted) for bug in BUGS}) == len({bug.wrong for bug in BUGS})
    assert len({bug.wrong for bug in BUGS}) == len(BUGS)
