"""Exported files: the same vectors as the run's, read without this package's help, or no file at all."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.data import Inputs
from robustmetric.errors import UserError
from robustmetric.exports import FORMATS, Product, describe, formats
from robustmetric.sphere import ROUNDING
from robustmetric.training import Run
from robustmetric.training.recipe import make_recipe

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


def of(network: nn.Module, size: int = 4) -> Run:
    return Run(network, Inputs(size, None, 1), make_recipe({}), None)


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


KINDS = {
    "grey": {},
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
    run = a_run(**KINDS[kind])  # type: ignore[arg-type]
    done = rm.export(run, tmp_path / "network", to=to)
    assert (done.path, done.to) == (tmp_path / "network", to)
    assert 0 <= done.difference <= done.allowed == ROUNDING
    program, about = read(done.path, to)
    assert about == done.about == describe(run, dim=16)
    images = noise(7, run)
    images[0], images[1] = 0, 255
    wanted = by_hand(run, images)
    assert about["input"]["shape"] == ["batch", *images.shape[1:]]
    # As far as the package itself takes embeddings for those of one image.
    for count in (1, 2, 7):
        found = program(images[:count])
        assert found.shape == (count, 16)
        assert found.dtype == np.float32
        assert np.linalg.norm(found - wanted[:count], axis=1).max() < ROUNDING
    assert [path.name for path in tmp_path.iterdir()] == ["network"]


def test_what_stands_in_a_file() -> None:
    run = a_run("resnet18", 256, 224, 3)
    about = describe(run, dim=16)
    assert about["name"] == "resnet18 HM[S,LGA]&ICS"
    assert (about["defense"], about["eps"], about["weights"]) == ("HM[S,LGA]&ICS", 0.1, "last weights")
    assert (about["resize"], about["fit"], about["crop"]) == (256, "squeeze", 224)
    assert (about["channels"], about["colours"]) == (3, "RGB")
    assert about["before"][2:] == ["convert to RGB", "resize to 256 x 256 as Pillow does with BILINEAR"]
    assert about["input"] == {"name": "images", "type": "uint8", "shape": ["batch", 3, 256, 256]}
    assert about["output"] == {"name": "embeddings", "type": "float32", "shape": ["batch", 16], "length": 1}
    padded = describe(replace(run, inputs=replace(run.inputs, fit="pad")), dim=16)
    assert padded["fit"] == "pad"
    assert "ImageOps.pad" in padded["before"][-1]
    assert "256 x 256" in padded["before"][-1]
    alone = describe(a_run(resize=None, crop=8), dim=16)
    assert alone["before"][2:] == ["convert to grey as Pillow does with L", "take the middle 8 x 8"]
    recipe = make_recipe({"model": "/home/me/nets.py:small(depth=2)", "defense": "N/A[S]"})
    plain = Run(run.network, run.inputs, recipe, None)
    assert describe(plain, dim=16)["name"] == "nets.py:small(depth=2) N/A[S]"
    assert describe(plain, dim=16)["eps"] is None


def test_the_digest_is_that_of_records() -> None:
    run = a_run()
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8) % 4
    record = rm.evaluate(run.network, images, labels, attacks=["ES"], steps=1, checks="none")
    assert describe(run, dim=16)["sha256"] == record.network.sha256


def test_inputs_without_a_size_are_refused(tmp_path: Path) -> None:
    run = Run(nn.Flatten(), Inputs(), make_recipe({}), None)
    with pytest.raises(UserError, match="says nothing of the size of images: give resize or crop"):
        rm.export(run, tmp_path / "network.onnx")


@pytest.mark.slow
@ALL
def test_what_an_export_leaves(to: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed, the network is as it was, and no path of this machine is in the file."""
    run = a_run()
    run.network.train()
    before = {name: value.clone() for name, value in run.network.state_dict().items()}
    content = rm.export(run, tmp_path / "network", to=to).path.read_bytes()
    assert capfd.readouterr() == ("", "")
    assert run.network.training
    assert all(p.requires_grad and p.grad is None for p in run.network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in run.network.state_dict().items())
    parts = [content]
    if to != "onnx":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            parts = [archive.read(name) for name in archive.namelist()]
    for path in (Path(rm.__file__).parent, Path(torch.__file__).parent, Path(__file__).parent, tmp_path):
        assert not any(str(path).encode() in part for part in parts)
    assert not any(b"The largest of a window is the same" in part for part in parts)


@pytest.mark.slow
def test_an_onnx_file_names_its_axes_and_holds_all_weights(tmp_path: Path) -> None:
    run = a_run()
    file = rm.export(run, tmp_path / "network.onnx").path
    model = onnx.load(file, load_external_data=False)
    onnx.checker.check_model(model, full_check=True)
    for value, wanted in ((model.graph.input[0], ["batch", 1, 8, 8]), (model.graph.output[0], ["batch", 16])):
        assert [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] == wanted
    assert all(not tensor.external_data for tensor in model.graph.initializer)
    assert rm.export(run, tmp_path / "again.onnx").path.read_bytes() == file.read_bytes()


# Networks that are unusual


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of what was not rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(8 * x) / 8

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = Straight.apply(x.flatten(1))  # type: ignore[no-untyped-call]
        return z


class Cancels(nn.Module):
    """Adds and takes away what is so large that single precision keeps three digits."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) + 4096) - 4096


@pytest.mark.parametrize(
    ("network", "to"),
    [
        (Rounded(), "onnx"),
        (Rounded(), "exported"),
        (nn.Flatten(), "onnx"),
        (nn.Flatten(), "torchscript"),
        (nn.Flatten(), "exported"),
    ],
)
def test_networks_that_can_be_exported(network: nn.Module, to: str, tmp_path: Path) -> None:
    """Black has no direction, neither in the run nor in the file."""
    run = of(network)
    program, _ = read(rm.export(run, tmp_path / "network", to=to).path, to)
    images = noise(3, run)
    assert np.linalg.norm(program(images) - by_hand(run, images), axis=1).max() < ROUNDING
    assert np.isnan(program(np.zeros_like(images))).all()


@pytest.mark.parametrize("to", ["torchscript", "exported"])
def test_rounding_of_the_network_s_own_is_allowed(to: str, tmp_path: Path) -> None:
    done = rm.export(of(Cancels()), tmp_path / "network", to=to)
    # Numbers at 4096 are 2**-11 apart: of 16 coordinates near 1/4 each is off by less than half of that.
    assert 10 * ROUNDING < done.allowed < 4 * 2**-11


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).to(torch.bfloat16)


@pytest.mark.slow
@ALL
def test_vectors_are_normalised_in_single_precision(to: str, tmp_path: Path) -> None:
    program, _ = read(rm.export(of(Half()), tmp_path / "network", to=to).path, to)
    lengths = np.linalg.norm(program(noise(5, of(Half()))).astype(np.float64), axis=1)
    assert np.abs(lengths - 1).max() < 16 * np.finfo(np.float32).eps


# Networks that cannot be exported


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


class Split(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x.tolist()), -1)


FAR = r"the network in the file is not that of the run: its embeddings differ by up to [\d.]+, and rounding "
BATCH = "no file was left: let the network take any number of images"
FOLLOW = r"torch\.export cannot follow the network \("


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "to", "told"),
    [
        (
            Eigen(),
            "onnx",
            r"ONNX has no operator for aten\._linalg_eigh, which the network uses: export it to torchscript "
            "or exported, or change the network",
        ),
        (Random(), "onnx", FAR),
        (Random(), "torchscript", FAR),
        (Random(), "exported", FAR),
        (Decides(), "torchscript", FAR),
        (Decides(), "exported", FOLLOW + ".*, or export it to torchscript"),
        (Decides(), "onnx", FOLLOW),
        (
            Rounded(),
            "torchscript",
            r"TorchScript cannot follow the network \(Could not export Python function call 'Straight'.*: "
            "export it to exported",
        ),
        (
            Fixed(),
            "torchscript",
            r"fails on 1 images|returns \(2, 16\) for 1 images, not \(1, 16\); " + BATCH,
        ),
        (Fixed(), "exported", FOLLOW + r"it fixes the number of images in a batch\)"),
        (Split(), "torchscript", r"the network in the file fails on 1 images|returns \(2, 8\) for 1 images"),
        (Split(), "onnx", FOLLOW + r"it fixes the number of images in a batch\)"),
    ],
)
def test_networks_that_cannot_be_exported(network: nn.Module, to: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told) as caught:
        rm.export(of(network), tmp_path / "network", to=to)
    assert caught.value.parameter == "to"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["torchscript", "exported"])
def test_what_onnx_does_not_have_the_others_do(to: str, tmp_path: Path) -> None:
    run = of(Eigen())
    program, _ = read(rm.export(run, tmp_path / "network", to=to).path, to)
    images = noise(3, run)
    # Not of the smallest eigenvalues, but of unit vectors of all: as for any other network.
    assert np.linalg.norm(program(images) - by_hand(run, images), axis=1).max() < ROUNDING


def test_a_network_that_is_too_large_for_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LARGEST", 1000)
    with pytest.raises(
        UserError, match=r"has 0\.0 GB of weights, and an ONNX file holds at most 2 GB: export it to"
    ):
        rm.export(a_run(), tmp_path / "network.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_package_that_is_missing(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    told = (
        r"an export to onnx needs a package that is not there \(.*\): pip install 'robustmetric\[onnx\]', or"
    )
    with pytest.raises(UserError, match=told):
        rm.export(a_run(), tmp_path / "network.onnx")
    rm.export(a_run(), tmp_path / "network.pt2", to="exported")


# Files


def test_a_format_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown format 'onx' \(did you mean 'onnx'\?\)") as caught:
        rm.export(a_run(), tmp_path / "network", to="onx")
    assert caught.value.parameter == "to"


def test_where_a_file_may_go(tmp_path: Path) -> None:
    file = tmp_path / "network.pt"
    file.write_text("mine")
    with pytest.raises(
        UserError, match=r"network\.pt is there already: give another file, or replace it by --f"
    ):
        rm.export(a_run(), file, to="torchscript")
    assert file.read_text() == "mine"
    with pytest.raises(UserError, match="is a folder: give the name of a file"):
        rm.export(a_run(), tmp_path, to="torchscript", force=True)
    with pytest.raises(
        FileNotFoundError, match=r"there is no folder .*nowhere to write network\.pt in; create"
    ):
        rm.export(a_run(), tmp_path / "nowhere" / "network.pt", to="torchscript")
    rm.export(a_run(), file, to="torchscript", force=True)
    assert read(file, "torchscript")[1]["dim"] == 16
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
@pytest.mark.parametrize(("to", "off"), [("onnx", 1e-3), ("torchscript", torch.nan), ("exported", 1e-3)])
def test_a_file_that_differs_does_not_stay(
    to: str, off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = type(FORMATS[to]).content

    def spoilt(self: Any, network: nn.Module, example: Tensor, about: dict[str, Any]) -> bytes:
        with torch.no_grad():
            list(network.parameters())[-1][3] += off
        return content(self, network, example, about)

    monkeypatch.setattr(type(FORMATS[to]), "content", spoilt)
    (tmp_path / "network").write_text("mine")
    told = r"is not that of the run: its embeddings differ by up to .*; no file was left: give another format"
    with pytest.raises(UserError, match=told):
        rm.export(a_run(), tmp_path / "network", to=to, force=True)
    assert (tmp_path / "network").read_text() == "mine"
    (tmp_path / "network").unlink()
    with pytest.raises(UserError, match=told):
        rm.export(a_run(), tmp_path / "network", to=to)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("robustmetric.files.os.fsync", full)
    told = r"network cannot be written \(No space left on device\): make room; then run it again"
    with pytest.raises(UserError, match=told):
        rm.export(a_run(), tmp_path / "network", to="torchscript")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("räume [b] \x1b$(x) 'y'.bin", "torchscript"),
        ("no suffix", "torchscript"),
        (".hidden", "exported"),
        *((os.fsdecode(b"\xff\xfe"), to) for to in FORMATS),
    ],
)
def test_strange_names_of_files(name: str, to: str, tmp_path: Path) -> None:
    try:
        (tmp_path / name).touch()
        (tmp_path / name).unlink()
    except OSError:
        pytest.skip("the file system has no such names")
    done = rm.export(of(nn.Flatten()), tmp_path / name, to=to)
    assert list(tmp_path.iterdir()) == [done.path]
    assert read(done.path, to)[0](noise(2, of(nn.Flatten()))).shape == (2, 16)


ALONE = """
import json, sys
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
about = json.loads(session.get_modelmeta().custom_metadata_map["robustmetric"])
images = np.full((2, *about["input"]["shape"][1:]), 7, np.uint8)
(z,) = session.run(["embeddings"], {"images": images})
assert not {"torch", "robustmetric"} & sys.modules.keys()
print(json.dumps(z.tolist()))
"""


@pytest.mark.slow
def test_a_program_without_torch_reads_it(tmp_path: Path) -> None:
    run = a_run()
    file = rm.export(run, tmp_path / "network.onnx").path
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", ALONE, str(file)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    wanted = by_hand(run, np.full((2, 1, 8, 8), 7, np.uint8))
    assert np.linalg.norm(np.array(json.loads(done.stdout)) - wanted, axis=1).max() < ROUNDING


def test_the_middle_is_that_of_the_run() -> None:
    """Odd rests: the evaluation rounds the beginning down."""
    product = Product(nn.Flatten(), Inputs(7, 4, 1))
    image = torch.arange(49, dtype=torch.uint8).view(1, 1, 7, 7)
    z = product(image)[0] * (image[0, 0, 1:5, 1:5].double().norm())
    assert z.round().int().tolist() == image[0, 0, 1:5, 1:5].flatten().tolist()


def test_warnings_of_others_are_heard() -> None:
    """What torch says of its future is left out by its words alone."""
    with formats._quiet(), pytest.warns(DeprecationWarning, match="something else"):
        warnings.warn("something else is deprecated", DeprecationWarning, stacklevel=1)


def test_a_name_of_another_format_is_refused(tmp_path: Path) -> None:
    told = (
        r"net\.PT2 is a name for the format exported, and onnx was asked for: give --to exported, or another"
    )
    with pytest.raises(UserError, match=told):
        rm.export(a_run(), tmp_path / "net.PT2", to="onnx")
    assert not any(tmp_path.iterdir())
    assert rm.export(a_run(), tmp_path / "net.PT2").to == "exported"
