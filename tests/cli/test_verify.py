"""The command verify as a user sees it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from robustmetric import load_run, load_verification
from robustmetric.data.cache import Pixels
from robustmetric.evaluation.job import PARTS, Job
from robustmetric.evaluation.verified import FORMAT
from robustmetric.evaluation.verify import Verifying
from robustmetric.sphere import embed
from tests.cli.tables import DIGITS
from tests.helpers.command import cells, command, refused, works
from tests.helpers.processes import at_call, stop_by
from tests.helpers.runs import make_pictures, make_run

FEW = ("--count", "60", "--steps", "2")
FILES = {"plan.json", "verification.json", "queries.safetensors"}


@pytest.fixture(scope="module")
def verified(run: Path) -> tuple[Path, str]:
    """The run's verification as it should be: its folder and what was printed."""
    return run / "verification", works("verify", run, *FEW)


def rows_of(text: str) -> list[list[str]]:
    return [cells(line) for line in text.splitlines() if line.startswith(("┃", "│"))]


def test_the_tables_have_the_values_of_the_document(verified: tuple[Path, str]) -> None:
    folder, printed = verified
    assert {file.name for file in folder.iterdir()} == FILES
    found = load_verification(folder)
    head, *rows = rows_of(printed)
    assert head == ["", "TAR ↑", "FAR ↓", "AUC ↑", "EER ↓"]
    assert [row[0] for row in rows[:8:2]] == ["clean", "evasion", "impersonation", "both"]
    for k, rates in enumerate(found.conditions.values()):
        scores = (rates.tar, rates.far, rates.auc, rates.eer)
        assert rows[2 * k][1:] == [f"{score.value:.1f}" for score in scores]
        ends = [f"{score.low:.1f}–{score.high:.1f}".replace("100.0", "100") for score in scores]
        assert rows[2 * k + 1][1:] == ends
    assert rows[8] == ["FAR ≤", "distance", "TAR ↑", "95 %", "TAR evaded ↑", "FAR impersonated ↓"]
    assert [row[0] for row in rows[9:]] == ["10 %", "1 %", "0.1 %", "0.01 %"]
    point = found.points[0]
    assert point.tar is not None
    assert rows[9][1:3] == [f"{point.threshold:.4f}", f"{point.tar.value:.1f}"]
    assert rows[9][4:] == [f"{point.evaded:.1f}", f"{point.impersonated:.1f}"]
    assert rows[10][1:] == ["-"] * 5
    assert "a FAR of 0.01 takes at least 100 different pairs, and there are 30" in printed
    assert found.threshold.source == "validation images"
    # The headline is what is printed first, before the tables.
    begin = printed.index(f"c2f2 N/A[S]: {found.headline[0]}")
    assert begin < printed.index(found.headline[1]) < printed.index(found.headline[2]) < printed.index("┏")
    assert "too few pairs for the target of 1 %" in found.headline[0]
    assert "30 same and 30 different pairs of " in printed
    assert "ε = 51/255, α = 3/255, η = 2" in printed
    assert f"the verification is in {folder}" in printed
    # Tables fit a narrow terminal, whatever the values.
    assert max(len(line) for line in printed.splitlines() if line[:1] in "┏┃┡│└") <= 80


def test_a_finished_verification_is_shown_at_once(
    run: Path, verified: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "keep", lambda *_: pytest.fail("it was computed again"))
    assert rows_of(works("verify", run, *FEW)) == rows_of(verified[1])


def test_without_an_attack(run: Path, tmp_path: Path) -> None:
    printed = works("verify", run, *FEW, "--skip-attack", "--out", tmp_path / "out")
    rows = rows_of(printed)
    assert [row[0] for row in rows[1:3]] == ["clean", ""]
    assert rows[3] == ["FAR ≤", "distance", "TAR ↑", "95 %"]
    assert "attacked" not in printed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_command_goes_on(number: signal.Signals, code: int, run: Path, tmp_path: Path) -> None:
    order: tuple[Any, ...] = ("verify", run, *FEW, "--batch", "16")
    whole = works(*order, "--out", tmp_path / "whole")
    order += ("--out", tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifying, "_attack", at_call(3, stop_by(number), Verifying._attack))
        said = command(*order)
    assert said.code == code
    assert said.err.startswith("stopped; ")
    assert len(list((tmp_path / "out" / PARTS).glob("attack-*"))) == 2
    assert rows_of(works(*order)) == rows_of(whole)
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES


# Folders of identities


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of 40 identities, of which half train, and a run on it whose validation images are of 2."""
    home = tmp_path_factory.mktemp("people")
    root = make_pictures(home / "images", classes=40, each=4, height=8, width=8)
    entries = ("--data", "folder", "--root", root, "--model", "c2f2", "--size", 8, "--batch", 64)
    how = ("--epochs", 1, "--steps", 1, "--set", "dim=16", "--out", home / "run", "--cache", home / "cache")
    works("train", *entries, *how)
    return root, home / "run"


@pytest.mark.slow
def test_few_validation_classes_leave_it_to_half_of_the_test_classes(
    people: tuple[Path, Path], tmp_path: Path
) -> None:
    root, run = people
    said = works("verify", run, *FEW, "--out", tmp_path / "out", "--cache", root.parent / "cache")
    found = load_verification(tmp_path / "out")
    assert (found.threshold.source, found.threshold.classes, found.pairs.classes) == ("other classes", 10, 10)
    assert "chosen on 30 same and 30 different pairs of 10 classes, other classes" in said
    # With a FAR that so many pairs resolve, which the document keeps.
    works("verify", run, *FEW, "--far", "0.1", "--out", tmp_path / "far", "--cache", root.parent / "cache")
    loose = load_verification(tmp_path / "far")
    assert (loose.settings.far, found.settings.far) == (0.1, 0.01)
    assert loose.threshold.value >= found.threshold.value


def listed(root: Path, count: int = 12) -> str:
    """Pairs of the first identities: two same and two different ones of each."""
    lines = ["first,second,same"]
    for k in range(count):
        me, other = f"class{k:02}", f"class{(k + 1) % count:02}"
        lines += [f"{me}/0.png,{me}/1.png,1", f"{me}/2.png,{me}/3.png,1"]
        lines += [f"{me}/0.png,{other}/1.png,0", f"{other}/2.png,{me}/3.png,0"]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_a_list_of_pairs(people: tuple[Path, Path], tmp_path: Path) -> None:
    root, run = people
    (tmp_path / "pairs.csv").write_text(listed(root))
    pairs = ("--pairs", tmp_path / "pairs.csv", "--root", root)
    order = ("verify", run, *pairs, "--steps", 1, "--cache", tmp_path / "c")
    works(*order, "--threshold", "0.5", "--out", tmp_path / "out")
    found, arrays = load_verification(tmp_path / "out"), FORMAT.read_arrays(tmp_path / "out")
    assert (found.pairs.same, found.pairs.different, found.pairs.source) == (24, 24, "given")
    assert found.data.name == "pairs.csv"
    # The distance of a pair is that of its files, as a product would compute it.
    loaded = load_run(run)
    first, second = (
        embed(loaded.network, loaded.inputs.tensor(root / name)).detach().double()
        for name in ("class00/0.png", "class01/1.png")
    )
    assert float(arrays["distance"][2]) == pytest.approx(float((first - second).norm()), abs=1e-6)
    # Without a threshold, pairs across the two halves of the identities are left out, and that is said.
    said = works(*order, "--out", tmp_path / "parted")
    parted = load_verification(tmp_path / "parted")
    assert parted.pairs.left_out > 0
    assert parted.threshold.same is not None
    judged = parted.pairs.same + parted.pairs.different
    assert judged + parted.threshold.same + (parted.threshold.different or 0) + parted.pairs.left_out == 48
    assert f"{parted.pairs.left_out} given pairs of a class that is judged with one that chose" in said


def test_an_image_of_a_list_that_cannot_be_read(people: tuple[Path, Path], tmp_path: Path) -> None:
    root, run = people
    mine = Path(shutil.copytree(root, tmp_path / "images"))
    (mine / "class03" / "0.png").write_bytes(b"no image")
    (tmp_path / "pairs.csv").write_text(listed(mine))
    pairs = ("--pairs", tmp_path / "pairs.csv", "--root", mine, "--threshold", "0.5")
    order = ("verify", run, *pairs, "--skip-attack", "--cache", tmp_path / "c", "--out", tmp_path / "out")
    assert "class03/0.png" in refused(*order)
    said = works(*order, "--skip-broken")
    assert "left out, not readable: " in said
    found = load_verification(tmp_path / "out")
    assert found.pairs.same + found.pairs.different == 46


def test_a_network_without_a_run(tmp_path: Path, weights: Path) -> None:
    order = ("verify", "--model", "c2f2", "--weights", weights, *DIGITS, *FEW)
    assert "give a folder for the verification (--out)" in refused(*order)
    works(*order, "--out", tmp_path / "out")
    found = load_verification(tmp_path / "out")
    # Nothing was set apart for it: half of the ten digits choose.
    assert (found.threshold.source, found.threshold.classes, found.pairs.classes) == ("other classes", 5, 5)


def test_validation_images_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = '{"images": {"height": 8, "width": 8, "channels": 1}, "choice": {"images": "validation images"}}'
    made = make_run(tmp_path / "run", "best", about=about)

    def gone(*_: Any, **__: Any) -> Pixels:
        raise FileNotFoundError("there is no directory faces for folder")

    monkeypatch.setattr("robustmetric.cli.verify.load_sets", gone)
    said = refused("verify", made, *FEW)
    assert "the validation images of the run, which choose the threshold, cannot be read (there is no" in said
    assert said.endswith("of which half of the classes choose it then (--threshold)\n")
    works("verify", made, *FEW, "--threshold", "0.4")


def test_re_identification(tmp_path: Path) -> None:
    """A query with an image of the gallery: never two of one person and camera, nor two distractors."""
    rng, root = np.random.default_rng(0), tmp_path / "market"
    for folder in ("bounding_box_train", "bounding_box_test", "query"):
        (root / folder).mkdir(parents=True)
    people = [
        (folder, p, c) for p in range(1, 13) for c in (1, 2) for folder in ("bounding_box_test", "query")
    ]
    people += [("bounding_box_test", 0, c) for c in (1, 1, 2, 2)] + [("bounding_box_train", 20, 1)] * 2
    for k, (folder, person, camera) in enumerate(people):
        image = Image.fromarray(rng.integers(0, 256, (8, 8, 3)).astype(np.uint8))
        image.save(root / folder / f"{person:04d}_c{camera}s1_{k:06d}_00.jpg")
    data = ("--data", "market1501", "--root", root, "--cache", tmp_path / "c")
    how = ("--model", "c2f2", "--size", "8", *data)
    works("verify", *how, "--count", "1000", "--steps", "1", "--out", tmp_path / "out")
    found, arrays = load_verification(tmp_path / "out"), FORMAT.read_arrays(tmp_path / "out")
    assert found.data.cameras
    assert (found.data.images, found.data.gallery) == (24, 28)
    assert int(arrays["first"].max()) < 24 <= int(arrays["second"].min())
    # Six people are judged: each query has one image of its person from the other camera.
    assert found.pairs.same == 12
    assert found.threshold.same == 12
    assert found.pairs.classes in (6, 7)  # the distractors are on one side
