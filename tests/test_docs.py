"""README and docs run as they are written."""

import json
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


WITH_CODE = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    assert not re.search(r"^[A-Z]+_[A-Z]+$", page.read_text(encoding="utf-8"), re.MULTILINE), "a gap to fill"
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks:
            exec(compile(block, str(page), "exec"), names)  # noqa: S102
    lines = page.read_text(encoding="utf-8").splitlines()
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("| "):
            assert line in lines, "a row that the code prints is not in the page's table"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)`|^    make ([a-z]+)", text, re.MULTILINE)) <= {
        pair for target in targets for pair in ((target, ""), ("", target))
    }
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / link).exists(), link


def test_the_version_is_one() -> None:
    import robustmetric

    stated = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert stated is not None
    assert robustmetric.__version__ == stated[1]


@pytest.mark.parametrize("kind", ["Record", "Certificate", "Verification"])
def test_the_schemas_of_documents_are_published(kind: str) -> None:
    import robustmetric.evaluation

    document = getattr(robustmetric.evaluation, kind)
    schema = document.model_json_schema(by_alias=True, mode="serialization")
    text = (ROOT / "docs" / f"{kind.lower()}.schema.json").read_text(encoding="utf-8")
    assert text == json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
