"""Which steps are fused: one table. A rule states for which layers and calls it applies, and the measurement of
its range."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fasttfm import _native
from fasttfm.ops import attention_choice
from fasttfm.ops.core.backends import requested
from fasttfm.ops.layers.folded import FoldedNorms
from fasttfm.ops.layers.parameters import is_large
from fasttfm.ops.layers.spec import FIELDS, LayerSpec, Specs


class Situation(NamedTuple):
    """What a plan depends on, in addition to the layers."""

    device: str  # cpu or cuda
    training: bool  # whether there will be a backward
    itemsize: int  # bytes of an element of x
    stream_itemsize: int  # of the residual stream
    precision: str = ""  # of the GEMMs' operands: "int8", "bf16" or packed "fp32" on a CPU, "fp8", or that of x
    dtype: torch.dtype | None = None  # of x
    parameter_dtype: torch.dtype | None = None
    is_session: bool = False  # whether the caller keeps memory for calls that follow one another (few_tokens.py)
    rules: frozenset[str] = frozenset()  # names of the rules that take the sizes of the call
    frozen: frozenset[str] = frozenset()  # FIELDS, x and residual: those whose gradients are not needed in any layer
    cache: str = ""  # a KV cache of "prompts", which are written to it, or of "tokens", which also attend to it


class Sizes(NamedTuple):
    """The sizes of a call that rules depend on."""

    rows: int
    sequences: int
    max_seqlen: int
    layers: int = 1
    captured: bool = False  # in a CUDA graph
    processors: int = 0  # SMs of the GPU


def situation_of(
    inputs: Any, *, training: bool, precision: str = "", parameter_dtype: torch.dtype | None = None
) -> Situation:
    """The situation of a call outside of sessions, without rules."""
    x, stream = inputs.x, inputs.x if inputs.residual is None else inputs.residual
    sizes = (x.element_size(), stream.element_size())
    situation = Situation(x.device.type, training, *sizes, precision, x.dtype, parameter_dtype)
    return situation if inputs.cache is None else situation._replace(cache=inputs.cache.kind)


class Rule(NamedTuple):
    name: str
    does: str
    least_rows: int  # from which its kernels are faster
    refuse: Callable[[LayerSpec, Situation], str | None]  # why it does not apply to a layer on Hopper
    # Outside of CUDA graphs the host's launches take longer than the kernels of few rows: fewer launches are faster up
    # to this number of rows.
    most_launched_rows: int = 0
    most_seqlen: int | None = None  # of the longest sequence
    least_length: int = 0  # the least rows per sequence
    other: Callable[[LayerSpec, Sizes], str | None] | None = None  # why it does not apply to a layer in these sizes

    def refusal(self, spec: LayerSpec, situation: Situation) -> str | None:
        """Why it does not apply to a layer; None if it does. All rules are Hopper's."""
        return "is Hopper's" if situation.device != "cuda" else self.refuse(spec, situation)

    def refuse_sizes(self, sizes: Sizes) -> str | None:
        """Why it does not apply to calls of these sizes, whatever the layers are."""
        if self.most_seqlen is not None and sizes.max_seqlen > self.most_seqlen:
            return f"takes sequences of up to {self.most_seqlen} tokens, got {sizes.max_seqlen}"
        if sizes.rows < self.least_length * sizes.sequences:
            return f"takes at least {self.least_length} rows per sequence, got {sizes.rows} and {sizes.sequences}"
        if sizes.rows < self.least_rows and (sizes.captured or sizes.rows > self.most_launched_rows):
            few = f", or up to {self.most_launched_rows}" if self.most_launched_rows else ""
            return f"takes at least {self.least_rows} rows{few}, got {sizes.rows}"
        return None


OTHER_ATTENTION = "other_attention"  # also where the kernel of CUDA does not fit on the GPU
_PROJECTED_HEAD_DIM = _SHORT_HEAD_DIM = 64
_OTHER_PRECISION = "takes GEMMs in x's type"
_ADAPTED = "takes linear layers without an adapter"


def _refuse_rotary_projection(spec: LayerSpec, situation: Situation) -> str | None:
    attention = spec.attention
    if situation.precision:
        return _OTHER_PRECISION
    if spec.adapter("qkv") is not None:
        return _ADAPTED
    if attention.rotary is None:
        return "takes rotary positions"
    if attention.heads != attention.kv_heads or attention.head_dim != _PROJECTED_HEAD_DIM:
        return f"takes as many heads of k and v as of q, of {_PROJECTED_HEAD_DIM} columns"
    if attention.rotary_columns != attention.head_dim:
        return "rotates whole heads"
    return "takes heads without a norm" if attention.head_norm_eps is not None else None


def _refuse_projection(spec: LayerSpec, situation: Situation) -> str | None:
    if situation.precision:
        return _OTHER_PRECISION
    if spec.adapter("qkv") is not None:
        return _ADAPTED
    return None if spec.attention.rotary is None else "takes no rotary positions"


def _refuse_gemm_activation(spec: LayerSpec, situation: Situation) -> str | None:
    if situation.precision:
        return _OTHER_PRECISION
    if spec.adapter("up") is not None or (situation.training and spec.adapter("down") is not None):
        return _ADAPTED
    return "takes activations without a gate" if spec.feed_forward.gated else None


def _refuse_gated_gemm(spec: LayerSpec, situation: Situation) -> str | None:
    if situation.precision:
        return _OTHER_PRECISION
    if not spec.feed_forward.gated:
        return "takes activations with a gate"
    if spec.adapter("up") is not None:
        return _ADAPTED
    # The backward reads the product. Storing it leaves a gain of 1%.
    return "is for calls without gradients" if situation.training else None


def _refuse_short_attention(spec: LayerSpec, situation: Situation) -> str | None:
    attention = spec.attention
    if situation.training or attention.dropout:
        return "is for calls without gradients and without dropout"
    if attention.heads != attention.kv_heads or attention.head_dim != _SHORT_HEAD_DIM:
        return f"takes as many heads of k and v as of q, of {_SHORT_HEAD_DIM} columns"
    return None


def _refuse_adapted_gemm(spec: LayerSpec, situation: Situation) -> str | None:
    if situation.precision:
        return _OTHER_PRECISION
    if not spec.adapters:
        return "takes linear layers with an adapter"
    return "takes one adapter for all tokens" if any(adapter.selected for adapter in spec.adapters) else None


_SUMMED_HEAD_DIM = 64


def _refuse_attention_sums(spec: LayerSpec, situation: Situation) -> str | None:
    attention = spec.attention
    if not situation.training or "qkv_bias" not in spec.present:
        return "is for gradients of a bias of q, k and v"
    if attention.heads != attention.kv_heads or attention.head_dim != _SUMMED_HEAD_DIM:
        return f"takes as many heads of k and v as of q, of {_SUMMED_HEAD_DIM} columns"
    if attention.rotary is not None or attention.head_norm_eps is not None:
        return "takes heads that are not rotated or normalized"
    return None if attention.is_causal_or_full() else "takes no window: sums would have no fixed order"


# The maximum number of rows for the kernels for few rows (docs/kernels_few_tokens.md), and of their elements: as many
# fp32 sums fit into the workspace.
MOST_FEW_ROWS = 1280
_MOST_FEW_ELEMENTS = 1 << 23
FEW_ROWS_HEAD_DIMS = (32, 64, 128)
# All layers in one kernel: kernels/few_rows/layers_shape.h. It was measured with 6 and 12 layers; its arguments have
# room for the addresses of the parameters of 24.
_MOST_ROWS_OF_ONE_KERNEL = 32
LAYERS_OF_ONE_KERNEL = range(6, 25)
_ACTIVATIONS_OF_ONE_KERNEL = ("gelu", "gelu_tanh")
_BLOCK_VALUES = len(FIELDS) - 2  # parameters of a layer without norms of heads


def has_few_rows(rows: int, width: int) -> bool:
    """Whether a call has few enough rows for the kernels for few rows."""
    return rows <= min(MOST_FEW_ROWS, _MOST_FEW_ELEMENTS // max(width, 1))


def _refuse_few_rows(spec: LayerSpec, situation: Situation) -> str | None:
    if situation.precision:
        return _OTHER_PRECISION
    if situation.training or spec.drops:
        return "is for calls without gradients and without dropout"
    if not spec.is_block:
        return "takes layers of LayerNorms, with as many heads of k and v as of q, without rotary positions and gates"
    head_dim = spec.attention.head_dim
    return None if head_dim in FEW_ROWS_HEAD_DIMS else f"takes head dims of 32, 64 and 128, got {head_dim}"


def _refuse_number_of_rows(spec: LayerSpec, sizes: Sizes) -> str | None:
    if has_few_rows(sizes.rows, spec.width):
        return None
    return f"takes up to {MOST_FEW_ROWS} rows, and fewer of wide layers, got {sizes.rows} of {spec.width} columns"


def _refuse_session(spec: LayerSpec, situation: Situation) -> str | None:
    """The refusal of rules whose steps read what a session keeps."""
    if (reason := _refuse_few_rows(spec, situation)) is not None:
        return reason
    if not situation.is_session:
        return "is for inference sessions"
    if situation.dtype != situation.parameter_dtype:
        return "takes parameters in x's type"
    if spec.pre_norm or len(spec.present) < _BLOCK_VALUES:
        return "takes post-LN layers with all biases and LayerNorm parameters"
    return None


def _refuse_one_kernel(spec: LayerSpec, situation: Situation) -> str | None:
    attention, activation = spec.attention, spec.feed_forward.activation
    if (reason := _refuse_session(spec, situation)) is not None:
        return reason
    if situation.dtype != torch.bfloat16:
        return "takes bfloat16"
    if (attention.window_left, attention.window_right) != (-1, -1):
        return "attends to all keys"
    if activation not in _ACTIVATIONS_OF_ONE_KERNEL:
        return f"takes {' and '.join(_ACTIVATIONS_OF_ONE_KERNEL)}, got {activation}"
    if one_kernel_bytes(spec) == 0:
        return "takes the sizes of BERT-base's and MiniLM's layers"
    return None


def one_kernel_bytes(spec: LayerSpec) -> int:
    """The bytes of the workspace of the kernel for all layers; 0 if it does not support their sizes."""
    sizes = (spec.width, spec.feed_forward.columns, spec.attention.heads)
    return int(_native.core().few_rows_layers_workspace(*sizes))


def _refuse_number_of_layers(spec: LayerSpec, sizes: Sizes) -> str | None:
    if sizes.rows > _MOST_ROWS_OF_ONE_KERNEL:
        return f"takes up to {_MOST_ROWS_OF_ONE_KERNEL} rows, got {sizes.rows}"
    if sizes.layers not in LAYERS_OF_ONE_KERNEL:
        return f"takes 6 to 24 layers, got {sizes.layers}"
    return None


def _refuse_folding(norms: FoldedNorms, spec: LayerSpec, sizes: Sizes) -> str | None:
    """Which LayerNorms are folded depends on the sizes: kernels/few_rows/plan.h."""
    if (reason := _refuse_number_of_rows(spec, sizes)) is not None:
        return reason
    if sizes.layers < 2:  # of a single one, the LayerNorm after it would be the same kernel as before
        return "takes 2 layers or more, got 1"
    layer = (spec.width, spec.feed_forward.columns, sizes.processors)
    if _native.core().few_rows_folded_norms(sizes.rows, *layer) == norms:
        return None
    return f"takes sizes for which it is faster, got {sizes.rows} rows of {spec.width} columns"


def _refuse_other_attention(spec: LayerSpec, situation: Situation) -> str | None:
    return None if situation.training else "is for calls with gradients"


def _keeps_own_attention(spec: LayerSpec, sizes: Sizes) -> str | None:
    """The rule is for large layers, which are nodes of their own: the host takes less time for them than the GPU, and
    Python runs the op between two calls of the core."""
    attention = spec.attention
    if sizes.layers > 1:
        return f"takes a single layer, got {sizes.layers}"
    if not is_large(sizes.rows, spec.width):
        return f"takes large layers, got {sizes.rows} rows of {spec.width} columns"
    window, bounds = (attention.window_left, attention.window_right), (sizes.max_seqlen, sizes.max_seqlen)
    heads = (attention.heads, attention.head_dim)
    slower = attention_choice.slower_backward(heads, sizes.sequences, sizes.rows, bounds, window, sizes.processors)
    return None if slower else "Hopper's kernel is the fastest"


# Measured with ModernBERT-base on an H200 (benchmarks/results/nvidia-h200-encoders.csv), and those of layers without
# rotary positions with BERT-base (docs/notes/kernel_designs.md).
RULES = (
    # With 1,024 rows cuBLASLt and a kernel that rotates are 8% faster, with 512 rows 4%.
    Rule("rotary_projection", "the projection to q, k and v also rotates", 2048, _refuse_rotary_projection, 512),
    Rule("projection", "Hopper's own GEMM projects to q, k and v", 2048, _refuse_projection),
    Rule("gemm_activation", "the GEMM of up also applies the activation", 1, _refuse_gemm_activation),
    # With 128 rows cuBLASLt and a kernel for the activation are 9% faster.
    Rule("gated_gemm", "the GEMM of gate and up also multiplies them", 256, _refuse_gated_gemm, 256),
    Rule("few_rows", "kernels for few rows, which overlap", 1, _refuse_few_rows, other=_refuse_number_of_rows),
    # What folding gains is in docs/notes/few_tokens.md.
    Rule(
        "folded_norms",
        "both LayerNorms of a layer are parts of GEMMs",
        1,
        _refuse_session,
        other=functools.partial(_refuse_folding, FoldedNorms.BOTH),
    ),
    Rule(
        "folded_first_norm",
        "the first LayerNorm of a layer is a part of GEMMs",
        1,
        _refuse_session,
        other=functools.partial(_refuse_folding, FoldedNorms.FIRST),
    ),
    Rule("one_kernel", "one kernel runs all layers", 1, _refuse_one_kernel, other=_refuse_number_of_layers),
    Rule("adapted_gemm", "the GEMM of a linear layer adds its adapter's product", 1024, _refuse_adapted_gemm),
    # kernels/few_rows/short_attention.h
    Rule("short_attention", "attention by the kernel for short sequences", 1, _refuse_short_attention, 0, 128),
    # Each sequence has places of its own for the sums: with fewer rows these are a quarter of the gradients' bytes.
    Rule(
        "attention_sums",
        "attention's backward also computes the gradient of the bias of q, k and v",
        1,
        _refuse_attention_sums,
        least_length=64,
    ),
    # docs/notes/attention_designs.md
    Rule(
        OTHER_ATTENTION,
        "attention's backward by another backend than CUDA",
        1,
        _refuse_other_attention,
        other=_keeps_own_attention,
    ),
)


def with_rules(situation: Situation, specs: Specs, sizes: Sizes) -> Situation:
    """Adds the names of the rules for which a call has the right sizes."""
    rules = _rules_for(specs, situation, sizes)
    if OTHER_ATTENTION in rules and requested(None) is not None:
        rules -= {OTHER_ATTENTION}
    return situation._replace(rules=rules)


@functools.lru_cache(maxsize=4096)
def _rules_for(specs: Specs, situation: Situation, sizes: Sizes) -> frozenset[str]:
    """The rules that depend on other sizes of a layer apply to all layers or to none."""
    return frozenset(
        rule.name
        for rule in RULES
        if rule.refuse_sizes(sizes) is None
        and (rule.other is None or all(refused(rule, spec, situation, sizes) is None for spec in specs.kinds))
    )


def refused(rule: Rule, spec: LayerSpec, situation: Situation, sizes: Sizes) -> str | None:
    """Why a rule does not apply to a layer in a call; None if it does."""
    reason = rule.refusal(spec, situation) or rule.refuse_sizes(sizes)
    return rule.other(spec, sizes) if reason is None and rule.other is not None else reason
