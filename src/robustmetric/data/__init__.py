"""Data sets by name: labelled images as files or as pixels, in splits for training, validation and test."""

from robustmetric.data.base import ImageSet, Split, sets_apart
from robustmetric.data.inputs import Inputs, load_pixels, usual_inputs
from robustmetric.data.load import DATA, load, own_validation

__all__ = [
    "DATA",
    "ImageSet",
    "Inputs",
    "Split",
    "load",
    "load_pixels",
    "own_validation",
    "sets_apart",
    "usual_inputs",
]
