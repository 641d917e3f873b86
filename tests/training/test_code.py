"""The files that a recipe names, and what they import."""

from __future__ import annotations

from pathlib import Path

import pytest

from robustmetric.training.code import bare, files_beside, named_files, rename_files
from robustmetric.training.recipe import load_recipe
from robustmetric.trust import neighbours


@pytest.mark.parametrize(
    ("entries", "files"),
    [
        ({"model": "c2f2", "data": "digits", "defense": "HM[S,LGA]&ICS(λ=0.5)"}, []),
        ({"model": "a b/n.py:f(x='y.py:z')"}, ["a b/n.py"]),
        ({"data": "~/sets.py:mine", "model": "n.py:Net"}, ["n.py", str(Path("~/sets.py").expanduser())]),
        ({"defense": "HM[s.py:A(k=1), d.py:B(u=2)]&t.py:C&ICS"}, ["s.py", "d.py", "t.py"]),
        ({"defense": "/x/own.py:Mine(a=1)"}, ["/x/own.py"]),
        ({"defense": "HM[S,gB(d.py:B,ξ=0.1)]"}, ["d.py"]),
        ({"model": None, "dim": 3}, []),
    ],
)
def test_files_are_found_wherever_they_stand(entries: dict[str, object], files: list[str]) -> None:
    assert [str(file) for file in named_files(entries)] == files
    assert named_files(rename_files(entries, lambda file: Path("copy") / file.name)) == [
        Path("copy", Path(file).name) for file in files
    ]
    assert named_files(bare(entries)) == [Path(Path(file).name) for file in files]


def test_a_recipe_names_files_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("model: net.py:f\ndata: sets.py:g\n")
    (tmp_path / "recipes" / "net.py").touch()
    (tmp_path / "sets.py").touch()
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("recipes/mine.yaml")
    assert recipe.model == f"{tmp_path}/recipes/net.py:f"
    assert recipe.data == "sets.py:g", "there is one in the working directory alone"
    assert load_recipe("recipes/mine.yaml", {"model": "other.py:f"}).model == "other.py:f"
    gone = files_beside({"model": "code/gone.py:f"}, tmp_path)
    assert gone == {"model": f"{tmp_path}/code/gone.py:f"}


def test_neighbours_are_what_is_imported_from_beside(tmp_path: Path) -> None:
    files = {
        "a.py": "import os, b\nimport json\ntry:\n    import c.d\nexcept ImportError:\n    pass\n",
        "b.py": "def f():\n    from e import g\n",
        "c/d.py": "from a import x\n",
        "c/data/more.py": "",
        "e.py": "(((",
        "json.py": "",
        "z.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {str(path.relative_to(tmp_path)) for path in neighbours(tmp_path / "a.py")}
    assert found == files.keys() - {"z.py", "json.py"}
