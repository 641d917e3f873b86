"""Defenses: regular training, Hardness Manipulation and the baselines, each by the paper's name for it."""

from robustmetric.defenses.act import AntiCollapse
from robustmetric.defenses.base import Defense, Step, defense
from robustmetric.defenses.est import EmbeddingShifted
from robustmetric.defenses.hardness import HardnessManipulation
from robustmetric.defenses.regular import Regular

__all__ = [
    "AntiCollapse",
    "Defense",
    "EmbeddingShifted",
    "HardnessManipulation",
    "Regular",
    "Step",
    "defense",
]
