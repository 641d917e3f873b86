"""A name of before, for the commands that still use it."""

from robustmetric.files import check_writable

__all__ = ["check_writable"]
