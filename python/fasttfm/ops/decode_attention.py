"""``decode_attention``: attention of one new token of each sequence to a KV cache, to which the token is appended."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.decode_attention import reference
from fasttfm.ops import checks
from fasttfm.ops.attention import attention
from fasttfm.ops.backends import (
    Backend,
    BackendTable,
    always,
    dtype_name,
    refuse_native_cpu,
    refuse_triton,
    requested,
    triton_absent,
)
from fasttfm.ops.library import needs_gradient, register

OP = "decode_attention"
MAX_HEAD_DIM = 256


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    arrived: Tensor | None = None,
    overlap: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Writes each sequence's new key and value into its cache, and attends with its new query to all tokens so far.

    Args:
        q: ``[B, H, D]``, fp32, bf16 or fp16 (fp64 on the reference backend).
        k, v: ``[B, Hk, D]``. Hk divides H: each key/value head has H / Hk query heads.
        key_cache, value_cache: ``[B, room, Hk, D]``, changed in place, with any strides: views of ``[B, Hk, room, D]``
            are read fastest.
        lengths: int32 ``[B]``: the number of tokens of each sequence in the cache before the call, and so the row of
            the new token. Not validated on a GPU: a length outside ``[0, room)`` is clamped.
        window: How many tokens before itself a token attends to; None for all.
        scale: The factor of the scores; 1 / sqrt(D) by default.
        arrived: int32 ``[B, Hk]`` of zeros: counters of the GPU kernel, which resets them to 0. By default each call
            allocates them. Calls that run at the same time must not share them.
        overlap: On GPUs from sm_90 on, lets the kernel start before the previous kernel has ended, and the next kernel
            before this one has (programmatic dependent launch).
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``[B, H, D]`` in q's dtype, contiguous. It has no gradient.
    """
    _check(q, k, v, key_cache, value_cache, lengths, arrived)
    left = _left(window)
    if scale is not None:
        checks.check_number(OP, "scale", scale, low=-math.inf, high=math.inf)
    TABLE.check_name(backend)
    if needs_gradient(q, k, v, key_cache, value_cache):
        raise checks.bad_value(OP, "q", "a call under torch.no_grad() (there is no gradient)", "one with gradients")
    factor = 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    tensors = (q, k, v, key_cache, value_cache, lengths, arrived)
    out: Tensor = decode_attention_op(*tensors, left, factor, overlap, requested(backend))
    return out


def _left(window: Any) -> Any:
    if window is None:
        return -1
    if isinstance(window, bool) or not isinstance(window, (int, torch.SymInt)):
        raise checks.bad_type(OP, "window", "a number of tokens or None", type(window).__name__)
    if window < 0:
        raise checks.bad_value(OP, "window", "a number of tokens from 0 on, or None", window)
    return window


def _check(q: Any, k: Any, v: Any, key_cache: Any, value_cache: Any, lengths: Any, arrived: Any) -> None:
    named = {"q": q, "k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache}
    for name, tensor in named.items():
        checks.check_floating(OP, name, tensor)
        if tensor.dtype != q.dtype:
            raise checks.bad_type(OP, name, f"{dtype_name(q.dtype)} like q", dtype_name(tensor.dtype))
        checks.check_device(OP, name, tensor, like=q)
    if q.dim() != 3 or q.shape[2] == 0:
        raise checks.bad_value(OP, "q", "shape (B, H, D)", f"shape {tuple(q.shape)}")
    batch, heads, width = q.shape
    if key_cache.dim() != 4 or key_cache.shape[0] != batch or key_cache.shape[1] < 1 or key_cache.shape[3] != width:
        raise checks.bad_value(
            OP, "key_cache", f"shape ({batch}, room, Hk, {width})", f"shape {tuple(key_cache.shape)}"
        )
    key_heads = key_cache.shape[2]
    if key_heads < 1 or heads % key_heads:
        raise checks.bad_value(OP, "key_cache", f"a divisor of q's {heads} heads", f"{key_heads} heads")
    checks.check_shape(OP, "value_cache", value_cache, key_cache.shape)
    for name, tensor in (("k", k), ("v", v)):
        checks.check_shape(OP, name, tensor, (batch, key_heads, width))
    for name, tensor, shape in (("lengths", lengths, (batch,)), ("arrived", arrived, (batch, key_heads))):
        if name == "arrived" and tensor is None:
            continue
        checks.check_index(OP, name, tensor)
        if tensor.dtype != torch.int32:
            raise checks.bad_type(OP, name, "a tensor of int32", dtype_name(tensor.dtype))
        checks.check_shape(OP, name, tensor, shape)
        checks.check_device(OP, name, tensor, like=q)
    if arrived is not None and not arrived.is_contiguous():
        raise checks.bad_value(OP, "arrived", "a contiguous tensor", f"strides {arrived.stride()}")


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(q: Tensor, *others: Any) -> Tensor:
    *given, backend = others
    out: Tensor = TABLE.select(backend, q).forward(q, *given)
    return out


def _fake(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


decode_attention_op = register(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor lengths,"
    " Tensor(c!)? arrived, SymInt left, float scale, bool overlap, str? backend) -> Tensor",
    _forward,
    _fake,
)


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_triton(*given: Any) -> Tensor:
    from fasttfm.kernels.decode_attention import triton

    out: Tensor = triton.decode_attention_triton(*given)
    return out


def _append_first(attend: Any) -> Any:
    """A forward that writes the new tokens into the caches and then calls ``attend``."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, _: Any, *options: Any
    ) -> Tensor:
        reference.append(keys, k, lengths)
        reference.append(values, v, lengths)
        out: Tensor = attend(q, k, v, keys, values, lengths, *options[:2])
        return out

    return forward


def _attend_cpu(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, left: int, scale: float
) -> Tensor:
    """The core's attention of one query per sequence, over caches that contain the new tokens."""
    tokens = (reference.last_row(keys, lengths) + 1).int()
    options: dict[str, Any] = {"window": None if left < 0 else (left, 0), "scale": scale, "lengths_k": tokens}
    out = attention(q[:, None], keys, values, **options, backend="cpu")
    assert isinstance(out, Tensor)
    return out[:, 0]


def _refuse_cpu(q: Tensor) -> str | None:
    width = q.shape[2]
    if width % 8 or not 16 <= width <= MAX_HEAD_DIM:
        return f"takes head dims of 16 to {MAX_HEAD_DIM} in steps of 8, got {width}"
    return refuse_native_cpu(q)


def _refuse_triton(q: Tensor) -> str | None:
    wide = q.shape[2] > MAX_HEAD_DIM
    return f"takes heads of up to {MAX_HEAD_DIM} columns, got {q.shape[2]}" if wide else refuse_triton(q)


TABLE = BackendTable(
    OP,
    (
        Backend("cpu", _native.missing, _refuse_cpu, _append_first(_attend_cpu)),
        Backend("triton", triton_absent, _refuse_triton, _forward_triton),
        Backend("reference", always, lambda *_: None, _append_first(reference.decode_attention)),
    ),
)
