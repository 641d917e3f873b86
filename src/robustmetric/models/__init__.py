"""Embedding networks by name: images in [0, 1] in, embeddings that are not normalised out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from robustmetric.models.c2f2 import C2F2
from robustmetric.models.resnet import IMAGENET_MEAN, IMAGENET_STD, Normalize, ResNet, resnet18, resnet50
from robustmetric.models.timm import timm_model
from robustmetric.models.weights import load_weights, save_weights
from robustmetric.registry import lookup
from robustmetric.validate import UserError

__all__ = [
    "C2F2",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "MODELS",
    "Normalize",
    "ResNet",
    "load_weights",
    "model",
    "resnet18",
    "resnet50",
    "save_weights",
    "timm_model",
]

MODELS: dict[str, Callable[..., nn.Module]] = {"c2f2": C2F2, "resnet18": resnet18, "resnet50": resnet50}


def model(name: str, /, **options: Any) -> nn.Module:
    """Create a network by name, one of ``MODELS`` or ``"timm:NAME"``, randomly initialised.

    Images ``(B, C, H, W)`` in [0, 1] to embeddings ``(B, dim)``.

    >>> import torch
    >>> model("c2f2", dim=64)(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 64])
    >>> model("c2f2", width=64)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: model 'c2f2' got an unexpected keyword argument 'width'; its options: ...
    """
    if name.startswith("timm:"):
        return timm_model(name.removeprefix("timm:"), **options)
    try:
        factory = lookup("model", name, MODELS)
    except ValueError as error:
        raise UserError(f"{error}, or timm:NAME for any network of timm") from None
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        allowed = ", ".join(signature.parameters)
        raise UserError(f"model {name!r} {error}; its options: {allowed}") from None
    return factory(**options)
