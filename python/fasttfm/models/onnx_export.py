"""``export_onnx``: writes a model as an ONNX file of standard operators, for onnxruntime and others.

The file has none of fasttfm's ops: the model is traced in plain torch over padded batches, with the same parameters.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from fasttfm import ops
from fasttfm._atomic_files import atomic_write
from fasttfm.models.mpnet import BiasedLayer
from fasttfm.models.outputs import ModelOutput, QuestionAnsweringOutput
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.relative_bias import RelativeBias
from fasttfm.models.text_model import Encoded, TextModel
from fasttfm.nn import PackedBatch, PackedLayer, PackedTransformer, RMSNorm, RotaryLayer, RotaryTransformer
from fasttfm.nn.disentangled_layer import DisentangledLayer, Relative, ShiftedLayer
from fasttfm.nn.rotary_layer import rotary_tables
from fasttfm.nn.rotation import is_scaled_by_length

_ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}
_PROTOBUF_BYTES = 2**31  # of one file; larger models would need a second one


def export_onnx(model: PretrainedModel, path: str | Path, *, opset_version: int | None = None) -> list[str]:
    """Writes a model, with or without a head, as an ONNX file with dynamic batch and sequence sizes.

    Inputs are ``input_ids`` and ``attention_mask``, int64 [batch, sequence] ([batch, choices, sequence] for a choice),
    and ``token_type_ids`` if the model has segments. Outputs have the names of the model's outputs, and are undefined
    where ``attention_mask`` is 0. With the configuration's ``output_hidden_states`` or ``output_attentions`` they
    include ``hidden_states.0``, ``attentions.0`` and so on. A GPT is exported without a KV cache; its head for
    sequences or choices reads the last token.

    Args:
        model: A model in fp32 on a CPU, which is not changed.
        path: A name that ends in .onnx; an existing file is replaced.
        opset_version: The ONNX opset; torch's default if None.

    Returns:
        The names of the outputs.
    """
    path = Path(path)
    _check(model, path)
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError("export_onnx: torch exports with onnxscript: pip install onnx onnxscript") from None
    names = ["input_ids", "attention_mask"]
    if _base(model).has_segments:
        names.append("token_type_ids")
    choices = any(head in type(model).__name__ for head in ("MultipleChoice", "DoubleHeads"))
    dimensions = ("batch", "choices", "sequence") if choices else ("batch", "sequence")
    sizes = {index: torch.export.Dim(name, min=1) for index, name in enumerate(dimensions)}
    shape = (2, 3, 5) if choices else (2, 5)
    tokens = [
        torch.full(shape, 1, dtype=torch.int64, device="cpu"),
        torch.ones(shape, dtype=torch.int64, device="cpu"),
        torch.zeros(shape, dtype=torch.int64, device="cpu"),
    ]
    inputs = tuple(tokens[: len(names)])
    training = model.training
    try:
        with torch.no_grad(), _plain(model.eval()):
            plain = _PlainModel(model).eval()  # a new module is in training mode, and export_onnx warns of that
            output_names = _output_names(plain.called(*inputs))
            with atomic_write(path) as partial:
                torch.onnx.export(
                    plain,
                    inputs,
                    partial,
                    input_names=names,
                    output_names=output_names,
                    dynamic_shapes=tuple(dict(sizes) for _ in names),
                    opset_version=opset_version,
                    dynamo=True,
                    external_data=False,
                    verbose=False,
                )
    finally:
        model.train(training)
    return output_names


def _output_names(output: ModelOutput) -> list[str]:
    """A name for each tensor; those of a tuple are numbered."""
    names = []
    for name, value in output.items():
        names += [f"{name}.{index}" for index in range(len(value))] if isinstance(value, tuple) else [name]
    return names


def _check(model: PretrainedModel, path: Path) -> None:
    name = type(model).__name__
    if path.suffix != ".onnx":
        raise ValueError(f"export_onnx: path: expected a name that ends in .onnx, got {path}")
    if "JointPreTraining" in name:
        raise ValueError(f"export_onnx: model: expected one of its two models, got {name}; export its parts")
    needed = [
        parameter.name
        for parameter in signature(model.forward).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    if needed:
        raise ValueError(
            f"export_onnx: model: expected one that reads tokens only, got {name}, which needs {needed[0]}"
        )
    base = _base(model)
    if not _is_plain_stack(base):
        expected = "BERT's, GPT's, DeBERTa's, XLNet's or rotary layers"
        raise ValueError(f"export_onnx: model: expected {expected}, got {name}, whose layers are others")
    if any(is_scaled_by_length(getattr(layer, "theta", None), sys.maxsize) for layer in base.encoder.in_order()):
        raise ValueError(f"export_onnx: model: expected a rotation for all lengths, got {name} with rope_type dynamic")
    for key, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            got = f"{key} in {str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
            raise ValueError(f"export_onnx: model: expected fp32 parameters on a CPU, got {got}")
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    if size >= _PROTOBUF_BYTES:
        expected = "a model of less than 2 GiB, which is what one ONNX file can hold"
        raise ValueError(f"export_onnx: model: expected {expected}, got {size / 2**30:.1f} GiB")


def _is_plain_stack(base: TextModel) -> bool:
    is_overridden = (type(base).encode_packed, type(base).run_layers) != (TextModel.encode_packed, TextModel.run_layers)
    if type(base.encoder) is RotaryTransformer:
        return all(type(layer) is RotaryLayer for layer in base.encoder.layers)
    if _reads_distances(base):
        return all(type(layer) in (DisentangledLayer, ShiftedLayer) for layer in base.encoder.layers)
    if type(base).run_layers is RelativeBias.run_layers and type(base.encoder) is PackedTransformer:
        return all(type(layer) is BiasedLayer for layer in base.encoder.layers)
    plain = type(base.encoder) is PackedTransformer and all(type(layer) is PackedLayer for layer in base.encoder.layers)
    return not is_overridden and plain


def _reads_distances(base: TextModel) -> bool:
    """Whether its layers are DeBERTa's or XLNet's."""
    return type(base.encoder) is PackedTransformer and isinstance(base.encoder.layers[0], DisentangledLayer)


def _base(model: PretrainedModel) -> TextModel:
    base = model if model.base else getattr(model, model.names.prefix, None)
    if not isinstance(base, TextModel):
        raise ValueError(f"export_onnx: model: expected a model of fasttfm.models, got {type(model).__name__}")
    return base


class _PlainModel(nn.Module):
    """The model as a function of padded tensors, to be called within ``_plain``."""

    def __init__(self, model: PretrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return self.called(input_ids, attention_mask, token_type_ids).to_tuple()

    def called(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> ModelOutput:
        """The model's output, of which ``forward`` returns what is there."""
        output: Any = self.model(input_ids, attention_mask, token_type_ids)
        if isinstance(output, QuestionAnsweringOutput):  # padding cannot be chosen
            assert output.start_logits is not None
            assert output.end_logits is not None
            lowest, padding = torch.finfo(output.start_logits.dtype).min, attention_mask == 0
            output.start_logits = output.start_logits.masked_fill(padding, lowest)
            output.end_logits = output.end_logits.masked_fill(padding, lowest)
        return output


@contextlib.contextmanager
def _plain(model: PretrainedModel) -> Iterator[None]:
    """A context in which the model's layers and heads run in plain torch: a hook on all modules makes ``nn.plain`` call
    them instead of fusing them."""
    base = _base(model)
    named = [module for module in model.modules() if isinstance(getattr(module, "activation", None), str)]
    activations: list[tuple[Any, str]] = [(module, str(module.activation)) for module in named]

    def encode(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **layout: Any,
    ) -> Encoded:
        returned = base.outputs(output_hidden_states, output_attentions)
        return _encoded(base, input_ids, attention_mask, token_type_ids, *returned)

    hook = register_module_forward_pre_hook(lambda module, inputs: None)
    norms: list[Any] = [module for module in model.modules() if isinstance(module, RMSNorm)]
    try:
        for norm in norms:
            norm.forward = functools.partial(_rms_norm, norm)
        base.__dict__.update(encode=encode, encode_packed=encode)
        for module, name in activations:
            module.activation = _ACTIVATIONS[ops.ACTIVATIONS[name]]
        yield
    finally:
        hook.remove()
        for name in ("encode", "encode_packed"):
            base.__dict__.pop(name, None)
        for module, name in activations:
            module.activation = name
        for norm in norms:
            del norm.forward


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    normalized: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.scale()
    return normalized


@dataclass(frozen=True)
class _PaddedBatch(PackedBatch):
    """A batch that stays padded, [B, S, ...]: rows of padding are computed too, and no token attends to them. Reshapes
    from [B, S] to [T] and back would give a tracer of dynamic sizes conditions that it cannot prove."""

    mask: Tensor | None = None  # bool [B, S]: true for tokens

    def pack(self, x: Tensor) -> Tensor:
        return x

    def unpack(self, x: Tensor) -> Tensor:
        return x

    def per_sequence(self, x: Tensor, *, fill: float) -> Tensor:
        assert self.mask is not None
        return torch.where(self.mask[(...,) + (None,) * (x.dim() - 2)], x, fill)

    def first_tokens(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def last_tokens(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        assert self.mask is not None
        columns = torch.arange(x.shape[1], device=x.device).expand_as(self.mask)
        there = self.mask if chosen is None else self.mask & chosen
        first = columns.where(self.mask, x.shape[1] - 1).amin(1)
        last = torch.maximum(columns.where(there, -1).amax(1), first)
        return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)


def _encoded(
    base: TextModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    hidden_states: bool,
    attentions: bool,
) -> Encoded:
    """The states [B, S, C] of a padded batch, in plain torch, and those of all layers and their attention weights if
    they are requested."""
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    full = PackedBatch.full(input_ids)
    boundaries = functional.pad(attention_mask.sum(1).cumsum(0), (1, 0))
    batch = _PaddedBatch(boundaries, full.max_seqlen, full.tokens, full.shape, mask=attention_mask != 0)
    positions = base.positions(input_ids, input_ids, None, batch)
    if positions is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    of_layers = base.reads_segments
    x = base.embeddings(input_ids, position_ids=positions, segment_ids=None if of_layers else token_type_ids)
    relative: Tensor | float = 0.0
    if isinstance(base, RelativeBias):
        relative = base.bias_at(torch.arange(input_ids.shape[1], device=input_ids.device)[None])
    distances: Relative | None = None
    if _reads_distances(base):
        distances = base.attention_options(batch, 0, **({"segments": token_type_ids} if of_layers else {}))["relative"]
    states, weights = [], []
    for layer in base.encoder.in_order():
        states.append(x)
        bias = _bias(layer, attention_mask) + relative
        if distances is None:
            q, k, v = _heads(layer, x)
        else:
            q, k, v, added = _disentangled(layer, x, distances)
            bias = bias + added
        weights.append(_weights(layer, q, k, bias))
        x = _layer(layer, x, _context(weights[-1], v))
    if base.encoder.final_norm is not None:
        x = base.encoder.final_norm(x)
    return Encoded(x, batch, (*states, x) if hidden_states else None, tuple(weights) if attentions else None)


def _bias(layer: PackedLayer, attention_mask: Tensor) -> Tensor:
    """[B, 1, 1 or S, S], added to the attention scores. It has the lowest finite number instead of -inf, so that rows
    of padding have no NaN."""
    lowest = torch.finfo(torch.float32).min
    left, right = layer.window
    allowed = (attention_mask != 0)[:, None, None, :]
    if left is not None or right is not None:
        index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        distance = index[None, :] - index[:, None]  # of the key from the query
        for bound, beyond in ((left, -distance), (right, distance)):
            if bound is not None and bound >= 0:
                allowed = allowed & (beyond <= bound)
    return torch.where(allowed, 0.0, lowest)


def _heads(layer: PackedLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, H, S, D] of a layer's input, with their rotations."""
    if layer.norm_first and layer.norm1 is not None:  # ModernBERT's first layer has none
        x = layer.norm1(x)
    if not isinstance(layer, RotaryLayer):
        sizes = (3 * layer.heads, layer.width // layer.heads)
        return layer.qkv(x).unflatten(-1, sizes).transpose(1, 2).split(layer.heads, 1)
    heads = layer.qkv(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
    q, k, v = layer.split_heads(heads)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    groups = layer.heads // layer.kv_heads
    if layer.theta is None:
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    tables = rotary_tables(layer.theta, torch.arange(x.shape[1], device=x.device), layer.head_dim, like=x)
    k, v = (heads.repeat_interleave(groups, 1) for heads in (_rotated(k, *tables), v))
    return _rotated(q, *tables), k, v


def _disentangled(layer: Any, x: Tensor, distances: Relative) -> tuple[Tensor, ...]:
    """Queries, keys and values [B, H, S, D] of a layer of DeBERTa or XLNet, and what it adds to scaled scores."""
    heads, token = layer.project(x), torch.arange(x.shape[1], device=x.device)
    if distances.table is None or not layer.distances.terms:
        return (*(tensor.transpose(1, 2) for tensor in heads.unbind(2)), x.new_zeros(()))
    inputs = layer.token_inputs(heads, distances)
    rows = distances.rows[token[:, None] - token + (x.shape[1] - 1)][None, None]
    return (*(inputs[name].transpose(1, 2) for name in "qkv"), layer.padded_bias(inputs, rows, distances))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``ops.rotary`` of [B, H, S, D], by the halves of a head."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _weights(layer: PackedLayer, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """The attention weights [B, H, S, S]."""
    stated = layer.scale if isinstance(layer, (RotaryLayer, DisentangledLayer)) else None
    scale = 1 / math.sqrt(q.shape[-1]) if stated is None else stated
    return (torch.einsum("bhqd,bhkd->bhqk", q, k) * scale + bias).softmax(-1)


def _context(weights: Tensor, v: Tensor) -> Tensor:
    """The output of attention, [B, S, C]."""
    return torch.einsum("bhqk,bhkd->bqhd", weights, v).contiguous().flatten(2)


def _layer(layer: PackedLayer, x: Tensor, context: Tensor) -> Tensor:
    """The output [B, S, C] of a layer for its input and the output of its attention."""
    if layer.norm_first:
        x = x + layer.attention_output(context)[0]
        return x + _mlp(layer, layer.norm2(x))
    x = layer.norm1(x + layer.out(context))
    return layer.norm2(x + _mlp(layer, x))


def _mlp(layer: PackedLayer, x: Tensor) -> Tensor:
    activation: Any = layer.activation  # a function within _plain
    hidden = layer.up(x)
    if isinstance(layer, RotaryLayer) and not layer.has_gate:
        return layer.feed_forward_output(activation(hidden))[0]
    if isinstance(layer, RotaryLayer):
        gate, up = hidden.chunk(2, -1)
        return layer.feed_forward_output(activation(gate) * up)[0]
    return layer.down(activation(hidden))
