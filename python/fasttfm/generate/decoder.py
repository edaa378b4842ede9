"""``CachedDecoder``: a causal model with a KV cache that reads prompts once, then one token per sequence and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.models.text_model import TextModel
from fasttfm.nn import PackedBatch, PackedLayer, RotaryLayer, RotaryTransformer
from fasttfm.nn.parts import layer_norm, packed_residual_norm
from fasttfm.nn.plain import is_plain, is_watched
from fasttfm.ops import linear
from fasttfm.ops.core.backends import triton_absent
from fasttfm.ops.layers import decode_layers, few_rows, stack
from fasttfm.ops.layers.decode_layers import DecodeLayers, DecoderLayers
from fasttfm.ops.layers.spec import Specs
from fasttfm.ops.layers.torch_executor import Cache, Inputs

# q, k and v as ``ops.attention`` takes them: one tensor [n, 3, H, D], or three tensors [n, heads, D].
Parts = tuple[Tensor, ...]
Attend = Callable[[int, PackedLayer, Parts], Tensor]  # takes a layer's index, the layer, and q, k and v
# The maximum number of rows for the fused kernels (ops.decode_linear). Few rows are bound by the bytes of the weights,
# and one kernel for a GEMM with its prologue and epilogue is faster; for more rows torch's GEMMs are.
FUSED_ROWS = 16
# The minimum number of rows for the GEMMs of ops/layers/few_rows.py, where the GPU has them; None turns them off. One
# row is faster with the fused kernels.
FEW_ROWS_FROM: int | None = 2


def body_of(model: Any) -> Any:
    """A causal language model without its head."""
    return getattr(model, model.names.prefix)


class CachedDecoder:
    """A causal model and its KV cache.

    Each sequence has a slot in the cache for a fixed number of tokens: [layers, sequences, H, capacity, D]. Sequences
    may differ in length. Their lengths are stored on the device, so that the launches of a step do not depend on them
    and can be captured in a CUDA graph. The stream on which its owner calls it orders the cache, and only that one: a
    session's stream, or the caller's in a beam search, whose cache no later call uses.
    """

    def __init__(self, model: TextModel, capacity: int, sequences: int | None = None, *, fused: bool = False) -> None:
        """``capacity`` is the maximum number of tokens in a sequence, ``sequences`` the number of slots (by default the
        number of the first prompts), ``fused`` whether steps on a GPU use the kernels for few rows."""
        self.model = model
        self.layers = model.encoder.in_order()
        self._rotary = model.encoder if isinstance(model.encoder, RotaryTransformer) else None
        _check_calls(model)
        self.capacity, self.sequences, self.fused = capacity, sequences, fused
        self.keys = self.values = torch.empty(
            0, dtype=torch.float32, device="cpu"
        )  # [layers, sequences, H, capacity, D]
        self.lengths = torch.empty(0, dtype=torch.int32, device="cpu")  # [sequences]: tokens in the cache
        self._arrivals = torch.empty(0, dtype=torch.int32, device="cpu")  # counters of ops.decode_attention
        self._few_rows: tuple[Any, str | None] = None, None  # a step's state, and what few_rows.refuse returned for it
        self._one_kernel = DecodeLayers()
        self._decoder_layers: tuple[Any, DecoderLayers | str] = None, ""  # a step's state, and what the kernel reads

    # ---- prompts ----

    @torch.no_grad()
    def read(self, ids: Tensor, batch: PackedBatch, slots: Tensor | None = None) -> Tensor:
        """Starts sequences with the packed prompts ``ids`` [T] in these ``slots`` (int64) of the cache, by default the
        first ones. Returns the hidden state [B, C] of the last token of each."""
        cu_seqlens = batch.cu_seqlens
        sequences = cu_seqlens.shape[0] - 1
        if slots is None:
            slots = torch.arange(sequences, device=ids.device)
        numbers = ops.position_ids_from_cu_seqlens(cu_seqlens, total=batch.tokens)
        owners = torch.searchsorted(cu_seqlens[1:], torch.arange(batch.tokens, device=ids.device), right=True)
        rows = slots[owners]
        if self.sequences is None:
            self.sequences = sequences
        embedded: Tensor = self.model.embeddings(ids, cu_seqlens)
        x = self._read_whole(embedded, batch, numbers, rows)
        if x is None:
            x = self._read_by_ops(embedded, batch, numbers, rows)
        self.lengths[slots] = cu_seqlens.diff()
        return x.index_select(0, cu_seqlens[1:] - 1)

    def _read_whole(self, x: Tensor, batch: PackedBatch, numbers: Tensor, rows: Tensor) -> Tensor | None:
        """The states of all tokens, by one call of the core, which writes the cache; None if the core does not run the
        layers."""
        call = self._described(x, batch.cu_seqlens, batch.max_seqlen, numbers)
        if call is None:
            return None
        specs, inputs, parameters = call
        attention = specs[0].attention
        self._allocate(inputs.x, attention.kv_heads, attention.head_dim)
        cache = Cache(self.keys, self.values, rows * (attention.kv_heads * self.capacity) + numbers)
        return stack.run_cached(specs, inputs._replace(cache=cache), parameters)

    def _described(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, positions: Tensor
    ) -> tuple[Specs, Inputs, list[Tensor | None]] | None:
        """The layers as data, the inputs of their plan, and their parameters; None if the layers have to run one by
        one."""
        encoder = self.model.encoder
        tables = {} if self._rotary is None else self._rotary.tables(x, self.capacity)
        described = encoder.described([*tables])
        if described is None or torch.compiler.is_compiling():
            return None
        specs, parameters = described
        inputs = encoder.inputs_of(x, cu_seqlens, max_seqlen, tables, positions)
        (x,) = linear.autocast(inputs.x)
        return specs, inputs._replace(x=x), parameters

    def _read_by_ops(self, x: Tensor, batch: PackedBatch, numbers: Tensor, rows: Tensor) -> Tensor:
        """The same layer by layer."""

        def attend(index: int, layer: PackedLayer, parts: Parts) -> Tensor:
            _, k, v = _separate(parts)
            self._allocate(k, *k.shape[1:])
            self.keys[index][rows, :, numbers] = k
            self.values[index][rows, :, numbers] = v
            sizes: dict[str, Any] = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen}
            out = ops.attention(*parts, window=layer.window, scale=_scale(layer), **sizes)
            assert isinstance(out, Tensor)
            return out

        return self._run(x, attend, numbers)

    def _allocate(self, like: Tensor, heads: int, width: int) -> None:
        """Allocates the cache for keys of ``heads`` times ``width`` columns on the first call, with ``like``'s dtype
        and device; outside of inference mode, because later calls may be outside of it."""
        if self.keys.numel():
            if like.dtype != self.keys.dtype:
                expected = f"{self.keys.dtype}, in which the cache was made, with or without autocast as then"
                raise ValueError(f"generate: autocast: expected {expected}, got {like.dtype}")
            return
        assert self.sequences is not None
        shape = (len(self.layers), self.sequences, heads, self.capacity, width)
        device = like.device
        with torch.inference_mode(False):
            self.values, keys = (torch.zeros(shape, dtype=like.dtype, device=device) for _ in range(2))
            self.lengths = torch.zeros(self.sequences, dtype=torch.int32, device=device)
            self._arrivals = torch.zeros(self.sequences, heads, dtype=torch.int32, device=device)
            self.keys = keys  # last: it says that all are made

    def copy(self, source: Tensor, target: Tensor, tokens: int | None = None) -> None:
        """Copies sequences, or only their first ``tokens``, from slots ``source`` to slots ``target``: int64 [n] each.
        All slots are read before any is written."""
        for cache in (self.keys, self.values):
            for layer in cache:
                layer[target, :, :tokens] = layer[source, :, :tokens]
        self.lengths[target] = self.lengths[source]

    # ---- steps ----

    @torch.no_grad()
    def step(self, ids: Tensor, active: Tensor | None = None) -> Tensor:
        """Appends one token ``ids`` [n] to each of the first n sequences and returns its hidden state [n, C]. Only the
        ``active`` sequences (bool [n], by default all) keep the token. Does not synchronize with the GPU."""
        x = self._step(ids)
        self._count(len(ids), active)
        return x

    @torch.no_grad()
    def next_logits(self, head: Any, ids: Tensor, active: Tensor | None = None) -> Tensor:
        """As ``step``, but returns the logits [n, V] of ``head``."""
        if not self._is_fusable(ids) or not is_plain(head):
            return logits_of(head, self.step(ids, active))
        if (normalized := self._step_in_one_kernel(ids)) is not None:
            logits = _fused(normalized, head.decoder, torch.float32)
        elif FEW_ROWS_FROM is not None and len(ids) >= FEW_ROWS_FROM and self._refuse_few_rows(ids) is None:
            x = self._step_few_rows(ids)
            logits = _fused(x, head.decoder, torch.float32) if len(ids) <= FUSED_ROWS else logits_of(head, x)
        elif len(ids) <= FUSED_ROWS:
            logits = self._step_fused(ids, head.decoder)
        else:
            return logits_of(head, self.step(ids, active))
        self._count(len(ids), active)
        return logits

    def reset_workspace(self) -> None:
        """Starts again with the first tag of the kernel for all layers, on the stream that orders the cache."""
        self._one_kernel.reset()

    def _count(self, rows: int, active: Tensor | None) -> None:
        self.lengths[:rows].add_(1 if active is None else active)

    def _attend(self, index: int, layer: PackedLayer, parts: Parts, overlap: bool = False) -> Tensor:
        q, k, v = _separate(parts)
        rows = len(q)
        keys, values = (cache[index, :rows].transpose(1, 2) for cache in (self.keys, self.values))
        lengths = self.lengths[:rows]
        if q.is_cuda and not self.fused:
            slots = torch.arange(rows, device=q.device), lengths.long()
            keys[slots], values[slots] = k, v
            options: dict[str, Any] = {"window": layer.window, "scale": _scale(layer), "lengths_k": lengths + 1}
            out = ops.attention(q[:, None], keys, values, **options)
            assert isinstance(out, Tensor)
            return out
        left, _ = layer.window
        return ops.decode_attention(
            q,
            k,
            v,
            keys,
            values,
            lengths,
            scale=_scale(layer),
            window=None if left < 0 else left,
            arrived=self._arrivals[:rows],
            overlap=overlap,
        )

    def _step(self, ids: Tensor) -> Tensor:
        lengths = self.lengths[: len(ids)]
        positions = lengths.long()
        placed = {} if self._rotary is not None else {"position_ids": positions}
        x: Tensor = self.model.embeddings(ids, **placed)
        whole = self._step_whole(x, positions, lengths) if x.is_cpu else None
        return self._run(x, self._attend, positions) if whole is None else whole

    def _step_whole(self, x: Tensor, positions: Tensor, lengths: Tensor) -> Tensor | None:
        """The states of new tokens by one call of the core on a CPU; None if it does not run the layers."""
        boundaries = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)
        call = self._described(x, boundaries, 1, positions)
        if call is None or call[1].x.dtype != self.keys.dtype:
            return None
        specs, inputs, parameters = call
        cache = Cache(self.keys, self.values, lengths=lengths)
        return stack.run_cached(specs, inputs._replace(cache=cache), parameters)

    def _is_fusable(self, ids: Tensor) -> bool:
        """Whether the kernels of a step may read the parameters of a pre-LN model instead of calling its modules."""
        encoder = self.model.encoder
        if self._rotary is not None or not self.fused or not ids.is_cuda or triton_absent() is not None:
            return False
        if encoder.final_norm is None or torch.is_autocast_enabled("cuda") or self.keys.dtype == torch.float64:
            return False
        return is_plain(encoder.final_norm, *self._modules())

    def _modules(self) -> list[Any]:
        return [module for layer in self.layers for module in (layer.norm1, *layer.block_modules(None)[:5])]

    def _parameters(self) -> list[Tensor]:
        modules = [*self._modules(), self.model.encoder.final_norm]
        return [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]

    def _refuse_few_rows(self, ids: Tensor) -> str | None:
        """Why a step does not run on the kernels for few rows; None if it does. The parameters are validated again only
        if one of their properties that the reason depends on has changed."""
        parameters = self._parameters()
        state = len(ids), ids.device, _properties(parameters)
        if state != self._few_rows[0]:
            self._few_rows = state, few_rows.refuse(len(ids), ids.device, parameters)
        return self._few_rows[1]

    def _step_in_one_kernel(self, ids: Tensor) -> Tensor | None:
        """Returns the hidden states after the final LayerNorm; None if the kernel for all layers does not support the
        step."""
        if len(ids) > decode_layers.MOST_ROWS:
            return None
        state = len(ids), self.keys.data_ptr(), _properties(self._parameters())
        if state != self._decoder_layers[0]:
            layers = DecoderLayers.of(self.layers, self.model.encoder.final_norm)
            if isinstance(layers, DecoderLayers):
                layers = decode_layers.refuse(layers, len(ids), self.keys) or layers
            self._decoder_layers = state, layers
        layers = self._decoder_layers[1]
        if isinstance(layers, str):
            return None
        lengths = self.lengths[: len(ids)]
        x: Tensor = self.model.embeddings(ids, position_ids=lengths.long())
        if x.dtype != self.keys.dtype:
            return None
        return self._one_kernel.run(x, layers, self.keys, self.values, lengths)

    def _step_few_rows(self, ids: Tensor) -> Tensor:
        """Returns the hidden states after the final LayerNorm. The residual stream is fp32. Kernels overlap as in
        ``_step_fused``."""
        embedded: Tensor = self.model.embeddings(ids, position_ids=self.lengths[: len(ids)].long())
        dtype, stream = self.layers[0].qkv.weight.dtype, embedded.float()
        x = layer_norm(self.layers[0].norm1, embedded).to(dtype)
        following = [*(layer.norm1 for layer in self.layers[1:]), self.model.encoder.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            qkv = few_rows.product(x, layer.qkv.weight, layer.qkv.bias).unflatten(1, (3, layer.heads, -1))
            context = self._attend(index, layer, (qkv,), overlap=True).flatten(1)
            parts = few_rows.gemm_parts(context, layer.out.weight)
            x, stream = few_rows.add_norm(parts, stream, layer.out.bias, layer.norm2, dtype)
            hidden = few_rows.product(x, layer.up.weight, layer.up.bias, activation=layer.activation)
            parts = few_rows.gemm_parts(hidden, layer.down.weight)
            x, stream = few_rows.add_norm(parts, stream, layer.down.bias, next_norm, dtype)
        return x

    def _step_fused(self, ids: Tensor, decoder: Any) -> Tensor:
        """Runs a step as one kernel per GEMM, which includes LayerNorm, activation and residual addition. Returns fp32
        logits; the residual stream is fp32 too. No kernel of a step writes a parameter, so each may load its weights
        while the previous kernel still runs (``overlap``)."""
        positions = self.lengths[: len(ids)].long()
        x: Tensor = self.model.embeddings(ids, position_ids=positions)
        dtype = x.dtype
        for index, layer in enumerate(self.layers):
            qkv = _fused(x, layer.qkv, dtype, norm=layer.norm1)
            context = self._attend(index, layer, (qkv.unflatten(1, (3, layer.heads, -1)),), overlap=True)
            x = _fused(context.flatten(1), layer.out, torch.float32, residual=x)
            hidden = _fused(x, layer.up, dtype, norm=layer.norm2, activation=layer.activation)
            x = _fused(hidden, layer.down, torch.float32, residual=x)
        return _fused(x, decoder, torch.float32, norm=self.model.encoder.final_norm)

    # ---- layers ----

    def _run(self, x: Tensor, attend: Attend, positions: Tensor) -> Tensor:
        """Applies the layers to rows ``x`` [n, C] at ``positions`` [n] as ``nn.PackedTransformer`` does."""
        final_norm = self.model.encoder.final_norm
        if final_norm is None:
            for index, layer in enumerate(self.layers):
                branch, bias = self._attention(index, x, attend, positions)
                x, _ = packed_residual_norm(layer.norm1, branch, x, linear_bias=bias)
                branch, bias = layer.feed_forward(x)
                x, _ = packed_residual_norm(layer.norm2, branch, x, linear_bias=bias)
            return x
        stream = x
        following = [layer.norm1 for layer in self.layers[1:]] + [final_norm]
        first: Any = self.layers[0].norm1
        x = stream if first is None else layer_norm(first, stream)
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            branch, bias = self._attention(index, x, attend, positions)
            x, stream = packed_residual_norm(layer.norm2, branch, stream, linear_bias=bias)
            branch, bias = layer.feed_forward(x)
            x, stream = packed_residual_norm(next_norm, branch, stream, linear_bias=bias)
        return x

    def _attention(self, index: int, x: Tensor, attend: Attend, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """The attention block's output without its last bias, and this bias, which the residual addition adds."""
        layer: Any = self.layers[index]
        if self._rotary is None:
            parts: Parts = (layer.project(x),)
        else:
            parts = layer.attention_inputs(x, self._rotary.tables(x, self.capacity), positions)
        branch: tuple[Tensor, Tensor | None] = layer.attention_output(attend(index, layer, parts).flatten(1))
        return branch


def _properties(parameters: list[Tensor]) -> list[Any]:
    return [
        (parameter.data_ptr(), parameter.dtype, parameter.device, parameter.shape, parameter.stride())
        for parameter in parameters
    ]


def _scale(layer: Any) -> float | None:
    """The factor of the attention scores; None for the usual one."""
    return layer.scale if isinstance(layer, RotaryLayer) else None


def _separate(parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [n, heads, D]."""
    q, k, v = parts[0].unbind(1) if len(parts) == 1 else parts
    return q, k, v


def _fused(
    x: Tensor,
    linear: Any,
    dtype: torch.dtype,
    *,
    norm: Any = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    parameters = {} if norm is None else {"norm_weight": norm.weight, "norm_bias": norm.bias, "eps": norm.eps}
    return ops.decode_linear(
        x,
        linear.weight,
        linear.bias,
        **parameters,
        activation=activation,
        residual=residual,
        dtype=dtype,
        overlap=True,
    )


def logits_of(head: Any, x: Tensor) -> Tensor:
    """``head(x)``. Of few rows on a CPU by the core, which reads the weight once. On a GPU, if V is not a multiple of
    16, two GEMMs: cuBLAS has faster kernels for the first V // 16 * 16 columns."""
    vocab = head.decoder.out_features if is_plain(head) else 0
    if vocab and x.is_cpu:
        logits = linear.few_rows_linear(head.transform(x), head.decoder.weight, head.decoder.bias)
        if logits is not None:
            return logits
    if not x.is_cuda or vocab % 16 == 0 or head.decoder.bias is not None or torch.is_autocast_enabled("cuda"):
        result: Tensor = head(x)
        return result
    x = head.transform(x)
    logits = x.new_empty(len(x), -(-vocab // 16) * 16)[:, :vocab]
    weight, most = head.decoder.weight.t(), vocab // 16 * 16
    for part in (slice(most), slice(most, vocab)):
        torch.mm(x, weight[:, part], out=logits[:, part])
    return logits


def _check_calls(model: TextModel) -> None:
    """Raises ValueError for hooks and subclasses of the layers and of the modules that contain them: decoding calls the
    parts of layers, so their ``forward`` would not run."""
    for module in (model, model.encoder, *model.encoder.layers):
        if is_watched(module) or not type(module).__module__.startswith("fasttfm."):
            expected = "a model, an encoder and layers without hooks, wrappers or subclasses (their parts are called)"
            raise ValueError(f"generate: model: expected {expected}, got such a {type(module).__name__}")
    if any(layer.window[1] != 0 for layer in model.encoder.in_order()):
        raise ValueError("generate: model: expected causal attention, got layers that attend to later tokens")
