"""What each attack reports, against plain loops: ties, copies, queries in and outside the gallery."""

import math

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import ATTACKS, Attack, Gallery, Queries, attack
from tests.helpers.goals import GOALS, Vector, aimed, counted, square

pytestmark = pytest.mark.kernels

MORE = ["CA+(w=3)", "CA-(w=3)", "QA+(m=3)", "QA-(m=3)", "SP-QA+(m=3)", "SP-QA-(m=3)"]
PAPER = [*(name for name in ATTACKS if name not in GOALS), *MORE]
EVERY = [*PAPER, *GOALS]  # goals have loops of their own, in test_goals


def oracle(
    name: str, strict: bool, z: Vector, row: int, index: list[int], q: Queries, g: Gallery
) -> dict[str, float]:
    """What one query's measure is by the text: every image of the gallery in turn."""
    own, benign, label = int(q.own[row]), q.z[row].tolist(), int(q.labels[row])
    images, labels = g.z.tolist(), g.labels.tolist()
    kind = name.partition("(")[0]
    written = kind if "=3" not in name else f"{kind}({'w' if kind[:2] == 'CA' else 'm'}=3)"

    # The reference takes the image nearest to the benign query for the query.
    self_ = own if strict else min((square(benign, x), p) for p, x in enumerate(images))[1]
    left = counted(row, q, g) if strict else [p for p in range(len(g)) if p != self_]

    def rank(origin: Vector, level: float, target: int) -> float:
        """In % from first to last, of something at a distance from `origin`."""
        if not strict:
            return 100 * sum(square(origin, x) < level for x in images) / len(images)
        far = [square(origin, x) for p, x in enumerate(images) if p not in (own, target)]
        nearer = sum(f < level for f in far)
        tied = sum(f == level for f in far)
        return 100 * (nearer + tied / 2) / len(far)

    def candidate(t: int) -> float:
        return rank(images[t], square(images[t], z), t)

    def query(t: int) -> float:
        return rank(z, square(z, images[t]), t)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def hit() -> float:
        if strict and all(labels[p] != label for p in left):
            return math.nan
        return 100.0 if labels[min((square(z, images[p]), p) for p in left)[1]] == label else 0.0

    if kind in ("CA+", "CA-"):
        return {written: mean([candidate(t) for t in index])}
    if kind in ("QA+", "QA-"):
        return {written: mean([query(t) for t in index])}
    if kind in ("SP-QA+", "SP-QA-"):
        m = 3 if "=3" in name else 1
        assert len(index) == m + 5
        return {
            written: mean([query(t) for t in index[:m]]),
            f"{written}:keep": mean([query(t) for t in index[m:]]),
        }
    if kind == "TMA":
        return {kind: sum(a * b for a, b in zip(z, images[index[0]], strict=True))}
    if kind == "ES":
        return {"ES:D": math.dist(z, benign), "ES:R": hit()}
    if kind in ("LTM", "GTM"):
        return {kind: hit()}
    assert kind == "GTT"
    far = [square(z, images[p]) for p in left if p != index[0]]
    level = square(z, images[index[0]])
    before = sum(f < level for f in far) + (sum(f == level for f in far) / 2 if strict else 0)
    return {kind: 100.0 * (before < 4)}


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("kind", ["strict", "strict, by camera", "reference"])
def test_measure_against_a_plain_loop(
    name: str, kind: str, request: pytest.FixtureRequest, moved: Tensor, tied: Tensor
) -> None:
    world = ("seen", "asked") if "camera" in kind else ("gallery", "queries")
    gallery, queries = map(request.getfixturevalue, world)
    protocol = kind.partition(",")[0]
    which = attack(name, protocol=protocol)
    for seed, z in enumerate((moved, tied, queries.z)):
        index = aimed(which, queries, gallery, seed)
        found = which.measure(z, which.aim(index, queries, gallery), queries, gallery)
        for i in range(len(z)):
            wanted = oracle(name, protocol == "strict", z[i].tolist(), i, index[i].tolist(), queries, gallery)
            assert list(found) == list(wanted)
            for key, value in wanted.items():
                assert found[key].shape == (18,)
                assert found[key][i].item() == pytest.approx(value, abs=1e-4, nan_ok=True), (seed, i)


@pytest.mark.parametrize(
    "which", [*(attack(name) for name in EVERY), *(attack(name, protocol="reference") for name in PAPER)]
)
def test_measure_does_not_depend_on_the_chunk_or_the_batch(
    which: Attack, gallery: Gallery, queries: Queries, tied: Tensor
) -> None:
    index = aimed(which, queries, gallery)
    target = which.aim(index, queries, gallery)
    whole = which.measure(tied, target, queries, gallery)
    rows = torch.tensor([17, 2, 8, 0])
    some = which.measure(tied[rows], target[rows], queries[rows], gallery)
    for key, value in some.items():
        torch.testing.assert_close(value, whole[key][rows], rtol=0, atol=1e-12, equal_nan=True)
    cut = Gallery(gallery.z, gallery.labels, chunk=7)
    for key, value in which.measure(tied, which.aim(index, queries, cut), queries, cut).items():
        torch.testing.assert_close(value, whole[key], rtol=0, atol=1e-12, equal_nan=True)


def test_a_collapsed_network_ranks_everything_in_the_middle() -> None:
    same = torch.nn.functional.normalize(torch.ones(30, 8))
    labels = torch.arange(30) % 3
    flat = Gallery(same, labels)
    queries = Queries(same[:10], labels[:10], torch.arange(10))
    for name in ("CA+", "CA-", "QA+", "QA-", "SP-QA+"):
        which = attack(name)
        target = which.aim(aimed(which, queries, flat), queries, flat)
        assert which.measure(same[:10], target, queries, flat)[name].tolist() == [50.0] * 10
        reference = attack(name, protocol="reference")
        assert reference.measure(same[:10], target, queries, flat)[name].tolist() == [0.0] * 10
    which = attack("GTT")
    target = which.aim(aimed(which, queries, flat), queries, flat)
    assert which.measure(same[:10], target, queries, flat)["GTT"].tolist() == [0.0] * 10
    assert attack("GTT", protocol="reference").measure(same[:10], target, queries, flat)["GTT"].all()
