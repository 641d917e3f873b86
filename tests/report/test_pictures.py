"""Pictures of an evaluation: which queries, what was done to them, the file and its faults, the map."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robustmetric.attacks import ATTACKS, Attack, attack
from robustmetric.errors import UserError
from robustmetric.evaluation import Data, Evaluation, Plan, Record, Subject, load_arrays
from robustmetric.files import DamagedError
from robustmetric.report.pictures import (
    EACH,
    PICTURES,
    Map,
    Pictures,
    choose,
    draw_map,
    load_pictures,
    make_pictures,
)
from tests.evaluation.conftest import Tiny, make_network
from tests.helpers.networks import Counted
from tests.helpers.records import a_record

Arrays = dict[str, Tensor]
WHYS = ("worst", "median", "random")
FEW: dict[str, Any] = {"attacks": ["ES", "CA+"], "steps": 2, "queries": 20}
ROUNDED = 0.5e-4 + 1e-9  # four digits are kept


@dataclass(frozen=True)
class Made:
    """An evaluation, what it found, and its pictures."""

    evaluation: Evaluation
    record: Record
    arrays: Arrays
    out: Path
    found: Pictures


@pytest.fixture(scope="module")
def pictured(tiny: Tiny, images: Tensor) -> Callable[..., Made]:
    """Make pictures of the small world, in double precision: batches differ by some 1e-15."""

    def make(out: Path, **changes: Any) -> Made:
        network = make_network().double()
        given = {"images": images.double(), **FEW, **changes}
        record, again = tiny(network, out=out, **given).run(), tiny(network, **given)
        arrays = load_arrays(out)
        return Made(again, record, arrays, out, make_pictures(again, record, arrays, out))

    return make


# Which queries


def by_loop(which: Attack, arrays: Arrays, seed: int, each: int) -> dict[int, str]:
    """Choose by the text: worst first, then the middle, then drawn of what is left."""
    rows = []
    for row in range(len(arrays["number"])):
        harm = 0.0
        for column in which.columns:
            before, after = (
                float(arrays[f"{which.name}/{w}/{column.name}"][row]) for w in ("before", "after")
            )
            if column.better == "higher":
                harm += column.unit.points * (before - after)
            if column.better == "lower":
                harm += column.unit.points * (after - before)
        first, last = (float(arrays[f"{which.name}/objective/{when}"][row]) for when in ("first", "last"))
        if not math.isnan(harm):
            rows.append((-harm, last - first, row))
    order = [row for _, _, row in sorted(rows)]
    found = dict.fromkeys(order[:each], "worst")
    middle = (len(order) - each) // 2
    for row in order[max(middle, each) :][:each]:
        found[row] = "median"
    left = [row for row in order if row not in found]
    drawn = torch.randperm(len(left), generator=torch.Generator().manual_seed(seed)).tolist()[:each]
    found |= {left[place]: "random" for place in drawn}
    return {int(arrays["number"][row]): why for row, why in found.items()}


def made_up(which: Attack, count: int, seed: int) -> Arrays:
    """Arrays of few different values, some of them none, of queries with any numbers."""
    generator = torch.Generator().manual_seed(seed)

    def some(*values: float) -> Tensor:
        return torch.tensor(values).double()[torch.randint(len(values), (count,), generator=generator)]

    found = {"number": torch.randperm(1000, generator=generator)[:count].sort().values}
    for column in which.columns:
        found[f"{which.name}/before/{column.name}"] = some(0.0, 50.0, 100.0, math.nan)
        found[f"{which.name}/after/{column.name}"] = some(0.0, 50.0, 100.0)
    return found | {f"{which.name}/objective/{when}": some(0.0, -0.5, 0.25) for when in ("first", "last")}


@pytest.mark.parametrize("name", ["GTM", "ES", "TMA", "SP-QA-", "CA-(w=2)"])
def test_the_chosen_are_those_of_a_loop(name: str) -> None:
    which = attack(name)
    for seed, count in enumerate([0, 1, 2, 3, 4, 5, 6, 7, 8, 20, 61]):
        arrays = made_up(which, count, seed)
        for each in (1, EACH, 5):
            found = choose(which, arrays, seed=seed, each=each)
            assert found == by_loop(which, arrays, seed, each)
            assert list(found) == list(by_loop(which, arrays, seed, each)), "the worst is the first"
            assert choose(which, arrays, seed=seed, each=each) == found


# What was done to them


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"attacks": [*ATTACKS, "demote(k=7,side='candidate')"]}, marks=pytest.mark.slow),
        {"protocol": "reference", "attacks": ["CA-", "ES", "GTM", "GTT"]},
        {"search": "nes(samples=4)"},
        {"search": "pgd(restarts=2,random_start=True)"},
        {"search": "apgd", "norm": "l2", "eps": 0.5},
        {"search": "transfer", "surrogate": 1},
        {"batch": 4, "queries": None},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_an_attack_does_again_what_it_did(
    changes: dict[str, Any], pictured: Callable[..., Made], tmp_path: Path
) -> None:
    if "surrogate" in changes:
        changes = {**changes, "surrogate": make_network(1).double()}
    made = pictured(tmp_path, seed=3, **changes)
    rows = {number: row for row, number in enumerate(made.arrays["number"].tolist())}
    order = [goal.name for goal in made.evaluation.plan.attacks]
    for goal in made.evaluation.plan.attacks:
        mine = [one for one in made.found.pictures if one.attack == goal.name]
        assert {one.number: one.why for one in mine} == by_loop(goal, made.arrays, seed=3, each=EACH)
        for one in mine:
            row = rows[one.number]
            for column, (heading, *values) in zip(goal.columns, one.values, strict=True):
                wanted = [
                    made.arrays[f"{goal.name}/{when}/{column.name}"][row] for when in ("before", "after")
                ]
                assert (heading, values) == (column.heading, [column.show(float(value)) for value in wanted])
            if made.record.settings.norm == "linf":
                change = float(made.arrays[f"{goal.name}/change"][rows[one.number]])
                assert one.change == pytest.approx(change, abs=1e-9)
    keys = [(WHYS.index(one.why or ""), order.index(one.attack)) for one in made.found.pictures]
    assert keys == sorted(keys)
    assert load_pictures(tmp_path, made.record) == made.found
    moved = {name: len(moves) for name, moves in made.found.map.moves.items()}
    assert moved == dict.fromkeys(order, 3 * EACH)


def test_a_query_without_an_answer_is_not_shown(
    pictured: Callable[..., Made], labels: Tensor, tmp_path: Path
) -> None:
    lonely = labels.clone()
    lonely[7] = 9
    made = pictured(tmp_path, labels=lonely, attacks=["ES", "QA+"], queries=None)
    assert made.arrays["ES/after/ES:R"].isnan().tolist() == [n == 7 for n in range(40)]
    assert all(one.number != 7 for one in made.found.pictures if one.attack == "ES")
    arrays = {key: torch.full_like(v, math.nan) if "ES/after" in key else v for key, v in made.arrays.items()}
    (made.out / PICTURES).unlink()
    found = make_pictures(made.evaluation, made.record, arrays, made.out)
    assert {one.attack for one in found.pictures} == {*found.map.moves} == {"QA+"}


# The file, and what can go wrong


def test_a_flipped_bit_is_noticed_and_mended(pictured: Callable[..., Made], tmp_path: Path) -> None:
    made, file = pictured(tmp_path), tmp_path / PICTURES
    whole = file.read_bytes()
    for place in range(5, len(whole), len(whole) // 20):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=PICTURES):
            load_pictures(tmp_path, made.record)
    assert make_pictures(made.evaluation, made.record, made.arrays, tmp_path) == made.found
    assert file.read_bytes() == whole
    file.write_text(whole.decode().replace('"why": "worst"', '"why": "random"', 1))
    with pytest.raises(DamagedError, match="changed by hand"):
        load_pictures(tmp_path, made.record)


def test_pictures_of_another_record_are_replaced(pictured: Callable[..., Made], tmp_path: Path) -> None:
    made = pictured(tmp_path)
    with pytest.raises(UserError, match="is of another record"):
        load_pictures(tmp_path, a_record())
    other = made.record.model_copy(update={"sha256": "1" * 64})
    assert make_pictures(made.evaluation, other, made.arrays, tmp_path).record == "1" * 64


def test_of_ten_thousand_queries_the_chosen_alone_are_attacked(tmp_path: Path) -> None:
    count, steps = 10_000, 3
    network = Counted(nn.Flatten())
    images = torch.rand(count, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    subject = Subject(network, Data(images, torch.arange(count) % 100))
    plan = Plan.make(attacks=["ES", "CA+", "GTM"], steps=steps, batch=256, checks="none")
    arrays: Arrays = {"number": torch.arange(count)}
    for goal in plan.attacks:
        arrays |= {key: value for key, value in made_up(goal, count, 1).items() if key != "number"}
    found = make_pictures(Evaluation(subject, plan), a_record(), arrays, tmp_path)
    assert len(found.pictures) == 3 * 3 * EACH
    attacked = 3 * 3 * EACH * (steps + 1)
    assert count < network.forwards <= count + attacked
    assert network.backwards <= attacked


# The map


def cloud(images: int, dim: int, seed: int = 0) -> Tensor:
    """Points on the unit sphere that spread over every axis differently, in single precision."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(images, dim, generator=generator) * torch.linspace(2, 0.3, dim) + 0.2
    return torch.nn.functional.normalize(z)


@pytest.mark.kernels
@pytest.mark.parametrize(("images", "dim"), [(50, 8), (9, 40), (400, 2), (3, 3)])
def test_the_plane_is_that_of_numpys_covariance(images: int, dim: int) -> None:
    z = cloud(images, dim).double().numpy()
    made = draw_map(cloud(images, dim), torch.arange(images), None, {}, seed=0)
    found, centre = np.array([point[:2] for point in made.points]), z.mean(0)
    values, vectors = np.linalg.eigh((z - centre).T @ (z - centre))
    order = np.argsort(values)[::-1][:2]
    assert made.explained == pytest.approx(values[order] / values.sum(), abs=ROUNDED)
    flat = (z - centre) @ vectors[:, order]
    flat *= np.sign((flat * found).sum(0))  # that of a component is arbitrary
    assert np.abs(found - flat).max() <= ROUNDED


def test_a_network_that_has_collapsed_has_no_plane() -> None:
    for z in (torch.ones(6, 3), torch.ones(6, 1)):
        made = draw_map(z, torch.arange(6) % 2, None, {}, seed=0)
        assert made.explained == (0.0, 0.0)
        assert {point[:2] for point in made.points} == {(0.0, 0.0)}


def test_a_map_has_images_with_their_classes_and_moves() -> None:
    z, labels = cloud(12, 5), torch.tensor([4, 1, 4, 1, 9, 9, 4, 4, 1, 9, 1, 4])
    before, after = z[[2, 7]], cloud(2, 5, seed=3)
    names = [f"kind {k}" for k in range(10)]
    made = draw_map(z, labels, names, {"ES": (before, after), "TMA": (before[:1], z[4:5])}, seed=0)
    assert made.classes == ["kind 1", "kind 4", "kind 9"]
    assert [made.classes[k] for _, _, k in made.points] == [f"kind {k}" for k in labels.tolist()]
    # A query is where the image is, and an arrow ends where the target is.
    assert [move[:2] for move in made.moves["ES"]] == [made.points[2][:2], made.points[7][:2]]
    assert made.moves["TMA"] == [(*made.points[2][:2], *made.points[4][:2])]


def test_of_many_images_four_hundred_are_drawn() -> None:
    z, labels = cloud(1000, 4), torch.arange(1000)
    one, same, other = (draw_map(z, labels, None, {}, seed=seed) for seed in (0, 0, 1))
    assert one == same != other
    assert len(one.points) == len({*one.classes}) == 400
    assert Map.model_validate_json(one.model_dump_json()) == one
