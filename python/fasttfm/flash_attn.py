"""FlashAttention's functions, with the names, the order of arguments and the shapes of its Python package, over
``fasttfm.ops.attention``: code written for it changes one import.

    from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    from fasttfm.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Tensors may also be fp32, on any device that ``ops.attention`` supports. Every call is deterministic. Differences:

- ``softcap``, ``cache_leftpad`` and slopes for each sequence (``alibi_slopes`` of two dimensions) raise ValueError.
- ``return_attn_probs`` returns ``(out, softmax_lse, None)``: the weights after dropout, which FlashAttention returns
  for tests, are never in memory. A query without visible keys has an lse of -inf.
- Dropout uses torch's generator, but drops other elements than FlashAttention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.ops.core import checks
from fasttfm.ops.core.backends import dtype_name

Windows = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Windows = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of queries ``[B, Sq, H, D]`` to keys and values ``[B, Sk, Hk, D]``, Hk a divisor of H.

    ``causal`` and ``window_size`` align the last query with the last key. ``deterministic`` has no effect.
    """
    refuse("flash_attn_func", softcap=softcap, alibi_slopes=alibi_slopes)
    options: dict[str, Any] = {"dropout_p": dropout_p, "causal": causal, "window": window_size}
    return _attend(q, k, v, softmax_scale, alibi_slopes, return_attn_probs, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Result:
    """``flash_attn_func`` of ``qkv [B, S, 3, H, D]``, with its options."""
    return flash_attn_func(qkv, None, None, *options, **named)  # type: ignore[arg-type]  # read in place


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Result:
    """``flash_attn_func`` of ``q [B, Sq, H, D]`` and ``kv [B, Sk, 2, Hk, D]``, with its options."""
    k, v = _unpacked("flash_attn_kvpacked_func", kv, "[B, Sk, 2, Hk, D]")
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Windows = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """The same for packed sequences: ``q [Tq, H, D]``, ``k`` and ``v`` ``[Tk, Hk, D]``, and int32 boundaries
    ``[sequences + 1]``."""
    refuse("flash_attn_varlen_func", softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table)
    boundaries: dict[str, Any] = {"cu_seqlens": cu_seqlens_q, "max_seqlen": int(max_seqlen_q)}
    if cu_seqlens_k is not cu_seqlens_q:
        boundaries |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": int(max_seqlen_k)}
    options: dict[str, Any] = {"dropout_p": dropout_p, "causal": causal, "window": window_size}
    return _attend(q, k, v, softmax_scale, alibi_slopes, return_attn_probs, **options, **boundaries)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Result:
    """``flash_attn_varlen_func`` of ``qkv [T, 3, H, D]``, with its options."""
    boundaries: tuple[Any, ...] = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(qkv, None, None, *boundaries, *options, **named)  # type: ignore[arg-type]


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Result:
    """``flash_attn_varlen_func`` of ``q [Tq, H, D]`` and ``kv [Tk, 2, Hk, D]``, with its boundaries and options."""
    k, v = _unpacked("flash_attn_varlen_kvpacked_func", kv, "[Tk, 2, Hk, D]")
    return flash_attn_varlen_func(q, k, v, *options, **named)


def _unpacked(function: str, kv: Tensor, layout: str) -> tuple[Tensor, ...]:
    if kv.dim() != layout.count(",") + 1 or kv.shape[-3] != 2:
        raise checks.bad_value(function, "kv", layout, f"shape {tuple(kv.shape)}")
    return kv.unbind(-3)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
    **options: Any,
) -> Result:
    out = ops.attention(q, k, v, scale=scale, alibi_slopes=alibi_slopes, return_lse=return_attn_probs, **options)
    return (*out, None) if isinstance(out, tuple) else out


def refuse(function: str, **given: Any) -> None:
    """Raises for arguments of FlashAttention that are not supported. A soft cap of 0 means none."""
    for name, value in given.items():
        if name == "alibi_slopes":
            if value is not None and value.dim() != 1:
                expected = "[heads] (slopes for each sequence are not supported)"
                raise checks.bad_value(function, name, expected, f"shape {tuple(value.shape)}")
        elif isinstance(value, Tensor) or value:
            got = "a tensor" if isinstance(value, Tensor) else value
            raise checks.bad_value(function, name, "nothing (it is not supported)", got)


# ---- decoding: a cache of keys and values ----------------------------------------------------------------------------


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Windows = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries to a cache, to which the new keys and values are written first. Has no gradient.

    Args:
        q: ``[B, Sq, H, D]``.
        k_cache, v_cache: ``[caches, Sk, Hk, D]``, or with ``block_table`` ``[blocks, block size, Hk, D]``. They are
            changed in place if ``k`` and ``v`` are given.
        k, v: ``[B, Sn, Hk, D]``, written after the ``cache_seqlens`` tokens in the cache.
        rotary_cos, rotary_sin: ``[positions, R / 2]``: the first R columns of ``q`` and ``k`` are rotated by their
            position. Without ``causal`` and a window, all queries have the position of the first new token.
        cache_seqlens: int or int32 ``[B]``, the tokens in the cache before this call; all of ``k_cache`` by default.
        cache_batch_idx: ``[B]``: the cache of each sequence; by default the first B in order.
        block_table: int32 ``[B, blocks per sequence]``: the blocks of each sequence. The call copies them into one
            tensor.
        rotary_interleaved: Whether pairs are columns 0 and 1, 2 and 3, ...; otherwise column i and i + R / 2.
        num_splits: Has no effect.

    Returns:
        ``[B, Sq, H, D]``, with ``return_softmax_lse`` also ``[B, H, Sq]``.
    """
    op = "flash_attn_with_kvcache"
    refuse(op, softcap=softcap, cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes)
    _check_cache(op, q, k_cache, v_cache, k, v, block_table, cache_batch_idx)
    held = _held(op, cache_seqlens, q, k_cache, block_table)
    _check_capacity(op, k_cache, held, 0 if k is None else k.shape[1], block_table, cache_batch_idx)
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None or k is None:
            raise checks.bad_value(op, "rotary_cos", "rotary_cos, rotary_sin, k and v together", "only some of them")
        steps = torch.arange(q.shape[1], device=q.device)
        local = causal or any(side not in (None, -1) for side in window_size)
        positions = held[:, None] + (steps if local else steps * 0)
        q = ops.rotary(q, rotary_cos, rotary_sin, positions=positions, interleaved=rotary_interleaved)
        positions = held[:, None] + torch.arange(k.shape[1], device=q.device)
        k = ops.rotary(k, rotary_cos, rotary_sin, positions=positions, interleaved=rotary_interleaved)
    rows = torch.arange(q.shape[0], device=q.device) if cache_batch_idx is None else cache_batch_idx.long()
    if k is not None and v is not None:
        _append(k_cache, k, held, rows, block_table)
        _append(v_cache, v, held, rows, block_table)
        held = held + k.shape[1]
    if block_table is not None:
        blocks = torch.where(_used_blocks(held, block_table, k_cache.shape[1]), block_table, 0).long()
        keys, values = (cache[blocks].flatten(1, 2) for cache in (k_cache, v_cache))
    elif cache_batch_idx is None:
        keys, values = k_cache[: q.shape[0]], v_cache[: q.shape[0]]
    else:
        keys, values = k_cache[rows], v_cache[rows]
    return ops.attention(
        q,
        keys,
        values,
        lengths=torch.full_like(held, q.shape[1]),
        lengths_k=held,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )


def _check_cache(
    op: str,
    q: Tensor,
    cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> None:
    for name, value in (("q", q), ("k_cache", cache)):
        if value.dim() != 4:
            raise checks.bad_value(op, name, "4 dimensions", f"shape {tuple(value.shape)}")
    checks.check_shape(op, "v_cache", v_cache, cache.shape)
    if v_cache.dtype != cache.dtype:
        raise checks.bad_type(op, "v_cache", f"k_cache's {dtype_name(cache.dtype)}", dtype_name(v_cache.dtype))
    if (k is None) != (v is None):
        raise checks.bad_value(op, "v", "both k and v, or none", "one of them")
    if block_table is not None and cache_batch_idx is not None:
        raise checks.bad_value(op, "cache_batch_idx", "None next to block_table", "a tensor")
    if block_table is not None and block_table.shape[0] != q.shape[0]:
        raise checks.bad_value(op, "block_table", f"{q.shape[0]} rows, one per sequence", f"{block_table.shape[0]}")
    if block_table is None and cache_batch_idx is None and cache.shape[0] < q.shape[0]:
        raise checks.bad_value(op, "k_cache", f"at least {q.shape[0]} sequences, as q has", cache.shape[0])
    if cache_batch_idx is not None:
        checks.check_shape(op, "cache_batch_idx", cache_batch_idx, q.shape[:1])
    if k is not None and v is not None:
        for name, new in (("k", k), ("v", v)):
            checks.check_shape(op, name, new, (q.shape[0], k.shape[1], *cache.shape[2:]))
            if new.dtype != cache.dtype:
                raise checks.bad_type(op, name, f"the cache's {dtype_name(cache.dtype)}", dtype_name(new.dtype))


def _check_capacity(
    op: str, cache: Tensor, held: Tensor, new: int, block_table: Tensor | None, cache_batch_idx: Tensor | None
) -> None:
    """Raises if the cache has no room for a token, before anything is written. Not validated on a GPU."""
    if held.is_cuda or not len(held):
        return
    room = cache.shape[1] if block_table is None else cache.shape[1] * block_table.shape[1]
    least, most = int(held.min()), int(held.max())
    if least < 0 or most + new > room:
        got = f"{min(least, 0) or most} held and {new} new"
        raise checks.bad_value(op, "cache_seqlens", f"room for at most {room} tokens", got)
    name, chosen = "cache_batch_idx", cache_batch_idx
    if block_table is not None:
        name, chosen = "block_table", block_table[_used_blocks(held + new, block_table, cache.shape[1])]
    if chosen is not None and chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(cache):
        got = f"{int(chosen.min())} to {int(chosen.max())}"
        raise checks.bad_value(op, name, f"numbers from 0 to {len(cache) - 1}, as k_cache has", got)


def _used_blocks(held: Tensor, block_table: Tensor, size: int) -> Tensor:
    """Which of a sequence's blocks have tokens: bool like ``block_table``, whose other entries may be anything."""
    return torch.arange(block_table.shape[1], device=held.device) * size < held[:, None]


def _held(op: str, given: Any, q: Tensor, cache: Tensor, block_table: Tensor | None) -> Tensor:
    """int32 [B]: the tokens of each sequence in the cache."""
    if isinstance(given, Tensor):
        checks.check_index(op, "cache_seqlens", given)
        checks.check_shape(op, "cache_seqlens", given, q.shape[:1])
        return given.to(torch.int32)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
        raise checks.bad_type(op, "cache_seqlens", "an integer, a tensor or None", type(given).__name__)
    room = cache.shape[1] if block_table is None else cache.shape[1] * block_table.shape[1]
    return torch.full(q.shape[:1], room if given is None else given, dtype=torch.int32, device=q.device)


def _append(cache: Tensor, new: Tensor, held: Tensor, rows: Tensor, block_table: Tensor | None) -> None:
    """Writes ``new`` after the ``held`` tokens of each sequence."""
    positions = held[:, None].long() + torch.arange(new.shape[1], device=new.device)
    size = cache.shape[1]
    if block_table is None:
        cache[rows[:, None], positions] = new
    else:
        cache[block_table.long().gather(1, positions // size), positions % size] = new
