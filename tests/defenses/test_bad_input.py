"""Wrong input through whole defenses: refused in words that help, and without a trace on the network."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.defenses import HardnessManipulation
from robustmetric.destination import Gradual
from robustmetric.triplets import Softhard

ATTACKING = ("HM[S,LGA]&ICS", "EST[R]", "ACT[S]")
DEFENSES = ("N/A[R]", *ATTACKING)
LABELS = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])


def batch() -> tuple[Tensor, Tensor]:
    """Two classes far apart: every triplet is so easy that each defense has something to perturb."""
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(8, 1, 4, 4)
    images[LABELS == 0, :, :2] = 0.8
    images[LABELS == 1, :, 2:] = 0.8
    noise = 0.1 * torch.rand(images.shape, generator=generator)
    return torch.where(images > 0, images + noise, images), LABELS


class Net(nn.Module):
    """A network in training with a BatchNorm that was frozen and a layer that is not trained.

    `spoil` turns its embeddings into what it returns, given the number of the call.
    """

    def __init__(self, spoil: Callable[[Net, Tensor], object] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 12)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, 6)
        self.spoil = spoil
        self.calls = 0
        self.train()
        self.norm.eval()
        self.first.bias.requires_grad_(False)

    def forward(self, images: Tensor) -> object:
        self.calls += 1
        z = self.last(self.norm(self.first(images.flatten(1))))
        return z if self.spoil is None else self.spoil(self, z)


class Root(Net):
    """A network whose gradient is infinite where a pixel is zero."""

    def forward(self, images: Tensor) -> object:
        return super().forward(images.sqrt())


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Check that modes and flags are as before and that no gradient was left."""
    modes = {name: module.training for name, module in model.named_modules()}
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert len(set(modes.values())) == len(set(flags.values())) == 2  # both kinds are there to be mixed up
    yield
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []


def refused(name: str, model: nn.Module, images: Any, labels: Any) -> str:
    """Give the message of a refusal; check that it left no trace and that good input works afterwards."""
    defense = rm.defense(name)
    with untouched(model), pytest.raises(ValueError, match=r".") as error:
        defense(model, images, labels)
    if isinstance(defense, HardnessManipulation):
        assert defense.destination.previous_loss == math.inf
    healthy = Net()
    loss = defense(healthy, *batch()).loss
    loss.backward()
    assert torch.isfinite(loss)
    return str(error.value)


# --- images -----------------------------------------------------------------------------------------------


def with_pixel(value: float) -> Tensor:
    images, _ = batch()
    images[3, 0, 1, 2] = value
    return images


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (batch()[0][:, 0], "images have shape (8, 4, 4)"),
        ((batch()[0] * 255).byte(), "images must be a floating-point tensor, not uint8"),
        (with_pixel(1.0) * 4.5 - 2, "pixels are in [-2, 2.5]"),
    ],
)
def test_wrong_images_never_reach_the_network(images: Tensor, says: str) -> None:
    model = Net()
    assert says in refused("HM[S,LGA]&ICS", model, images, LABELS)
    assert model.calls == 0


# --- labels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (LABELS[:7], "labels must be a tensor of integers of shape (8,)"),
        (LABELS.tolist(), "labels must be a tensor of integers of shape (8,)"),
        (torch.full((8,), 4), "8 images of one class give no triplet"),
        (torch.arange(8), "8 images of as many classes give no triplet"),
    ],
)
def test_wrong_labels_never_reach_the_network(labels: Any, says: str) -> None:
    model = Net()
    assert says in refused("HM[S,LGA]&ICS", model, batch()[0], labels)
    assert model.calls == 0


# --- networks ---------------------------------------------------------------------------------------------


def poison(z: Tensor, value: float) -> Tensor:
    """Put one bad number in each of the first two embeddings."""
    mask = torch.zeros_like(z)
    mask[:2, 0] = value
    return z + mask


NETWORKS: dict[str, tuple[Callable[[Net, Tensor], object], str]] = {
    "a row too few": (lambda net, z: z[1:], "the network returned float32 of shape ("),
    "NaN": (lambda net, z: poison(z, math.nan), "embeddings hold NaN or infinity"),
}


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("name", ATTACKING)
@pytest.mark.parametrize("case", NETWORKS)
def test_a_network_that_goes_wrong_in_mining_or_in_pgd_is_refused(name: str, case: str, call: int) -> None:
    spoil, says = NETWORKS[case]
    model = Net(lambda net, z: spoil(net, z) if net.calls == call else z)
    assert says in refused(name, model, *batch())
    assert model.calls == call


@pytest.mark.parametrize("name", ATTACKING)
def test_an_infinite_gradient_of_the_images_is_refused(name: str) -> None:
    model = Root()
    message = refused(name, model, *batch())
    assert message.startswith("the gradient of the images holds NaN or infinity")
    assert "square root, logarithm or division in the network" in message
    assert "use full precision" in message
    assert model.calls == 2


@pytest.mark.parametrize("name", ATTACKING)
def test_an_error_of_the_network_names_its_images(name: str) -> None:
    def fail(net: Net, z: Tensor) -> Tensor:
        if net.calls == 3:
            raise RuntimeError("an odd error")
        return z

    model = Net(fail)
    with untouched(model):
        said = refused(name, model, *batch())
    assert re.search(r"failed on images of shape \(\d+, .*\) and type float32 \(RuntimeError: an odd e", said)
    assert model.calls == 3


class Alone(nn.Module):
    """Fails on a batch of one, in evaluation mode as well."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x.flatten(1), None, None, training=True)


def test_a_network_that_fails_on_one_image_is_told_so() -> None:
    images = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(rm.UserError, match=r"shape \(1, 1, 8, 8\).*ValueError.*also for one image alone"):
        rm.embed(Alone(), images)


@pytest.mark.parametrize("name", ["N/A[R]", *ATTACKING])
def test_a_step_without_gradients_is_refused_in_training_mode(name: str) -> None:
    network = Net()
    with torch.no_grad():
        with pytest.raises(rm.UserError, match=r"outside torch\.no_grad\(\), or call model\.eval\(\)"):
            rm.defense(name)(network, *batch())
        assert torch.isfinite(rm.defense(name, steps=2)(network.eval(), *batch()).loss)


@pytest.mark.parametrize("name", ["HM[S,2]", *ATTACKING])
def test_an_interrupt_within_pgd_restores_the_network(name: str) -> None:
    seen: list[bool] = []

    def interrupt(net: Net, z: Tensor) -> Tensor:
        if net.calls == 3:
            seen.extend(module.training for module in net.modules())
            seen.extend(parameter.requires_grad for parameter in net.parameters())
            raise KeyboardInterrupt
        return z

    model = Net(interrupt)
    defense = rm.defense(name)
    with untouched(model), pytest.raises(KeyboardInterrupt):
        defense(model, *batch())
    assert len(seen) > 0
    assert not any(seen)  # all of the network was frozen when it happened
    assert model.training
    assert not model.norm.training
    # The interrupted defense and network go on as if nothing had been.
    model.spoil = None
    defense(model, *batch()).loss.backward()
    assert model.last.weight.grad is not None
    assert model.first.bias.grad is None


# --- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [("eps", 0), ("eps", 1), ("alpha", 1), ("alpha", 1e-6), ("steps", 1), ("margin", 2), ("margin", 1e-6)],
)
@pytest.mark.parametrize("name", DEFENSES)
def test_the_ends_of_what_is_allowed_work(name: str, setting: str, value: Any) -> None:
    model = Net()
    given = {setting: value}
    step = rm.defense(name, **given)(model, *batch())
    step.loss.backward()
    assert model.last.weight.grad is not None
    assert torch.isfinite(model.last.weight.grad).all()


@pytest.mark.parametrize("name", [name for name in DEFENSES if name != "N/A[R]"])
def test_a_network_that_cuts_the_way_to_the_images_is_refused(name: str) -> None:
    message = refused(name, Net(lambda net, z: z.detach()), with_pixel(1.0), LABELS)
    assert "the embeddings do not depend on the images: take no_grad() and detach() out" in message


def test_parts_put_together_by_hand_are_checked() -> None:
    budget = rm.Budget(eps=0.1, alpha=0.1, steps=1)
    wrong: Any = "LGA"
    with pytest.raises(ValueError, match="the network must be a Module, not a function"):
        rm.defense("N/A[R]")(lambda x: x, with_pixel(1.0), LABELS)
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0, not -1"):
        rm.defense("N/A[R]", seed=-1)
    with pytest.raises(ValueError, match="destination must be a Destination, not 'LGA'"):
        HardnessManipulation(Softhard(), wrong, budget=budget)
    with pytest.raises(ValueError, match="a term must be a Term, not 'LGA'"):
        HardnessManipulation(Softhard(), Gradual(), [wrong], budget=budget)

    class Broken(Gradual):
        def relative_loss(self) -> Tensor:
            return torch.tensor(math.nan)

    with pytest.raises(ValueError, match=r"Broken\.hardness returned NaN or infinity"):
        HardnessManipulation(Softhard(), Broken(), budget=budget)(Net(), with_pixel(1.0), LABELS)
