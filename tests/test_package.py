"""The package's names: imported late, and all there."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import robustmetric as rm


def test_each_name_is_what_type_checkers_see() -> None:
    """The imports that only type checkers run say where each name is to come from."""
    tree = ast.parse(Path(rm.__file__).read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    names = {"__version__"}
    for node in checked.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            expected = getattr(importlib.import_module(str(node.module)), alias.name)
            assert getattr(rm, alias.name) is expected
            names.add(alias.name)
    assert names == set(rm.__all__) <= set(dir(rm))


def test_a_star_imports_all() -> None:
    found: dict[str, object] = {}
    exec("from robustmetric import *", found)  # noqa: S102
    assert set(rm.__all__) <= found.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "import robustmetric as rm; rm.data.load('digits'); rm.training.load_recipe('digits')",
        "from robustmetric import data, training; data.load; training.Recipe",
        "import robustmetric as rm; rm.attacks, rm.defenses, rm.models, rm.retrieval, rm.evaluation",
    ],
)
def test_submodules_are_there_without_an_import_of_their_own(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)  # noqa: S603


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'robustmetric' has no attribute 'modle'"):
        rm.modle  # type: ignore[attr-defined]  # noqa: B018


WITHOUT_TENSORBOARD = """
import importlib, pkgutil, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tensorboard":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import robustmetric
for module in pkgutil.walk_packages(robustmetric.__path__, "robustmetric."):
    importlib.import_module(module.name)
assert "lightning" in sys.modules
"""


@pytest.mark.slow
def test_tensorboard_is_an_extra() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TENSORBOARD], check=True, timeout=600)  # noqa: S603
    stated = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    needed, _, extras = stated.partition("[project.optional-dependencies]")
    assert "tensorboard" not in needed.partition("dependencies = [")[2]
    assert 'tensorboard = ["tensorboard' in extras


def test_torch_is_one_that_runs_no_code_of_weights() -> None:
    stated = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    bound = re.search(r'"torch>=(\d+)\.(\d+)"', stated)
    assert bound is not None
    assert (int(bound[1]), int(bound[2])) >= (2, 10)  # CVE-2026-24747


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    root, copy = Path(__file__).parents[1], tmp_path / "copy"
    shutil.copytree(root / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    package = copy / "src" / "robustmetric"
    (package / "report" / "templates").mkdir(exist_ok=True)
    (package / "report" / "templates" / "planted.html").touch()
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, timeout=600, capture_output=True)  # noqa: S603
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("robustmetric/")}
    files = {str(file.relative_to(copy / "src")) for file in package.rglob("*") if file.is_file()}
    logs = {file for file in files if "/networks/" in file and file.endswith("/metrics.csv")}
    assert packed == files - logs, "name it in package-data of pyproject.toml"


def test_the_citation_is_of_this_version() -> None:
    root = Path(__file__).parents[1]
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # all that the format demands
    assert citation["version"] == rm.__version__
    stated = (root / "pyproject.toml").read_text(encoding="utf-8")
    assert f'license = "{citation["license"]}"' in stated
    assert f'name = "{citation["authors"][0]["name"]}"' in stated
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Zhou", "Patel"]
    assert f"*{paper['title']}* (CVPR {paper['year']})" in (root / "README.md").read_text(encoding="utf-8")
