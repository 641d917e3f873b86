"""Trained networks to give away and to take: folders with weights, records and a model card."""

from robustmetric.zoo.entries import ZooRun
from robustmetric.zoo.load import load_zoo, zoo_names
from robustmetric.zoo.publishing import Published, publish

__all__ = ["Published", "ZooRun", "load_zoo", "publish", "zoo_names"]
