"""Casts to FP8 with one scale per tensor, in plain torch: the specification.

    q = round(clamp(x * scale, -limit, limit))        x is about q / scale
    amax = max(amax, largest finite or infinite |x|)

The limit is the format's largest number, 448 for e4m3 and 57344 for e5m2. Rounding is to nearest, ties to even. A
finite x beyond the limit saturates; NaN and infinite x become NaN, so that the cast does not hide an earlier overflow.
``amax`` ignores NaN.

``rows`` is q [N, C]. ``columns`` is its transpose [C, P] with P >= N a multiple of 16 and zeros after the N-th column:
FP8 tensor cores need both operands contiguous along the summed dimension, which is N in the gradient of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common.activation import activate, derivative
from fasttfm.kernels.common.rows import empty_output

ALIGNMENT = 16  # the dimensions of FP8 GEMMs are multiples of it
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in FP8."""
    limit, wide = LIMITS[dtype], x.float()
    return ((wide * scale).clamp(-limit, limit) + (wide - wide)).to(dtype)


def record_amax(amax: Tensor, x: Tensor) -> None:
    """Raises ``amax`` [1] to the largest magnitude in ``x``, ignoring NaN."""
    if x.numel():
        magnitude = x.detach().abs().float()
        torch.maximum(amax, magnitude.masked_fill_(magnitude.isnan(), 0.0).amax(), out=amax)


def padded(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


def transposed(q: Tensor) -> Tensor:
    """[N, C] as a contiguous [C, P], with zeros after the N-th column."""
    rows, columns = q.shape
    result = torch.zeros(columns, padded(rows), dtype=q.dtype, device=q.device)
    result[:, :rows] = q.t()
    return result


def fp8_cast(x: Tensor, scale: Tensor, amax: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Writes ``rows`` and ``columns`` of x [N, C], unless they are empty. Updates ``amax``."""
    q = quantize(x, scale, rows.dtype)
    record_amax(amax, x)
    if rows.numel():
        rows.copy_(q)
    if columns.numel():
        columns.copy_(transposed(q))


def fp8_gelu_forward(
    h: Tensor, bias: Tensor | None, kind: str, scale: Tensor, amax: Tensor, dtype: torch.dtype
) -> Tensor:
    """``rows`` of a = activation(h + bias), which is not rounded to h's dtype first. Updates ``amax``."""
    a = activate(_biased(h, bias), kind)
    record_amax(amax, a)
    return quantize(a, scale, dtype)


def fp8_gelu_backward(
    da: Tensor,
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    a_scale: Tensor,
    a_dtype: torch.dtype,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``rows`` and ``columns`` of dh = da * activation'(h + bias), ``columns`` of the recomputed a, and the sum of the
    unrounded dh over rows in the bias's dtype, empty if it is not needed. Updates ``amax``."""
    u = _biased(h, bias)
    dh = da.float() * derivative(u, kind)
    dbias = dh.sum(0).to(bias.dtype) if bias is not None and want_dbias else empty_output(h)
    record_amax(amax, dh)
    q = quantize(dh, scale, dtype)
    return q, transposed(q), transposed(quantize(activate(u, kind), a_scale, a_dtype)), dbias


def _biased(h: Tensor, bias: Tensor | None) -> Tensor:
    return h.float() if bias is None else h.float() + bias.float()
