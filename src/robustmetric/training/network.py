"""The network that a training begins with, tried on a few images before all are decoded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robustmetric import data
from robustmetric.data.base import ImageSet
from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError
from robustmetric.models import load_weights, try_network
from robustmetric.perturb import device_of, frozen
from robustmetric.sphere import embed
from robustmetric.training.module import learning, random_states, set_random_states
from robustmetric.training.parts import inputs_of, source_of, thaws
from robustmetric.training.recipe import Recipe
from robustmetric.training.stops import Report

_FEW = 4


def make_network(
    recipe: Recipe, device: torch.device, report: Report = print, *, resumed: bool = False
) -> nn.Module:
    """Make the network of a `recipe` on a `device`, and refuse one that cannot learn from images.

    It begins with the recipe's weights unless it is `resumed`, for a checkpoint has later ones. `report` is
    told what the weights lack, of a ResNet that begins without weights, and of a BatchNorm that
    learns though the recipe freezes it.

    >>> network = make_network(Recipe(data="digits", dim=4), torch.device("cpu"))
    >>> network(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 4])
    """
    inputs = inputs_of(recipe)
    images = data.load(recipe.data, recipe.root, "train")
    first = inputs.first(images)
    model = source_of(recipe).build(*inputs.shape(first))
    begins = None if resumed else recipe.weights
    if begins is not None:
        load_weights(model, begins, report=report)
    if recipe.weights is None and not resumed and recipe.model.startswith("resnet"):
        report(
            f"{recipe.model} begins without weights, at random: recipes with it are made for those of "
            "ImageNet, and the published figures are not reached without; give --weights FILE, such as "
            "torchvision's"
        )
    if thaws(recipe):
        report("BatchNorm is not frozen: reference trains EST so, whatever freeze_bn says")
    learning(model)
    states = random_states()
    try_network(model.to(device), inputs.images(first)[:1])
    check_apart(model, _few(inputs, images, inputs.images(first)[:1]))
    set_random_states(states)  # the training draws as if nothing had been tried
    return model


def check_apart(model: nn.Module, images: Tensor) -> None:
    """Refuse a `model` that gives all `images` (N, C, H, W) one embedding, or one that hangs on the others.

    In evaluation mode, that is: in training BatchNorm does mix a batch.

    >>> check_apart(nn.Sequential(nn.Flatten(), nn.Threshold(2, 1)), torch.rand(3, 1, 2, 2))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the network gives 3 different images the same embedding: ...
    """
    images = images.to(device_of(model))
    different = bool((images != images[:1]).any())
    with frozen(model), torch.no_grad():
        alone = torch.cat([embed(model, image[None]) for image in images])
        apart = float((embed(model, images) - alone).abs().max())
    if apart > 1e-4:
        raise UserError(
            f"an image's embedding depends on the batch it is in, also in evaluation mode (by {apart:.2g}): "
            "let the network treat each image by itself",
            parameter="model",
        )
    if different and bool((alone == alone[:1]).all()):
        raise UserError(
            f"the network gives {len(images)} different images the same embedding: its output does not "
            "depend on the image; look at its layers and at the weights that it begins with",
            parameter="model",
        )


def _few(inputs: Inputs, images: ImageSet, first: Tensor) -> Tensor:
    """Return the first image and some from all over the set, as far as they can be read."""
    found = [first]
    for row in torch.linspace(0, len(images) - 1, _FEW).long().tolist()[1:]:
        try:
            image = inputs.images(inputs.first(images.take([row])))[:1]
        except (UserError, OSError):
            continue
        if image.shape == first.shape:
            found.append(image)
    return torch.cat(found)
