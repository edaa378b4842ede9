"""``PartFolder``: results of a long input as part files, which any number of processes write, each part once.

    output/
        _manifest.json          what the results depend on: settings, the model, the input, rows per part
        part-000000.parquet     results of the rows 0 to rows per part - 1
        part-000001.parquet     ...
        _complete.json          the numbers of parts and rows, when all parts are written
        .unfinished/            files that are being written

A part file appears when it is complete and on disk. A process that is killed leaves only a file in ``.unfinished``, and
the next run writes the parts that are missing. pyarrow and Ray Data read the folder as one data set: they ignore names
that begin with ``_`` or ``.``.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from fasttfm._atomic_files import json_text, sync_file
from fasttfm.data.lines import data_error

MANIFEST, COMPLETE, UNFINISHED = "_manifest.json", "_complete.json", ".unfinished"
_NAME = re.compile(r"part-(\d+)\.")
_SAMPLE, _SAMPLES = 1 << 16, 16  # bytes of a sample of a long file, and how many samples are read
Row = TypeVar("Row")
Result = TypeVar("Result")


class Totals(NamedTuple):
    """The numbers of parts and of rows of an input."""

    parts: int
    rows: int


class PartFolder:
    """A folder of part files and its manifest, which is written if it does not exist yet.

    Args:
        suffix: That of part files, such as ``".parquet"``.
        settings: What the results depend on, as values of JSON. A folder with other settings raises ValueError.
    """

    def __init__(self, folder: Path, suffix: str, settings: Mapping[str, Any]) -> None:
        self.folder, self.suffix = Path(folder), suffix
        self.settings: dict[str, Any] = json.loads(json.dumps({**settings, "suffix": suffix}))
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"--output: expected a folder, got the file {self.folder}")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / MANIFEST).exists():
            others = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith((".", "_")))
            # Another process may have written the manifest and a part since.
            if others and not (self.folder / MANIFEST).exists():
                expected = f"a new or empty folder, or one with {MANIFEST}"
                raise ValueError(f"--output: expected {expected}, got {self.folder} with {others[0]}")
            self._write_once(MANIFEST, self.settings)
        self._check_settings(json.loads((self.folder / MANIFEST).read_text(encoding="utf-8")))

    @classmethod
    def opened(cls, folder: Path) -> PartFolder:
        """A folder that has been written, with its own settings. Raises DataError unless all of its parts are."""
        for name, expected in ((MANIFEST, "a folder of part files"), (COMPLETE, "all parts of a run that has ended")):
            if not (folder / name).is_file():
                raise data_error(folder, f"{expected}, with {name}", "none")
        settings = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        parts = cls(folder, settings["suffix"], settings)
        total = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))["parts"]
        if parts.numbers() != list(range(total)):
            raise data_error(folder, f"{total:,} parts", f"{len(parts.numbers()):,} of them")
        return parts

    def path(self, number: int) -> Path:
        """The path of a part file."""
        return self.folder / f"part-{number:06d}{self.suffix}"

    def has(self, number: int) -> bool:
        """Whether a part is written."""
        return self.path(number).exists()

    def numbers(self) -> list[int]:
        """The numbers of the parts that are written, in order."""
        names = (_NAME.match(path.name) for path in self.folder.glob(f"part-*{self.suffix}"))
        return sorted(int(match[1]) for match in names if match is not None)

    def write(self, number: int, write: Callable[[Path], Result]) -> Result:
        """Calls ``write`` with the path of a temporary file, syncs the file to disk and renames it. Several processes
        may write the same part: each has a temporary file of its own, and the last one that is renamed remains."""
        path = self.path(number)
        temporary = self.folder / UNFINISHED / f"{uuid.uuid4().hex}-{path.name}"
        temporary.parent.mkdir(exist_ok=True)
        try:
            result = write(temporary)
            sync_file(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(self.folder)
        return result

    def finish(self, totals: Totals) -> bool:
        """Writes ``_complete.json`` and removes unfinished files if all parts are written. Returns whether they are."""
        if self.numbers() != list(range(totals.parts)):
            return False
        self._write_once(COMPLETE, totals._asdict())
        shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)
        return True

    def _write_once(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a file unless another process has written it. It appears when it is on disk."""
        temporary = self.folder / f".{uuid.uuid4().hex}-{name}"
        try:
            temporary.write_text(json_text(value), encoding="utf-8")
            sync_file(temporary)
            with contextlib.suppress(FileExistsError):
                try:
                    os.link(temporary, self.folder / name)
                except PermissionError:  # a file system without hard links
                    os.replace(temporary, self.folder / name)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(self.folder)

    def _check_settings(self, written: Mapping[str, Any]) -> None:
        for name in (*self.settings, *(name for name in written if name not in self.settings)):
            before, now = written.get(name), self.settings.get(name)
            if before != now:
                expected = f"{name} {before!r}, with which {self.folder} was begun"
                hint = "; other settings need another folder"
                raise ValueError(f"--output: {MANIFEST}: expected {expected}, got {now!r}{hint}")


class Parts(Generic[Row]):
    """Rows in parts of ``size`` rows, read once and in order. ``totals`` is that of all rows after the last part.

    Args:
        rows: They are read lazily.
        size: The number of rows of a part; the last one may have fewer.
    """

    def __init__(self, rows: Iterable[Row], size: int) -> None:
        if size < 1:
            raise ValueError(f"--rows-per-part: expected a number from 1 on, got {size}")
        self._rows, self._size = iter(rows), size
        self.totals = Totals(0, 0)

    def chosen(self, is_chosen: Callable[[int], bool]) -> Iterator[tuple[int, Iterator[Row]]]:
        """Yields number and rows of each part for whose number ``is_chosen`` returns True. The rows of a part must be
        read before the next one; those of other parts are read and dropped."""
        for number in itertools.count():
            first = list(itertools.islice(self._rows, 1))
            if not first:
                return
            rows = _Counted(itertools.chain(first, itertools.islice(self._rows, self._size - 1)))
            if is_chosen(number):
                yield number, rows
            self.totals = Totals(number + 1, self.totals.rows + rows.count_all())


class _Counted(Iterator[Row]):
    """An iterator that counts its items."""

    def __init__(self, items: Iterator[Row]) -> None:
        self._items, self._count = items, 0

    def __next__(self) -> Row:
        item = next(self._items)
        self._count += 1
        return item

    def count_all(self) -> int:
        """The number of all items, after reading the rest."""
        return self._count + sum(1 for _ in self._items)


def fingerprint(files: Iterable[Path], relative_to: Path | None = None) -> dict[str, Any]:
    """The number of files, their bytes, and a hash of their names, sizes and contents. Of a file above 1 MiB the hash
    reads 16 samples of 64 KiB, evenly spread from its beginning to its end.

    Args:
        relative_to: The folder from which on names count; by default only the last part of paths does.
    """
    digest, count, total = hashlib.sha256(), 0, 0
    for path in files:
        size = path.stat().st_size
        name = path.name if relative_to is None else path.relative_to(relative_to).as_posix()
        digest.update(f"{name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _SAMPLE * _SAMPLES:
                digest.update(file.read())
            else:
                for sample in range(_SAMPLES):
                    file.seek((size - _SAMPLE) * sample // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE))
        count, total = count + 1, total + size
    return {"files": count, "bytes": total, "sha256": digest.hexdigest()}


def _sync_folder(folder: Path) -> None:
    """Writes the names of a folder's files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every network file system can
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
