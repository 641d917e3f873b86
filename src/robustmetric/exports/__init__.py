"""Trained networks as single files, for programs that do not have this package."""

from robustmetric.exports.export import Written, export
from robustmetric.exports.formats import FORMATS
from robustmetric.exports.product import Product, describe

__all__ = ["FORMATS", "Product", "Written", "describe", "export"]
