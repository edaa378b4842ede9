"""``decode_attention``: attention of one new token of each sequence to a KV cache, to which the token is appended."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.decode_attention import reference
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import checked, converted
from fasttfm.ops.core.backends import (
    Backend,
    dtype_name,
    from_triton,
    refuse_native_cpu,
    refuse_triton,
    torch_reference,
    triton_absent,
)
from fasttfm.ops.core.declare import ForwardOp

NAME = "decode_attention"
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
        checks.check_number(NAME, "scale", scale, low=-math.inf, high=math.inf)
    factor = 1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    return OP(q, k, v, key_cache, value_cache, lengths, arrived, left, factor, overlap, backend=backend)


def _left(window: Any) -> Any:
    if window is None:
        return -1
    if isinstance(window, bool) or not isinstance(window, (int, torch.SymInt)):
        raise checks.bad_type(NAME, "window", "a number of tokens or None", type(window).__name__)
    if window < 0:
        raise checks.bad_value(NAME, "window", "a number of tokens from 0 on, or None", window)
    return window


def _check(q: Any, k: Any, v: Any, key_cache: Any, value_cache: Any, lengths: Any, arrived: Any) -> None:
    named = {"q": q, "k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache}
    for name, tensor in named.items():
        checks.check_floating(NAME, name, tensor)
        if tensor.dtype != q.dtype:
            raise checks.bad_type(NAME, name, f"{dtype_name(q.dtype)} like q", dtype_name(tensor.dtype))
        checks.check_device(NAME, name, tensor, like=q)
    if q.dim() != 3 or q.shape[2] == 0:
        raise checks.bad_value(NAME, "q", "shape (B, H, D)", f"shape {tuple(q.shape)}")
    batch, heads, width = q.shape
    if key_cache.dim() != 4 or key_cache.shape[0] != batch or key_cache.shape[1] < 1 or key_cache.shape[3] != width:
        raise checks.bad_value(
            NAME, "key_cache", f"shape ({batch}, room, Hk, {width})", f"shape {tuple(key_cache.shape)}"
        )
    key_heads = key_cache.shape[2]
    if key_heads < 1 or heads % key_heads:
        raise checks.bad_value(NAME, "key_cache", f"a divisor of q's {heads} heads", f"{key_heads} heads")
    checks.check_shape(NAME, "value_cache", value_cache, key_cache.shape)
    for name, tensor in (("k", k), ("v", v)):
        checks.check_shape(NAME, name, tensor, (batch, key_heads, width))
    for name, tensor, shape in (("lengths", lengths, (batch,)), ("arrived", arrived, (batch, key_heads))):
        if name == "arrived" and tensor is None:
            continue
        checks.check_index(NAME, name, tensor)
        if tensor.dtype != torch.int32:
            raise checks.bad_type(NAME, name, "a tensor of int32", dtype_name(tensor.dtype))
        checks.check_shape(NAME, name, tensor, shape)
        checks.check_device(NAME, name, tensor, like=q)
    if arrived is not None and not arrived.is_contiguous():
        raise checks.bad_value(NAME, "arrived", "a contiguous tensor", f"strides {arrived.stride()}")


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_reference(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, _: Any, *options: Any
) -> Tensor:
    reference.append(keys, k, lengths)
    reference.append(values, v, lengths)
    return reference.decode_attention(q, k, v, keys, values, lengths, *options[:2])


def _forward_cpu(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, _: Any, *options: Any
) -> Tensor:
    left, scale, _ = options
    q, k, v = (tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous() for tensor in (q, k, v))
    out = q.new_empty(q.shape)
    _native.core().decode_attention_cpu(q, k, v, keys, values, lengths.contiguous(), out, left, scale)
    return out


def _refuse_cpu(q: Tensor, keys: Tensor, values: Tensor) -> str | None:
    if q.shape[2] > MAX_HEAD_DIM:
        return f"takes heads of up to {MAX_HEAD_DIM} columns, got {q.shape[2]}"
    if keys.stride(3) != 1 or values.stride(3) != 1:
        return "takes caches with adjacent columns"
    return refuse_native_cpu(q)


def _refuse_triton(q: Tensor, *_: Tensor) -> str | None:
    wide = q.shape[2] > MAX_HEAD_DIM
    return f"takes heads of up to {MAX_HEAD_DIM} columns, got {q.shape[2]}" if wide else refuse_triton(q)


OP = ForwardOp(
    NAME,
    inputs=(
        *(checked("q"), checked("k"), checked("v")),
        *(checked("key_cache", changed="a"), checked("value_cache", changed="b"), checked("lengths")),
        checked("arrived", optional=True, changed="c"),
    ),
    options=(converted("left", "SymInt"), converted("scale", "float"), converted("overlap", "bool")),
    output=lambda q, *_: q.new_empty(q.shape),
    chosen_by=("key_cache", "value_cache"),
    backends=(
        Backend("cpu", _native.missing, _refuse_cpu, _forward_cpu),
        Backend("triton", triton_absent, _refuse_triton, from_triton(NAME, "decode_attention_triton")),
        torch_reference(_forward_reference),
    ),
)
