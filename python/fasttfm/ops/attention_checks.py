"""The checks of attention's arguments. Nothing here synchronizes with the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.ops.core import checks
from fasttfm.ops.core.backends import dtype_name

FUSED = 3  # q, k and v in one tensor

Window = Sequence[int | None]


class Options(NamedTuple):
    """The arguments of ``attention`` but q, k and v, as they come."""

    causal: bool = False
    window: Window | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    cu_seqlens: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen: int | None = None
    max_seqlen_k: int | None = None
    lengths: Tensor | None = None
    lengths_k: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    seed: Tensor | None = None

    def are_common(self) -> bool:
        """Whether only q, k, v, cu_seqlens, lengths, seed and dropout_p need a look: what else is given is in order."""
        return (
            type(self.causal) is bool
            and self.window is None
            and self.scale is None
            and self.cu_seqlens_k is None
            and (self.max_seqlen is None or self._is_bound(self.max_seqlen))
            and self.max_seqlen_k is None
            and self.lengths_k is None
            and self.bias is None
            and self.alibi_slopes is None
        )

    def _is_bound(self, max_seqlen: Any) -> bool:
        return type(max_seqlen) is int and max_seqlen >= 0 and self.cu_seqlens is not None


def check_call(op: str, q: Any, k: Any, v: Any, options: Options) -> None:
    packed = options.cu_seqlens is not None or options.cu_seqlens_k is not None
    _check_tensors(op, q, k, v, packed)
    queries = q.shape[0 if packed else 1]
    keys = queries if k is None else k.shape[0 if packed else 1]
    _check_boundaries(op, q, options.cu_seqlens, options.cu_seqlens_k, queries, keys)
    _check_bound(op, "max_seqlen", options.max_seqlen, packed)
    _check_bound(op, "max_seqlen_k", options.max_seqlen_k, packed)
    _check_lengths(op, "lengths", options.lengths, q, packed)
    _check_lengths(op, "lengths_k", options.lengths_k, q, packed)
    _check_window(op, options.causal, options.window)
    if options.scale is not None:
        checks.check_number(op, "scale", options.scale, low=-math.inf, high=math.inf)
    bounds = bounds_of(q, k, options.cu_seqlens_k, options.max_seqlen, options.max_seqlen_k)
    sequences = q.shape[0] if options.cu_seqlens is None else options.cu_seqlens.shape[0] - 1
    _check_bias(op, q, sequences, *bounds, bias=options.bias, alibi_slopes=options.alibi_slopes)
    checks.check_seed(op, options.seed, like=q)


def bounds_of(
    q: Tensor, k: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen: int | None, max_seqlen_k: int | None
) -> tuple[int, int]:
    """max_seqlen and max_seqlen_k where they may have been left out: by default the tokens there are. q may be qkv."""
    queries = q.shape[-4 if k is None else -3]
    if max_seqlen_k is None:
        keys = queries if k is None else k.shape[-3]
        max_seqlen_k = keys if max_seqlen is None or cu_seqlens_k is not None else max_seqlen
    return queries if max_seqlen is None else max_seqlen, max_seqlen_k


def check_values(
    op: str, tokens: int, longest: int, cu_seqlens: Tensor | None, lengths: Tensor | None, *, suffix: str = ""
) -> None:
    """On the CPU: one side's boundaries or lengths stay inside its tensor. They are not validated on the GPU, whose
    kernels keep inside whatever comes. ``suffix`` is that of the side's arguments."""
    if cu_seqlens is not None:
        checks.check_cu_seqlens_values(op, cu_seqlens, tokens, longest, argument=f"cu_seqlens{suffix}")
    elif lengths is not None and lengths.device.type == "cpu":
        for sequence, length in enumerate(lengths.tolist()):
            if not 0 <= length <= tokens:
                got = f"{length} of sequence {sequence}"
                raise checks.bad_value(op, f"lengths{suffix}", f"lengths in [0, {tokens}]", got)


def _check_tensors(op: str, q: Any, k: Any, v: Any, packed: bool) -> None:
    """q, k and v in the layouts that the op reads; k and v may both be None, and q is qkv then."""
    checks.check_floating(op, "q", q)
    tokens = "T" if packed else "B, S"
    if k is None and v is None:
        dimensions, layout = (4, f"[{tokens}, 3, H, D]") if packed else (5, f"[{tokens}, 3, H, D]")
        if q.dim() != dimensions or q.shape[-3] != FUSED or 0 in q.shape[-2:]:
            raise checks.bad_value(op, "q", f"qkv {layout}, as k and v are None", f"shape {tuple(q.shape)}")
        return
    if q.dim() != (3 if packed else 4) or 0 in q.shape[-2:]:
        expected = f"[{tokens}, H, D] {'next to' if packed else 'without'} cu_seqlens"
        raise checks.bad_value(op, "q", expected, f"shape {tuple(q.shape)}")
    for name, tensor in (("k", k), ("v", v)):
        checks.check_floating(op, name, tensor)
        checks.check_device(op, name, tensor, like=q)
        if tensor.dtype != q.dtype:
            raise checks.bad_type(op, name, f"q's {dtype_name(q.dtype)}", dtype_name(tensor.dtype))
    heads, columns = q.shape[-2:]
    if k.dim() != q.dim() or k.shape[-1] != columns or k.shape[-2] == 0 or (not packed and k.shape[0] != q.shape[0]):
        expected = f"[{'Tk' if packed else f'{q.shape[0]}, Sk'}, Hk, {columns}], as q is {tuple(q.shape)}"
        raise checks.bad_value(op, "k", expected, f"shape {tuple(k.shape)}")
    if heads % k.shape[-2]:
        raise checks.bad_value(op, "k", f"a number of heads that divides q's {heads}", k.shape[-2])
    checks.check_shape(op, "v", v, k.shape)


def _check_boundaries(op: str, q: Tensor, cu_seqlens: Any, cu_seqlens_k: Any, queries: int, keys: int) -> None:
    if cu_seqlens_k is not None and cu_seqlens is None:
        raise checks.bad_value(op, "cu_seqlens", "boundaries, as cu_seqlens_k is given", None)
    for name, value in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
        if value is None:
            continue
        checks.check_cu_seqlens(op, value, like=q, argument=name)
        if value.shape[0] < 2 or not value.is_contiguous():
            got = f"shape {tuple(value.shape)} with strides {value.stride()}"
            raise checks.bad_value(op, name, "a contiguous [sequences + 1], at least one sequence", got)
    if cu_seqlens_k is not None:
        checks.check_shape(op, "cu_seqlens_k", cu_seqlens_k, cu_seqlens.shape)
    elif cu_seqlens is not None and keys != queries:
        raise checks.bad_value(op, "k", f"q's {queries} tokens, as cu_seqlens_k is None", f"{keys} tokens")


def _check_bound(op: str, argument: str, value: Any, packed: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise checks.bad_type(op, argument, "an integer or None", type(value).__name__)
    if value < 0 or not packed:
        raise checks.bad_value(op, argument, "no negative number" if packed else "None without cu_seqlens", value)


def _check_lengths(op: str, argument: str, lengths: Any, q: Tensor, packed: bool) -> None:
    if lengths is None:
        return
    if not isinstance(lengths, Tensor):
        raise checks.bad_type(op, argument, "a tensor or None", type(lengths).__name__)
    if packed:
        raise checks.bad_value(op, argument, "None next to cu_seqlens", "a tensor")
    if lengths.dtype != torch.int32:
        raise checks.bad_type(op, argument, "a tensor of int32", dtype_name(lengths.dtype))
    checks.check_shape(op, argument, lengths, q.shape[:1])
    checks.check_device(op, argument, lengths, like=q)
    if not lengths.is_contiguous():
        raise checks.bad_value(op, argument, "a contiguous tensor", f"strides {lengths.stride()}")


def _check_window(op: str, causal: Any, window: Any) -> None:
    if not isinstance(causal, bool):
        raise checks.bad_type(op, "causal", "True or False", type(causal).__name__)
    if window is None:
        return
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise checks.bad_type(op, "window", "None or a pair (left, right)", type(window).__name__)
    for side in window:
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt, type(None))):
            raise checks.bad_type(op, "window", "integers or None", type(side).__name__)
        if side is not None and side < -1:
            raise checks.bad_value(op, "window", "numbers of keys, -1 or None for no limit", side)


def _check_bias(op: str, q: Tensor, sequences: int, queries: int, keys: int, *, bias: Any, alibi_slopes: Any) -> None:
    """``bias`` [1 or B, 1 or H, >= queries, >= keys] or without the first, and ``alibi_slopes`` [H]."""
    heads = q.shape[-2]
    if bias is not None:
        checks.check_floating(op, "bias", bias, optional=True)
        shared = bias.dim() == 3 or (bias.dim() == 4 and bias.shape[0] in (1, sequences))
        if not shared or bias.shape[-3] not in (1, heads) or bias.shape[-2] < queries or bias.shape[-1] < keys:
            expected = f"shape (1 or {sequences}, 1 or {heads}, at least {queries}, at least {keys})"
            raise checks.bad_value(op, "bias", f"{expected}, or without the first", f"shape {tuple(bias.shape)}")
        checks.check_device(op, "bias", bias, like=q)
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, Tensor):
            raise checks.bad_type(op, "alibi_slopes", "a tensor or None", type(alibi_slopes).__name__)
        if alibi_slopes.dtype not in (torch.float32, torch.float64):
            raise checks.bad_type(op, "alibi_slopes", "a tensor of float32", dtype_name(alibi_slopes.dtype))
        checks.check_shape(op, "alibi_slopes", alibi_slopes, (heads,))
        checks.check_device(op, "alibi_slopes", alibi_slopes, like=q)
    checks.check_double(op, q=q, bias=bias, alibi_slopes=alibi_slopes)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise checks.bad_value(
            op, "alibi_slopes", "a tensor that requires no gradient", "one that does; a bias has a gradient"
        )
