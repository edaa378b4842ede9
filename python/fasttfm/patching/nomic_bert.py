"""NomicBERT's modules: the model's forward runs its layers over packed tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.nomic_bert import modeling_nomic_bert as theirs
from transformers.utils import output_capturing

from fasttfm import ops
from fasttfm.nn import PackedBatch
from fasttfm.nn.plain import Tree, dropout_rate, is_plain, is_plain_dropout, is_plain_norm
from fasttfm.patching import heads, packing, parts
from fasttfm.patching.packed_model import PackedModel
from fasttfm.patching.rotary_stack import RotaryModules, RotaryStack, has_fixed_rotation
from fasttfm.patching.row_wise import are_row_wise


class NomicBertEmbeddings(parts.Patched, theirs.NomicBertEmbeddings):
    does = "embeddings: tokens, segments, LayerNorm and dropout in one pass"

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        word, segment, norm = self.word_embeddings, self.token_type_embeddings, self.LayerNorm
        plain = is_plain(word, segment) and is_plain_norm(norm) and is_plain_dropout(self.dropout)
        if input_ids is None or inputs_embeds is not None or not plain or segment.padding_idx is not None:
            return super().forward(input_ids, token_type_ids, position_ids, inputs_embeds)
        return ops.embedding(
            input_ids,
            word.weight,
            None,
            segment.weight,
            segment_ids=None if token_type_ids is None else token_type_ids.expand_as(input_ids),
            weight=norm.weight,
            bias=norm.bias,
            layer_norm=True,
            eps=norm.eps,
            p=dropout_rate(self.dropout),
            padding_idx=word.padding_idx,
            dtype=parts.autocast_type(word.weight),
        )


class NomicBertPredictionHeadTransform(parts.Patched, theirs.NomicBertPredictionHeadTransform):
    does = parts.HeadTransform.does

    def forward(self, hidden_states: Tensor) -> Tensor:
        return parts.masked_lm_transform(self.dense, self.transform_act_fn, self.layer_norm, hidden_states)


class NomicBertModel(PackedModel, theirs.NomicBertModel):
    def forward(  # type: ignore[override]  # the arguments of a model
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if token_type_ids is not None and tokens is not None:
            token_type_ids = token_type_ids.expand(tokens.shape[:2])
        inputs = {"input_ids": input_ids, "token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
        states = self.packed_states(attention_mask, position_ids, kwargs, **inputs)
        if states is None:
            arguments = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
            return super(packing.PackedLayers, self).forward(*arguments, **kwargs)
        pooled = None if self.pooler is None else self.pooler(states)
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)

    def embed(self, batch: PackedBatch, **inputs: Tensor | None) -> Tensor:
        if are_row_wise(self, self.embeddings):
            rows = {name: None if value is None else batch.pack(value) for name, value in inputs.items()}
            x: Tensor = self.embeddings(**rows)
        else:
            x = batch.pack(self.embeddings(**inputs))
        return x

    def layer_settings(self) -> Any:
        return self.rotary_emb, self.config.num_hidden_layers

    def has_known_parts(self) -> bool:
        return has_fixed_rotation(self.rotary_emb, theirs.NomicBertRotaryEmbedding)

    def make_layers(self, tree: Tree) -> RotaryStack:
        layers = self.layers[: self.config.num_hidden_layers]
        return RotaryStack(tree, self, [_modules_of(layer) for layer in layers], None)


def _modules_of(layer: Any) -> RotaryModules:
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    gated = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    norms = (layer.post_attention_layernorm, layer.post_mlp_layernorm)
    dropouts = (layer.post_attention_dropout, layer.post_mlp_dropout)
    return RotaryModules(layer, attention, mlp, (*linears, *gated), *norms, dropouts)


# transformers looks up a model's recorded outputs by its class.
output_capturing._CAN_RECORD_REGISTRY[str(NomicBertModel)] = theirs.NomicBertModel._can_record_outputs


class NomicBertForMaskedLM(heads.MaskedLMLoss, theirs.NomicBertForMaskedLM):
    forward = heads.loss_only(theirs.NomicBertForMaskedLM)

    def modules_before_loss(self) -> tuple[Any, ...]:
        return (self.cls,)

    def vocabulary_layer(self) -> Any:
        return self.cls.predictions.decoder

    def before_vocabulary(self, x: Tensor) -> Tensor:
        y: Tensor = self.cls.predictions.transform(x)
        return y

    def training_loss(self, outputs: Any, *labels: Tensor, **_: Any) -> Any:
        return super().training_loss(outputs, *labels)


MODEL = theirs.NomicBertPreTrainedModel
CLASSES = (
    NomicBertEmbeddings,
    NomicBertPredictionHeadTransform,
    NomicBertModel,
    NomicBertForMaskedLM,
)
LEFT = {"padding before or between tokens": "transformers' own code, with fasttfm's attention"}
