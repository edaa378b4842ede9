"""DistilBERT's modules: the block contains the residual connections."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.distilbert import modeling_distilbert as theirs

from fasttfm.nn.parts import linear_layer
from fasttfm.nn.plain import is_watched
from fasttfm.patching import heads, packing, parts
from fasttfm.patching.stack import LayerModules


class Embeddings(parts.Embeddings, theirs.Embeddings):
    def forward(  # type: ignore[override]  # arguments in an order of its own
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        return super().forward(input_ids, None, position_ids, inputs_embeds)


class DistilBertSelfAttention(parts.Patched, theirs.DistilBertSelfAttention):
    does = parts.SelfAttention.does

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        projections = (self.q_lin, self.k_lin, self.v_lin)
        if not parts.fusable(attention_mask, kwargs) or not parts.is_plain_linear(*projections):
            return super().forward(hidden_states, attention_mask, **kwargs)
        options = {"causal": False, "scale": self.scaling, "p": parts.attention_rate(self, self.dropout)}
        size = self.attention_head_size
        context = parts.self_attention(hidden_states, projections, size, attention_mask, options, kwargs)
        return linear_layer(self.out_lin, context), None


class FFN(parts.Patched, theirs.FFN):
    does = parts.Intermediate.does

    def ff_chunk(self, input: Tensor) -> Tensor:
        hidden = parts.linear_activation(self.lin1, self.activation, input)
        y: Tensor = self.dropout(linear_layer(self.lin2, hidden))
        return y


class TransformerBlock(parts.Patched, theirs.TransformerBlock):
    does = "residual connections: addition and LayerNorm in one pass"

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        branch, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
        x = parts.residual_norm(self.sa_layer_norm, branch, hidden_states)
        return parts.residual_norm(self.output_layer_norm, self.ffn(x), x)


class Transformer(packing.PackedLayers, theirs.Transformer):
    def layer_modules(self) -> list[LayerModules]:
        return [_modules_of(layer) for layer in self.layer]


def _modules_of(layer: Any) -> LayerModules:
    attention, mlp = layer.attention, layer.ffn
    return LayerModules(
        layer,
        attention,
        attention.dropout,
        *(attention.q_lin, attention.k_lin, attention.v_lin),
        *(attention.out_lin, None, layer.sa_layer_norm),
        *(mlp.lin1, mlp.activation),
        *(mlp.lin2, mlp.dropout, layer.output_layer_norm),
    )


class DistilBertForMaskedLM(heads.MaskedLMLoss, theirs.DistilBertForMaskedLM):
    forward = heads.loss_only(theirs.DistilBertForMaskedLM)

    def modules_before_loss(self) -> tuple[Any, ...]:
        return self.vocab_transform, self.activation, self.vocab_layer_norm, self.vocab_projector

    def has_known_loss(self) -> bool:
        loss = self.mlm_loss_fct
        if type(loss) is not nn.CrossEntropyLoss or is_watched(loss) or loss.weight is not None:
            return False
        return loss.reduction == "mean" and loss.label_smoothing == 0

    def training_loss(self, outputs: Any, *labels: Tensor, **_: Any) -> Any:
        return super().training_loss(outputs, *labels, ignored=self.mlm_loss_fct.ignore_index)

    def vocabulary_layer(self) -> Any:
        return self.vocab_projector

    def before_vocabulary(self, x: Tensor) -> Tensor:
        return parts.masked_lm_transform(self.vocab_transform, self.activation, self.vocab_layer_norm, x)


MODEL = theirs.DistilBertPreTrainedModel
CLASSES = (
    Embeddings,
    DistilBertSelfAttention,
    FFN,
    TransformerBlock,
    Transformer,
    DistilBertForMaskedLM,
)
LEFT: dict[str, str] = {}
