"""Calls of the native core's functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import _native

FUNCTIONS = {"identity": 0, "exp": 1, "erf": 2, "tanh": 3, "exp2_in_range": 4}  # kernels/elementwise/op.h


def elementwise(
    x: Tensor,
    function: str = "identity",
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """``function`` of each element, read in ``x``'s type and written in ``dtype`` by the loads and stores of CPU
    kernels."""
    y = torch.empty_like(x, dtype=dtype or x.dtype) if out is None else out
    codes = (_native.DTYPE_CODES[x.dtype], _native.DTYPE_CODES[y.dtype], FUNCTIONS[function])
    _native.core().elementwise_cpu(x.data_ptr(), y.data_ptr(), x.numel(), *codes, threads)
    return y


def layer_norm_arguments(x: Tensor) -> tuple[list[Any], dict[str, Tensor]]:
    """The arguments of ``layer_norm_forward`` for ``x`` [N, C] without parameters, and the outputs among them."""
    outputs = {"y": torch.empty_like(x), "statistics": torch.empty(2, x.shape[0])}
    return [x, None, None, *outputs.values(), 1e-5], outputs
