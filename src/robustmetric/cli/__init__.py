"""The command line."""

from robustmetric.cli import demo, evaluate, train
from robustmetric.cli.app import app, run

__all__ = ["app", "demo", "evaluate", "run", "train"]
