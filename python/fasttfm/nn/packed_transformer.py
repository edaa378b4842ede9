"""``PackedTransformer``: a stack of transformer layers over packed tokens."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttfm.nn.packed_layer import PackedLayer, draw_seeds
from fasttfm.nn.parts import layer_norm
from fasttfm.nn.plain import is_watched
from fasttfm.ops import linear
from fasttfm.ops.backends import Explanation, explain
from fasttfm.ops.transformer_stack import transformer_stack

_NOT_WHOLE = "takes layers that are plain, without hooks, wrappers or checkpointing"


class PackedTransformer(nn.Module):
    """Layers in order, all post-LN or all pre-LN.

    Args:
        layers: A layer that occurs in the list more than once is one set of parameters (ALBERT).
        final_norm: The LayerNorm that ends a pre-LN model.
    """

    def __init__(self, layers: Sequence[PackedLayer], final_norm: nn.LayerNorm | None = None) -> None:
        super().__init__()
        pre_norm = any(layer.norm_first for layer in layers)
        if pre_norm != (final_norm is not None) or any(layer.norm_first != pre_norm for layer in layers):
            raise ValueError(
                "PackedTransformer: layers: expected all pre-LN with a final_norm, or all post-LN without, got a mix"
            )
        unique = list(dict.fromkeys(layers))
        self.layers = nn.ModuleList(unique)
        self.order = [unique.index(layer) for layer in layers]
        self.final_norm = final_norm
        self.checkpointing = False  # whether layers keep only their inputs for the backward, and run again there

    def forward(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, hidden_states: list[Tensor] | None = None
    ) -> Tensor:
        """Runs the layers over ``x`` [T, C]; ``hidden_states`` collects the stream before each of them."""
        modules = self._modules_in_order()
        if hidden_states is None and self._is_whole(modules):
            return self._run_whole(x, cu_seqlens, max_seqlen, modules)
        layers = self.in_order()
        drops = self.training and any(any(layer.probabilities()) for layer in layers)
        seeds = draw_seeds(x.device, len(layers)).unbind() if drops else [None] * len(layers)
        norms = self._norms_in_front(modules, layers)
        residual: Tensor | None = None
        if layers and norms[0] is not None:
            residual, x = x, layer_norm(norms[0], x)
        for index, (module, seed) in enumerate(zip(modules, seeds, strict=True)):
            if hidden_states is not None:
                hidden_states.append(x if residual is None else residual)
            following = norms[index + 1]
            run: Callable[..., Any] = partial(module, residual=residual, next_norm=following, seeds=seed)
            if self.checkpointing and self.training:
                # A fused layer draws nothing: its seeds are given. Modules in its place may draw.
                draws = module is not layers[index] or not layers[index].is_fusable(following)
                run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=draws)
            x, residual = run(x, cu_seqlens, max_seqlen)
        return x

    def _is_whole(self, modules: Sequence[Any]) -> bool:
        """Whether nothing sees where one layer ends: layers and their modules are plain, and keep what the backward
        needs. Compilers see the layers one by one."""
        if not modules or (self.checkpointing and self.training) or torch.compiler.is_dynamo_compiling():
            return False
        if any(type(module) is not PackedLayer or is_watched(module) for module in modules):
            return False
        return all(layer.is_fusable(norm) for layer, norm in self._with_next_norms(modules))

    def _with_next_norms(self, layers: Sequence[PackedLayer]) -> list[tuple[PackedLayer, nn.LayerNorm | None]]:
        """In a pre-LN model a layer applies the next one's first norm."""
        following: list[Any] = [None] * len(layers)
        if self.final_norm is not None:
            following = [*(layer._modules["norm1"] for layer in layers[1:]), self.final_norm]
        return list(zip(layers, following, strict=True))

    def _run_whole(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, layers: Sequence[Any]) -> Tensor:
        """The layers by one op: layers that differ in their options are several."""
        first = layers[0]
        residual: Tensor | None = None
        if self.final_norm is not None:
            residual, x = x, layer_norm(first.norm1, x)
        (x,) = linear.autocast(x)
        first.check(x, cu_seqlens, residual, None)
        blocks = [layer.block(max_seqlen, norm) for layer, norm in self._with_next_norms(layers)]
        drops = any(options.attention_p or options.p_a or options.p_b for options, _ in blocks)
        seeds = draw_seeds(x.device, len(layers)) if drops else None
        start = 0
        for options, group in itertools.groupby(blocks, key=operator.itemgetter(0)):
            parameters = [each for _, each in group]
            own = None if seeds is None else seeds[start : start + len(parameters)]
            x, residual = transformer_stack(x, residual, cu_seqlens, own, options, parameters)
            start += len(parameters)
        return x

    def explain(self, x: Tensor, max_seqlen: int) -> Explanation:
        """How ``forward`` runs the layers over ``x`` [T, C], and why not in another way: "cpu" or "cuda" is one native
        call, "ops" a layer's ops one by one. Nothing is computed."""
        modules: list[Any] = self._modules_in_order()
        if not self._is_whole(modules):
            reasons = {"cpu": _NOT_WHOLE, "cuda": _NOT_WHOLE, "ops": None}
            return Explanation("transformer_stack", "ops", reasons, "ops")
        residual = None if self.final_norm is None else x
        (normalised,) = linear.autocast(x)
        blocks = [layer.block(max_seqlen, norm) for layer, norm in self._with_next_norms(modules)]
        parameters = [each for _, each in blocks]
        return explain("transformer_stack", normalised, residual, blocks[0][0], parameters)

    def in_order(self) -> list[PackedLayer]:
        """The layers as they follow each other, without what is wrapped around them."""
        return [_layer_in(module) for module in self._modules_in_order()]

    def _norms_in_front(self, modules: list[nn.Module], layers: list[PackedLayer]) -> list[nn.LayerNorm | None]:
        """In a pre-LN model: the LayerNorm in front of each layer, which the layer before it applies, and the last one.

        None for a layer that something is wrapped around, or that has hooks: its parameters are for its own call, as
        FSDP's, which are whole only there.
        """
        if self.final_norm is None:
            return [None] * (len(layers) + 1)
        own = [type(module) is not PackedLayer or is_watched(module) for module in modules]
        norms = [None if each else layer.norm1 for each, layer in zip(own, layers, strict=True)]
        return [*norms, self.final_norm]

    def _modules_in_order(self) -> list[nn.Module]:
        held = list(self.layers)
        return [held[index] for index in self.order]


def _layer_in(module: nn.Module) -> PackedLayer:
    """The layer itself, or the one that something (torch.compile, checkpoint_wrapper) is wrapped around."""
    if isinstance(module, PackedLayer):
        return module
    for each in module.modules():
        if isinstance(each, PackedLayer):
            return each
    raise TypeError(
        f"PackedTransformer: layers: expected a PackedLayer, or a module around one, got {type(module).__name__}"
    )
