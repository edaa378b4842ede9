"""Atomic writes: a file is written under another name in the same directory, synced to disk and renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, which is renamed to ``path`` when the block ends. If the block fails, the
    temporary file is removed and an existing ``path`` stays."""
    with atomic_writes([path]) as partials:
        yield partials[path]


@contextlib.contextmanager
def atomic_writes(
    paths: Iterable[Path], *, first: Iterable[Path] = (), stale: Iterable[Path] = ()
) -> Iterator[dict[Path, Path]]:
    """``atomic_write`` for several files that belong together: yields a temporary path for each of ``paths``, and no
    file is renamed before all of them are on disk.

    Args:
        paths: They are renamed in this order.
        first: Files that are removed before.
        stale: Files that are removed after.
    """
    partials = {path: path.with_name(f"{path.name}.partial") for path in paths}
    for path in partials:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "expected a file, got a directory", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partials
        for partial in partials.values():
            sync_file(partial)
    except BaseException:
        for partial in partials.values():
            with contextlib.suppress(OSError):
                partial.unlink()
        raise

    def take_names() -> None:
        for path in first:
            path.unlink(missing_ok=True)
        for path, partial in partials.items():
            if partial.exists():
                os.replace(partial, path)
        for path in stale:
            path.unlink(missing_ok=True)

    try:
        take_names()
    except KeyboardInterrupt:  # a half-renamed set would be worse than a complete one
        first = ()
        take_names()
        raise


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any], **options: Any) -> None:
    """``options``: those of ``json.dumps``."""
    write_text(path, json_text(value, **options))


def json_text(value: Mapping[str, Any], **options: Any) -> str:
    return json.dumps(value, **{"indent": 2, **options}) + "\n"


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the paragraphs that some libraries add."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
