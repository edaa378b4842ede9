"""Runs an encoder of transformers as one stack of post-LN layers, without calling its modules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.nn.packed_layer import draw_seeds
from fasttfm.nn.plain import (
    Tree,
    Uncopied,
    activation_name,
    dropout_rate,
    is_plain_dropout,
    is_plain_linear,
    is_plain_norm,
    known_activation_name,
    plain_parameters,
)
from fasttfm.ops import linear
from fasttfm.ops.backends import requested
from fasttfm.ops.library import needs_gradient
from fasttfm.ops.transformer_block import BlockOptions, BlockParameters
from fasttfm.ops.transformer_stack import transformer_stack
from fasttfm.patching.row_wise import is_known

_PARAMETERS = 16  # of a layer: weight and bias of six linear layers and two norms
_CHUNKS = "chunk_size_feed_forward"


class LayerModules(NamedTuple):
    """The modules of a layer by their function; their names differ between families."""

    layer: Any  # may be checkpointed
    attention: Any  # has scaling, attention_head_size and the training flag
    attention_dropout: Any
    query: Any
    key: Any
    value: Any
    out: Any
    dropout_a: Any  # of attention's output; None without dropout
    norm_a: Any
    up: Any
    activation: Any
    down: Any
    dropout_b: Any
    norm_b: Any

    def linears(self) -> tuple[Any, ...]:
        return self.query, self.key, self.value, self.out, self.up, self.down

    def leaves(self) -> list[Any]:
        others = (self.norm_a, self.norm_b, self.dropout_a, self.dropout_b)
        return [*self.linears(), *(each for each in others if each is not None)]


class LayerSettings(NamedTuple):
    """What a user can set on the modules of a layer, read at each call."""

    head_dim: int
    is_causal: bool
    scaling: float
    activation: str
    attention_p: float
    p_a: float
    p_b: float
    eps_a: float
    eps_b: float


def _settings_of(layer: LayerModules) -> LayerSettings:
    # The tree of modules is unchanged, so that an activation is as plain as it was.
    attention = layer.attention
    name = known_activation_name(layer.activation)
    assert name is not None
    return LayerSettings(
        head_dim=attention.attention_head_size,
        is_causal=attention.is_causal,
        scaling=attention.scaling,
        activation=name,
        attention_p=getattr(layer.attention_dropout, "p", 0.0) if attention.training else 0.0,
        p_a=0.0 if layer.dropout_a is None else dropout_rate(layer.dropout_a),
        p_b=0.0 if layer.dropout_b is None else dropout_rate(layer.dropout_b),
        eps_a=layer.norm_a.eps,
        eps_b=layer.norm_b.eps,
    )


class Stack(Uncopied):
    """The layers of an encoder, read once for as long as the tree of modules is unchanged."""

    def __init__(self, tree: Tree, layers: Sequence[LayerModules], settings: Any) -> None:
        self.tree, self._settings = tree, settings
        unique = {id(each.layer): each for each in layers}  # ALBERT repeats one layer
        self.order = [list(unique).index(id(each.layer)) for each in layers]
        self.layers = layers = list(unique.values())
        self.width = layers[0].query.in_features if layers and isinstance(layers[0].query, nn.Linear) else 0
        modules = list(tree.root.modules())
        self._is_known = all(is_known(tree.root, each) for each in modules)
        self._chunks = [each.__dict__ for each in modules if _CHUNKS in each.__dict__]
        self.fusable = bool(layers) and self._is_known and all(self._is_fusable(layer) for layer in layers)
        rows = [(*layer.linears(), layer.norm_a, layer.norm_b) for layer in layers]
        # In the order of _parameters().
        self._owners = [each._parameters for row in rows for each in row]

    def is_of(self, encoder: nn.Module, settings: Any) -> bool:
        """Whether this was made of what the encoder has now."""
        return self.tree.root is encoder and self._settings == settings and self.tree.is_unchanged()

    def _is_fusable(self, layer: LayerModules) -> bool:
        square = (self.width, self.width)
        return (
            is_plain_linear(*layer.linears())
            and is_plain_norm(layer.norm_a, layer.norm_b)
            and is_plain_dropout(*(each for each in (layer.dropout_a, layer.dropout_b) if each is not None))
            and activation_name(layer.activation) is not None
            and all(tuple(each.weight.shape) == square for each in (layer.query, layer.key, layer.value, layer.out))
        )

    def is_row_wise(self) -> bool:
        """Whether the modules may be called with packed rows: they are known, and none counts the rows of a batch."""
        return self._is_known and not any(own[_CHUNKS] for own in self._chunks)

    def options(self, max_seqlen: int) -> BlockOptions | None:
        """The options that all layers share; None if they differ, or if a stack does not support them."""
        found = {_settings_of(layer) for layer in self.layers}
        if len(found) > 1:
            return None
        settings = found.pop()
        size = settings.head_dim
        if settings.is_causal or settings.scaling != size**-0.5 or self.width % size:
            return None
        return BlockOptions(
            heads=self.width // size,
            max_seqlen=max_seqlen,
            window_left=-1,
            window_right=-1,
            activation=ops.ACTIVATIONS[settings.activation],
            attention_p=settings.attention_p,
            p_a=settings.p_a,
            p_b=settings.p_b,
            eps_a=settings.eps_a,
            eps_b=settings.eps_b,
            recompute=False,
            keep_activation=False,
            backend=requested(None),
        )

    def run(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor | None:
        """The last layer's output for packed ``x`` [T, C]; None if the layers have to be called."""
        values, options = plain_parameters(self._owners), self.options(max_seqlen)
        if options is None or values is None:
            return None
        (x,) = linear.autocast(x)
        dtypes = {each.dtype for each in values if each is not None}
        # Autocast casts fp32 weights; without it torch's linear layers need operands of one dtype.
        if len(dtypes) > 1 or not (dtypes == {x.dtype} or torch.is_autocast_enabled(x.device.type)):
            return None
        x = x.contiguous()
        drops = options.attention_p > 0 or options.p_a > 0 or options.p_b > 0
        seeds = draw_seeds(x.device, len(self.order)) if drops else None
        if any(each.layer.training and getattr(each.layer, "gradient_checkpointing", False) for each in self.layers):
            return self._run_checkpointed(x, values, cu_seqlens, seeds, options)
        layers = self._parameters(values)
        y, _ = transformer_stack(x, None, cu_seqlens, seeds, options, [layers[index] for index in self.order])
        return y

    def _run_checkpointed(
        self, x: Tensor, values: list[Any], cu_seqlens: Tensor, seeds: Tensor | None, options: BlockOptions
    ) -> Tensor:
        """Gradient checkpointing: each layer saves only its input and runs again in the backward, with the same
        seeds."""
        for step, index in enumerate(self.order):
            own = values[index * _PARAMETERS : (index + 1) * _PARAMETERS]
            seed = None if seeds is None else seeds[step : step + 1]
            run = functools.partial(self._run_layer, own, cu_seqlens, seed, options)
            layer = self.layers[index].layer
            x = layer._gradient_checkpointing_func(run, x) if layer.gradient_checkpointing else run(x)
        return x

    def _run_layer(
        self, values: list[Any], cu_seqlens: Tensor, seeds: Tensor | None, options: BlockOptions, x: Tensor
    ) -> Tensor:
        y, _ = transformer_stack(x, None, cu_seqlens, seeds, options, self._parameters(values))
        return y

    def _parameters(self, values: list[Any]) -> list[BlockParameters]:
        """The parameters of one or several layers."""
        rows = [values[first : first + _PARAMETERS] for first in range(0, len(values), _PARAMETERS)]
        weights = join([row[index] for row in rows for index in (0, 2, 4)])
        biases = join([row[index] for row in rows for index in (1, 3, 5)])
        return [
            BlockParameters(weight, bias, *row[6:8], *row[12:14], *row[8:12], *row[14:])
            for weight, bias, row in zip(weights, biases, rows, strict=True)
        ]


def collect_outputs(hooks: dict[int, Any]) -> bool:
    """Whether hooks are those that transformers leaves in a model after its layers' outputs were requested once. They
    do nothing unless the outputs are requested again."""
    return all(getattr(hook, "__module__", "") == "transformers.utils.output_capturing" for hook in hooks.values())


# ---- queries, keys and values ----------------------------------------------------------------------------------------


def join(tensors: list[Tensor | None]) -> Sequence[Any]:
    """Concatenates every three tensors, those of a layer's queries, keys and values; None if all three are None."""
    given = [each for each in tensors if each is not None]
    if not given:
        return [None] * (len(tensors) // 3)
    if len(given) < len(tensors):  # a bias that is missing while others exist is 0
        given = [torch.zeros_like(given[0]) if each is None else each for each in tensors]
    if needs_gradient(*given):
        joined: tuple[Tensor, ...] = _Join.apply(*given)
        return joined
    return _joined(given)


def _joined(tensors: list[Tensor] | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Concatenates all of them by one launch."""
    rows, *others = tensors[0].shape
    return torch.cat(tensors).view(-1, 3 * rows, *others).unbind()


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _joined(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        parts = [(None, None, None) if each is None else each.chunk(3) for each in gradients]
        return tuple(part for each in parts for part in each)


# ---- encoders --------------------------------------------------------------------------------------------------------

ATTRIBUTE = "_fasttfm_stack"


def stack_of(encoder: Any) -> Stack | None:
    """The encoder's stack; None if something watches a module inside, which gets what transformers passes to it."""
    stack: Stack | None = encoder.__dict__.get(ATTRIBUTE)
    settings = encoder.layer_settings()
    if stack is None or not stack.is_of(encoder, settings):
        tree = Tree(encoder, collect_outputs)
        if not tree.is_unchanged():
            return None
        try:
            layers = encoder.layer_modules()
        except AttributeError:  # a module that has replaced a layer has other parts
            layers = []
        stack = encoder.__dict__[ATTRIBUTE] = Stack(tree, layers, settings)
    return stack
