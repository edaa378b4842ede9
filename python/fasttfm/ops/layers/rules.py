"""Which steps are fused: one table. A rule states for which layers and calls it applies, and the measurement of
its range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fasttfm.ops.layers.spec import LayerSpec


class Situation(NamedTuple):
    """What a plan depends on, next to the layers."""

    device: str  # cpu or cuda
    training: bool  # whether there will be a backward
    itemsize: int  # bytes of an element of x
    stream_itemsize: int  # of the residual stream
    rules: frozenset[str] = frozenset()  # names of the rules that apply


def situation_of(inputs: Any, *, training: bool) -> Situation:
    """The situation of a call, without rules."""
    x, stream = inputs.x, inputs.x if inputs.residual is None else inputs.residual
    return Situation(x.device.type, training, x.element_size(), stream.element_size())


class Rule(NamedTuple):
    name: str
    does: str
    refuse: Callable[[LayerSpec, Situation, int], str | None]  # why it does not apply to a layer and a number of rows


# qkv_projection rotates queries and keys in its epilogue, and is faster than cuBLASLt from this number of rows on.
_LEAST_PROJECTED = 2048
_PROJECTED_HEAD_DIM = 64


def _refuse_rotary_projection(spec: LayerSpec, situation: Situation, rows: int) -> str | None:
    attention = spec.attention
    if situation.device != "cuda":
        return "is Hopper's"
    if attention.rotary is None:
        return "takes rotary positions"
    if attention.heads != attention.kv_heads or attention.head_dim != _PROJECTED_HEAD_DIM:
        return f"takes as many heads of k and v as of q, of {_PROJECTED_HEAD_DIM} columns"
    if attention.rotary_columns != attention.head_dim:
        return "rotates whole heads"
    if attention.head_norm_eps is not None:
        return "takes heads without a norm"
    return None if rows >= _LEAST_PROJECTED else f"takes at least {_LEAST_PROJECTED} rows, got {rows}"


def _refuse_gemm_activation(spec: LayerSpec, situation: Situation, rows: int) -> str | None:
    if situation.device != "cuda":
        return "is Hopper's"
    if situation.training:
        return "is for calls without gradients"
    return "takes activations without a gate" if spec.feed_forward.gated else None


RULES = (
    Rule("rotary_projection", "the projection to q, k and v also rotates", _refuse_rotary_projection),
    Rule("gemm_activation", "the GEMM of up also applies the activation", _refuse_gemm_activation),
)


def applied(specs: tuple[LayerSpec, ...], situation: Situation, rows: int) -> frozenset[str]:
    """The names of the rules that apply to at least one of the layers."""
    return frozenset(
        rule.name for rule in RULES if any(rule.refuse(spec, situation, rows) is None for spec in set(specs))
    )
