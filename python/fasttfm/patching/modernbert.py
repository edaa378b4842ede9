"""ModernBERT's modules: the model's forward runs its layers over packed tokens, as ``fasttfm.nn.RotaryTransformer``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.modernbert import modeling_modernbert as theirs
from transformers.utils import output_capturing

from fasttfm import ops
from fasttfm.nn import PackedBatch
from fasttfm.nn.parts import linear_layer, product
from fasttfm.nn.plain import (
    Tree,
    Uncopied,
    activation_name,
    dropout_rate,
    is_plain,
    is_plain_dropout,
    is_plain_linear,
    is_plain_norm,
    is_watched,
)
from fasttfm.nn.rotary_layer import RotaryLayer, RotaryTransformer, Tables
from fasttfm.patching import heads, packing, parts
from fasttfm.patching.packed_model import PackedModel
from fasttfm.patching.row_wise import are_row_wise, is_known


class ModernBertEmbeddings(parts.Patched, theirs.ModernBertEmbeddings):
    does = "embeddings: tokens, LayerNorm and dropout in one pass"

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        word, norm = self.tok_embeddings, self.norm
        plain = is_plain(word) and is_plain_norm(norm) and is_plain_dropout(self.drop)
        if input_ids is None or inputs_embeds is not None or not plain:
            return super().forward(input_ids, inputs_embeds)
        return ops.embedding(
            input_ids,
            word.weight,
            weight=norm.weight,
            bias=norm.bias,
            layer_norm=True,
            eps=norm.eps,
            p=dropout_rate(self.drop),
            padding_idx=word.padding_idx,
            dtype=parts.autocast_type(word.weight),
        )


class ModernBertMLP(parts.Patched, theirs.ModernBertMLP):
    does = "MLP: bias, activation and gate in one pass"

    def forward(self, hidden_states: Tensor) -> Tensor:
        activation = activation_name(self.act)
        if activation is None:
            return super().forward(hidden_states)
        hidden, bias = product(self.Wi, hidden_states)
        return linear_layer(self.Wo, self.drop(ops.gated_activation(hidden, bias, activation=activation)))


class ModernBertPredictionHead(parts.Patched, theirs.ModernBertPredictionHead):
    does = parts.HeadTransform.does

    def forward(self, hidden_states: Tensor) -> Tensor:
        return parts.masked_lm_transform(self.dense, self.act, self.norm, hidden_states)


# ---- layers ----------------------------------------------------------------------------------------------------------


class _Layer(RotaryLayer):
    """A ``RotaryLayer`` with the modules of a transformers layer."""

    attention_type: str

    def table_key(self) -> str:
        return self.attention_type


class _Stack(RotaryTransformer):
    """Takes the rotation from transformers' module, at each call: buffers may be changed without a trace."""

    rotary: Any

    def tables(self, x: Tensor, max_seqlen: int) -> Tables:
        return self.make_tables(x, torch.arange(max_seqlen, device=x.device), max_seqlen)

    @torch.no_grad()
    def make_tables(self, x: Tensor, positions: Tensor, longest: int | Tensor) -> Tables:
        """As ``ModernBertRotaryEmbedding.forward``, whose two halves of columns are equal, but in fp32."""
        tables, numbers = {}, positions.float()[:, None]
        for kind in dict.fromkeys(layer.attention_type for layer in self.layers):
            angles = numbers * getattr(self.rotary, f"{kind}_inv_freq").to(device=x.device, dtype=torch.float)
            scale = getattr(self.rotary, f"{kind}_attention_scaling")
            table = angles.cos(), angles.sin()
            cos, sin = table if scale == 1 else (each * scale for each in table)
            tables[kind] = (cos.double(), sin.double()) if x.dtype == torch.float64 else (cos, sin)
        return tables


class _Layers(Uncopied):
    """transformers' layers converted to ``RotaryLayer``s with the same modules, for as long as these are unchanged."""

    def __init__(self, tree: Tree, model: Any) -> None:
        self.tree, self.layers = tree, list(model.layers)
        self._settings = self._settings_of(model)
        flash = "flash" in model.config._attn_implementation
        self.ours = [_layer_of(layer, None if flash else model.config.sliding_window) for layer in self.layers]
        self.stack = _Stack(self.ours, model.final_norm, 1)
        self.stack.rotary = model.rotary_emb
        linears = [each for layer in self.ours for each in (layer.qkv, layer.out, layer.up, layer.down)]
        norms = [each for layer in self.ours for each in (layer.norm1, layer.norm2) if each is not None]
        dropouts = [each for layer in self.layers for each in (layer.attn.out_drop, layer.mlp.drop)]
        known = all(is_known(model, each) for each in model.layers.modules())
        plain = is_plain_linear(*linears) and is_plain_norm(*norms) and is_plain_dropout(*dropouts)
        self.fusable = known and plain and not any(layer.attn.is_causal for layer in self.layers)

    def _settings_of(self, model: Any) -> tuple[Any, ...]:
        """What this is made of, apart from the tree of layers."""
        config, layers = model.config, [layer.__dict__ for layer in self.layers]
        parts = [(each["_modules"]["attn"].__dict__, each["_modules"]["mlp"]) for each in layers]
        return (
            *(model.final_norm, model.rotary_emb, config.sliding_window, config._attn_implementation),
            [layer["attention_type"] for layer in layers],
            [(attention["head_dim"], attention["sliding_window"], attention["is_causal"]) for attention, _ in parts],
            [getattr(mlp.act, "approximate", None) for _, mlp in parts],
        )

    def is_of(self, model: Any) -> bool:
        """Whether this was made of what the model has now."""
        same = self.tree.root is model.layers and self.tree.is_unchanged()
        return same and self._settings == self._settings_of(model)

    def run(self, x: Tensor, batch: PackedBatch, positions: Tensor | None) -> Tensor:
        """The final LayerNorm's output for packed ``x`` [T, C]."""
        for ours, layer in zip(self.ours, self.layers, strict=True):
            attention, mlp = layer.attn, layer.mlp
            ours.attention_dropout = attention.attention_dropout if attention.training else 0.0
            ours.dropout, ours.intermediate_dropout = dropout_rate(attention.out_drop), dropout_rate(mlp.drop)
            ours.training = True  # the dropout probabilities are already 0 in evaluation
        checkpointed = [layer.training and getattr(layer, "gradient_checkpointing", False) for layer in self.layers]
        self.stack.checkpointing, self.stack.training = any(checkpointed), True
        y: Tensor = self.stack(x, batch.cu_seqlens, batch.max_seqlen, positions=positions)
        return y


def _layer_of(layer: Any, window: int | None) -> _Layer:
    """A ``RotaryLayer`` with the modules of a transformers layer. Its window is that of the mask, ``window``; None for
    the argument of attention, which FlashAttention gets instead."""
    attention, mlp = layer.attn, layer.mlp
    activation = activation_name(mlp.act)
    if activation is None:
        raise AttributeError(f"no activation of ops: {type(mlp.act).__name__}")
    if layer.attention_type != "sliding_attention":
        side = None
    else:
        side = attention.sliding_window - 1 if window is None else window
    width = attention.Wqkv.in_features
    with torch.device("meta"):
        ours = _Layer(
            width,
            width // attention.head_dim,
            mlp.Wo.in_features,
            window=None if side is None else (side, side),
            activation=activation,
        )
    first = type(layer.attn_norm) is nn.Identity
    ours.norm1, ours.norm2 = None if first else layer.attn_norm, layer.mlp_norm  # type: ignore[assignment]
    ours.qkv, ours.out, ours.up, ours.down = attention.Wqkv, attention.Wo, mlp.Wi, mlp.Wo
    ours.attention_type = layer.attention_type
    return ours


class ModernBertModel(PackedModel, theirs.ModernBertModel):
    def forward(  # type: ignore[override]  # the arguments of a model
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        states = self.packed_states(attention_mask, position_ids, kwargs, **inputs)
        if states is None:
            arguments = (input_ids, attention_mask, position_ids, inputs_embeds)
            return super(packing.PackedLayers, self).forward(*arguments, **kwargs)
        return BaseModelOutput(last_hidden_state=states)

    def embed(self, batch: PackedBatch, **inputs: Tensor | None) -> Tensor:
        name = "input_ids" if inputs["inputs_embeds"] is None else "inputs_embeds"
        tokens = inputs[name]
        assert tokens is not None
        x: Tensor
        if are_row_wise(self, self.embeddings):
            x = self.embeddings(**{name: batch.pack(tokens)})
        else:
            x = batch.pack(self.embeddings(**{name: tokens}))
        return x

    def has_known_parts(self) -> bool:
        """Also whether the rotary module's buffers do not depend on the sequence's length."""
        rotary = self.rotary_emb
        known = type(rotary) is theirs.ModernBertRotaryEmbedding and not is_watched(rotary)
        return known and all(kind == "default" for kind in rotary.rope_type.values()) and is_plain_norm(self.final_norm)

    def make_layers(self, tree: Tree) -> _Layers:
        return _Layers(tree, self)


# transformers looks up a model's recorded outputs by its class.
output_capturing._CAN_RECORD_REGISTRY[str(ModernBertModel)] = theirs.ModernBertModel._can_record_outputs


class ModernBertForMaskedLM(heads.MaskedLMLoss, theirs.ModernBertForMaskedLM):
    forward = heads.loss_only(theirs.ModernBertForMaskedLM)

    def modules_before_loss(self) -> tuple[Any, ...]:
        return self.head, self.decoder

    def has_known_loss(self) -> bool:
        return super().has_known_loss() and self.loss_function is ForMaskedLMLoss

    def vocabulary_layer(self) -> Any:
        return self.decoder

    def before_vocabulary(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y

    def training_loss(self, outputs: Any, *labels: Tensor, **kwargs: Any) -> Any:
        ignored, targets = kwargs.get("ignore_index", heads.IGNORED), labels[0]
        if self.sparse_prediction:  # leaves out another label, before the loss does
            targets = targets.masked_fill(targets == self.sparse_pred_ignore_index, ignored)
        return super().training_loss(outputs, targets, total=kwargs.get("num_items_in_batch"), ignored=ignored)


MODEL = theirs.ModernBertPreTrainedModel
CLASSES = (
    ModernBertEmbeddings,
    ModernBertMLP,
    ModernBertPredictionHead,
    ModernBertModel,
    ModernBertForMaskedLM,
)
LEFT = {"padding between tokens": "transformers' own code, with windows that count it"}
