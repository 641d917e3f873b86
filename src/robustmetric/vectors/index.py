"""Indexes of faiss beside a file of vectors: faster than exact search, and with its recall measured.

Needs the extra ``robustmetric[faiss]``. faiss reads an index only if its bytes are those that were written.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from robustmetric.errors import UserError
from robustmetric.files import digest_of_entries, write_atomically, writing
from robustmetric.registry import unknown
from robustmetric.squares import keys_of, positions_of, square_distance, squares_of
from robustmetric.vectors.content import Floats
from robustmetric.vectors.exact import nearest
from robustmetric.vectors.vectors import Found, K, Vectors, check_k

KINDS = {"hnsw": "hnsw", "ivf": "ivf", "faiss": "hnsw"}
"""What an index may be called, and its kind: a graph of neighbours, or cells of which a few are searched."""

_FORMAT, _VERSION = "robustmetric index", "1"
SAMPLE = 100
"""Stored vectors that recall is measured with, if there are so many."""

_SEED = 0  # that they are drawn with
_WANTED = 0.99  # the recall that the effort of a search is raised for
_LINKS, _CARE = 32, 80  # of a graph: neighbours of a vector, and candidates that are looked at for them
_MOST = 1024  # candidates of a search in a graph
_NUMBERS = 1 << 20  # added at once
_READ = 1 << 20


def kind_of(name: str) -> str:
    """Return the kind of the index that is called `name`; an unknown one, or faiss missing, is refused.

    >>> kind_of("faiss")
    'hnsw'
    """
    if name not in KINDS:
        raise UserError(unknown("index", name, KINDS), parameter="index")
    _faiss()
    return KINDS[name]


class Index:
    """An index of `vectors`, as `open_index` returns it.

    `kind` is hnsw or ivf, `engine` is faiss's index. `effort` is how many candidates, or cells, a search
    looks at. `recalls` are the shares of the k nearest that it finds, by k.
    """

    def __init__(
        self, vectors: Vectors, kind: str, engine: Any, effort: int, recalls: dict[int, float]
    ) -> None:
        self.vectors, self.kind, self.engine = vectors, kind, engine
        self.effort, self.recalls = effort, recalls

    def search(self, z: torch.Tensor, k: int = K) -> Found:
        """Return `k` vectors near to each of `z` (Q, D), as `Vectors.search` does, though not surely all."""
        queries, _ = self.vectors.queries(z, k)
        position, square = self._near(queries, min(k, len(self.vectors)))
        return Found(torch.from_numpy(position), torch.from_numpy(np.sqrt(square)))

    def _near(self, queries: Floats, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Let faiss find positions (Q, k), and measure and order them as everywhere; −1 comes last."""
        # Not as parameters of the search, which faiss.contrib.torch_utils replaces by one without any.
        if self.kind == "hnsw":
            self.engine.hnsw.efSearch = max(self.effort, k)
        else:
            self.engine.nprobe = self.effort
        _, found = self.engine.search(queries, k)
        position = np.sort(found, axis=1)  # so that what is not found is known again
        missing = torch.from_numpy(position < 0)
        near = torch.from_numpy(self.vectors.z.numpy()[np.maximum(position, 0)])
        square = square_distance(torch.from_numpy(queries)[:, None], near).masked_fill_(missing, math.inf)
        keys = keys_of(square, torch.from_numpy(np.maximum(position, 0))).sort(1).values
        square = torch.from_numpy(squares_of(keys.numpy()))
        return positions_of(keys).masked_fill_(square.isinf(), -1).numpy(), square.numpy()

    def measure(self, k: int) -> float:
        """Return the share of the `k` nearest others that a sample of the stored vectors finds.

        What is as far as the last of them counts as found.
        """
        vectors, count = self.vectors, len(self.vectors)
        k = min(k, count - 1)
        if k < 1:
            return 1.0
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(_SEED))[:SAMPLE].numpy()
        queries = vectors.z.numpy()[drawn]
        exact = _others(drawn, *nearest(vectors.z.numpy(), vectors.off, queries, vectors.off, k + 1))
        found = _others(drawn, *self._near(queries, k + 1))
        return float((found <= exact[:, -1:]).mean())


def open_index(
    vectors: Vectors,
    kind: str = "hnsw",
    k: int = K,
    *,
    progress: Callable[[int, int], None] | None = None,
    report: Callable[[str], None] = print,
) -> Index:
    """Return the index beside the file of `vectors`; it is built if it is not there.

    `kind` is hnsw (or faiss), a graph of neighbours, or ivf, cells of which a few are searched. An index that
    is damaged, or of other vectors, is not read: it is built anew, which `report` is told. The share of the
    `k` nearest that it finds is measured with 100 of the stored vectors, drawn by a seed, and kept with the
    index: ``recalls[k]``. A search tries as hard as 99 % of them take, if that can be. `progress` is told how
    many vectors are added, and how many there are. An index holds the vectors once more, in memory.

    >>> import tempfile
    >>> from robustmetric.data import Inputs
    >>> from robustmetric.vectors import About, load_vectors, save_vectors
    >>> z = torch.nn.functional.normalize(torch.rand(200, 4))
    >>> vectors = Vectors(z, [f"{k}.png" for k in range(200)], About("mine", "0" * 64, Inputs()))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_vectors(vectors, Path(folder, "vectors.npy"))
    ...     index = open_index(load_vectors(Path(folder, "vectors.npy")), "hnsw", k=5)
    ...     index.search(z[7:8], k=5).position[0, 0], len(list(Path(folder).glob('*.hnsw.*')))
    (tensor(7), 2)
    >>> index.recalls[5] > 0.9
    True
    """
    kind, faiss = kind_of(kind), _faiss()
    check_k(k)
    if vectors.path is None or vectors.sha256 is None:
        raise UserError("an index stands beside the file of its vectors: load them from a file")
    files = _Files(vectors.path, kind)
    index = files.opened(vectors, report)
    if index is None:
        index = Index(vectors, kind, _built(faiss, vectors, kind, progress), 0, {})
        _tune(index, k)
        files.write(index)
    elif k not in index.recalls:
        index.recalls[k] = index.measure(k)
        files.describe(index)
    return index


class _Files:
    """An index on disk: what faiss wrote, and what is known of it."""

    def __init__(self, vectors: Path, kind: str) -> None:
        self.kind = kind
        self.index, self.about = (
            vectors.with_name(f"{vectors.name}.{kind}.{suffix}") for suffix in ("faiss", "json")
        )
        self.digest = ""

    def opened(self, vectors: Vectors, report: Callable[[str], None]) -> Index | None:
        """Read the index of these vectors; None if it is not there, or not to be read."""
        if not self.index.exists() or not self.about.exists():
            return None
        try:
            about = self._read()
            if about["vectors"] != vectors.sha256:
                raise ValueError(f"{self.index} is of other vectors than {vectors.path}")
            engine = self._engine(str(about["index"]))
            if (engine.ntotal, engine.d) != tuple(vectors.z.shape):
                raise ValueError(f"{self.index} does not fit {vectors.path}")
        except (ValueError, RuntimeError) as error:
            report(f"{error}: it is built anew")
            return None
        recalls = {int(k): float(share) for k, share in about["recalls"].items()}
        return Index(vectors, self.kind, engine, int(about["effort"]), recalls)

    def _read(self) -> dict[str, Any]:
        try:
            about = json.loads(self.about.read_text(encoding="utf-8"))
            whole = isinstance(about, dict) and about.get("sha256") == digest_of_entries(about)
        except (ValueError, RecursionError):
            whole = False
        if not whole or (about.get("format"), about.get("version")) != (_FORMAT, _VERSION):
            raise ValueError(f"{self.about} is damaged, or of another version")
        found: dict[str, Any] = about
        return found

    def _engine(self, stated: str) -> Any:
        """Let faiss read the index, if it is what was written."""
        with self.index.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(_READ):
                digest.update(block)
            if digest.hexdigest() != stated:
                raise ValueError(f"{self.index} is damaged: its content does not match the digest beside it")
            self.digest = stated
            file.seek(0)  # of the same file, whatever has been put in its place meanwhile
            faiss = _faiss()
            return faiss.read_index(faiss.PyCallbackIOReader(file.read))

    def write(self, index: Index) -> None:
        """Write an index, and then what is known of it: without that it is not read."""
        faiss, digest = _faiss(), hashlib.sha256()

        def fill(file: BinaryIO) -> None:
            def put(content: bytes) -> int:
                digest.update(content)
                return file.write(content)

            faiss.write_index(index.engine, faiss.PyCallbackIOWriter(put))

        with writing(self.index, "then search again"):
            write_atomically(self.index, fill)
        self.digest = digest.hexdigest()
        self.describe(index)

    def describe(self, index: Index) -> None:
        """Write what is known of an index."""
        about = {
            "format": _FORMAT,
            "version": _VERSION,
            "kind": self.kind,
            "vectors": index.vectors.sha256,
            "index": self.digest,
            "effort": index.effort,
            "recalls": {str(k): share for k, share in index.recalls.items()},
            "sample": SAMPLE,
            "seed": _SEED,
        }
        content = json.dumps({**about, "sha256": digest_of_entries(about)}, indent=1)
        with writing(self.about, "then search again"):
            write_atomically(self.about, lambda file: file.write(content.encode()))


def _built(faiss: Any, vectors: Vectors, kind: str, progress: Callable[[int, int], None] | None) -> Any:
    """Build an index, a block of vectors after the other."""
    z, (count, dim) = vectors.z.numpy(), vectors.z.shape
    if kind == "hnsw":
        engine = faiss.IndexHNSWFlat(dim, _LINKS, faiss.METRIC_INNER_PRODUCT)
        engine.hnsw.efConstruction = _CARE
    else:
        cells = max(1, min(int(4 * math.sqrt(count)), count // 39))  # faiss asks for 39 vectors a cell
        engine = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, cells, faiss.METRIC_INNER_PRODUCT)
        engine.cp.min_points_per_centroid = 1
        engine.train(np.ascontiguousarray(z[:: max(1, count // (64 * cells))]))
    each = max(1, _NUMBERS // dim)
    for begin in range(0, count, each):
        if progress:
            progress(begin, count)
        engine.add(np.ascontiguousarray(z[begin : begin + each]))
    if progress:
        progress(count, count)
    return engine


def _tune(index: Index, k: int) -> None:
    """Raise the effort until enough is found."""
    for effort in _efforts(index):
        index.effort = effort
        index.recalls[k] = index.measure(k)
        if index.recalls[k] >= _WANTED:
            break


def _efforts(index: Index) -> Iterator[int]:
    most = _MOST if index.kind == "hnsw" else index.engine.nlist
    effort = 16 if index.kind == "hnsw" else 1
    while effort < most:
        yield effort
        effort *= 2
    yield most


def _others(
    own: NDArray[np.int64], position: NDArray[np.int64], square: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return squares (Q, k) of the k nearest but each query's own, of k + 1 that were found."""
    mine = position == own[:, None]
    mine[~mine.any(1), -1] = True  # copies of it stand before it: one of them goes
    others: NDArray[np.float32] = square[~mine].reshape(len(own), -1)
    return others


def _faiss() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its wrapper, at each start
            return importlib.import_module("faiss")
    except ImportError:
        raise UserError(
            "an index needs faiss, which is not installed: pip install 'robustmetric[faiss]'",
            parameter="index",
        ) from None
