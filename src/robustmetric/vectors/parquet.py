"""Vectors as Parquet, for databases: columns file and vector, and the rest in the schema's metadata.

Needs the extra ``robustmetric[parquet]``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from robustmetric.errors import UserError
from robustmetric.files import write_atomically, writing
from robustmetric.vectors.content import About, Floats, Hashed, Read, digest_of
from robustmetric.vectors.names import Names

_AT_ONCE = 1 << 22  # numbers of a row group


class MissingError(UserError):
    """A package that is not installed."""


def check(names: Names | None = None) -> None:
    """Refuse to write Parquet without its package, or `names` that are no text, which its columns must be."""
    _arrow()
    if names is not None and not names.is_text():
        broken = next(name for name in names if not _is_text(name))
        raise UserError(
            f"the name {broken} is not UTF-8, as texts in Parquet are: rename it, or write .safetensors",
            parameter="out",
        )


def write(path: Path, about: About, names: Names, dim: int, blocks: Iterable[Floats]) -> None:
    """Write blocks of vectors (n, `dim`) with their `names` to `path`."""
    arrow, parquet = _arrow()
    kind = arrow.list_(arrow.float32(), dim)
    schema = arrow.schema([("file", arrow.string()), ("vector", kind)], metadata=about.entries())

    def fill(file: Any) -> None:
        hashed, place = Hashed(), 0
        plain = {"use_dictionary": False, "compression": "none", "write_statistics": False}
        with parquet.ParquetWriter(file, schema, **plain) as writer:
            for rows in _groups(blocks, max(1, _AT_ONCE // dim)):
                hashed.update(rows)
                columns = [
                    arrow.array(names[place : place + len(rows)], arrow.string()),
                    arrow.FixedSizeListArray.from_arrays(arrow.array(rows.reshape(-1)), dim),
                ]
                writer.write_batch(arrow.record_batch(columns, schema=schema))
                place += len(rows)
            sha256 = digest_of(about, (len(names), dim), hashed.digest(), names)
            writer.add_key_value_metadata({"sha256": sha256})

    with writing(path, "then run the same command again"):
        write_atomically(path, fill)


def read(path: Path) -> Read:
    """Read all of `path` into memory."""
    arrow, parquet = _arrow()
    try:
        with parquet.ParquetFile(path) as file:
            schema, said = file.schema_arrow, file.metadata.metadata or {}
            entries = {key.decode(): value.decode() for key, value in said.items() if key != b"ARROW:schema"}
            about = About.read(entries)
            kind = schema.field("vector").type
            if schema.field("file").type != arrow.string() or kind.value_type != arrow.float32():
                raise ValueError("its columns are not file, a text, and vector, of float32")
            count, dim = file.metadata.num_rows, kind.list_size
            if not 0 < 4 * count * dim <= path.stat().st_size:
                raise ValueError(f"it claims {count:,} vectors of {dim:,}, which it has no room for")
            z, place = np.empty((count, dim), np.float32), 0
            names: list[str] = []
            for batch in file.iter_batches(max(1, _AT_ONCE // dim), columns=["file", "vector"]):
                column = batch.column("vector")
                if column.null_count or batch.column("file").null_count or place + len(column) > count:
                    raise ValueError("it has gaps, or more rows than it says")
                z[place : place + len(column)] = column.flatten().to_numpy().reshape(-1, dim)
                names += batch.column("file").to_pylist()
                place += len(column)
    except (KeyError, AttributeError, UnicodeDecodeError, arrow.ArrowException) as error:
        raise ValueError(f"it is damaged, or something else ({type(error).__name__}: {error})") from None
    if place != count:
        raise ValueError(f"it has {place:,} rows, and says {count:,}")
    return about, Names.of(names), z, entries.get("sha256", "")


def _groups(blocks: Iterable[Floats], most: int) -> Iterator[Floats]:
    """Put blocks together to groups of some rows."""
    waiting: list[Floats] = []
    for block in blocks:
        waiting.append(block)
        if sum(map(len, waiting)) >= most:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _arrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingError(
            "Parquet needs pyarrow, which is not installed: pip install 'robustmetric[parquet]', or write "
            ".safetensors",
            parameter="out",
        ) from None
