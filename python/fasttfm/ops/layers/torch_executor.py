"""Runs the forward steps of a plan by the public ops, step by step: the reference of all plans, for every device, dtype
and tracer. Autograd differentiates the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.activation import CODES
from fasttfm.ops.layers import steps
from fasttfm.ops.layers.spec import FIELDS
from fasttfm.ops.linear import dense

_ACTIVATIONS = {code: name for name, code in CODES.items()}


class Inputs(NamedTuple):
    """The inputs of a stack, in addition to its parameters."""

    x: Tensor  # [T, C]; in a pre-LN model normalized
    residual: Tensor | None  # the stream of a pre-LN model
    cu_seqlens: Tensor
    max_seqlen: int
    seeds: Tensor | None = None  # [layers, 3]
    tables: tuple[tuple[Tensor, Tensor], ...] = ()  # cosines and sines [positions, pairs]
    positions: Tensor | None = None  # int64 [T]; by default a token's index among all tokens


def run(sequence: tuple[Any, ...], inputs: Inputs, parameters: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """y, and the stream of a pre-LN model, of a plan's forward. ``parameters`` are those of all layers."""
    tensors: dict[str, Any] = {"x": inputs.x, "residual": inputs.residual, "positions": inputs.positions}
    for number, (cos, sin) in enumerate(inputs.tables):
        tensors[f"cos{number}"], tensors[f"sin{number}"] = cos, sin
    layers = len(parameters) // len(FIELDS)
    for layer in range(layers):
        for field, parameter in zip(FIELDS, parameters[layer * len(FIELDS) :], strict=False):
            tensors[f"{layer}.{field}"] = parameter
    state = _State(tensors, inputs)
    for step in sequence:
        if not isinstance(step, steps.Zero):
            _RUN[type(step)](state, step)
    return tensors["y"], tensors.get("z")


class _State(NamedTuple):
    tensors: dict[str, Any]
    inputs: Inputs

    def get(self, name: str | None) -> Any:
        return None if name is None else self.tensors[name]

    def seed(self, name: str | None, index: int) -> Tensor | None:
        return None if name is None or self.inputs.seeds is None else self.inputs.seeds.flatten()[index : index + 1]


def _gemm(state: _State, step: steps.Gemm) -> None:
    weight = state.get(step.b)
    product = dense(state.get(step.a), weight, state.get(step.bias))
    state.tensors[step.d] = product if step.c is None else product + state.get(step.c)


def _rotate(state: _State, step: Any, qkv: Tensor, heads: int, rotary_heads: int) -> Tensor:
    positions = state.inputs.positions
    rotated = ops.rotary(
        qkv.unflatten(-1, (heads, -1)),
        *(state.get(step.cos), state.get(step.sin)),
        positions=positions,
        rotary_heads=rotary_heads,
    )
    return rotated.flatten(-2)


def _rotary(state: _State, step: steps.Rotary) -> None:
    state.tensors[step.x] = _rotate(state, step, state.get(step.x), step.heads, step.rotary_heads)


def _rotary_projection(state: _State, step: steps.RotaryProjection) -> None:
    product = dense(state.get(step.x), state.get(step.weight), state.get(step.bias))
    state.tensors[step.qkv] = _rotate(state, step, product, 3 * step.heads, 2 * step.heads)


def _head_norm(state: _State, step: steps.HeadNorm) -> None:
    heads = state.get(step.x).unflatten(-1, (-1, step.head_dim))
    q, k, v = heads.split((step.heads, step.kv_heads, step.kv_heads), dim=-2)
    q = ops.rms_norm(q, state.get(step.q_weight), eps=step.eps)
    k = ops.rms_norm(k, state.get(step.k_weight), eps=step.eps)
    state.tensors[step.y] = torch.cat((q, k, v), dim=-2).flatten(-2)


def _attention(state: _State, step: steps.Attention) -> None:
    qkv = state.get(step.qkv).unflatten(-1, (step.heads + 2 * step.kv_heads, step.head_dim))
    if step.heads == step.kv_heads:
        operands = (qkv.unflatten(-2, (3, step.heads)),)
    else:
        operands = qkv.split((step.heads, step.kv_heads, step.kv_heads), dim=-2)
    out = ops.attention(
        *operands,
        window=(_side(step.window_left), _side(step.window_right)),
        cu_seqlens=state.inputs.cu_seqlens,
        max_seqlen=state.inputs.max_seqlen,
        scale=step.scale,
        dropout_p=philox.probability(step.threshold),
        seed=state.seed(step.seed, step.seed_index),
    )
    assert isinstance(out, Tensor)
    state.tensors[step.out] = out.flatten(-2)


def _side(keys: int) -> int | None:
    return None if keys < 0 else keys


def _add_norm(state: _State, step: steps.AddNorm) -> None:
    y, z = ops.dropout_add_layer_norm(
        state.get(step.x),
        state.get(step.residual),
        state.get(step.weight),
        state.get(step.bias),
        linear_bias=state.get(step.linear_bias),
        p=philox.probability(step.threshold),
        seed=state.seed(step.seed, step.seed_index),
        cu_seqlens=state.inputs.cu_seqlens if step.threshold else None,
        eps=step.eps,
        prenorm=True,
    )
    state.tensors[step.y] = y
    if step.z is not None:
        state.tensors[step.z] = z


def _rms_norm(state: _State, step: steps.RmsNorm) -> None:
    state.tensors[step.y] = ops.rms_norm(state.get(step.x), state.get(step.weight), eps=step.eps)


def _gated_activation(state: _State, step: steps.GatedActivation) -> None:
    x, bias, activation = state.get(step.x), state.get(step.bias), _ACTIVATIONS[step.activation]
    state.tensors[step.y] = ops.gated_activation(x, bias, activation=activation, gate_first=bool(step.gate_first))


def _activation(state: _State, step: steps.Activation) -> None:
    x, bias = state.get(step.x), state.get(step.bias)
    state.tensors[step.y] = ops.bias_gelu(x, bias, activation=_ACTIVATIONS[step.activation])


def _gemm_activation(state: _State, step: steps.GemmActivation) -> None:
    x, weight, bias, activation = *map(state.get, (step.x, step.weight, step.bias)), _ACTIVATIONS[step.activation]
    if step.gated:
        state.tensors[step.y] = ops.gated_activation(dense(x, weight, None), bias, activation=activation)
    else:
        state.tensors[step.y] = ops.linear_gelu(x, weight, bias, activation=activation)


_RUN: dict[type, Callable[[_State, Any], None]] = {
    steps.Gemm: _gemm,
    steps.Rotary: _rotary,
    steps.RotaryProjection: _rotary_projection,
    steps.HeadNorm: _head_norm,
    steps.Attention: _attention,
    steps.AddNorm: _add_norm,
    steps.RmsNorm: _rms_norm,
    steps.GatedActivation: _gated_activation,
    steps.Activation: _activation,
    steps.GemmActivation: _gemm_activation,
}
