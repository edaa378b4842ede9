"""Which steps are fused: one table. A rule states for which layers and calls it applies, and the measurement of
its range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fasttfm.ops.layers.spec import LayerSpec


class Situation(NamedTuple):
    """What a plan depends on, in addition to the layers."""

    device: str  # cpu or cuda
    training: bool  # whether there will be a backward
    itemsize: int  # bytes of an element of x
    stream_itemsize: int  # of the residual stream
    rules: frozenset[str] = frozenset()  # names of the rules that have enough rows


def situation_of(inputs: Any, *, training: bool) -> Situation:
    """The situation of a call, without rules."""
    x, stream = inputs.x, inputs.x if inputs.residual is None else inputs.residual
    return Situation(x.device.type, training, x.element_size(), stream.element_size())


class Rule(NamedTuple):
    name: str
    does: str
    least_rows: int  # from which it is faster
    refuse: Callable[[LayerSpec, Situation], str | None]  # why it does not apply to a layer


_PROJECTED_HEAD_DIM = 64


def _refuse_rotary_projection(spec: LayerSpec, situation: Situation) -> str | None:
    attention = spec.attention
    if situation.device != "cuda":
        return "is Hopper's"
    if attention.rotary is None:
        return "takes rotary positions"
    if attention.heads != attention.kv_heads or attention.head_dim != _PROJECTED_HEAD_DIM:
        return f"takes as many heads of k and v as of q, of {_PROJECTED_HEAD_DIM} columns"
    if attention.rotary_columns != attention.head_dim:
        return "rotates whole heads"
    return "takes heads without a norm" if attention.head_norm_eps is not None else None


def _refuse_gemm_activation(spec: LayerSpec, situation: Situation) -> str | None:
    if situation.device != "cuda":
        return "is Hopper's"
    if situation.training:
        return "is for calls without gradients"
    return "takes activations without a gate" if spec.feed_forward.gated else None


RULES = (
    # qkv_projection rotates queries and keys in its epilogue, and is faster than cuBLASLt from this number of rows on.
    Rule("rotary_projection", "the projection to q, k and v also rotates", 2048, _refuse_rotary_projection),
    Rule("gemm_activation", "the GEMM of up also applies the activation", 1, _refuse_gemm_activation),
)


def with_rules(situation: Situation, rows: int) -> Situation:
    """Adds the names of the rules for which a call has enough rows."""
    return situation._replace(rules=frozenset(rule.name for rule in RULES if rows >= rule.least_rows))


def refused(rule: Rule, spec: LayerSpec, situation: Situation, rows: int) -> str | None:
    """Why a rule does not apply to a layer in a call; None if it does."""
    reason = rule.refuse(spec, situation)
    if reason is None and rows < rule.least_rows:
        return f"takes at least {rule.least_rows} rows, got {rows}"
    return reason
