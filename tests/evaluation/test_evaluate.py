"""An evaluation against the reference's figures and plain loops; what its scores must not depend on."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robustmetric.attacks import PGD, Draws, Transfer
from robustmetric.evaluation import (
    COLUMNS,
    ERS_ATTACKS,
    Data,
    Evaluation,
    Plan,
    Subject,
    certify,
    evaluate,
    verify,
)
from robustmetric.sphere import embed
from tests.evaluation.conftest import Evaluated, Tiny, assert_same, values

pytestmark = pytest.mark.kernels

Golden = dict[str, NDArray[Any]]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "fashion-tiny.json").read_text())


def width(score: Any) -> float:
    return float(score.high - score.low)


# The reference's figures


def pixels(golden: Golden) -> tuple[Tensor, Tensor]:
    return torch.tensor(golden["gallery/images"]) / 255, torch.tensor(golden["gallery/labels"]).long()


def test_retrieval_scores_are_those_of_the_reference(golden: Golden, golden_network: nn.Module) -> None:
    images, labels = pixels(golden)
    for protocol in ("strict", "reference"):
        how: dict[str, Any] = {"steps": 1, "queries": 2, "attacks": ["ES"], "checks": "none"}
        record = evaluate(golden_network, images, labels, protocol=protocol, **how)
        benign = {name: 100 * value for name, value in GOLDEN["benign"].items()}
        assert record["R@1"] == pytest.approx(80.0, abs=1e-9) == benign["R@1"]
        assert record["R@2"] == pytest.approx(85.75, abs=1e-9) == benign["R@2"]
        assert record["mAP"] == pytest.approx(benign["mAP"], abs=1e-4)
        assert record.queries.model_dump() == {"count": 2, "of": 400, "left_out": 0}
        low, high = (getattr(record.retrieval["R@1"], end) for end in ("low", "high"))
        assert high - low == pytest.approx(2 * 1.96 * math.sqrt(80 * 20 / 400), rel=0.1)


@pytest.mark.slow
def test_attacks_leave_what_the_reference_leaves(golden: Golden, golden_network: nn.Module) -> None:
    """On its 64 queries: without a random target to one query, with one to three standard errors."""
    images, labels = pixels(golden)
    plan = Plan.make(protocol="reference", eps=16 / 255, alpha=3 / 255, checks="none", queries=64)
    evaluation = Evaluation(Subject(golden_network, Data(images, labels)), plan)
    evaluation.numbers = torch.arange(64)
    record = evaluation.run()
    found = values(evaluation)
    query = 100 / 64 + 1e-9
    for attack, name in (("ES", "ES:R"), ("LTM", "LTM"), ("GTM", "GTM")):
        scale = 1 if attack == "ES" else 100
        for when, value in (("before", record.scores[name].before), ("after", record.scores[name].value)):
            wanted = scale * GOLDEN[attack][when]["r@1"]
            assert value == pytest.approx(wanted, abs=1e-9 if when == "before" else query), (name, when)
    assert record["GTT"] == pytest.approx(100 * GOLDEN["GTT"]["after"]["retain@4"], abs=query)
    assert record["ES:D"] == pytest.approx(GOLDEN["ES"]["after"]["embshift"], abs=0.02)
    doubt = 0.0
    for name in ("CA+", "CA-", "QA+", "QA-", "TMA"):
        key = "Cosine-SIM" if name == "TMA" else f"{name}:prank"
        scale = 1 if name == "TMA" else 100
        for when in ("before", "after"):
            each = found[f"{name}/{when}/{name}"]
            # Two draws of 64 targets, ours and the reference's, each with its standard error.
            error = 2**0.5 * float(each.std()) / 8
            assert float(each.mean()) == pytest.approx(scale * GOLDEN[name][when][key], abs=3 * error)
            # An attack does what it is for.
        gain = record[name] - (record.scores[name].before or 0)
        assert gain > 0 if name in ("CA-", "QA-", "TMA") else gain < 0
        term = COLUMNS[name].term
        assert term is not None
        doubt += (float(term(np.float64(1)) - term(np.float64(0))) * error) ** 2
    assert record["ERS"] == pytest.approx(GOLDEN["ERS"], abs=3 * doubt**0.5 / 10 + 1)


def test_the_reference_reads_the_distance_one_step_before_the_last(
    tiny: Tiny, network: nn.Module, images: Tensor
) -> None:
    found = {}
    for protocol, steps in (("reference", 4), ("reference", 5), ("strict", 5)):
        evaluation = tiny(
            network.double(), images=images.double(), attacks=["ES"], protocol=protocol, steps=steps
        )
        evaluation.run()
        found[protocol, steps] = values(evaluation)
    early, last = found["reference", 5]["ES/after/ES:D"], found["reference", 4]["ES/objective/last"]
    torch.testing.assert_close(early, -last, rtol=0, atol=1e-9)
    strict = found["strict", 5]
    torch.testing.assert_close(strict["ES/after/ES:D"], -strict["ES/objective/last"], rtol=0, atol=1e-9)
    assert (early < -found["reference", 5]["ES/objective/last"] - 1e-6).any(), "the last step moved nothing"


# What scores do not depend on


ATTACKS = [*ERS_ATTACKS, "CA+(w=3)", "SP-QA-"]


# The reference ranks the unperturbed image too, which is at first as near as the perturbed one: with several
# targets it is rounding how much each of them counts in the first step.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "attacks", "seed"),
    [("strict", ATTACKS, 1), ("reference", ERS_ATTACKS, 1), ("reference", ERS_ATTACKS, 3)],
)
def test_the_batch_size_changes_nothing(
    tiny: Tiny, network: nn.Module, images: Tensor, protocol: str, attacks: list[str], seed: int
) -> None:
    settings = {
        "images": images.double(),
        "protocol": protocol,
        "attacks": attacks,
        "steps": 4,
        "queries": 14,
    }
    found = []
    for batch in (64, 7, 1):
        evaluation = tiny(network.double(), batch=batch, seed=seed, **settings)
        record = evaluation.run()
        found.append((values(evaluation), record))
    # The reference may aim an image at itself.
    itself = [(found[0][0][f"{n}/target"][:, 0] == found[0][0][f"{n}/number"]).any() for n in ("TMA", "GTM")]
    assert any(itself) == (protocol == "reference")
    for each, record in found[1:]:
        assert_same(each, found[0][0])
        for name in record.columns():
            assert record[name] == pytest.approx(found[0][1][name], abs=1e-6), name
        assert record.ers is not None
        assert found[0][1].ers is not None
        assert record.ers.low == pytest.approx(found[0][1].ers.low, abs=1e-6)


@pytest.mark.parametrize(
    ("protocol", "attacks"), [("strict", ["LTM", "GTM", "GTT"]), ("reference", ["ES", "LTM", "GTT"])]
)
def test_the_order_of_the_images_changes_no_image_s_values(
    tiny: Tiny, network: nn.Module, images: Tensor, labels: Tensor, protocol: str, attacks: list[str]
) -> None:
    """Where no target is drawn by the query's number and none is, as the reference's GTM, by position."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    x = images.double()
    straight = tiny(network.double(), images=x, protocol=protocol, attacks=attacks)
    shuffled = tiny(network, images=x[order], labels=labels[order], protocol=protocol, attacks=attacks)
    records = straight.run(), shuffled.run()
    position = order.argsort()  # of each image in the shuffled order
    wanted, found = values(straight), values(shuffled)
    for name in wanted:
        if name.endswith("/target"):
            aims = order[found[name]][position]
            assert torch.equal(aims, wanted[name]), name
        elif not name.endswith("/number"):
            torch.testing.assert_close(found[name][position], wanted[name], rtol=0, atol=1e-7, msg=name)
    for name in ("R@1", "R@2", "mAP", "mAP@R"):
        assert records[1][name] == pytest.approx(records[0][name], abs=1e-9)
        arrays = [e.joined("retrieval")[name] for e in (straight, shuffled)]
        torch.testing.assert_close(arrays[1][position], arrays[0])


def test_images_need_no_tensor_and_any_integer_labels_do(
    evaluated: Evaluated, images: Tensor, labels: Tensor
) -> None:
    class Lazy:
        """Images that are decoded when they are asked for."""

        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, index: Tensor) -> Tensor:
            return images[index].clone()

    few = {"attacks": ["LTM", "GTM"], "queries": 8}
    wanted = evaluated(**few)
    assert str(evaluated(images=Lazy(), **few)) == str(wanted)
    assert str(evaluated(labels=(7 * labels - 3).to(torch.int16), **few)) == str(wanted)
    assert str(evaluated(labels=labels + 2**40, **few)) == str(wanted)


# The network and the data stay as they were


class Mixed(nn.Module):
    """A network with every kind of mode and flag in it; fails at the n-th call if told so."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.one = nn.Linear(36, 32)
            self.two = nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout()
        self.train()
        self.norm.eval()
        self.one.weight.requires_grad_(False)
        self.calls, self.fails_at = 0, fails_at

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError("the machine is on fire")
        z: Tensor = self.two(self.drop(self.norm(self.one(x.flatten(1))).tanh()))
        return z


def state(model: nn.Module) -> tuple[list[bool], list[bool], list[Tensor | None]]:
    return (
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [p.grad for p in model.parameters()],
    )


@pytest.mark.parametrize("fails_at", [None, 1, 4, 30])
@pytest.mark.parametrize("search", ["pgd", "nes(samples=2)", "transfer"])
def test_network_images_and_labels_come_back_as_they_were(
    evaluated: Evaluated, images: Tensor, labels: Tensor, fails_at: int | None, search: str
) -> None:
    model, surrogate = Mixed(fails_at), Mixed()
    x, y = images.clone(), labels.clone()
    how: Any = Transfer(surrogate=surrogate, search=PGD(restarts=2)) if search == "transfer" else search
    before = [copy.deepcopy(m.state_dict()) for m in (model, surrogate)]
    modes, seed = state(model), torch.get_rng_state()
    assert len(set(modes[0])) == len(set(modes[1])) == 2
    settings = {"images": x, "labels": y, "search": how, "steps": 2, "queries": 6, "batch": 4}
    settings |= {"checks": "quick", "attacks": ["CA+", "ES", "GTT"]}
    if fails_at is None:
        evaluated(model, **settings)
    else:
        with pytest.raises(OSError, match="the machine is on fire"):
            evaluated(model, **settings)
    assert state(model) == modes == state(surrogate)
    assert modes[2] == [None] * len(modes[2])
    for m, kept in zip((model, surrogate), before, strict=True):
        for name, value in m.state_dict().items():
            assert torch.equal(value, kept[name]), name
    assert torch.equal(x, images)
    assert torch.equal(y, labels)
    assert not x.requires_grad
    assert torch.equal(torch.get_rng_state(), seed), "the global generator was used"


def test_modes_and_gradients_outside_change_nothing(evaluated: Evaluated, images: Tensor) -> None:
    few: dict[str, Any] = {"attacks": ["ES", "GTM"], "queries": 6, "checks": "quick"}
    wanted, x = str(evaluated(Mixed(), **few)), images.clone().requires_grad_()
    with torch.no_grad():
        assert str(evaluated(Mixed().eval(), **few)) == wanted
    assert str(evaluated(Mixed(), images=x, **few)) == wanted
    assert (x.grad, x.requires_grad) == (None, True)


# Some of the queries


def test_a_seed_draws_queries_and_their_values_are_those_of_all(
    tiny: Tiny, network: nn.Module, images: Tensor
) -> None:
    x = images.double()
    whole = tiny(network.double(), images=x, seed=3)
    everything = whole.run()
    some = tiny(network, images=x, seed=3, queries=12)
    record = some.run()
    numbers = some.numbers
    assert len(numbers) == 12 == len(numbers.unique())
    assert record.queries.model_dump() == {"count": 12, "of": 40, "left_out": 0}
    assert torch.equal(numbers, tiny(network, images=x, seed=3, queries=12).numbers)
    assert not torch.equal(numbers, tiny(network, images=x, seed=4, queries=12).numbers)
    assert torch.equal(tiny(queries=40).numbers, torch.arange(40))
    all_values = {name: value[numbers] for name, value in values(whole).items()}
    assert_same(values(some), all_values)
    # Retrieval is of all images in both.
    for name in ("R@1", "R@2", "mAP", "NMI", "mAP@R"):
        assert record.retrieval[name].model_dump_json() == everything.retrieval[name].model_dump_json()
    assert record.ers is not None
    assert everything.ers is not None
    ratio = width(record.ers) / width(everything.ers)
    assert 1.2 < ratio < 3  # of about √(40/12) = 1.8


# Who is ranked


CAMERAS = torch.tensor([10**12, -3, 5])[torch.arange(40) // 5 % 3]
ORDER = torch.randperm(40, generator=torch.Generator().manual_seed(1))


def apart(images: Tensor, labels: Tensor, kind: str) -> dict[str, Any]:
    """The data of a kind: among themselves or apart, with positions of their own and cameras or without."""
    cameras = CAMERAS.clone()
    cameras[labels == 4] = 5  # which then has no answer
    if kind in ("alone", "cameras"):
        return {"cameras": cameras} if kind == "cameras" else {}
    if kind == "gallery":  # two queries are of a class that it has not
        mine = labels[:15].clone()
        mine[[4, 9]] = 77
        return {"images": images[:15], "labels": mine, "gallery": (images[15:], labels[15:])}
    # Every third image queries, and is in the gallery somewhere else; of the first nobody knows.
    rows, own = torch.arange(0, 40, 3), ORDER.argsort()[::3].clone()
    own[0] = -1
    ranked = Data(images[ORDER], labels[ORDER], cameras=cameras[ORDER] if "cameras" in kind else None)
    given = {"images": images[rows], "labels": labels[rows], "gallery": ranked, "own": own}
    return given | ({"cameras": cameras[rows]} if "cameras" in kind else {})


@pytest.mark.parametrize("kind", ["alone", "cameras", "gallery", "own", "own and cameras"])
def test_scores_are_those_of_a_loop(
    kind: str, tiny: Tiny, network: nn.Module, images: Tensor, labels: Tensor
) -> None:
    evaluation = tiny(network, **apart(images, labels, kind), attacks=[*ERS_ATTACKS, "QA+(m=2)"], steps=2)
    record, found, data = evaluation.run(), values(evaluation), evaluation.subject.data
    with torch.no_grad():
        z, ranked = (
            embed(network, side.images[torch.arange(len(side.images))]) for side in (data, data.ranked)
        )
    hits, precisions = [], []
    for i, own in enumerate(data.places.tolist()):
        square = [float((z[i].double() - other).square().sum()) for other in ranked.double()]
        others = [p for p in range(len(ranked)) if p != own]
        right = [bool(data.ranked.labels[p] == data.labels[i]) for p in range(len(ranked))]
        order = sorted(others, key=lambda p: square[p])
        if data.cameras is not None and data.ranked.cameras is not None:
            order = [p for p in order if not right[p] or data.ranked.cameras[p] != data.cameras[i]]
        wanted = math.nan
        if any(right[p] for p in order):
            hits.append(wanted := 100.0 * right[order[0]])
            places = [k for k, p in enumerate(order, 1) if right[p]]
            precisions.append(100 * np.mean([n / k for n, k in enumerate(places, 1)]))
        for name in ("ES/before/ES:R", "LTM/before/LTM", "GTM/before/GTM"):
            assert float(found[name][i]) == pytest.approx(wanted, nan_ok=True), (name, i)
        assert found["GTT/target"][i].tolist() == [order[0]]
        assert found["GTM/target"][i].tolist() == [next(p for p in order if not right[p])]
        for name, m in (("QA+", 1), ("QA-", 1), ("QA+(m=2)", 2)):  # which know no cameras
            targets = found[f"{name}/target"][i].tolist()
            ranks = [sum(square[p] < square[t] for p in others if p != t) for t in targets]
            assert len(ranks) == m
            share = 100 * np.mean(ranks) / (len(others) - 1)
            assert float(found[f"{name}/before/{name}"][i]) == pytest.approx(share, abs=1e-4)
    count = len(data.images)
    assert record["R@1"] == pytest.approx(np.mean(hits))
    assert record["mAP"] == pytest.approx(np.mean(precisions))
    assert record.scores["LTM"].before == pytest.approx(np.mean(hits))
    left_out = {"cameras": 8, "gallery": 2, "own and cameras": 3}.get(kind, 0)
    assert record.queries.model_dump() == {"count": count, "of": count, "left_out": left_out}
    assert count - len(hits) == left_out
    assert record.data.cameras == ("cameras" in kind)
    assert record.data.gallery == (None if data.gallery is None else len(ranked))


def test_torch_s_default_precision_changes_nothing(
    images: Tensor, labels: Tensor, network: nn.Module
) -> None:
    few: dict[str, Any] = {"steps": 1, "queries": 8, "batch": 8, "checks": "none,gradient,transfer"}

    def found() -> list[Any]:
        attacks = [*ERS_ATTACKS, "SP-QA+", "SP-QA-"]
        return [
            evaluate(network, images, labels, attacks=attacks, suite="worst-case(steps=1, trials=2)", **few),
            evaluate(network, images, labels, attacks=["CA+"], search="spsa", **few),
            certify(network, images, labels, sigma=0.1, samples=50, attack_samples=2, steps=1, queries=8),
            verify(network, images, labels, count=20, steps=1),
        ]

    wanted = found()
    torch.set_default_dtype(torch.float64)
    try:
        assert found() == wanted
    finally:
        torch.set_default_dtype(torch.float32)


def test_draws_are_of_the_evaluation_s_seed(tiny: Tiny) -> None:
    """Targets are what anyone gets who draws with the seed, the attack's name and the query's number."""
    evaluation, other = (tiny(seed=seed, queries=9, attacks=["TMA"]) for seed in (11, 12))
    evaluation.run()
    other.run()
    assert not torch.equal(values(evaluation)["TMA/target"], values(other)["TMA/target"])
    view = evaluation.view
    for row, number in enumerate(evaluation.numbers.tolist()):
        alone = evaluation.plan.attacks[0].select(
            view.queries[torch.tensor([number])], view.gallery, draws=Draws(11, "TMA", [number])
        )
        assert values(evaluation)["TMA/target"][row].tolist() == alone[0].tolist()
