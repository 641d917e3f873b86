"""Adversarially robust deep metric learning for PyTorch.

>>> import torch, robustmetric as rm
>>> model, images = rm.model("c2f2", size=8), torch.rand(8, 1, 8, 8)
>>> labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
>>> defense = rm.defense("HM[S,LGA]&ICS", eps=8/255, alpha=1/255, steps=8)
>>> defense(model, images, labels).loss.backward()

Each part is imported when it is first used, so that the command line starts without torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robustmetric import data, training
    from robustmetric.attacks import attack
    from robustmetric.defenses import Defense, Step, defense
    from robustmetric.errors import UserError
    from robustmetric.evaluation import (
        Certificate,
        Data,
        Plan,
        Record,
        Smoothed,
        Verification,
        certify,
        ers,
        evaluate,
        load_certificate,
        load_record,
        load_verification,
        verify,
    )
    from robustmetric.exports import export
    from robustmetric.hub import from_pretrained, publish
    from robustmetric.losses import triplet_loss
    from robustmetric.models import load_weights, model, save_weights
    from robustmetric.perturb import Budget
    from robustmetric.registry import register
    from robustmetric.sphere import cross_distance, embed, hardness
    from robustmetric.training.trained import load_run
    from robustmetric.triplets import Triplets
    from robustmetric.vectors import Vectors, load_vectors

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "Certificate",
    "Data",
    "Defense",
    "Plan",
    "Record",
    "Smoothed",
    "Step",
    "Triplets",
    "UserError",
    "Vectors",
    "Verification",
    "__version__",
    "attack",
    "certify",
    "cross_distance",
    "data",
    "defense",
    "embed",
    "ers",
    "evaluate",
    "export",
    "from_pretrained",
    "hardness",
    "load_certificate",
    "load_record",
    "load_run",
    "load_vectors",
    "load_verification",
    "load_weights",
    "model",
    "publish",
    "register",
    "save_weights",
    "training",
    "triplet_loss",
    "verify",
]

_FROM = {
    "attacks": ("attack",),
    "data": (),
    "defenses": ("Defense", "Step", "defense"),
    "sphere": ("cross_distance", "embed", "hardness"),
    "evaluation": (
        "Certificate",
        "Data",
        "Plan",
        "Record",
        "Smoothed",
        "Verification",
        "certify",
        "ers",
        "evaluate",
        "load_certificate",
        "load_record",
        "load_verification",
        "verify",
    ),
    "exports": ("export",),
    "losses": ("triplet_loss",),
    "models": ("load_weights", "model", "save_weights"),
    "perturb": ("Budget",),
    "registry": ("register",),
    "retrieval": (),
    "training": ("load_run",),
    "triplets": ("Triplets",),
    "errors": ("UserError",),
    "vectors": ("Vectors", "load_vectors"),
    "verification": (),
    "hub": ("from_pretrained", "publish"),
}
_MODULE_OF = {name: module for module, names in _FROM.items() for name in names}

# Hidden from type checkers, which would take any name for known.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _FROM:
            return importlib.import_module(f"{__name__}.{name}")
        if name in _MODULE_OF:
            return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
