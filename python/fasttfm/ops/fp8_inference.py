"""A transformer layer's forward with FP8 operands and static scales, for inference (fp8.py).

The layer is transformer_block's, without dropout. Attention, LayerNorms and residual additions use the activations'
dtype. On Hopper with bf16, y8 and the activation are written by the kernels that compute them, so that only
attention's output is cast by a pass of its own; all layers are then one native call (``run_native``).
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.ops import fp8, linear, transformer_native
from fasttfm.ops.attention import forward_op as attention_forward_op
from fasttfm.ops.bias_gelu import forward_op as bias_gelu_forward_op
from fasttfm.ops.dropout_add_layer_norm import forward_op as add_norm_forward_op
from fasttfm.ops.fp8 import Fp8Weight, Quantized, Scales
from fasttfm.ops.fp8_norm import NormArguments, add_norm_cast
from fasttfm.ops.library import bypass_dispatcher, is_plain
from fasttfm.ops.transformer_block import BlockOptions, BlockParameters, attention_options
from fasttfm.ops.transformer_native import Batch

LINEARS = ("qkv", "out", "up", "down")
_ROOM = 2.0  # how far inputs may exceed the calibrated magnitudes before they saturate


class StaticLayer(NamedTuple):
    """The linear layers of a transformer layer, in the order of ``LINEARS``."""

    qkv: Fp8Weight
    out: Fp8Weight
    up: Fp8Weight
    down: Fp8Weight


@torch.no_grad()
def static_layers(weights: list[list[Tensor]], amax: Tensor) -> list[StaticLayer]:
    """Casts the weights of layers, each in the order of ``LINEARS``.

    Args:
        amax: fp32 ``[layers, 4]``, the largest magnitudes of the linear layers' inputs.
    """
    count = len(LINEARS)
    scales = Scales([fp8.E4M3] * (2 * count * len(weights)), 1, weights[0][0].device)
    inputs, own = scales.slots[: count * len(weights)], scales.slots[count * len(weights) :]
    scales.set_magnitudes(torch.cat([_ROOM * amax.flatten(), torch.zeros_like(amax).flatten()]))
    found = []
    for index, layer in enumerate(weights):
        linears = []
        for number, weight in enumerate(layer):
            position = count * index + number
            each = Fp8Weight(weight, (inputs[position], own[position]))
            each.weight.measure_changed(weight)
            each.rows.copy_(fp8.cast(weight, each.weight, with_columns=False).rows)
            linears.append(each)
        found.append(StaticLayer(*linears))
    return found


def addresses_of(layers: Sequence[StaticLayer]) -> array[int]:
    """Of the operands and scales of layers, for the native core: kernels/transformer_block/op.h, TransformerFp8."""
    linears = chain.from_iterable(layers)
    tensors = (
        (each.rows, each.weight.inverse, each.input.scale, each.input.inverse, each.input.amax) for each in linears
    )
    return array("q", (tensor.data_ptr() for own in tensors for tensor in own))


def run_native(
    x: Tensor,
    residual: Tensor | None,
    cu_seqlens: Tensor,
    options: BlockOptions,
    given: list[Tensor | None],
    addresses: array[int],
) -> tuple[Tensor, Tensor | None] | None:
    """Runs all layers, whose parameters are ``given``, in one native call, as ``fp8_layer`` one after the other.
    Returns y, and z in a pre-LN model; None if the core does not support the call."""
    if not is_plain((x, residual, cu_seqlens)):
        return None
    layers = transformer_native.layers_of(given)
    if isinstance(layers, str) or transformer_native.refuse_fp8(x, residual, layers, options) is not None:
        return None
    batch = Batch(x, None if residual is None else residual.dtype, cu_seqlens, None)
    return transformer_native.forward_fp8(batch, residual, layers, options, addresses)


def fp8_layer(
    x: Tensor,
    x8: Quantized | None,
    residual: Tensor | None,
    cu_seqlens: Tensor,
    options: BlockOptions,
    own: BlockParameters,
    layer: StaticLayer,
    following: Fp8Weight | None,
) -> tuple[Tensor, Quantized | None, Tensor | None]:
    """Runs a layer over packed tokens.

    Args:
        x: ``[T, C]``; in a pre-LN model, where ``residual`` is given, normalised.
        x8: ``x`` in FP8, if the previous layer has written it.
        following: The linear layer that reads y next, or None.

    Returns:
        y, y in FP8 for ``following``, and z in a pre-LN model.
    """
    tokens, columns = x.shape
    dtype, backend = x.dtype, options.backend
    tensors = (x, residual, cu_seqlens, *own)
    attention, add_norm = bypass_dispatcher(tensors, attention_forward_op, add_norm_forward_op)
    if x8 is None:
        x8 = fp8.cast(x, layer.qkv.input, with_columns=False)
    qkv = layer.qkv.forward(x8, dtype, own.qkv_bias).view(tokens, 3, options.heads, columns // options.heads)
    out, _ = attention(qkv, None, None, *attention_options(qkv, cu_seqlens, None, options))
    branch = layer.out.forward(fp8.cast(out.view(tokens, columns), layer.out.input, with_columns=False), dtype)
    want_z = residual is not None
    add_norm_rows = functools.partial(add_norm_cast, want_z=want_z, with_columns=False, forward=add_norm)
    stream = x if residual is None else residual
    norm, want_y = _norm_a(own, options), residual is None  # in a pre-LN model, only the next GEMM reads y1
    y1, z1, _, y8 = add_norm_rows(branch, stream, norm, layer.up.input, backend, want_y=want_y)
    _, a8 = layer.up.forward_gelu(y8, dtype, own.up_bias, options.activation, layer.down.input, keep_h=False)
    branch = layer.down.forward(a8, dtype)
    stream, norm = y1 if residual is None else z1, _norm_b(own, options)
    if following is None:
        y, z, _ = add_norm(branch, stream, *norm, want_z, backend)
        return y, None, z if want_z else None
    y, z, _, next8 = add_norm_rows(branch, stream, norm, following.input, backend)
    return y, next8, z if want_z else None


def measured_layer(
    x: Tensor, residual: Tensor | None, cu_seqlens: Tensor, options: BlockOptions, own: BlockParameters, amax: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Runs a layer in the activations' dtype, and raises ``amax`` [4] to the largest magnitudes of the linear layers'
    inputs. Returns y, and z in a pre-LN model."""
    tokens, columns = x.shape
    want_z, backend = residual is not None, options.backend
    fp8.record_amax(amax[0], x)
    qkv = linear.matmul(x, own.qkv_weight.t(), own.qkv_bias).view(tokens, 3, options.heads, columns // options.heads)
    out, _ = attention_forward_op(qkv, None, None, *attention_options(qkv, cu_seqlens, None, options))
    fp8.record_amax(amax[1], out)
    branch = linear.matmul(out.view(tokens, columns), own.out_weight.t())
    stream = x if residual is None else residual
    y1, z1, _ = add_norm_forward_op(branch, stream, *_norm_a(own, options), want_z, backend)
    fp8.record_amax(amax[2], y1)
    a = bias_gelu_forward_op(linear.matmul(y1, own.up_weight.t()), own.up_bias, options.activation, backend)
    fp8.record_amax(amax[3], a)
    stream = y1 if residual is None else z1
    branch = linear.matmul(a, own.down_weight.t())
    y, z, _ = add_norm_forward_op(branch, stream, *_norm_b(own, options), want_z, backend)
    return y, z if want_z else None


def _norm_a(own: BlockParameters, options: BlockOptions) -> NormArguments:
    return NormArguments(own.norm_a_weight, own.norm_a_bias, own.out_bias, None, None, 0.0, options.eps_a)


def _norm_b(own: BlockParameters, options: BlockOptions) -> NormArguments:
    return NormArguments(own.norm_b_weight, own.norm_b_bias, own.down_bias, None, None, 0.0, options.eps_b)
