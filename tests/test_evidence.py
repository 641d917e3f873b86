"""The evidence: pages and records agree, each record is what its command makes, and can be made again."""

from __future__ import annotations

import html
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import robustmetric as rm
from benchmarks.evidence import figures, found, make, page
from benchmarks.evidence.found import ERS, RECALL, RELATIVE, SHIFT, Difference, compare, measured, record_of
from benchmarks.evidence.plan import (
    CLAIM,
    FASHION,
    FULL,
    HM,
    KINDS,
    MNIST,
    NETWORKS,
    RESULTS,
    RIVALS,
    SAMPLERS,
    WHY,
    Kind,
    Network,
    Samplers,
    tasks,
)  # fmt: skip
from robustmetric.evaluation import Settings
from robustmetric.training import run as training
from robustmetric.training.folder import RunFolder
from robustmetric.training.recipe import Recipe, load_recipe
from tests.helpers.command import works

pytestmark = pytest.mark.slow  # not of the package

MADE = [(network, kind) for network, kind in tasks() if network.record(kind).is_file()]
KEPT = [network for network in NETWORKS if (RESULTS / network.name / "recipe.yaml").is_file()]
named = lambda value: value.name if isinstance(value, Network | Samplers) else value  # noqa: E731


@pytest.mark.parametrize("template", page.PAGES)
def test_a_page_says_what_the_records_do(template: str) -> None:
    file = page.PAGES[template]
    assert file.read_text(encoding="utf-8") == page.filled(template), "python -m benchmarks.evidence.page"


def test_the_readme_shows_rows_of_the_page() -> None:
    section = (page.ROOT / "README.md").read_text(encoding="utf-8").split("## Results\n")[1]
    rows = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("|")]
    assert len(rows) == 6
    whole = page.PAGES["evidence.md.j2"].read_text(encoding="utf-8")
    assert set(rows) <= set(whole.splitlines())
    told = re.findall(r"\d+\.\d+", section.split("\n## ")[0])
    assert len(told) > 30
    assert set(told) <= set(re.findall(r"\d+\.\d+", whole))


def test_the_words_of_the_page_hold() -> None:
    """Of the sentences that no figure stands in."""
    published = found.published_of(FULL)
    assert published is not None
    for value, explained in ((ERS, 53.9), (found.LESS, published.scores["ERS"])):  # none is ruled out
        low, high = value.ends(FULL) or (0, 0)
        assert low <= explained <= high
    for rival in RIVALS:  # the claim does not hold
        verdicts = [found.added(value, rival, HM) for value in (RECALL, ERS)]
        assert [one and one.verdict for one in verdicts] == ["higher", "lower"]
    for network in FASHION:
        assert found.squares(network, "small-strict", "misrank") == 0
        both = found.record(network, "reference"), found.record(network, "strict")
        assert found.terms(*both, count=1)[0][0] == "GTM"
    for network in FASHION[2:]:
        few, more = (found.squares(network, kind, "shift") for kind in ("strict", "more-steps"))
        assert 1 < more < few
    for value in (ERS, found.LESS):
        assert (value.of(FASHION[2]) or 0) > (value.of(FULL) or 100)
    choice = RunFolder(RESULTS / FULL.name).read()["choice"]
    assert choice["best"]["step"] == choice["last"]["step"]
    orders = [found.ordered(found.hardness_of(samplers)) for samplers in SAMPLERS]
    assert orders[:3] == ["R < M < S < D ≈ H"] * 3 != orders[3:]
    assert all(map(found.hardness_of, SAMPLERS)), "the list of what is not measured has no samplers"


def test_the_figures_show_every_network_that_is_measured(tmp_path: Path) -> None:
    drawn = figures.write(tmp_path)
    kept = sorted(page.IMAGES.glob("evidence-*.svg"))
    assert [file.name for file in kept] == sorted(file.name for file in drawn)
    for file in drawn:
        assert _texts(file) == _texts(page.IMAGES / file.name)
        size = [float(found) for found in re.findall(r'[\d.]+(?=pt")', file.read_text())[:2]]
        inner = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', file.read_text())[0]
        assert size == pytest.approx([figures.SCALE * float(side) for side in inner], abs=0.01)
    assert {network.label for network in FASHION} <= set(_texts(page.IMAGES / "evidence-scores.svg"))


def _texts(file: Path) -> list[str]:
    """Return the words of a figure, which do not depend on the processor, as its lines do."""
    return [
        html.unescape(found) for found in re.findall(r">([^<>\n]+)</text>", file.read_text(encoding="utf-8"))
    ]


def test_nothing_is_kept_that_the_plan_does_not_know() -> None:
    known = {network.record(kind) for network in NETWORKS for kind in KINDS}
    assert set(RESULTS.rglob("record.json")) <= known
    assert {file.parent for file in RESULTS.rglob("recipe.yaml")} <= {RESULTS / n.name for n in NETWORKS}
    assert set(RESULTS.rglob("cell.json")) <= {samplers.result for samplers in SAMPLERS}
    assert len({network.name for network in NETWORKS}) == len(NETWORKS)


def test_what_is_missing_is_said() -> None:
    lines = found.missing_lines()
    seeds = [those.split(", ") for those in re.findall(r"\(seeds? ([\d, ]+)\)", "\n".join(lines))]
    assert sum(map(len, seeds)) == len(found.missing()) == len(list(tasks())) - len(MADE)
    for network, kind in found.missing():
        where = f"- {network.data}, {network.length}, {network.title}:"
        assert any(line.startswith(where) and kind in line for line in lines)


@pytest.mark.parametrize(("network", "kind"), MADE, ids=named)
def test_a_record_is_what_its_command_makes(network: Network, kind: Kind) -> None:
    record, words = record_of(network, kind), network.evaluate(kind)
    assert record is not None
    options = dict(zip(words[2::2], words[3::2], strict=True))
    plan = {key: value for field in Settings.model_fields if (value := options.get(key := f"--{field}"))}
    asked: dict[str, Any] = {key[2:]: int(v) if v.isdigit() else v for key, v in plan.items()}
    if "attacks" in asked:
        asked["attacks"] = asked["attacks"].split(",")
    asked["eps"] = {None: 77, "8/255": 8}[asked.get("eps")] / 255
    assert record.settings == rm.Plan.make(**asked).settings
    assert (record.data.name, record.data.images, record.queries.count) == (network.data, 10000, 1000)
    assert record.network.name.endswith(f" {network.defense}")
    assert record.network.weights == "last weights"
    if network.kept:
        assert record.network.sha256 == rm.load_run(RESULTS / network.name).digest


@pytest.mark.parametrize("network", measured(), ids=named)
def test_all_records_of_a_network_are_of_the_same_weights(network: Network) -> None:
    made = [record.network.sha256 for kind in KINDS if (record := record_of(network, kind)) is not None]
    assert len(set(made)) == 1


def test_other_weights_than_those_of_the_records_are_refused() -> None:
    network, other = FASHION[:2]
    make.same(network, RESULTS / network.name)
    with pytest.raises(make.DifferentWeightsError, match=r"evaluation-reference.*delete .*zoo"):
        make.same(network, RESULTS / other.name)


@pytest.mark.parametrize("network", KEPT, ids=named)
def test_a_training_is_what_its_command_makes(
    network: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class CapturedError(BaseException):
        pass

    def capture(recipe: Recipe, *_: object, **__: object) -> None:
        raise CapturedError(recipe)

    monkeypatch.setattr(training, "train", capture)
    with pytest.raises(CapturedError) as caught:
        works(*network.train(str(tmp_path), str(tmp_path / "run")))
    made = caught.value.args[0].model_dump()
    kept = load_recipe(RESULTS / network.name / "recipe.yaml").model_dump()
    assert {**made, "root": None} == kept


def test_differences_are_those_of_pairs() -> None:
    found = Difference.of([(3.0, 1.0), (5.0, 2.0), (7.0, 3.0)])  # 2, 3, 4: deviation 1, t of 2 degrees 4.3027
    assert found.mean == pytest.approx(3)
    assert found.high - found.mean == pytest.approx(4.302652729911275 / 3**0.5)
    assert (found.verdict, Difference.of([(1.0, 3.0), (1.0, 3.1)]).verdict) == ("higher", "lower")
    assert Difference.of([(1.0, 3.0), (3.0, 1.0)]).verdict == "not clearly different"
    assert (Difference.of([(1.0, 3.0)]).show(), Difference.of([(1.0, 3.0)]).verdict) == ("−2.0", "")
    assert Difference.of([(1.0, 3.0), (1.0, 3.1)]).show(2) == "−2.05 [−2.69, −1.41]"
    nothing = Difference.of([(0.0, 0.0), (0.0, 0.0)])
    assert (nothing.show(), nothing.verdict) == ("none", "")


def test_a_relative_shift_is_told_in_distances_of_two_images() -> None:
    network = CLAIM[0]
    record, ends = record_of(network, "strict"), RELATIVE.ends(network)
    assert record is not None
    assert ends is not None
    (cosine,) = (check.figure for check in record.checks if check.name == "collapse")
    assert cosine is not None
    unit = (2 - 2 * cosine) ** 0.5  # |a − b|² = 2 − 2·a·b
    assert RELATIVE.of(network) == pytest.approx(record["shift"] / unit)
    assert SHIFT.of(network) == record["shift"]
    assert ends[0] * unit < record["shift"] < ends[1] * unit


def test_the_order_of_samplers_takes_equal_means_as_such() -> None:
    means = {"D": -0.1525, "H": -0.1524, "R": -0.9, "S": -0.34}
    assert found.ordered({name: {"mean": mean} for name, mean in means.items()}) == "R < S < D ≈ H"


def test_an_ers_that_is_not_valid_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    network = FASHION[0]
    record = record_of(network, "reference")
    assert record is not None
    assert record.ers is not None
    assert compare(ERS, [network], [network]) is not None
    collapsed = record.model_copy(update={"ers": record.ers.model_copy(update={"valid": False})})
    monkeypatch.setattr(found, "record_of", lambda *_: collapsed)
    assert (ERS.of(network), ERS.show(network)) == (None, "not valid")
    assert (RECALL.of(network), RECALL.show(network)) == (record["R@1"], record.show("R@1"))
    assert compare(ERS, [network], [network]) is None


def write_idx(root: Path, each: int) -> Path:
    """Write idx files of 28×28 images of ten classes, so many of `each` for training and for testing."""
    generator, labels = np.random.default_rng(0), np.repeat(np.arange(10, dtype=np.uint8), each)
    means = generator.integers(0, 256, (10, 28, 28))
    root.mkdir()
    for prefix in ("train", "t10k"):
        noise = generator.integers(-40, 40, (len(labels), 28, 28))
        pixels = np.clip(means[labels] + noise, 0, 255).astype(np.uint8)
        head = struct.pack(">4I", 0x803, *pixels.shape)
        (root / f"{prefix}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        head = struct.pack(">2I", 0x801, len(labels))
        (root / f"{prefix}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
    return root


@pytest.mark.parametrize("network", [CLAIM[2], WHY[2], MNIST[0]], ids=named)
def test_a_short_one_is_made_again_in_the_same_form(network: Network, tmp_path: Path) -> None:
    root, run = write_idx(tmp_path / "images", 6), tmp_path / "run"
    works(*network.train(str(root), str(run)), "--batch", "40")
    kept = RESULTS / network.name / "recipe.yaml"
    made = load_recipe(run / "recipe.yaml").model_dump()
    if kept.is_file():
        assert {**made, "root": None, "batch": 256} == load_recipe(kept).model_dump()
    for kind in (kind for one, kind in tasks() if one == network):
        words = network.evaluate(kind, str(root), str(run), str(tmp_path / kind))
        words[words.index("--queries") + 1] = "6"
        works(*words)
        again = json.loads((tmp_path / kind / "record.json").read_text())
        whole = next(
            n for n, k in MADE if k == kind and (n.kept or k == "reference" or n.data == network.data)
        )
        before = json.loads(whole.record(kind).read_text())
        assert _form(again, kind) == _form(before, kind)
        assert {**again["settings"], "queries": 1000, "suite": None} == {**before["settings"], "suite": None}


def _form(value: Any, kind: str) -> Any:
    """Return the names and types of a record's entries, whatever its values, goals and machines are."""
    if isinstance(value, dict):
        if "goals" in value:
            return {"goals": _form(value["goals"]["misrank"], kind)}
        return {key: _form(entry, kind) for key, entry in value.items()}
    if isinstance(value, list):
        return [type(entry) for entry in value[:1]]
    return "number" if isinstance(value, int | float) else type(value)


def test_a_measurement_of_the_samplers_is_made_again_in_the_same_form(tmp_path: Path) -> None:
    root, samplers = write_idx(tmp_path / "images", 30), SAMPLERS[0]
    works(*samplers.reproduce(str(root), str(tmp_path / "out")), "--batches", "2")
    (file,) = (tmp_path / "out").glob("*/cell.json")
    again = json.loads(file.read_text())
    before = json.loads(samplers.result.read_text())
    kept = {key: entry for key, entry in before.items() if key not in ("seconds", "sha256")}
    assert _form(again, "") == _form(kept, "")
