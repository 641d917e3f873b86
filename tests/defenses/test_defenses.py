"""What holds for every defense, and EST and ACT against plain loops."""

import copy
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.losses import MultiSimilarityLoss, TripletMarginLoss
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.defenses.base import Network
from robustmetric.defenses.est import EmbeddingShifted
from robustmetric.losses import triplet_loss
from robustmetric.perturb import Budget, frozen, project
from robustmetric.sphere import embed
from robustmetric.triplets import Batch, Softhard

pytestmark = pytest.mark.kernels

NAMES = [
    "N/A[R]",
    "N/A[S]",
    "EST[R]",
    "ACT[S]",
    "HM[R,M]",
    "HM[S,LGA]&ICS",
    "HM[M,H]",
    "HM[D,gB(S)]&L(p,p̃,a)",
    "HM[S,2]&L(a,ã,ñ)",
    "EST[S]&ICS&L(a,p,n)",
    "ACT[R]&L(a,p,n)",
]


class Watched(nn.Module):
    """A small network with a frozen BatchNorm that keeps every batch it was given."""

    def __init__(self, channels: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * size * size, 6)
        self.seen: list[Tensor] = []
        self.to(dtype).train()
        self.norm.eval()
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        z: Tensor = self.head(torch.tanh(self.norm(self.conv(x))).flatten(1))
        return z


ANCHORS = {"pairs": [0, 2, 4, 6], "any": [0, 1, 2, 4, 5]}


def batch(layout: str, channels: int, size: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    labels = torch.tensor([2, 2, 0, 0, 1, 1, 2, 2] if layout == "pairs" else [0, 1, 0, 2, 1, 0, 3])
    pixels = torch.rand(len(labels), channels, size, size, generator=torch.Generator().manual_seed(seed))
    return pixels.to(dtype), labels


@given(
    name=st.sampled_from(NAMES),
    layout=st.sampled_from(["pairs", "any"]),
    channels=st.sampled_from([1, 3]),
    size=st.sampled_from([3, 6]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    eps=st.floats(0, 0.5),
    alpha=st.floats(0.001, 0.3),
    steps=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=120)
def test_every_defense_keeps_its_word(
    name: str,
    layout: str,
    channels: int,
    size: int,
    dtype: torch.dtype,
    eps: float,
    alpha: float,
    steps: int,
    seed: int,
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Watched(channels, size, dtype)
    images, labels = batch(layout, channels, size, dtype, seed)
    kept, rng = images.clone(), torch.get_rng_state()
    modes = [m.training for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    numbers = {k: v.clone() for k, v in model.state_dict().items()}

    step = rm.defense(name, eps=eps, alpha=alpha, steps=steps, seed=seed)(model, images, labels)

    assert torch.equal(images, kept)
    assert torch.equal(torch.get_rng_state(), rng)
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, numbers[k]) for k, v in model.state_dict().items())
    for x in model.seen:
        assert x.min() >= 0
        assert x.max() <= 1
        # Whatever the network saw is within ε of an image of the batch (and a rounding).
        nearest = (x[:, None] - images).abs().flatten(2).amax(2).amin(1)
        assert nearest.max() <= eps + 1e-6
    assert step.logs["images/forward"] == sum(len(x) for x in model.seen)
    assert 0 <= step.logs["perturbed"] <= 1
    keys = {"loss/triplet", "hardness/source", "hardness/destination", "hardness/reached", "perturbed"}
    assert keys <= set(step.logs)
    assert step.logs["triplets"] == step.logs["anchors"] == len(ANCHORS[layout])
    for key in ("source", "destination", "reached"):
        without = key == "destination" and name[:3] in ("EST", "ACT")
        assert without == math.isnan(step.logs[f"hardness/{key}"])
        assert without or -2 <= step.logs[f"hardness/{key}"] <= 2.2

    again = rm.defense(name, eps=eps, alpha=alpha, steps=steps, seed=seed)(model, images, labels)
    assert again.loss.item() == step.loss.item()
    assert again.logs == step.logs
    step.loss.backward()
    gradients = [p.grad is not None for p in model.parameters()]
    assert gradients == flags


@pytest.mark.slow
@given(
    name=st.sampled_from(NAMES),
    layout=st.sampled_from(["pairs", "any"]),
    mixing=st.booleans(),
    eps=st.floats(0, 0.5),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=80)
def test_the_batch_that_the_loss_saw(name: str, layout: str, mixing: bool, eps: float, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Watched(1, 6, torch.float64)
    model.norm.train(mixing)
    images, labels = batch(layout, 1, 6, torch.float64, seed)
    step = rm.defense(name, eps=eps, alpha=0.1, steps=3, seed=seed)(model, images, labels)
    passes = len(model.seen)
    assert step.triplets is not None
    assert step.images is not None
    assert step.embeddings is not None
    assert step.labels is not None
    a, p, n = step.triplets
    assert not step.images.requires_grad
    assert len(model.seen) == passes, "the network was asked once more"

    # Also with a BatchNorm in training mode, for which the batch must be the very one.
    torch.testing.assert_close(step.embeddings, embed(model, step.images), atol=1e-9, rtol=0)
    loss = triplet_loss(step.embeddings[a], step.embeddings[p], step.embeddings[n])
    assert loss.item() == pytest.approx(step.logs["loss/triplet"], abs=1e-9)
    assert torch.equal(step.labels[a], step.labels[p])
    assert (step.labels[a] != step.labels[n]).all()
    # Each image is within ε of one that has its label; of the one in its place where places are kept.
    away = (step.images[:, None] - images).abs().flatten(2).amax(2)
    assert away.masked_fill(step.labels[:, None] != labels, torch.inf).amin(1).max() <= eps + 1e-9
    if name[:3] in ("N/A", "EST"):
        assert torch.equal(step.labels, labels)
        assert away.diagonal().max() <= (eps + 1e-9 if name[:3] == "EST" else 0)
    else:
        assert torch.equal(torch.stack(tuple(step.triplets), 1).flatten(), torch.arange(len(step.labels)))
        assert torch.equal(step.labels[a], labels[ANCHORS[layout]])


@pytest.mark.parametrize("name", NAMES)
def test_other_losses_learn_from_the_same_batch(
    name: str, golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    step = rm.defense(name, eps=16 / 255, alpha=4 / 255, steps=3)(golden_network, *pairs)
    assert step.triplets is not None
    assert step.images is not None
    same = TripletMarginLoss(margin=0.2, reducer=MeanReducer())
    theirs = same(step.embeddings, step.labels, indices_tuple=tuple(step.triplets))
    assert theirs.item() == pytest.approx(step.logs["loss/triplet"], abs=1e-5)

    optimiser = torch.optim.SGD(golden_network.parameters(), lr=1e-3)
    other = MultiSimilarityLoss()
    before = other(step.embeddings, step.labels)
    before.backward()
    optimiser.step()
    with torch.no_grad():
        after = other(embed(golden_network, step.images), step.labels)
    assert after < before


@pytest.mark.parametrize("name", ["N/A[R]", "EST[R]", "ACT[S]", "HM[S,LGA]&ICS"])
def test_a_batch_with_few_anchors_is_noticed_once(name: str, golden_network: nn.Sequential) -> None:
    images = torch.rand(12, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    few, enough = torch.arange(12), torch.arange(12)
    few[7], enough[[5, 7]] = 2, 2
    defense = rm.defense(name, steps=1)
    # Warnings are errors here: a quarter of the images, and pairs, are no reason for one.
    assert defense(golden_network, images, enough).logs["anchors"] == 3
    assert defense(golden_network, images, torch.arange(6).repeat_interleave(2)).logs["anchors"] == 6
    with pytest.warns(UserWarning, match="draw pairs, as robustmetric.data.pairs.PairLoader does") as noted:
        step = defense(golden_network, images, few)
    assert "only 2 of the 12 images share their class with another of the batch" in str(noted[0].message)
    assert noted[0].filename == __file__
    assert step.logs["anchors"] == step.logs["triplets"] == 2
    defense(golden_network, images, few)
    with pytest.warns(UserWarning, match="only 2 of the 12"):
        rm.defense(name, steps=1)(golden_network, images, few)


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_defense_goes_on_as_if_nothing_had_happened(
    name: str, golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    defense = rm.defense(name, eps=0.05, alpha=0.02, steps=2, seed=4)
    defense(golden_network, *pairs)
    saved = copy.deepcopy(defense.state_dict())
    expected = [defense(golden_network, *pairs).loss.item() for _ in range(2)]

    other = rm.defense(name, eps=0.05, alpha=0.02, steps=2, seed=99)
    other.load_state_dict(saved)
    assert [other(golden_network, *pairs).loss.item() for _ in range(2)] == expected
    fresh = rm.defense(name, eps=0.05, alpha=0.02, steps=2, seed=99)
    assert [fresh(golden_network, *pairs).loss.item() for _ in range(2)] != expected


def test_shift_against_a_plain_loop(golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]) -> None:
    network, images = golden_network.double(), pairs[0][:12].double()
    budget = Budget(eps=16 / 255, alpha=2 / 255, steps=6)
    with frozen(network):
        origin = embed(network, images)
        moved = EmbeddingShifted(budget=budget).shift(Network(network), images, origin)
    far = (embed(network, moved) - origin).norm(dim=1)

    offset = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    for i in range(len(images)):
        x = (images[[i]] + 1e-7 * offset[[i]]).clamp(0, 1)
        for _ in range(6):
            x.requires_grad_()
            distance = (embed(network, x) - origin[[i]]).norm()
            (up,) = torch.autograd.grad(distance, x)
            x = project(x.detach() + 2 / 255 * up.sign(), images[[i]], 16 / 255)
        expected = (embed(network, x) - origin[[i]]).norm().item()
        assert far[i].item() == pytest.approx(expected, abs=1e-9)
        assert expected > 0.01


def test_est_takes_the_loss_on_the_moved_batch(
    golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    images, labels = pairs
    defense = rm.defense("EST[S]", eps=16 / 255, alpha=2 / 255, steps=3, seed=8)
    step = defense(golden_network, images, labels)

    alone = EmbeddingShifted(budget=defense.budget, seed=8)
    with frozen(golden_network):
        origin = embed(golden_network, images)
        moved = alone.shift(Network(golden_network), images, origin)
    z = embed(golden_network, moved)
    triplets = Softhard()(Batch.of(z, labels), generator=alone.generator)
    expected = triplet_loss(z[triplets.anchor], z[triplets.positive], z[triplets.negative])
    assert step.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert step.logs["images/forward"] == 64 * (1 + 3 + 1)
    assert step.logs["images/backward"] == 64 * (3 + 1)


def test_act_pulls_positive_and_negative_together_and_leaves_the_anchor(
    golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    network, images, labels = golden_network.double(), pairs[0].double(), pairs[1]
    step = rm.defense("ACT[S]", eps=16 / 255, alpha=2 / 255, steps=5, seed=6)(network, images, labels)

    with torch.no_grad():
        seen = Batch.of(embed(network, images), labels)
    triplets = Softhard()(seen, generator=torch.Generator().manual_seed(6))
    losses = []
    for a, p, n in triplets.stack().tolist():
        pair = images[[p, n]]
        origin = pair.clone()
        for _ in range(5):
            pair.requires_grad_()
            z = embed(network, pair)
            (up,) = torch.autograd.grad((z[0] - z[1]).norm(), pair)
            pair = project(pair.detach() - 2 / 255 * up.sign(), origin, 16 / 255)
        za, (zp, zn) = embed(network, images[[a]])[0], embed(network, pair)
        assert (zp - zn).norm() < seen.distances[p, n]
        losses.append(max(0.0, ((za - zp).norm() - (za - zn).norm() + 0.2).item()))
    assert step.loss.item() == pytest.approx(sum(losses) / len(losses), abs=1e-9)


# Without min-max training, which is known to collapse.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["EST[R]", "HM[S,2]", "ACT[S]"])
def test_autocast_perturbs_all_the_same(
    name: str, dtype: torch.dtype, golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    images = pairs[0] * 0.5 + 0.3

    def run() -> Mapping[str, float]:
        defense = rm.defense(name, eps=0.1, alpha=0.02, steps=4)
        return defense(golden_network, images, pairs[1]).logs

    exact = run()
    with torch.autocast("cpu", dtype=dtype):
        rough = run()
    assert rough["perturbed"] == exact["perturbed"] == 1
    assert rough["images/forward"] == exact["images/forward"]
    if name != "EST[R]":  # whose direction begins at random
        assert rough["hardness/reached"] == pytest.approx(exact["hardness/reached"], abs=0.03)
