"""Runs an encoder of transformers as one stack of post-LN layers, without calling its modules."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from itertools import compress
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
from fasttfm.ops.core.library import needs_gradient
from fasttfm.ops.layers.spec import FIELDS, Attention, FeedForward, LayerSpec, Norm, Specs
from fasttfm.ops.layers.stack import run_stack
from fasttfm.ops.layers.torch_executor import Inputs
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
        self._known: tuple[Any, Specs | None] = (None, None)  # settings, and the layers with them as data

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

    def spec(self, present: frozenset[str]) -> LayerSpec | None:
        """What all layers compute; None if they differ, or if a description does not cover it."""
        found = {_settings_of(layer) for layer in self.layers}
        if len(found) > 1:
            return None
        settings = found.pop()
        size = settings.head_dim
        if settings.is_causal or settings.scaling != size**-0.5 or self.width % size:
            return None
        return _spec_of(self.width, self.layers[0].up.weight.shape[0], settings, present)

    def run(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor | None:
        """The last layer's output for packed ``x`` [T, C]; None if the layers have to be called."""
        values = plain_parameters(self._owners)
        if values is None:
            return None
        (x,) = linear.autocast(x)
        dtypes = {each.dtype for each in values if each is not None}
        # Autocast casts fp32 weights; without it torch's linear layers need operands of one dtype.
        if len(dtypes) > 1 or not (dtypes == {x.dtype} or torch.is_autocast_enabled(x.device.type)):
            return None
        layers = self._parameters(values)
        specs = self._specs(layers)
        if specs is None:
            return None
        seeds = draw_seeds(x.device, len(specs)) if specs.drop else None
        inputs = Inputs(x.contiguous(), None, cu_seqlens, max_seqlen, seeds)
        if any(each.layer.training and getattr(each.layer, "gradient_checkpointing", False) for each in self.layers):
            return self._run_checkpointed(inputs, values, specs)
        y, _ = run_stack(specs, inputs, [each for index in self.order for each in layers[index]])
        return y

    def _specs(self, layers: list[list[Tensor | None]]) -> Specs | None:
        """The layers as data, in their order."""
        given = [tuple(map(_is_given, each)) for each in layers]
        settings = ([*map(_settings_of, self.layers)], given)
        if settings != self._known[0]:
            present = [frozenset(compress(FIELDS, each)) for each in given]
            found = [self.spec(present[index]) for index in self.order]
            self._known = settings, None if None in found else Specs.of(found)  # type: ignore[arg-type]
        return self._known[1]

    def _run_checkpointed(self, inputs: Inputs, values: list[Any], specs: Specs) -> Tensor:
        """Gradient checkpointing: each layer saves only its input and runs again in the backward, with the same
        seeds."""
        x = inputs.x
        for step, index in enumerate(self.order):
            own = values[index * _PARAMETERS : (index + 1) * _PARAMETERS]
            seeds = None if inputs.seeds is None else inputs.seeds[step : step + 1]
            call = inputs._replace(seeds=seeds)
            run = functools.partial(self._run_layer, own, call, specs.singles[step])
            layer = self.layers[index].layer
            x = layer._gradient_checkpointing_func(run, x) if layer.gradient_checkpointing else run(x)
        return x

    def _run_layer(self, values: list[Any], inputs: Inputs, specs: Specs, x: Tensor) -> Tensor:
        (parameters,) = self._parameters(values)
        y, _ = run_stack(specs, inputs._replace(x=x), parameters)
        return y

    def _parameters(self, values: list[Any]) -> list[list[Tensor | None]]:
        """The FIELDS of one or several layers."""
        rows = [values[first : first + _PARAMETERS] for first in range(0, len(values), _PARAMETERS)]
        weights = join([row[index] for row in rows for index in (0, 2, 4)])
        biases = join([row[index] for row in rows for index in (1, 3, 5)])
        return [
            [weight, bias, *row[6:8], *row[12:14], *row[8:12], *row[14:], None, None]
            for weight, bias, row in zip(weights, biases, rows, strict=True)
        ]


_is_given = functools.partial(operator.is_not, None)


@functools.lru_cache(maxsize=256)
def _spec_of(width: int, intermediate: int, settings: LayerSettings, present: frozenset[str]) -> LayerSpec:
    heads = width // settings.head_dim
    return LayerSpec(
        width,
        pre_norm=False,
        attention=Attention(heads, heads, settings.head_dim, dropout=settings.attention_p),
        feed_forward=FeedForward(intermediate, ops.ACTIVATIONS[settings.activation]),
        norm_a=Norm("layer", settings.eps_a),
        norm_b=Norm("layer", settings.eps_b),
        present=present,
        dropout_a=settings.p_a,
        dropout_b=settings.p_b,
        recomputed=frozenset(("a",)),
    )


def collect_outputs(hooks: dict[int, Any]) -> bool:
    """Whether hooks are those that transformers leaves in a model after its layers' outputs were requested once. They
    do nothing unless the outputs are requested again."""
    return all(getattr(hook, "__module__", "") == "transformers.utils.output_capturing" for hook in hooks.values())


# ---- queries, keys and values ----------------------------------------------------------------------------------------


def join(tensors: list[Tensor | None], count: int = 3) -> Sequence[Any]:
    """Concatenates every ``count`` tensors, such as those of a layer's queries, keys and values; None if all of them
    are None. All layers have tensors of the same shapes."""
    whole = [tensor for tensor in tensors if tensor is not None]
    if not whole:
        return [None] * (len(tensors) // count)
    if len(whole) < len(tensors):  # a bias that is missing while others exist is 0
        whole = [torch.zeros_like(whole[0]) if tensor is None else tensor for tensor in tensors]
    if needs_gradient(*whole):
        joined: tuple[Tensor, ...] = _Join.apply(count, *whole)
        return joined
    return _joined(count, whole)


def _joined(count: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Concatenates all of them by one launch."""
    rows = sum(tensor.shape[0] for tensor in tensors[:count])
    return torch.cat([*tensors]).view(-1, rows, *tensors[0].shape[1:]).unbind()


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.rows = [tensor.shape[0] for tensor in tensors[:count]]
        return _joined(count, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        absent = [None] * len(ctx.rows)
        parts = [absent if gradient is None else gradient.split(ctx.rows) for gradient in gradients]
        return None, *(part for parts_of_layer in parts for part in parts_of_layer)


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
