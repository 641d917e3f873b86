"""Terms of HM, ACT and EST against plain loops: their values, gradients, names and refusals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.defenses import AntiCollapse
from robustmetric.defenses.terms import TermDefense
from robustmetric.sphere import embed
from robustmetric.triplets import Softhard

KINDS = {
    "ICS": "a a~ p",
    "L(a,ã,p̃)": "a a~ p~",
    "L(p,p̃,a)": "p p~ a",
    "L(a,ã,ñ)": "a a~ n~",
    "L(a,p,ñ)": "a p n~",
    "L(a,p,n)": "a p n",
}
WITHOUT_ANCHOR = ["L(p,p̃,a)", "L(a,p,ñ)", "L(a,p,n)"]
CASES = [
    *(("EST[S]", kind) for kind in KINDS),
    ("HM[S,2]", "ICS"),
    ("HM[S,2]", "L(a,p,ñ)"),
    *(("ACT[S]", kind) for kind in WITHOUT_ANCHOR),
]
ROOM: dict[str, Any] = {"eps": 16 / 255, "alpha": 2 / 255, "steps": 3, "seed": 7}


class Whiten(nn.Module):
    """Mixes the images of a batch, in evaluation mode as well, and neither name nor parts say so."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)


def network(mixes: bool) -> nn.Sequential:
    torch.manual_seed(0)
    norm = Whiten() if mixes else nn.Identity()
    net = nn.Sequential(nn.Conv2d(1, 4, 5, stride=3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(256, 8))
    return net.double()


def far(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum().sqrt()


def six(net: nn.Module, images: Tensor, step: rm.Step, mined: Tensor) -> list[dict[str, Tensor]]:
    """Each triplet's six embeddings, from the (T, 3) places of its images and what they became."""
    assert step.images is not None
    assert step.triplets is not None
    with torch.enable_grad():
        after, before = embed(net, step.images), embed(net, images)
    rows = zip(step.triplets.stack().tolist(), mined.tolist(), strict=True)
    return [
        {f"{r}~": after[i] for r, i in zip("apn", to, strict=True)}
        | {r: before[i] for r, i in zip("apn", at, strict=True)}
        for to, at in rows
    ]


def hinge_of(z: Mapping[str, Tensor], roles: str, margin: float) -> Tensor:
    a, p, n = roles.split()
    return (far(z[a], z[p]) - far(z[a], z[n]) + margin).clamp_min(0)


def places(images: Tensor, step: rm.Step, net: nn.Module, family: str, labels: Tensor) -> Tensor:
    """The (T, 3) places of the source triplets in the batch, as S drew them with the defense's seed."""
    assert step.triplets is not None
    if family == "EST":
        return step.triplets.stack()
    drawn = Softhard()(
        rm.triplets.Batch.of(embed(net, images), labels), generator=torch.Generator().manual_seed(7)
    )
    return drawn.stack()


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_term_against_a_plain_loop(
    family: str, kind: str, mixes: bool, pairs: tuple[Tensor, Tensor]
) -> None:
    images, labels = pairs[0].double(), pairs[1]
    net, twin = network(mixes), network(mixes)
    defense = rm.defense(
        f"{family}&{kind}(λ=0.3)" if kind == "ICS" else f"{family}&{kind[:-1]},λ=0.3)", **ROOM
    )
    step = defense(net, images, labels)
    at = places(images, step, twin, family[:3], labels)
    found = six(twin, images, step, at)
    margin = 0.0 if kind in ("ICS", "L(a,ã,p̃)", "L(p,p̃,a)") else 0.2
    triplet = torch.stack([hinge_of(z, "a~ p~ n~", 0.2) for z in found]).mean()
    term = 0.3 * torch.stack([hinge_of(z, KINDS[kind], margin) for z in found]).mean()
    assert step.logs["loss/triplet"] == pytest.approx(triplet.item(), abs=1e-9)
    (logged,) = [value for name, value in step.logs.items() if name.startswith(("loss/L", "loss/I"))]
    assert logged == pytest.approx(term.item(), abs=1e-9)
    assert logged > 0
    assert step.loss.item() == pytest.approx((triplet + term).item(), abs=1e-9)
    ours = torch.autograd.grad(step.loss, list(net.parameters()))
    theirs = torch.autograd.grad(triplet + term, list(twin.parameters()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-9, rtol=1e-6)


def test_an_image_that_did_not_move_is_its_own_benign_one(pairs: tuple[Tensor, Tensor]) -> None:
    images, labels = pairs[0].double(), pairs[1]
    step = rm.defense("EST[S]&ICS&L(a,p,n)", eps=0, steps=2)(network(False), images, labels)
    assert step.logs["perturbed"] == 0
    # Benign, one step of the search, for there is nowhere to go, the loss, and its benign images.
    assert step.logs["images/forward"] == 4 * len(images)
    # The term is half of the loss itself, and nothing lies between an image and itself.
    assert step.logs["loss/L(a,p,n)"] == pytest.approx(step.logs["loss/triplet"] / 2, abs=1e-12)
    assert step.logs["loss/ICS"] == 0


# Names


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITHOUT_ANCHOR])
def test_act_has_no_perturbed_anchor(kind: str) -> None:
    budget = rm.Budget(eps=0.1, alpha=0.1, steps=1)
    makes: list[Callable[[], object]] = [
        lambda: rm.defense(f"ACT[S]&L(a,p,n)&{kind}"),
        lambda: AntiCollapse(Softhard(), terms=rm.defense(f"HM[S,2]&{kind}").terms, budget=budget),
    ]
    for make in makes:
        with pytest.raises(rm.UserError, match=r"^ACT has no a~") as caught:
            make()
        assert f"which {kind} takes; its terms take a, p, n, p~, n~" in str(caught.value)


OWN = """
from robustmetric.losses import Term

class Pull(Term):
    def __init__(self, roles="a p~", weight=1.0):
        self.roles, self.weight = tuple(roles.split()), weight

    def loss(self, embeddings, *, margin):
        one, other = (embeddings[role] for role in self.roles)
        self.seen = sorted(embeddings)
        return self.weight * (one - other).square().sum(1).mean()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "roles", "seen"),
    [
        ("ACT", "a p~", ["a", "n~", "p~"]),
        ("ACT", "n n~", ["n", "n~", "p~"]),
        ("EST", "a a~", ["a", "a~", "n~", "p~"]),
        ("EST", "p~ n~", ["a~", "n~", "p~"]),
    ],
)
def test_a_term_of_ones_own(
    family: str, roles: str, seen: Collection[str], tmp_path: Path, pairs: tuple[Tensor, Tensor]
) -> None:
    file = tmp_path / "terms.py"
    file.write_text(OWN)
    images, labels = pairs[0].double(), pairs[1]
    name = f"{family}[S]&{file}:Pull(roles='{roles}',weight=0.5)"
    defense = rm.defense(name, **ROOM)
    assert isinstance(defense, TermDefense)
    assert defense.name == name
    net = network(False)
    step = defense(net, images, labels)
    found = six(net, images, step, places(images, step, network(False), family, labels))
    one, other = roles.split()
    expected = 0.5 * torch.stack([far(z[one], z[other]) ** 2 for z in found]).mean()
    assert step.logs["loss/Pull"] == pytest.approx(expected.item(), abs=1e-9)
    assert vars(defense.terms[0])["seen"] == seen
    if family == "ACT":
        with pytest.raises(rm.UserError, match="ACT has no a~, which Pull takes"):
            rm.defense(f"ACT[S]&{file}:Pull(roles='a a~')")
