"""For all tests, those in docstrings included."""

import importlib
import os
import tempfile
from collections.abc import Iterator

import pytest

from robustmetric import trust
from robustmetric.registry import KINDS, registry

# Where a user's data is, for all tests and the processes that they start: not that of who runs them.
_DATA_HOME = tempfile.TemporaryDirectory(prefix="robustmetric-tests-")
os.environ["XDG_DATA_HOME"] = _DATA_HOME.name

# Parts register when their module is imported; were that first in a test, they would be forgotten with it.
for part in ("attacks", "data", "defenses", "evaluation", "models", "training.loggers"):
    importlib.import_module(f"robustmetric.{part}")


@pytest.fixture(autouse=True)
def _registered_parts() -> Iterator[None]:
    """Forget what a test or an example registers, and which code it trusts in this process."""
    before = {kind: dict(registry(kind)) for kind in KINDS}
    yield
    for kind, known in before.items():
        registry(kind).clear()
        registry(kind).update(known)
    for of_this_process in (trust.known.digests, trust.known.files, trust.known.folders):
        of_this_process.clear()
