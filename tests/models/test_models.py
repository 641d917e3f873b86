from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from robustmetric.models import C2F2, ResNet, model


def test_networks_are_created_by_name_with_their_options() -> None:
    small = model("c2f2", channels=3, size=8, dim=5)
    assert isinstance(small, C2F2)
    assert small(torch.rand(2, 3, 8, 8)).shape == (2, 5)
    net = model("resnet18", dim=5, freeze_bn=True)
    assert isinstance(net, ResNet)
    assert net.freeze_bn
    assert net.fc.out_features == 5


def test_an_unknown_name_gets_the_nearest_the_known_ones_and_timm() -> None:
    with pytest.raises(ValueError, match="unknown model 'resnet19'") as caught:
        model("resnet19")
    message = str(caught.value)
    assert "did you mean 'resnet18'?" in message
    assert "known: c2f2, resnet18, resnet50, or timm:NAME" in message


@pytest.mark.slow
def test_importing_the_package_imports_neither_timm_nor_torchvision() -> None:
    code = "import sys, robustmetric.models; assert not {'timm', 'torchvision'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603
