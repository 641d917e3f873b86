"""The app: a page on which an attack is tried by hand, and the work behind it."""

from robustmetric.app.trial import Query, Trial, Walk

__all__ = ["Query", "Trial", "Walk"]
