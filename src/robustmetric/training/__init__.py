"""Training: recipes, the Lightning module, runs that survive anything.

What needs Lightning is imported when it is first used, so that the rest of the package starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from robustmetric.training.recipe import Recipe, dump_recipe, load_recipe, recipe_names
from robustmetric.training.stops import CollapsedError, CutShortError, Stopped

if TYPE_CHECKING:
    from robustmetric.training.callbacks import CollapseGuard, Keeper, MetricsFile
    from robustmetric.training.checkpoint import AtomicCheckpointIO
    from robustmetric.training.module import MetricModule
    from robustmetric.training.run import Machines, train
    from robustmetric.training.runs import RunFolder
    from robustmetric.training.trained import Run, load_run

_LATER = {
    "AtomicCheckpointIO": "checkpoint",
    "CollapseGuard": "callbacks",
    "Keeper": "callbacks",
    "Machines": "run",
    "MetricModule": "module",
    "MetricsFile": "callbacks",
    "Run": "trained",
    "RunFolder": "runs",
    "load_run": "trained",
    "train": "run",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


__all__ = [
    "AtomicCheckpointIO",
    "CollapseGuard",
    "CollapsedError",
    "CutShortError",
    "Keeper",
    "Machines",
    "MetricModule",
    "MetricsFile",
    "Recipe",
    "Run",
    "RunFolder",
    "Stopped",
    "dump_recipe",
    "load_recipe",
    "load_run",
    "recipe_names",
    "train",
]
