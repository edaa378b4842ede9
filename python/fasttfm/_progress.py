"""``progress``: the bar of a long call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_DELAY = 2.0  # seconds before a bar appears


def progress(items: Iterable[Item], total: int | None = None, unit: str = "text") -> Iterator[Item]:
    """Yields the items. In a terminal or notebook, a call that takes longer than two seconds shows a bar of tqdm, if
    that is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield from items
        return
    yield from tqdm(items, total=total, unit=f" {unit}s", delay=_DELAY, disable=None, leave=False)
