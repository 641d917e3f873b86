"""Where networks come from: names and files, their options, their weights, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import robustmetric as rm
from robustmetric.errors import UserError
from robustmetric.models import NetworkSource, try_network

NETS = """
from torch import nn

def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16))

def fitted(channels=2, size=3, dim=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, dim))

def anything(**options):
    return nn.Linear(len(options) + 1, 1)

ready = plain()
seven = 7

def returns_seven():
    return 7
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    file = tmp_path / "nets.py"
    file.write_text(NETS)
    return file


def shape(network: nn.Module) -> tuple[int, ...]:
    return tuple(next(iter(network.parameters())).shape)


# Options


def test_a_network_gets_what_it_has_options_for(nets: Path) -> None:
    assert shape(NetworkSource(f"{nets}:plain").make(3, 8)) == (16, 192)
    assert shape(NetworkSource(f"{nets}:fitted").make(1, 5)) == (4, 25)
    assert shape(NetworkSource(f"{nets}:fitted", dim=7).make(1, 5)) == (7, 25)
    assert shape(NetworkSource(f"{nets}:fitted(dim=9,size=2)").make(3, 5)) == (9, 12)
    assert shape(NetworkSource(f"{nets}:anything").make(3, 5)) == (1, 1), "nothing is pressed on it"
    assert shape(NetworkSource(f"{nets}:anything(depth=3)").make(3, 5)) == (1, 2)
    assert NetworkSource("c2f2").make(1, 8)(torch.rand(2, 1, 8, 8)).shape == (2, 512)
    assert NetworkSource("c2f2(dim=6)").make(3, 12)(torch.rand(2, 3, 12, 12)).shape == (2, 6)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"model": "NETS:plain", "dim": 512}, r"unexpected keyword argument 'dim'; its options: none"),
        ({"model": "NETS:plain", "freeze_bn": True}, r"unexpected keyword argument 'freeze_bn'"),
        ({"model": "c2f2", "freeze_bn": True}, r"unexpected keyword .* 'freeze_bn'; its options: .*dim"),
        ({"model": "c2f2(dim=3)", "dim": 4}, r"dim is given already; leave it out"),
        ({"model": "c2f2(deep=3)"}, r"unexpected keyword argument 'deep'; its options: .*dim"),
        ({"model": "NETS:fitted(depth=3)"}, r"unexpected keyword argument 'depth'; its options: .*dim"),
        ({"model": "NETS:seven"}, r"'seven' of .*nets\.py is a int; the model must be a class or a function"),
        ({"model": "NETS:returns_seven"}, r"returns_seven' made a int; it must make a Module"),
        ({"model": "NETS:fited"}, r"unknown name 'fited' \(did you mean 'fitted'\?\)"),
    ],
)
def test_options_and_objects_that_do_not_fit(entries: dict[str, Any], told: str, nets: Path) -> None:
    entries["model"] = entries["model"].replace("NETS", str(nets))
    with pytest.raises(UserError, match=told):
        NetworkSource(**entries).make(3, 8)


def test_a_network_that_is_there_already_is_not_shared(nets: Path) -> None:
    first, second = (NetworkSource(f"{nets}:ready").make(3, 8) for _ in range(2))
    assert first is not second
    assert torch.equal(next(first.parameters()), next(second.parameters()))


def test_grey_images_stay_grey_for_networks_that_are_made_for_them(nets: Path) -> None:
    taken = {f"{nets}:fitted": None, f"{nets}:plain": 3, f"{nets}:anything": 3, f"{nets}:ready": 3}
    for model, channels in {**taken, "c2f2(dim=3)": None, "resnet50": 3, "timm:any": 3}.items():
        assert NetworkSource(model).channels == channels, model


# Checks before anything is made


@pytest.mark.parametrize(
    ("model", "kind", "told"),
    [
        ("resnet19", UserError, r"'resnet19' \(did you mean 'resnet18'\?\).*timm:NAME.*FILE\.py"),
        ("nets.py", UserError, r"a file and no function in it; write FILE\.py:.*nets\.py:network"),
        ("gone.py:net", FileNotFoundError, r"there is no file gone\.py to take the model from"),
        ("c2f2(dim", UserError, r"has no closing bracket; write NAME\(option=value"),
    ],
)  # fmt: skip
def test_what_can_be_told_is_told_before(model: str, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        NetworkSource(model).check()


# Weights


def test_weights_must_be_of_this_network(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    given = rm.model("c2f2", size=8, dim=16)
    rm.save_weights(given, file)
    made = NetworkSource("c2f2", dim=16, weights=file).make(1, 8)
    assert all(torch.equal(value, given.state_dict()[name]) for name, value in made.state_dict().items())
    with pytest.raises(UserError, match=r"fc2\.weight is \(16, 1024\), the model has \(8, 1024\)"):
        NetworkSource("c2f2", dim=8, weights=file).make(1, 8)
    rm.save_weights(rm.model("resnet18", dim=16), file)
    with pytest.raises(UserError, match=r"another last layer .*\(fc\.weight, fc\.bias\).*the dim"):
        NetworkSource("resnet18", dim=8, weights=file).make(3, 32)


def test_a_network_without_weights_is_the_same_each_time() -> None:
    state = torch.random.get_rng_state()
    first, second = (NetworkSource("c2f2", dim=8, seed=4).make(1, 8).state_dict() for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state), "torch's own generator was touched"
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = NetworkSource("c2f2", dim=8, seed=5).make(1, 8).state_dict()
    assert not torch.equal(first["fc2.weight"], other["fc2.weight"])


# Trying it


def test_a_network_that_was_tried_is_as_it_was() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    try_network(network, torch.ones(1, 1, 8, 8))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(module.training for module in network.modules())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


@pytest.mark.slow
def test_importing_the_package_imports_neither_timm_nor_torchvision() -> None:
    code = "import sys, robustmetric.models; assert not {'timm', 'torchvision'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603
