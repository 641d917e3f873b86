"""Curves: plans at other budgets, points that share what they can, and what is read of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from robustmetric.evaluation import Data, Evaluation, Plan, Record, Subject
from robustmetric.files import digest_of_entries
from robustmetric.report.curves import (
    FOLDER,
    QUERIES,
    CurvePoint,
    curve_plans,
    load_curves,
    make_curves,
)
from tests.evaluation.conftest import make_network
from tests.helpers.processes import at_call

FEW: dict[str, Any] = {
    "eps": 0.1,
    "alpha": 0.02,
    "steps": 4,
    "queries": 6,
    "attacks": ["ES"],
    "checks": "none",
}
POINTS = 12  # of eleven plans: four steps at ε are a point of both curves


# Plans


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eps": 0.2, "steps": 8, "alpha": 0.5},
        {"eps": 77 / 255, "steps": 5, "queries": 7, "seed": 4, "batch": 3, "checks": "full"},
        {"eps": 1.0, "steps": 1, "alpha": 1.0},
        {"eps": 0.0, "steps": 2},
        {"eps": 1.5, "norm": "l2", "search": "apgd", "suite": "worst-case(trials=2)"},
    ],
    ids=str,
)
def test_plans_go_around_the_plan(settings: dict[str, Any]) -> None:
    plan = Plan.make(**settings).settings
    plans = {point: each.settings for point, each in curve_plans(Plan.make(**settings), 1000).items()}
    most = 1.0 if plan.norm == "linf" else 2 * plan.eps
    # From a quarter to twice the radius, as far as there is room, and no value twice.
    radii = sorted({min(share * plan.eps, most) for share in (0.25, 0.5, 1, 1.5, 2)})
    steps = sorted({1, 2, 4, 8, 16, 32, 64, plan.steps})
    assert [point.value for point in plans] == [*radii, *steps]
    for point, each in plans.items():
        # What moves is on its axis, and the step that goes with it.
        fixed = {"queries": min(plan.queries or QUERIES, QUERIES), "checks": "none", "suite": "none"}
        moved = {point.axis: point.value, "alpha": each.alpha}
        assert each.model_dump() == {**plan.model_dump(), **fixed, **moved}
        assert plan.alpha <= each.alpha <= 1
        assert each.alpha in (plan.alpha, 1.0) or each.alpha * each.steps == pytest.approx(1.25 * each.eps)
        assert each.alpha == 1 or each.alpha * each.steps >= 1.25 * each.eps * (1 - 1e-12)
    folders = {point.folder: each for point, each in plans.items()}
    assert all(folders[point.folder] == each for point, each in plans.items())
    assert len(folders) == len(plans) - 1, "where the axes cross there is one evaluation"


# Making them


def subject_of(images: Tensor, labels: Tensor, network: nn.Module | None = None) -> Subject:
    return Subject(network or make_network(), Data(images, labels, name="tiny"))


@pytest.fixture(scope="module")
def made(
    images: Tensor, labels: Tensor, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Record, Subject]:
    """A record with its curves."""
    out, subject = tmp_path_factory.mktemp("curves"), subject_of(images, labels)
    record = Evaluation(subject, Plan.make(**FEW), out).run()
    make_curves(subject, Plan.make(**FEW), out)
    return out, record, subject


@pytest.mark.slow
def test_a_point_is_the_evaluation_of_its_plan(made: tuple[Path, Record, Subject]) -> None:
    out, record, subject = made
    found = dict(load_curves(out, record)[0])
    plans = curve_plans(Plan.make(**FEW), 40)
    assert list(found) == list(plans)
    for point, each in plans.items():
        assert found[point].settings == each.settings
    for point in [*plans][::4]:
        assert found[point] == Evaluation(subject, plans[point]).run()
    assert found[CurvePoint("eps", 0.1, "eps-1")] == found[CurvePoint("steps", 4, "eps-1")]
    far = [found[point]["ES:D"] for point in plans if point.axis == "eps"]
    assert far == sorted(far), "more room, farther away"


@pytest.mark.slow
def test_images_are_embedded_and_ranked_once_for_all_points(
    images: Tensor, labels: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("_embed", "_rank"):
        make = getattr(Evaluation, name)

        def counted(*args: Any, name: str = name, make: Any = make) -> Any:
            calls.append(name)
            return make(*args)

        monkeypatch.setattr(Evaluation, name, counted)
    make_curves(subject_of(images, labels), Plan.make(**FEW), tmp_path)
    assert calls == ["_embed", "_rank"]


def stop() -> None:
    raise KeyboardInterrupt


def files_of(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()
    }


@pytest.mark.slow
def test_an_interruption_loses_nothing(
    images: Tensor, labels: Tensor, made: tuple[Path, Record, Subject], tmp_path: Path
) -> None:
    plan, seen = Plan.make(**FEW), []
    for limit in (1, 2, 9, 30, 60, 10**9):
        network, before = make_network(), files_of(tmp_path)
        call = at_call(limit, stop, lambda: None)
        network.register_forward_pre_hook(lambda module, inputs, call=call: call())
        with suppress(KeyboardInterrupt):
            make_curves(subject_of(images, labels, network), plan, tmp_path)
        after = files_of(tmp_path)
        seen.append(len([name for name in after if name.endswith("record.json")]))
        kept = {n: content for n, content in before.items() if n.endswith(("record.json", "plan.json"))}
        assert kept.items() <= after.items()
    assert seen == sorted(seen)
    assert 0 < seen[-2] < seen[-1] == POINTS - 1
    wanted = files_of(made[0] / FOLDER)
    assert {f"{FOLDER}/{name}": content for name, content in wanted.items()} == files_of(tmp_path)


def test_what_is_finished_is_not_made_again(
    made: tuple[Path, Record, Subject], images: Tensor, labels: Tensor
) -> None:
    out, _, _ = made
    before, network = files_of(out), make_network()
    network.register_forward_pre_hook(lambda *_: pytest.fail("the network was asked"))
    told: list[tuple[str, float, int]] = []
    make_curves(subject_of(images, labels, network), Plan.make(**FEW), out, lambda *call: told.append(call))
    assert files_of(out) == before
    assert told == [("curves", place + 1, POINTS) for place in range(POINTS)]


# Reading them


@pytest.fixture
def copy(made: tuple[Path, Record, Subject], tmp_path: Path) -> tuple[Path, Record]:
    """The record and its curves, to be damaged."""
    out, record, _ = made
    for name, content in files_of(out).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path, record


def read(out: Path, record: Record) -> tuple[list[CurvePoint], list[str]]:
    found, told = load_curves(out, record)
    return [point for point, _ in found], told


def rewritten(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record as somebody would who knows how its digest is made."""
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps({**content, "sha256": digest_of_entries(content)}), encoding="utf-8")


def test_a_damaged_point_is_left_out_with_a_line(copy: tuple[Path, Record]) -> None:
    out, record = copy
    every, _ = read(out, record)
    for name in ("eps-2", "steps-8", "eps-1"):
        file = out / FOLDER / name / "record.json"
        file.write_bytes(file.read_bytes().replace(b'"queries"', b'"queer"', 1))
    found, told = read(out, record)
    assert found == [point for point in every if point.folder not in ("eps-2", "steps-8", "eps-1")]
    assert len(found) == POINTS - 4
    assert len(told) == 3, "a point of both curves is told once"
    for name, line in zip(("eps-1", "eps-2", "steps-8"), told, strict=True):
        place = out / FOLDER / name
        assert line.startswith(f"{place / 'record.json'} is damaged, or was changed by hand: ")
        assert line.endswith(f"; remove {place} and evaluate with --curves again")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["network"].update(sha256="0" * 64),
        lambda c: c["settings"].update(eps=0.19),
        lambda c: c["settings"].update(attacks=["GTM"]),
    ],
)
def test_points_of_another_evaluation_are_left_out(
    change: Callable[[dict[str, Any]], object], copy: tuple[Path, Record]
) -> None:
    out, record = copy
    place = out / FOLDER / "eps-2"
    rewritten(place / "record.json", lambda c: None)
    assert len(read(out, record)[0]) == POINTS
    rewritten(place / "record.json", change)
    found, told = read(out, record)
    assert len(found) == POINTS - 1
    assert told == [f"{place} is of another evaluation; remove {place} and evaluate with --curves again"]
