from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robustmetric.errors import UserError
from robustmetric.models import model, timm_model

MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.125)


class Tiny(nn.Module):
    """A network with the interface of timm's: pretrained_cfg, get_classifier, parameter names of its own."""

    def __init__(self, num_classes: int, in_chans: int = 3, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_chans, width, 3)
        self.head = nn.Linear(width, num_classes)
        self.pretrained_cfg = {"mean": MEAN, "std": STD, "input_size": (3, 8, 8), "classifier": "head"}

    def get_classifier(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.stem(x).mean(dim=(2, 3)))
        return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for timm, which cannot be installed without torchvision; returns the calls it got."""
    calls: list[dict[str, Any]] = []

    def create_model(model_name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
        calls.append({"name": model_name, "pretrained": pretrained, **kwargs})
        if model_name != "tiny":
            raise RuntimeError(f"Unknown model ({model_name})")
        return Tiny(**kwargs)

    stub = ModuleType("timm")
    stub.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", stub)
    return calls


def test_it_is_created_by_name_without_a_download(calls: list[dict[str, Any]]) -> None:
    net = model("timm:tiny", dim=7, width=5)
    assert calls == [{"name": "tiny", "pretrained": False, "num_classes": 7, "width": 5}]
    assert net(torch.rand(2, 3, 8, 8)).shape == (2, 7)


@pytest.mark.usefixtures("calls")
def test_pixel_normalisation_is_inside() -> None:
    net = timm_model("tiny", dim=7)
    bare = Tiny(7)
    bare.load_state_dict(net.state_dict())  # timm's names, and nothing but them
    images = torch.rand(2, 3, 8, 8)
    outside = (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    torch.testing.assert_close(net(images), bare(outside))
    assert not torch.allclose(net(images), bare(images))


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("huge", {}, r"timm cannot create 'huge' .*Unknown model \(huge\).*timm.list_models"),
        ("tiny", {"depth": 3}, r"timm cannot create 'tiny' with options \{'depth': 3\}"),
        ("tiny", {"dim": 0}, "dim must be"),
        ("tiny", {"num_classes": 3}, "num_classes is not an option of timm:tiny here; use dim"),
        ("tiny", {"in_chans": 1}, "in_chans is 1, but timm:tiny normalises 3 channels"),
    ],
)
def test_impossible_requests_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timm_model(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tiny", {"checkpoint_path": "evil.pth"}, "checkpoint_path would load"),
        ("tiny", {"pretrained_cfg": {"file": "evil.pth"}}, "pretrained_cfg would"),
        ("tiny", {"pretrained_cfg_overlay": {"file": "evil.pth"}}, "pretrained_cfg_overlay would"),
        ("tiny", {"cache_dir": "elsewhere"}, "cache_dir would"),
        ("tiny", {"pretrained": True}, "pretrained would"),
        ("hf-hub:somebody/net", {}, "timm:hf-hub:somebody/net would"),
        ("hf_hub:somebody/net", {}, "timm:hf_hub:somebody/net would"),
        ("local-dir:elsewhere", {}, "timm:local-dir:elsewhere would"),
    ],
)
def test_timm_loads_no_weights(
    name: str, options: dict[str, Any], message: str, calls: list[dict[str, Any]]
) -> None:
    with pytest.raises(UserError, match=f"{message}.*--weights"):
        model(f"timm:{name}", **options)
    assert calls == []


@pytest.mark.parametrize("error", [None, "RuntimeError", "OSError", "AttributeError", "ImportError"])
def test_timm_that_cannot_be_imported_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    (tmp_path / "timm.py").write_text(f"raise {error}('operator torchvision::nms does not exist\\nmore')\n")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    if error is None:
        monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"timm:tiny needs timm.*install robustmetric\[timm\]") as caught:
        model("timm:tiny")
    assert "\n" not in str(caught.value)
