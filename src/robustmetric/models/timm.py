"""Any network of timm by its name; needs the extra ``robustmetric[timm]``."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from robustmetric.errors import UserError, whole
from robustmetric.models.resnet import Normalize

# With these timm downloads weights, or unpickles a file.
_LOADING = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def timm_model(name: str, *, dim: int = 512, **options: Any) -> nn.Module:
    """Create timm's network `name`, randomly initialised, with its own pixel normalisation inside.

    Images ``(B, 3, H, W)`` in [0, 1] to embeddings ``(B, dim)``. Parameters keep timm's names, so that a
    file of its published weights can be given to `load_weights`. `options` are those of
    ``timm.create_model``, except those that load weights: timm would download or unpickle them.
    """
    whole("dim", dim, 1)
    # Names such as hf-hub: and local-dir: take a configuration and weights from the network or a folder.
    if wrong := [f"timm:{name}"] * (":" in name) + [option for option in options if option in _LOADING]:
        raise UserError(
            f"{wrong[0]} would load weights from elsewhere; give a name of timm.list_models(), and a file of "
            "weights with load_weights (--weights)"
        )
    if "num_classes" in options:
        raise UserError(f"num_classes is not an option of timm:{name} here; use dim")
    try:
        timm = importlib.import_module("timm")
    # A torchvision that does not match torch fails in any of these ways.
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        reason = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
        raise UserError(
            f"timm:{name} needs timm, which failed to import ({reason}); install robustmetric[timm]"
        ) from error
    try:
        network: nn.Module = timm.create_model(name, num_classes=dim, pretrained=False, **options)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"timm cannot create {name!r} with options {options}: {error};"
            " timm.list_models() gives the names it knows"
        ) from error
    config: Any = network.pretrained_cfg
    mean, std = config["mean"], config["std"]
    if options.get("in_chans", len(mean)) != len(mean):
        raise UserError(
            f"in_chans is {options['in_chans']}, but timm:{name} normalises {len(mean)} channels;"
            f" convert the images to {len(mean)} channels"
        )
    # A hook and not a wrapper, which would put a prefix on all of timm's parameter names.
    network.normalize = Normalize(mean, std)
    network.register_forward_pre_hook(_normalize)
    return network


def _normalize(network: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    images, *rest = args
    return (network.get_submodule("normalize")(images), *rest)
