"""``BaseModel``: the base class of models without a head; ``TextModel``: those that read token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor

from fasttfm.models.outputs import States
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.nn import Embeddings, PackedBatch, PackedTransformer
from fasttfm.nn.parts import layer_norm
from fasttfm.nn.plain import is_watched


class Outputs(TypedDict, total=False):
    """Additional outputs of a call."""

    output_hidden_states: bool | None  # the configuration's if None
    output_attentions: bool | None


class Layout(Outputs, total=False):
    """Alternatives to an ``attention_mask`` (nn.PackedBatch.of), and additional outputs."""

    lengths: Sequence[int] | Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int | None


# For callers that only read the states of the last layer, whatever the configuration says.
LAST_STATES: Layout = {"output_hidden_states": False, "output_attentions": False}


class Encoded(NamedTuple):
    """The result of the layers, for heads."""

    x: Tensor  # [T, C], or [sequences, C] with only_first
    batch: PackedBatch
    hidden_states: States  # in the caller's shape
    attentions: States
    pooled: Tensor | None = None  # [sequences, C], if a call of the model has returned it
    only_first: bool = False  # whether x has only the first token of each sequence

    def returned(self) -> dict[str, States]:
        return {"hidden_states": self.hidden_states, "attentions": self.attentions}

    def first_tokens(self) -> Tensor:
        """[sequences, C]"""
        return self.x if self.only_first else self.batch.first_tokens(self.x)


class BaseModel(PretrainedModel):
    """A model without a head: embeddings and a stack of layers over packed tokens; a subclass makes both."""

    base = True
    embeddings: Any
    encoder: PackedTransformer

    def outputs(self, hidden_states: bool | None, attentions: bool | None) -> tuple[bool, bool]:
        """Whether a call returns hidden states and attention weights: as it says, else as the configuration says."""
        with_states = self.config.output_hidden_states if hidden_states is None else hidden_states
        return bool(with_states), bool(self.config.output_attentions if attentions is None else attentions)

    def attentions(self, states: list[Tensor], batch: PackedBatch, **others: Any) -> tuple[Tensor, ...]:
        """Every layer's attention weights [sequences, H, S, S], for inspection; padding is at the end. ``others`` are
        the additional inputs of the layers."""
        longest = batch.max_seqlen if batch.shape is None else batch.shape[1]
        layers: list[Any] = self.encoder.in_order()
        options = self.attention_options(batch, longest, **others)
        inputs = [  # a layer may have no norm before its attention
            layer_norm(layer.norm1, x) if layer.norm_first and layer.norm1 is not None else x
            for layer, x in zip(layers, states, strict=True)
        ]
        return tuple(
            layer.attention_weights(x, batch.cu_seqlens, longest, **options)
            for layer, x in zip(layers, inputs, strict=True)
        )

    def attention_options(self, batch: PackedBatch, longest: int, **others: Any) -> dict[str, Any]:
        """The arguments of layers' ``attention_weights``, in addition to the states and sizes."""
        return {}


class TextModel(BaseModel):
    """A model without a head that reads token ids.

    Called with ``input_ids`` [B, S] and an ``attention_mask`` (or ``lengths``, which need no synchronization), or
    packed with ``input_ids`` [T], ``cu_seqlens`` and ``max_seqlen``. Outputs are padded if the input is.
    """

    embeddings: Embeddings
    reads_segments: ClassVar[bool] = False  # in its layers; embeddings may have segments, too
    layer_inputs: ClassVar[tuple[str, ...]] = ()  # the names of additional arguments of run_layers

    @property
    def has_segments(self) -> bool:
        """Whether a call reads ``token_type_ids``."""
        return self.reads_segments or self.embeddings.segment is not None

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        reads_first: bool = False,
        **layout: Any,
    ) -> Encoded:
        """The packed states of the last layer, for a model with a head. If this module has hooks or is a subclass, it
        is called, and its output is packed again. ``reads_first`` says that the head reads only the first token of each
        sequence, so that the others' states may be left out."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids)
        if type(self).__module__.startswith("fasttfm.models.") and not is_watched(self):
            return self.encode_packed(*inputs, reads_first=reads_first, **layout)
        output = self(*inputs, **layout)
        for option in ("output_hidden_states", "output_attentions"):
            layout.pop(option, None)
        batch = PackedBatch.of(input_ids, attention_mask, **_split(layout)[0])
        states = (output.hidden_states, output.attentions, output.pooler_output)
        return Encoded(batch.pack(output.last_hidden_state), batch, *states)

    def encode_packed(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        reads_first: bool = False,
        **layout: Any,
    ) -> Encoded:
        """The packed states of the last layer, for this module's own forward. ``reads_first`` is that of ``encode``."""
        if not torch.compiler.is_compiling() and torch.jit.is_tracing():
            use = "torch.compile, torch.export or fasttfm.models.export_onnx"
            raise RuntimeError(f"{type(self).__name__}: torch.jit.trace would record one batch's sizes; use {use}")
        output_hidden_states, output_attentions = self.outputs(output_hidden_states, output_attentions)
        layout, others = _split(layout) if layout else ({}, {})
        for name in others:
            if name not in self.layer_inputs:
                raise TypeError(f"{type(self).__name__}: {name}: expected no such argument (it is not supported)")
        batch = PackedBatch.of(input_ids, attention_mask, **layout)
        ids = batch.pack(input_ids)
        x = self.embeddings(
            ids,
            batch.cu_seqlens,
            position_ids=self.positions(input_ids, ids, position_ids, batch),
            segment_ids=None if token_type_ids is None else batch.pack(token_type_ids.expand_as(input_ids)),
        )
        states: list[Tensor] | None = [] if output_hidden_states or output_attentions else None
        plain = type(self.encoder) is PackedTransformer and not is_watched(self.encoder)
        if reads_first and plain and states is None and not others:
            first = self.encoder.first_tokens(x, batch.cu_seqlens, batch.max_seqlen)
            if first is not None:
                return Encoded(first, batch, None, None, only_first=True)
        x = self.run_layers(x, batch, states, **others)
        attentions = self.attentions(states, batch, **others) if states is not None and output_attentions else None
        hidden = (*states, x) if states is not None and output_hidden_states else None
        return Encoded(x, batch, None if hidden is None else tuple(batch.unpack(state) for state in hidden), attentions)

    def run_layers(self, x: Tensor, batch: PackedBatch, hidden_states: list[Tensor] | None) -> Tensor:
        """The states of the last layer. Families whose layers need more inputs add arguments to this."""
        states: Tensor = self.encoder(x, batch.cu_seqlens, batch.max_seqlen, hidden_states=hidden_states)
        return states

    def positions(
        self, input_ids: Tensor, ids: Tensor, position_ids: Tensor | None, batch: PackedBatch
    ) -> Tensor | None:
        """The position of each packed token; None for its index in its sequence."""
        return batch.columns() if position_ids is None else batch.pack(position_ids.expand_as(input_ids))


def _split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of ``PackedBatch.of``, and those of ``run_layers``."""
    names = ("lengths", "cu_seqlens", "max_seqlen")
    layout = {name: value for name, value in arguments.items() if name in names}
    return layout, {name: value for name, value in arguments.items() if name not in names}


def text_model(owner: str, module: Any) -> TextModel:
    """The base model of a model with a head, whose parts the head runs without calling it."""
    if not isinstance(module, TextModel):
        expected = "a model without a head itself (compile or wrap the whole model, or layers of its encoder)"
        raise TypeError(f"{owner}: expected {expected}, got {type(module).__name__}")
    return module


def flatten_choices(
    owner: str, num_choices: int | None, input_ids: Tensor, *others: Tensor | None
) -> tuple[int, Tensor, list[Tensor | None]]:
    """The number of choices, and the arguments reshaped from [B, choices, S] to [B * choices, S]; packed ones are
    unchanged."""
    if input_ids.dim() != 3:
        if num_choices is None:
            got = f"shape {tuple(input_ids.shape)} without num_choices"
            raise ValueError(f"{owner}: input_ids: expected shape [B, choices, S], got {got}")
        return num_choices, input_ids, list(others)
    flat = [x.flatten(0, 1) if x is not None and x.dim() == 3 else x for x in others]
    return input_ids.shape[1], input_ids.flatten(0, 1), flat
