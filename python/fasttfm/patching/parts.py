"""The parts of transformers' models, computed by fasttfm's ops.

A model is patched by giving its modules another class: one that stands before transformers' own, has its name and
replaces nothing but ``forward``. So parameters, hooks and names stay, copies and pickles work, and taking the class
away again restores the model. A part that cannot serve a call (a cache, LoRA in the place of a linear layer, hooks
inside) calls transformers' forward.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

import fasttfm.nn
from fasttfm import ops
from fasttfm.nn.residual import add_norm
from fasttfm.patching.attention import attend, captured
from fasttfm.patching.masks import is_explicit


class Patched:
    """Stands before one of transformers' classes."""

    does: ClassVar[str]  # as reports say it


class LayerNorm(Patched, fasttfm.nn.LayerNorm):
    does = "LayerNorm: one pass"


_LAYER_NORMS = (nn.LayerNorm, LayerNorm)
# An activation module's class -> the name that ops know it by. Two of transformers' names may be one class: of those
# names, all stand for the same formula.
_ACTIVATIONS = {type(ACT2FN[name]): name for name in ops.ACTIVATIONS if name in ACT2FN}


# ---- what calls read from modules ------------------------------------------------------------------------------------


def plain(*modules: Any) -> bool:
    """Whether modules are nothing more than linear layers, embeddings or LayerNorms, so that their parameters say all:
    not LoRA's or quantised ones, not sharded by themselves, without hooks or wrappers that would not be called."""
    return all(type(module) in _PLAIN and not _hooked(module) and not wrapped(module) for module in modules)


_PLAIN = (nn.Linear, nn.Embedding, Conv1D, *_LAYER_NORMS)


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def wrapped(module: nn.Module) -> bool:
    """Whether a module has a forward of its own before its class's, as Accelerate gives to those that it offloads."""
    return "forward" in vars(module)


def activation_name(activation: Any) -> str | None:
    """The name of an activation that ops have, else None."""
    return _ACTIVATIONS.get(type(activation))


def rate(dropout: Any) -> float:
    """The probability; people put an Identity in the place of a Dropout."""
    return getattr(dropout, "p", 0.0) if dropout.training else 0.0


def product(linear: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """``linear(x)`` in two parts: what a fused op adds to the second is done there."""
    return (functional.linear(x, linear.weight), linear.bias) if plain(linear) else (linear(x), None)


def linear_activation(linear: Any, activation: Any, x: Tensor) -> Tensor:
    """``activation(linear(x))``"""
    name = activation_name(activation)
    if name is None or not plain(linear):
        y: Tensor = activation(linear(x))
        return y
    weight = linear.weight.t() if type(linear) is Conv1D else linear.weight
    return ops.linear_gelu(x, weight, linear.bias, activation=name)


def residual_norm(norm: Any, branch: Tensor, bias: Tensor | None, p: float, residual: Tensor) -> Tensor:
    """``norm(residual + dropout(branch + bias))``"""
    if plain(norm) and residual.dtype in (branch.dtype, torch.float32):
        return add_norm(norm, branch, residual, linear_bias=bias, p=p)
    y: Tensor = norm(residual + functional.dropout(branch if bias is None else branch + bias, p))
    return y


def masked_lm_transform(dense: Any, activation: Any, norm: Any, x: Tensor) -> Tensor:
    """``norm(activation(dense(x)))``, in front of the products with every word."""
    name = activation_name(activation)
    kind = None if name is None else ops.ACTIVATIONS[name]
    if kind in ("gelu", "gelu_tanh") and plain(norm):
        hidden, bias = product(dense, x)
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        return ops.gelu_layer_norm(hidden, bias, norm.weight, norm.bias, approximate=approximate, eps=norm.eps)
    y: Tensor = norm(linear_activation(dense, activation, x))
    return y


# ---- parts with the names that BERT's family gives them --------------------------------------------------------------


class Embeddings(Patched):
    """Words, positions, segments where there are any, LayerNorm and dropout."""

    does = "embeddings: words, positions, segments, LayerNorm and dropout in one pass"

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        segments = getattr(self, "token_type_embeddings", None)
        tables = [self.word_embeddings, self.position_embeddings, *([] if segments is None else [segments])]
        if input_ids is None or inputs_embeds is not None or not plain(*tables, self.LayerNorm):
            given = {"position_ids": position_ids, "inputs_embeds": inputs_embeds, **others}
            if segments is not None:
                given["token_type_ids"] = token_type_ids
            y: Tensor = super().forward(input_ids, **given)  # type: ignore[misc]
            return y
        if position_ids is None:
            position_ids = self.default_positions(input_ids, **others)
        word, position, norm = self.word_embeddings, self.position_embeddings, self.LayerNorm
        device = word.weight.device.type
        return ops.embedding(
            input_ids,
            word.weight,
            without_gradient_of_row(position.weight, position.padding_idx),
            None if segments is None else segments.weight,
            position_ids=None if position_ids is None else position_ids.expand_as(input_ids),
            segment_ids=None if token_type_ids is None else token_type_ids.expand_as(input_ids),
            weight=norm.weight,
            bias=norm.bias,
            eps=norm.eps,
            p=rate(self.dropout),
            padding_idx=word.padding_idx,
            dtype=torch.get_autocast_dtype(device) if _autocast(word.weight) else None,
        )

    def default_positions(self: Any, input_ids: Tensor, past_key_values_length: int = 0) -> Tensor | None:
        """None for a token's number in its sequence."""
        if not past_key_values_length:
            return None
        start, end = past_key_values_length, past_key_values_length + input_ids.shape[1]
        positions: Tensor = self.position_ids[:, start:end]
        return positions


class SelfAttention(Patched):
    """``query``, ``key`` and ``value`` by one product, then attention on its result in place."""

    does = "attention: one product for q, k and v, fused attention without weights in memory"

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        projections = (self.query, self.key, self.value)
        cache = any(each is not None for each in (*args, kwargs.get("past_key_values")))
        if cache or not fusable(attention_mask, kwargs) or not plain(*projections):
            # transformers' projections around attention by fasttfm
            y: tuple[Tensor, Tensor | None] = super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]
            return y
        causal = self.is_causal if kwargs.get("is_causal") is None else kwargs["is_causal"]
        options = {"causal": causal, "scale": self.scaling, "p": rate(self.dropout)}
        return self_attention(
            hidden_states, projections, self.num_attention_heads, attention_mask, options, kwargs
        ), None


def fusable(mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether attention itself can be fused: no weights are asked for, and lengths describe the mask."""
    return not (is_explicit(mask) or kwargs.get("output_attentions") or captured("attentions"))


def self_attention(
    x: Tensor, projections: Any, heads: int, mask: Tensor | None, options: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """[B, S, C] of ``x`` and three linear layers; attend()'s ``options`` and what it takes from a call's ``kwargs``."""
    weights = tuple(each.weight for each in projections)
    qkv = ops.qkv_projection(x, weights, tuple(each.bias for each in projections), heads)
    return attend(qkv, mask=mask, **options, **packing(kwargs)).flatten(-2)


_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def packing(kwargs: dict[str, Any]) -> dict[str, Any]:
    """transformers' arguments of a batch that packs several sequences into one row."""
    return {name: kwargs[name] for name in _PACKING if name in kwargs}


class AddNorm(Patched):
    """``dense``, dropout, residual connection and ``LayerNorm``."""

    does = "residual connections: bias, dropout, addition and LayerNorm in one pass"

    def forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        branch, bias = product(self.dense, hidden_states)
        return residual_norm(self.LayerNorm, branch, bias, rate(self.dropout), input_tensor)


class Intermediate(Patched):
    """``dense`` and activation."""

    does = "MLP: bias and activation in one pass, recomputed in the backward"

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return linear_activation(self.dense, self.intermediate_act_fn, hidden_states)


class HeadTransform(Patched):
    """``dense``, activation and ``LayerNorm``."""

    does = "masked-LM head: bias, activation and LayerNorm in one pass"

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        activation = self.transform_act_fn if hasattr(self, "transform_act_fn") else self.activation
        return masked_lm_transform(self.dense, activation, self.LayerNorm, hidden_states)


def _autocast(weight: Tensor) -> bool:
    device = weight.device.type
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device) and weight.dtype != torch.float64


class _WithoutGradientOfRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, row: int) -> Tensor:
        ctx.row = row
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        gradient[ctx.row] = 0
        return gradient, None


def without_gradient_of_row(table: Tensor, row: int | None) -> Tensor:
    """The table; nothing learns its row."""
    return table if row is None else _WithoutGradientOfRow.apply(table, row)
