"""Try every reader on damaged and made-up files for some minutes.

    python -m tests.fuzz [--seconds 180] [--seed 0] [--out build/fuzz] [READER …]

A file that makes a reader end with anything but an error for the user, take too long or take too much memory
is made smaller and written to `build/fuzz/READER`: keep it in `tests/fuzz/cases/READER`, where the tests read
it again. The exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import unittest
from collections import Counter
from contextlib import suppress
from pathlib import Path

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.bounds import Apart, Outcome
from tests.fuzz.files import files_for
from tests.fuzz.readers import Reader, readers

SHRINKING = 5  # seconds for each failure


def explore(apart: Apart, seconds: float, seed: int) -> tuple[Counter[str], dict[str, bytes]]:
    """Try a reader for some time; count what became of the files, and return one for each way to fail."""
    counts: Counter[str] = Counter()
    found: dict[str, bytes] = {}
    end = time.monotonic() + seconds

    @hypothesis.seed(seed)
    @settings(
        max_examples=10**6,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(files_for(apart.reader))
    def run(content: bytes) -> None:
        if time.monotonic() > end:
            raise unittest.SkipTest("time is up")  # which ends a run of hypothesis at once
        wrong = apart.attempt(content).wrong
        counts[wrong if wrong in ("read", "refused") else "failed"] += 1
        if wrong not in ("read", "refused") and len(content) <= len(found.get(wrong, content)):
            found[wrong] = content

    with suppress(unittest.SkipTest):
        run()
    return counts, found


def shrink(apart: Apart, content: bytes, wrong: str) -> bytes:
    """Cut out of a file what it fails without, in ever smaller parts."""
    end = time.monotonic() + SHRINKING
    size = max(1, len(content) // 2)
    while time.monotonic() < end:
        begin, before = 0, len(content)
        while begin < len(content) and time.monotonic() < end:
            smaller = content[:begin] + content[begin + size :]
            if apart.attempt(smaller).wrong == wrong:
                content = smaller
            else:
                begin += size
        if size == 1 and len(content) == before:
            break
        size = max(1, size // 2)
    return content


def keep(reader: Reader, content: bytes, outcome: Outcome, out: Path) -> Path:
    """Write a file that a reader fails on, named after how."""
    folder = out / reader.name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / re.sub(r"\W+", "-", outcome.wrong).strip("-").lower()
    file.write_bytes(content)
    return file


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("readers", nargs="*", metavar="READER")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    asked = parser.parse_args(arguments)
    known = readers()
    if unknown := [name for name in asked.readers if name not in known]:
        parser.error(f"no reader is called {', '.join(unknown)}; known: {', '.join(known)}")
    chosen = [known[name] for name in asked.readers or known]
    torch.set_num_threads(1)
    print(f"{len(chosen)} readers, {asked.seconds:g} s, seed {asked.seed}", flush=True)
    failed = 0
    for reader in chosen:
        apart = Apart(reader)
        counts, found = explore(apart, asked.seconds / len(chosen), asked.seed)
        told = ", ".join(f"{counts[kind]} {kind}" for kind in ("read", "refused", "failed"))
        print(f"{reader.name:14} {counts.total():6} files: {told}", flush=True)
        for wrong, content in found.items():
            failed += 1
            small = shrink(apart, content, wrong)
            outcome = apart.attempt(small)
            file = keep(reader, small, outcome, asked.out)
            said = outcome.story.strip().splitlines()[-1:]
            print(f"    {wrong}: {file} ({len(small)} bytes) {''.join(said)[:200]}", flush=True)
        apart.end()
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("stopped")
        sys.exit(130)
