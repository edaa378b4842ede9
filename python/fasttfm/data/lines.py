"""``read_lines`` and ``read_json_lines`` read a file line by line; ``DataError`` reports an unusable file."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

SURROGATE = re.compile("[\\ud800-\\udfff]")


class DataError(ValueError):
    """An unusable file or text. The message names the file and line, what was expected and what was found."""


def data_error(where: str | Path, expected: str, got: str, *, line: int | None = None) -> DataError:
    location = f"{where}" if line is None else f"{where}, line {line}"
    return DataError(f"{location}: expected {expected}, got {got}")


def read_json_lines(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Yields number, text and value of each line that is not blank."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        yield number, line, json_value(path, number, line)


def json_value(path: Path, number: int, line: str) -> Any:
    """The value of a line."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise data_error(path, "a JSON object", f"{line:.60} ({error})", line=number) from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields number (from 1) and text of every line of a UTF-8 file, which may be compressed, without line endings."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    got = f"byte 0x{line[error.start]:02x} as number {error.start + 1} of the line"
                    raise data_error(path, "UTF-8 text", got, line=number) from None
                yield number, text.rstrip("\r\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise data_error(path, "a whole gzip file", str(error)) from None
    except OSError as error:
        raise data_error(path, "a readable file", error.strerror or str(error)) from None


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
