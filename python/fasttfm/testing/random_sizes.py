"""Sizes for random cases (fuzz.py): from empty and tiny to medium, odd ones and powers of two."""

from __future__ import annotations

import random
from collections.abc import Sequence

# With two or three normalised columns, gradients are small differences of large numbers: only rounding errors.
NORMALISED = 5


def random_size(source: random.Random, largest: int = 300) -> int:
    """A size of at least 1, small as often as large, and often next to a power of two."""
    size = round(largest ** source.random())
    if source.random() < 0.4:
        size = 2 ** (size.bit_length() - 1) + source.choice((-1, 0, 1))
    return min(largest, max(1, size))


def random_shape(
    source: random.Random, *, dimensions: int | None = None, smallest: int = 1, largest: int = 300
) -> tuple[int, ...]:
    """Leading sizes, sometimes 0, and columns."""
    count = dimensions or source.choice((1, 2, 2, 3, 3))
    leading = [0 if source.random() < 0.03 else random_size(source, 60 if count == 2 else 8) for _ in range(count - 1)]
    return *leading, max(smallest, random_size(source, largest))


def random_lengths(source: random.Random, longest: int = 40) -> tuple[int, ...]:
    """Lengths of sequences; some are 0."""
    count = source.randint(1, 5)
    return tuple(0 if source.random() < 0.2 else random_size(source, longest) for _ in range(count))


def random_scale(source: random.Random) -> float:
    return source.choice((1.0, 1.0, 1.0, 1e-3, 30.0))


def some_of(source: random.Random, names: Sequence[str]) -> tuple[str, ...]:
    """Each with a probability of 3/4."""
    return tuple(name for name in names if source.random() < 0.75)
