"""MPNet's modules. The native kernels of ``ops.attention`` take no bias of the scores, such as MPNet's of relative
positions. So attention is torch's, and padding is not removed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.models.mpnet import modeling_mpnet as theirs

from fasttfm import ops
from fasttfm.patching import heads, parts, roberta


class MPNetEmbeddings(parts.Embeddings, theirs.MPNetEmbeddings):
    def default_positions(self, input_ids: Tensor, past_key_values_length: int = 0) -> Tensor:
        """Positions start at pad_token_id + 1."""
        positions: Tensor = theirs.create_position_ids_from_input_ids(input_ids, self.padding_idx)
        return positions


class MPNetSelfAttention(parts.Patched, theirs.MPNetSelfAttention):
    does = "attention: one product for q, k and v, then torch's attention with the bias of relative positions"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        projections = (self.q, self.k, self.v)
        plain = parts.is_plain_linear(*projections) and parts.is_plain_dropout(self.dropout)
        if output_attentions or not plain:
            return super().forward(hidden_states, attention_mask, position_bias, output_attentions, **kwargs)
        weights = tuple(each.weight for each in projections)
        biases = tuple(each.bias for each in projections)
        heads = weights[0].shape[0] // self.attention_head_size
        q, k, v = ops.qkv_projection(hidden_states, weights, biases, heads).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        given = [each for each in (position_bias, attention_mask) if each is not None]
        bias = sum(given[1:], given[0]).to(q.dtype) if given else None
        rate = parts.dropout_rate(self.dropout)
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=rate)
        return (self.o(context.transpose(1, 2).flatten(2)),)


class MPNetAttention(parts.Patched, theirs.MPNetAttention):
    does = "residual connections: dropout, addition and LayerNorm in one pass"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        options = {"output_attentions": output_attentions}
        branch, *weights = self.attn(hidden_states, attention_mask, position_bias, **options)
        return parts.residual_norm(self.LayerNorm, branch, hidden_states, dropout=self.dropout), *weights


class MPNetIntermediate(parts.Intermediate, theirs.MPNetIntermediate): ...


class MPNetOutput(parts.AddNorm, theirs.MPNetOutput): ...


class MPNetLMHead(roberta.LMHead, theirs.MPNetLMHead): ...


class MPNetForMaskedLM(roberta.ForMaskedLM, theirs.MPNetForMaskedLM):
    forward = heads.loss_only(theirs.MPNetForMaskedLM)


MODEL = theirs.MPNetPreTrainedModel
KEEPS_ATTENTION = True  # transformers' MPNet does not use the attention interface
CLASSES = (
    MPNetEmbeddings,
    MPNetSelfAttention,
    MPNetAttention,
    MPNetIntermediate,
    MPNetOutput,
    MPNetLMHead,
    MPNetForMaskedLM,
)
LEFT = {
    "attention": "torch's attention adds the bias of relative positions",
    "padding": "its rows are computed, as torch's attention with a bias needs them",
}
