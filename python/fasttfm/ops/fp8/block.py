"""A transformer layer as one autograd node, with FP8 operands in its GEMMs (linear.py).

The layer is transformer_block's. Attention, LayerNorms, dropout and residual additions use the activations' dtype. The
inputs of the weight gradients' GEMMs are saved in FP8; the activation is recomputed from its input, in the pass that
computes the gradient of that input. With 16-bit activations 23 bytes per token and column (of C) are saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.ops import fp8, linear
from fasttfm.ops.attention import forward_op as attention_forward_op
from fasttfm.ops.core.library import OpFunction, unshared
from fasttfm.ops.dropout_add_layer_norm import forward_op as add_norm_forward_op
from fasttfm.ops.fp8 import LayerFp8
from fasttfm.ops.fp8.attention import backward_cast
from fasttfm.ops.fp8.norm import NormArguments, add_norm_backward_cast, add_norm_cast
from fasttfm.ops.layers.transformer_block import (
    BlockBackward,
    BlockOptions,
    BlockParameters,
    Dropout,
    Seeds,
    attention_options,
    dropout_arguments,
    separate_seeds,
)


class Saved(NamedTuple):
    """What the forward saves for the backward, in addition to parameters. ``x8``, ``out8`` and ``y8`` are the inputs of
    the qkv projection, the output projection and the feed-forward block in FP8, as columns."""

    x8: Tensor
    qkv: Tensor  # [T, 3, H, D]
    out: Tensor  # [T, H, D]
    lse: Tensor
    out8: Tensor
    z1: Tensor
    statistics1: Tensor
    y8: Tensor
    h: Tensor  # [T, I], without the bias
    z: Tensor
    statistics: Tensor


class Inverses(NamedTuple):
    """The inverse scales of the columns. They are not among the saved tensors, because they are views of one tensor for
    all layers, which changes when any layer is cast again."""

    x8: Tensor
    out8: Tensor
    y8: Tensor


def fp8_block(
    x: Tensor,
    residual: Tensor | None,
    cu_seqlens: Tensor,
    seeds: Tensor | None,
    options: BlockOptions,
    parameters: BlockParameters,
    layer: LayerFp8,
    following: fp8.Fp8Linear | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs a layer over packed tokens, as ``transformer_block`` does. y is cast for ``following``, the linear layer
    that reads it next, by the kernel that computes it."""
    y, z = _Fp8Block.apply(x, residual, cu_seqlens.contiguous(), seeds, options, layer, following, *parameters)
    return y, z


class _Fp8Block(OpFunction):
    op = "fp8_block"
    instead = "transformer_block"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        cu_seqlens: Tensor,
        seeds: Tensor | None,
        options: BlockOptions,
        layer: LayerFp8,
        following: fp8.Fp8Linear | None,
        *parameters: Any,
    ) -> tuple[Tensor, Tensor | None]:
        params, separate = BlockParameters(*parameters), separate_seeds(seeds, options)
        weights = (params.qkv_weight, params.out_weight, params.up_weight, params.down_weight)
        for linear_layer, weight in zip(layer, weights, strict=True):
            if linear_layer.parameter is not weight:
                raise RuntimeError("fp8_block: a weight was replaced by another parameter; create Fp8Training again")
            linear_layer.refresh_changed()
        y, z, saved, ctx.inverses = _forward(x, residual, cu_seqlens, separate, options, params, layer, following)
        ctx.save_for_backward(*unshared(cu_seqlens), *separate, *saved, *params)
        ctx.options, ctx.layer = options, layer
        ctx.updates = layer.qkv.input.scales.updates
        ctx.pre_norm = residual is not None
        ctx.set_materialize_grads(False)
        return y, z if residual is not None else None

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> tuple[Any, ...]:
        tensors, count = ctx.saved_tensors, len(Saved._fields)
        if ctx.updates != ctx.layer.qkv.input.scales.updates:
            raise RuntimeError("fp8_block: expected the backward before the scales' update, got it after")
        cu_seqlens, *seeds = tensors[:4]
        saved, params = Saved(*tensors[4 : 4 + count]), BlockParameters(*tensors[4 + count :])
        inputs = len(ctx.needs_input_grad) - len(params)
        needed = BlockParameters(*ctx.needs_input_grad[inputs:])
        types = BlockParameters(*(None if parameter is None else parameter.dtype for parameter in params))  # type: ignore[arg-type]
        block = _Backward((*tensors, dy, dz), params, needed, types, ctx.options, ctx.pre_norm)
        dx, dresidual = block.run_fp8(ctx.layer, cu_seqlens, tuple(seeds), saved, ctx.inverses, dy, dz)
        gradients = (block.gradients.get(name) for name in BlockParameters._fields)
        return dx, dresidual, None, None, None, None, None, *gradients


def _forward(
    x: Tensor,
    residual: Tensor | None,
    cu_seqlens: Tensor,
    seeds: Seeds,
    options: BlockOptions,
    params: BlockParameters,
    layer: LayerFp8,
    following: fp8.Fp8Linear | None,
) -> tuple[Tensor, Tensor, Saved, Inverses]:
    """Returns y, z and what the backward reads in addition to parameters."""
    tokens, columns = x.shape
    dtype, backend = x.dtype, options.backend
    x8 = layer.qkv.cast_input(x)
    (qkv_bias,) = linear.in_type([params.qkv_bias], dtype, copies=True)
    qkv = layer.qkv.forward(x8, dtype, qkv_bias).view(tokens, 3, options.heads, columns // options.heads)
    out, lse = attention_forward_op(qkv, None, None, *attention_options(qkv, cu_seqlens, seeds[0], options))
    out8 = fp8.cast(out.view(tokens, columns), layer.out.input)
    branch = layer.out.forward(out8, dtype)
    dropout = dropout_arguments(cu_seqlens, seeds[1], options.p_a)
    norm = NormArguments(params.norm_a_weight, params.norm_a_bias, params.out_bias, *dropout, options.eps_a)
    stream = x if residual is None else residual
    want_y = residual is None  # in a pre-LN model, only the next GEMM reads y1
    y1, z1, statistics1, y8 = add_norm_cast(branch, stream, norm, layer.up.input, backend, want_y=want_y)

    h, a8 = layer.up.forward_gelu(y8, dtype, params.up_bias, options.activation, layer.down.input, keep_h=True)
    assert h is not None
    branch = layer.down.forward(a8, dtype)
    dropout = dropout_arguments(cu_seqlens, seeds[2], options.p_b)
    norm = NormArguments(params.norm_b_weight, params.norm_b_bias, params.down_bias, *dropout, options.eps_b)
    stream = y1 if residual is None else z1
    if following is None or following.input.measuring:
        y, z, statistics = add_norm_forward_op(branch, stream, *norm, True, backend)
    else:
        y, z, statistics, next8 = add_norm_cast(branch, stream, norm, following.input, backend)
        following.give_input(y, next8)

    inverses = Inverses(x8.inverse, out8.inverse, y8.inverse)
    slots = (layer.qkv.input, layer.out.input, layer.up.input)
    if any(slot.measuring for slot in slots):  # if a layer is used more than once, its next use sets the scales again
        inverses = Inverses(*(inverse.clone() for inverse in inverses))
    saved = Saved(x8.columns, qkv, out, lse, out8.columns, z1, statistics1, y8.columns, h, z, statistics)
    return y, z, saved, inverses


class _Backward(BlockBackward):
    """The backward pass, whose GEMMs have FP8 operands."""

    def run_fp8(
        self,
        layer: LayerFp8,
        cu_seqlens: Tensor,
        seeds: Seeds,
        saved: Saved,
        inverses: Inverses,
        dy: Tensor | None,
        dz: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of x and, in a pre-LN model, of the stream."""
        seed, seed_a, seed_b = seeds
        options, dtype = self.options, saved.h.dtype
        dy = torch.zeros_like(saved.out.flatten(1)) if dy is None else dy

        dropout = dropout_arguments(cu_seqlens, seed_b, options.p_b)
        dy1, dz1 = self._feed_forward(layer, dy, dz, saved, inverses.y8, dropout)
        dropout = dropout_arguments(cu_seqlens, seed_a, options.p_a)
        names = ("norm_a_weight", "norm_a_bias", "out_bias")
        dstream, g8 = self._branch_gradient(names, (dy1, dz1), saved.z1, saved.statistics1, dropout, layer.out)
        self._fp8_weight("out_weight", layer.out, g8, (saved.out8, inverses.out8))
        dout = layer.out.input_gradient(g8, dtype).view_as(saved.out)
        attention = attention_options(saved.qkv, cu_seqlens, seed, options)
        g8 = self._attention_gradient(dout, saved, attention, layer.qkv)
        self._fp8_weight("qkv_weight", layer.qkv, g8, (saved.x8, inverses.x8))
        return self._input_gradient(layer.qkv, g8, dtype, dstream)

    def _attention_gradient(
        self, dout: Tensor, saved: Saved, attention: tuple[Any, ...], layer: fp8.Fp8Linear
    ) -> fp8.Quantized:
        """The gradient of qkv."""
        sums_dtype: Any = self.types.qkv_bias if self.needed.qkv_bias else None
        result = backward_cast(dout, saved.qkv, (saved.out, saved.lse), attention, layer.gradient, sums_dtype)
        if result is None:
            dqkv = self.attention(dout, saved.qkv, saved.out, saved.lse, attention)
            return fp8.cast(dqkv.flatten(1), layer.gradient)
        dqkv8, sums = result
        if sums is not None:
            self.gradients["qkv_bias"] = sums
        return dqkv8

    def _feed_forward(
        self,
        layer: LayerFp8,
        dy: Tensor,
        dz: Tensor | None,
        saved: Saved,
        y_inverse: Tensor,
        dropout: Dropout,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of y1 and, in a pre-LN model, of z1."""
        names, dtype = ("norm_b_weight", "norm_b_bias", "down_bias"), saved.h.dtype
        dstream, g8 = self._branch_gradient(names, (dy, dz), saved.z, saved.statistics, dropout, layer.down)
        want_dbias, bias = bool(self.needed.up_bias), self.params.up_bias
        dh8, a8, dbias = layer.down.input_gradient_gelu(
            g8, saved.h, bias, self.options.activation, layer.up.gradient, want_dbias
        )
        if want_dbias:
            self.gradients["up_bias"] = dbias
        self._fp8_weight("down_weight", layer.down, g8, (a8.columns, a8.inverse))
        self._fp8_weight("up_weight", layer.up, dh8, (saved.y8, y_inverse))
        return self._input_gradient(layer.up, dh8, dtype, dstream)

    def _branch_gradient(
        self,
        names: tuple[str, str, str],
        gradients: tuple[Tensor, Tensor | None],
        z: Tensor,
        statistics: Tensor,
        dropout: Dropout,
        layer: fp8.Fp8Linear,
    ) -> tuple[Tensor, fp8.Quantized]:
        """The gradients of both terms of the sum z: the residual stream's, and the branch's in FP8."""
        needed = [bool(getattr(self.needed, name)) for name in names]
        weight, bias, linear_bias = (getattr(self.params, name) for name in names)
        norm = NormArguments(weight, bias, linear_bias, *dropout, 0.0)
        result = add_norm_backward_cast(gradients, z, statistics, norm, needed, layer.gradient, self.options.backend)
        if result is None:
            dstream, dbranch = self._add_norm(names, *gradients, z, statistics, dropout)
            return dstream, fp8.cast(dbranch, layer.gradient)
        dstream, dbranch8, *sums = result
        self.gradients.update((name, value) for name, value, want in zip(names, sums, needed, strict=True) if want)
        return dstream, dbranch8

    def _fp8_weight(self, name: str, layer: fp8.Fp8Linear, dy: fp8.Quantized, x: tuple[Tensor, Tensor]) -> None:
        if getattr(self.needed, name):
            self.gradients[name] = layer.weight_gradient(dy, x, getattr(self.types, name))

    def _input_gradient(
        self, layer: fp8.Fp8Linear, dy: fp8.Quantized, dtype: torch.dtype, dstream: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of a block's input: as ``_meet``, with FP8 operands."""
        if self.pre_norm:
            return layer.input_gradient(dy, dtype), dstream
        return layer.add_input_gradient(dstream, dy), None
