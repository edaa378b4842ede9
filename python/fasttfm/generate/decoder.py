"""``CachedDecoder``: a causal model that reads its prompts once, then one token of each sequence at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.models.text_model import TextModel
from fasttfm.nn import PackedBatch, PackedLayer
from fasttfm.nn.parts import layer_norm, linear_activation, packed_residual_norm, product
from fasttfm.nn.plain import is_watched

Attend = Callable[[int, PackedLayer, Tensor], Tensor]  # of a layer's number, the layer and qkv [n, 3, H, D]


class CachedDecoder:
    """Keys and values of all tokens so far, for every layer, and the model that adds to them.

    Sequences may differ in length: each has its own count of tokens, which are at the front of its rows.
    """

    def __init__(self, model: TextModel, room: int) -> None:
        """``room`` is for the tokens of the longest sequence, at the end."""
        self.model = model
        self.layers = model.encoder.in_order()
        _check_calls(model)
        self.room = room
        self.keys: list[Tensor] = []  # of each layer, [B, room, H, D]
        self.values: list[Tensor] = []
        self.lengths = torch.empty(0, dtype=torch.int32)  # [B]: tokens of each sequence

    def read(self, ids: Tensor, batch: PackedBatch) -> Tensor:
        """Begins with the packed prompts ``ids`` [T]. Returns the state [B, C] of each one's last token."""
        cu_seqlens = batch.cu_seqlens
        sequences = cu_seqlens.shape[0] - 1
        self.lengths = cu_seqlens.diff()
        numbers = ops.position_ids_from_cu_seqlens(cu_seqlens, total=batch.tokens)
        owners = torch.searchsorted(cu_seqlens[1:], torch.arange(batch.tokens, device=ids.device), right=True)
        places = owners * self.room + numbers

        def attend(index: int, layer: PackedLayer, qkv: Tensor) -> Tensor:
            shape = (sequences, self.room, *qkv.shape[2:])
            self.keys.append(qkv.new_zeros(shape))
            self.values.append(qkv.new_zeros(shape))
            self._store(index, places, qkv)
            out = ops.attention(qkv, window=layer.window, cu_seqlens=cu_seqlens, max_seqlen=batch.max_seqlen)
            assert isinstance(out, Tensor)
            return out

        x = self._run(self.model.embeddings(ids, cu_seqlens), attend)
        return x.index_select(0, cu_seqlens[1:] - 1)

    def step(self, ids: Tensor) -> Tensor:
        """Goes on with one token ``ids`` [B] of each sequence. Returns its state [B, C]. Waits for no GPU."""
        positions = self.lengths.long()
        places = torch.arange(len(ids), device=ids.device) * self.room + positions
        self.lengths = self.lengths + 1

        def attend(index: int, layer: PackedLayer, qkv: Tensor) -> Tensor:
            self._store(index, places, qkv)
            keys, values = self.keys[index], self.values[index]
            out = ops.attention(qkv[:, :1], keys, values, window=layer.window, lengths_k=self.lengths)
            assert isinstance(out, Tensor)
            return out

        return self._run(self.model.embeddings(ids, position_ids=positions), attend)

    def _store(self, index: int, places: Tensor, qkv: Tensor) -> None:
        _, k, v = qkv.unbind(1)
        self.keys[index].flatten(0, 1).index_copy_(0, places, k)
        self.values[index].flatten(0, 1).index_copy_(0, places, v)

    def _run(self, x: Tensor, attend: Attend) -> Tensor:
        """The layers over rows ``x`` [n, C], as ``nn.PackedTransformer`` runs them."""
        final_norm = self.model.encoder.final_norm
        if final_norm is None:
            for index, layer in enumerate(self.layers):
                branch, bias = self._attention(index, x, attend)
                x, _ = packed_residual_norm(layer.norm1, branch, x, linear_bias=bias)
                branch, bias = _feed_forward(layer, x)
                x, _ = packed_residual_norm(layer.norm2, branch, x, linear_bias=bias)
            return x
        stream = x
        following = [layer.norm1 for layer in self.layers[1:]] + [final_norm]
        x = layer_norm(self.layers[0].norm1, stream)
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            branch, bias = self._attention(index, x, attend)
            x, stream = packed_residual_norm(layer.norm2, branch, stream, linear_bias=bias)
            branch, bias = _feed_forward(layer, x)
            x, stream = packed_residual_norm(next_norm, branch, stream, linear_bias=bias)
        return x

    def _attention(self, index: int, x: Tensor, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """The block's output and its last bias, which the residual addition adds."""
        layer = self.layers[index]
        return product(layer.out, attend(index, layer, layer.project(x)).reshape(x.shape))


def _feed_forward(layer: PackedLayer, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same of the feed-forward block."""
    return product(layer.down, linear_activation(layer.up, layer.activation, x))


def _check_calls(model: TextModel) -> None:
    """Decoding runs the parts of layers: what waits for a call of a layer, or of what holds the layers, is refused."""
    for module in (model, model.encoder, *model.encoder.layers):
        if is_watched(module) or not type(module).__module__.startswith("fasttfm."):
            expected = "a model, an encoder and layers without hooks, wrappers or subclasses (their parts are called)"
            raise ValueError(f"generate: model: expected {expected}, got such a {type(module).__name__}")
