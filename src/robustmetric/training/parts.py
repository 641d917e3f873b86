"""What a recipe describes: its network, what that takes, and its defense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robustmetric.data.inputs import Inputs, usual_fit, usual_sizes
from robustmetric.defenses import Defense, defense
from robustmetric.models import NetworkSource
from robustmetric.training.recipe import Recipe, load_recipe, usual_recipe


def source_of(recipe: Recipe) -> NetworkSource:
    """Return where a recipe's network comes from; its initial weights are left out.

    With `reference`, EST does not freeze BatchNorm.
    """
    freeze = recipe.freeze_bn and not thaws(recipe)
    return NetworkSource(recipe.model, dim=recipe.dim, freeze_bn=freeze, seed=recipe.seed)


def thaws(recipe: Recipe) -> bool:
    """Return whether BatchNorm trains although the recipe freezes it: for EST with `reference`."""
    return recipe.freeze_bn and recipe.reference and recipe.defense.partition("[")[0].strip() == "EST"


def perturbs(recipe: Recipe) -> bool:
    """Return whether a recipe's defense perturbs images: all do but regular training.

    >>> perturbs(Recipe(defense="HM[S,LGA]&ICS")), perturbs(Recipe(defense="N/A[S]"))
    (True, False)
    """
    return not recipe.defense.strip().startswith("N/A")


def defense_of(recipe: Recipe) -> Defense:
    """Return a recipe's defense."""
    names = ("eps", "alpha", "steps", "margin", "seed", "reference")
    return defense(recipe.defense, **{name: getattr(recipe, name) for name in names})


def steps_of(recipe: Recipe, images: int, workers: int) -> int:
    """Return how many steps a training on so many `images` takes, with a batch for each of the `workers`.

    >>> steps_of(Recipe(epochs=2, batch=10), images=11, workers=1)
    6
    """
    return recipe.epochs * -(-images // (workers * (recipe.batch // 2)))


def inputs_of(recipe: Recipe) -> Inputs:
    """Return what a recipe's network takes.

    >>> inputs_of(Recipe(model="resnet18", resize=256, crop=224))
    Inputs(resize=256, crop=224, channels=3, fit='squeeze')
    """
    return Inputs(recipe.resize, recipe.crop, source_of(recipe).channels, recipe.fit)


def suited_recipe(changes: Mapping[str, Any]) -> Recipe:
    """Return the default recipe of a data set, changed, and suited to the images and to the network.

    The recipe of the user's own images looks at their sizes, unless the `changes` have them. BatchNorm is
    frozen only for ResNets, which can do that.
    """
    name = usual_recipe(str(changes.get("data", "digits")))
    recipe = load_recipe(name, changes)
    suited: dict[str, Any] = {}
    if recipe.freeze_bn and not recipe.model.startswith("resnet"):
        suited["freeze_bn"] = False
    if name == "images":
        given = {key: changes[key] for key in ("resize", "crop") if key in changes}
        suited["resize"], suited["crop"] = usual_sizes(recipe.data, recipe.root, given)
        suited["fit"] = usual_fit(recipe.data)
    return load_recipe(name, {**suited, **changes})
