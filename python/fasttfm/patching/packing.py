"""Encoders over packed tokens: padding is removed before the first layer and restored, as zeros, after the last."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions

from fasttfm.nn import PackedBatch
from fasttfm.ops.core.library import is_plain
from fasttfm.patching.attention import captured
from fasttfm.patching.masks import layout_of
from fasttfm.patching.parts import PACKING, Patched
from fasttfm.patching.stack import LayerModules, stack_of


class PackedLayers(Patched):
    """A stack of layers whose forward takes ``hidden_states`` and ``attention_mask``.

    If all its modules are plain, the layers run as one stack, and none of them is called (stack.py). Otherwise, if all
    of them compute row by row (row_wise.py), they are called with a batch of one row with all tokens, [1, T, C], and
    attention gets the sequence boundaries by transformers' arguments. Padding is not removed if there is another module
    inside, or something watches one, if it precedes or separates tokens, if the hidden states of each layer are
    requested, if a graph is compiled (its shapes would depend on the mask's values), or if a mask is more than padding.
    """

    does = "layers: one call for all of them, without padding, whose rows are 0 after them"
    keeps_padding = False  # whether rows of padding are computed
    output_class: type = BaseModelOutput

    def layer_modules(self) -> list[LayerModules]:
        """The layers in order."""
        raise NotImplementedError

    def layer_settings(self) -> Any:
        """What ``layer_modules`` reads, apart from the tree of modules."""
        return None

    def before_layers(self, x: Tensor) -> Tensor:
        """The inputs of the first layer."""
        return x

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        forward = super().forward  # type: ignore[misc]
        if is_special(hidden_states, attention_mask, args, kwargs) or (
            self.keeps_padding and attention_mask is not None
        ):
            return forward(hidden_states, attention_mask, *args, **kwargs)
        batch = flattened(hidden_states, kwargs) or layout_of(attention_mask, hidden_states)
        if batch.indices is not None:  # the first column may be padding, whose states poolers and classifiers read
            return forward(hidden_states, attention_mask, *args, **kwargs)
        stack = stack_of(self)
        if stack is not None and stack.fusable:
            y = stack.run(self.before_layers(batch.pack(hidden_states)), batch.cu_seqlens, batch.max_seqlen)
            if y is not None:
                return self.output_class(last_hidden_state=batch.unpack(y))
        if attention_mask is None or stack is None or not stack.is_row_wise():
            return forward(hidden_states, attention_mask, *args, **kwargs)
        return _called(forward, hidden_states, batch, kwargs)


class BertLayers(PackedLayers):
    """Layers whose modules have BERT's names."""

    output_class = BaseModelOutputWithPastAndCrossAttentions

    def layer_modules(self: Any) -> list[LayerModules]:
        return [_of_bert(layer) for layer in self.layer]


def _of_bert(layer: Any) -> LayerModules:
    attention, after, output = layer.attention.self, layer.attention.output, layer.output
    return LayerModules(
        layer,
        attention,
        attention.dropout,
        *(attention.query, attention.key, attention.value),
        *(after.dense, after.dropout, after.LayerNorm),
        *(layer.intermediate.dense, layer.intermediate.intermediate_act_fn),
        *(output.dense, output.dropout, output.LayerNorm),
    )


def _called(forward: Any, x: Tensor, batch: PackedBatch, kwargs: dict[str, Any]) -> Any:
    """Calls the layers one by one, with packed tokens."""
    boundaries = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
    bounds = {"max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
    output = forward(batch.pack(x)[None], None, **kwargs, **boundaries, **bounds)
    output.last_hidden_state = batch.unpack(output.last_hidden_state[0])
    return output


def flattened(x: Tensor, kwargs: dict[str, Any]) -> PackedBatch | None:
    """The layout of a batch of one row in which the caller has packed several sequences."""
    boundaries = kwargs.get("cu_seq_lens_q")
    if boundaries is None:
        return None
    tokens = x.shape[1]
    longest = kwargs.get("max_length_q")
    return PackedBatch(boundaries.int(), tokens if longest is None else int(longest), tokens, (1, tokens))


# Arguments that do not change what an encoder's layers compute, or only give the boundaries of packed sequences.
_HARMLESS = frozenset(
    ("position_ids", "num_items_in_batch", "return_dict", "encoder_attention_mask", "seq_idx", *PACKING)
)


def is_special(x: Tensor, mask: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call needs more than the last hidden states of tokens, or is traced or transformed."""
    if not is_plain((x,)) or (mask is not None and (mask.dim() == 4 or mask.shape[0] != x.shape[0])):
        return True
    if kwargs.get("cu_seq_lens_q") is not None and (mask is not None or x.shape[0] != 1):
        return True
    asked = any(value is not None and value is not False and name not in _HARMLESS for name, value in kwargs.items())
    return asked or any(each is not None for each in args) or captured("hidden_states") or captured("attentions")
