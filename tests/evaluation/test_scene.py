"""A batch of queries under attack: what a search sees of another network."""

import pytest
import torch
from torch import Tensor, nn

from robustmetric.attacks import PGD, Draws, Gallery, Queries, Search, Transfer, attack
from robustmetric.distance import embed
from robustmetric.evaluation.scene import Scene, embed_all, run_attack
from robustmetric.perturb import Budget, frozen, pgd
from tests.evaluation.conftest import make_network

BUDGET = Budget(eps=0.1, alpha=0.03, steps=4)


def scene_of(network: nn.Module, images: Tensor, labels: Tensor) -> Scene:
    everyone = torch.arange(len(images))
    z = embed_all(network, images, everyone, 16)
    return Scene(network, images, Queries(z, labels, everyone), Gallery(z, labels))


@pytest.mark.parametrize("name", ["CA+", "CA-", "QA+", "SP-QA-", "TMA", "ES", "LTM", "GTM", "GTT"])
def test_a_transfer_is_a_search_in_the_surrogate_s_own_gallery(
    name: str, images: Tensor, labels: Tensor
) -> None:
    """The victim says what is aimed at; where that is, and where the queries are, the surrogate says."""
    victim, surrogate = make_network(0).double(), make_network(1).double()
    images, numbers, goal = images.double(), torch.tensor([3, 17, 26, 38]), attack(name)
    theirs, ours = scene_of(victim, images, labels), scene_of(surrogate, images, labels)
    search: Search = Transfer(surrogate=surrogate, search=PGD())
    with frozen(victim), frozen(surrogate):
        outcome = run_attack(theirs, goal, numbers, BUDGET, search, seed=7, surrogate=ours)

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
