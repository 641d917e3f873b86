"""The command line; a command's module is imported when the command is run."""

from robustmetric.cli.app import app, run

__all__ = ["app", "run"]
