"""``gelu_layer_norm``: LayerNorm of GELU(x + linear_bias) in one pass, for any leading shape."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.rows import contiguous_like, contiguous_rows, gradient_like, readable_rows
from fasttfm.kernels.gelu_layer_norm import reference
from fasttfm.ops.core.arguments import choice, like_first, number, parameter, row_statistics, rows
from fasttfm.ops.core.backends import (
    native_cpu,
    native_cuda,
    refuse_backward_memory,
    refuse_columns,
    torch_reference,
    triton_kernels,
)
from fasttfm.ops.core.declare import Op
from fasttfm.ops.layer_norm import one_type

_KINDS = {"none": "gelu", "tanh": "gelu_tanh"}  # torch's names of the two forms -> kernels/common/activation.py
Parameter = Tensor | None


def gelu_layer_norm(
    x: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """``layer_norm(gelu(x + linear_bias), weight, bias)``: the masked-LM transform of BERT, ALBERT and ELECTRA.

    ``x`` is the output of the transform's linear layer without its bias. ``x``, the parameters and two numbers per row
    are saved for the backward; GELU is recomputed.

    Args:
        x: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend). Strided rows are read in place.
        linear_bias: ``[C]`` or None for 0. Parameters may be of another precision than ``x``.
        weight: ``[C]`` or None for 1.
        bias: ``[C]`` or None for 0.
        approximate: ``none`` for GELU with erf, ``tanh`` for its tanh form, as in ``torch.nn.functional.gelu``.
        eps: Added to the variance.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``[..., C]`` in ``x``'s type, contiguous. Arithmetic is fp32 for all types, so autocast does not affect the op.
    """
    y: Tensor = OP(x, linear_bias, weight, bias, approximate, eps, backend=backend)
    return y


# ---- the native core: CPU and CUDA -----------------------------------------------------------------------------------


def _forward_native(
    x: Tensor, linear_bias: Parameter, weight: Parameter, bias: Parameter, kind: str, eps: float
) -> tuple[Tensor, Tensor]:
    core = _native.core()
    y, statistics = OP.make_outputs(x)
    parameters, x = one_type(x, linear_bias, weight, bias), readable_rows(x)
    workspace = None
    if not x.is_cuda:
        workspace = x.new_empty(core.gelu_layer_norm_forward_workspace(x), dtype=torch.float32)
    core.gelu_layer_norm_forward(x, *parameters, y, statistics, workspace, eps, CODES[kind])
    return y, statistics


def _backward_native(
    dy: Tensor,
    x: Tensor,
    linear_bias: Parameter,
    weight: Parameter,
    bias: Parameter,
    statistics: Tensor,
    kind: str,
    *needed: bool,
) -> tuple[Tensor, ...]:
    core = _native.core()
    dx = contiguous_like(x)
    parameters = (linear_bias, weight, bias)
    gradients = [gradient_like(parameter, want, x) for parameter, want in zip(parameters, needed, strict=True)]
    # The CPU reads and sums in fp32 and leaves the rounding to torch.
    sums = gradients if x.is_cuda else [gradient.float() for gradient in gradients]
    read = (linear_bias, weight) if x.is_cuda else one_type(x, linear_bias, weight)
    x = readable_rows(x)
    workspace = torch.empty(core.gelu_layer_norm_backward_workspace(x), dtype=torch.float32, device=x.device)
    outputs = [total if want else None for total, want in zip(sums, needed, strict=True)]
    core.gelu_layer_norm_backward(contiguous_rows(dy), x, *read, statistics, dx, *outputs, workspace, CODES[kind])
    return dx, *(total.to(gradient.dtype) for total, gradient in zip(sums, gradients, strict=True))


# ---- the declaration -------------------------------------------------------------------------------------------------

# Both GPU backends keep whole rows in registers; the CUDA kernels keep two, x and dy, in flight in shared memory.
_CUDA_MAX_ROW_BYTES = 16384


def _refuse_wide_rows(x: Tensor, *_: Parameter) -> str | None:
    most = _CUDA_MAX_ROW_BYTES // x.element_size()
    return f"takes up to {most} columns of this type, got {x.shape[-1]}" if x.shape[-1] > most else None


OP = Op(
    "gelu_layer_norm",
    inputs=(rows("x"), parameter("linear_bias"), parameter("weight"), parameter("bias")),
    options=(choice("approximate", _KINDS, passed_as="kind"), number("eps")),
    outputs=(like_first("y"), row_statistics("statistics", 2)),
    saves=("x", "linear_bias", "weight", "bias", "statistics"),
    backward_options=("approximate",),
    gradients=("x", "linear_bias", "weight", "bias"),
    instead="torch.nn.functional.gelu and layer_norm",
    backends=(
        native_cpu(_forward_native, _backward_native),
        native_cuda(
            _forward_native,
            _backward_native,
            refuse=_refuse_wide_rows,
            refuse_on_gpu=refuse_backward_memory("gelu_layer_norm"),
        ),
        triton_kernels("gelu_layer_norm", refuse=refuse_columns(8192)),
        torch_reference(reference.gelu_layer_norm_forward, reference.gelu_layer_norm_backward),
    ),
)
