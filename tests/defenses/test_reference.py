"""Defenses by `reference`, as published, against plain loops: S and the anchor, EST and its offset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import robustmetric as rm
from robustmetric.defenses.base import Network
from robustmetric.defenses.est import EmbeddingShifted
from robustmetric.destination import Benign, Destination
from robustmetric.perturb import Budget, frozen, project
from robustmetric.sphere import embed
from robustmetric.triplets import Batch, Softhard


def moved_as_published(network: nn.Module, image: Tensor, budget: Budget, sign: Tensor) -> Tensor:
    """A plain loop: 1e-6 is added to each difference, 1e-7 of a `sign` to the embedding in the first step."""
    origin = embed(network, image).detach()
    x = image.clone()
    for step in range(budget.steps):
        x.requires_grad_()
        distance = F.pairwise_distance(embed(network, x), origin + (1e-7 * sign if step == 0 else 0))
        (up,) = torch.autograd.grad(distance.sum(), x)
        x = project(x.detach() + budget.stride * up.sign(), image, budget.eps)
    return x


def test_shift_by_the_reference_against_a_plain_loop(
    golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    network, images = golden_network.double(), pairs[0][:12].double()
    for steps in (1, 6):
        budget = Budget(eps=16 / 255, alpha=2 / 255, steps=steps)
        with frozen(network):
            origin = embed(network, images)
            defense = EmbeddingShifted(budget=budget, seed=1)
            defense.reference = True
            moved = defense.shift(Network(network), images, origin)
            there = embed(network, moved)
            signs = torch.randint(-1, 2, (12, 64), generator=torch.Generator().manual_seed(1))
            for i in range(len(images)):
                wanted = embed(network, moved_as_published(network, images[[i]], budget, signs[i]))[0]
                assert torch.allclose(there[i], wanted, rtol=0, atol=1e-9)
                assert (wanted - origin[i]).norm() > 0.01


def test_est_by_the_reference_takes_its_loss_there(
    golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    images, labels = pairs[0].double(), pairs[1]
    network = golden_network.double()
    defense = rm.defense("EST[S]", eps=16 / 255, alpha=2 / 255, steps=3, seed=8, reference=True)
    assert defense.name == "EST[S]"
    step = defense(network, images, labels)
    generator = torch.Generator().manual_seed(8)
    signs = torch.randint(-1, 2, (len(images), 64), generator=generator)
    assert set(signs.unique().tolist()) == {-1, 0, 1}
    with frozen(network):
        moved = torch.cat(
            [
                moved_as_published(network, x[None], defense.budget, s)
                for x, s in zip(images, signs, strict=True)
            ]
        )
    z = embed(network, moved)
    a, p, n = Softhard(itself=True)(Batch.of(z, labels), generator=generator)
    assert step.loss.item() == pytest.approx(rm.triplet_loss(z[a], z[p], z[n]).item(), abs=1e-9)
    other = rm.defense("EST[S]", eps=16 / 255, alpha=2 / 255, steps=3, seed=8)(network, images, labels)
    assert other.loss.item() != step.loss.item()


def samplers(name: str, **options: Any) -> list[Any]:
    """The samplers of a defense: its source's, and those of its destination."""
    defense = rm.defense(name, **options)
    destination = defense.destination or Destination()
    return [defense.source, *(part.sampler for part in destination.modules() if isinstance(part, Benign))]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("N/A[S]", [True]),
        ("ACT[S]", [True]),
        ("HM[S,LGA]&ICS", [True]),
        ("HM[R,S]", [False, True]),
        ("HM[S,S]", [True, True]),
        ("HM[R,gB(S)]", [False, True]),
        ("HM[M,gB(gB(S))]", [False, True]),
        ("HM[S(itself=False),LGA]", [False]),
        ("HM[H,M]", [False, False]),
    ],
)
def test_it_reaches_s_wherever_it_stands_and_the_name_stays(name: str, wanted: list[bool]) -> None:
    assert [s.itself for s in samplers(name, reference=True)] == wanted
    assert rm.defense(name, reference=True).name == rm.defense(name).name == name
    assert not any(s.itself for s in samplers(name))


def test_hm_with_the_anchor_as_its_positive_against_a_plain_loop(
    golden_network: nn.Sequential, pairs: tuple[Tensor, Tensor]
) -> None:
    """HM[R,S]: the destination of an anchor that S pairs with itself is −d(a, n)."""
    network = golden_network.double()
    images, labels = pairs[0].double(), torch.arange(32).repeat_interleave(2)
    images[1::2] = images[0::2].roll(1, 3)  # 32 classes, each an image and its neighbour
    defense = rm.defense("HM[R,S]", eps=16 / 255, alpha=2 / 255, steps=2, seed=4, reference=True)
    step = defense(network, images, labels)
    generator = torch.Generator().manual_seed(4)
    batch = Batch.of(embed(network.eval(), images), labels)
    rm.triplets.Random()(batch, generator=generator)
    a, p, n = Softhard(itself=True)(batch, generator=generator)
    assert (a == p).any()
    wanted = [
        (0.0 if i == j else float(batch.distances[i, j])) - float(batch.distances[i, k])
        for i, j, k in zip(a.tolist(), p.tolist(), n.tolist(), strict=True)
    ]
    assert step.logs["hardness/destination"] == pytest.approx(sum(wanted) / len(wanted), abs=1e-9)
    step.loss.backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in network.parameters())


def test_parts_of_ones_own_are_as_they_were_unless_they_have_the_option(tmp_path: Any) -> None:
    file = tmp_path / "parts.py"
    file.write_text(
        "import robustmetric as rm\n"
        "from robustmetric.triplets import Hardest, Softhard\n"
        "class Plain(Hardest): pass\n"
        "class Open(Softhard):\n"
        "    def __init__(self, **options): super().__init__(); self.__dict__['given'] = options\n"
        "class Soft(Softhard): pass\n"
        "class Mine(rm.Defense):\n"
        "    def __init__(self, source, **options): super().__init__(source, **options)\n"
        "class Knows(rm.Defense):\n"
        "    def __init__(self, source, *, reference=False, **options):\n"
        "        super().__init__(source, **options); self.reference = reference\n"
    )
    for name, itself in (("Plain", False), ("Open", False), ("Soft", True)):
        (found,) = samplers(f"HM[{file}:{name},LGA]", reference=True)
        assert found.itself is itself
    assert rm.defense(f"{file}:Mine[S]", reference=True).source == Softhard(itself=True)
    for reference in (False, True):
        made: Any = rm.defense(f"{file}:Knows[S]", reference=reference)
        assert made.reference is reference
