"""Plant each bug of the list in a copy of the code, and see that the tests that it names catch it.

    python -m tests.mutants            all of them
    python -m tests.mutants pgd seed   those with one of these words in their file, tests or description

The same tests must pass where nothing is planted. The exit code is 1 if a bug survives, if its text is not in
the code exactly once, or if tests fail without it. Each run of tests is a fork of this process, which has
imported the libraries already: only our own code is imported anew, from the copy.
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.mutants.bugs import BUGS, Bug, misplaced, planted

ROOT = Path(__file__).parents[2]
LIBRARIES = ("lightning", "pydantic", "pytest", "safetensors.torch", "scipy", "sklearn.cluster")
LIMIT = 600  # seconds for a run of tests, which take moments
PASSED, FAILED, HUNG = 0, 1, -signal.SIGKILL  # how a run of tests ends; anything else is no verdict


def run(tests: str, source: Path, log: Path) -> int:
    """Run tests with the package from `source` in a process of its own; return how they ended."""
    log.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become_pytest(tests, source, log)
    try:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return HUNG
    finally:
        if child:  # out of time, or Ctrl-C
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _become_pytest(tests: str, source: Path, log: Path) -> None:
    """Run tests and end this process; the package that they imported must be the one of `source`."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends this process
        said = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        # No bytecode: Python would take the old one for a file of the same second and length.
        os.environ |= {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(source))
        assert not any(name.partition(".")[0] == "robustmetric" for name in sys.modules)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        code = int(pytest.main([*options, *shlex.split(tests)]))
        assert Path(str(sys.modules["robustmetric"].__file__)).is_relative_to(source)
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def verdict(bug: Bug, source: Path, log: Path, unchanged: dict[str, int]) -> str:
    """Plant a bug, run its tests, take it out again; return what is wrong, or nothing if it was caught."""
    file = source / "robustmetric" / bug.file
    before = file.read_text(encoding="utf-8")
    if wrong := misplaced(bug, before):
        return f"NOT PLANTED: {wrong}"
    if bug.tests not in unchanged:
        unchanged[bug.tests] = run(bug.tests, source, log)
        if unchanged[bug.tests] != PASSED:
            print(log.read_text(encoding="utf-8", errors="replace")[-3000:])
    if unchanged[bug.tests] != PASSED:
        return f"NO TEST: without the bug they end with {unchanged[bug.tests]}"
    file.write_text(planted(bug, before), encoding="utf-8")
    try:
        code = run(bug.tests, source, log)
    finally:
        file.write_text(before, encoding="utf-8")
    if code == PASSED:
        return "SURVIVED"
    if code != FAILED:
        print(log.read_text(encoding="utf-8", errors="replace")[-3000:])
        return "HUNG" if code == HUNG else f"NO VERDICT: pytest ended with {code}"
    return ""


def main(words: list[str]) -> int:
    chosen = [bug for bug in BUGS if not words or any(word in " ".join(bug) for word in words)]
    if not chosen:
        print(f"no bug has any of these words: {' '.join(words)}")
        return 1
    survivors = []
    unchanged: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.chdir(ROOT)
        # Before hypothesis is imported: what made a planted bug fail is nothing to try on other days.
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(Path(folder, "hypothesis"))
        for name in LIBRARIES:
            importlib.import_module(name)
        source, log = Path(folder, "src"), Path(folder, "log")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for number, bug in enumerate(chosen, 1):
            begin = time.monotonic()
            wrong = verdict(bug, source, log, unchanged)
            survivors += [bug] if wrong else []
            took = f"{time.monotonic() - begin:5.1f} s"
            print(
                f"{number:3}/{len(chosen)} {took}  {wrong or 'caught'}  {bug.file}: {bug.wrong}", flush=True
            )
            if wrong:
                print(f"             {bug.tests}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted bugs were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("stopped")
        sys.exit(130)
