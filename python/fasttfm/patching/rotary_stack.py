"""Runs the layers of EuroBERT and NomicBERT as one stack, without calling their modules.

Their layers have a linear layer each for queries, keys, values, the gate and up. A stack reads these weights at each
call and concatenates them for its GEMMs, so that the parameters stay the same objects.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.nn import PackedBatch
from fasttfm.nn.packed_layer import draw_seeds
from fasttfm.nn.plain import (
    Tree,
    Uncopied,
    activation_name,
    dropout_rate,
    is_plain,
    is_plain_dropout,
    is_plain_linear,
    is_watched,
    plain_parameters,
)
from fasttfm.ops import linear
from fasttfm.ops.core.library import PLAIN_TENSORS, needs_gradient
from fasttfm.ops.layers.spec import FIELDS, Attention, FeedForward, LayerSpec, Norm, Specs
from fasttfm.ops.layers.stack import run_stack
from fasttfm.ops.layers.torch_executor import Inputs
from fasttfm.patching.row_wise import is_known
from fasttfm.patching.stack import join

_LINEARS = 7  # of a layer


class RotaryModules(NamedTuple):
    """The modules of a layer by their function; their names differ between families."""

    layer: Any  # may be checkpointed
    attention: Any  # has head_dim, scaling, attention_dropout, is_causal and the training flag
    mlp: Any  # has act_fn
    linears: tuple[Any, ...]  # of queries, keys, values, attention's output, the gate, up and down
    norm_a: Any  # those of a LayerSpec: in a pre-LN model norm_b is the next layer's first norm, or the last
    norm_b: Any
    dropouts: tuple[Any, Any] | None = None  # of the outputs of attention and feed-forward block


class LayerSettings(NamedTuple):
    """What a user can set on the modules of a layer, read at each call."""

    head_dim: int
    groups: int  # heads of queries for each head of keys
    is_causal: bool
    scaling: float
    activation: str | None
    attention_p: float
    p_a: float
    p_b: float
    eps_a: float
    eps_b: float


def _settings_of(layer: RotaryModules) -> LayerSettings:
    attention, dropouts = layer.attention, layer.dropouts
    p_a, p_b = (0.0, 0.0) if dropouts is None else map(dropout_rate, dropouts)
    return LayerSettings(
        head_dim=attention.head_dim,
        groups=getattr(attention, "num_key_value_groups", 1),
        is_causal=attention.is_causal,
        scaling=attention.scaling,
        activation=activation_name(layer.mlp.act_fn),
        attention_p=attention.attention_dropout if attention.training else 0.0,
        p_a=p_a,
        p_b=p_b,
        eps_a=_epsilon_of(layer.norm_a),
        eps_b=_epsilon_of(layer.norm_b),
    )


def _epsilon_of(norm: Any) -> float:
    """Of a LayerNorm, or of transformers' RMSNorm."""
    eps: float = norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon
    return eps


class RotaryStack(Uncopied):
    """The layers of a model, read once for as long as the tree of modules is unchanged.

    Args:
        tree: The tree of the module list with the layers.
        model: The model whose layers they are.
        layers: The modules of each layer.
        first_norm: The norm in front of the first layer of a pre-LN model; None in a post-LN model.
    """

    def __init__(self, tree: Tree, model: Any, layers: Sequence[RotaryModules], first_norm: Any) -> None:
        self.tree, self.layers, self.first_norm = tree, list(layers), first_norm
        self.rotary, self._settings = model.rotary_emb, model.layer_settings()
        known = all(is_known(model, module) for module in tree.root.modules())
        self.fusable = bool(layers) and known and all(map(_is_fusable, layers))
        self._linears = [module._parameters for layer in layers for module in layer.linears]
        self._norms = [norm for layer in layers for norm in (layer.norm_a, layer.norm_b)]
        self._described: tuple[Any, Specs | None] = (None, None)  # what the layers were described from, and the layers

    def is_of(self, model: Any) -> bool:
        """Whether this was made of what the model has now."""
        same = self.tree.root is model.layers and self.tree.is_unchanged()
        return same and self._settings == model.layer_settings()

    def run(self, x: Tensor, batch: PackedBatch, positions: Tensor | None) -> Tensor | None:
        """The last norm's output for packed ``x`` [T, C] of tokens at ``positions`` [T], by default their indices in
        their sequences; None if the layers have to be called."""
        values = self._parameters()
        if values is None or (x.is_cpu and not needs_gradient(x, *values)):
            return None  # on a CPU, concatenating the weights takes as long as the GEMMs of about 60 tokens
        residual = None if self.first_norm is None else x
        if self.first_norm is not None:
            x = self.first_norm(x)
        (x,) = linear.autocast(x)
        dtypes = {value.dtype for value in values if value is not None}
        # Autocast casts fp32 weights; without it torch's linear layers need operands of one dtype.
        if len(dtypes) > 1 or not (dtypes == {x.dtype} or torch.is_autocast_enabled(x.device.type)):
            return None
        specs = self._specs(values)
        if specs is None:
            return None
        if positions is None:
            table = self._table(x, torch.arange(batch.max_seqlen, device=x.device))
            positions = ops.position_ids_from_cu_seqlens(batch.cu_seqlens, total=len(x))
        else:
            table = self._table(x, positions)
            positions = torch.arange(len(x), device=x.device)
        seeds = draw_seeds(x.device, len(specs)) if specs.drop else None
        inputs = Inputs(x.contiguous(), residual, batch.cu_seqlens, batch.max_seqlen, seeds, (table,), positions)
        if any(layer.layer.training and getattr(layer.layer, "gradient_checkpointing", False) for layer in self.layers):
            return self._run_checkpointed(inputs, values, specs)
        y, _ = run_stack(specs, inputs, _fields(values))
        return y

    def _parameters(self) -> list[Tensor | None] | None:
        """Weight and bias of the linear layers of all layers, then those of their norms; None if one is missing or is
        not a plain tensor."""
        linears = plain_parameters(self._linears)
        norms = [norm._parameters.get(name) for norm in self._norms for name in ("weight", "bias")]
        plain = all(value is None or type(value) in PLAIN_TENSORS for value in norms)
        return [*linears, *norms] if linears is not None and plain else None

    @torch.no_grad()
    def _table(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, D / 2], as transformers' rotary module, whose two halves of columns are equal,
        but in fp32. They are made at each call, because buffers may be changed without a trace."""
        angles = positions.float()[:, None] * self.rotary.inv_freq.to(device=x.device, dtype=torch.float)
        scale = self.rotary.attention_scaling
        cos, sin = angles.cos(), angles.sin()
        cos, sin = (cos, sin) if scale == 1 else (cos * scale, sin * scale)
        return (cos.double(), sin.double()) if x.dtype == torch.float64 else (cos, sin)

    def _specs(self, values: list[Tensor | None]) -> Specs | None:
        """The layers as data; None if a description does not cover one of them."""
        columns = 2 * self.rotary.inv_freq.numel()
        shapes = [None if value is None else value.shape for value in values]
        source = (columns, shapes, [_settings_of(layer) for layer in self.layers])
        if source != self._described[0]:
            specs = [self._spec(shapes, index, columns) for index in range(len(self.layers))]
            self._described = source, None if None in specs else Specs.of(specs)  # type: ignore[arg-type]
        return self._described[1]

    def _spec(self, shapes: list[Any], index: int, columns: int) -> LayerSpec | None:
        settings = _settings_of(self.layers[index])
        of_layer = _of_layer(shapes, index, len(self.layers))
        if of_layer != _of_layer(shapes, 0, len(self.layers)):  # the weights of all layers are concatenated at once
            return None
        (q, width), (k, _), v, (inner, _) = (of_layer[2 * number] for number in (0, 1, 2, 4))
        heads, kv_heads = q // settings.head_dim, k // settings.head_dim
        rms = self.first_norm is not None
        # A plan adds in the GEMM what precedes an RMSNorm, so that it has neither bias nor dropout.
        biased = rms and (of_layer[7] is not None or of_layer[13] is not None or settings.p_a or settings.p_b)
        odd = columns != settings.head_dim or heads != settings.groups * kv_heads or tuple(v) != (k, width)
        if biased or odd or settings.is_causal or settings.activation is None:
            return None
        return _spec_of(width, inner, (heads, kv_heads), settings, frozenset(compress(FIELDS, _present(of_layer))), rms)

    def _run_checkpointed(self, inputs: Inputs, values: list[Tensor | None], specs: Specs) -> Tensor:
        """Gradient checkpointing: each layer saves only its input and runs again in the backward, with the same
        seeds."""
        x, residual = inputs.x, inputs.residual
        for index, modules in enumerate(self.layers):
            seeds = None if inputs.seeds is None else inputs.seeds[index : index + 1]
            parameters = _of_layer(values, index, len(self.layers))
            run = functools.partial(_run_layer, parameters, inputs._replace(seeds=seeds), specs.singles[index])
            layer = modules.layer
            checkpointed = layer.gradient_checkpointing
            x, residual = layer._gradient_checkpointing_func(run, x, residual) if checkpointed else run(x, residual)
        return x


def _run_layer(
    values: list[Tensor | None], inputs: Inputs, specs: Specs, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return run_stack(specs, inputs._replace(x=x, residual=residual), _fields(values))


def _is_fusable(layer: RotaryModules) -> bool:
    return (
        is_plain_linear(*layer.linears)
        and is_plain(layer.norm_a, layer.norm_b)
        and is_plain_dropout(*(layer.dropouts or ()))
        and activation_name(layer.mlp.act_fn) is not None
    )


def _of_layer(values: list[Any], index: int, layers: int) -> list[Any]:
    """A layer's part of ``RotaryStack._parameters``: of its linear layers, then of its norms."""
    norms = 2 * _LINEARS * layers
    return [
        *values[2 * _LINEARS * index : 2 * _LINEARS * (index + 1)],
        *values[norms + 4 * index : norms + 4 * index + 4],
    ]


def _present(of_layer: list[Any]) -> list[bool]:
    """Which FIELDS a layer has."""
    q, k, v, gate, up = (of_layer[number] is not None for number in (1, 3, 5, 9, 11))
    others = [of_layer[number] is not None for number in (6, 7, 14, 15)]
    last = [of_layer[number] is not None for number in (12, 13, 16, 17)]
    return [True, q or k or v, *others, True, gate or up, *last, False, False]


def _fields(values: list[Tensor | None]) -> list[Tensor | None]:
    """The FIELDS of all layers, in one list."""
    layers = len(values) // (2 * _LINEARS + 4)
    rows = [_of_layer(values, index, layers) for index in range(layers)]
    qkv = [join([row[number] for row in rows for number in (first, first + 2, first + 4)], 3) for first in (0, 1)]
    up = [join([row[number] for row in rows for number in (first, first + 2)], 2) for first in (8, 9)]
    fields: list[Tensor | None] = []
    for index, row in enumerate(rows):
        of_attention = (qkv[0][index], qkv[1][index], *row[6:8], *row[14:16])
        fields += [*of_attention, up[0][index], up[1][index], *row[12:14], *row[16:18], None, None]
    return fields


@functools.lru_cache(maxsize=256)
def _spec_of(
    width: int, inner: int, heads: tuple[int, int], settings: LayerSettings, present: frozenset[str], rms: bool
) -> LayerSpec:
    kind, size = "rms" if rms else "layer", settings.head_dim
    assert settings.activation is not None
    return LayerSpec(
        width,
        pre_norm=rms,
        attention=Attention(
            *heads,
            size,
            rotary=0,
            rotary_columns=size,
            scale=None if settings.scaling == size**-0.5 else settings.scaling,
            dropout=settings.attention_p,
        ),
        feed_forward=FeedForward(inner, ops.ACTIVATIONS[settings.activation], gated=True),
        norm_a=Norm(kind, settings.eps_a),
        norm_b=Norm(kind, settings.eps_b),
        present=present,
        dropout_a=settings.p_a,
        dropout_b=settings.p_b,
    )


def has_fixed_rotation(rotary: Any, kind: type[nn.Module]) -> bool:
    """Whether a rotary module is transformers' own, and its buffers do not depend on the sequence's length."""
    if type(rotary) is not kind or is_watched(rotary):
        return False
    scaling = str(rotary.rope_type)
    return "dynamic" not in scaling and scaling != "longrope"
