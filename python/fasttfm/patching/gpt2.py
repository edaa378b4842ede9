"""GPT-2's modules: pre-LN, and linear layers that keep their weights transposed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions
from transformers.models.gpt2 import modeling_gpt2 as theirs

from fasttfm import ops
from fasttfm.nn.parts import linear_layer
from fasttfm.nn.residual import add_then_norm
from fasttfm.patching import heads, parts
from fasttfm.patching.attention import attend


class NoCache(theirs.DynamicCache):
    """Replaces the cache that GPT2Model would create, which training does not need and which would keep keys and values
    in memory.

    Without any cache GPT2Model looks for packed documents in the position ids, even if it has created them itself. That
    synchronizes with the GPU, and creates an explicit mask in a compiled graph."""


class GPT2Attention(parts.Patched, theirs.GPT2Attention):
    does = "attention: fused, on the product for q, k and v in place, without weights in memory"

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        past_key_values = None if isinstance(past_key_values, NoCache) else past_key_values
        growing = isinstance(past_key_values, theirs.DynamicCache)
        cached = past_key_values is not None and not growing
        if cached or encoder_hidden_states is not None or not parts.fusable(attention_mask, kwargs):
            return super().forward(
                hidden_states, past_key_values, attention_mask, encoder_hidden_states, *args, **kwargs
            )
        qkv = linear_layer(self.c_attn, hidden_states).unflatten(-1, (3, -1, self.head_dim))
        q, k, v = qkv, None, None
        if growing:
            q, k, v = qkv.unbind(2)
            k, v = past_key_values.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        options: dict[str, Any] = {
            "causal": self.is_causal,
            "scale": self.scaling,
            "p": parts.attention_rate(self, self.attn_dropout),
        }
        context = attend(q, k, v, mask=attention_mask, **options, **parts.packing(kwargs))
        return self.resid_dropout(linear_layer(self.c_proj, context.flatten(-2))), None


class GPT2MLP(parts.Patched, theirs.GPT2MLP):
    does = parts.Intermediate.does

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = parts.linear_activation(self.c_fc, self.act, hidden_states)
        y: Tensor = self.dropout(linear_layer(self.c_proj, hidden))
        return y


class GPT2Block(parts.Patched, theirs.GPT2Block):
    does = "residual connections: attention's addition and the following LayerNorm in one pass"

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if encoder_hidden_states is not None or not parts.is_plain_norm(self.ln_2):
            return super().forward(
                hidden_states, past_key_values, attention_mask, encoder_hidden_states, *args, **kwargs
            )
        kwargs.pop("encoder_attention_mask", None)
        caches = {"past_key_values": past_key_values, "attention_mask": attention_mask}
        branch, _ = self.attn(self.ln_1(hidden_states), **caches, **kwargs)
        if hidden_states.dtype not in (branch.dtype, torch.float32):
            branch = branch.to(hidden_states.dtype)
        y, stream = add_then_norm(self.ln_2, branch, hidden_states)
        return stream + self.mlp(y)


class GPT2LMHeadModel(heads.LossHead, theirs.GPT2LMHeadModel):
    does = "causal LM loss: logits a block at a time; in training, with labels, there are no logits and no cache"
    forward = heads.loss_only(theirs.GPT2LMHeadModel)

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        cached = given.get("use_cache") is not None or given.get("past_key_values") is not None
        if cached or not self.config.use_cache or self.transformer.gradient_checkpointing:
            return given
        return given | {"use_cache": False, "past_key_values": NoCache()}

    def has_known_loss(self) -> bool:
        return super().has_known_loss() and self.loss_function is ForCausalLMLoss

    def vocabulary_layer(self) -> Any:
        return self.lm_head

    def training_loss(self, outputs: Any, *labels: Tensor, **kwargs: Any) -> Any:
        total = kwargs.get("num_items_in_batch")
        ignored = kwargs.get("ignore_index", -100)
        states = outputs.last_hidden_state
        targets = labels[0].to(states.device)
        loss = ops.linear_cross_entropy(
            states, self.lm_head.weight, targets, self.lm_head.bias, shift=True, ignore_index=ignored, total=total
        )
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


MODEL = theirs.GPT2PreTrainedModel
CLASSES = (GPT2Attention, GPT2MLP, GPT2Block, GPT2LMHeadModel)
LEFT = {
    "embeddings": "GPT2Model adds them up in its own forward",
    "padding": "GPT2Model has its layers in its own forward; attention gets the lengths",
}
