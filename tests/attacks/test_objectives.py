"""What each attack minimises, and its gradient, against plain loops over the gallery."""

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import ATTACKS, Attack, Draws, Gallery, Queries, Target, attack, ranks
from tests.helpers.goals import GOALS, aimed, counted

pytestmark = pytest.mark.kernels

PAPER = [
    *(name for name in ATTACKS if name not in GOALS),
    "CA+(w=3)",
    "CA-(w=3)",
    "QA+(m=3)",
    "QA-(m=3)",
    "SP-QA+(m=3, keep=2, xi=0.5)",
    "SP-QA-(m=2, keep=3, xi=4)",
]
EVERY = [*PAPER, *GOALS]  # goals have loops of their own, in test_goals


def numbers(name: str) -> tuple[int, int, float]:
    """The targets, the images to keep and their weight that a name stands for."""
    if name.startswith("SP-QA+("):
        return 3, 2, 0.5
    if name.startswith("SP-QA-("):
        return 2, 3, 4
    if name.startswith("SP"):
        return 1, 5, 1 if name == "SP-QA+" else 100
    return (3 if "=3" in name else 1), 0, 0


def far(x: Tensor, y: Tensor) -> Tensor:
    distance: Tensor = torch.linalg.vector_norm(x - y)
    return distance


def hinge(value: Tensor) -> Tensor:
    return value if value > 0 else value.new_zeros(())


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum() / len(values)


def oracle(name: str, strict: bool, z: Tensor, row: int, index: list[int], q: Queries, g: Gallery) -> Tensor:
    """One query's objective, by the text: every image of the gallery in turn."""
    own = int(q.own[row])
    m, keep, weight = numbers(name)
    kind = name.partition("(")[0]

    to = [far(z, x) for x in g.z]

    def ranked(target: int) -> list[int]:
        return [p for p in range(len(g)) if not (strict and p in (own, target))]

    def candidate(sign: int, targets: list[int]) -> Tensor:
        each = [mean([hinge(sign * (to[t] - far(g.z[t], g.z[p]))) for p in ranked(t)]) for t in targets]
        return mean(each)

    def query(sign: int, targets: list[int]) -> Tensor:
        each = [mean([hinge(sign * (to[t] - to[p])) for p in ranked(t)]) for t in targets]
        return mean(each)

    sign = -1 if kind.endswith("-") else 1
    if kind in ("CA+", "CA-"):
        return candidate(sign, index)
    if kind in ("QA+", "QA-"):
        return query(sign, index)
    if kind in ("SP-QA+", "SP-QA-"):
        assert len(index) == m + keep
        return query(sign, index[:m]) + weight * query(1, index[m:])
    if kind == "TMA":
        return 1 - (z * g.z[index[0]]).sum()
    if kind == "ES":
        if strict:
            return -far(z, q.z[row])
        begins = far(z, q.z[row]) < 1e-5
        return -far(z + 1e-6, q.z[row] + (1e-7 if begins else 0))
    if kind == "GTM":
        return to[index[0]]
    if kind == "GTT":
        return query(-1, index)
    assert kind == "LTM"
    left = counted(row, q, g) if strict else range(len(g))
    same = [p for p in left if g.labels[p] == q.labels[row]]
    others = [p for p in range(len(g)) if g.labels[p] != q.labels[row]]
    if not same:
        return 0 * z.sum()
    return hinge(max(to[n] for n in others) - min(to[p] for p in same))


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("kind", ["strict", "strict, by camera", "reference"])
def test_objective_and_gradient_against_a_plain_loop(
    name: str, kind: str, request: pytest.FixtureRequest, moved: Tensor
) -> None:
    world = ("seen", "asked") if "camera" in kind else ("gallery", "queries")
    gallery, queries = map(request.getfixturevalue, world)
    protocol = kind.partition(",")[0]
    which = attack(name, protocol=protocol)
    index = aimed(which, queries, gallery)
    target = which.aim(index, queries, gallery)
    leaf = moved.clone().requires_grad_()
    value = which.objective(leaf, target, queries, gallery)
    assert value.shape == (18,)
    assert value.dtype == torch.float64
    # Each row has a weight of its own, so that rows cannot be mixed up.
    weights = torch.arange(1.0, 19.0, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weights * value).sum(), leaf)
    positive = 0
    for i in range(len(moved)):
        z = moved[i].clone().requires_grad_()
        wanted = oracle(name, protocol == "strict", z, i, index[i].tolist(), queries, gallery) + 0 * z.sum()
        (slope,) = torch.autograd.grad(wanted, z)
        torch.testing.assert_close(value[i], wanted, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradient[i], weights[i] * slope, rtol=1e-9, atol=1e-11)
        positive += int(slope.abs().max() > 0)
    assert positive >= 12  # most have something to minimise


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("protocol", ["strict", "reference"])
def test_objective_where_distances_are_tied_or_zero(
    name: str, protocol: str, gallery: Gallery, queries: Queries, tied: Tensor
) -> None:
    which = attack(name, protocol=protocol)
    index = aimed(which, queries, gallery)
    leaf = tied.clone().requires_grad_()
    value = which.objective(leaf, which.aim(index, queries, gallery), queries, gallery)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert gradient.isfinite().all()
    # A distance of zero may come out as a millionth; up to three of the forty in a mean are zero.
    slack = 3e-6 / 38 * (1 + numbers(name)[2])
    for i in range(len(tied)):
        wanted = oracle(name, protocol == "strict", tied[i], i, index[i].tolist(), queries, gallery)
        assert value[i].item() == pytest.approx(wanted.item(), abs=1e-9 + slack)


@pytest.mark.parametrize(
    "which", [*(attack(name) for name in EVERY), *(attack(name, protocol="reference") for name in PAPER)]
)
def test_an_objective_is_each_query_s_own_and_does_not_depend_on_the_chunk(
    which: Attack, gallery: Gallery, queries: Queries, moved: Tensor
) -> None:
    found = []
    for chunk in (8192, 7):
        cut = Gallery(gallery.z, gallery.labels, chunk=chunk)
        target = which.aim(aimed(which, queries, cut), queries, cut)
        leaf = moved.clone().requires_grad_()
        value = which.objective(leaf, target, queries, cut)
        found.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=1e-11)
    index, rows = aimed(which, queries, gallery), torch.tensor([17, 4, 9])
    for aim in (which.aim(index, queries, gallery)[rows], which.aim(index[rows], queries[rows], gallery)):
        some = which.objective(moved[rows], aim, queries[rows], gallery)
        torch.testing.assert_close(some, found[0][0][rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["CA+", "CA-", "CA+(w=3)", "CA-(w=3)"])
@pytest.mark.parametrize("protocol", ["strict", "reference"])
@pytest.mark.parametrize("chunk", [8192, 7])
def test_ca_computes_anew_what_is_too_much_to_keep(
    name: str,
    protocol: str,
    chunk: int,
    gallery: Gallery,
    queries: Queries,
    moved: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    which, cut = attack(name, protocol=protocol), Gallery(gallery.z, gallery.labels, chunk=chunk)
    index = aimed(which, queries, cut)
    weights, rows = torch.arange(1.0, 19.0, dtype=torch.float64), torch.tensor([17, 4, 9])

    def computed(target: Target) -> tuple[Tensor, Tensor, Tensor]:
        leaf = moved.clone().requires_grad_()
        value = which.objective(leaf, target, queries, cut)
        some = which.objective(moved[rows], target[rows], queries[rows], cut)
        return value.detach(), torch.autograd.grad((weights * value).sum(), leaf)[0], some

    monkeypatch.setattr(ranks, "_KEPT", index.numel() * len(gallery))
    kept = which.aim(index, queries, cut)
    assert kept.extra is not None
    assert kept.extra.shape == (*index.shape, 40)
    monkeypatch.setattr(ranks, "_KEPT", index.numel() * len(gallery) - 1)
    bare = which.aim(index, queries, cut)
    assert bare.extra is None
    torch.testing.assert_close(computed(bare), computed(kept), rtol=0, atol=1e-12)


def test_es_begins_a_tiny_way_off() -> None:
    images = torch.rand(3, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept = images.clone()
    assert attack("ES", protocol="reference").start(images, draws=Draws(0, "x", range(3))) is None
    strict = attack("ES").start(images, draws=Draws(0, "x", range(3)))
    assert strict is not None
    offset = (strict - images) / 1e-4
    assert 0.5 < offset.std() < 1.5
    assert offset.abs().max() < 6
    assert (offset > 0).any()
    assert (offset < 0).any()
    again = attack("ES").start(images[1:2], draws=Draws(0, "x", [1]))
    assert again is not None
    assert torch.equal(again[0], strict[1])
    assert torch.equal(images, kept)


@pytest.mark.parametrize("name", ["TMA", "GTM", "LTM", "CA+", "CA-", "QA+", "QA-"])
def test_an_image_that_is_aimed_at_itself_is_not_moved_by_rounding(
    name: str, gallery: Gallery, queries: Queries
) -> None:
    which, inside = attack(name, protocol="reference"), queries[torch.arange(12)]
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        noise = 1e-9 * torch.randn(inside.z.shape, generator=generator, dtype=torch.float64)
        z = (inside.z + noise).requires_grad_()
        target = which.aim(inside.own[:, None], inside, gallery)
        (slope,) = torch.autograd.grad(which.objective(z, target, inside, gallery).sum(), z)
        found.append(slope)
    for slope in found:
        torch.testing.assert_close(slope, found[0], rtol=0, atol=2e-3)
        if name in ("TMA", "GTM", "CA+"):
            assert not slope.any()
