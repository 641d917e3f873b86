"""Why a training ends before its end."""

from __future__ import annotations

from robustmetric.validate import UserError


class Stopped(Exception):  # noqa: N818 (it is no error)
    """A training that stopped before its end, at a step from which it can be resumed."""


class CollapsedError(UserError):
    """A network whose embeddings all point the same way, or are no numbers any more."""
