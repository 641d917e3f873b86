"""Hardness Manipulation: the golden figures, and what dropping finished triplets may not change."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.defenses.base import Network
from robustmetric.defenses.hardness import HardnessManipulation, manipulate
from robustmetric.destination import Benign, Constant, Destination, Gradual
from robustmetric.losses import SextupletTerm
from robustmetric.perturb import Budget, frozen, project
from robustmetric.sphere import embed, hardness
from robustmetric.triplets import SAMPLERS, Batch, Mined, Sampler, Softhard, Triplets

pytestmark = pytest.mark.kernels

Golden = dict[str, NDArray[Any]]
BUDGET = Budget(eps=16 / 255, alpha=2 / 255, steps=8)
FIGURES = json.loads((Path(__file__).parents[1] / "golden" / "fashion-tiny.json").read_text())


class Fixed(Sampler):
    """Returns the triplets it was made with; those of the reference have some anchors twice."""

    itself = True

    def __init__(self, positions: NDArray[Any]) -> None:
        self.triplets = Triplets(*torch.tensor(positions))

    def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        return self.triplets


def golden_defense(kind: str, golden: Golden) -> HardnessManipulation:
    destination: Destination
    if kind == "semihard":
        destination = Benign(Fixed(golden["HM/semihard/dest_triplets"]))
    elif kind == "lga":
        destination = Gradual()
        destination.update(torch.tensor(0.09))
    else:
        destination = Constant(2)
    source = Fixed(golden["HM/source_triplets"])
    return HardnessManipulation(source, destination, [SextupletTerm("ICS")], budget=BUDGET)


def benign(network: nn.Module, images: Tensor, labels: Tensor) -> Batch:
    with torch.no_grad():
        return Batch.of(embed(network, images), labels)


def reached(network: nn.Module, triplets: Tensor) -> Tensor:
    with torch.no_grad():
        return hardness(*embed(network, triplets.flatten(0, 1)).view(len(triplets), 3, -1).unbind(1))


@pytest.mark.parametrize("kind", ["semihard", "lga", "const2"])
def test_reaches_the_hardness_of_the_reference(
    kind: str, golden: Golden, golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    images, labels = pairs
    defense = golden_defense(kind, golden)
    with torch.no_grad():
        mined = defense.mine(embed(golden_network, images), labels)
    # The reference adds 1e-6 to each of the 64 coordinates of a difference: up to 8e-6 a distance, of which
    # hardness takes two.
    np.testing.assert_allclose(mined.hardness, golden["HM/hardness_before"], rtol=0, atol=1.6e-5)
    wanted = defense.destination(mined, generator=defense.generator)
    with frozen(golden_network):
        perturbed = manipulate(Network(golden_network), images, mined, wanted, BUDGET)
    after = reached(golden_network, perturbed).numpy()
    gap = np.abs(after - golden[f"HM/{kind}/hardness_after"])
    # Enough for another sign in PGD: 2 to 4 of 32 triplets part, by 0.019 at most and 0.0009 in the mean, the
    # same with all that `make kernels` runs and with the network's channels in 60 orders. Twice that may be.
    assert (gap > 1e-4).sum() <= 8, f"largest differences {np.sort(gap)[-9:]}"
    assert gap.max() < 0.04

    step = defense(golden_network, images, labels)
    figures = FIGURES[f"HM/{kind}"]
    assert step.logs["hardness/reached"] == pytest.approx(figures["mean_H"], abs=0.002)
    # The losses follow the hardness and the distances: 0.0002 and 0.0001 were seen.
    assert step.logs["loss/triplet"] == pytest.approx(figures["loss"], abs=5e-4)
    assert step.logs["loss/ICS"] == pytest.approx(0.5 * figures["ics"], abs=2e-4)
    assert step.loss.item() == pytest.approx(step.logs["loss/triplet"] + step.logs["loss/ICS"])


def in_full(network: nn.Module, x: Tensor, wanted: Tensor, budget: Budget) -> Tensor:
    """The manipulation as the paper writes it: every triplet in every step."""
    moved = x.clone()
    for _ in range(budget.steps):
        point = moved.clone().requires_grad_()
        h = hardness(*embed(network, point.flatten(0, 1)).view(len(x), 3, -1).unbind(1))
        ((wanted - h).clamp_min(0) ** 2).sum().backward()
        assert point.grad is not None
        moved = project(point.detach() - budget.stride * point.grad.sign(), x, budget.eps)
    return moved


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("value", [-0.3, -0.1, 0.1])
def test_dropping_finished_triplets_changes_nothing(
    value: float, steps: int, golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    network, images, labels = golden_network.double(), pairs[0].double(), pairs[1]
    budget = Budget(eps=16 / 255, alpha=2 / 255, steps=steps)
    mined = Mined.of(benign(network, images, labels), Softhard(), torch.Generator().manual_seed(1))
    source, wanted = mined.triplets, torch.full((32,), value, dtype=torch.float64)
    counted = Network(network)
    with frozen(network):
        moved = manipulate(counted, images, mined, wanted, budget)
        expected = in_full(network, images[source.stack()], wanted, budget)
    easier = int((mined.hardness < wanted).sum())
    assert 0 < easier < 32
    # Double precision: other batch sizes round otherwise, by some 1e-15.
    torch.testing.assert_close(reached(network, moved), reached(network, expected), atol=1e-9, rtol=0)
    assert counted.forwards == counted.backwards <= easier * 3 * steps
    if steps == 8:
        assert counted.forwards < easier * 3 * steps


@pytest.mark.parametrize("letter", SAMPLERS)
def test_the_sources_own_destination_is_regular_training(
    letter: str, golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    manipulated = rm.defense(f"HM[{letter},{letter}]", seed=3)(golden_network, *pairs)
    regular = rm.defense(f"N/A[{letter}]", seed=3)(golden_network, *pairs)
    assert manipulated.logs["perturbed"] == 0
    assert manipulated.logs["hardness/reached"] == pytest.approx(
        manipulated.logs["hardness/source"], abs=1e-6
    )
    assert manipulated.loss.item() == pytest.approx(regular.loss.item(), abs=1e-6)
    # No image was perturbed: after mining, the network sees the triplets and nothing else.
    assert manipulated.logs["images/forward"] - 64 == manipulated.logs["images/backward"] == 96


def test_gradual_adversary_follows_the_triplet_loss_alone(
    golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    defense = rm.defense("HM[S,LGA]&ICS(λ=1)", eps=16 / 255, alpha=2 / 255, steps=8)
    first = defense(golden_network, *pairs)
    assert first.logs["hardness/destination"] == pytest.approx(-0.2)
    assert first.logs["loss/ICS"] > 0
    assert defense.state_dict()["destination.previous_loss"].item() == first.logs["loss/triplet"]
    second = defense(golden_network, *pairs)
    assert second.logs["hardness/destination"] == pytest.approx(-min(0.2, first.logs["loss/triplet"]))
    defense.eval()
    defense(golden_network, *pairs)
    assert defense.state_dict()["destination.previous_loss"].item() == second.logs["loss/triplet"]
