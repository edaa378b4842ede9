"""``bias_gelu``: an activation of x + bias, for any leading shape."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.bias_gelu import reference
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.kernels.common.rows import contiguous_like, contiguous_rows, empty_output, gradient_like, readable_rows
from fasttfm.ops.core.arguments import choice, like_first, parameter, rows
from fasttfm.ops.core.backends import native_cpu, native_cuda, torch_reference, triton_kernels
from fasttfm.ops.core.declare import Op

# The names of activations in model configurations, and the formula of each (kernels/common/activation.py).
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
    }
)


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, activation: str = "gelu", backend: str | None = None) -> Tensor:
    """Adds a bias to each row of ``x`` and applies an activation: what follows the first linear of an MLP.

    Only ``x`` and ``bias`` are saved for the backward; the activation is recomputed, and the bias gradient is computed
    in the same pass as that of ``x``.

    Args:
        x: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend). Strided rows are read in place.
        bias: ``[C]`` or None for 0. May be of another precision than ``x``.
        activation: A key of ``ACTIVATIONS``: ``gelu`` or ``gelu_python`` (with erf), ``gelu_new``, ``gelu_fast``,
            ``gelu_accurate``, ``gelu_pytorch_tanh`` or ``gelu_tanh`` (with tanh), ``relu``, ``silu`` or ``swish``.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``[..., C]`` in ``x``'s type, contiguous. Arithmetic is fp32 for all types, so autocast does not affect the op.
    """
    y: Tensor = OP(x, bias, activation, backend=backend)
    return y


# ---- the native core: CPU and CUDA -----------------------------------------------------------------------------------


def _forward_native(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    y = contiguous_like(x)
    _native.core().bias_gelu_forward(readable_rows(x), readable_parameter(x, bias), y, CODES[kind])
    return y


def _backward_native(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, want_dbias: bool, want_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    core = _native.core()
    dx, y = contiguous_like(x), contiguous_like(x) if want_y else empty_output(x)
    dbias = gradient_like(bias, want_dbias, x)
    # The CPU reads and sums in fp32 and leaves the rounding to torch.
    total = dbias if x.is_cuda else dbias.float()
    read, x, workspace = readable_parameter(x, bias), readable_rows(x), None
    parts = _cuda_parts(x) if x.is_cuda else 0
    if want_dbias:
        floats = core.bias_gelu_backward_workspace(x, parts)
        workspace = torch.empty(floats, dtype=torch.float32, device=x.device)
    outputs = (dx, y if want_y else None, total if want_dbias else None)
    core.bias_gelu_backward(contiguous_rows(dy), x, read, *outputs, workspace, parts, CODES[kind])
    return dx, total.to(dbias.dtype), y


def readable_parameter(x: Tensor, bias: Tensor | None) -> Tensor | None:
    """The bias as the kernels read it: on the CPU in fp32."""
    return bias if bias is None or x.is_cuda else _native.as_parameter(bias, torch.float32)


# Columns per warp in the CUDA kernels.
_CUDA_STRIPE = 256
_CUDA_BLOCKS_PER_MULTIPROCESSOR = 4


def _cuda_parts(x: Tensor) -> int:
    """Into how many parts the backward divides the rows, so that its blocks fill the GPU once."""
    stripes = -(-x.shape[-1] // _CUDA_STRIPE)
    return max(1, _CUDA_BLOCKS_PER_MULTIPROCESSOR * multiprocessors(x) // stripes)


# ---- the declaration -------------------------------------------------------------------------------------------------

OP = Op(
    "bias_gelu",
    inputs=(rows("x"), parameter("bias")),
    options=(choice("activation", ACTIVATIONS, passed_as="kind"),),
    outputs=(like_first("y"),),
    saves=("x", "bias"),
    backward_options=("activation",),
    gradients=("x", "bias"),
    recomputes=("y",),
    instead="torch.nn.functional.gelu (relu, silu) of x + bias",
    backends=(
        native_cpu(_forward_native, _backward_native),
        native_cuda(_forward_native, _backward_native),
        triton_kernels("bias_gelu"),
        torch_reference(reference.bias_gelu_forward, reference.bias_gelu_backward),
    ),
)
forward_op, backward_op = OP.forward, OP.backward  # for composed ops
