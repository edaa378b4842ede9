"""Casts of tensors and of activations to FP8, with the backends that compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.fp8 import reference
from fasttfm.ops.bias_gelu import backward_op as bias_gelu_backward_op
from fasttfm.ops.bias_gelu import forward_op as bias_gelu_forward_op
from fasttfm.ops.core.backends import Backend, BackendTable, always
from fasttfm.ops.fp8 import native
from fasttfm.ops.fp8.scales import Slot


class Quantized(NamedTuple):
    """A matrix in FP8. ``rows`` [N, C] or ``columns`` [C, P] is empty if it is not needed."""

    rows: Tensor
    columns: Tensor
    inverse: Tensor  # 1 / scale


def cast(x: Tensor, slot: Slot, *, with_columns: bool = True, backend: str | None = None) -> Quantized:
    """Casts ``x`` [N, C] to both layouts, or only to rows, with the slot's format and scale, and records its largest
    magnitude."""
    if slot.measuring:
        slot.measure(x)
    x = as_rows(x)
    rows, columns = empty_layouts(x, slot.dtype, with_columns=with_columns)
    TABLE.select(backend, x).forward("cast", x, slot.scale, slot.amax, rows, columns)
    return Quantized(rows, columns, slot.inverse)


def drops_in_cast(x: Tensor, slot: Slot) -> bool:
    """Whether ``cast_dropped`` supports x; not while x has to be measured."""
    return not slot.measuring and _native.missing_hopper() is None and native.refuse(x) is None


def cast_dropped(x: Tensor, slot: Slot, dropout: tuple[Tensor, Tensor, float]) -> Quantized:
    """``cast`` of x after the dropout of ``dropout_add_layer_norm``, given by ``cu_seqlens``, seed and p."""
    rows, columns = empty_layouts(x, slot.dtype)
    native.cast_dropped(x, slot.scale, slot.amax, rows, columns, dropout)
    return Quantized(rows, columns, slot.inverse)


def empty_layouts(x: Tensor, dtype: torch.dtype, *, with_columns: bool = True) -> tuple[Tensor, Tensor]:
    """Rows and columns of ``x`` [N, C], uninitialized; the columns are empty if they are not needed."""
    rows = torch.empty(*x.shape, dtype=dtype, device=x.device)
    shape = (x.shape[1], reference.padded(x.shape[0])) if with_columns else (0,)
    return rows, torch.empty(shape, dtype=dtype, device=x.device)


def gelu(h: Tensor, bias: Tensor | None, kind: str, slot: Slot, backend: str | None = None) -> Quantized:
    """The activation of ``h + bias`` in FP8, only as rows."""
    if slot.measuring:
        slot.measure(bias_gelu_forward_op(h, bias, kind, None))
    rows: Tensor = TABLE.select(backend, h).forward("gelu_forward", h, bias, kind, slot.scale, slot.amax, slot.dtype)
    return Quantized(rows, rows.new_empty(0), slot.inverse)


def gelu_backward(
    da: Tensor,
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    a_slot: Slot,
    slot: Slot,
    want_dbias: bool,
    backend: str | None = None,
) -> tuple[Quantized, Quantized, Tensor]:
    """The gradient dh of ``h`` in both layouts, the recomputed activation as columns, and the bias's gradient."""
    if slot.measuring:
        slot.measure(bias_gelu_backward_op(da, h, bias, kind, False, False, None)[0])
    run = TABLE.select(backend, h).forward
    scales = (a_slot.scale, a_slot.dtype, slot.scale, slot.amax, slot.dtype)
    rows, columns, again, dbias = run("gelu_backward", da, h, bias, kind, *scales, want_dbias)
    return Quantized(rows, columns, slot.inverse), Quantized(again.new_empty(0), again, a_slot.inverse), dbias


def _run_reference(name: str, *arguments: Any) -> Any:
    return getattr(reference, f"fp8_{name}")(*arguments)


TABLE = BackendTable(
    "fp8",
    (
        Backend("cuda", _native.missing_hopper, native.refuse, native.run),
        Backend("reference", always, lambda _: None, _run_reference),
    ),
)
