"""Atomic writes: a file is written under another name in the same directory, synced to disk and renamed."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
    own = _Group(set(partials.values()), [(partials, tuple(first), tuple(stale))])
    try:
        yield partials
        for partial in partials.values():
            sync_file(partial)
    except BaseException:
        own.discard()
        raise
    if (group := _group.get()) is None:
        own.finish()
    else:
        group.partials |= own.partials
        group.sets += own.sets


@contextlib.contextmanager
def written_together() -> Iterator[None]:
    """Atomic writes of the block belong together: no file is renamed before all of them are on disk, and if the block
    fails all temporary files are removed. The block must not read what it writes."""
    if _group.get() is not None:
        yield
        return
    group = _Group(set(), [])
    token = _group.set(group)
    try:
        yield
    except BaseException:
        group.discard()
        raise
    finally:
        _group.reset(token)
    group.finish()


@dataclass
class _Group:
    """Files under their temporary names: for each set of them, the temporary path of each path, and the files that are
    removed before and after."""

    partials: set[Path]
    sets: list[tuple[dict[Path, Path], tuple[Path, ...], tuple[Path, ...]]]

    def discard(self) -> None:
        for partial in self.partials:
            with contextlib.suppress(OSError):
                partial.unlink()

    def finish(self) -> None:
        try:
            self._take_names()
        except (KeyboardInterrupt, SystemExit):  # of a signal: a half-renamed set would be worse than a complete one
            self._take_names()
            raise

    def _take_names(self) -> None:
        while self.sets:
            partials, first, stale = self.sets[0]
            for path in first:
                path.unlink(missing_ok=True)
            self.sets[0] = partials, (), stale  # if this is interrupted, the next call removes no file that is in place
            for path, partial in partials.items():
                if partial.exists():
                    os.replace(partial, path)
            for path in stale:
                path.unlink(missing_ok=True)
            del self.sets[0]


_group: contextvars.ContextVar[_Group | None] = contextvars.ContextVar("_group", default=None)


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
