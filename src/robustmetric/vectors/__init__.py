"""Vectors of images for a search: made of a folder, kept in a file, searched exactly or by an index."""

from robustmetric.vectors.blocks import Embedded, embed_folder
from robustmetric.vectors.content import About
from robustmetric.vectors.index import Index, open_index
from robustmetric.vectors.names import Names, images_below
from robustmetric.vectors.vectors import Found, Vectors, load_vectors, save_vectors

__all__ = [
    "About",
    "Embedded",
    "Found",
    "Index",
    "Names",
    "Vectors",
    "embed_folder",
    "images_below",
    "load_vectors",
    "open_index",
    "save_vectors",
]
