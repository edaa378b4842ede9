"""All layers of a decoder over one new token of each sequence in one kernel on Hopper.

The kernel (kernels/few_rows/cuda_layers.cu) appends the new keys and values to the cache, as ``ops.decode_attention``
does. Its blocks hand data to each other through a workspace, which no two launches may use at the same time: the stream
of the cache orders it, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.ops.bias_gelu import ACTIVATIONS
from fasttfm.ops.core.backends import dtype_name
from fasttfm.ops.layers.few_rows_forward import POLLS
from fasttfm.ops.layers.few_tokens import Workspace
from fasttfm.ops.layers.rules import LAYERS_OF_ONE_KERNEL
from fasttfm.ops.layers.support import missing_cuda

MOST_ROWS = 16  # kernels/few_rows/layers_shape.h
# The cluster of a head reads its keys with eight SMs. Beyond this capacity in all, attention of more blocks is faster:
# 16 sequences of 512 tokens take 0.92 of the time of the other kernels, of 900 tokens 1.07.
MOST_CACHED_TOKENS = 10_240
_WIDTH, _INTERMEDIATE, _HEADS, _HEAD_DIM = 768, 3072, 12, 64  # GPT-2's
_KINDS = ("gelu", "gelu_tanh")
_ALIGNMENT = 16


class DecoderLayers(NamedTuple):
    """What the kernel reads of pre-LN layers."""

    parameters: list[Tensor | None]  # the BlockParameters of each layer, whose LayerNorm b is the next layer's first
    first_norm: tuple[Tensor | None, Tensor | None]
    eps: tuple[float, float]  # of LayerNorms a and b
    activation: str  # a key of CODES
    windows: frozenset[tuple[int, int]]
    heads: int

    @classmethod
    def of(cls, layers: Sequence[Any], final_norm: Any) -> DecoderLayers | str:
        """The layers of a decoder (``nn.PackedLayer``), or why the kernel does not support them."""
        parameters: list[Tensor | None] = []
        norms = [layer.norm1 for layer in layers] + [final_norm]
        for layer, next_norm in zip(layers, norms[1:], strict=True):
            modules = (layer.qkv, layer.out, layer.norm2, layer.up, layer.down, next_norm)
            parameters += [tensor for module in modules for tensor in (module.weight, module.bias)]
        common = {(layer.norm2.eps, ACTIVATIONS[layer.activation], layer.heads) for layer in layers}
        following_eps = {norm.eps for norm in norms}
        if len(common) > 1 or len(following_eps) > 1:
            return "takes layers with the same eps, activation and heads"
        (eps, activation, heads), windows = common.pop(), frozenset(layer.window for layer in layers)
        first_norm = norms[0].weight, norms[0].bias
        return cls(parameters, first_norm, (eps, following_eps.pop()), activation, windows, heads)


def refuse(layers: DecoderLayers, rows: int, keys: Tensor) -> str | None:
    """Why the kernel does not append a token to each of ``rows`` sequences of a cache [layers, sequences, H, capacity,
    D]; None if it does."""
    tensors = [*layers.parameters, *layers.first_norm]
    depth, sequences, heads, capacity, head_dim = keys.shape
    if not 1 <= rows <= min(MOST_ROWS, sequences):
        return f"takes 1 to {MOST_ROWS} tokens, got {rows}"
    if rows * capacity > MOST_CACHED_TOKENS:
        return f"takes caches of up to {MOST_CACHED_TOKENS} tokens, got {rows} of {capacity}"
    if depth not in LAYERS_OF_ONE_KERNEL:
        return f"takes 6 to 24 layers, got {depth}"
    if layers.windows != {(-1, 0)}:
        return "takes layers that attend to all cached tokens"
    if layers.activation not in _KINDS:
        return f"takes {' and '.join(_KINDS)}, got {layers.activation}"
    if any(tensor is None for tensor in tensors):
        return "takes layers with all biases and LayerNorm parameters"
    present: list[Any] = tensors
    if {tensor.dtype for tensor in (*present, keys)} != {torch.bfloat16}:
        got = f"{dtype_name(present[0].dtype)} and {dtype_name(keys.dtype)}"
        return f"takes parameters and a cache in bfloat16, got {got}"
    sizes = (present[0].shape[1], present[6].shape[0], heads, head_dim)
    if sizes != (_WIDTH, _INTERMEDIATE, _HEADS, _HEAD_DIM) or layers.heads != heads:
        return f"takes layers of GPT-2's sizes, got {sizes}"
    if any(tensor.device != keys.device or not tensor.is_contiguous() for tensor in present):
        return "takes contiguous parameters on the cache's device"
    if any(tensor.data_ptr() % _ALIGNMENT for tensor in (*present, keys)):
        return f"takes tensors that start at a multiple of {_ALIGNMENT} bytes"
    return missing_cuda(keys.device)


class DecodeLayers:
    """The kernel for one cache, whose stream orders its workspace."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self._table: tuple[list[Tensor | None], array[int]] | None = None

    def reset(self) -> None:
        """Needed before 2^32 tags are used up, on the cache's stream: a step takes two for each layer."""
        self._workspace.reset()

    def run(self, x: Tensor, layers: DecoderLayers, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor | None:
        """The rows after the last LayerNorm, for embeddings ``x`` [n, C] of the next token of the first n sequences, of
        which ``lengths`` (int32 [n]) tokens are in the cache. None if the kernel has to leave the call to others,
        because its blocks are not all resident at once, or because a CUDA graph is captured before the workspace is
        allocated."""
        core = _native.core()
        memory = None
        if self._workspace.fits:
            memory = self._workspace.memory(core.few_rows_layers_workspace(_WIDTH, _INTERMEDIATE, _HEADS), x.device)
        if memory is None:
            return None
        if self._table is None or self._table[0] is not layers.parameters:
            addresses = array("q", (0 if p is None else p.data_ptr() for p in layers.parameters))
            self._table = layers.parameters, addresses
        y = torch.empty_like(x)
        sizes = (_INTERMEDIATE, CODES[layers.activation])
        tensors = (x, y, keys, values, lengths, *layers.first_norm, memory)
        try:
            core.few_rows_decode_layers_cuda(self._table[1].buffer_info()[0], *tensors, *sizes, *layers.eps, POLLS)
        except _native.DoesNotFit:
            self._workspace.fits = False
            return None
        return y
