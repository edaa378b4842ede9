"""Examples that callers pass as objects: the names of their fields, and the error for unusable values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fasttfm.data.lines import DataError

TEXT_NAMES = ("text", "sentence", "sentence1", "premise")
PAIR_NAMES = ("text_pair", "pair", "sentence2", "hypothesis")


def field(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of these fields that is not None; None if there is none."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def unusable(task: str, expected: str, example: Any) -> DataError:
    got = f"{example!r:.60}"
    if isinstance(example, Mapping):
        got = f"an object with {', '.join(map(repr, example))}" if example else "an empty object"
        nulls = [repr(name) for name, value in example.items() if value is None]
        got = f"{got}, where {' and '.join(nulls)} {'is' if len(nulls) == 1 else 'are'} null" if nulls else got
    return DataError(f"{task}: expected {expected}, got {got}")
