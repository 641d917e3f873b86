"""What a fuzz run found once: each file is read or refused in a sentence, in a moment."""

from pathlib import Path

import pytest

from tests.fuzz.bounds import attempt
from tests.fuzz.readers import readers

CASES = sorted(file for file in (Path(__file__).parent / "cases").rglob("*") if file.is_file())
READERS = readers()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_what_once_failed_is_refused(case: Path) -> None:
    outcome = attempt(READERS[case.parent.name], case.read_bytes())
    assert outcome.wrong in ("read", "refused"), outcome.story


@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_what_a_fuzz_run_begins_with(name: str) -> None:
    first, *others = READERS[name].seeds
    assert attempt(READERS[name], first).wrong == "read"
    for seed in others:
        assert attempt(READERS[name], seed).wrong in ("read", "refused")
