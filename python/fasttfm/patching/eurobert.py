"""EuroBERT's modules: the model's forward runs its layers over packed tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.eurobert import modeling_eurobert as theirs
from transformers.utils import output_capturing

from fasttfm import ops
from fasttfm.nn import PackedBatch
from fasttfm.nn.plain import Tree, is_plain, register_plain_class
from fasttfm.patching import heads, packing, parts
from fasttfm.patching.packed_model import PackedModel
from fasttfm.patching.rotary_stack import RotaryModules, RotaryStack, has_fixed_rotation
from fasttfm.patching.row_wise import are_row_wise


class EuroBertRMSNorm(parts.Patched, theirs.EuroBertRMSNorm):
    does = "RMSNorm: one pass"

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


register_plain_class(EuroBertRMSNorm)


class EuroBertModel(PackedModel, theirs.EuroBertModel):
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
        ids, embedded = inputs["input_ids"], inputs["inputs_embeds"]
        x: Tensor
        if embedded is not None:
            return batch.pack(embedded)
        assert ids is not None
        if are_row_wise(self, self.embed_tokens):
            x = self.embed_tokens(batch.pack(ids))
        else:
            x = batch.pack(self.embed_tokens(ids))
        return x

    def layer_settings(self) -> Any:
        return self.norm, self.rotary_emb, self.config.num_hidden_layers

    def has_known_parts(self) -> bool:
        known = type(self.norm) is EuroBertRMSNorm and is_plain(self.norm)
        return known and has_fixed_rotation(self.rotary_emb, theirs.EuroBertRotaryEmbedding)

    def make_layers(self, tree: Tree) -> RotaryStack:
        layers = list(self.layers[: self.config.num_hidden_layers])
        norms = [*(layer.input_layernorm for layer in layers), self.norm]
        modules = [_modules_of(layer, norm) for layer, norm in zip(layers, norms[1:], strict=True)]
        return RotaryStack(tree, self, modules, norms[0])


def _modules_of(layer: Any, next_norm: Any) -> RotaryModules:
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    gated = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return RotaryModules(layer, attention, mlp, (*linears, *gated), layer.post_attention_layernorm, next_norm)


# transformers looks up a model's recorded outputs by its class.
output_capturing._CAN_RECORD_REGISTRY[str(EuroBertModel)] = theirs.EuroBertModel._can_record_outputs


class EuroBertForMaskedLM(heads.MaskedLMLoss, theirs.EuroBertForMaskedLM):
    forward = heads.loss_only(theirs.EuroBertForMaskedLM)

    def has_known_loss(self) -> bool:
        return super().has_known_loss() and self.loss_function is ForMaskedLMLoss

    def vocabulary_layer(self) -> Any:
        return self.lm_head

    def before_vocabulary(self, x: Tensor) -> Tensor:
        return x

    def training_loss(self, outputs: Any, *labels: Tensor, **kwargs: Any) -> Any:
        ignored = kwargs.get("ignore_index", heads.IGNORED)
        return super().training_loss(outputs, *labels, total=kwargs.get("num_items_in_batch"), ignored=ignored)


MODEL = theirs.EuroBertPreTrainedModel
CLASSES = (EuroBertRMSNorm, EuroBertModel, EuroBertForMaskedLM)
LEFT = {
    "embeddings": "they are a table of tokens only",
    "padding before or between tokens": "transformers' own code, with fasttfm's attention",
}
