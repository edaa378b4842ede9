"""``ShardFile``: a file of a stream, by an address of fsspec: where it is, and its rows from any position on.

    .parquet                 a row is a text of one column; a position is a row's number
    .jsonl, .jsonl.gz        a line has an object with the text; a position is a byte of the uncompressed file
    .tar, .tar.gz, .tgz      WebDataset: files of one name up to its first dot are a sample, whose text is its .txt file
                             or a field of its .json file; a position is a byte of the uncompressed file
    .npy                     token ids [tokens]; a row is a document, which an end token ends; a position is a token

Rows of .npy are arrays of token ids, the others are texts. A local .npy is memory-mapped.
"""

from __future__ import annotations

import gzip
import itertools
import json
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fasttfm import _extras
from fasttfm.data.lines import DataError, data_error
from fasttfm.data.tables import pyarrow_for

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".tar", ".tar.gz", ".tgz", ".npy")
_ROWS = 1024  # of a parquet file that are decoded together
_TOKENS = 1 << 20  # of an array that are read together; also the maximum length of a document
_GZIP = (".gz", ".tgz")

Row = str | np.ndarray


@dataclass(frozen=True)
class ShardFile:
    """A file: its address and its size in bytes."""

    address: str
    size: int

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    def rows(self, start: int = 0, *, column: str = "text", end: int | None = None) -> Iterator[tuple[int, int, Row]]:
        """Yields position, the next row's position, and content of the rows from the position ``start`` on.

        Args:
            start: A position of this file.
            column: The column or field that has the text.
            end: The token that ends a document of a token array; by default the array is one document.
        """
        try:
            if self.name.endswith(".npy"):
                yield from _token_rows(self, start, end)
            elif self.name.endswith(".parquet"):
                yield from _parquet_rows(self, start, column)
            elif self.name.endswith((".jsonl", ".jsonl.gz")):
                yield from _json_rows(self, start, column)
            else:
                yield from _tar_rows(self, start, column)
        except DataError:
            raise
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise data_error(self.address, "a whole, readable file", f"{type(error).__name__}: {error}") from error


def shard_files(source: str | Path | Sequence[str | Path]) -> list[ShardFile]:
    """The files of addresses, glob patterns and folders, by name. From a folder, every file in and below it whose name
    ends in one of ``SUFFIXES`` is taken."""
    sizes: dict[str, int] = {}
    for address in [source] if isinstance(source, (str, Path)) else source:
        sizes |= _files_of(str(address))
    return [ShardFile(address, size) for address, size in sorted(sizes.items())]


def _files_of(address: str) -> dict[str, int]:
    fsspec = _fsspec()
    try:
        system, path = fsspec.core.url_to_fs(address)
        if any(sign in path for sign in "*?["):
            entries = system.glob(path, detail=True)
        elif system.isdir(path):
            entries = {name: entry for name, entry in system.find(path, detail=True).items() if name.endswith(SUFFIXES)}
        else:
            entries = {path: system.info(path)} if system.exists(path) else {}
    except ImportError as error:  # fsspec names the package of the protocol
        raise ImportError(f"{address}: {error}") from error
    except (OSError, ValueError) as error:
        raise data_error(address, "an address that fsspec opens", f"{type(error).__name__}: {error}") from error
    files = {name: entry for name, entry in entries.items() if entry["type"] == "file"}
    if not files:
        raise data_error(address, "a file, a folder or a pattern that matches one", "nothing there")
    if foreign := sorted(name for name in files if not name.endswith(SUFFIXES)):
        raise data_error(foreign[0], f"a name that ends in {', '.join(SUFFIXES)}", "another one")
    return {system.unstrip_protocol(name): int(entry["size"]) for name, entry in files.items()}


def _fsspec() -> Any:
    try:
        import fsspec
        import fsspec.core
    except ImportError:
        raise _extras.missing("reading data while training", "fsspec", "stream") from None
    return fsspec


def _opened(file: ShardFile, stack: ExitStack) -> IO[bytes]:
    """The bytes of a file, uncompressed. A file that is read from its start to its end needs no more than one block of
    memory."""
    system, path = _fsspec().core.url_to_fs(file.address)
    handle: Any = stack.enter_context(system.open(path, "rb"))
    if file.name.endswith(_GZIP):
        handle = stack.enter_context(gzip.GzipFile(fileobj=handle, mode="rb"))
    opened: IO[bytes] = handle
    return opened


# ---- texts -----------------------------------------------------------------------------------------------------------


def _parquet_rows(file: ShardFile, start: int, column: str) -> Iterator[tuple[int, int, Row]]:
    pyarrow = pyarrow_for(Path(file.address))
    system, path = _fsspec().core.url_to_fs(file.address)
    with system.open(path, "rb") as handle:
        try:
            table = pyarrow.parquet.ParquetFile(handle, pre_buffer=True)
            if column not in (names := table.schema_arrow.names):
                raise data_error(file.address, f"a column {column!r}", f"columns {', '.join(map(repr, names))}")
            number = 0
            for group in range(table.num_row_groups):
                count = table.metadata.row_group(group).num_rows
                if number + count <= start:
                    number += count
                    continue
                for batch in table.iter_batches(_ROWS, row_groups=[group], columns=[column]):
                    skipped = min(max(0, start - number), len(batch))
                    for text in batch.column(0).slice(skipped).to_pylist():
                        yield number + skipped, number + skipped + 1, _text(text, file, f"row {number + skipped}")
                        number += 1
                    number += skipped
        except pyarrow.ArrowException as error:
            raise data_error(file.address, "a parquet file", str(error)) from None


def _json_rows(file: ShardFile, start: int, column: str) -> Iterator[tuple[int, int, Row]]:
    with ExitStack() as stack:
        handle = _opened(file, stack)
        handle.seek(start)
        position = start
        for line in handle:
            following = position + len(line)
            if line.strip():
                where = f"byte {position}"
                yield position, following, _field(line, file, where, column)
            position = following


def _tar_rows(file: ShardFile, start: int, column: str) -> Iterator[tuple[int, int, Row]]:
    with ExitStack() as stack:
        handle = _opened(file, stack)
        handle.seek(start)
        if start and not handle.read(1):  # after the last sample of an archive without blocks at its end
            return
        handle.seek(start)
        archive: Any = stack.enter_context(tarfile.open(fileobj=handle, mode="r|"))
        begin, following = start, start
        key: tuple[str, str] | None = None
        parts: dict[str, bytes] = {}
        for member in archive:
            archive.members = []  # it would keep every member
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            stem, _, ending = name.partition(".")
            if parts and (folder, stem) != key:
                yield begin, following, _sample(parts, file, column)
                parts = {}
            if not parts:
                begin, key = start + member.offset, (folder, stem)
            following = start + member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            if ending in ("txt", "json") and (content := archive.extractfile(member)) is not None:
                parts[ending] = content.read()
            else:
                parts.setdefault("", member.name.encode())
        if parts:
            yield begin, following, _sample(parts, file, column)


def _sample(parts: dict[str, bytes], file: ShardFile, column: str) -> str:
    where = "a sample"
    if "txt" in parts:
        try:
            return parts["txt"].decode("utf-8")
        except UnicodeDecodeError as error:
            raise data_error(f"{file.address}, {where}", "UTF-8 text", str(error)) from None
    if "json" in parts:
        return _field(parts["json"], file, where, column)
    raise data_error(file.address, "samples with a .txt or a .json file", parts[""].decode(errors="replace"))


def _field(line: bytes, file: ShardFile, where: str, column: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise data_error(f"{file.address}, {where}", "a JSON object", f"{line[:60]!r} ({error})") from None
    if not isinstance(value, dict) or column not in value:
        got = ", ".join(map(repr, value)) if isinstance(value, dict) else type(value).__name__
        raise data_error(f"{file.address}, {where}", f"an object with the field {column!r}", got)
    return _text(value[column], file, where)


def _text(value: Any, file: ShardFile, where: str) -> str:
    if not isinstance(value, str):
        raise data_error(f"{file.address}, {where}", "a text", f"{value!r:.60}")
    return value


# ---- token ids -------------------------------------------------------------------------------------------------------


def _token_rows(file: ShardFile, start: int, end: int | None) -> Iterator[tuple[int, int, Row]]:
    """Documents without their end tokens; one of more than ``_TOKENS`` tokens is divided."""
    with ExitStack() as stack:
        array = _array(file, stack)
        begin = start
        waiting: list[np.ndarray] = []  # the document that begins at ``begin``
        length = 0
        # Pieces end at multiples of _TOKENS, so that long documents are divided in the same places for any ``start``.
        edges = [start, *range(start - start % _TOKENS + _TOKENS, len(array), _TOKENS), len(array)]
        for low, high in itertools.pairwise(edges):
            tokens = array.read(low, high)
            ends = np.flatnonzero(tokens == end) if end is not None else np.zeros(0, np.int64)
            first = 0
            for stop in ends.tolist():
                row = np.concatenate([*waiting, tokens[first:stop]])
                if len(row):
                    yield begin, low + stop + 1, row
                waiting, length, first, begin = [], 0, stop + 1, low + stop + 1
            if first < len(tokens):
                waiting.append(tokens[first:])
                length += len(tokens) - first
            if length >= _TOKENS:
                following = low + len(tokens)
                yield begin, following, np.concatenate(waiting)
                waiting, length, begin = [], 0, following
        if waiting:
            yield begin, len(array), np.concatenate(waiting)


class _Array:
    """Token ids in a file: memory-mapped if it is local, otherwise read in pieces."""

    def __init__(self, mapped: np.ndarray | None, handle: Any, dtype: np.dtype[Any], length: int) -> None:
        self.mapped, self.handle, self.dtype, self.length = mapped, handle, dtype, length
        self.data = handle.tell() if handle is not None else 0

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int) -> np.ndarray:
        if self.mapped is not None:
            return self.mapped[start:stop]
        self.handle.seek(self.data + start * self.dtype.itemsize)
        content = self.handle.read((stop - start) * self.dtype.itemsize)
        if len(content) != (stop - start) * self.dtype.itemsize:
            raise EOFError(f"{len(content)} bytes of the tokens from {start} to {stop}")
        return np.frombuffer(content, self.dtype)


def _array(file: ShardFile, stack: ExitStack) -> _Array:
    system, path = _fsspec().core.url_to_fs(file.address)
    handle = stack.enter_context(system.open(path, "rb"))
    try:
        version = np.lib.format.read_magic(handle)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(handle)
    except ValueError as error:
        raise data_error(file.address, "a .npy file", str(error)) from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise data_error(file.address, "integers [tokens]", f"{dtype} {list(shape)}")
    mapped = np.load(path, mmap_mode="r") if getattr(system, "local_file", False) else None
    return _Array(mapped, handle, dtype, shape[0])
