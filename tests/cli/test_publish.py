"""The command publish as a user sees it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

import robustmetric as rm
from tests.helpers.command import refused, works
from tests.helpers.records import a_record, written
from tests.helpers.runs import make_run

FEW = ("--queries", "6", "--steps", "1", "--checks", "none")


@pytest.fixture
def trained(run: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, without its evaluation."""
    return shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation*"))


def test_from_a_run_to_a_card_with_scores(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in half precision are published, measured, and the card brought up to date."""
    works("evaluate", trained, *FEW)
    out = tmp_path / "zoo" / "digits" / "mine"
    said = works("publish", trained, out, "--half", "--license", "mit").splitlines()
    assert said[0].startswith("left out: evaluation: it is of other weights, whose SHA-256 is ")
    assert said[1].startswith("c2f2 N/A[S], SHA-256 ")
    assert said[1].endswith(f"…, with 0 records: {out}")
    assert said[2:] == [
        f"next: robustmetric evaluate {out} --out scores",
        f"then: robustmetric publish {out} --record scores",
    ]

    monkeypatch.chdir(tmp_path)
    works(*shlex.split(said[2])[2:], *FEW)
    (said_again,) = works(*shlex.split(said[3])[2:]).splitlines()
    assert said_again.endswith(f"…, with 1 record: {out}")
    loaded = rm.load_zoo("digits/N/A[S]", tmp_path / "zoo")
    record = rm.load_record(tmp_path / "scores")
    assert loaded.records == {"evaluation-scores": record}
    assert record.network.sha256 == loaded.digest
    assert f"| ERS ↑ | {record.show('ERS')} |" in loaded.card
    assert "license: mit\n" in loaded.card
    for file in out.rglob("*"):
        assert file.is_dir() or file.suffix == ".safetensors" or str(tmp_path) not in file.read_text()

    works("evaluate", out, *FEW, "--out", out / "evaluation-strict")
    works("evaluate", trained, *FEW, "--out", out / "evaluation-other")
    shutil.rmtree(trained)
    said = works("publish", out).splitlines()
    assert said.pop(0).startswith(
        "not in the card, still in the folder: evaluation-other: it is of other weights, whose SHA-256 is "
    )
    assert said[0].startswith("in the folder, and no part of what is published: evaluation-")
    assert said[1].endswith(f"…, with 2 records: {out}")


def test_mistakes_are_said(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "is no run, it has no recipe.yaml: give the folder of a run" in refused("publish", tmp_path, out)
    assert refused("publish", trained).endswith(
        "has not been published yet: say where to, DIR (in Python, out=)\n"
    )
    assert refused("publish", trained, trained).endswith("is the run itself: give another folder\n")
    assert refused("publish", trained, trained / "x").endswith("in each other: give another folder\n")
    assert refused("publish", trained, out, "--weights", "first").endswith(
        "the weights are last or best, not 'first' (--weights)\n"
    )
    assert refused("publish", trained, out, "--license", "a b").endswith("not 'a b' (--license)\n")
    assert "there is no record" in refused("publish", trained, out, "--record", tmp_path / "gone")
    works("publish", trained, out)
    assert refused("publish", trained, out).endswith(
        "out is there already: give another folder, or replace it by --force (in Python, force=True)\n"
    )
    works("publish", trained, out, "--force")
    assert refused("publish", out, "--half").endswith("publish its run to another folder (--half)\n")


@pytest.mark.parametrize(("root", "told"), [("/my images", "'/my images'"), (None, "DIR")])
def test_what_to_do_next_names_the_images(root: str | None, told: str, tmp_path: Path) -> None:
    about = json.dumps({"images": {"height": 8, "width": 8, "channels": 1}})
    made = make_run(tmp_path / "made", "last", about=about, data="folder", root=root)
    out = tmp_path / "out"
    assert len(works("publish", made, out, "--half").splitlines()) == 1  # nothing was measured before
    written(a_record(), made / "evaluation")
    said = works("publish", made, out, "--half", "--force", "--trust").splitlines()
    assert said[-2:] == [
        f"next: robustmetric evaluate {out} --root {told} --trust --out scores",
        f"then: robustmetric publish {out} --trust --record scores",
    ]


@pytest.mark.parametrize("name", ["[bold]run\x1b[2J", "räume und $(touch x)"])
def test_strange_names_of_folders(name: str, trained: Path, tmp_path: Path) -> None:
    said = works("publish", trained, tmp_path / name)
    assert "\x1b" not in said
    assert rm.load_run(tmp_path / name).digest == rm.load_run(trained).digest
