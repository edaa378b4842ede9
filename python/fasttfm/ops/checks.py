"""Argument checks. Every message has the same four parts: op, argument, what was expected, what came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fasttfm.ops.backends import dtype_name

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def bad_value(op: str, argument: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{op}: {argument}: expected {expected}, got {got}")


def bad_type(op: str, argument: str, expected: str, got: Any) -> TypeError:
    return TypeError(f"{op}: {argument}: expected {expected}, got {got}")


def check_floating(op: str, argument: str, tensor: Any, *, optional: bool = False) -> None:
    """``tensor`` is a floating-point tensor (or None, where that is allowed)."""
    if tensor is None and optional:
        return
    if not isinstance(tensor, torch.Tensor):
        raise bad_type(op, argument, "a tensor or None" if optional else "a tensor", type(tensor).__name__)
    if tensor.dtype not in FLOATING:
        expected = ", ".join(dtype_name(dtype) for dtype in FLOATING)
        raise bad_type(op, argument, f"a tensor of {expected}", dtype_name(tensor.dtype))


def check_shape(op: str, argument: str, tensor: torch.Tensor | None, expected: Sequence[int]) -> None:
    """``tensor`` has exactly this shape (None passes)."""
    if tensor is not None and tensor.shape != torch.Size(expected):
        raise bad_value(op, argument, f"shape {tuple(expected)}", f"shape {tuple(tensor.shape)}")


def check_device(op: str, argument: str, tensor: torch.Tensor | None, like: torch.Tensor) -> None:
    """``tensor`` is where ``like`` is (None passes)."""
    if tensor is not None and tensor.device != like.device:
        raise bad_value(op, argument, f"a tensor on {like.device}", f"one on {tensor.device}")


def check_double(op: str, **tensors: torch.Tensor | None) -> None:
    """Double precision is all or nothing: mixing it with lower types would silently lose what it is asked for."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    doubles = [name for name, dtype in dtypes.items() if dtype == torch.float64]
    if doubles and len(doubles) < len(dtypes):
        other = next(name for name in dtypes if name not in doubles)
        raise bad_type(op, other, f"float64 like {doubles[0]}", dtype_name(dtypes[other]))


def check_number(op: str, argument: str, value: Any, *, low: float, high: float, low_open: bool = False) -> None:
    """``value`` is a real number in [low, high], or (low, high] with ``low_open``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise bad_type(op, argument, "a number", type(value).__name__)
    if not (low < value <= high if low_open else low <= value <= high):
        raise bad_value(op, argument, f"a number in {'(' if low_open else '['}{low}, {high}]", value)
