"""Names of networks, in every spelling, and what is loaded by them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import robustmetric as rm
from robustmetric.zoo import load
from tests.helpers.records import written
from tests.helpers.runs import make_run
from tests.zoo.conftest import about, record_of


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Networks with three defenses, one of them with two η, in folders whose names say nothing."""
    runs, place = tmp_path / "runs", tmp_path / "zoo"
    runs.mkdir()
    made: dict[str, tuple[str, int]] = {
        "a": ("HM[S,LGA]&ICS", 8),
        "b": ("HM[S, LGA] & ICS", 32),
        "c": ("N/A[S]", 8),
        "d": ("HM[S,-gamma/2]&ICS(lambda=0.05)", 8),
    }
    for number, (name, (defense, steps)) in enumerate(made.items()):
        run = make_run(runs / name, "last", first=number, about=about(), defense=defense, steps=steps)
        rm.publish(run, place / "any" / name)
    return place


def test_the_names_of_a_folder(zoo: Path) -> None:
    assert rm.zoo_names(zoo) == [
        "digits/HM[S,-γ/2]&ICS(λ=0.05) η=8", "digits/HM[S,LGA]&ICS η=8", "digits/HM[S,LGA]&ICS η=32",
        "digits/N/A[S]",
    ]  # fmt: skip
    assert [rm.load_zoo(name, zoo).folder.name for name in rm.zoo_names(zoo)] == ["d", "a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("digits/HM[S,LGA]&ICS", "b"),  # the most steps
        ("digits/HM[S,LGA]&ICS eta=8", "a"),
        (" digits/HM[ S, LGA ] & ICS  η = 8 ", "a"),
        ("digits/HM[S,LGA]&ICS, η = 8", "a"),
        ("digits/N/A[S]", "c"),
        ("digits/HM[S,-γ/2]&ICS(λ=0.05)", "d"),
        ("digits/HM[S,-gamma/2]&ICS(lambda=0.05) η=8", "d"),
    ],
)
def test_every_spelling_of_a_name(name: str, folder: str, zoo: Path) -> None:
    assert rm.load_zoo(name, zoo).folder == zoo / "any" / folder


@pytest.mark.parametrize(
    "name", ["mnist/N/A[S]", "digits", "N/A[S]", "digits/N/A[S] η=8", "digits/HM[S,LGA]&ICS η=9"]
)
def test_an_unknown_name_lists_what_there_is(name: str, zoo: Path) -> None:
    with pytest.raises(rm.UserError) as refused:
        rm.load_zoo(name, zoo)
    assert str(refused.value).startswith(f"unknown network {name!r}; known: ")
    assert str(refused.value).endswith(
        "; known: digits/HM[S,-γ/2]&ICS(λ=0.05) η=8, digits/HM[S,LGA]&ICS η=32, digits/HM[S,LGA]&ICS η=8, "
        f"digits/N/A[S] in {zoo}"
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("digits/HM[S,LGA]&IC", "digits/HM[S,LGA]&ICS"),
        ("digit/N/A[S]", "digits/N/A[S]"),
        ("Digits/HM[S,LGA]&ICS η=8", "digits/HM[S,LGA]&ICS"),
        ("digits/HM[S,LGA]", None),  # another defense, which this zoo does not have
        ("digits/N/A[R]", None),
        ("mnist/N/A[S]", None),
    ],
)
def test_only_a_near_spelling_is_suggested(name: str, meant: str | None, zoo: Path) -> None:
    with pytest.raises(rm.UserError) as refused:
        rm.load_zoo(name, zoo)
    hint = "" if meant is None else f" (did you mean {meant!r}?)"
    assert str(refused.value).startswith(f"unknown network {name!r}{hint}; known: ")


def test_a_loaded_network_is_shown_in_short(zoo: Path) -> None:
    written(record_of(zoo / "any" / "c"), zoo / "any" / "c" / "evaluation")
    loaded = rm.load_zoo("digits/N/A[S]", zoo)
    assert repr(loaded) == (
        f"ZooRun('c2f2 N/A[S]', folder={str(zoo / 'any' / 'c')!r}, digest='{loaded.digest[:12]}…', "
        "records=['evaluation'])"
    )


def test_a_missing_card_is_told(zoo: Path) -> None:
    (zoo / "any" / "c" / "README.md").unlink()
    with pytest.warns(UserWarning, match=r"any/c has no model card, README\.md: publish the folder again"):
        assert rm.load_zoo("digits/N/A[S]", zoo).card == ""


def test_a_missing_run_json_is_told(zoo: Path) -> None:
    """Its recipe may have been changed: the digest of it is gone, too."""
    before = rm.load_zoo("digits/N/A[S]", zoo)
    recipe = zoo / "any" / "c" / "recipe.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("seed: 0", "seed: 5"), encoding="utf-8")
    (zoo / "any" / "c" / "run.json").unlink()
    told = r"any/c has no run\.json: whether its recipe was changed cannot be told; take a whole copy"
    with pytest.warns(UserWarning, match=told):
        loaded = rm.load_zoo("digits/N/A[S]", zoo)
    assert (before.recipe.seed, loaded.recipe.seed) == (0, 5)
    assert loaded.digest == before.digest


def test_a_folder_that_is_not_the_zoo_itself(zoo: Path) -> None:
    with pytest.raises(
        rm.UserError, match=r"any/c is a network itself: load it with rm\.load_run, or give the"
    ):
        rm.load_zoo("digits/N/A[S]", zoo / "any" / "c")
    with pytest.raises(rm.UserError, match=r"any holds networks as NAME/recipe\.yaml: give the folder above"):
        rm.load_zoo("digits/N/A[S]", zoo / "any")


def test_a_zoo_of_which_nothing_can_be_read(zoo: Path) -> None:
    for name in "abcd":
        (zoo / "any" / name / "recipe.yaml").write_text("defense: [")
    said = r"all 4 networks in .*zoo cannot be read: publish again"
    with pytest.warns(UserWarning, match="is left out"), pytest.raises(rm.UserError, match=said):
        rm.zoo_names(zoo)


def test_a_name_is_a_text(zoo: Path) -> None:
    with pytest.raises(rm.UserError, match=r"a network is named by a text such as 'digits/N/A\[S\]', not 3"):
        rm.load_zoo(3, zoo)  # type: ignore[arg-type]


def test_two_networks_of_one_name(zoo: Path) -> None:
    shutil.copytree(zoo / "any" / "c", zoo / "any" / "e")
    assert rm.zoo_names(zoo).count("digits/N/A[S]") == 1
    with pytest.raises(rm.UserError, match=r"2 networks are called 'digits/N/A\[S\]': .*/c, .*/e; load one"):
        rm.load_zoo("digits/N/A[S]", zoo)


def test_what_is_loaded(zoo: Path) -> None:
    record = record_of(zoo / "any" / "c")
    written(record, zoo / "any" / "c" / "evaluation-strict")
    loaded = rm.load_zoo("digits/N/A[S]", zoo)
    assert isinstance(loaded, rm.training.Run)
    assert loaded.card == (zoo / "any" / "c" / "README.md").read_text(encoding="utf-8")
    assert loaded.records == {"evaluation-strict": record}
    alone = rm.load_run(zoo / "any" / "c")
    assert (loaded.digest, loaded.name, loaded.chosen, loaded.inputs, loaded.recipe) == (
        alone.digest, alone.name, alone.chosen, alone.inputs, alone.recipe,
    )  # fmt: skip
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded.embed(images), alone.embed(images))


def test_a_record_of_other_weights_does_not_count(zoo: Path) -> None:
    written(record_of(zoo / "any" / "a"), zoo / "any" / "c" / "evaluation")
    with pytest.warns(UserWarning, match="c/evaluation is left out: it is of other weights"):
        loaded = rm.load_zoo("digits/N/A[S]", zoo)
    assert loaded.records == {}


@pytest.mark.parametrize("text", ["defense: [", "defence: N/A[S]\n", "\x00", "steps: much\n"])
def test_a_damaged_entry_does_not_break_the_others(text: str, zoo: Path) -> None:
    (zoo / "any" / "a" / "recipe.yaml").write_text(text)
    with pytest.warns(UserWarning, match=r"any/a is left out, its recipe cannot be read: "):
        assert "digits/HM[S,LGA]&ICS η=32" in rm.zoo_names(zoo)
    with pytest.warns(UserWarning, match=r"any/a is left out, its recipe cannot be read: "):
        assert rm.load_zoo("digits/N/A[S]", zoo).folder.name == "c"


def test_damaged_weights(zoo: Path) -> None:
    file = zoo / "any" / "c" / "last.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(rm.UserError, match=r"any/c/last\.safetensors is damaged"):
        rm.load_zoo("digits/N/A[S]", zoo)
    assert rm.load_zoo("digits/HM[S,LGA]&ICS", zoo).folder.name == "b"


def test_code_of_others_is_listed_and_not_run(tmp_path: Path) -> None:
    """The names are read without running anything; the network needs a word of the user's."""
    run = make_run(
        tmp_path / "run", "last", about=about(), defense="code/mine.py:Mine", data="code/mine.py:birds"
    )
    (run / "code").mkdir()
    (run / "code" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    zoo = tmp_path / "zoo"
    (zoo / "x").mkdir(parents=True)
    shutil.copytree(run, zoo / "x" / "y")
    assert rm.zoo_names(zoo) == ["mine.py:birds/mine.py:Mine η=8"]
    with pytest.raises(rm.UserError, match="brings code that did not come from you"):
        rm.load_zoo("mine.py:birds/mine.py:Mine", zoo)
    assert not (tmp_path / "ran").exists()


def test_folders_without_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        rm.UserError, match=r"holds no network: give a folder with DATA/NAME/recipe\.yaml in it"
    ):
        rm.zoo_names(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere: give one with DATA/NAME"):
        rm.load_zoo("digits/N/A[S]", tmp_path / "nowhere")


def test_a_link_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "networks").write_text("../../../results/zoo")
    monkeypatch.setattr(load, "NETWORKS", tmp_path / "networks")
    with pytest.raises(
        rm.UserError, match=r"are not at .*networks, which should be a folder or a link to one: "
    ):
        rm.zoo_names()


def test_the_networks_of_the_package() -> None:
    for name in rm.zoo_names():
        loaded = rm.load_zoo(name)
        assert loaded.card.startswith("---\nlibrary_name: robustmetric\n") or "\nlicense: " in loaded.card
        assert loaded.digest in loaded.card
