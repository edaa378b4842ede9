"""Launchers of the native core as functions of tensors."""

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
    """``function`` of each element, read in ``x``'s type and written in ``dtype`` as every CPU kernel does it."""
    y = torch.empty_like(x, dtype=dtype or x.dtype) if out is None else out
    _native.core().elementwise_cpu(
        x=x.data_ptr(),
        y=y.data_ptr(),
        count=x.numel(),
        x_dtype=_native.DTYPE_CODES[x.dtype],
        y_dtype=_native.DTYPE_CODES[y.dtype],
        function=FUNCTIONS[function],
        threads=threads,
    )
    return y


def layer_norm_fields(x: Tensor, threads: int = 1) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of ``layer_norm_forward_cpu`` for ``x`` [N, C] without parameters, and the outputs they point to."""
    outputs = {"y": torch.empty_like(x), "mean": torch.empty(x.shape[0]), "rstd": torch.empty(x.shape[0])}
    fields = {
        "x": x.data_ptr(),
        "weight": 0,
        "bias": 0,
        **{name: tensor.data_ptr() for name, tensor in outputs.items()},
        "rows": x.shape[0],
        "columns": x.shape[1],
        "x_stride": x.stride(0),
        "eps": 1e-5,
        "dtype": _native.DTYPE_CODES[x.dtype],
        "threads": threads,
    }
    return fields, outputs
