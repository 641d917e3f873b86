"""The goals of a worst-case attack, with every objective and on both sides, against plain loops."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import (
    Demote,
    Draws,
    Gallery,
    Misrank,
    Promote,
    Queries,
    Translocate,
    attack,
)
from robustmetric.attacks.goals import Goal
from tests.helpers import goals
from tests.helpers.goals import GOALS, aimed

pytestmark = pytest.mark.kernels

World = tuple[Queries, Gallery]
ENDS = [name for name in GOALS if name != "shift"]  # those with an end to what they want


@pytest.fixture(scope="module", params=["whole", "cameras in pieces"])
def world(
    request: pytest.FixtureRequest, queries: Queries, gallery: Gallery, asked: Queries, seen: Gallery
) -> World:
    """The queries and their gallery, as one block without cameras, or several with them."""
    q, g = (asked, seen) if "cameras" in request.param else (queries, gallery)
    return q, replace(g, chunk=7) if "pieces" in request.param else g


# What is minimised


@pytest.mark.parametrize("name", GOALS)
def test_objective_and_gradient_against_a_plain_loop(name: str, world: World, moved: Tensor) -> None:
    which, (q, g) = attack(name), world
    index = aimed(which, q, g)
    leaf = moved.clone().requires_grad_()
    value = which.objective(leaf, which.aim(index, q, g), q, g)
    assert (value.shape, value.dtype) == ((18,), torch.float64)
    # Each row has a weight of its own, so that rows cannot be mixed up.
    weights = torch.arange(1.0, 19.0, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weights * value).sum(), leaf)
    steep = 0
    for i in range(18):
        z = moved[i].clone().requires_grad_()
        wanted = goals.objective(which, z, i, index[i].tolist(), q, g) + 0 * z.sum()
        (slope,) = torch.autograd.grad(wanted, z)
        # Distances come from |z|² + |x|² − 2zx with 1e-16 of error, and those here are not below 1e-2; the
        # gradient of one divides by it again.
        torch.testing.assert_close(value[i], wanted, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradient[i], weights[i] * slope, rtol=1e-9, atol=1e-10)
        steep += int(slope.abs().max() > 0)
    assert steep >= 10


@pytest.mark.parametrize("name", GOALS)
def test_objective_where_distances_are_tied_or_zero(name: str, world: World, tied: Tensor) -> None:
    which, (q, g) = attack(name), world
    index = aimed(which, q, g)
    leaf = tied.clone().requires_grad_()
    value = which.objective(leaf, which.aim(index, q, g), q, g)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert gradient.isfinite().all()
    for i in range(18):
        wanted = goals.objective(which, tied[i], i, index[i].tolist(), q, g)
        # A distance of zero may come out as a millionth, and a soft minimum moves no more than its distances.
        assert value[i].item() == pytest.approx(wanted.item(), abs=2.1e-6)


def test_goals_are_judged_by_the_definitions_whatever_the_protocol() -> None:
    for name in GOALS:
        which = attack(name, protocol="reference")
        assert which.strict
        assert which.read_early == ()


# What is reported


@pytest.mark.parametrize("name", GOALS)
def test_measure_against_a_sorted_ranking(name: str, world: World, moved: Tensor, tied: Tensor) -> None:
    which, (q, g) = attack(name), world
    index = aimed(which, q, g, seed=1)
    for where, z in {"moved": moved, "tied": tied, "benign": q.z}.items():
        found = which.measure(z, which.aim(index, q, g), q, g)
        assert list(found) == [which.name]
        for i in range(18):
            wanted = goals.measure(which, z[i].tolist(), i, index[i].tolist(), q, g)
            assert found[which.name][i].item() == pytest.approx(wanted, abs=1e-9, nan_ok=True), (where, i)


@pytest.mark.parametrize(("k", "nearer", "level", "inside"), [
    (4, 3, 0, True), (4, 4, 0, False), (4, 2, 2, True), (4, 3, 1, False), (4, 0, 6, True), (4, 0, 7, False),
    (1, 0, 0, True), (1, 0, 1, False), (1, 1, 0, False),
])  # fmt: skip
def test_places_count_by_the_middle_rank(k: int, nearer: int, level: int, inside: bool) -> None:
    """On a line, by the angle to the query: some nearer than the target, some as near, some behind."""
    angles = torch.tensor([0.0] + [0.1] * nearer + [0.2] * (level + 1) + [0.9] * 5, dtype=torch.float64)
    line = Gallery(torch.stack([angles.cos(), angles.sin()], 1), torch.zeros(len(angles)).long())
    one = Queries(line.z[:1], torch.zeros(1).long(), torch.tensor([0]))
    for name, wanted in {"promote": inside, "demote": not inside, "translocate": inside}.items():
        which = attack(name, k=k)
        target = which.aim(torch.tensor([[1 + nearer]]), one, line)
        assert which.measure(line.z[:1], target, one, line)[which.name].tolist() == [100.0 * wanted]


# What is aimed at


@pytest.mark.parametrize("name", GOALS)
def test_targets_against_a_plain_loop(name: str, world: World) -> None:
    which, (q, g) = attack(name), world
    for seed in range(2):
        found = aimed(which, q, g, seed)
        for i in range(18):
            wanted = goals.select(which, i, q, g, Draws(seed, which.drawn_as, [i]))
            assert found[i].tolist() == wanted, (seed, i)


@pytest.mark.parametrize("name", ["misrank(side='candidate')", "misrank(by=1)", "misrank(by=2)"])
def test_a_class_of_nearly_all_images_changes_no_other_query_s_target(name: str) -> None:
    """Class 0 has 36 of 40 images: of other classes it finds four, and the others thirty-eight."""
    z = torch.nn.functional.normalize(
        torch.randn(40, 4, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    )
    labels = torch.zeros(40, dtype=torch.long)
    labels[[5, 11]], labels[[20, 33]] = 1, 2
    cut, own = Gallery(z, labels), torch.tensor([0, 5, 11, 20, 33, -1])
    q = Queries(z[own], labels[own].where(own >= 0, 7), own)
    which = attack(name)
    found = aimed(which, q, cut)
    far_off = 0
    for i in range(6):
        wanted = goals.select(which, i, q, cut, Draws(0, which.drawn_as, [i]))
        assert found[i].tolist() == wanted
        near = [p for _, p in sorted((goals.square(z[p].tolist(), q.z[i].tolist()), p) for p in range(40))]
        near = [p for p in near if int(labels[p]) != int(q.labels[i])]
        far_off += near.index(wanted[0]) >= 4
    assert far_off or name != "misrank(side='candidate')"


def test_copies_in_several_classes_are_aimed_at_in_their_order() -> None:
    """A matrix product rounds copies otherwise in another batch: which class is nearer would change."""
    z = torch.nn.functional.normalize(torch.randn(100, 64, generator=torch.Generator().manual_seed(0)))
    twins, kinds = torch.cat([z, z]), torch.arange(200) % 3
    kinds[100:] = (torch.arange(100) + 1) % 3 + 3 * (torch.arange(100) % 2)
    q = Queries(z[:20], kinds[:20], torch.arange(20))
    for name in ("misrank(by=1)", "misrank(by=2)"):
        which = attack(name)
        whole = aimed(which, q, Gallery(twins, kinds))
        for chunk in (1, 7, 64):
            assert torch.equal(aimed(which, q, Gallery(twins, kinds, chunk=chunk)), whole)
        for i in range(20):
            assert aimed(which, q[torch.tensor([i])], Gallery(twins, kinds)).tolist() == [whole[i].tolist()]
            assert whole[i].tolist() == goals.select(which, i, q, Gallery(twins, kinds), Draws(0, "x", [i]))


# What is surely lost


@pytest.mark.parametrize("name", ENDS)
def test_a_query_is_said_to_be_lost_where_it_is_beyond_rounding(
    name: str, world: World, moved: Tensor, tied: Tensor
) -> None:
    which, (q, g) = attack(name), world
    q, g = replace(q, z=q.z.float()), replace(g, z=g.z.float())
    target = which.aim(aimed(which, q, g), q, g)
    margin = replace(which, by="margin")  # type: ignore[call-arg]
    plain = margin.aim(aimed(margin, q, g), q, g)
    clear = 0
    for at in (moved, tied, q.z):
        z = at.to(g.z)
        value, near = which.appraise(z, target, q, g)
        assert near is not None
        assert near.dtype == torch.bool
        assert torch.equal(value, which.objective(z, target, q, g))
        values = which.measure(z, target, q, g)
        won = which.succeeded(values)
        # A query without a value has nothing to lose, and may be said to have lost it.
        assert not (near & ~won & ~values[which.name].isnan()).any()
        # Distances that differ by 0.05 have squares that differ by 0.0025 and more, and 0.0002 is the limit.
        clearly = (margin.objective(z, plain, q, g) < -0.05) & won
        if name.startswith("misrank") and "candidate" in name:  # else it may be lost before, whoever leads
            clearly &= g.labels[target.index[:, 0]] == g.labels[target.index[:, 1]]
        assert near[clearly].all()
        clear += int(clearly.sum())
    assert clear


@pytest.mark.parametrize("apart", [1e-4, 1e-2])
@pytest.mark.parametrize("name", ENDS)
def test_none_is_said_to_be_lost_that_is_not_where_images_lie_together(name: str, apart: float) -> None:
    """Squares are off by 1e-7 in single precision: distances of a thousandth by as much as they are long."""
    generator = torch.Generator().manual_seed(0)
    middle = torch.nn.functional.normalize(torch.randn(1, 64, generator=generator))
    z = torch.nn.functional.normalize(middle + apart / 8 * torch.randn(300, 64, generator=generator))
    z[100:140] = z[:40]
    g = Gallery(z, torch.randint(0, 4, (300,), generator=generator))
    q = Queries(z[:60], g.labels[:60], torch.arange(60))
    which, won_at_all = attack(name), 0
    target = which.aim(aimed(which, q, g), q, g)
    goal = g.z[target.index[:, 0]] if target.index.shape[1] else q.z
    for share in (0.0, 0.5, 0.9, 1.0):
        noise = (1 - share) * apart / 8 * torch.randn(60, 64, generator=generator)
        at = torch.nn.functional.normalize(q.z + share * (goal - q.z) + noise)
        near = which.appraise(at, target, q, g)[1]
        assert near is not None
        won = which.succeeded(which.measure(at, target, q, g))
        assert not (near & ~won).any()
        won_at_all += int(won.sum())
    assert won_at_all


# What a goal says of itself


@pytest.mark.parametrize(
    ("which", "names"),
    [
        (Misrank(), ["misrank", "misrank(by='margin')", "misrank(by=1)", "misrank(by=2)", "misrank(by=3)"]),
        (Misrank(side="candidate"), ["misrank(side='candidate')"]),
        (Misrank(tau=0.1, by="margin"), ["misrank(tau=0.1)", "misrank(tau=0.1,by='margin')",
            "misrank(tau=0.1,by=1)", "misrank(tau=0.1,by=2)", "misrank(tau=0.1,by=3)"]),
        (Promote(), ["promote", "promote(by='hinge')"]),
        (Promote(k=9, side="candidate"), ["promote(k=9,side='candidate')"]),
        (Demote(), ["demote", "demote(by='distance')", "demote(by='hinge')"]),
        (Demote(k=4, by="hinge"), ["demote(k=4)", "demote(k=4,by='distance')", "demote(k=4,by='hinge')"]),
        (Translocate(), ["translocate", "translocate(by='distance')", "translocate(by='hinge')"]),
    ],
)  # fmt: skip
def test_all_attempts_at_a_goal_want_the_same(
    which: Goal, names: list[str], gallery: Gallery, queries: Queries, tied: Tensor
) -> None:
    attempts = which.attempts(3)
    assert [attempt.name for attempt in attempts] == names
    for attempt in attempts:
        # An attack on a class has targets of its own; all others have the same.
        own = isinstance(attempt.by, int)  # type: ignore[attr-defined]
        assert attempt.drawn_as == (attempt.name if own else names[0]).replace("tau=0.1,", "").replace(
            "(tau=0.1)", ""
        )
    columns = []
    for attempt in attempts:
        target = attempt.aim(aimed(attempt, queries, gallery), queries, gallery)
        columns.append(attempt.measure(tied, target, queries, gallery)[attempt.name])
    for column in columns:
        torch.testing.assert_close(column, columns[0], rtol=0, atol=0, equal_nan=True)
    assert attack("shift").attempts(3) == (attack("shift"),)
    assert attack("CA+").drawn_as == "CA+"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("misrank", {"by": "hinge"}, "by must be .* not 'hinge': .*, if not 'smooth' or 'margin'"),
        ("misrank", {"by": 0}, "by must be a whole number of at least 1, not 0"),
        ("misrank", {"by": True}, "by must be a whole number of at least 1, not True"),
        ("misrank", {"by": 1, "side": "candidate"}, "misrank has no objective by=1; it has: 'margin'$"),
        ("misrank", {"side": "gallery"}, r"unknown side 'gallery'.*; known: candidate, query"),
        ("misrank", {"by": 2, "tau": 0}, r"tau must be in \(0, 2\], not 0: it is a distance on the unit"),
        ("promote", {"k": 0}, "k must be a whole number of at least 1, not 0"),
        ("promote", {"k": None}, "k must be a whole number of at least 1, not None"),
        ("promote", {"by": "smooth"}, "promote has no objective by='smooth'; it has: 'distance', 'hinge'"),
        ("promote", {"by": "hinge", "side": "candidate"}, "promote has no objective by='hinge'; it has: 'ma"),
        ("translocate", {"k": None}, "k must be a whole number of at least 1, not None"),
        ("translocate", {"side": "candidate"}, "unknown side 'candidate'; known: query"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attack(name, **options)  # type: ignore[arg-type]
