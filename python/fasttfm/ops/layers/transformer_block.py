"""A transformer layer as one autograd node: attention block and feed-forward block of post-LN and pre-LN models.

    post-LN    y1 = LN_a(x + dropout(attention(x)))                 y = LN_b(y1 + dropout(mlp(y1)))
    pre-LN     z1 = z + dropout(attention(x)),  y1 = LN_a(z1)       z' = z1 + dropout(mlp(y1)),  y = LN_b(z')

In a pre-LN model x is already normalised, z is the residual stream, and LN_b is the next layer's first norm: in both
kinds of models every residual addition directly precedes a LayerNorm and is fused with it.

One node replaces six. Nothing is saved that one cheap pass can recompute: dropout masks; the activation, which the pass
over its gradient writes again, unless ``keep_activation`` is set for the fastest step; with ``recompute`` also y1. A
gradient that reaches a tensor on two paths is accumulated where the second one is computed: in the epilogue of a GEMM
(post-LN) or in LayerNorm's backward (pre-LN).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.ops import gelu_gemm, linear
from fasttfm.ops.attention import AttentionProblem
from fasttfm.ops.attention import backward_op as attention_backward_op
from fasttfm.ops.attention import forward_op as attention_forward_op
from fasttfm.ops.attention import qkv_backward_op as attention_qkv_backward_op
from fasttfm.ops.core.library import OpFunction, bypass_dispatcher, needs_gradient, unshared
from fasttfm.ops.dropout_add_layer_norm import backward_op as add_norm_backward_op
from fasttfm.ops.dropout_add_layer_norm import forward_op as add_norm_forward_op
from fasttfm.ops.layer_norm import forward_op as layer_norm_forward_op


class BlockParameters(NamedTuple):
    """A layer's parameters. Weights are [outputs, inputs]; q, k and v are one projection. Any bias may be None."""

    qkv_weight: Tensor  # [3 C, C]
    qkv_bias: Tensor | None
    out_weight: Tensor  # [C, C]
    out_bias: Tensor | None
    norm_a_weight: Tensor | None
    norm_a_bias: Tensor | None
    up_weight: Tensor  # [I, C]
    up_bias: Tensor | None
    down_weight: Tensor  # [C, I]
    down_bias: Tensor | None
    norm_b_weight: Tensor | None
    norm_b_bias: Tensor | None


GEMM_PARAMETERS = ("qkv_weight", "qkv_bias", "out_weight", "up_weight", "down_weight")  # GEMMs read them in x's dtype


class Saved(NamedTuple):
    """What a layer saves for its backward in addition to its input and parameters."""

    qkv: Tensor  # [T, 3, H, D]
    out: Tensor  # [T, H, D]
    lse: Tensor
    z1: Tensor
    statistics1: Tensor
    left: Tensor  # of the activation: gelu_gemm's PRODUCT or DERIVATIVE
    a: Tensor | None
    y1: Tensor | None
    z: Tensor
    statistics: Tensor


class BlockOptions(NamedTuple):
    heads: int
    max_seqlen: int
    window_left: int  # keys before a query that it attends to, -1 for all
    window_right: int
    activation: str  # a value of ops.ACTIVATIONS
    attention_p: float
    p_a: float
    p_b: float
    eps_a: float
    eps_b: float
    recompute: bool
    keep_activation: bool
    backend: str | None


def transformer_block(
    x: Tensor,
    residual: Tensor | None,
    cu_seqlens: Tensor,
    seeds: Tensor | None,
    options: BlockOptions,
    parameters: BlockParameters,
) -> tuple[Tensor, Tensor | None]:
    """Runs a layer over packed tokens.

    Args:
        x: ``[T, C]``; in a pre-LN model, where ``residual`` is given, normalised.
        residual: The stream of a pre-LN model, in x's type or fp32.
        cu_seqlens: int32 ``[sequences + 1]``.
        seeds: int64 ``[3]``, for attention and the two blocks; None without dropout.

    Returns:
        y, and z' in a pre-LN model.
    """
    if needs_gradient(x, residual, *parameters):
        y, z = _TransformerBlock.apply(x, residual, cu_seqlens, seeds, options, *parameters)
    else:
        cast = _in_type(parameters, x.dtype)
        separate = separate_seeds(seeds, options)
        y, z, _ = _forward(x, residual, cu_seqlens, separate, options, cast, kept=gelu_gemm.NOTHING)
    return y, z


def _forward(
    x: Tensor,
    residual: Tensor | None,
    cu_seqlens: Tensor,
    seeds: Seeds,
    options: BlockOptions,
    params: BlockParameters,
    *,
    kept: str,
) -> tuple[Tensor, Tensor | None, Saved | None]:
    """y, z' and, if ``kept``, what the backward reads in addition to inputs and parameters."""
    tokens, columns = x.shape
    backend = options.backend
    attention, add_norm = bypass_dispatcher(
        (x, residual, cu_seqlens, *seeds, *params), attention_forward_op, add_norm_forward_op
    )
    keep = kept != gelu_gemm.NOTHING
    want_z = keep or residual is not None

    product = linear.matmul(x, params.qkv_weight.t(), params.qkv_bias)
    qkv = product.view(tokens, 3, options.heads, columns // options.heads)
    out, lse = attention(qkv, None, None, *attention_options(qkv, cu_seqlens, seeds[0], options))
    branch = linear.matmul(out.view(tokens, columns), params.out_weight.t())
    dropout = dropout_arguments(cu_seqlens, seeds[1], options.p_a)
    norm_a = (params.norm_a_weight, params.norm_a_bias, params.out_bias, *dropout)
    stream = x if residual is None else residual
    y1, z1, statistics1 = add_norm(branch, stream, *norm_a, options.eps_a, want_z, backend)

    a, left = gelu_gemm.forward_op(y1, params.up_weight, params.up_bias, options.activation, kept, backend)
    branch = linear.matmul(a, params.down_weight.t())
    dropout = dropout_arguments(cu_seqlens, seeds[2], options.p_b)
    norm_b = (params.norm_b_weight, params.norm_b_bias, params.down_bias, *dropout)
    stream = y1 if residual is None else z1
    y, z, statistics = add_norm(branch, stream, *norm_b, options.eps_b, want_z, backend)

    y1 = None if options.recompute else y1
    a = a if options.keep_activation else None
    saved = Saved(qkv, out, lse, z1, statistics1, left, a, y1, z, statistics) if keep else None
    return y, None if residual is None else z, saved


def kept_of(x: Tensor, params: BlockParameters, options: BlockOptions) -> str:
    """The part of the activation that is saved for the backward."""
    if not options.keep_activation:
        return gelu_gemm.PRODUCT
    return gelu_gemm.kept_beside(options.backend, x, params.up_weight, params.down_weight)


class _TransformerBlock(OpFunction):
    op = "transformer_block"
    instead = "torch.nn.TransformerEncoderLayer"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        cu_seqlens: Tensor,
        seeds: Tensor | None,
        options: BlockOptions,
        *parameters: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer = BlockParameters(*parameters)
        cast, separate = _in_type(layer, x.dtype, copies=True), separate_seeds(seeds, options)
        kept = kept_of(x, cast, options)
        y, z, saved = _forward(x, residual, cu_seqlens, separate, options, cast, kept=kept)
        assert saved is not None
        ctx.save_for_backward(*unshared(cu_seqlens), *separate, x, *saved, *cast)
        ctx.options, ctx.kept = options, kept
        ctx.pre_norm = residual is not None
        ctx.types = [None if parameter is None else parameter.dtype for parameter in layer]
        ctx.set_materialize_grads(False)
        return y, z

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> tuple[Any, ...]:
        tensors, count = ctx.saved_tensors, len(Saved._fields)
        cu_seqlens, seed, seed_a, seed_b, x = tensors[:5]
        saved, params = Saved(*tensors[5 : 5 + count]), BlockParameters(*tensors[5 + count :])
        inputs = len(ctx.needs_input_grad) - len(params)
        needed, types = BlockParameters(*ctx.needs_input_grad[inputs:]), BlockParameters(*ctx.types)
        block = BlockBackward((*tensors, dy, dz), params, needed, types, ctx.options, ctx.pre_norm)
        dx, dresidual = block.run(x, cu_seqlens, (seed, seed_a, seed_b), ctx.kept, saved, dy, dz)
        gradients = (block.gradients.get(name) for name in BlockParameters._fields)
        return dx, dresidual, None, None, None, *gradients


class Inner(NamedTuple):
    """The intermediate results of the feed-forward block that the forward saved."""

    kept: str  # which tensor is left: gelu_gemm's PRODUCT or DERIVATIVE
    left: Tensor
    activation: Tensor | None


class BlockBackward:
    """The backward pass in steps; collects the parameters' gradients."""

    def __init__(
        self,
        tensors: tuple[Tensor | None, ...],
        params: BlockParameters,
        needed: BlockParameters,
        types: BlockParameters,
        options: BlockOptions,
        pre_norm: bool,
    ) -> None:
        # Of each gradient: whether it is needed, and its type.
        self.params, self.needed, self.types = params, needed, types
        self.options, self.pre_norm = options, pre_norm
        self.gradients: dict[str, Tensor] = {}
        ops = (attention_backward_op, attention_qkv_backward_op, add_norm_backward_op)
        self.attention_op, self.attention_qkv_op, self.add_norm_op = bypass_dispatcher(tensors, *ops)

    def run(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        seeds: Seeds,
        kept: str,
        saved: Saved,
        dy: Tensor | None,
        dz: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of x and, in a pre-LN model, of the stream. ``kept`` says what was saved for the activation."""
        seed, seed_a, seed_b = seeds
        options = self.options
        dy = torch.zeros_like(x) if dy is None else dy

        dropout = dropout_arguments(cu_seqlens, seed_b, options.p_b)
        y1 = self.norm_a(saved.z1).to(x.dtype) if saved.y1 is None else saved.y1
        inner = Inner(kept, saved.left, saved.a)
        dy1, dz1 = self.feed_forward(dy, dz, y1, inner, saved.z, saved.statistics, dropout)
        del y1

        dropout = dropout_arguments(cu_seqlens, seed_a, options.p_a)
        dout, dstream = self.projection(dy1, dz1, saved.out, saved.z1, saved.statistics1, dropout)
        attention = attention_options(saved.qkv, cu_seqlens, seed, options)
        dqkv = self.attention(dout, saved.qkv, saved.out, saved.lse, attention)
        return self.qkv(dqkv, x, dstream)

    def norm_a(self, z1: Tensor) -> Tensor:
        """Recomputes y1."""
        norm = (self.params.norm_a_weight, self.params.norm_a_bias, self.options.eps_a)
        y1: Tensor = layer_norm_forward_op(z1, *norm, self.options.backend)[0]
        return y1

    def feed_forward(
        self,
        dy: Tensor,
        dz: Tensor | None,
        y1: Tensor,
        inner: Inner,
        z: Tensor,
        statistics: Tensor,
        dropout: Dropout,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of y1 and, in a pre-LN model, of z1."""
        dstream, dbranch = self._add_norm(("norm_b_weight", "norm_b_bias", "down_bias"), dy, dz, z, statistics, dropout)
        dh, a = self.activation(dbranch, inner)
        self._weight("down_weight", dbranch, a)
        del a, dbranch
        self._weight("up_weight", dh, y1)
        return self._meet(dh, self.params.up_weight, dstream)

    def activation(self, dbranch: Tensor, inner: Inner) -> tuple[Tensor, Tensor]:
        """The gradient of the activation's input, and the activation itself."""
        params, backend, want_dbias = self.params, self.options.backend, bool(self.needed.up_bias)
        a = inner.activation
        if inner.kept == gelu_gemm.DERIVATIVE:
            dh, dbias = gelu_gemm.scaled_op(
                dbranch, params.down_weight, inner.left, params.up_bias, want_dbias, backend
            )
        else:
            again = a is None and bool(self.needed.down_weight)
            dh, dbias, recomputed = gelu_gemm.backward_op(
                dbranch,
                params.down_weight,
                inner.left,
                params.up_bias,
                self.options.activation,
                want_dbias,
                again,
                backend,
            )
            a = recomputed if a is None else a
        if want_dbias:
            self.gradients["up_bias"] = dbias
        assert a is not None
        return dh, a

    def projection(
        self, dy: Tensor, dz: Tensor | None, out: Tensor, z1: Tensor, statistics: Tensor, dropout: Dropout
    ) -> tuple[Tensor, Tensor]:
        """The gradients of attention's output and of the residual stream."""
        dstream, dbranch = self._add_norm(("norm_a_weight", "norm_a_bias", "out_bias"), dy, dz, z1, statistics, dropout)
        self._weight("out_weight", dbranch, out.flatten(1))
        return linear.matmul(dbranch, self.params.out_weight).view_as(out), dstream

    def attention(self, dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, options: tuple[Any, ...]) -> Tensor:
        """The gradient of qkv; that of its bias is its sum over all tokens."""
        dqkv: Tensor
        if self.needed.qkv_bias:
            dqkv, self.gradients["qkv_bias"] = self.attention_qkv_op(dout, qkv, out, lse, self.types.qkv_bias, *options)
        else:
            dqkv, _, _ = self.attention_op(dout, qkv, None, None, out, lse, *options)
        return dqkv

    def qkv(self, dqkv: Tensor, x: Tensor, dstream: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradients of x and, in a pre-LN model, of the residual stream."""
        rows = dqkv.flatten(1)
        self._weight("qkv_weight", rows, x)
        return self._meet(rows, self.params.qkv_weight, dstream)

    def _add_norm(
        self,
        names: tuple[str, str, str],
        dy: Tensor,
        dz: Tensor | None,
        z: Tensor,
        statistics: Tensor,
        dropout: Dropout,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of both terms of the sum z; those of LayerNorm's parameters and of the branch's last bias."""
        parameters = [getattr(self.params, name) for name in names]
        needed = [bool(getattr(self.needed, name)) for name in names]
        dstream, dbranch, *sums = self.add_norm_op(
            dy, dz, z, statistics, *parameters, *dropout, needed, self.options.backend
        )
        self.gradients.update((name, value) for name, value, want in zip(names, sums, needed, strict=True) if want)
        _, seed, _ = dropout
        return dstream, dbranch if seed is not None or dy.dtype != z.dtype else dstream

    def _weight(self, name: str, dy: Tensor, x: Tensor) -> None:
        """dy^T x, in fp32 directly from the GEMM if cuBLAS supports it."""
        if not getattr(self.needed, name):
            return
        dtype: torch.dtype = getattr(self.types, name)
        if dtype == x.dtype:
            self.gradients[name] = linear.matmul(dy.t(), x)
        elif dtype == torch.float32 and x.is_cuda:
            self.gradients[name] = torch.mm(dy.t(), x, out_dtype=dtype)
        else:
            self.gradients[name] = linear.matmul(dy.t(), x).to(dtype)

    def _meet(self, dy: Tensor, weight: Tensor, dstream: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient dy @ weight of a block's input. In a post-LN model that is the stream, whose gradient is added;
        in a pre-LN model the residual stream is separate."""
        if self.pre_norm:
            return linear.matmul(dy, weight), dstream
        return linear.add_matmul(dstream, dy, weight), None


Seeds = tuple[Tensor | None, Tensor | None, Tensor | None]  # int64 [1] each: of attention and of the two blocks
Dropout = tuple[Tensor | None, Tensor | None, float]  # cu_seqlens, seed and p, as dropout_add_layer_norm passes them


def separate_seeds(seeds: Tensor | None, options: BlockOptions) -> Seeds:
    """One seed for each dropout; None if its probability is 0."""
    if seeds is None:
        return None, None, None
    indices = enumerate((options.attention_p, options.p_a, options.p_b))
    attention, a, b = (seeds[index : index + 1] if p > 0 else None for index, p in indices)
    return attention, a, b


def dropout_arguments(cu_seqlens: Tensor, seed: Tensor | None, p: float) -> Dropout:
    return (None, None, 0.0) if seed is None else (cu_seqlens, seed, p)


def attention_options(
    qkv: Tensor, cu_seqlens: Tensor, seed: Tensor | None, options: BlockOptions, head_dim: int | None = None
) -> tuple[Any, ...]:
    """The arguments of attention's registered ops after q, k and v. ``head_dim`` is smaller than qkv's if heads are
    padded with zeros."""
    problem = AttentionProblem(
        cu_seqlens=cu_seqlens,
        seed=seed,
        max_seqlen=options.max_seqlen,
        max_seqlen_k=options.max_seqlen,
        window_left=options.window_left,
        window_right=options.window_right,
        scale=(head_dim or qkv.shape[-1]) ** -0.5,
        p=0.0 if seed is None else options.attention_p,
    )
    return *problem, options.backend


def _in_type(params: BlockParameters, dtype: torch.dtype, *, copies: bool = False) -> BlockParameters:
    """The operands of GEMMs in x's dtype; the other ops read parameters of any dtype. The optimizer's ``copies`` are
    used only in training: for evaluation parameters are often replaced in ways that torch's version counter does not
    see."""
    operands = [getattr(params, name) for name in GEMM_PARAMETERS]
    cast: Any = dict(zip(GEMM_PARAMETERS, linear.in_type(operands, dtype, copies=copies), strict=True))
    return params._replace(**cast)
