"""``gated_activation``: act(gate) * up over the two halves of one product's output, for any leading shape."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.rows import contiguous_like, contiguous_rows, gradient_like, readable_rows
from fasttfm.kernels.gated_activation import reference
from fasttfm.ops.bias_gelu import ACTIVATIONS, readable_parameter
from fasttfm.ops.core.arguments import choice, flag, half_of_first, paired_rows, parameter
from fasttfm.ops.core.backends import CUDA_VECTOR, native_cpu, native_cuda, torch_reference, triton_kernels
from fasttfm.ops.core.declare import Op


def gated_activation(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "gelu",
    gate_first: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Multiplies one half of ``x``'s columns, up, with the activation of the other, the gate: GeGLU, SwiGLU, ReGLU.

    Only ``x`` and ``bias`` are saved for the backward; the activation is recomputed, and the bias gradient is computed
    in the same pass as that of ``x``.

    Args:
        x: ``[..., 2 C]``, fp32, bf16 or fp16 (fp64 on the reference backend): one product's output, of which the gate
            and up are the two halves. Strided rows are read in place.
        bias: ``[2 C]``, the product's, or None for 0. May be of another precision than ``x``.
        activation: A key of ``ACTIVATIONS``: ``gelu`` (GeGLU), ``silu`` (SwiGLU), ``relu`` (ReGLU) or another.
        gate_first: Whether the gate is the first half, as in transformers' ModernBERT, Phi-3 and LLaMA, or the second,
            as in ``torch.nn.functional.glu``.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``[..., C]`` in ``x``'s type, contiguous. Arithmetic is always fp32, so autocast does not change the op.
    """
    y: Tensor = OP(x, bias, activation, gate_first, backend=backend)
    return y


def _forward_native(x: Tensor, bias: Tensor | None, kind: str, gate_first: bool) -> Tensor:
    y: Tensor = OP.make_outputs(x)
    _native.core().gated_activation_forward(readable_rows(x), readable_parameter(x, bias), y, CODES[kind], gate_first)
    return y


def _backward_native(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, gate_first: bool, want_dbias: bool
) -> tuple[Tensor, Tensor]:
    core = _native.core()
    dx, dbias = contiguous_like(x), gradient_like(bias, want_dbias, x)
    total = dbias if x.is_cuda else dbias.float()  # the CPU sums in fp32 and leaves the rounding to torch
    read, x, workspace, sums = readable_parameter(x, bias), readable_rows(x), None, None
    if want_dbias:
        elements = core.gated_activation_backward_workspace(x)
        workspace, sums = torch.empty(elements, dtype=torch.float32, device=x.device), total
    core.gated_activation_backward(contiguous_rows(dy), x, read, dx, sums, workspace, CODES[kind], gate_first)
    return dx, total.to(dbias.dtype)


def _refuse_columns(x: Tensor, *_: Tensor | None) -> str | None:
    if x.shape[-1] % (2 * CUDA_VECTOR):
        return f"takes a multiple of {2 * CUDA_VECTOR} columns, got {x.shape[-1]}"
    return None


OP = Op(
    "gated_activation",
    inputs=(paired_rows("x"), parameter("bias")),
    options=(choice("activation", ACTIVATIONS, passed_as="kind"), flag("gate_first")),
    outputs=(half_of_first("y"),),
    saves=("x", "bias"),
    backward_options=("activation", "gate_first"),
    gradients=("x", "bias"),
    instead="torch.nn.functional.gelu (relu, silu) of one half, times the other",
    backends=(
        native_cpu(_forward_native, _backward_native),
        native_cuda(_forward_native, _backward_native, refuse=_refuse_columns),
        triton_kernels("gated_activation"),
        torch_reference(reference.gated_activation_forward, reference.gated_activation_backward),
    ),
)
