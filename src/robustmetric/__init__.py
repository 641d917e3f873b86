"""Adversarially robust deep metric learning for PyTorch.

>>> import torch, robustmetric as rm
>>> model, images = rm.model("c2f2", size=8), torch.rand(8, 1, 8, 8)
>>> labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
>>> defense = rm.defense("HM[S,LGA]&ICS", eps=8/255, alpha=1/255, steps=8)
>>> defense(model, images, labels).loss.backward()
"""

from robustmetric import data, training
from robustmetric.attacks import attack
from robustmetric.defenses import Defense, Step, defense
from robustmetric.distance import cross_distance, embed, hardness
from robustmetric.losses import triplet_loss
from robustmetric.models import load_weights, model, save_weights
from robustmetric.perturb import Budget
from robustmetric.robustness import Record, ers, evaluate, load_record
from robustmetric.triplets import Triplets

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "Defense",
    "Record",
    "Step",
    "Triplets",
    "__version__",
    "attack",
    "cross_distance",
    "data",
    "defense",
    "embed",
    "ers",
    "evaluate",
    "hardness",
    "load_record",
    "load_weights",
    "model",
    "save_weights",
    "training",
    "triplet_loss",
]
