"""fasttfm's attention for transformers' attention interface. Importing this module registers it.

Two names are registered, with the same kernels. ``fasttfm`` reads the mask that transformers makes for each layer.
``fasttfm_flash`` follows the contract of FlashAttention: transformers and sentence-transformers flatten inputs instead
of padding them, and pass a sliding window as an argument instead of a mask, only for implementations with "flash" in
their name.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector

from fasttfm import ops
from fasttfm.nn.masks import Compaction
from fasttfm.patching import flash
from fasttfm.patching.masks import as_explicit, boundaries_of, create_mask, is_explicit, is_packed, layout_of

NAME = "fasttfm"
Window = tuple[int, int]  # keys before and after a query; -1 for no limit
_NO_WINDOW = (-1, -1)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: q, k and v are [B, H, S, D], the result is [B, Sq, H, D].

    For masks that lengths do not describe, and for position biases, transformers' sdpa runs; if attention weights are
    requested, plain torch.
    """
    return _forward(module, query, key, value, attention_mask, NAME, dropout, scaling, is_causal, kwargs)


def flash_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same with the contract of transformers' FlashAttention: ``sliding_window`` is respected, and
    ``cu_seq_lens_q`` (with its companions) or restarting position ids give the sequences that are packed in a row."""
    for name in ("cache", "block_table"):
        _refuse(flash.NAME, name, kwargs.get(name))
    size = kwargs.pop("sliding_window", None)
    limited = size is not None and key.shape[2] > size
    window = (size - 1, size - 1) if limited else _NO_WINDOW  # causal attention ignores the second number
    positions = kwargs.get("position_ids")
    if attention_mask is None and kwargs.get("cu_seq_lens_q") is None and query.shape[2] == key.shape[2]:
        attention_mask = _restarts(positions, query)
    kwargs["window"] = window
    return _forward(module, query, key, value, attention_mask, flash.NAME, dropout, scaling, is_causal, kwargs)


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    name: str,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    for refused in ("softcap", "s_aux"):
        _refuse(name, refused, kwargs.get(refused))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    wanted = captured("attentions") or bool(kwargs.get("output_attentions"))
    others = {name: kwargs.get(name) for name in ("position_bias", "cache")}
    if wanted or is_explicit(attention_mask) or any(other is not None for other in others.values()):
        window = kwargs.pop("window", _NO_WINDOW)
        explicit = as_explicit(attention_mask, causal, query.shape[2], key.shape[2], query.device, window)
        if wanted and others["position_bias"] is None:
            return _with_weights(module, query, key, value, explicit, dropout, scaling)
        options = {"dropout": dropout, "scaling": scaling, "is_causal": False}
        result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, explicit, **options, **kwargs)
        return result
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(q, k, v, mask=attention_mask, causal=causal, scale=scaling, p=dropout, **kwargs), None


def _refuse(implementation: str, name: str, value: Any) -> None:
    if value is not None:
        expected = "expected None (it is not supported)"
        raise ValueError(f'attn_implementation="{implementation}": {name}: {expected}, got a value')


_RESTARTS = "_fasttfm_restarts"


def _restarts(positions: Any, query: Tensor) -> Tensor | None:
    """The mask of a batch of one row in which several sequences are packed: position ids restart where one starts. They
    are read once for all layers, which synchronizes with the GPU; inference tensors, which do not count their changes,
    by each layer."""
    one_row = isinstance(positions, Tensor) and positions.dim() == 2 and len(positions) == len(query) == 1
    if not one_row or positions.shape[1] != query.shape[2] or masking_utils.is_tracing(positions):
        return None
    version = None if positions.is_inference() else positions._version
    known: tuple[int | None, Tensor | None] | None = getattr(positions, _RESTARTS, None)
    if known is None or version is None or known[0] != version:
        with torch.inference_mode(version is None):  # what is kept serves calls that train, too
            sequences = masking_utils.find_packed_sequence_indices(positions)
            known = version, None if sequences is None else boundaries_of(sequences)
        setattr(positions, _RESTARTS, known)
    return known[1]


def attend(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    p: float,
    window: Window = _NO_WINDOW,
    **kwargs: Any,
) -> Tensor:
    """``ops.attention`` of [B, S, H, D], or of one tensor [B, S, 3, H, D], with a mask that is not explicit.

    ``kwargs`` may have transformers' ``cu_seq_lens_q`` and its companions, for a batch of one row that packs several
    sequences.
    """
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "dropout_p": p}
    boundaries = kwargs.get("cu_seq_lens_q")
    if boundaries is not None:
        keys = kwargs.get("cu_seq_lens_k", boundaries)
        options |= {"cu_seqlens": boundaries.int(), "max_seqlen": _number(kwargs.get("max_length_q"))}
        if keys is not boundaries:
            options |= {"cu_seqlens_k": keys.int(), "max_seqlen_k": _number(kwargs.get("max_length_k"))}
        k, v = (None if x is None else x[0] for x in (k, v))
        return _attention(q[0], k, v, **options)[None]
    if is_packed(mask):
        batch = layout_of(mask, q)
        k, v = (None if x is None else batch.pack(x) for x in (k, v))
        return batch.unpack(
            _attention(batch.pack(q), k, v, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen, **options)
        )
    if mask is None:
        return _attention(q, k, v, **options)
    placed = causal or window != _NO_WINDOW  # whether the positions of queries and keys matter
    if mask.dim() == 1:
        # Only positions limit the queries too, so that padding's rows are those of transformers otherwise.
        return _attention(q, k, v, **{"lengths" if placed else "lengths_k": mask}, **options)
    if k is None or v is None:
        q, k, v = q.unbind(2)
    mask = mask.bool()
    keys = Compaction.of(~mask)
    k, v = keys.apply(k), keys.apply(v)
    if not placed or (window == _NO_WINDOW and q.shape[1] == 1):
        options["causal"] = False  # the only query is the last token, and attends to all
        return _attention(q, k, v, lengths_k=keys.lengths, **options)
    queries = Compaction.of(~mask[:, -q.shape[1] :])
    out = _attention(queries.apply(q), k, v, lengths=queries.lengths, lengths_k=keys.lengths, **options)
    return queries.undo(out)


def _number(length: Any) -> int | None:
    return None if length is None else int(length)


def captured(what: str) -> bool:
    """Whether the running model collects its layers' ``hidden_states`` or ``attentions``."""
    collected = _active_collector.get()
    return collected is not None and what in collected


def _attention(q: Tensor, k: Tensor | None, v: Tensor | None, **options: Any) -> Tensor:
    out = ops.attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


def _with_weights(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention in plain torch, and its weights [B, H, Sq, Sk] after dropout, as in transformers' eager attention."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    weights = functional.dropout(scores.softmax(-1, dtype=torch.float32).to(value.dtype), dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, create_mask)
AttentionInterface.register(flash.NAME, flash_forward)
AttentionMaskInterface.register(flash.NAME, functools.partial(create_mask, windows=True))
flash.register()
