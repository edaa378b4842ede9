"""Which steps are fused: one table. A rule states for which layers and calls it applies, and the measurement of
its range."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fasttfm.ops.layers.spec import LayerSpec


class Situation(NamedTuple):
    """What a plan depends on, in addition to the layers."""

    device: str  # cpu or cuda
    training: bool  # whether there will be a backward
    itemsize: int  # bytes of an element of x
    stream_itemsize: int  # of the residual stream
    precision: str = ""  # of the GEMMs' operands: "int8", "fp8", or that of x
    rules: frozenset[str] = frozenset()  # names of the rules that take the number of rows and the longest sequence


def situation_of(inputs: Any, *, training: bool, precision: str = "") -> Situation:
    """The situation of a call, without rules."""
    x, stream = inputs.x, inputs.x if inputs.residual is None else inputs.residual
    return Situation(x.device.type, training, x.element_size(), stream.element_size(), precision)


class Rule(NamedTuple):
    name: str
    does: str
    least_rows: int  # from which its kernels are faster
    refuse: Callable[[LayerSpec, Situation], str | None]  # why it does not apply to a layer on Hopper
    # Outside of CUDA graphs the host's launches take longer than the kernels of few rows: fewer launches are faster up
    # to this number of rows.
    most_launched_rows: int = 0
    most_seqlen: int | None = None  # of the longest sequence

    def refusal(self, spec: LayerSpec, situation: Situation) -> str | None:
        """Why it does not apply to a layer; None if it does. All rules are Hopper's."""
        return "is Hopper's" if situation.device != "cuda" else self.refuse(spec, situation)

    def takes(self, rows: int, max_seqlen: int, *, captured: bool) -> bool:
        if self.most_seqlen is not None and max_seqlen > self.most_seqlen:
            return False
        return rows >= self.least_rows or (not captured and rows <= self.most_launched_rows)


_PROJECTED_HEAD_DIM = _SHORT_HEAD_DIM = 64
_OTHER_PRECISION = "takes GEMMs in x's type"


def _refuse_rotary_projection(spec: LayerSpec, situation: Situation) -> str | None:
    attention = spec.attention
    if situation.precision:
        return _OTHER_PRECISION
    if attention.rotary is None:
        return "takes rotary positions"
    if attention.heads != attention.kv_heads or attention.head_dim != _PROJECTED_HEAD_DIM:
        return f"takes as many heads of k and v as of q, of {_PROJECTED_HEAD_DIM} columns"
    if attention.rotary_columns != attention.head_dim:
        return "rotates whole heads"
    return "takes heads without a norm" if attention.head_norm_eps is not None else None


def _refuse_gemm_activation(spec: LayerSpec, situation: Situation) -> str | None:
    if spec.feed_forward.gated:
        return "takes activations without a gate"
    return _refuse_fused_activation(situation)


def _refuse_gated_gemm(spec: LayerSpec, situation: Situation) -> str | None:
    return _refuse_fused_activation(situation) if spec.feed_forward.gated else "takes activations with a gate"


def _refuse_fused_activation(situation: Situation) -> str | None:
    if situation.precision:
        return _OTHER_PRECISION
    # The backward reads the product. With a gate, storing it leaves a gain of 1%.
    return "is for calls without gradients" if situation.training else None


def _refuse_short_attention(spec: LayerSpec, situation: Situation) -> str | None:
    attention = spec.attention
    if situation.training or attention.dropout:
        return "is for calls without gradients and without dropout"
    if attention.heads != attention.kv_heads or attention.head_dim != _SHORT_HEAD_DIM:
        return f"takes as many heads of k and v as of q, of {_SHORT_HEAD_DIM} columns"
    return None


# Measured with ModernBERT-base on an H200: benchmarks/results/nvidia-h200-encoders.csv.
RULES = (
    # With 1,024 rows cuBLASLt and a kernel that rotates are 8% faster, with 512 rows 4%.
    Rule("rotary_projection", "the projection to q, k and v also rotates", 2048, _refuse_rotary_projection, 512),
    Rule("gemm_activation", "the GEMM of up also applies the activation", 1, _refuse_gemm_activation),
    # With 128 rows cuBLASLt and a kernel for the activation are 9% faster.
    Rule("gated_gemm", "the GEMM of gate and up also multiplies them", 256, _refuse_gated_gemm, 256),
    # kernels/few_rows/short_attention.h
    Rule("short_attention", "attention by the kernel for short sequences", 1, _refuse_short_attention, 0, 128),
)


def with_rules(situation: Situation, rows: int, max_seqlen: int) -> Situation:
    """Adds the names of the rules for which a call has the right sizes."""
    captured = situation.device == "cuda" and torch.cuda.is_current_stream_capturing()
    return situation._replace(rules=_rules_for(rows, max_seqlen, captured))


@functools.lru_cache(maxsize=4096)
def _rules_for(rows: int, max_seqlen: int, captured: bool) -> frozenset[str]:
    return frozenset(rule.name for rule in RULES if rule.takes(rows, max_seqlen, captured=captured))


def refused(rule: Rule, spec: LayerSpec, situation: Situation, rows: int, max_seqlen: int) -> str | None:
    """Why a rule does not apply to a layer in a call outside of CUDA graphs; None if it does."""
    reason = rule.refusal(spec, situation)
    if reason is None and rule.most_seqlen is not None and max_seqlen > rule.most_seqlen:
        return f"takes sequences of up to {rule.most_seqlen} tokens, got {max_seqlen}"
    if reason is None and not rule.takes(rows, max_seqlen, captured=False):
        few = f", or up to {rule.most_launched_rows}" if rule.most_launched_rows else ""
        return f"takes at least {rule.least_rows} rows{few}, got {rows}"
    return reason
