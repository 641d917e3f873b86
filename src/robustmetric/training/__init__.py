"""Training: recipes, the Lightning module, runs that resume exactly.

What needs Lightning is imported when it is first used, so that the rest of the package starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from robustmetric.training.recipe import Recipe, dump_recipe, load_recipe, recipe_names
from robustmetric.training.stops import CollapsedError, CutShortError, Stopped

if TYPE_CHECKING:
    from robustmetric.training.callbacks import Checkpoints, CollapseGuard, MetricsFile
    from robustmetric.training.checkpoint import SealedCheckpointIO
    from robustmetric.training.folder import RunFolder
    from robustmetric.training.module import MetricModule
    from robustmetric.training.run import Machines, train
    from robustmetric.training.trained import Run, load_run

_LATER = {
    "callbacks": ("Checkpoints", "CollapseGuard", "MetricsFile"),
    "checkpoint": ("SealedCheckpointIO",),
    "folder": ("RunFolder",),
    "module": ("MetricModule",),
    "run": ("Machines", "train"),
    "trained": ("Run", "load_run"),
}


def __getattr__(name: str) -> object:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Checkpoints", "CollapseGuard", "CollapsedError", "CutShortError", "Machines", "MetricModule",
    "MetricsFile", "Recipe", "Run", "RunFolder", "SealedCheckpointIO", "Stopped", "dump_recipe",
    "load_recipe", "load_run", "recipe_names", "train",
]  # fmt: skip
