"""The command certify as a user sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from robustmetric import load_certificate
from robustmetric.cli.show import interval
from robustmetric.evaluation.certificate import FORMAT
from robustmetric.models.c2f2 import C2F2
from tests.cli.tables import ONE
from tests.helpers.command import cells, refused, works

FEW = ("--queries", "9", "--samples", "60", "--gallery-samples", "2", "--steps", "2", "--choose", "10")
HOW = ("--sigma", "0.25", "--radii", "0.01,0.5", *FEW)


@pytest.fixture(scope="module")
def certified(run: Path) -> tuple[Path, str]:
    """The run's certificate as it should be: its folder and what was printed."""
    return run / "certificate", works("certify", run, *HOW)


def rows_of(text: str) -> list[list[str]]:
    return [cells(line) for line in text.splitlines() if line.startswith(("┃", "│"))]


@pytest.mark.slow
def test_the_table_has_the_values_of_the_certificate(certified: tuple[Path, str]) -> None:
    folder, printed = certified
    assert {file.name for file in folder.iterdir()} == {"plan.json", *FILES}
    certificate = load_certificate(folder)
    head, *rows = rows_of(printed)
    assert head == ["radius (L2)", "certified R@1", "95 %", "attacked R@1", "95 %", "at most"]
    assert [row[0] for row in rows] == ["0.01", "0.5"]
    for row, bound in zip(rows, certificate.bounds, strict=True):
        assert bound.attacked is not None
        assert bound.upper is not None
        scores = (bound.certified, bound.attacked, bound.upper)
        assert [row[1], row[3], row[5]] == [f"{score.value:.1f}" for score in scores]
        assert row[2] == interval(bound.certified)
        assert row[4] == interval(bound.attacked)
        assert certificate.says(bound) in printed
        assert f"lies between {row[1]} and {row[5]}, with probability 1 − 0.001" in certificate.says(bound)
    recall, abstained = certificate.recall.value, certificate.abstained.value
    assert f"R@1 of the smoothed network {recall:.1f} (" in printed
    assert f"abstained {abstained:.1f}, certified radius" in printed
    assert "9 of 797 images of 10 classes; digits 8×8; σ = 0.25, 60 samples" in printed
    assert f"no radius beyond {certificate.limit:.3g} can be certified" in printed
    assert f"the certificate is in {folder}" in printed
    assert certificate.network.name == "c2f2 N/A[S]"
    assert certificate.data.name == "digits"
    arrays = FORMAT.read_arrays(folder)
    assert arrays["attacked"].shape == (9, 2)
    hits = arrays["hit"]
    assert recall == pytest.approx(float(hits[~hits.isnan()].mean()), abs=1e-9)


FILES = ("certificate.json", "queries.safetensors")


def test_a_finished_certificate_is_shown_at_once(
    run: Path, certified: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(C2F2, "forward", lambda *_: pytest.fail("it was computed again"))
    again = works("certify", run, *HOW)
    assert rows_of(again) == rows_of(certified[1])


@pytest.mark.slow
def test_without_an_attack_there_are_no_upper_bounds(run: Path, tmp_path: Path) -> None:
    printed = works("certify", run, "--sigma", "51/255", *FEW, "--skip-attack", "--out", tmp_path / "out")
    head, *rows = rows_of(printed)
    assert head == ["radius (L2)", "certified R@1", "95 %"]
    assert [row[0] for row in rows] == ["0.05", "0.1", "0.2"]
    assert "of at most 0.1 is at least " in printed
    assert "attack: done" not in printed
    assert load_certificate(tmp_path / "out").settings.sigma == 0.2


def test_a_folder_with_something_else_is_refused(
    run: Path, certified: tuple[Path, str], tmp_path: Path
) -> None:
    told = refused("certify", run, *HOW, "--seed", 1)
    assert f"{certified[0]} holds another certification: seed was 0, is 1; give another folder" in told
    assert told.rstrip().endswith("(--out)")
    told = refused("certify", run, *HOW, "--out", run)
    assert "is not empty and holds no certification: give another folder (--out)" in told
    works("evaluate", run, *ONE, "--out", tmp_path / "evaluated")
    told = refused("certify", run, *HOW, "--out", tmp_path / "evaluated")
    assert "holds another kind of work, 'evaluation': give another folder (--out)" in told
    told = refused("evaluate", run, *ONE, "--out", certified[0])
    assert "holds another kind of work, 'certification': give another folder (--out)" in told
