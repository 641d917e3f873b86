"""Pages of records, written and read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from robustmetric.evaluation import Record
from robustmetric.report.page import write_report
from tests.evaluation.conftest import images as images
from tests.evaluation.conftest import labels as labels
from tests.evaluation.conftest import tiny as tiny
from tests.helpers.pages import Element, parsed
from tests.helpers.records import written

Show = Callable[..., Element]


@pytest.fixture
def show(tmp_path: Path) -> Show:
    """Write the page of records, or of paths of records, and read it."""

    def made(*records: Record | Path) -> Element:
        paths = [
            one if isinstance(one, Path) else written(one, tmp_path / "records" / str(k))
            for k, one in enumerate(records)
        ]
        file = write_report(paths, tmp_path / "report.html", force=True)
        return parsed(file.read_text(encoding="utf-8"))

    return made
