from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from robustmetric.errors import UserError
from robustmetric.files import DamagedError
from robustmetric.models import C2F2, load_weights, resnet18, save_weights
from robustmetric.models.weights import digest_of
from robustmetric.training.checkpoint import load_checkpoint


def small() -> C2F2:
    return C2F2(size=4, dim=8)


def state(net: nn.Module) -> dict[str, Tensor]:
    """Copies of a network's tensors in the order that safetensors' own functions want."""
    return {n: v.clone(memory_format=torch.contiguous_format) for n, v in net.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def write(content: object, path: Path) -> Path:
    torch.save(content, path)
    return path


def refuses(net: nn.Module, path: Path, *messages: str) -> None:
    """Loading fails with a ValueError that names the file and has the messages; the model is as before."""
    before = state(net)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load_weights(net, path)
    for message in messages:
        assert message in str(caught.value)
    assert equal(before, state(net))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_files_of_torch_save(tmp_path: Path, zipped: bool, nested: bool) -> None:
    source, target = small(), small()
    content: Any = {"state_dict": source.state_dict(), "epoch": 3} if nested else source.state_dict()
    torch.save(content, tmp_path / "net.pth", _use_new_zipfile_serialization=zipped)
    assert load_weights(target, tmp_path / "net.pth") == []
    assert equal(state(source), state(target))


def test_files_of_others_are_loaded(tmp_path: Path) -> None:
    """In half precision, without a digest, and older than BatchNorm's counter of batches."""
    source = resnet18(dim=8)
    content = {n: v.half() for n, v in state(source).items() if not n.endswith("num_batches_tracked")}
    for number, metadata in enumerate((None, {"format": "pt"}, {"made": "elsewhere"})):
        target, file = resnet18(dim=8), tmp_path / f"{number}.safetensors"
        save_file(content, file, metadata=metadata)
        assert load_weights(target, str(file)) == []
        assert target.fc.weight.dtype == torch.float32
        assert torch.equal(target.fc.weight, source.fc.weight.half().float())


def test_everything_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    net = small()
    content = state(net)
    del content["fc1.bias"], content["conv2.weight"]
    content["head.weight"] = torch.zeros(1)
    content["conv1.weight"] = torch.zeros(32, 3, 5, 5)
    content["fc2.bias"] = torch.zeros(9)
    content["conv1.bias"] = torch.zeros(32, dtype=torch.int8)
    refuses(
        net,
        write(content, tmp_path / "other.pt"),
        "does not fit this C2F2",
        "missing from the file: conv2.weight, fc1.bias",
        "not in the model: head.weight",
        "conv1.weight is (32, 3, 5, 5), the model has (32, 1, 5, 5)",
        "fc2.bias is (9,), the model has (8,)",
        "conv1.bias is (32,) of torch.int8, the model has (32,)",
    )


def test_weights_of_a_network_in_data_parallel(tmp_path: Path) -> None:
    source, target, other = resnet18(dim=8), resnet18(dim=8), resnet18(dim=4)
    content = {f"module.{name}": value for name, value in source.state_dict().items()}
    path = write({"state_dict": content}, tmp_path / "net.pth")
    assert load_weights(target, path) == []
    assert equal(state(source), state(target))
    assert load_weights(other, path) == ["fc.weight", "fc.bias"]
    assert torch.equal(other.conv1.weight, source.conv1.weight)


class Own(nn.Module):
    """A backbone with BatchNorm, and a head of two layers by any name."""

    def __init__(self, head: str, width: int, middle: int = 6) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.add_module(head, nn.Sequential(nn.Linear(6, middle), nn.Linear(middle, width)))


@pytest.mark.parametrize(
    ("theirs", "ours", "new", "left"),
    [
        (Own("classifier", 9), Own("embed", 3), "embed", "classifier"),
        (Own("embed", 9), Own("embed", 3), "embed.1", "embed.1"),
        (Own("embed", 3, middle=5), Own("embed", 3), "embed", "embed"),  # one bias has the right shape
        (Own("x", 3).backbone, nn.Sequential(*Own("x", 3).backbone, nn.Linear(6, 2)), "2", None),
    ],
)
def test_a_backbone_is_loaded_under_a_new_head(
    theirs: nn.Module, ours: nn.Module, new: str, left: str | None, tmp_path: Path
) -> None:
    save_weights(theirs, tmp_path / "their.safetensors")
    said: list[str] = []
    before, given = state(ours), state(theirs)
    kept = load_weights(ours, tmp_path / "their.safetensors", report=said.append)
    assert kept == [name for name in before if name.startswith(f"{new}.")]
    for name, value in state(ours).items():
        assert torch.equal(value, before[name] if name in kept else given[name])
    rest = sorted(name for name in given if left is not None and name.startswith(f"{left}."))
    told = f"new in the network: {', '.join(kept)}; left over in the file: {', '.join(rest) or 'none'}"
    assert said == [
        f"{tmp_path / 'their.safetensors'}: {len(before) - len(kept)} of {len(before)} tensors loaded; {told}"
    ]


class Malicious:
    """A pickle of it creates a file as soon as it is loaded without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["torch", "nested", "pickle", "old pickle"])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, kind: str) -> None:
    trace, path = tmp_path / "trace", tmp_path / "evil.pt"
    net = small()
    content: dict[str, Any] = {**net.state_dict(), "fc1.weight": Malicious(trace)}
    if "pickle" in kind:
        path.write_bytes(pickle.dumps(content, protocol=2 if kind == "old pickle" else 4))
    else:
        torch.save({"state_dict": content} if kind == "nested" else content, path)
    refuses(net, path, "is not plain weights", "it was refused, and nothing in it was run", ".safetensors")
    with pytest.raises(UserError) as caught:
        load_weights(net, path)
    assert caught.value.__suppress_context__, "torch's own text recommends loading the file unsafely"
    assert not trace.exists()
    if kind == "torch":
        torch.load(path, weights_only=False)
        assert trace.exists(), "it would have run"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "holds a list; weights are a dict of names to tensors"),
        ({"epoch": 3}, "its entry 'epoch' (int) is not a dense tensor with a name"),
        ({3: torch.zeros(1)}, "its entry 3 (Tensor)"),
        ({"a": torch.zeros(2).to_sparse()}, "its entry 'a' (Tensor)"),
        ({}, "missing from the file: conv1.weight, conv1.bias"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: object, message: str) -> None:
    refuses(small(), write(content, tmp_path / "other.pt"), message)


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt"])
def test_a_file_that_is_damaged_or_something_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    (save_weights if name != "net.pt" else torch.save)(small().state_dict(), path)
    whole = path.read_bytes()
    parts = [whole[: int(part * len(whole))] for part in (0, 0.001, 0.5, 0.999)]
    for content in (*parts, b"hello world", b"\x89PNG\r\n", bytes(100), b"{" * 9000):
        path.write_bytes(content)
        refuses(small(), path)


@pytest.mark.parametrize("other", ["name", "shape of one that is not the head", "only counters fit"])
def test_weights_without_a_backbone_in_common_are_refused(tmp_path: Path, other: str) -> None:
    net, file = resnet18(dim=8), tmp_path / "their.pth"
    content = state(net)
    if other == "name":
        content = {f"encoder.{name}": value for name, value in content.items()}
    elif other == "only counters fit":
        content = {n: torch.zeros(3) if v.ndim else v for n, v in content.items()}
    else:
        content["layer1.0.conv2.weight"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"tensors fit \|") as caught:
        load_weights(net, write(content, file), report=pytest.fail)
    assert len(str(caught.value)) < 1000, "a few names of each kind, and a count"


def test_shared_and_strided_parameters_are_saved(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    with torch.no_grad():
        net[1].bias = nn.Parameter(torch.arange(6.0)[::2])
    path = tmp_path / "tied.safetensors"
    save_weights(net, path)
    assert equal(load_file(path), state(net))
    assert load_weights(net, path) == []
    assert net[1].weight is net[0].weight


def test_only_safetensors_is_written(tmp_path: Path) -> None:
    for name in ("net.pt", "net", "net.safetensors.bak"):
        with pytest.raises(ValueError, match=r"use a name that ends in .safetensors"):
            save_weights(small(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_no_bit_of_weights_is_flipped_unnoticed(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    path = tmp_path / "best.safetensors"
    save_weights(net, path)
    content = path.read_bytes()
    tensors = 8 + int.from_bytes(content[:8], "little")
    loaded = []
    for bit in range(0, 8 * len(content), 5):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        if bit >= 8 * tensors:
            refuses(net, path, "is damaged", "give a copy")
            continue
        before = state(net)
        try:
            load_weights(net, path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            loaded.append(bit)
        assert equal(before, state(net)), "what loads is what was saved"
    # Such as white space, or the name of the digest itself.
    assert len(loaded) < tensors // 4


def packed(source: Path, target: Path) -> None:
    """Write the archive anew, compressed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def overlapping(source: Path, target: Path) -> None:
    """Write the archive anew with a directory that names its largest part a second time."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        large = copy.copy(max(new.infolist(), key=lambda part: part.file_size))
        large.filename += "0"
        new.filelist.append(large)


@pytest.mark.parametrize("make", [packed, overlapping])
def test_an_archive_that_unpacks_to_more_is_not_unpacked(
    tmp_path: Path, make: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb, checkpoint = tmp_path / "bomb.pt", tmp_path / "last.ckpt"
    make(write({"zeros": torch.zeros(1 << 18)}, tmp_path / "whole.pt"), bomb)
    shutil.copy(bomb, checkpoint)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it is unpacked"))
    refuses(small(), bomb, "it unpacks to more than the file itself", ".safetensors")
    with pytest.raises(DamagedError, match=r"last\.ckpt .* begin a new run"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_tensors_of_every_type_have_digests(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: torch.ones(shape).to(dtype) for name, shape in (("a", (2, 3)), ("b", ()), ("c", (0, 2)))}
    save_weights(tensors, tmp_path / "net.safetensors")
    assert equal(load_file(tmp_path / "net.safetensors"), tensors)
    other = {**tensors, "a": torch.zeros(2, 3).to(dtype)}
    assert digest_of(other) != digest_of(tensors) == digest_of(load_file(tmp_path / "net.safetensors"))
