"""Runs the forward steps of a plan by the public ops, step by step: the reference of all plans, for every device, dtype
and tracer. Autograd differentiates the ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.activation import CODES
from fasttfm.ops import fp8
from fasttfm.ops.core.backends import requested
from fasttfm.ops.fp8.norm import NormArguments, add_norm_cast
from fasttfm.ops.layers import steps
from fasttfm.ops.layers.lora import Pairs
from fasttfm.ops.layers.spec import FIELDS
from fasttfm.ops.linear import dense

_ACTIVATIONS = {code: name for name, code in CODES.items()}


class Cache(NamedTuple):
    """The KV cache of all layers, to which a call writes the keys and values of its tokens: of prompts, with
    ``places``, or one new token of each of the first T slots, which attends to the tokens in its slot."""

    keys: Tensor  # [layers, slots, kv_heads, capacity, D], in x's dtype, contiguous
    values: Tensor
    places: Tensor | None = None  # int64 [T]: the row of a token's first head among the rows of D elements of a layer
    lengths: Tensor | None = None  # int32 [T]: the tokens in each slot, without the new one

    @property
    def kind(self) -> str:
        """A situation's ``cache``."""
        return "tokens" if self.places is None else "prompts"


class Inputs(NamedTuple):
    """The inputs of a stack, in addition to its parameters."""

    x: Tensor  # [T, C]; in a pre-LN model normalized
    residual: Tensor | None  # the stream of a pre-LN model
    cu_seqlens: Tensor
    max_seqlen: int
    seeds: Tensor | None = None  # [layers, 3]
    tables: tuple[tuple[Tensor, Tensor], ...] = ()  # cosines and sines [positions, pairs]
    positions: Tensor | None = None  # int64 [T]; by default a token's index among all tokens
    cache: Cache | None = None  # only for calls without gradients
    pairs: Pairs = ()  # of the specs' adapters
    adapters: Tensor | None = None  # int32 [T]: the index of each token's adapter, -1 for none


def run(
    sequence: tuple[Any, ...],
    inputs: Inputs,
    parameters: list[Tensor | None],
    adapters: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Tensor, Tensor | None]:
    """y, and the stream of a pre-LN model, of a plan's forward. ``parameters`` are those of all layers, ``adapters``
    LoRA's by their names."""
    tensors = run_all(sequence, inputs, parameters, adapters=adapters)
    return tensors["y"], tensors.get("z")


def run_all(
    sequence: tuple[Any, ...],
    inputs: Inputs,
    parameters: list[Tensor | None],
    *,
    operands: Sequence[Any] = (),
    record: Callable[[str, Tensor], None] | None = None,
    adapters: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    """All tensors of a plan's forward, by their names.

    Args:
        operands: Of an FP8 plan, the linear layers of each layer: ops.fp8.inference's StaticLayer.
        record: Called with the name of each linear layer's weight, and its input.
    """
    tensors: dict[str, Any] = {"x": inputs.x, "residual": inputs.residual, "positions": inputs.positions, **adapters}
    for number, (cos, sin) in enumerate(inputs.tables):
        tensors[f"cos{number}"], tensors[f"sin{number}"] = cos, sin
    layers = len(parameters) // len(FIELDS)
    for layer in range(layers):
        for field, parameter in zip(FIELDS, parameters[layer * len(FIELDS) :], strict=False):
            tensors[f"{layer}.{field}"] = parameter
    state = _State(tensors, inputs, operands, record)
    for step in sequence:
        if not isinstance(step, (steps.Range, steps.Zero)):
            _RUN[type(step)](state, step)
    return tensors


class _State(NamedTuple):
    tensors: dict[str, Any]
    inputs: Inputs
    operands: Sequence[Any]
    record: Callable[[str, Tensor], None] | None

    def get(self, name: str | None) -> Any:
        return None if name is None else self.tensors[name]

    def seed(self, name: str | None, index: int) -> Tensor | None:
        return None if name is None or self.inputs.seeds is None else self.inputs.seeds.flatten()[index : index + 1]

    def linear(self, name: str) -> Any:
        """The linear layer of an operand."""
        layer, linear, _ = name.removeprefix("fp8 ").split(".")
        return getattr(self.operands[int(layer)], linear)


def _gemm(state: _State, step: steps.Gemm) -> None:
    a, weight = state.get(step.a), state.get(step.b)
    if state.record is not None:
        state.record(step.b, a)
    product = dense(a, weight, state.get(step.bias))
    state.tensors[step.d] = product if step.c is None else product + state.get(step.c)


def _adapted_gemm(state: _State, step: steps.AdaptedGemm) -> None:
    product = dense(state.get(step.x), state.get(step.b), state.get(step.bias))
    product = product + dense(state.get(step.t), state.get(step.c))
    state.tensors[step.y] = product if step.add is None else product + state.get(step.add)


def _selected_gemm(state: _State, step: steps.SelectedGemm) -> None:
    x = state.get(step.x)[:, step.x_first : step.x_first + step.inner]
    adapters, total = state.inputs.adapters, x.new_zeros((len(x), step.columns))
    assert adapters is not None
    for index, b in enumerate(state.get(step.b)[:, step.b_first : step.b_first + step.columns]):
        total = torch.where((adapters == index)[:, None], dense(x, b), total)
    if not step.adds:
        state.tensors[step.y] = total
        return
    missing = (step.y_first, step.y_columns - step.y_first - step.columns)
    state.tensors[step.y] = state.get(step.y) + torch.nn.functional.pad(total, missing)


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


def _projection(state: _State, step: steps.Projection) -> None:
    product = dense(state.get(step.x), state.get(step.weight), state.get(step.bias))
    if step.cos is not None:
        product = _rotate(state, step, product, 3 * step.heads, 2 * step.heads)
    state.tensors[step.qkv] = product


def _head_norm(state: _State, step: steps.HeadNorm) -> None:
    heads = state.get(step.x).unflatten(-1, (-1, step.head_dim))
    q, k, v = heads.split((step.heads, step.kv_heads, step.kv_heads), dim=-2)
    q = ops.rms_norm(q, state.get(step.q_weight), eps=step.eps)
    k = ops.rms_norm(k, state.get(step.k_weight), eps=step.eps)
    state.tensors[step.y] = torch.cat((q, k, v), dim=-2).flatten(-2)


def _store_keys(state: _State, step: steps.StoreKeys) -> None:
    cache = state.inputs.cache
    assert cache is not None
    assert cache.places is not None
    heads = state.get(step.qkv).unflatten(-1, (-1, step.head_dim))
    _, *new = heads.split((step.heads, step.kv_heads, step.kv_heads), dim=-2)
    rows = cache.places[:, None] + torch.arange(step.kv_heads, device=heads.device) * cache.keys.shape[3]
    for kept, rows_of_heads in zip((cache.keys, cache.values), new, strict=True):
        kept[step.layer].view(-1, step.head_dim)[rows] = rows_of_heads


def _cached_attention(state: _State, step: steps.CachedAttention) -> None:
    cache = state.inputs.cache
    assert cache is not None
    assert cache.lengths is not None
    heads = state.get(step.qkv).unflatten(-1, (-1, step.head_dim))
    q, k, v = heads.split((step.heads, step.kv_heads, step.kv_heads), dim=-2)
    keys, values = (kept[step.layer, : len(heads)].transpose(1, 2) for kept in (cache.keys, cache.values))
    window = _side(step.window_left)
    out = ops.decode_attention(q, k, v, keys, values, cache.lengths, window=window, scale=step.scale)
    state.tensors[step.out] = out.flatten(-2)


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


def _fp8_cast(state: _State, step: steps.Fp8Cast) -> None:
    state.tensors[step.y] = fp8.cast(state.get(step.x), state.linear(step.scale).input, with_columns=False)


def _fp8_gemm(state: _State, step: steps.Fp8Gemm) -> None:
    linear, dtype = state.linear(step.weight), state.inputs.x.dtype
    product = linear.forward(state.get(step.x), dtype, state.get(step.bias))
    state.tensors[step.y] = product if step.c is None else product + state.get(step.c)


def _fp8_gemm_activation(state: _State, step: steps.Fp8GemmActivation) -> None:
    up, down, activation = state.linear(step.weight), state.linear(step.scale), _ACTIVATIONS[step.activation]
    x8, bias, dtype = state.get(step.x), state.get(step.bias), state.inputs.x.dtype
    _, state.tensors[step.y] = up.forward_gelu(x8, dtype, bias, activation, down.input, keep_h=False)


def _add_norm_cast(state: _State, step: steps.AddNorm, scale: str, y8: str) -> None:
    parameters = (state.get(step.weight), state.get(step.bias), state.get(step.linear_bias))
    norm = NormArguments(*parameters, None, None, 0.0, step.eps)
    slot, want_z = state.linear(scale).input, step.z is not None
    terms = (state.get(step.x), state.get(step.residual))
    sums = add_norm_cast(*terms, norm, slot, requested(None), want_z=want_z, with_columns=False)
    state.tensors[step.y], state.tensors[y8] = sums.y, sums.y8
    if step.z is not None:
        state.tensors[step.z] = sums.z


def _add_norm(state: _State, step: steps.AddNorm) -> None:
    if step.y_scale is not None and step.y8 is not None:
        _add_norm_cast(state, step, step.y_scale, step.y8)
        return
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
    steps.Projection: _projection,
    steps.HeadNorm: _head_norm,
    steps.StoreKeys: _store_keys,
    steps.CachedAttention: _cached_attention,
    steps.Attention: _attention,
    steps.AddNorm: _add_norm,
    steps.RmsNorm: _rms_norm,
    steps.GatedActivation: _gated_activation,
    steps.Activation: _activation,
    steps.GemmActivation: _gemm_activation,
    steps.AdaptedGemm: _adapted_gemm,
    steps.SelectedGemm: _selected_gemm,
    steps.Fp8Cast: _fp8_cast,
    steps.Fp8Gemm: _fp8_gemm,
    steps.Fp8GemmActivation: _fp8_gemm_activation,
}
