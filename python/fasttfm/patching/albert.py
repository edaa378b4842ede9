"""ALBERT's modules: the attention module contains its residual connection, and the layer the feed-forward block."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.albert import modeling_albert as theirs
from transformers.pytorch_utils import apply_chunking_to_forward

from fasttfm.nn.parts import linear_layer
from fasttfm.patching import heads, packing, parts
from fasttfm.patching.stack import LayerModules


class AlbertEmbeddings(parts.Embeddings, theirs.AlbertEmbeddings): ...


class AlbertAttention(parts.Patched, theirs.AlbertAttention):
    does = parts.SelfAttention.does

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        projections = (self.query, self.key, self.value)
        if not parts.fusable(attention_mask, kwargs) or not parts.is_plain_linear(*projections):
            return super().forward(hidden_states, attention_mask, **kwargs)
        options = {"causal": False, "scale": self.scaling, "p": parts.attention_rate(self, self.attention_dropout)}
        size = self.attention_head_size
        context = parts.self_attention(hidden_states, projections, size, attention_mask, options, kwargs)
        branch, bias = parts.product(self.dense, context)
        y = parts.residual_norm(self.LayerNorm, branch, hidden_states, bias=bias, dropout=self.output_dropout)
        return y, None


class AlbertLayer(parts.Patched, theirs.AlbertLayer):
    does = parts.Intermediate.does

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        x, _ = self.attention(hidden_states, attention_mask, **kwargs)
        branch = apply_chunking_to_forward(self.ff_chunk, self.chunk_size_feed_forward, self.seq_len_dim, x)
        bias = self.ffn_output.bias if parts.is_plain_linear(self.ffn_output) else None  # which ff_chunk does not add
        return parts.residual_norm(self.full_layer_layer_norm, branch, x, bias=bias)

    def ff_chunk(self, attention_output: Tensor) -> Tensor:
        hidden = parts.linear_activation(self.ffn, self.activation, attention_output)
        return parts.product(self.ffn_output, hidden)[0]


class AlbertTransformer(packing.PackedLayers, theirs.AlbertTransformer):
    def before_layers(self, x: Tensor) -> Tensor:
        y: Tensor = linear_layer(self.embedding_hidden_mapping_in, x)
        return y

    def layer_settings(self) -> tuple[int, int]:
        return self.config.num_hidden_layers, self.config.num_hidden_groups

    def layer_modules(self) -> list[LayerModules]:
        count, sets = self.layer_settings()
        groups = [int(index / (count / sets)) for index in range(count)]
        return [_modules_of(layer) for group in groups for layer in self.albert_layer_groups[group].albert_layers]


def _modules_of(layer: Any) -> LayerModules:
    attention = layer.attention
    return LayerModules(
        layer,
        attention,
        attention.attention_dropout,
        *(attention.query, attention.key, attention.value),
        *(attention.dense, attention.output_dropout, attention.LayerNorm),
        *(layer.ffn, layer.activation),
        *(layer.ffn_output, None, layer.full_layer_layer_norm),
    )


class AlbertMLMHead(parts.Patched, theirs.AlbertMLMHead):
    does = parts.HeadTransform.does

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.transform(hidden_states))
        return logits

    def transform(self, x: Tensor) -> Tensor:
        return parts.masked_lm_transform(self.dense, self.activation, self.LayerNorm, x)


class _Head(heads.MaskedLMLoss):
    def modules_before_loss(self: Any) -> tuple[Any, ...]:
        return (self.predictions,)

    def vocabulary_layer(self: Any) -> Any:
        return self.predictions.decoder

    def before_vocabulary(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.predictions.transform(x)
        return y


class AlbertForMaskedLM(_Head, theirs.AlbertForMaskedLM):
    forward = heads.loss_only(theirs.AlbertForMaskedLM)


class AlbertForPreTraining(_Head, heads.PreTrainingLoss, theirs.AlbertForPreTraining):
    loss_arguments = ("labels", "sentence_order_label")
    output_class = theirs.AlbertForPreTrainingOutput
    forward = heads.loss_only(theirs.AlbertForPreTraining)

    def pair_logits(self: Any, pooled: Tensor) -> Tensor:
        logits: Tensor = self.sop_classifier(pooled)
        return logits


MODEL = theirs.AlbertPreTrainedModel
CLASSES = (
    AlbertEmbeddings,
    AlbertAttention,
    AlbertLayer,
    AlbertTransformer,
    AlbertMLMHead,
    AlbertForMaskedLM,
    AlbertForPreTraining,
)
LEFT: dict[str, str] = {}
