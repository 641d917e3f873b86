"""Tests that cannot run on a machine are counted in the end, with what they need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_tests_in_a_browser_are_left_out_with_a_line_that_says_so(tmp_path: Path) -> None:
    """Without any program to be found, and so without Chromium."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "tests/browser/test_pages.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = r"^\d+ tests are left out in a browser: there is no Chromium; apt-get install chromium$"
    assert re.search(line, done.stdout, re.MULTILINE)
