"""Exported files: the same vectors as the run's, read without this package's help, or no file at all."""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import robustmetric as rm
from robustmetric import exports
from robustmetric.data import Inputs
from robustmetric.errors import UserError
from robustmetric.exports import FORMATS, Product, describe
from robustmetric.locks import InUseError
from robustmetric.sphere import ROUNDING
from robustmetric.training import Run
from robustmetric.training.recipe import make_recipe
from tests.helpers.command import refused, works
from tests.helpers.runs import make_run

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated:DeprecationWarning")

ALL = pytest.mark.parametrize("to", FORMATS)
Pixels = NDArray[np.uint8]


def read(file: Path, to: str) -> tuple[Callable[[Pixels], NDArray[np.float32]], dict[str, Any]]:
    """Read a file as a program would that has never heard of this package."""
    if to == "onnx":
        session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
        text = session.get_modelmeta().custom_metadata_map["robustmetric"]
        return lambda x: session.run(["embeddings"], {"images": x})[0], json.loads(text)
    extra: dict[str, Any] = {"robustmetric.json": ""}
    content = io.BytesIO(file.read_bytes())
    if to == "torchscript":
        module = torch.jit.load(content, _extra_files=extra)
    else:
        module = torch.export.load(content, extra_files=extra).module()
    return lambda x: module(torch.from_numpy(x)).numpy(), json.loads(extra["robustmetric.json"])


def a_run(model: str = "c2f2", resize: int | None = 8, crop: int | None = None, channels: int = 1) -> Run:
    torch.manual_seed(0)
    options = {"size": crop or resize, "channels": channels} if model == "c2f2" else {}
    network = rm.model(model, dim=16, **options)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))  # a new BatchNorm would be the identity
    inputs = Inputs(resize, crop, channels)  # type: ignore[arg-type]
    return Run(network.eval(), inputs, make_recipe({"model": model, "eps": 0.1}), "last weights")


def of(network: nn.Module) -> Run:
    return Run(network, Inputs(4, None, 1), make_recipe({}), None)


def noise(count: int, run: Run) -> Pixels:
    size = run.inputs.resize or run.inputs.crop or 0
    shape = (count, run.inputs.channels or 3, size, size)
    return np.random.default_rng(5).integers(0, 256, shape).astype(np.uint8)


def by_hand(run: Run, images: Pixels) -> NDArray[np.float64]:
    """Embed images one at a time, all preprocessing written out."""
    found = []
    for image in images:
        size, crop = image.shape[1], run.inputs.crop or image.shape[1]
        begin = (size - crop) // 2
        middle = image[:, begin : begin + crop, begin : begin + crop]
        with torch.no_grad():
            (z,) = run.network(torch.tensor(middle[None] / np.float32(255)))
        found.append(z.double().numpy() / np.sqrt((z.double().numpy() ** 2).sum()))
    return np.stack(found)


KINDS: dict[str, dict[str, Any]] = {
    "grey, cropped": {"resize": 11, "crop": 8},
    "colour": {"channels": 3},
    "cropped alone": {"resize": None, "crop": 8},
    "resnet18": {"model": "resnet18", "resize": 37, "crop": 32, "channels": 3},
}


@ALL
@pytest.mark.parametrize(
    "kind", [kind if kind != "resnet18" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_file_has_the_vectors_of_the_run(kind: str, to: str, tmp_path: Path) -> None:
    run = a_run(**KINDS[kind])
    run.network.train()
    before = {name: value.clone() for name, value in run.network.state_dict().items()}
    done = rm.export(run, tmp_path / "network", to=to)
    assert run.network.training
    assert all(torch.equal(value, before[name]) for name, value in run.network.state_dict().items())
    run.network.eval()
    assert 0 <= done.difference <= done.allowed == ROUNDING
    program, about = read(done.path, to)
    assert about == done.about == describe(run, dim=16)
    images = noise(7, run)
    images[0], images[1] = 0, 255
    wanted = by_hand(run, images)
    assert about["input"]["shape"] == ["batch", *images.shape[1:]]
    for count in (1, 2, 7):
        found = program(images[:count])
        assert found.shape == (count, 16)
        assert found.dtype == np.float32
        assert np.linalg.norm(found - wanted[:count], axis=1).max() < ROUNDING
    parts = [done.path.read_bytes()]
    if to != "onnx":
        with zipfile.ZipFile(done.path) as archive:
            parts = [archive.read(name) for name in archive.namelist()]
    for path in (Path(rm.__file__).parent, Path(torch.__file__).parent, tmp_path):
        assert not any(str(path).encode() in part for part in parts), "paths of this machine"
    assert [path.name for path in tmp_path.iterdir()] == ["network"]


def test_the_metadata_is_that_of_the_run() -> None:
    run = a_run()
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8) % 4
    record = rm.evaluate(run.network, images, labels, attacks=["ES"], steps=1, checks="none")
    about = describe(run, dim=16)
    assert about["sha256"] == record.network.sha256
    assert (about["eps"], about["weights"]) == (0.1, "last weights")
    plain = make_recipe({"model": "/home/me/nets.py:small(depth=2)", "defense": "N/A[S]"})
    about = describe(Run(run.network, run.inputs, plain, None), dim=16)
    assert (about["name"], about["eps"]) == ("nets.py:small(depth=2) N/A[S]", None)


# Networks that are unusual


class Cancels(nn.Module):
    """Adds and takes away what is so large that single precision keeps three digits."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) + 4096) - 4096


class Eigen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.linalg.eigvalsh(x[:, 0] @ x[:, 0].transpose(1, 2))
        return found


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.flatten(1), 0.5)


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) + torch.arange(16) if float(x.min()) > 0.9 else x.flatten(1)


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) + torch.arange(len(x.tolist()))[:, None]


@pytest.mark.parametrize(
    ("network", "to"),
    [(nn.Flatten(), "onnx"), (nn.Flatten(), "torchscript"), (nn.Flatten(), "torch-export"),
     (Eigen(), "torch-export")],
)  # fmt: skip
def test_an_image_without_a_direction_has_none_in_the_file(
    network: nn.Module, to: str, tmp_path: Path
) -> None:
    run = of(network)
    program, _ = read(rm.export(run, tmp_path / "network", to=to).path, to)
    images = noise(3, run)
    assert np.linalg.norm(program(images) - by_hand(run, images), axis=1).max() < ROUNDING
    assert np.isnan(program(np.zeros_like(images))).all()


def test_rounding_of_the_network_s_own_is_allowed(tmp_path: Path) -> None:
    done = rm.export(of(Cancels()), tmp_path / "network.pt2")
    # Numbers at 4096 are 2**-11 apart: of 16 coordinates near 1/4 each is off by less than half of that.
    assert 10 * ROUNDING < done.allowed < 4 * 2**-11


FAR = "is not that of the run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "to", "told"),
    [
        (Eigen(), "onnx", r"aten\._linalg_eigh"),
        (Random(), "onnx", FAR),
        (Random(), "torchscript", FAR),
        (Random(), "torch-export", FAR),
        (Decides(), "torchscript", FAR),
        (Decides(), "onnx", "choose another format"),
        (Fixed(), "torchscript", "let the network take any number of images"),
        (Fixed(), "torch-export", "it fixes the number of images in a batch"),
    ],
)
def test_networks_that_cannot_be_exported(network: nn.Module, to: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "network").write_text("mine")
    with pytest.raises(UserError, match=told) as caught:
        rm.export(of(network), tmp_path / "network", to=to, force=True)
    assert caught.value.parameter == "to"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("network", "mine")]


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"pip install 'robustmetric\[onnx\]'"):
        rm.export(a_run(), tmp_path / "network.onnx")
    rm.export(a_run(), tmp_path / "network.pt2")


# Files


def test_where_a_file_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "network.pt"
    file.write_text("mine")
    for path, force in ((file, False), (tmp_path, True), (tmp_path / "nowhere" / "network.pt", False)):
        with pytest.raises(UserError):
            rm.export(a_run(), path, to="torchscript", force=force)
    for name, to in (("net.xyz", None), ("net", "tflite")):
        with pytest.raises(UserError) as caught:
            rm.export(a_run(), tmp_path / name, to=to)
        assert caught.value.parameter == "to"
    assert file.read_text() == "mine"
    write = exports._WRITERS["torchscript"]

    def beside_another(*given: Any) -> bytes:
        with pytest.raises(InUseError):
            rm.export(a_run(), file, force=True)
        return write(*given)

    monkeypatch.setitem(exports._WRITERS, "torchscript", beside_another)
    assert rm.export(a_run(), file, force=True).to == "torchscript"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("which", ["last", "best", "file"])
def test_the_command_takes_the_weights_that_are_asked_for(which: str, tmp_path: Path) -> None:
    about = '{"images": {"height": 8, "width": 8, "channels": 1}}'
    run = make_run(tmp_path / "[bold]run\x1b[2J", "last", "best", about=about)
    given = run / "best.safetensors" if which == "file" else which
    said = works("export", run, "-o", tmp_path / "net.pt", "--weights", given)
    assert "\x1b" not in said
    program, found = read(tmp_path / "net.pt", "torchscript")
    loaded = rm.load_run(run, given)  # type: ignore[arg-type]
    assert found["sha256"] == loaded.digest
    images = noise(3, loaded)
    assert np.linalg.norm(program(images) - by_hand(loaded, images), axis=1).max() < ROUNDING
    assert refused("export", run, "-o", tmp_path / "net.pt").endswith("(--force)\n")


# The lines of the docs that make pixels of a file

PAGE = Path(__file__).parents[1] / "docs" / "export.md"


@pytest.fixture(scope="module")
def pixels() -> Callable[..., Any]:
    """The function of the page."""
    (block,) = re.findall(r"```python\n(.*?def pixels.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102
    return names["pixels"]  # type: ignore[no-any-return]


def drawn(*shape: int) -> Any:
    return np.random.default_rng(3).integers(0, 256, shape).astype(np.uint8)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


IMAGES: dict[str, Callable[[Path], None]] = {
    "colour.jpg": lambda file: Image.fromarray(drawn(30, 41, 3)).save(file),
    "small.png": lambda file: Image.fromarray(drawn(5, 3, 3)).save(file),
    "grey.png": lambda file: Image.fromarray(drawn(30, 41)).save(file),
    "turned.jpg": lambda file: Image.fromarray(drawn(30, 41, 3)).save(file, exif=turned(6)),
    "transparent.png": lambda file: Image.fromarray(drawn(30, 41, 4)).save(file),
    "palette and transparent.png": lambda file: (
        Image.fromarray(drawn(30, 41, 3)).quantize(16).save(file, transparency=3)
    ),
    "print.jpg": lambda file: Image.fromarray(drawn(30, 41, 4), "CMYK").save(file),
}


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", IMAGES)
def test_the_lines_of_the_docs_make_the_pixels_of_the_run(
    name: str, channels: Any, pixels: Callable[..., Any], tmp_path: Path
) -> None:
    IMAGES[name](tmp_path / name)
    mode = "RGB" if channels == 3 else "L"
    for fit in ("squeeze", "crop", "pad"):
        fitted = torch.from_numpy(pixels(tmp_path / name, 16, mode, fit).copy()).float() / 255
        assert torch.equal(fitted, Inputs(16, None, channels, fit).tensor(tmp_path / name))
    inputs = Inputs(16, 11, channels)
    made = Product(nn.Flatten(), inputs)(torch.from_numpy(pixels(tmp_path / name, 16, mode).copy()))
    wanted = F.normalize(inputs.tensor(tmp_path / name).flatten(1))
    assert float((made - wanted).norm()) < ROUNDING, "cropped too"
