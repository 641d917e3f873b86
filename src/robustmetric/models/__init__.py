"""Embedding networks by name: images in [0, 1] in, embeddings that are not normalised out."""

from __future__ import annotations

from typing import Any

from torch import nn

from robustmetric.models.c2f2 import C2F2
from robustmetric.models.resnet import IMAGENET_MEAN, IMAGENET_STD, Normalize, ResNet, resnet18, resnet50
from robustmetric.models.source import MODELS, NetworkSource, create, try_network
from robustmetric.models.timm import timm_model
from robustmetric.models.weights import load_weights, save_weights

__all__ = [
    "C2F2",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "MODELS",
    "NetworkSource",
    "Normalize",
    "ResNet",
    "load_weights",
    "model",
    "resnet18",
    "resnet50",
    "save_weights",
    "timm_model",
    "try_network",
]


def model(name: str, /, **options: Any) -> nn.Module:
    """Create a network by its `name`, randomly initialised, with `options` of its own.

    The name is one of ``MODELS``, ``"timm:NAME"``, or ``"file.py:function"`` for a network of your own.
    Images ``(B, C, H, W)`` in [0, 1] to embeddings ``(B, dim)``.

    >>> import torch
    >>> model("c2f2", dim=64)(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 64])
    >>> model("c2f2", width=64)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: model 'c2f2' got an unexpected keyword argument 'width'; its options: ...
    """
    return create(name, **options)
