"""The selection of attention's backend: why each of them does not support a call, or is slower for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.attention import tuning
from fasttfm.kernels.attention.problem import UNLIMITED, AttentionProblem, window_bounds
from fasttfm.kernels.common.launch import block_memory, is_hopper, multiprocessors
from fasttfm.ops.attention_checks import Window, bounds_of
from fasttfm.ops.core.backends import dtype_name, refuse_native_cpu
from fasttfm.ops.core.backends import refuse_triton as refuse_triton_tensor


def sequences_of(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


_HEAD_DIMS = range(16, 257, 8)
_CUDA_HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
# Above 512 queries, Hopper's backward for heads of 64 keeps the queries of a tile of keys on chip: fits_ring() in
# kernels/attention/hopper/shared/window.h.
_WINDOW_QUERIES, _WINDOW_KEYS = 512, 321


def options_of(problem: AttentionProblem) -> dict[str, Any]:
    """The public options that the choice of a backend depends on."""
    return {
        "window": (problem.window_left, problem.window_right),
        "scale": problem.scale,
        "cu_seqlens": problem.cu_seqlens,
        "max_seqlen": problem.max_seqlen,
        "max_seqlen_k": problem.max_seqlen_k,
        "bias": problem.bias,
        "alibi_slopes": problem.alibi_slopes,
        "dropout_p": problem.p,
    }


def _refuse_head_dim(q: Tensor) -> str | None:
    return None if q.shape[-1] in _HEAD_DIMS else f"takes head dims of 16 to 256 in steps of 8, got {q.shape[-1]}"


def _refuse_bias(bias: Tensor | None, alibi_slopes: Tensor | None) -> str | None:
    if bias is None and alibi_slopes is None:
        return None
    return f"takes no {'alibi_slopes' if bias is None else 'bias'}"


def refuse_cpu(
    q: Tensor, *_: Tensor | None, bias: Tensor | None = None, alibi_slopes: Tensor | None = None, **__: Any
) -> str | None:
    return _refuse_bias(bias, alibi_slopes) or _refuse_head_dim(q) or refuse_native_cpu(q)


def refuse_cuda(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    **_: Any,
) -> str | None:
    """Hopper's own kernels: see kernels/attention/op.h."""
    if q.dtype not in _CUDA_DTYPES:
        return f"takes bfloat16 and float16, got {dtype_name(q.dtype)}"
    if q.shape[-1] not in _CUDA_HEAD_DIMS:
        return f"takes head dims of 32, 64, 80, 96, 128, 192 and 256, got {q.shape[-1]}"
    if dropout_p > 0 and q.shape[-1] not in (64, 128):
        return f"takes dropout with head dims of 64 and 128, got {q.shape[-1]}"
    left, right = window_bounds(causal, window)
    if _is_window(left, right) and q.shape[-1] not in (64, 128):
        return f"takes windows with head dims of 64 and 128, got {q.shape[-1]}"
    if _is_window(left, right) and dropout_p > 0:
        return f"takes windows without dropout, got a window of ({left}, {right}) and dropout_p {dropout_p}"
    if scale is not None and scale <= 0:
        return f"takes a scale above 0, got {scale}"
    for tensor in (q, k, v):
        if tensor is not None and not _tensor_map_takes(tensor):
            return (
                "takes tensors that start at a multiple of 16 bytes, with strides that are multiples of 8 and not 0,"
                f" got strides {tensor.stride()}"
            )
    if not q.is_cuda or not is_hopper(q.device):
        return "takes tensors on a GPU of compute capability 9.0"
    return _refuse_bias(bias, alibi_slopes)


def _tensor_map_takes(tensor: Tensor) -> bool:
    """Whether a TMA tensor map can describe a tensor."""
    if tensor.data_ptr() % 16:
        return False
    strides = tensor.stride()[:-1]
    return math.gcd(*strides) % 8 == 0 and (0 not in strides or tensor.numel() == 0)


def _is_window(left: int, right: int) -> bool:
    """Whether a call is neither full nor causal."""
    return left != UNLIMITED or right > 0


def refuse_cuda_backward(
    q: Tensor,
    k: Tensor | None = None,
    *_: Any,
    causal: bool = False,
    window: Window | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    **__: Any,
) -> str | None:
    """Why the Hopper backward does not support a call whose forward ``refuse_cuda`` accepts."""
    head_dim = q.shape[-1]
    longest, _longest_k = bounds_of(q, k, cu_seqlens_k, max_seqlen, max_seqlen_k)
    if head_dim == 32 and longest > 512:
        return f"goes backward with heads of 32 up to 512 queries, got {longest}"
    left, right = window_bounds(causal, window)
    wide = _is_window(left, right) and (min(left, right) < 0 or left + right > _WINDOW_KEYS)
    if wide and head_dim == 64 and longest > _WINDOW_QUERIES:
        most = f"up to {_WINDOW_KEYS} keys in addition to a query's own above {_WINDOW_QUERIES} queries"
        return f"goes backward with windows of {most}, got ({left}, {right})"
    sequences = sequences_of(q, cu_seqlens)
    return None if max(sequences, q.shape[-2]) < 2**16 else f"goes backward with up to 65535 sequences, got {sequences}"


def yield_cuda_backward(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    **_: Any,
) -> str | None:
    """Why Triton's backward is faster for a call (docs/notes/attention_designs.md); never with heads of more than 64.

    With heads of 64, one tile of Triton's kernel holds a head of up to 128 queries and keys. Up to 512 queries, a block
    of Hopper's kernel processes a head, so it needs half as many heads as SMs, unless sequences are short. Above that,
    blocks share a head by its tiles of 128 keys, so that nearly all SMs have work; with a window, by chunks of 512
    keys.
    """
    rows = math.prod(q.shape[: -3 if k is None else -2])
    bounds = bounds_of(q, k, cu_seqlens_k, max_seqlen, max_seqlen_k)
    sequences, sides = sequences_of(q, cu_seqlens), window_bounds(causal, window)
    return slower_backward(q.shape[-2:], sequences, rows, bounds, sides, multiprocessors(q))


def slower_backward(
    heads: Sequence[int],
    sequences: int,
    rows: int,
    bounds: tuple[int, int],
    window: tuple[int, int],
    processors: int,
) -> str | None:
    """The same in numbers: the heads of q and their columns, the sequences and rows of q, the longest sequences of q
    and k, and the SMs."""
    (count, columns), (longest, longest_k) = heads, bounds
    if columns > 64:
        return None
    if columns == 64 and max(bounds) <= 128:
        return f"is slower backward up to 128 queries and keys, got {longest} and {longest_k}"
    units = sequences * count
    if 256 < longest <= 512 and 2 * units < processors:
        return f"is slower backward below {processors // 2} heads of all sequences, above 256 queries, got {units}"
    if _is_window(*window):
        chunks = count * (sequences if longest_k <= 512 else rows // 512)
        few = f"is slower backward with windows below {processors // 2} chunks of 512 keys, got {chunks}"
        return few if 2 * chunks < processors else None
    if longest > 512 and _efficiency(sequences, count, longest, longest_k, processors) < 800:
        return f"is slower backward above 512 queries where it cannot use all SMs, got {units} heads"
    return None


def _efficiency(*sizes: int) -> int:
    """How evenly the CUDA backward distributes its work over the SMs, by its launcher's own rule."""
    thousandths: int = _native.core().attention_backward_efficiency(*sizes)
    return thousandths


def refuse_triton(q: Tensor, *_: Any, **__: Any) -> str | None:
    reason = _refuse_head_dim(q) or refuse_triton_tensor(q)
    if reason is None and q.is_cpu and q.dtype == torch.bfloat16:
        return "takes no bfloat16 in Triton's interpreter, whose matrix products take its bits for integers"
    return reason


def refuse_triton_backward(q: Tensor, *_: Any, **__: Any) -> str | None:
    return tuning.refuse_backward(q.shape[-1], q.element_size(), block_memory(q))


def refuse_nothing(*_: Any, **__: Any) -> str | None:
    return None
