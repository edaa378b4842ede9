"""The parts of transformers' models, computed by fasttfm's ops.

A model is patched by replacing the classes of its modules by subclasses of the same name that override only
``forward``. So parameters, hooks and names stay, copies and pickles work, and restoring the class restores the model. A
part that does not support a call (a cache, LoRA in place of a linear layer, hooks inside) calls transformers' forward.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

import fasttfm.nn
from fasttfm import ops
from fasttfm.nn.embeddings import autocast_type
from fasttfm.nn.parts import linear_activation, masked_lm_transform, product, residual_norm
from fasttfm.nn.plain import (
    Uncopied,
    dropout_rate,
    is_plain,
    is_plain_dropout,
    is_plain_linear,
    is_plain_norm,
    register_activation,
    register_plain_class,
)
from fasttfm.nn.rotary_layer import is_capturing
from fasttfm.ops.core.library import is_plain as is_plain_call
from fasttfm.patching.attention import attend, captured
from fasttfm.patching.masks import is_explicit


class Patched:
    """A base class of the patched modules, before transformers' class in the MRO."""

    does: ClassVar[str]  # a description for reports


class LayerNorm(Patched, fasttfm.nn.LayerNorm):
    does = "LayerNorm: one pass"


register_plain_class(LayerNorm)
register_plain_class(Conv1D)
# Two of transformers' names may be one class; all of these names have the same formula.
for _name in ops.ACTIVATIONS:
    if _name in ACT2FN:
        register_activation(type(ACT2FN[_name]), _name)


def attention_rate(module: Any, dropout: Any) -> float:
    """The dropout probability of attention. transformers reads the probability of ``dropout`` and never calls it, so
    ``module.training`` decides; an Identity may replace a Dropout."""
    return getattr(dropout, "p", 0.0) if module.training else 0.0


# ---- parts with the names of BERT's modules --------------------------------------------------------------------------


class Embeddings(Patched):
    """Token, position and (if present) segment embeddings, LayerNorm and dropout."""

    does = "embeddings: tokens, positions, segments, LayerNorm and dropout in one pass"

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
        plain = is_plain(*tables) and is_plain_norm(self.LayerNorm) and is_plain_dropout(self.dropout)
        plain = plain and getattr(segments, "padding_idx", None) is None
        if input_ids is None or inputs_embeds is not None or not plain:
            given = {"position_ids": position_ids, "inputs_embeds": inputs_embeds, **others}
            if segments is not None:
                given["token_type_ids"] = token_type_ids
            y: Tensor = super().forward(input_ids, **given)  # type: ignore[misc]
            return y
        if position_ids is None:
            position_ids = self.default_positions(input_ids, **others)
        if token_type_ids is None and segments is not None:
            token_type_ids = self.default_segments(input_ids, position_ids)
        word, position, norm = self.word_embeddings, self.position_embeddings, self.LayerNorm
        return ops.embedding(
            input_ids,
            word.weight,
            without_gradient_of_row(position.weight, position.padding_idx),
            None if segments is None else segments.weight,
            position_ids=None if position_ids is None else position_ids.expand_as(input_ids),
            segment_ids=None if token_type_ids is None else token_type_ids.expand_as(input_ids),
            weight=norm.weight,
            bias=norm.bias,
            layer_norm=True,
            eps=norm.eps,
            p=dropout_rate(self.dropout),
            padding_idx=word.padding_idx,
            dtype=autocast_type(word.weight),
        )

    def default_positions(self: Any, input_ids: Tensor, past_key_values_length: int = 0) -> Tensor | None:
        """Those of the buffer; None for the tokens' indices in their sequences, which it usually has."""
        buffer: Tensor | None = getattr(self, "position_ids", None)
        start, end = past_key_values_length, past_key_values_length + input_ids.shape[1]
        if buffer is None or (not start and end <= buffer.shape[1] and self.are_default("position_ids", input_ids)):
            return None
        return buffer[:, start:end]

    def default_segments(self: Any, input_ids: Tensor, position_ids: Tensor | None) -> Tensor | None:
        """Those of the buffer for the tokens' positions; None for 0, which it usually has."""
        buffer: Tensor | None = getattr(self, "token_type_ids", None)
        if buffer is None or self.are_default("token_type_ids", input_ids):
            return None
        if position_ids is None:
            return buffer[:, : input_ids.shape[1]]
        return buffer.to(position_ids.device).expand(len(position_ids), -1).gather(1, position_ids)

    def are_default(self: Any, name: str, input_ids: Tensor) -> bool:
        """Whether a buffer of ids has the values that transformers gives it. They are read once, which synchronizes
        with the GPU, and again after a change; calls that are traced, transformed or captured cannot read them."""
        buffer = getattr(self, name)
        if not is_plain_call((input_ids, buffer)) or buffer.is_inference():  # which does not count its changes
            return False
        known: DefaultIds | None = self.__dict__.get(DefaultIds.ATTRIBUTE)
        if known is None:
            known = self.__dict__[DefaultIds.ATTRIBUTE] = DefaultIds()
        return known.has(name, buffer)


class DefaultIds(Uncopied):
    """Which buffers of position and segment ids have transformers' values, for as long as they are unchanged."""

    ATTRIBUTE = "_fasttfm_default_ids"

    def __init__(self) -> None:
        self._known: dict[str, tuple[Tensor, int, int, bool]] = {}

    def has(self, name: str, buffer: Tensor) -> bool:
        known = self._known.get(name)
        if known is not None and known[0] is buffer and known[1:3] == (buffer._version, buffer.data_ptr()):
            return known[3]
        if is_capturing(buffer):
            return False
        positions = torch.arange(buffer.shape[-1], device=buffer.device)
        expected = positions if name == "position_ids" else torch.zeros_like(positions)
        same = torch.equal(buffer, expected.expand_as(buffer))
        self._known[name] = buffer, buffer._version, buffer.data_ptr(), same
        return same


class SelfAttention(Patched):
    """``query``, ``key`` and ``value`` by one GEMM, then attention, which reads its result without a copy."""

    does = "attention: one product for q, k and v, fused attention without weights in memory"

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        projections = (self.query, self.key, self.value)
        cache = any(each is not None for each in (*args, kwargs.get("past_key_values")))
        if cache or not fusable(attention_mask, kwargs) or not is_plain_linear(*projections):
            # transformers' projections, with fasttfm's attention between them
            y: tuple[Tensor, Tensor | None] = super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]
            return y
        causal = self.is_causal if kwargs.get("is_causal") is None else kwargs["is_causal"]
        options = {"causal": causal, "scale": self.scaling, "p": attention_rate(self, self.dropout)}
        return self_attention(
            hidden_states, projections, self.attention_head_size, attention_mask, options, kwargs
        ), None


def fusable(mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether attention itself can be fused: weights are not requested, and lengths describe the mask."""
    return not (is_explicit(mask) or kwargs.get("output_attentions") or captured("attentions"))


def self_attention(
    x: Tensor, projections: Any, head_size: int, mask: Tensor | None, options: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """Attention [B, S, C] of ``x`` with three linear layers; ``options`` and ``kwargs`` go to ``attend``."""
    weights = tuple(each.weight for each in projections)
    heads = weights[0].shape[0] // head_size
    qkv = ops.qkv_projection(x, weights, tuple(each.bias for each in projections), heads)
    return attend(qkv, mask=mask, **options, **packing(kwargs)).flatten(-2)


PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def packing(kwargs: dict[str, Any]) -> dict[str, Any]:
    """transformers' arguments of a batch that packs several sequences into one row."""
    return {name: kwargs[name] for name in PACKING if name in kwargs}


class AddNorm(Patched):
    """``dense``, dropout, residual connection and ``LayerNorm``."""

    does = "residual connections: bias, dropout, addition and LayerNorm in one pass"

    def forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        branch, bias = product(self.dense, hidden_states)
        return residual_norm(self.LayerNorm, branch, input_tensor, bias=bias, dropout=self.dropout)


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
    """The table, with no gradient for this row."""
    return table if row is None else _WithoutGradientOfRow.apply(table, row)
