"""Read and write a network's weights; a file is data, nothing in it is ever executed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from robustmetric.files import DamagedError, write_atomically
from robustmetric.validate import UserError

_DIGEST = "sha256"  # of the tensors, in a file's metadata


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Load weights from `path` into a `model` and return the names of the parameters that were not loaded.

    The file is ``.safetensors``, or a ``torch.save`` of a state dict (alone, or under ``"state_dict"``).
    Every parameter must be there with its shape, with one exception: a last layer with another number of
    outputs, such as an ImageNet classifier's, is left out and the model keeps its own. That is the only
    reason for a name to be returned. Where ``DataParallel`` put ``module.`` before every name, the names
    behind it count if they are the model's. A file that does not fit raises and leaves the model as it was.

    >>> import tempfile
    >>> from robustmetric.models import C2F2
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "c2f2.safetensors")
    ...     save_weights(C2F2(), file)
    ...     load_weights(C2F2(), file)
    []
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no weights file {path}")
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a file of weights; give a file in it")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is an empty file, without weights; copy it again or save them again")
    own = model.state_dict()
    # Files older than PyTorch 0.4.1 do not have this counter, and evaluation does not use it.
    optional = {name for name in own if name.endswith("num_batches_tracked")}
    found = _unwrapped(read_tensors(path), own.keys() - optional, own.keys())

    kept = _other_head(model, own, found)
    found = {name: value for name, value in found.items() if name not in kept}

    problems = []
    if missing := [name for name in own if name not in found and name not in optional and name not in kept]:
        problems.append(f"missing from the file: {', '.join(missing)}")
    if extra := [name for name in found if name not in own]:
        problems.append(f"not in the model: {', '.join(extra)}")
    forms = {name: (_form(found[name]), _form(own[name])) for name in found if name in own}
    if wrong := [
        f"{name} is {its}, the model has {ours}" for name, (its, ours) in forms.items() if its != ours
    ]:
        problems.append(f"wrong shape: {'; '.join(wrong)}")
    if problems:
        raise UserError(
            f"{path} does not fit this {type(model).__name__}: {' | '.join(problems)}"
            " | create the model with the name and options that the weights were saved with"
        )
    model.load_state_dict({**own, **found})
    return kept


def save_weights(model: nn.Module | Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Write the state dict of a `model`, or one, to `path` as ``.safetensors``, complete or not at all.

    A digest of the tensors stands in the file's metadata, and is checked when it is loaded.

    >>> save_weights(nn.Linear(2, 2), "model.pt")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: model.pt: weights are saved as .safetensors only; use a name that ends in ...
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(
            f"{path}: weights are saved as .safetensors only; use a name that ends in .safetensors"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save {path.name} in; create it first")
    # Copies, because safetensors refuses tensors that share memory or are not contiguous.
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in (model.state_dict() if isinstance(model, nn.Module) else model).items()
    }
    content = _with_digest(save(tensors, metadata={"format": "pt"}), digest_of(tensors))
    # Not save_file, which makes the file readable for its owner only.
    write_atomically(path, lambda file: file.write(content))


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a sha256, in hexadecimal, of names, shapes, types and bytes of `tensors`, whatever their order.

    >>> one, other = torch.zeros(2), torch.ones(3)
    >>> digest_of({"a": one, "b": other}) == digest_of({"b": other, "a": one}) != digest_of({"a": one})
    True
    """
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def is_oversized(path: Path) -> bool:
    """Return whether the file `path` is an archive that unpacks to more than itself; torch.save writes none.

    >>> is_oversized(Path(__file__))  # no archive
    False
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # as torch tells archives from its older files
            return False
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
    packed = any(part.compress_type != zipfile.ZIP_STORED for part in parts)
    return packed or sum(part.file_size for part in parts) > path.stat().st_size


def _with_digest(content: bytes, digest: str) -> bytes:
    """Put a digest into the metadata of a file of tensors."""
    # By hand: safetensors writes several entries of metadata in an order of chance.
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"][_DIGEST] = digest
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def _safetensors(path: Path) -> dict[str, Tensor]:
    """Read a file of tensors; one that has a digest must match it."""
    with safe_open(path, framework="pt") as file:
        digest = (file.metadata() or {}).get(_DIGEST)
    tensors = load_file(path)
    if digest is not None and digest != digest_of(tensors):
        raise DamagedError(
            f"{path} is damaged: its tensors do not match the digest in it; give a copy of it, or "
            "other weights, such as the last of its run"
        )
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of the file `path` by name; a UserError says why it is not a file of weights.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights({"scale": torch.ones(3)}, Path(folder, "a.safetensors"))
    ...     read_tensors(Path(folder, "a.safetensors"))
    {'scale': tensor([1., 1., 1.])}
    """
    content = _read(path)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}; weights are a dict of names to tensors")
    for name, value in content.items():
        # Sparse and meta tensors could not be copied, and would fail when half of the model is loaded.
        dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        if not dense or not isinstance(name, str):
            raise UserError(
                f"{path} is not plain weights: its entry {name!r} ({type(value).__name__}) is not a dense"
                " tensor with a name; save the model's state_dict() alone"
            )
    return dict(content)


def _read(path: Path) -> object:
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path)
        if is_oversized(path):
            raise UserError(
                f"{path} is not plain weights: it was refused, for it unpacks to more than the file itself;"
                " save them with torch.save or as .safetensors where the file comes from"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about odd pickles before it refuses them
            return torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except pickle.UnpicklingError:
        # `from None`: torch's own text recommends loading the file unsafely.
        raise UserError(
            f"{path} is not plain weights: it was refused, and nothing in it was run."
            " Save the weights as .safetensors where the file comes from"
        ) from None
    except Exception as error:  # the parsers raise nearly anything on a damaged file
        reason = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
        raise UserError(
            f"{path} cannot be read as weights; it is damaged or something else ({reason})"
        ) from error


def _unwrapped(
    found: dict[str, Tensor], needed: AbstractSet[str], known: AbstractSet[str]
) -> dict[str, Tensor]:
    """Take off the prefix that DataParallel puts before every name, if all names then fit the model's."""
    prefix = "module."
    bare = {name.removeprefix(prefix): value for name, value in found.items()}
    wrapped = all(name.startswith(prefix) for name in found)
    return bare if wrapped and needed <= bare.keys() <= known else found


def _other_head(model: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the model's last layer if the file's has another number of outputs, else none."""
    # torchvision calls the layer fc; every network of timm says which one it is.
    classifier: Any = getattr(model, "get_classifier", None)
    layer = classifier() if classifier else getattr(model, "fc", None)
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if module is layer and weight in own and weight in found:
            its, ours = found[weight].shape, own[weight].shape
            if its[1:] == ours[1:] and its[:1] != ours[:1]:
                return [n for n in (weight, f"{name}.bias") if n in own]
    return []


def _form(tensor: Tensor) -> str:
    """Return the shape, and the type unless it is floating point: float16 may be loaded, int8 may not."""
    shape = str(tuple(tensor.shape))
    return shape if tensor.is_floating_point() else f"{shape} of {tensor.dtype}"
