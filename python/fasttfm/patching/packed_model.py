"""Models whose own forward runs their layers, over packed tokens: ModernBERT, EuroBERT and NomicBERT."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fasttfm import ops
from fasttfm.nn import PackedBatch
from fasttfm.nn.plain import Tree, is_watched
from fasttfm.ops.core.library import is_plain
from fasttfm.patching import packing
from fasttfm.patching.masks import layout_of
from fasttfm.patching.row_wise import are_row_wise
from fasttfm.patching.stack import ATTRIBUTE, collect_outputs


class PackedModel(packing.PackedLayers):
    """A model with ``layers``. Its ``forward`` has transformers' arguments, and returns ``packed_states``; if these are
    None, it calls transformers'."""

    def has_known_parts(self) -> bool:
        """Whether the modules next to the layers that ``make_layers`` reads need not be called."""
        raise NotImplementedError

    def make_layers(self, tree: Tree) -> Any:
        """The layers with ``fusable``, ``is_of(model)`` and ``run(x, batch, positions)``, which may return None."""
        raise NotImplementedError

    def embed(self, batch: PackedBatch, **inputs: Tensor | None) -> Tensor:
        """The input [T, C] of the first layer, of ``input_ids`` or ``inputs_embeds``, and of ``token_type_ids``."""
        raise NotImplementedError

    def packed_states(
        self: Any, mask: Any, positions: Tensor | None, kwargs: dict[str, Any], **inputs: Tensor | None
    ) -> Tensor | None:
        """The last hidden states [B, S, C]; None if the layers have to be called."""
        embedded = inputs["inputs_embeds"]
        tokens = embedded if inputs["input_ids"] is None else inputs["input_ids"]
        layers = None if self._is_special(tokens, mask, embedded, kwargs) else self._layers()
        if layers is None or tokens is None:
            return None
        batch = packing.flattened(tokens, kwargs) or layout_of(mask, tokens[..., None])
        if batch.indices is not None:  # the first column may be padding, and windows count padding between tokens
            return None
        columns = None if positions is None else batch.pack(positions.expand(tokens.shape[:2]))
        states = layers.run(self.embed(batch, **inputs), batch, columns)
        if states is None and mask is not None:
            states = self._call_layers(batch, columns, inputs)
        return None if states is None else batch.unpack(states)

    def _call_layers(
        self: Any, batch: PackedBatch, columns: Tensor | None, inputs: dict[str, Tensor | None]
    ) -> Tensor | None:
        """The last hidden states [T, C] of layers that are called with a batch of one row with all tokens; None if
        another module would get such a batch that may not compute row by row."""
        others = [module for module in self.children() if module not in (self.layers, self.rotary_emb)]
        if getattr(self, "pooler", None) is not None or not are_row_wise(self, *others):
            return None
        if columns is None:
            columns = ops.position_ids_from_cu_seqlens(batch.cu_seqlens, total=batch.tokens)
        rows = {name: batch.pack(value)[None] for name, value in inputs.items() if value is not None}
        boundaries = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
        bounds = {"max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
        forward = super(packing.PackedLayers, self).forward  # type: ignore[misc]  # transformers'
        states: Tensor = forward(position_ids=columns[None], **rows, **boundaries, **bounds).last_hidden_state[0]
        return states

    def _is_special(self: Any, tokens: Any, mask: Any, embedded: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call needs more than the last hidden states of tokens, or is traced or transformed."""
        if tokens is None or not is_plain((tokens,)):
            return True
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            return True
        outputs = ("output_hidden_states", "output_attentions")
        whole = self.config.return_dict if kwargs.get("return_dict") is None else kwargs["return_dict"]
        asked = any(getattr(self.config, name, False) for name in outputs) or not whole
        asked = asked or (self.keeps_padding and mask is not None)
        like = tokens if embedded is not None else tokens[..., None]
        return asked or packing.is_special(like, mask, (), kwargs)

    def _layers(self: Any) -> Any:
        """The layers, if they and the modules next to them need not be called."""
        if is_watched(self.layers) or not self.has_known_parts():
            return None
        layers = self.__dict__.get(ATTRIBUTE)
        try:
            if layers is None or not layers.is_of(self):
                tree = Tree(self.layers, collect_outputs)
                if not tree.is_unchanged():  # something watches a module
                    return None
                layers = self.__dict__[ATTRIBUTE] = self.make_layers(tree)
        except (AttributeError, KeyError):  # a module that has replaced a layer has other parts
            return None
        return layers if layers.fusable else None
