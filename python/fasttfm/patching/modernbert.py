"""ModernBERT's modules: the model's forward runs its layers over packed tokens, as ``fasttfm.nn.RotaryTransformer``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
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
from fasttfm.nn.rotary_layer import RotaryLayer, RotaryTransformer
from fasttfm.ops.library import is_plain as is_plain_tensor
from fasttfm.patching import heads, packing, parts
from fasttfm.patching.masks import layout_of
from fasttfm.patching.stack import ATTRIBUTE, KNOWN, collect_outputs


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


class _Layers(Uncopied):
    """transformers' layers converted to ``RotaryLayer``s with the same modules, for as long as these are unchanged."""

    def __init__(self, tree: Tree, model: Any) -> None:
        self.tree, self._others = tree, _others(model)
        self.layers = list(model.layers)
        self.ours = [_layer_of(layer, model.config) for layer in self.layers]
        self.stack = RotaryTransformer(self.ours, model.final_norm, model.config.max_position_embeddings)
        # The tables of a rotation that depends on the sequence's length would change, too.
        default = all(kind == "default" for kind in model.rotary_emb.rope_type.values())
        linears = [each for layer in self.ours for each in (layer.qkv, layer.out, layer.up, layer.down)]
        norms = [each for layer in self.ours for each in (layer.norm1, layer.norm2) if each is not None]
        dropouts = [each for layer in self.layers for each in (layer.attn.out_drop, layer.mlp.drop)]
        containers = [each for each in model.layers.modules() if next(each.children(), None) is not None]
        known = all(type(each).__module__.startswith(KNOWN) for each in containers)
        plain = is_plain_linear(*linears) and is_plain_norm(*norms) and is_plain_dropout(*dropouts)
        self.fusable = default and known and plain

    def is_of(self, model: Any) -> bool:
        """Whether this was made of what the model has now."""
        return self.tree.root is model.layers and self._others == _others(model) and self.tree.is_unchanged()

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


def _others(model: Any) -> tuple[Any, ...]:
    """What the result depends on, apart from the layers."""
    return model.final_norm, model.rotary_emb, model.config.sliding_window


def _layer_of(layer: Any, config: Any) -> RotaryLayer:
    """A ``RotaryLayer`` with the modules of a transformers layer."""
    attention, mlp, kind = layer.attn, layer.mlp, layer.attention_type
    activation = activation_name(mlp.act)
    if activation is None:
        raise AttributeError(f"no activation of ops: {type(mlp.act).__name__}")
    side = config.sliding_window if kind == "sliding_attention" else None
    with torch.device("meta"):
        ours = RotaryLayer(
            config.hidden_size,
            config.num_attention_heads,
            config.intermediate_size,
            theta=config.rope_parameters[kind]["rope_theta"],
            window=None if side is None else (side, side),
            activation=activation,
        )
    first = type(layer.attn_norm) is nn.Identity
    ours.norm1, ours.norm2 = None if first else layer.attn_norm, layer.mlp_norm  # type: ignore[assignment]
    ours.qkv, ours.out, ours.up, ours.down = attention.Wqkv, attention.Wo, mlp.Wi, mlp.Wo
    return ours


class ModernBertModel(packing.PackedLayers, theirs.ModernBertModel):
    def forward(  # type: ignore[override]  # the arguments of a model
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        given = inputs_embeds if input_ids is None else input_ids
        layers = None if self._is_special(given, attention_mask, inputs_embeds, kwargs) else self._layers()
        if layers is not None:
            assert given is not None
            batch = packing.flattened(given, kwargs) or layout_of(attention_mask, given[..., None])
            if batch.indices is None:  # in transformers, windows count padding between tokens
                positions = None if position_ids is None else batch.pack(position_ids.expand(given.shape[:2]))
                packed = {"input_ids" if inputs_embeds is None else "inputs_embeds": batch.pack(given)}
                y = layers.run(self.embeddings(**packed), batch, positions)
                return BaseModelOutput(last_hidden_state=batch.unpack(y))
        return super(packing.PackedLayers, self).forward(
            input_ids, attention_mask, position_ids, inputs_embeds, **kwargs
        )

    def _is_special(self, given: Any, mask: Any, embeddings: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call needs more than the last hidden states of tokens, or is traced or transformed."""
        if given is None or not is_plain_tensor((given,)) or not isinstance(mask, (Tensor, type(None))):
            return True
        outputs = ("output_hidden_states", "output_attentions")
        asked = any(getattr(self.config, name, False) for name in outputs) or kwargs.get("return_dict") is False
        asked = asked or (self.keeps_padding and mask is not None)
        like = given if embeddings is not None else given[..., None]
        return asked or packing.is_special(like, mask, (), kwargs)

    def _layers(self) -> _Layers | None:
        """The layers, if they, the final norm and the rotary module need not be called."""
        if is_watched(self.rotary_emb) or is_watched(self.layers) or not is_plain_norm(self.final_norm):
            return None
        found: _Layers | None = self.__dict__.get(ATTRIBUTE)
        if found is None or not found.is_of(self):
            tree = Tree(self.layers, collect_outputs)
            if not tree.is_unchanged():  # something watches a module
                return None
            try:
                found = _Layers(tree, self)
            except AttributeError:  # a module that has replaced a layer has other parts
                return None
            self.__dict__[ATTRIBUTE] = found
        return found if found.fusable else None


# transformers looks up a model's recorded outputs by its class.
output_capturing._CAN_RECORD_REGISTRY[str(ModernBertModel)] = theirs.ModernBertModel._can_record_outputs


class ModernBertForMaskedLM(heads.MaskedLMLoss, theirs.ModernBertForMaskedLM):
    forward = heads.loss_only(theirs.ModernBertForMaskedLM)

    def passed_by(self) -> tuple[Any, ...]:
        return ()

    def vocabulary_layer(self) -> Any:
        return self.decoder

    def before_vocabulary(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y

    def training_loss(self, outputs: Any, *labels: Tensor, **kwargs: Any) -> Any:
        return super().training_loss(outputs, *labels, total=kwargs.get("num_items_in_batch"))


MODEL = theirs.ModernBertPreTrainedModel
CLASSES = (
    ModernBertEmbeddings,
    ModernBertMLP,
    ModernBertPredictionHead,
    ModernBertModel,
    ModernBertForMaskedLM,
)
LEFT = {"padding between tokens": "transformers' own code, with windows that count it"}
