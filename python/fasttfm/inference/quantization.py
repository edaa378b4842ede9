"""Vectors in fewer bits: ``quantize_vectors`` with the rounding of sentence-transformers' ``quantize_embeddings``."""

from __future__ import annotations

from typing import Any

import numpy as np

PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
WITH_RANGES = ("int8", "uint8")
PACKED = ("binary", "ubinary")
_STEPS = 255


def check_precision(where: str, precision: Any) -> None:
    """Raises ValueError if it is not one of ``PRECISIONS``; ``where`` begins the message."""
    if precision not in PRECISIONS:
        raise ValueError(f"{where}: expected {', '.join(PRECISIONS)}, got {precision!r}")


def vector_ranges(vectors: np.ndarray) -> np.ndarray:
    """The ranges of calibration vectors [n, D]: the smallest and the largest value of each element, fp32 [2, D]."""
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or len(vectors) < 2 or vectors.dtype.kind != "f":
        got = f"{vectors.dtype} {list(vectors.shape)}"
        raise ValueError(f"vector_ranges: vectors: expected at least two vectors of floating-point numbers, got {got}")
    return np.stack([vectors.min(0), vectors.max(0)]).astype(np.float32)


def check_ranges(where: str, ranges: Any, width: int) -> np.ndarray:
    """The ranges, fp32 [2, width]. Raises ValueError if they are anything else."""
    expected = f"{where}: ranges: expected the smallest and the largest value of each element, [2, {width}]"
    if ranges is None:
        raise ValueError(f"{expected} (vector_ranges computes them), got None")
    bounds = np.asarray(ranges)
    if bounds.shape != (2, width) or bounds.dtype.kind not in "fiu":
        raise ValueError(f"{expected}, got {bounds.dtype} {list(bounds.shape)}")
    bounds = bounds.astype(np.float32)
    if not np.isfinite(bounds).all() or (bounds[0] > bounds[1]).any():
        raise ValueError(f"{expected}, got a range that is not finite or whose first value is the larger one")
    return bounds


def stored_width(precision: str, width: int) -> int:
    """How many numbers a vector of ``width`` elements has in this precision."""
    return -(-width // 8) if precision in PACKED else width


def quantize_vectors(vectors: np.ndarray, precision: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """Vectors [..., D] in another precision.

    - ``"float32"`` and ``"float16"`` cast.
    - ``"uint8"``: the number of the bucket, of 256 between the element's smallest and largest value; ``"int8"``
      subtracts 128.
    - ``"ubinary"``: the signs, eight to a byte [..., D / 8], the first in the highest bit; ``"binary"`` subtracts 128.

    Args:
        ranges: fp32 [2, D], for int8 and uint8: those of ``vector_ranges``. All vectors that are compared need the
            same ones.
    """
    check_precision("quantize_vectors: precision", precision)
    if precision in ("float32", "float16"):
        return np.ascontiguousarray(vectors, precision)
    if precision in PACKED:
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits ^ 128).view(np.int8)
    starts, steps = _starts_and_steps(check_ranges("quantize_vectors", ranges, vectors.shape[-1]))
    buckets = np.clip(np.floor((vectors - starts) / steps), 0, _STEPS).astype(np.uint8)
    return buckets if precision == "uint8" else (buckets ^ 128).view(np.int8)


def restore_vectors(stored: np.ndarray, precision: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """fp32 [..., D] of vectors of ``quantize_vectors``: the middle of each bucket, and 1 or -1 for each sign. Of
    packed signs D is a multiple of 8."""
    if precision in ("float32", "float16"):
        return stored.astype(np.float32)
    if precision in PACKED:
        bits = np.unpackbits(as_unsigned(stored), axis=-1)
        return bits.astype(np.float32) * 2 - 1
    offsets, steps = scales_of(check_ranges("restore_vectors", ranges, stored.shape[-1]))
    vectors: np.ndarray = offsets + steps * (as_unsigned(stored) ^ 128).view(np.int8)
    return vectors


def as_unsigned(stored: np.ndarray) -> np.ndarray:
    """The bytes of int8 vectors or of ``"binary"`` as those of uint8 vectors or of ``"ubinary"``."""
    return stored.view(np.uint8) ^ 128 if stored.dtype == np.int8 else stored


def scales_of(ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``offsets`` and ``steps`` [D], with which an int8 vector q restores to ``offsets + steps * q``."""
    starts, steps = _starts_and_steps(ranges)
    half = (ranges[1] - ranges[0]) / np.float32(2 * _STEPS)  # 0 for an element that is the same in all vectors
    return starts + steps * np.float32(128) + half, steps


def _starts_and_steps(ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    steps = (ranges[1] - ranges[0]) / np.float32(_STEPS)
    return ranges[0], np.where(steps == 0, np.float32(1), steps)
