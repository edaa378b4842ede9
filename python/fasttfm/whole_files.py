"""Files that are whole or not there: written beside their place, brought to the disk, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path beside ``path`` to write to. What was written takes its name when the block ends; if the block
    fails it is removed, and an earlier file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        sync_file(partial)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any], **options: Any) -> None:
    """``options``: those of ``json.dumps``."""
    write_text(path, json.dumps(value, **{"indent": 2, **options}) + "\n")


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
