"""Attention by fasttfm's kernels, as transformers' models call it. Importing this module registers it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector

from fasttfm import ops
from fasttfm.nn.masks import Compaction
from fasttfm.patching.masks import as_explicit, create_mask, is_explicit

NAME = "fasttfm"


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

    Masks that lengths do not describe, and position biases, are computed by transformers' sdpa; attention weights, if
    requested, by plain torch.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f'attn_implementation="{NAME}": {name}: expected None (it is not supported), got a value')
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    wanted = captured("attentions") or bool(kwargs.get("output_attentions"))
    others = {name: kwargs.get(name) for name in ("position_bias", "cache")}
    if wanted or is_explicit(attention_mask) or any(other is not None for other in others.values()):
        explicit = as_explicit(attention_mask, causal, query.shape[2], key.shape[2], query.device)
        if wanted and others["position_bias"] is None:
            return _with_weights(module, query, key, value, explicit, dropout, scaling)
        options = {"dropout": dropout, "scaling": scaling, "is_causal": False}
        result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, explicit, **options, **kwargs)
        return result
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(q, k, v, mask=attention_mask, causal=causal, scale=scaling, p=dropout, **kwargs), None


def attend(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    p: float,
    **kwargs: Any,
) -> Tensor:
    """``ops.attention`` of [B, S, H, D], or of a single [B, S, 3, H, D], under a mask that is not explicit.

    ``kwargs`` may hold transformers' ``cu_seq_lens_q`` and so on: a batch of one row that packs several sequences.
    """
    options: dict[str, Any] = {"causal": causal, "scale": scale, "dropout_p": p}
    boundaries = kwargs.get("cu_seq_lens_q")
    if boundaries is not None:
        keys = kwargs.get("cu_seq_lens_k", boundaries)
        options |= {"cu_seqlens": boundaries, "max_seqlen": kwargs.get("max_length_q")}
        if keys is not boundaries:
            options |= {"cu_seqlens_k": keys, "max_seqlen_k": kwargs.get("max_length_k")}
        k, v = (None if x is None else x[0] for x in (k, v))
        return _attention(q[0], k, v, **options)[None]
    if mask is None:
        return _attention(q, k, v, **options)
    if mask.dim() == 1:
        # Only causal attention limits the queries too, so that padding's rows are those of transformers otherwise.
        return _attention(q, k, v, **{"lengths" if causal else "lengths_k": mask}, **options)
    if k is None or v is None:
        q, k, v = q.unbind(2)
    keys = Compaction.of(~mask)
    k, v = keys.apply(k), keys.apply(v)
    if not causal or q.shape[1] == 1:
        options["causal"] = False  # the only query is the last token, and attends to all
        return _attention(q, k, v, lengths_k=keys.lengths, **options)
    queries = Compaction.of(~mask[:, -q.shape[1] :])
    out = _attention(queries.apply(q), k, v, lengths=queries.lengths, lengths_k=keys.lengths, **options)
    return queries.undo(out)


def captured(what: str) -> bool:
    """Whether the model that runs collects its layers' ``hidden_states`` or ``attentions``."""
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
    """Attention in plain torch, and its weights [B, H, Sq, Sk] after dropout, as transformers' eager gives them."""
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
