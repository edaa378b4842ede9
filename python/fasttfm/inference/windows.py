"""What a call is given: one input or many, in windows of texts that are sorted by length together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

_WINDOWS = (256, 4096)  # the first window, and the largest


def is_single(inputs: Any) -> bool:
    """Whether the input is one text, one pair of texts or one list of ids."""
    if isinstance(inputs, list):
        return bool(inputs) and isinstance(inputs[0], (int, np.integer))
    if isinstance(inputs, tuple):
        return len(inputs) == 2 and all(isinstance(text, str) for text in inputs)
    return isinstance(inputs, str) or (isinstance(inputs, (Tensor, np.ndarray)) and inputs.ndim == 1)


def check_iterable(inputs: Any) -> None:
    if not isinstance(inputs, Iterable) or isinstance(inputs, Mapping):
        got = type(inputs).__name__
        raise TypeError(f"Session: inputs: expected texts, pairs of texts or lists of ids, got {got}")


def is_one_window(inputs: Any) -> bool:
    """Whether inputs are tokenized at once."""
    return (type(inputs) is list or isinstance(inputs, Sequence)) and len(inputs) <= _WINDOWS[0]


def windows(inputs: Iterable[Any]) -> Iterator[list[Any]]:
    """Splits the inputs into lists whose size grows from ``_WINDOWS[0]`` to ``_WINDOWS[1]``."""
    source, size = iter(inputs), _WINDOWS[0]
    while window := list(itertools.islice(source, size)):
        yield window
        size = min(2 * size, _WINDOWS[1])
