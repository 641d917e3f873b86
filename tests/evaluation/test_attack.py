"""A batch of queries under attack: what a search sees, asks and costs, and which queries are lost."""

from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from robustmetric.attacks import (
    APGD,
    PGD,
    Draws,
    Gallery,
    Queries,
    Search,
    Square,
    Transfer,
    attack,
    make_search,
)
from robustmetric.evaluation.attack import AttackResult, NetworkView, attack_block, embed_all, run_attack
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget, frozen, pgd
from robustmetric.sphere import embed
from tests.evaluation.conftest import make_network

BUDGET = Budget(eps=0.1, alpha=0.03, steps=4)


def view_of(network: nn.Module, images: Tensor, labels: Tensor) -> NetworkView:
    everyone = torch.arange(len(images))
    z = embed_all(network, images, everyone, 16)
    return NetworkView(network, images, Queries(z, labels, everyone), Gallery(z, labels))


@pytest.mark.parametrize("name", ["CA+", "CA-", "QA+", "SP-QA-", "TMA", "ES", "LTM", "GTM", "GTT"])
def test_a_transfer_is_a_search_in_the_surrogate_s_own_gallery(
    name: str, images: Tensor, labels: Tensor
) -> None:
    """The victim says what is aimed at; where that is, and where the queries are, the surrogate says."""
    victim, surrogate = make_network(0).double(), make_network(1).double()
    images, numbers, goal = images.double(), torch.tensor([3, 17, 26, 38]), attack(name)
    theirs, ours = view_of(victim, images, labels), view_of(surrogate, images, labels)
    search: Search = Transfer(surrogate=surrogate, search=PGD())
    with frozen(victim), frozen(surrogate):
        outcome = run_attack(theirs, goal, numbers, Threat(BUDGET, search, 7), surrogate=ours)

        index = goal.select(theirs.queries[numbers], theirs.gallery, draws=Draws(7, name, numbers.tolist()))
        seen = ours.queries[numbers]
        with torch.no_grad():
            target = goal.aim(index, seen, ours.gallery)
        start = goal.start(images[numbers], draws=Draws(7, f"{name}/search", numbers.tolist()))

        def objective(x: Tensor, rows: Tensor) -> Tensor:
            return goal.objective(embed(surrogate, x), target[rows], seen[rows], ours.gallery)

        wanted = pgd(images[numbers], objective, BUDGET, start=start)
    assert torch.equal(outcome.target.index, index)
    assert torch.equal(outcome.images, wanted)
    assert not torch.equal(wanted, images[numbers])
    # What became of it is the victim's to say.
    torch.testing.assert_close(outcome.z, embed(victim, wanted).detach(), atol=1e-12, rtol=0)
    after = goal.measure(outcome.z, outcome.target, theirs.queries[numbers], theirs.gallery)
    assert {n: v.tolist() for n, v in outcome.after.items()} == {n: v.tolist() for n, v in after.items()}


# Queries that are lost, and what a search costs


class Counting(nn.Module):
    """A network that notes the images that go through it, and how many come back."""

    def __init__(self, seed: int = 0, width: int = 16) -> None:
        super().__init__()
        inner = make_network(seed).double()
        last = nn.Linear(32, width).double()
        with torch.no_grad():
            last.weight.copy_(torch.randn(width, 32, generator=torch.Generator().manual_seed(seed)) / 6)
        self.inner = inner if width == 16 else nn.Sequential(*list(inner)[:-1], last)
        self.reset()

    def reset(self) -> None:
        self.through: list[Tensor] = []
        self.back = 0

    def forward(self, images: Tensor) -> Tensor:
        self.through.append(images.detach().clone())
        z: Tensor = self.inner(images)
        if z.requires_grad:
            z.register_hook(self._note)
        return z

    def _note(self, slope: Tensor) -> None:
        self.back += len(slope)


NUMBERS = torch.arange(12)
WIDE = Budget(eps=0.06, alpha=0.02, steps=8)


@pytest.fixture(scope="module")
def theirs(images: Tensor) -> NetworkView:
    """Images of classes that have little to do with them: many queries are lost before any attack."""
    labels = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(5))
    return view_of(Counting(), images.double(), labels)


def run(
    view: NetworkView, name: str, search: Search, budget: Budget = WIDE, seed: int = 0, **given: Any
) -> AttackResult:
    assert isinstance(view.model, Counting)
    view.model.reset()
    with frozen(view.model):
        return run_attack(view, attack(name), NUMBERS, Threat(budget, search, seed), **given)


ENDS = ["misrank", "misrank(by=1)", "misrank(side='candidate')", "promote", "demote(k=3)", "translocate"]


@pytest.mark.parametrize(
    "text", ["pgd", "pgd(restarts=2)", "apgd(restarts=2)", "square(trials=30)", "nes(samples=2)"]
)
@pytest.mark.parametrize("name", ["misrank", "promote", "TMA"])
def test_images_through_the_network_and_back_are_counted(name: str, text: str, theirs: NetworkView) -> None:
    outcome = run(theirs, name, make_search(text))
    model = theirs.model
    assert isinstance(model, Counting)
    assert outcome.forward == sum(len(x) for x in model.through)
    assert outcome.backward == model.back
    assert (outcome.backward > 0) is make_search(text).follows_gradient
    most = len(NUMBERS) * (make_search(text).num_evaluations(WIDE) + 1)
    assert outcome.forward == most if name == "TMA" else outcome.forward <= most


@pytest.mark.parametrize("search", [PGD(), APGD(restarts=2), Square(trials=60)])
@pytest.mark.parametrize("name", ENDS)
def test_a_query_that_is_lost_is_asked_no_more(name: str, search: Search, theirs: NetworkView) -> None:
    outcome = run(theirs, name, search)
    model, goal = theirs.model, attack(name)
    assert isinstance(model, Counting)
    queries, images = theirs.queries[NUMBERS], theirs.images[NUMBERS]
    assert isinstance(images, Tensor)
    before, after = goal.succeeded(outcome.before), goal.succeeded(outcome.after)
    assert after.sum() > 0
    assert not (before & ~after).any() or isinstance(search, Square)
    if not isinstance(search, Square):  # which begins elsewhere
        assert torch.equal(outcome.images[before], images[before])
    # Whoever was lost at a question is not in the next one, and stays at that point.
    steps, left = model.through[:-1], torch.arange(12)
    for x in steps:
        if len(x) != len(left):
            break  # rows drop out for other reasons as well: without a slope, or at a restart
        z = embed(model.inner, x).detach()
        gone = goal.appraise(z, outcome.target[left], queries[left], theirs.gallery)[1]
        assert gone is not None
        assert torch.equal(outcome.images[left[gone]], x[gone])
        left = left[~gone]
    assert len(left) < 12


def test_a_query_without_an_answer_is_never_lost(images: Tensor) -> None:
    """Its class has no other image: there is no R@1, and nothing to lower."""
    labels = torch.cat([torch.tensor([9]), torch.arange(39) % 3])
    view = view_of(Counting(), images.double(), labels)
    for name in ("misrank", "misrank(by='margin')", "misrank(by=1)"):
        outcome = run(view, name, APGD())
        assert outcome.after[name].isnan().tolist() == [True] + [False] * 11
        assert torch.equal(outcome.images[0], view.images[NUMBERS][0])
        assert not attack(name).succeeded(outcome.after)[0]


@pytest.mark.parametrize("name", [*ENDS, "promote(side='candidate')", "shift"])
@pytest.mark.parametrize("inner", [PGD(), APGD(), Square(trials=8)])
def test_a_surrogate_may_have_embeddings_of_another_length(
    name: str, inner: Search, theirs: NetworkView, images: Tensor
) -> None:
    """The search sees the surrogate alone, and is not told who is lost; the network itself judges."""
    ours = view_of(Counting(seed=1, width=7), images.double(), theirs.gallery.labels)
    model = ours.model
    assert isinstance(model, Counting)
    model.reset()
    search, ticks = Transfer(surrogate=model, search=inner), []
    with frozen(model):
        outcome = run(theirs, name, search, surrogate=ours, tick=lambda: ticks.append(1))
    assert isinstance(theirs.model, Counting)
    assert [len(x) for x in theirs.model.through] == [12]  # what was found
    assert len(ticks) == len(model.through) == inner.num_evaluations(WIDE)
    assert outcome.forward == sum(len(x) for x in model.through) + 12
    assert outcome.backward == model.back
    assert outcome.z.shape == (12, 16)
    goal, q = attack(name), theirs.queries[NUMBERS]
    assert torch.equal(outcome.target.index, run(theirs, name, inner).target.index)
    for column, value in goal.measure(outcome.z, outcome.target, q, theirs.gallery).items():
        torch.testing.assert_close(
            outcome.after[column], value.double(), rtol=0, atol=0, equal_nan=True, check_dtype=False
        )
    last = goal.objective(outcome.z, outcome.target, q, theirs.gallery)
    torch.testing.assert_close(outcome.last, last, rtol=0, atol=0)


def test_draws_of_a_search_depend_on_its_purpose(theirs: NetworkView) -> None:
    usual, same, other = (
        run(theirs, "TMA", Square(trials=1), seed=3, purpose=purpose).images
        for purpose in (None, "TMA/search", "two")
    )
    assert torch.equal(usual, same)
    assert not torch.equal(usual, other)


def test_a_search_may_go_on_past_the_success(theirs: NetworkView) -> None:
    stopped, past = (run(theirs, "misrank", PGD(), stop=stop) for stop in (True, False))
    won = attack("misrank").succeeded(stopped.after)
    assert (past.last[won] < stopped.last[won]).any()
    assert torch.equal(past.images[~won], stopped.images[~won])


def test_a_block_has_the_names_of_the_files(theirs: NetworkView) -> None:
    with frozen(theirs.model):
        found = attack_block(theirs, attack("SP-QA+"), NUMBERS, Threat(WIDE, PGD()))
    assert {*found} == {
        "number", "target", "objective/first", "objective/last", "objective/best", "change", "outside",
        *(f"{when}/SP-QA+{more}" for when in ("before", "after", "8-bit") for more in ("", ":keep")),
    }  # fmt: skip
    assert found["target"].shape == (12, 6)
    for name, value in load(save(found)).items():
        assert len(value) == 12
        assert value.dtype == (torch.int64 if name in ("number", "target") else torch.float64)
