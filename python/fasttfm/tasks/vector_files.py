"""Files of vectors, written and read in blocks: .npy, .npz, .safetensors, .jsonl, .csv and .parquet."""

from __future__ import annotations

import csv
import json
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fasttfm._atomic_files import atomic_write
from fasttfm.data.lines import DataError, data_error, read_json_lines
from fasttfm.inference.quantization import (
    PACKED,
    PRECISIONS,
    WITH_RANGES,
    check_ranges,
    quantize_vectors,
    restore_vectors,
)
from fasttfm.tasks.parquet_files import read_parquet, write_parquet

_WITH_TEXTS = (".jsonl", ".csv", ".parquet")
SUFFIXES = (".npy", ".npz", ".safetensors", *_WITH_TEXTS)
_SAFETENSORS_TYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "int8": "I8", "uint8": "U8"}
_STORED = {"binary": "int8", "ubinary": "uint8"}  # other precisions are dtypes
_ROWS = 4096  # which are quantized at a time


class Row(NamedTuple):
    """A text with its vector [width], or with the vectors [tokens, width] of its tokens and perhaps their ids."""

    text: str
    vector: np.ndarray
    ids: list[int] | None = None


def check_type(suffix: str, dtype: str) -> None:
    """Raises ValueError if files with this suffix cannot have vectors of this type."""
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype: expected {', '.join(PRECISIONS)}, got {dtype!r}")
    able = (".npz", ".safetensors") if dtype in WITH_RANGES else (".npy", ".npz", ".safetensors")
    if dtype in (*WITH_RANGES, *PACKED) and suffix not in able:
        reason = ", which store their ranges" if dtype in WITH_RANGES else ""
        raise ValueError(f"dtype: {dtype}: expected a file that ends in {', '.join(able)}{reason}, got {suffix}")


def write_vectors(
    path: Path,
    rows: Iterable[Row],
    *,
    dtype: str = "float32",
    ranges: np.ndarray | None = None,
    parts: str = "offsets",
    settings: Mapping[str, str] | None = None,
    first_row: int | None = None,
) -> tuple[int, int]:
    """Writes rows one by one; the file appears when it is complete. Returns the number of rows and the width.

    - ``.npy``: one array [texts, width].
    - ``.npz``, ``.safetensors``: the array ``vectors``; for token vectors [tokens of all texts, width] with ``offsets``
      (text i is the rows from offsets[i] to offsets[i + 1]) and ``ids``, if rows have them. A .safetensors file has
      ``settings`` as its metadata.
    - ``.jsonl``: one object per line with ``text`` and ``vector``, or ``text``, ``ids`` and ``vectors``.
    - ``.csv``: a column for the text and one for each element.
    - ``.parquet``: the columns ``text`` and ``vector``, or ``text``, ``ids`` and ``vectors``.

    Args:
        dtype: One of ``inference.quantization.PRECISIONS``. Files of int8 and uint8 also have the arrays ``ranges`` and
            ``norms``, those of the restored vectors.
        ranges: [2, width], for int8 and uint8; by default those of all vectors.
        parts: The name of the array with the first row of each text, where texts have several: ``"offsets"`` of vectors
            of tokens, ``"chunks"`` of vectors of chunks.
        first_row: The number of the first row; ``.parquet`` then has a column ``row`` of numbers.
    """
    check_type(path.suffix, dtype)
    with atomic_write(path) as partial:
        if path.suffix == ".parquet":
            return write_parquet(partial, rows, dtype, first_row)
        if path.suffix in (".jsonl", ".csv"):
            return _write_text(path.suffix, partial, rows, dtype)
        with tempfile.TemporaryFile(dir=partial.parent) as body:
            rows_of = _Body(body, dtype, ranges, parts)
            for row in rows:
                rows_of.add(row)
            writers: dict[str, Callable[..., None]] = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors}
            with partial.open("wb") as file:
                writers[path.suffix](file, rows_of, settings or {})
        return rows_of.count, rows_of.width


class _Body:
    """The bytes of vectors in a temporary file, and their shape for the header. Those of int8 and uint8 are fp32 there:
    their ranges are known when all are written."""

    def __init__(self, file: IO[bytes], precision: str, ranges: np.ndarray | None, parts: str) -> None:
        self._file, self._precision, self._ranges, self._parts = file, precision, ranges, parts
        self.dtype = np.dtype(_STORED.get(precision, precision))
        self._waits = precision in WITH_RANGES
        self._seen: np.ndarray | None = None  # the ranges of the vectors until now
        self.count = self.width = 0
        self.rows = 0  # of the array: texts, or tokens of all texts
        self.ids: list[int] | None = None
        self.offsets: list[int] = [0]

    def add(self, row: Row) -> None:
        vector = row.vector if self._waits else quantize_vectors(row.vector, self._precision)
        self.count += 1
        self.width = vector.shape[-1]
        self.rows += 1 if vector.ndim == 1 else len(vector)
        if row.ids is not None:
            self.ids = self.ids or []
            self.ids += row.ids
        if row.vector.ndim == 2:
            self.offsets.append(self.rows)
        if self._waits:
            self._see(vector.reshape(-1, self.width))
            vector = np.ascontiguousarray(vector, np.float32)
        self._file.write(vector.tobytes())

    def _see(self, vectors: np.ndarray) -> None:
        seen = np.stack([vectors.min(0), vectors.max(0)])
        if self._seen is not None:
            seen = np.stack([np.minimum(seen[0], self._seen[0]), np.maximum(seen[1], self._seen[1])])
        self._seen = seen

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.width

    @property
    def ranges(self) -> np.ndarray:
        ranges = self._seen if self._ranges is None else self._ranges
        return check_ranges(f"dtype: {self._precision}", ranges, self.width)

    def additional(self) -> dict[str, np.ndarray]:
        """The additional arrays: of token vectors, and of vectors with ranges."""
        arrays: dict[str, np.ndarray] = {}
        if len(self.offsets) > 1:
            arrays[self._parts] = np.array(self.offsets, np.int64)
        if self.ids is not None:
            arrays["ids"] = np.array(self.ids, np.int64)
        if self._waits:
            norms = [
                np.linalg.norm(restore_vectors(block, self._precision, self.ranges), axis=1)
                for block in self._quantized()
            ]
            arrays |= {"ranges": self.ranges, "norms": np.concatenate(norms).astype(np.float32)}
        return arrays

    def copy(self, target: IO[bytes]) -> None:
        if self._waits:
            for block in self._quantized():
                target.write(block.tobytes())
            return
        self._file.seek(0)
        while read := self._file.read(1 << 20):
            target.write(read)

    def _quantized(self) -> Iterator[np.ndarray]:
        self._file.seek(0)
        while read := self._file.read(_ROWS * self.width * 4):
            rows = np.frombuffer(read, np.float32).reshape(-1, self.width)
            yield quantize_vectors(rows, self._precision, self.ranges)


def _npy(file: IO[bytes], body: _Body, settings: Mapping[str, str]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(body.dtype), "fortran_order": False, "shape": body.shape}
    np.lib.format.write_array_header_1_0(file, header)
    body.copy(file)


def _npz(file: IO[bytes], body: _Body, settings: Mapping[str, str]) -> None:
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        with archive.open("vectors.npy", "w", force_zip64=True) as entry:
            _npy(entry, body, settings)
        for name, array in body.additional().items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array)


def _safetensors(file: IO[bytes], body: _Body, settings: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": dict(settings)}
    arrays = body.additional()
    others = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    shapes = {"vectors": (body.dtype, body.shape), **others}
    end = 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_TYPES[dtype.name], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    body.copy(file)
    for array in arrays.values():
        file.write(array.tobytes())


def _write_text(suffix: str, partial: Path, rows: Iterable[Row], dtype: str) -> tuple[int, int]:
    count = width = 0
    with partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        for row in rows:
            count, width = count + 1, row.vector.shape[-1]
            numbers = _numbers(row.vector.astype(dtype).astype(np.float32))
            if suffix == ".csv":
                if count == 1:
                    table.writerow(["text", *(f"v{index}" for index in range(width))])
                table.writerow([row.text, *numbers])
                continue
            value: dict[str, Any] = {"text": row.text, "vector": numbers}
            if row.vector.ndim == 2:
                value = {"text": row.text, "ids": row.ids, "vectors": numbers}
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
    return count, width


def _numbers(array: np.ndarray) -> list[Any]:
    """The shortest decimal numbers that round to the same fp32 numbers."""
    if array.ndim > 1:
        return [_numbers(row) for row in array]
    return [float(str(number)) for number in array]


# ---- reading ---------------------------------------------------------------------------------------------------------


class VectorFile:
    """A file of vectors, written by ``write_vectors``, or any .npy, .npz or .safetensors with one array of rows.

    ``blocks`` reads it in blocks, with the texts of .jsonl, .csv and .parquet files. ``settings`` are the settings of
    the vectors, if the file has them. ``count`` is the number of vectors and ``width`` how many numbers each has; for
    files with texts they are None, ``count`` until ``blocks`` has read them. Rows of bytes are int8 or uint8
    vectors if the file has their ``ranges``, and otherwise signs: ``precision`` says which. ``offsets`` are those of
    vectors of tokens, of which text i has the rows from offsets[i] to offsets[i + 1], and ``chunks`` those of vectors
    of chunks.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.settings: dict[str, str] = {}
        if self.path.suffix not in SUFFIXES:
            raise data_error(self.path, f"a name that ends in {', '.join(SUFFIXES)}", repr(self.path.name))
        if not self.path.is_file():
            raise data_error(self.path, "a file of vectors", "a directory" if self.path.is_dir() else "nothing there")
        self._array = None if self.path.suffix in _WITH_TEXTS else self._mapped("vectors")
        self.precision = "float32"
        self.ranges: np.ndarray | None = None
        self.norms: np.ndarray | None = None
        self.offsets: np.ndarray | None = None
        self.chunks: np.ndarray | None = None
        self.count = self.width = None
        if self._array is None:
            return
        if self._array.ndim != 2 or (self._array.dtype.kind != "f" and self._array.dtype.name not in _STORED.values()):
            got = f"{self._array.dtype} {list(self._array.shape)}"
            raise data_error(self.path, "an array of floating-point numbers or bytes [texts, width]", got)
        self.count, self.width = self._array.shape
        self.offsets, self.chunks = self._boundaries("offsets"), self._boundaries("chunks")
        if self._array.dtype.kind != "f":
            self._read_ranges(self._array)

    def _boundaries(self, name: str) -> np.ndarray | None:
        offsets = self._optional(name)
        if offsets is None:
            return None
        ends = offsets.ndim == 1 and len(offsets) > 0 and (offsets[0], offsets[-1]) == (0, self.count)
        if not ends or (np.diff(offsets) < 0).any():
            raise data_error(self.path, f"'{name}' that increase from 0 to {self.count}", f"{offsets!r:.60}")
        return offsets

    def _read_ranges(self, array: np.ndarray) -> None:
        ranges = self._optional("ranges")
        if ranges is None:
            self.precision = next(name for name, dtype in _STORED.items() if dtype == array.dtype.name)
            return
        try:
            self.ranges = check_ranges(f"{self.path}", ranges, array.shape[1])
        except ValueError as error:
            raise DataError(str(error)) from None
        self.precision, self.norms = array.dtype.name, self._optional("norms")
        if self.norms is None or self.norms.shape != (len(array),):
            got = "none" if self.norms is None else f"{list(self.norms.shape)}"
            raise data_error(self.path, f"the array 'norms' [{len(array)}] of int8 vectors", got)

    @property
    def restored_width(self) -> int:
        """The number of elements of a vector; not for files with texts."""
        return (self.width or 0) * (8 if self.precision in PACKED else 1)

    def rows(self, first: int, last: int) -> np.ndarray:
        """fp32 rows from ``first`` up to ``last``, without it; not for files with texts."""
        assert self._array is not None
        return restore_vectors(np.array(self._array[first:last]), self.precision, self.ranges)

    def some(self, rows: np.ndarray) -> np.ndarray:
        """fp32 rows with these numbers; not for files with texts."""
        assert self._array is not None
        return restore_vectors(self._array[rows], self.precision, self.ranges)

    def stored(self, rows: int) -> Iterator[np.ndarray]:
        """Yields blocks of up to ``rows`` vectors as the file has them; not for files with texts."""
        assert self._array is not None
        for start in range(0, len(self._array), rows):
            yield np.array(self._array[start : start + rows])

    def blocks(self, rows: int) -> Iterator[tuple[np.ndarray, list[str] | None]]:
        """Yields blocks fp32 [up to ``rows``, width] and their texts."""
        if self._array is not None:
            for block in self.stored(rows):
                yield restore_vectors(block, self.precision, self.ranges), None
            return
        count = 0
        for vectors, texts in read_parquet(self.path, rows) if self.path.suffix == ".parquet" else self._decoded(rows):
            yield vectors, texts
            count += len(texts)
        self.count = count

    def _decoded(self, rows: int) -> Iterator[tuple[np.ndarray, list[str]]]:
        """``blocks`` of a file of lines."""
        texts: list[str] = []
        vectors: list[Any] = []
        for number, text, vector in self._lines():
            if vectors and len(vector) != len(vectors[0]):
                raise data_error(self.path, f"{len(vectors[0])} numbers", f"{len(vector)}", line=number)
            texts.append(text)
            vectors.append(vector)
            if len(texts) == rows:
                yield np.array(vectors, np.float32), texts
                texts, vectors = [], []
        if texts:
            yield np.array(vectors, np.float32), texts

    def _lines(self) -> Iterator[tuple[int, str, list[float]]]:
        if self.path.suffix == ".jsonl":
            for number, line, value in read_json_lines(self.path):
                vector = value.get("vector") if isinstance(value, dict) else None
                if not isinstance(vector, list) or not all(isinstance(item, (int, float)) for item in vector):
                    raise data_error(self.path, "an object with 'text' and 'vector'", f"{line:.60}", line=number)
                yield number, str(value.get("text", "")), vector
            return
        with self.path.open(encoding="utf-8", newline="") as file:
            table = csv.reader(file)
            next(table, None)
            for row in table:
                try:
                    yield table.line_num, row[0], [float(number) for number in row[1:]]
                except (ValueError, IndexError):
                    got = f"{','.join(row):.60}"
                    raise data_error(self.path, "a text and numbers", got, line=table.line_num) from None

    def _optional(self, name: str) -> np.ndarray | None:
        """Another array of the file; None if it has none of that name."""
        if self.path.suffix == ".npy":
            return None
        try:
            return np.array(self._mapped(name))
        except DataError:
            return None

    def _mapped(self, name: str) -> np.ndarray:
        try:
            if self.path.suffix == ".npy":
                with self.path.open("rb") as file:
                    np.lib.format.read_magic(file)  # np.load takes other files for pickled ones
                array: np.ndarray = np.load(self.path, mmap_mode="r", allow_pickle=False)
                return array
            if self.path.suffix == ".npz":
                with zipfile.ZipFile(self.path) as archive:
                    return self._mapped_entry(archive, name)
            return self._mapped_safetensors(name)
        except (ValueError, OSError, KeyError, TypeError, struct.error, zipfile.BadZipFile) as error:
            raise data_error(self.path, "a file of vectors", str(error)) from None

    def _mapped_entry(self, archive: zipfile.ZipFile, entry_name: str) -> np.ndarray:
        """An entry of a .npz, memory-mapped if it is not compressed."""
        info = archive.getinfo(f"{entry_name}.npy")
        with archive.open(info) as entry:
            version = np.lib.format.read_magic(entry)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(entry)
            header = entry.tell()
            if info.compress_type != zipfile.ZIP_STORED or fortran:
                entry.seek(0)
                whole: np.ndarray = np.lib.format.read_array(entry, allow_pickle=False)
                return whole
        with self.path.open("rb") as file:  # the local header's name and extra field may differ from the directory's
            file.seek(info.header_offset + 26)
            name, additional = struct.unpack("<HH", file.read(4))
        start = info.header_offset + 30 + name + additional + header
        return np.memmap(self.path, dtype, "r", start, shape)

    def _mapped_safetensors(self, name: str) -> np.ndarray:
        with self.path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > self.path.stat().st_size:
                raise ValueError("no header of safetensors")
            header = json.loads(file.read(size))
        self.settings = header.get("__metadata__") or {}
        dtypes = {code: dtype for dtype, code in _SAFETENSORS_TYPES.items()}
        stated = header[name]
        dtype = dtypes.get(stated["dtype"], stated["dtype"])
        return np.memmap(self.path, dtype, "r", 8 + size + stated["data_offsets"][0], tuple(stated["shape"]))
