"""Where a network comes from: a name, timm's name or a file of the user's, with its weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from robustmetric.errors import UserError
from robustmetric.models import c2f2, resnet
from robustmetric.models.timm import timm_model
from robustmetric.models.weights import load_weights
from robustmetric.perturb import device_of, differentiate, frozen
from robustmetric.registry import Registry, parse_spec, registry
from robustmetric.sphere import embed, network_errors
from robustmetric.usercode import file_of

_BUILT_IN = (c2f2, resnet)  # each of them registers its networks

MODELS: Registry[nn.Module] = registry("model", nn.Module)
"""All networks by name: classes and functions that make one, with keyword options."""

_TIMM = "timm:"


@dataclass(frozen=True)
class NetworkSource:
    """A network that can be made again and again, with its weights.

    - `model`: a name of ``MODELS``, ``timm:NAME`` or ``file.py:function``; options of it may stand in
      brackets, ``c2f2(dim=64)``.
    - `dim`: the length of the embeddings; None leaves it to the network (512 for those by name).
    - `freeze_bn`: keep BatchNorm's statistics as they are, for networks with this option.
    - `weights`: a file that must fit the network completely; None leaves it as it is made.
    - `seed`: starts the draws of a network's first weights.

    >>> NetworkSource("c2f2", dim=16).make(channels=1, size=8)(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 16])
    """

    model: str
    dim: int | None = None
    freeze_bn: bool = False
    weights: Path | None = None
    seed: int = 0

    @property
    def channels(self) -> Literal[3] | None:
        """The channels that the network takes: 3, or None if it can be made for those of the images.

        >>> NetworkSource("resnet18").channels, NetworkSource("c2f2").channels
        (3, None)
        """
        return None if "channels" in _options(_find(self.model)) else 3

    def check(self) -> None:
        """Refuse what cannot be made, as far as that is known without making it.

        >>> NetworkSource("nets.py").check()
        Traceback (most recent call last):
        ...
        robustmetric.UserError: 'nets.py' names a file and no function in it; write FILE.py:FUNCTION, ...
        """
        _find(self.model)
        if self.weights is not None and not self.weights.is_file():
            raise FileNotFoundError(f"there is no weights file {self.weights}")

    def build(self, channels: int, size: int) -> nn.Module:
        """Make the network without its weights; what it draws comes from torch's own generator.

        `channels` and `size` (the height) are those of its images, for a network that has such options.
        """
        options: dict[str, Any] = {} if self.dim is None else {"dim": self.dim}
        if self.freeze_bn:
            options["freeze_bn"] = True
        return create(self.model, {"channels": channels, "size": size}, **options)

    def make(self, channels: int, size: int) -> nn.Module:
        """Make the network and load its weights completely; nothing is drawn from torch's own generator.

        `channels` and `size` (the height) are those of its images, for a network that has such options.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.build(channels, size)
        if self.weights is None:
            return model
        if kept := load_weights(model, self.weights):
            raise UserError(
                f"{self.weights} has another last layer than the network ({', '.join(kept)}): these are not "
                "the weights of this embedding; give those, or the dim that they were trained with"
            )
        return model


def create(text: str, offered: Mapping[str, Any] | None = None, /, **options: Any) -> nn.Module:
    """Make the network that a text names, randomly initialised.

    All `options` must be options of the network; what is `offered` is passed on where it has such an option.

    >>> create("c2f2(dim=5)", {"size": 8, "depth": 3})(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 5])
    """
    factory = _find(text)
    if text.strip().startswith(_TIMM):
        name, given = parse_spec("model", text.strip().removeprefix(_TIMM))
        if twice := sorted(given.keys() & options.keys()):
            raise UserError(f"model {text!r}: {twice[0]} is given already; leave it out")
        return timm_model(name, **options, **given)
    # Not to a function that takes any option: it passes them on to who knows whom.
    fitting = {name: value for name, value in (offered or {}).items() if name in _options(factory)}
    made = MODELS.make(text, fitting, **options)
    # One that is there already is not to be shared by all who ask for it.
    return copy.deepcopy(made) if made is factory else made


def try_network(model: nn.Module, images: Tensor, *, gradient: bool = True, what: str = "network") -> int:
    """Embed some `images` (N, C, H, W) with a `model` and differentiate by them, as attacks will.

    Return the length of the embeddings. With ``gradient=False`` they are only embedded. What fails raises an
    error that calls the network `what`; the network comes back as it was.

    >>> try_network(nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), torch.rand(1, 1, 8, 8))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the network failed on images of shape (1, 1, 8, 8) and type float32 (Runtime...
    """
    images = images.to(device_of(model))
    with network_errors(model, images, what), frozen(model), torch.no_grad():
        dim = embed(model, images, what=what).shape[1]
        if gradient:
            few = images[:2]
            differentiate(lambda x, _: embed(model, x, what=what).sum(1), few, torch.arange(len(few)))
        return dim


def _find(text: str) -> Callable[..., nn.Module]:
    """Return what makes the network that a text names; an unknown one is refused."""
    if text.strip().endswith(".py"):
        raise UserError(
            f"{text!r} names a file and no function in it; write FILE.py:FUNCTION, such as {text}:network",
            parameter="model",
        )
    if text.strip().startswith(_TIMM):
        return timm_model
    try:
        return MODELS.find(text)[0]
    except UserError as error:
        if file_of(text) is None and parse_spec("model", text)[0] not in MODELS:
            raise UserError(
                f"{error}, or timm:NAME for any network of timm, or FILE.py:FUNCTION for your own",
                parameter="model",
            ) from None
        raise


def _options(factory: Callable[..., nn.Module]) -> list[str]:
    """Return the options that a network has by name."""
    if isinstance(factory, nn.Module):  # made already
        return []
    try:
        known = inspect.signature(factory).parameters.values()
    except ValueError:  # builtins have no signature
        return []
    fixed = getattr(factory, "keywords", {})
    return [p.name for p in known if p.kind is not p.VAR_KEYWORD and p.name not in fixed]
