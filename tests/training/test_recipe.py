"""Recipes: the protocol's figures, files of one's own, and what is said of mistakes."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustmetric import UserError
from robustmetric.training.recipe import (
    LARGEST,
    Recipe,
    bare,
    dump_recipe,
    load_recipe,
    make_recipe,
    named_files,
    read_yaml,
    recipe_names,
    recipe_text,
)

# docs/protocol.md, section 4. What it does not give (no weight decay, images as they are) is the default.
SMALL = {
    "model": "c2f2", "eps": 77 / 255, "alpha": 3 / 255, "steps": 32, "lr": 1e-3, "weight_decay": 1e-7,
    "epochs": 8, "batch": 256, "resize": None, "crop": None, "flip": False, "freeze_bn": False,
    "validation": 0, "schedule": "constant", "warmup": 0, "clip": None,
}  # fmt: skip
LARGE = {
    "model": "resnet18", "eps": 8 / 255, "alpha": 1 / 255, "batch": 112, "resize": 256, "crop": 224,
    "flip": True, "dim": None, "validation": 0, "schedule": "constant", "warmup": 0, "clip": None,
}  # fmt: skip
TEXT = {**LARGE, "lr": 1e-3, "weight_decay": 0.0, "epochs": 150, "freeze_bn": False}
CODE = {**LARGE, "lr": 1e-5, "weight_decay": 4e-4, "epochs": 75, "freeze_bn": True}
PROTOCOL: dict[str, dict[str, Any]] = {
    "28x28": SMALL,
    "224x224-text": {**TEXT, "steps": 8},
    "224x224-text-strong": {**TEXT, "steps": 32},
    "224x224-code": {**CODE, "steps": 8},
    "224x224-code-sop": {**CODE, "steps": 8},
    "224x224-code-strong": {**CODE, "steps": 32},
}


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# Those that come with the package


@pytest.mark.parametrize("name", PROTOCOL)
def test_protocol(name: str) -> None:
    recipe = load_recipe(name)
    assert {key: getattr(recipe, key) for key in PROTOCOL[name]} == PROTOCOL[name]
    assert recipe.defense == "HM[S,LGA]&ICS" + ("(λ=0.05)" if name.endswith("sop") else "")
    assert recipe.data == {"28x28": "fashion-mnist", "224x224-code-sop": "sop"}.get(name, "cub")
    assert not recipe.reference
    assert recipe.margin == 0.2
    assert recipe.weights is None


@pytest.mark.parametrize("name", recipe_names())
def test_the_text_of_a_recipe_is_the_recipe(name: str, tmp_path: Path) -> None:
    text = recipe_text(name)
    assert text.startswith("# ")
    assert load_recipe(write(tmp_path, text)) == load_recipe(name)


# Changes and checks


def test_changes_go_before_the_recipe() -> None:
    changed = load_recipe("28x28", {"steps": 4, "eps": "8/255", "data": "mnist"})
    assert (changed.steps, changed.eps, changed.data) == (4, 8 / 255, "mnist")
    assert changed.model_dump(exclude={"steps", "eps", "data"}) == load_recipe("28x28").model_dump(
        exclude={"steps", "eps", "data"}
    )


@pytest.mark.parametrize(
    ("written", "value"),
    [(" 8 / 255 ", 8 / 255), ("0.5/2", 0.25), ("1e-3", 0.001), (0.1, 0.1), ("0/255", 0.0), (1, 1.0)],
)
def test_levels_may_be_fractions(written: object, value: float) -> None:
    assert make_recipe({"eps": written}).eps == value
    if value:
        assert make_recipe({"alpha": written}).alpha == value


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("Steps", "steps"), ("weight-decay", "weight_decay"), ("batch_size", "batch"), ("learning_rate", "lr")],
)
def test_an_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(
        ValueError, match=rf"unknown recipe entry '{key}' \(did you mean '{nearest}'\?\); known: alpha, batch"
    ):
        load_recipe("digits", {key: 1})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("eps", 2, "eps is 2: input should be less than or equal to 1"),
        ("batch", 6, "batch is 6: input should be greater than or equal to 8"),
        ("schedule", "linear", "schedule is 'linear': input should be 'constant' or 'cosine'"),
        ("data", 3, "data is 3: input should be a valid string"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_it_may_be(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is looked at below)
        load_recipe("digits", {key: value})
    assert str(caught.value).startswith(message)
    assert "pydantic" not in str(caught.value)


# Files


def test_a_file(tmp_path: Path) -> None:
    # YAML itself reads 1e-3 as text, and 8/255 too.
    path = write(tmp_path, "data: folder\nroot: pictures\neps: 8/255\nlr: 1e-3\nresize: null\n")
    assert load_recipe(path) == make_recipe(
        {"data": "folder", "root": "pictures", "eps": 8 / 255, "lr": 1e-3}
    )
    assert load_recipe(str(path), {"steps": 5}).steps == 5
    assert load_recipe(path.rename(tmp_path / "other.yml")).data == "folder"


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "content",
    [
        BOMB.encode(),
        b"dim: &a 3\nsteps: *a",
        b"dim: !!python/name:os.system ''",
        b"steps: " + b"[" * 900_000,
        b"dim: [3]",
        b"3: dim",
        "dim: 3\nsteps: 4".encode("utf-16"),
        b'root: "a\\0b"',
        b'root: "\\UFFFFFFFF"',
        b"dim: " + b"9" * 900_000,
        b"dim: 3\n---\ndim: 4",
        b"",
        b"- epochs: 3",
        b"dim: 3\na: b: c",
        b"lr: .inf",
        b"#" * (LARGEST + 1),
    ],
)
def test_a_file_that_is_no_recipe(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"mine\.yaml") as caught:
        load_recipe(path)
    assert len(str(caught.value)) < 1000


TEXTS = st.text(
    st.sampled_from("ab:-?[]{},&*!|>%@`'\"#\n\t 0123_.e+~<=\\Uxu\0\x85\ufeff"), max_size=60
) | st.text(max_size=30)


@given(TEXTS)
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(UserError):
        read_yaml(text, "mine.yaml")


# The Python files that a recipe names


@pytest.mark.parametrize(
    ("entries", "files"),
    [
        ({"model": "c2f2", "data": "digits", "defense": "HM[S,LGA]&ICS(λ=0.5)"}, []),
        ({"model": "a b/n.py:f(x='y.py:z')"}, ["a b/n.py"]),
        ({"data": "~/sets.py:mine", "model": "n.py:Net"}, ["n.py", str(Path("~/sets.py").expanduser())]),
        ({"defense": "HM[s.py:A(k=1), d.py:B(u=2)]&t.py:C&ICS"}, ["s.py", "d.py", "t.py"]),
        ({"defense": "HM[S,gB(d.py:B,ξ=0.1)]"}, ["d.py"]),
    ],
)
def test_files_are_found_wherever_they_stand(entries: dict[str, object], files: list[str]) -> None:
    assert [str(file) for file in named_files(entries)] == files
    assert named_files(bare(entries)) == [Path(Path(file).name) for file in files]


def test_a_recipe_names_files_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("model: net.py:f\ndata: sets.py:g\n")
    (tmp_path / "recipes" / "net.py").touch()
    (tmp_path / "sets.py").touch()
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("recipes/mine.yaml", trust=True)
    assert recipe.model == f"{tmp_path}/recipes/net.py:f"
    assert recipe.data == "sets.py:g", "there is one in the working directory alone"
    assert load_recipe("recipes/mine.yaml", {"model": "other.py:f"}, trust=True).model == "other.py:f"


# Written and read again

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=120)


RECIPES = st.builds(
    Recipe,
    data=NAMES,
    root=st.none() | NAMES.map(Path),
    dim=st.integers(1, 2**16),
    freeze_bn=st.booleans(),
    defense=NAMES,
    eps=st.floats(0, 1),
    lr=st.floats(0, 1e6, exclude_min=True),
    clip=st.none() | st.floats(0, 1e30, exclude_min=True),
    fit=st.sampled_from(["squeeze", "crop", "pad"]),
)


@given(RECIPES)
def test_what_is_written_reads_back_equal(recipe: Recipe) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert load_recipe(write(Path(folder), dump_recipe(recipe))) == recipe
