"""Parquet files of vectors and of predictions, written and read in row groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fasttfm import _extras
from fasttfm.data.lines import data_error

_ROW_GROUP = 8192  # rows


class ParquetWriter:
    """Writes rows of the same columns, in row groups; a context that closes the file.

    Args:
        types: The types of columns whose values do not show them, by name.
    """

    def __init__(self, path: Path, types: Mapping[str, Any] | None = None) -> None:
        self._pyarrow, self._path, self._types = pyarrow_or_error(), path, types or {}
        self._rows: list[Mapping[str, Any]] = []
        self._file: Any = None

    def write(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == _ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        columns = {name: [row.get(name) for row in self._rows] for name in self._rows[0]}
        if self._file is None:
            arrays = {name: self._array(values, self._types.get(name)) for name, values in columns.items()}
            table = self._pyarrow.table(arrays)
            self._file = self._pyarrow.parquet.ParquetWriter(self._path, table.schema, compression="zstd")
        else:
            schema = self._file.schema
            table = self._pyarrow.table(
                [self._array(columns[name], schema.field(name).type) for name in schema.names], schema=schema
            )
        self._file.write_table(table)
        self._rows.clear()

    def _array(self, values: list[Any], type: Any) -> Any:
        """The array of a column. Vectors of one length are copied as a whole."""
        arrow = self._pyarrow
        if isinstance(values[0], np.ndarray) and values[0].ndim == 1:
            flat = arrow.array(np.concatenate(values))
            return arrow.FixedSizeListArray.from_arrays(flat, len(values[0]))
        if isinstance(values[0], np.ndarray):  # vectors of tokens
            ends = np.cumsum([0, *map(len, values)])
            rows = np.concatenate(values)
            vectors = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.reshape(-1)), rows.shape[1])
            return arrow.ListArray.from_arrays(arrow.array(ends, arrow.int32()), vectors)
        array = arrow.array(values, type)
        return array.cast(arrow.string()) if arrow.types.is_null(array.type) else array

    def __enter__(self) -> ParquetWriter:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._rows and kind is None:
            self._flush()
        if self._file is not None:
            self._file.close()


def write_parquet(path: Path, rows: Iterable[Any], dtype: str, first_row: int | None) -> tuple[int, int]:
    """Writes the rows of ``vector_files`` with the columns ``text`` and ``vector``, or ``text``, ``vectors`` and
    ``ids`` for vectors of tokens. Returns the number of rows and the width.

    Args:
        first_row: The number of the first row, with which there is a column ``row`` of numbers.
    """
    count = width = 0
    arrow = pyarrow_or_error()
    with ParquetWriter(path, {"ids": arrow.list_(arrow.int32()), "row": arrow.int64()}) as file:
        for row in rows:
            columns: dict[str, Any] = {} if first_row is None else {"row": first_row + count}
            columns["text"] = row.text
            columns["vector" if row.vector.ndim == 1 else "vectors"] = row.vector.astype(dtype, copy=False)
            if row.ids is not None:
                columns["ids"] = row.ids
            file.write(columns)
            count, width = count + 1, row.vector.shape[-1]
    return count, width


def read_parquet(path: Path, rows: int) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Yields blocks fp32 [up to ``rows``, width] of the column ``vector``, and their texts."""
    arrow = pyarrow_or_error("reading")
    try:
        file = arrow.parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise data_error(path, "a parquet file", str(error)) from None
    with file:
        schema = file.schema_arrow
        is_fixed = "vector" in schema.names and arrow.types.is_fixed_size_list(schema.field("vector").type)
        if not is_fixed or "text" not in schema.names:
            expected = "the columns 'text' and 'vector', a list of fixed size"
            raise data_error(path, expected, f"{', '.join(schema.names)}")
        for batch in file.iter_batches(rows, columns=["text", "vector"]):
            vectors = batch.column("vector").flatten().to_numpy(zero_copy_only=False)
            yield vectors.astype(np.float32).reshape(len(batch), -1), batch.column("text").to_pylist()


def pyarrow_or_error(action: str = "writing") -> Any:
    """The module pyarrow with its parquet files. Raises ImportError that names the extra without it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise _extras.missing(f"{action} parquet files", "pyarrow", "files") from None
    return pyarrow
