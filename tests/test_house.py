"""The house: modules import downward only, in the order of docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import robustmetric

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "robustmetric"


def declared() -> list[str]:
    """The rooms in their order: the first words of the lines of the page's first block."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    return [line.split()[0].rstrip("/") for line in block.group(1).splitlines()]


def name_of(file: Path, package: Path) -> str:
    """The name of a file's module, as it is imported."""
    parts = [package.name, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of(package: Path) -> dict[str, Path]:
    return {name_of(file, package): file for file in sorted(package.rglob("*.py"))}


def room_of(file: Path, package: Path) -> str:
    return file.relative_to(package).parts[0]


def imported(file: Path, known: dict[str, Path], exports: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Every module of the package that a file imports anywhere, in functions and for types alone too.

    A name taken from the package itself counts as the module that `exports` says it comes from.
    """
    root = next(iter(known)).partition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names if a.name.partition(".")[0] == root)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno}: name the module in full"
            module = node.module or ""
            if module.partition(".")[0] != root:
                continue
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                if inner in known:
                    yield inner, node.lineno
                elif module != root:
                    yield module, node.lineno
                elif alias.name != "__version__":
                    yield f"{root}.{exports[alias.name]}", node.lineno


Graph = dict[str, dict[str, int]]  # for each module what it imports, and in which line


def graph_of(package: Path, exports: dict[str, str]) -> Graph:
    known = modules_of(package)
    return {name: dict(imported(file, known, exports)) for name, file in known.items()}


def upward(package: Path, order: list[str], exports: dict[str, str]) -> list[str]:
    """Name the imports of a room that stands below the one that imports it."""
    known, found = modules_of(package), []
    for name, others in graph_of(package, exports).items():
        mine = room_of(known[name], package)
        for other, line in others.items():
            theirs = room_of(known[other], package)
            if order.index(theirs) > order.index(mine):
                found.append(f"{known[name].relative_to(package)}:{line} imports {other}")
    return found


def cycle(graph: Graph) -> list[str]:
    """Modules that import each other in a circle; none if there is no such."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_is_on_the_page_and_there() -> None:
    rooms = declared()
    assert len(rooms) == len(set(rooms))
    assert {room_of(file, PACKAGE) for file in modules_of(PACKAGE).values()} == set(rooms)


def test_no_module_imports_upward() -> None:
    assert not upward(PACKAGE, declared(), robustmetric._MODULE_OF)


def test_no_two_modules_import_each_other() -> None:
    assert not cycle(graph_of(PACKAGE, robustmetric._MODULE_OF))


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("from house.attic import roof", True),
        ("import house.attic.beam", True),
        ("from house import attic", True),
        ("from house import roof", True),
        ("def climb():\n    from house.attic.beam import hang", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.attic import beam", True),
        ("import houses\nfrom house.cellar import coal", False),
        ('"""\n>>> import house.attic\n"""', False),
    ],
)
def test_an_import_upward_is_found(source: str, caught: bool, tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "attic").mkdir(parents=True)
    for name in ("__init__.py", "cellar.py", "attic/__init__.py", "attic/beam.py"):
        (package / name).touch()
    (package / "hall.py").write_text(source)
    order = ["cellar.py", "hall.py", "attic", "__init__.py"]
    found = upward(package, order, {"roof": "attic"})
    assert bool(found) == caught
    assert all(line.startswith("hall.py:") for line in found)


def test_a_circle_is_found() -> None:
    assert set(cycle({"a": {"b": 1}, "b": {"c": 1}, "c": {"a": 1}, "d": {"a": 1}})) == {"a", "b", "c"}
    assert not cycle({"a": {"b": 1, "c": 2}, "b": {"c": 1}, "c": {}})


def test_all_that_is_printed_comes_through_the_terminal() -> None:
    """Consoles are made in one place, which takes foreign text as text; bars know no markup."""
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        if file.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            plain = any(k.arg == "markup" and getattr(k.value, "value", 1) is False for k in node.keywords)
            if (
                called in ("Console", "get_console", "get_default_columns", "from_markup", "track")
                or (
                    called == "Progress"
                    and not node.args
                    and not any(k.arg == "console" for k in node.keywords)
                )
                or (called == "TextColumn" and not plain)
            ):
                wrong.append(f"{file.relative_to(PACKAGE)}:{node.lineno} {called}")
    assert not wrong
