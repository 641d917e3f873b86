"""Read and write a network's weights; a file is data, nothing in it is ever executed."""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from robustmetric.errors import UserError, shorten
from robustmetric.files import DamagedError, write_atomically

_COUNTER = "num_batches_tracked"
_DIGEST = "sha256"  # of the tensors, in a file's metadata


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], *, report: Callable[[str], None] | None = None
) -> list[str]:
    """Load weights from `path` into a `model` and return the names of the parameters that were not loaded.

    The file is ``.safetensors``, or a ``torch.save`` of a state dict (alone, or under ``"state_dict"``).
    Every parameter must be there with its shape, with one exception: a last layer with another number of
    outputs, such as an ImageNet classifier's, is left out and the model keeps its own. With a `report`, which
    is called with what was not loaded, the weights of a backbone are enough: names may be missing or left
    over, and layers after the last one that fits may have other shapes. Where ``DataParallel`` put
    ``module.`` before every name, the names after it count. A file that does not fit raises and leaves the
    model as it was.
    """
    path = Path(path)
    own = model.state_dict()
    found = _unwrapped(read_tensors(path), own.keys())
    wrong = [name for name in own if name in found and _form(found[name]) != _form(own[name])]
    # Files older than PyTorch 0.4.1 do not have this counter, and evaluation does not use it.
    missing = [name for name in own if name not in found and not name.endswith(_COUNTER)]
    kept, left = _other_head(model, own, found), set[str]()
    if report is not None:
        kept, left = _partial(own, found, {*wrong}, {*missing, *kept})
    problems = {
        "missing from the file": [name for name in missing if name not in kept],
        "not in the model": [name for name in found if name not in own and name not in left],
        "wrong shape": [
            f"{name} is {_form(found[name])}, the model has {_form(own[name])}"
            for name in wrong
            if name not in kept
        ],
    }
    fits = [name for name in own if name in found and name not in wrong]
    if any(problems.values()):
        told = (f"{what}: {shorten(names)}" for what, names in problems.items() if names)
        raise UserError(
            f"{path} does not fit this {type(model).__name__}: {len(fits)} of {len(own)} tensors fit | "
            f"{' | '.join(told)} | create the model with the name and options that the weights were saved "
            "with"
        )
    taken = {name: found[name] for name in fits if name not in kept}
    model.load_state_dict({**own, **taken})
    new = [name for name in own if name in kept]
    if report is not None and (new or left):
        report(
            f"{path}: {len(taken)} of {len(own)} tensors loaded; new in the network: "
            f"{shorten(new) or 'none'}; left over in the file: {shorten(sorted(left)) or 'none'}"
        )
    return new


def save_weights(model: nn.Module | Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Write the state dict of a `model`, or one, to `path` as ``.safetensors``, complete or not at all.

    A digest of the tensors stands in the file's metadata, and is checked when it is loaded.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: weights are saved as .safetensors; use a name that ends in .safetensors")
    # Copies, because safetensors refuses tensors that share memory or are not contiguous.
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in (model.state_dict() if isinstance(model, nn.Module) else model).items()
    }
    # One entry alone: safetensors writes several in an order of chance.
    content = save(tensors, metadata={_DIGEST: digest_of(tensors)})
    # Not save_file, which makes the file readable for its owner only.
    write_atomically(path, lambda file: file.write(content))


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a sha256, in hexadecimal, of names, shapes, types and bytes of `tensors`, in any order."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def is_oversized(path: Path) -> bool:
    """Return whether `path` is an archive that unpacks to more than itself; torch.save writes none."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # as torch tells archives from its older files
            return False
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
    packed = any(part.compress_type != zipfile.ZIP_STORED for part in parts)
    return packed or sum(part.file_size for part in parts) > path.stat().st_size


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of the file `path` by name; a UserError says why it is not a file of weights."""
    if not path.exists():
        raise FileNotFoundError(f"there is no weights file {path}")
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
            with safe_open(path, framework="pt") as file:
                digest = (file.metadata() or {}).get(_DIGEST)
            tensors = load_file(path)
            if digest not in (None, digest_of(tensors)):
                raise DamagedError(
                    f"{path} is damaged: its tensors do not match the digest in it; give a copy of it, or "
                    "other weights, such as the last of its run"
                )
            return tensors
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


def _unwrapped(found: dict[str, Tensor], own: AbstractSet[str]) -> dict[str, Tensor]:
    """Take off the prefix that DataParallel puts before every name, if the model's `own` have none."""
    prefix = "module."
    bare = {name.removeprefix(prefix): value for name, value in found.items()}
    wrapped = all(name.startswith(prefix) for name in found)
    return bare if wrapped and own & bare.keys() and not own & found.keys() else found


def _partial(
    own: Mapping[str, Tensor], found: Mapping[str, Tensor], wrong: set[str], kept: set[str]
) -> tuple[set[str], set[str]]:
    """Return what the model keeps of its own, and what is left over in the file; nothing if none of it fits.

    Of the `wrong` shapes, those of layers after all that fit are no mistake.
    """

    def layer(name: str) -> str:
        return name.rpartition(".")[0]

    others = {layer(name) for name in wrong}
    order = [*own]
    fits = [n for n in own if n in found and layer(n) not in others and not n.endswith(_COUNTER)]
    if not fits:
        return set(), set()
    after = order[order.index(fits[-1]) :]
    kept = kept | {name for name in after if layer(name) in others}
    return kept, {name for name in found if name not in own or name in kept}


def _other_head(model: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the model's last layer if the file's has another number of outputs, else none."""
    # torchvision calls the layer fc; every network of timm says which one it is.
    classifier: Any = getattr(model, "get_classifier", None)
    layer = classifier() if classifier else getattr(model, "fc", None)
    name = next((f"{name}.weight" for name, module in model.named_modules() if module is layer), "")
    if name in own and name in found:
        theirs, ours = found[name].shape, own[name].shape
        if theirs[1:] == ours[1:] and theirs[:1] != ours[:1]:
            return {name, name.removesuffix("weight") + "bias"} & own.keys()
    return set()


def _form(tensor: Tensor) -> str:
    """Return the shape, and the type unless it is floating point: float16 may be loaded, int8 may not."""
    shape = str(tuple(tensor.shape))
    return shape if tensor.is_floating_point() else f"{shape} of {tensor.dtype}"
