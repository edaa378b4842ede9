"""Argument checks. Every message has the same four parts: op, argument, what was expected, what was passed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fasttfm.kernels.common.index_errors import IndexErrors as IndexErrors  # for callers without a kernel
from fasttfm.ops.core.backends import dtype_name

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def bad_value(op: str, argument: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{op}: {argument}: expected {expected}, got {got}")


def bad_type(op: str, argument: str, expected: str, got: Any) -> TypeError:
    return TypeError(f"{op}: {argument}: expected {expected}, got {got}")


def in_one_line(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
    """``tensor`` is on the device of ``like`` (None passes)."""
    if tensor is not None and tensor.device != like.device:
        raise bad_value(op, argument, f"a tensor on {like.device}", f"one on {tensor.device}")


def check_double(op: str, **tensors: torch.Tensor | None) -> None:
    """Either all tensors are fp64 or none: mixing it with other dtypes would silently lose its precision."""
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


INDEX = (torch.int64, torch.int32)


def check_index(op: str, argument: str, tensor: Any) -> None:
    """``tensor`` is a tensor of indices."""
    if not isinstance(tensor, torch.Tensor):
        raise bad_type(op, argument, "a tensor", type(tensor).__name__)
    if tensor.dtype not in INDEX:
        raise bad_type(op, argument, "a tensor of int64 or int32", dtype_name(tensor.dtype))


def check_cu_seqlens(op: str, cu_seqlens: Any, like: torch.Tensor, *, argument: str = "cu_seqlens") -> None:
    """``cu_seqlens`` has the form of boundaries of packed sequences: int32 [sequences + 1], on the device of
    ``like``."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise bad_type(op, argument, "a tensor", type(cu_seqlens).__name__)
    if cu_seqlens.dtype != torch.int32:
        raise bad_type(op, argument, "a tensor of int32", dtype_name(cu_seqlens.dtype))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise bad_value(op, argument, "shape (sequences + 1,)", f"shape {tuple(cu_seqlens.shape)}")
    check_device(op, argument, cu_seqlens, like)


def check_cu_seqlens_values(
    op: str,
    cu_seqlens: torch.Tensor,
    total: int,
    longest: int | None = None,
    *,
    exact: bool = True,
    argument: str = "cu_seqlens",
) -> None:
    """On the CPU: ``cu_seqlens`` increases from 0 to ``total`` (or ends before, unless ``exact``) in steps of at most
    ``longest``. On a GPU the values are not validated, because reading them would synchronize; kernels stay inside
    their tensors for any values."""
    if not cu_seqlens.is_cpu:
        return
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] > total or (exact and values[-1] < total):
        expected = f"values from 0 to {'' if exact else 'at most '}{total}"
        raise bad_value(op, argument, expected, f"from {values[0]} to {values[-1]}")
    for sequence, (first, end) in enumerate(itertools.pairwise(values)):
        if end < first:
            raise bad_value(op, argument, "values that never decrease", f"{first}, {end} at sequence {sequence}")
        if longest is not None and end - first > longest:
            raise bad_value(
                op, argument, f"sequences of at most {longest} tokens", f"{end - first} in sequence {sequence}"
            )


def check_seed(op: str, seed: Any, like: torch.Tensor) -> None:
    """``seed`` has the form of philox.draw_seed()'s result (None passes: a seed will be drawn)."""
    if seed is None:
        return
    if not isinstance(seed, torch.Tensor):
        raise bad_type(op, "seed", "a tensor or None", type(seed).__name__)
    if seed.dtype != torch.int64:
        raise bad_type(op, "seed", "a tensor of int64", dtype_name(seed.dtype))
    check_shape(op, "seed", seed, (1,))
    check_device(op, "seed", seed, like)
