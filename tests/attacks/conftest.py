"""A small gallery with everything in it that could be counted wrongly: see tests/helpers/crowd.py."""

import pytest
from torch import Tensor

from robustmetric.attacks import Gallery, Queries
from tests.helpers import crowd


@pytest.fixture(scope="session")
def gallery() -> Gallery:
    """40 images in 6 classes, in double precision."""
    return crowd.make_gallery()


@pytest.fixture(scope="session")
def queries(gallery: Gallery) -> Queries:
    """12 images of the gallery and 6 others, the last of a class that is not in it."""
    return crowd.make_queries(gallery)


@pytest.fixture(scope="session")
def moved(queries: Queries) -> Tensor:
    """Where the queries' embeddings are after a perturbation: nowhere in particular, so without ties."""
    return crowd.make_moved(queries)


@pytest.fixture(scope="session")
def tied(queries: Queries, gallery: Gallery, moved: Tensor) -> Tensor:
    """Embeddings with ties: the benign ones, the gallery's own, its corners, and some between two corners."""
    return crowd.make_tied(queries, gallery, moved)


@pytest.fixture(scope="session")
def seen(gallery: Gallery) -> Gallery:
    """The gallery, taken by three cameras with numbers of any kind; one took all of class 3."""
    return crowd.make_seen(gallery)


@pytest.fixture(scope="session")
def asked(queries: Queries, seen: Gallery) -> Queries:
    """The queries with their cameras: those of the gallery their own, of the others one that is not there."""
    return crowd.make_asked(queries, seen)
