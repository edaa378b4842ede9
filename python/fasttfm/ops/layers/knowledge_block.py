"""A layer over tokens and entities as one autograd node: nn/knowledge_layer.py has the equations.

It is one native call for forward and one for backward if the core supports it (knowledge_native.py), otherwise op
by op.

Each stream's attention block is ``transformer_block``'s. The fusion is one GEMM for all tokens: a token's row is
concatenated with its entity's row, or with zeros, and the weights of both streams are concatenated likewise. The GEMM's
epilogue applies the activation. The next GEMM's output again has the columns of both streams; entities take the rows of
their tokens. Multiplying the zeros costs less than sorting the tokens: ERNIE-base's rows have 768 columns for the token
and 104 for the entity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm import _native
from fasttfm.kernels.common.rows import contiguous_rows
from fasttfm.ops import gelu_gemm, linear
from fasttfm.ops.attention import forward_op as attention_forward_op
from fasttfm.ops.core.library import OpFunction, bypass_dispatcher, is_plain, needs_gradient, unshared
from fasttfm.ops.dropout_add_layer_norm import forward_op as add_norm_forward_op
from fasttfm.ops.layers import knowledge_native
from fasttfm.ops.layers.knowledge_native import Batch
from fasttfm.ops.layers.parameters import BLOCK_FIELDS, CHANGED_PARAMETERS, versions
from fasttfm.ops.layers.transformer_block import (
    GEMM_PARAMETERS,
    BlockBackward,
    BlockOptions,
    BlockParameters,
    Inner,
    Seeds,
    attention_options,
    dropout_arguments,
    kept_of,
    separate_seeds,
)

_MOST_SEQUENCES = 65535  # of attention's backward on Hopper
_VECTOR = 8  # GEMMs and attention are fast if sizes are multiples of it
_MIN_HEAD_DIM = 16
_GPU_HEAD_DIMS = (64, 128)  # of the fastest kernels
SEEDS = 6  # three for the tokens, three for the entities


class KnowledgeOptions(NamedTuple):
    tokens: BlockOptions
    entities: BlockOptions
    last: bool  # whether there is no output for entities


class Alignment(NamedTuple):
    """The sequence boundaries of both streams, and the positions of the tokens that have an entity."""

    cu_seqlens: Tensor  # int32 [sequences + 1]
    entity_cu_seqlens: Tensor  # int32 [sequences + 1]
    positions: Tensor  # int64 [A], ascending


class Attended(NamedTuple):
    """What an attention block saves for its backward."""

    qkv: Tensor | None = None  # [T, 3, H, D]
    out: Tensor | None = None  # [T, H, D]
    lse: Tensor | None = None
    z: Tensor | None = None
    statistics: Tensor | None = None


class Fusion(NamedTuple):
    """The parameters of the fusion."""

    up: Tensor  # [I, C + E + padding]
    bias: Tensor | None  # [I]
    down: Tensor  # [C + E + padding, I], or [C, I] if there is no output for entities


class Fused(NamedTuple):
    """What the fusion saves for its backward."""

    rows: Tensor | None  # [T, C + E + padding]; None if the backward recomputes them
    left: Tensor  # for the activation's backward: gelu_gemm's PRODUCT or DERIVATIVE
    a: Tensor | None
    z: Tensor
    statistics: Tensor
    entity_z: Tensor | None
    entity_statistics: Tensor | None


def knowledge_block(
    x: Tensor,
    entities: Tensor,
    where: Alignment,
    seeds: Tensor | None,
    options: KnowledgeOptions,
    parameters: tuple[BlockParameters, BlockParameters],
) -> tuple[Tensor, Tensor | None]:
    """Runs a layer over tokens ``x`` [T, C] and ``entities`` [A, E], of the same dtype.

    Args:
        seeds: int64 ``[6]``: the dropout seeds of attention and of the two blocks, first the tokens', then the
            entities'; None without dropout.
        parameters: The tokens' and the entities' parameters. In the latter, ``up_weight`` is [I, E], ``down_weight``
            [E, I], and ``qkv_weight`` is None if entities do not attend to each other.

    Returns:
        Both streams; None for the entities of the last layer.
    """
    flat = [*parameters[0], *parameters[1]]
    if is_plain((x, entities, *where, seeds, *flat)):
        native = _native_call(x, entities, where, seeds, options, flat)
        if isinstance(native, knowledge_native.Call):
            if needs_gradient(x, entities, *flat):
                return _NativeBlock.apply_plain(x, entities, native, options, *flat)
            operands = knowledge_native.operands(native, copies=False)
            return knowledge_native.forward(native, operands, training=False)[:2]
    if needs_gradient(x, entities, *flat):
        y, e = _KnowledgeBlock.apply(x, entities, *where, seeds, options, *flat)
        return y, e
    call = _Forward(x, entities, where, _both_seeds(seeds, options), options)
    cast, fusion = _in_type(parameters, x, options, copies=False)
    return call.run(cast, fusion, gelu_gemm.NOTHING)[:2]


def refused(
    x: Tensor,
    entities: Tensor,
    where: Alignment,
    options: KnowledgeOptions,
    parameters: tuple[BlockParameters, BlockParameters],
) -> str | None:
    """Why a layer runs op by op; None if it runs in one native call."""
    flat = [*parameters[0], *parameters[1]]
    if not is_plain((x, entities, *where, *flat)):
        return "takes plain tensors in eager calls"
    call = _native_call(x, entities, where, None, options, flat)
    return call if isinstance(call, str) else None


def _native_call(
    x: Tensor,
    entities: Tensor,
    where: Alignment,
    seeds: Tensor | None,
    options: KnowledgeOptions,
    parameters: list[Tensor | None],
) -> knowledge_native.Call | str:
    """The call for the native core, or why the core does not support it."""
    if not 1 < where.cu_seqlens.shape[0] <= 1 + _MOST_SEQUENCES:
        return f"takes 1 to {_MOST_SEQUENCES} sequences"
    if entities.dtype != x.dtype:
        return "takes tokens and entities of one type"
    cu_seqlens, entity_cu_seqlens, positions = (tensor.contiguous() for tensor in where)
    head_dim = padded_head_dim(entities.shape[1] // options.entities.heads, x)
    settings = (head_dim, options.entities, options.last, parameters[BLOCK_FIELDS] is not None)
    batch = Batch(x, cu_seqlens, None if seeds is None else seeds.contiguous())
    stream = knowledge_native.Entities(entities, entity_cu_seqlens, positions, *settings)
    return knowledge_native.call_of(batch, stream, parameters, options.tokens)


class _NativeBlock(OpFunction):
    op = "knowledge_block"
    instead = "the layer's modules in plain torch"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, entities: Tensor, call: knowledge_native.Call, options: KnowledgeOptions, *_: Any
    ) -> tuple[Tensor, Tensor | None]:
        cast = knowledge_native.operands(call, copies=True)
        y, e, kept = knowledge_native.forward(call, cast, training=True)
        where = (call.batch.cu_seqlens, call.entities.cu_seqlens, call.entities.positions)
        ctx.save_for_backward(x, entities, *unshared(*where), call.batch.seeds, kept)
        # Parameters are not saved tensors, which torch would wrap one by one; the backward compares their versions.
        ctx.cast, ctx.versions = cast, versions(cast)
        saved: Any = {"x": None, "cu_seqlens": None, "positions": None}
        rest: Any = {"batch": None, "entities": call.entities._replace(**saved)}
        ctx.call = call._replace(**rest)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return y, e

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, de: Tensor | None) -> tuple[Any, ...]:
        x, entities, cu_seqlens, entity_cu_seqlens, positions, seeds, kept = ctx.saved_tensors
        if ctx.versions != versions(ctx.cast):
            raise RuntimeError(CHANGED_PARAMETERS)
        call: knowledge_native.Call = ctx.call._replace(
            batch=Batch(x, cu_seqlens, seeds),
            entities=ctx.call.entities._replace(x=entities, cu_seqlens=entity_cu_seqlens, positions=positions),
        )
        dy = torch.zeros_like(x) if dy is None else contiguous_rows(dy)
        de = None if de is None else contiguous_rows(de)
        needed = ctx.needs_input_grad[-2 * BLOCK_FIELDS :]
        try:
            dx, dentities, gradients = knowledge_native.backward(call, ctx.cast, kept, dy, de, needed)
        except _native.DoesNotFit:  # a part of the GPU is too small for blocks that wait for each other
            return _backward_again(call, ctx.options, dy, de, ctx.needs_input_grad)
        return dx, dentities, None, None, *gradients


def _backward_again(
    call: knowledge_native.Call, options: KnowledgeOptions, dy: Tensor, de: Tensor | None, needed: tuple[bool, ...]
) -> tuple[Any, ...]:
    """The backward of a native forward by the ops, which repeat the forward."""
    streams = [stream.detach().requires_grad_() for stream in (call.batch.x, call.entities.x)]
    where = (call.batch.cu_seqlens, call.entities.cu_seqlens, call.entities.positions)
    with torch.enable_grad():
        results = _KnowledgeBlock.apply(*streams, *where, call.batch.seeds, options, *call.parameters)
    pairs = [(out, gradient) for out, gradient in zip(results, (dy, de), strict=True) if gradient is not None]
    indices = [index for index, want in enumerate(needed) if want]
    inputs: list[Any] = [*streams, None, None, *call.parameters]
    outputs, upstream = zip(*pairs, strict=True)
    results = torch.autograd.grad(outputs, [inputs[index] for index in indices], upstream, allow_unused=True)
    by_index = dict(zip(indices, results, strict=True))
    return tuple(by_index.get(index) for index in range(len(needed)))


class _Forward:
    """The forward pass."""

    def __init__(
        self, x: Tensor, entities: Tensor, where: Alignment, seeds: tuple[Seeds, Seeds], options: KnowledgeOptions
    ) -> None:
        self.x, self.entities, self.where, self.seeds, self.options = x, entities, where, seeds, options

    def run(
        self, params: tuple[BlockParameters, BlockParameters], fusion: Fusion, kept: str
    ) -> tuple[Tensor, Tensor | None, tuple[Attended, Attended, Fused] | None]:
        """Returns both streams and, unless ``kept`` is NOTHING, what the backward reads in addition to inputs and
        parameters."""
        where, options, seeds = self.where, self.options, self.seeds
        tensors = (self.x, self.entities, *where, *seeds[0], *seeds[1], *params[0], *params[1])
        self.attention, self.add_norm = bypass_dispatcher(tensors, attention_forward_op, add_norm_forward_op)
        self.keep = kept != gelu_gemm.NOTHING
        y1, attended = self._attend(self.x, where.cu_seqlens, seeds[0], options.tokens, params[0], self.x.shape[1])
        e1, entity_attended = self.entities, Attended()
        if params[1].qkv_weight is not None:
            call = (where.entity_cu_seqlens, seeds[1], options.entities, params[1], self.entities.shape[1])
            e1, entity_attended = self._attend(self.entities, *call)
        y, e, fused = self._fuse(y1, e1, params, fusion, kept)
        return y, e, (attended, entity_attended, fused) if self.keep else None

    def _attend(
        self, x: Tensor, cu_seqlens: Tensor, seeds: Seeds, options: BlockOptions, params: BlockParameters, width: int
    ) -> tuple[Tensor, Attended]:
        """``LN(x + Attention(x))``; heads may be padded with zeros."""
        product = linear.matmul(x, params.qkv_weight.t(), params.qkv_bias)
        qkv = product.view(len(x), 3, options.heads, -1)
        call = attention_options(qkv, cu_seqlens, seeds[0], options, width // options.heads)
        out, lse = self.attention(qkv, None, None, *call)
        branch = linear.matmul(out.view(len(x), -1), params.out_weight.t())
        dropout = dropout_arguments(cu_seqlens, seeds[1], options.p_a)
        norm = (params.norm_a_weight, params.norm_a_bias, params.out_bias, *dropout)
        y, z, statistics = self.add_norm(branch, x, *norm, options.eps_a, self.keep, options.backend)
        return y, Attended(qkv, out, lse, z, statistics)

    def _fuse(
        self, y1: Tensor, e1: Tensor, params: tuple[BlockParameters, BlockParameters], fusion: Fusion, kept: str
    ) -> tuple[Tensor, Tensor | None, Fused]:
        """``LN(w~ + W_t' h + b_t')`` and ``LN(e~ + W_e' h + b_e')``"""
        where, (options, entity_options, last) = self.where, self.options
        width, entity_width = y1.shape[1], e1.shape[1]
        rows = _concat_aligned(y1, e1, where.positions, fusion.up.shape[1])
        a, left = gelu_gemm.forward_op(rows, fusion.up, fusion.bias, options.activation, kept, options.backend)
        both = linear.matmul(a, fusion.down.t())
        norm = (params[0].norm_b_weight, params[0].norm_b_bias, params[0].down_bias)
        dropout = dropout_arguments(where.cu_seqlens, self.seeds[0][2], options.p_b)
        branch = both if last else both[:, :width]
        y, z, statistics = self.add_norm(branch, y1, *norm, *dropout, options.eps_b, self.keep, options.backend)
        kept_rows, kept_a = None if options.recompute else rows, a if options.keep_activation else None
        fused = Fused(kept_rows, left, kept_a, z, statistics, None, None)
        if last:
            return y, None, fused
        branch = both[:, width : width + entity_width].index_select(0, where.positions)
        norm = (params[1].norm_b_weight, params[1].norm_b_bias, params[1].down_bias)
        dropout = dropout_arguments(where.entity_cu_seqlens, self.seeds[1][2], entity_options.p_b)
        e, z, statistics = self.add_norm(branch, e1, *norm, *dropout, entity_options.eps_b, self.keep, options.backend)
        return y, e, fused._replace(entity_z=z, entity_statistics=statistics)


class _KnowledgeBlock(OpFunction):
    op = "knowledge_block"
    instead = "the layer's modules in plain torch"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        entities: Tensor,
        cu_seqlens: Tensor,
        entity_cu_seqlens: Tensor,
        positions: Tensor,
        seeds: Tensor | None,
        options: KnowledgeOptions,
        *parameters: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layers = BlockParameters(*parameters[:BLOCK_FIELDS]), BlockParameters(*parameters[BLOCK_FIELDS:])
        cast, fusion = _in_type(layers, x, options, copies=True)
        where = Alignment(cu_seqlens, entity_cu_seqlens, positions)
        call = _Forward(x, entities, where, _both_seeds(seeds, options), options)
        kept = kept_of(x, cast[0]._replace(up_weight=fusion.up, down_weight=fusion.down), options.tokens)
        y, e, saved = call.run(cast, fusion, kept)
        assert saved is not None
        attended, entity_attended, fused = saved
        streams = (x, entities, *unshared(*where), seeds)
        ctx.save_for_backward(*streams, *attended, *entity_attended, *fused, *fusion, *cast[0], *cast[1])
        ctx.options, ctx.kept = options, kept
        ctx.types = [None if parameter is None else parameter.dtype for parameter in parameters]
        ctx.set_materialize_grads(False)
        return y, e

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, de: Tensor | None) -> tuple[Any, ...]:
        all_tensors = ctx.saved_tensors
        tensors = iter(all_tensors)
        x, entities, *where, seeds = (next(tensors) for _ in range(6))
        saved: Any = [kind(*(next(tensors) for _ in kind._fields)) for kind in (Attended, Attended, Fused, Fusion)]
        params = [BlockParameters(*(next(tensors) for _ in range(BLOCK_FIELDS))) for _ in range(2)]
        attended, entity_attended, fused, fusion = saved
        needs = ctx.needs_input_grad[-2 * BLOCK_FIELDS :]
        streams = []
        for number, options in enumerate(ctx.options[:2]):
            part = slice(number * BLOCK_FIELDS, (number + 1) * BLOCK_FIELDS)
            needed, types = BlockParameters(*needs[part]), BlockParameters(*ctx.types[part])
            streams.append(_Stream((*all_tensors, dy, de), params[number], needed, types, options, False))
        call = _Backward(
            streams[0], streams[1], fusion, Alignment(*where), ctx.options, _both_seeds(seeds, ctx.options)
        )
        dy1, de1 = call.fusion(fused, ctx.kept, attended, entity_attended, entities, dy, de)
        dx = call.attention(streams[0], 0, dy1, x, attended)
        dentities = (
            de1 if entity_attended.qkv is None else call.attention(streams[1], 1, de1, entities, entity_attended)
        )
        gradients = (stream.gradients.get(name) for stream in streams for name in BlockParameters._fields)
        return dx, dentities, *[None] * 5, *gradients


class _Stream(BlockBackward):
    """The backward of one stream's blocks, without the GEMMs of the fusion, whose weights both streams share."""

    def norm_b(self, dy: Tensor, z: Tensor, statistics: Tensor, dropout: Any) -> tuple[Tensor, Tensor]:
        """The gradients of both terms of the residual sum."""
        return self._add_norm(("norm_b_weight", "norm_b_bias", "down_bias"), dy, None, z, statistics, dropout)

    def fused_weight(self, name: str, dy: Tensor, x: Tensor) -> Tensor | None:
        """The gradient of the concatenated weight of both streams."""
        self._weight(name, dy, x)
        return self.gradients.pop(name, None)


class _Backward(NamedTuple):
    """The backward pass of both streams; the streams collect the parameters' gradients."""

    tokens: _Stream
    entities: _Stream
    parameters: Fusion
    where: Alignment
    options: KnowledgeOptions
    seeds: tuple[Seeds, Seeds]

    def fusion(
        self,
        saved: Fused,
        kept: str,
        attended: Attended,
        entity_attended: Attended,
        inputs: Tensor,
        dy: Tensor | None,
        de: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of w~ and e~; ``inputs`` are the entities that the layer reads."""
        where, tokens, entities, last = self.where, self.tokens, self.entities, self.options.last
        width, entity_width = saved.z.shape[1], inputs.shape[1]
        dropout = dropout_arguments(where.cu_seqlens, self.seeds[0][2], self.options.tokens.p_b)
        dy = torch.zeros_like(saved.z) if dy is None else dy
        dstream, dbranch = tokens.norm_b(dy, saved.z, saved.statistics, dropout)
        dstream_e: Tensor | None = None
        if not last and de is not None:
            assert saved.entity_z is not None
            assert saved.entity_statistics is not None
            dropout = dropout_arguments(where.entity_cu_seqlens, self.seeds[1][2], self.options.entities.p_b)
            dstream_e, dbranch_e = entities.norm_b(de, saved.entity_z, saved.entity_statistics, dropout)
            dbranch = _concat_aligned(dbranch, dbranch_e, where.positions, self.parameters.down.shape[0])
        elif not last:
            dbranch = functional.pad(dbranch, (0, self.parameters.down.shape[0] - width))
        rows = self._rows(saved, attended, entity_attended, inputs) if saved.rows is None else saved.rows
        dh = self._products(dbranch, rows, Inner(kept, saved.left, saved.a), width, entity_width)
        up = self.parameters.up
        dentities = linear.matmul(dh, up[:, width:]).index_select(0, where.positions)[:, :entity_width]
        de1 = dentities.contiguous() if dstream_e is None else dstream_e.add_(dentities)
        return linear.add_matmul(dstream, dh, up[:, :width]), de1

    def _rows(self, saved: Fused, attended: Attended, entity_attended: Attended, inputs: Tensor) -> Tensor:
        """Recomputes the input of the fusion."""
        assert attended.z is not None
        y1 = self.tokens.norm_a(attended.z).to(saved.left.dtype)
        e1 = inputs if entity_attended.z is None else self.entities.norm_a(entity_attended.z).to(inputs.dtype)
        return _concat_aligned(y1, e1, self.where.positions, self.parameters.up.shape[1])

    def _products(self, dbranch: Tensor, rows: Tensor, inner: Inner, width: int, entity_width: int) -> Tensor:
        """The gradient of the activation's input. The gradients of the fusion's parameters go to their streams."""
        tokens, entities, last = self.tokens, self.entities, self.options.last
        params, needs, entity_needs = tokens.params, tokens.needed, entities.needed
        fused: dict[str, Any] = {"up_weight": self.parameters.up, "up_bias": self.parameters.bias}
        tokens.params = params._replace(**fused, down_weight=self.parameters.down)
        names = ("up_weight", "up_bias", "down_weight")
        needed: Any = {name: bool(getattr(needs, name) or getattr(entity_needs, name)) for name in names}
        tokens.needed = needs._replace(**needed)
        dh, a = tokens.activation(dbranch, inner)
        dbias = tokens.gradients.pop("up_bias", None)
        ddown, dup = tokens.fused_weight("down_weight", dbranch, a), tokens.fused_weight("up_weight", dh, rows)
        tokens.params, tokens.needed = params, needs
        end = width + entity_width
        for stream, needed, columns in ((tokens, needs, slice(width)), (entities, entity_needs, slice(width, end))):
            if needed.up_bias and dbias is not None:
                stream.gradients["up_bias"] = dbias
            if needed.up_weight and dup is not None:
                stream.gradients["up_weight"] = dup[:, columns]
            if needed.down_weight and ddown is not None and not (last and stream is entities):
                stream.gradients["down_weight"] = ddown[columns]
        return dh

    def attention(self, stream: _Stream, number: int, dy1: Tensor, x: Tensor, attended: Any) -> Tensor:
        """The gradient of a stream's input."""
        options, (seed, seed_a, _) = stream.options, self.seeds[number]
        cu_seqlens, head_dim = self.where[number], x.shape[1] // options.heads
        dropout = dropout_arguments(cu_seqlens, seed_a, options.p_a)
        dout, dstream = stream.projection(dy1, None, attended.out, attended.z, attended.statistics, dropout)
        call = attention_options(attended.qkv, cu_seqlens, seed, options, head_dim)
        dqkv = stream.attention(dout, attended.qkv, attended.out, attended.lse, call)
        dx, _ = stream.qkv(dqkv, x, dstream)
        if attended.qkv.shape[-1] > head_dim:
            _unpad_heads(stream.gradients, options.heads, attended.qkv.shape[-1], head_dim)
        return dx


def _both_seeds(seeds: Tensor | None, options: KnowledgeOptions) -> tuple[Seeds, Seeds]:
    if seeds is None:
        return (None, None, None), (None, None, None)
    return separate_seeds(seeds[:3], options.tokens), separate_seeds(seeds[3:], options.entities)


def _concat_aligned(x: Tensor, entities: Tensor, positions: Tensor, columns: int) -> Tensor:
    """[T, columns]: each token's row, then its entity's row or zeros, then zeros."""
    width = x.shape[1]
    rows = x.new_zeros(len(x), columns)
    rows[:, :width].copy_(x)
    rows[:, width : width + entities.shape[1]].index_copy_(0, positions, entities)
    return rows


# ---- parameters ------------------------------------------------------------------------------------------------------


def _in_type(
    parameters: tuple[BlockParameters, BlockParameters], x: Tensor, options: KnowledgeOptions, *, copies: bool
) -> tuple[tuple[BlockParameters, BlockParameters], Fusion]:
    """The operands of GEMMs in x's dtype, with the heads of entities padded, and the concatenated ones of the fusion.

    Args:
        copies: Whether the optimizer's low-precision copies may be used, as in transformer_block.
    """
    names = GEMM_PARAMETERS
    cast = linear.in_type([getattr(stream, name) for stream in parameters for name in names], x.dtype, copies=copies)
    tokens = parameters[0]._replace(**dict(zip(names, cast[:5], strict=True)))
    entities = parameters[1]._replace(**dict(zip(names, cast[5:], strict=True)))
    padding = -(tokens.up_weight.shape[1] + entities.up_weight.shape[1]) % _VECTOR
    up, down = [tokens.up_weight, entities.up_weight], [tokens.down_weight, entities.down_weight]
    if padding:
        up.append(x.new_zeros(len(up[0]), padding))
        down.append(x.new_zeros(padding, len(up[0])))
    biases = [bias for bias in (parameters[0].up_bias, parameters[1].up_bias) if bias is not None]
    bias = biases[0] + biases[1] if len(biases) == 2 else next(iter(biases), None)
    fusion = Fusion(torch.cat(up, 1), bias, tokens.down_weight if options.last else torch.cat(down))
    head_dim = entities.up_weight.shape[1] // options.entities.heads
    if entities.qkv_weight is not None and (padded := padded_head_dim(head_dim, x)) > head_dim:
        entities = _pad_heads(entities, options.entities.heads, padded)
    unused: Any = {"up_weight": None, "down_weight": None}  # replaced by the fusion's
    return (tokens._replace(**unused), entities._replace(**unused)), fusion


def padded_head_dim(head_dim: int, x: Tensor) -> int:
    """The head dim that attention's kernels support: ERNIE-base's 25 is padded with zeros."""
    if x.is_cuda:
        for padded in _GPU_HEAD_DIMS:
            if head_dim <= padded:
                return padded
    return max(_MIN_HEAD_DIM, head_dim + -head_dim % _VECTOR)


def _pad_heads(params: BlockParameters, heads: int, padded: int) -> BlockParameters:
    """Pads the parameters of attention with zeros to the head dim ``padded``."""
    width = params.qkv_weight.shape[1]
    more = padded - width // heads
    weight = functional.pad(params.qkv_weight.view(3 * heads, -1, width), (0, 0, 0, more)).view(-1, width)
    bias = None if params.qkv_bias is None else functional.pad(params.qkv_bias.view(3 * heads, -1), (0, more)).view(-1)
    out = functional.pad(params.out_weight.view(width, heads, -1), (0, more)).view(width, -1)
    return params._replace(qkv_weight=weight, qkv_bias=bias, out_weight=out)


def _unpad_heads(gradients: dict[str, Tensor], heads: int, padded: int, head_dim: int) -> None:
    """Removes the padding from the gradients of attention's parameters."""
    width = heads * head_dim
    for name, shape in (("qkv_weight", (3 * heads, padded, width)), ("qkv_bias", (3 * heads, padded))):
        if name in gradients:
            unpadded = gradients[name].view(shape)[:, :head_dim]
            gradients[name] = unpadded.reshape(3 * width, *unpadded.shape[2:])
    if "out_weight" in gradients:
        gradients["out_weight"] = (
            gradients["out_weight"].view(width, heads, padded)[..., :head_dim].reshape(width, width)
        )
