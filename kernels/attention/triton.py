"""Attention in Triton: launchers. Kernels are in triton_forward.py, triton_backward.py and triton_short.py, tiles
in tuning.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.attention import tuning
from fasttfm.kernels.attention.problem import UNLIMITED, AttentionProblem
from fasttfm.kernels.attention.triton_backward import MAX_BLOCK_M, _bwd_kv_kernel, _bwd_q_kernel
from fasttfm.kernels.attention.triton_bias import _bias_kernel
from fasttfm.kernels.attention.triton_forward import _fwd_kernel
from fasttfm.kernels.attention.triton_short import _short_bwd_kernel, _short_fwd_kernel
from fasttfm.kernels.common.launch import block_memory, cdiv, is_hopper, multiprocessors, next_power_of_2, on_device

_LOG2_E = math.log2(math.e)
_AXES = {name: (f"{name}_batch", f"{name}_row", f"{name}_head") for name in ("q", "k", "v", "dout", "dq", "dk", "dv")}


def _strides(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Strides of sequences, rows and heads of each tensor, the unit they are in, and whether offsets inside of a tile
    need 64 bits, as the kernels' arguments.

    A unit of 8 elements tells the compiler that rows start at whole vectors; where rows do not, the unit is 1.
    """
    strides = {}
    longest = tensors["q"].shape[-2:].numel()  # of the strides of rows; that of out, which is contiguous
    for name, tensor in tensors.items():
        tensor_strides, (batch, row, head) = tensor.stride(), _AXES[name]
        strides[batch] = tensor_strides[0] if len(tensor_strides) == 4 else 0
        strides[row], strides[head] = tensor_strides[-3], tensor_strides[-2]
        longest = max(longest, tensor_strides[-3])
    unit = 8 if math.gcd(*strides.values()) % 8 == 0 else 1
    wide = longest * MAX_BLOCK_M.value >= 2**31
    return {**{name: stride // unit for name, stride in strides.items()}, "UNIT": unit, "WIDE": wide}


def _common(q: Tensor, k: Tensor, problem: AttentionProblem) -> dict[str, Any]:
    """Arguments that every kernel takes, apart from its own tensors and tile sizes."""
    bias, q_bounds, k_bounds = problem.bias, problem.cu_seqlens, problem.key_cu_seqlens
    if problem.packed:
        q_layout = k_layout = "packed"
        k_bounds = q_bounds if k_bounds is None else k_bounds
    else:
        q_bounds = problem.lengths
        k_bounds = problem.key_lengths
        q_layout = "dense" if q_bounds is None else "lengths"
        k_layout = "dense" if k_bounds is None else "lengths"
    instead = q  # for missing tensors, which are not read
    head_dim = q.shape[-1]
    return {
        "q_bounds": instead if q_bounds is None else q_bounds,
        "k_bounds": instead if k_bounds is None else k_bounds,
        "seed": instead if problem.seed is None else problem.seed,
        "heads": q.shape[-2],
        "q_size": q.shape[-3],
        "k_size": k.shape[-3],
        "q_longest": min(problem.max_seqlen, q.shape[-3]),
        "k_longest": min(problem.max_seqlen_k, k.shape[-3]),
        "window_left": problem.window_left,
        "window_right": problem.window_right,
        "scale": problem.scale * _LOG2_E,
        "threshold": problem.threshold,
        "dropout_scale": problem.dropout_scale,
        "Q_LAYOUT": q_layout,
        "K_LAYOUT": k_layout,
        "FEATURES": (
            problem.window_left != UNLIMITED,
            problem.window_right != UNLIMITED,
            _bias_unit(bias),
            problem.alibi_slopes is not None,
            bias is None and problem.alibi_slopes is None and problem.scale > 0,
            problem.seed is not None,
        ),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "D": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
    }


def _bias_strides(bias: Tensor | None) -> tuple[int, int, int]:
    """The strides of sequences, heads and queries; 0 where all share the bias."""
    if bias is None:
        return 0, 0, 0
    return *(0 if bias.shape[axis] == 1 else bias.stride(axis) for axis in (0, 1)), bias.stride(2)


def _bias_unit(bias: Tensor | None) -> int:
    """The unit of a bias's strides, as in ``_strides``; 0 without a bias."""
    return 0 if bias is None else 8 if math.gcd(*_bias_strides(bias)) % 8 == 0 else 1


def _added(q: Tensor, problem: AttentionProblem) -> dict[str, Any]:
    """The kernels' arguments for terms that are added to the scores; q is passed in place of a missing tensor."""
    bias, slopes = problem.bias, problem.alibi_slopes
    batch, head, row = (stride // max(_bias_unit(bias), 1) for stride in _bias_strides(bias))
    return {
        "bias": q if bias is None else bias,
        "slopes": q if slopes is None else slopes,
        "bias_batch": batch,
        "bias_head": head,
        "bias_row": row,
    }


def _call(q: Tensor, problem: AttentionProblem) -> tuning.Call:
    keys, dropout = problem.max_seqlen_k, problem.seed is not None
    sizes = (q.shape[-1], q.element_size(), problem.max_seqlen, keys)
    return tuning.Call(is_hopper(q.device), *sizes, dropout, block_memory(q), problem.bias is not None)


def _even(problem: AttentionProblem, tiles: tuning.Tiles) -> bool:
    """Whether all sequences consist of whole tiles, at least one, as far as the host knows."""
    dense = not problem.packed and problem.lengths is None and problem.lengths_k is None
    sizes = (problem.max_seqlen, tiles.queries), (problem.max_seqlen_k, tiles.keys)
    return dense and all(size > 0 and size % tile == 0 for size, tile in sizes)


def _plain(problem: AttentionProblem) -> bool:
    """Whether nothing is added to scores: the kernels for short sequences do not support it."""
    return problem.bias is None and problem.alibi_slopes is None


def _tile_options(problem: AttentionProblem, tiles: tuning.Tiles) -> dict[str, Any]:
    """The arguments of the kernels for long sequences that depend on tiles."""
    return {**tiles.options(), "EVEN": _even(problem, tiles)}


def _short_options(q: Tensor, problem: AttentionProblem, tiles: tuning.Tiles) -> tuple[int, dict[str, Any]]:
    """Number of programs, and the arguments of the kernels for short sequences that depend on tiles."""
    items = problem.sequences(q) * q.shape[-2]
    options = tiles.options()
    options |= {"items": items, "EVEN": _even(problem, tiles), "STAGES": tiles.stages}
    bounded = problem.packed or problem.lengths is not None or problem.lengths_k is not None
    if bounded and problem.window_left == UNLIMITED and problem.window_right == UNLIMITED:
        # Where only loads and masks need the boundaries, the compiler loads them ahead too, and takes stages for that.
        options["STAGES"] = 2 * tiles.stages - 1
    working = min(items, tiles.programs * multiprocessors(q))
    return working + (q.shape[-2] if problem.packed else 0), options  # one for a head's rows after all sequences


def attention_fwd_triton(q: Tensor, k: Tensor, v: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    heads = q.shape[-2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse_shape = (heads, len(q)) if problem.packed else (len(q), heads, q.shape[1])
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    tensors = {"q": q, "k": k, "v": v}
    arguments = {**tensors, "out": out, "lse": lse, **_strides(tensors), **_common(q, k, problem)}
    arguments["group"] = heads // k.shape[-2]
    call = _call(q, problem)
    short = tuning.short_forward_tiles(call) if _plain(problem) else None
    with on_device(q):
        if short is not None:
            programs, options = _short_options(q, problem, short)
            _short_fwd_kernel[(programs,)](**arguments, **options)
        else:
            chosen = tuning.forward_tiles(call)
            tiles = max(cdiv(problem.max_seqlen, chosen.queries), 1)
            _fwd_kernel[(tiles * heads * (problem.sequences(q) + problem.packed),)](
                **arguments, **_added(q, problem), tiles=tiles, **_tile_options(problem, chosen)
            )
    return out, lse


def attention_bwd_triton(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: AttentionProblem,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Writes dq, dk and dv. ``out`` is contiguous."""
    if q.numel() == 0 or k.numel() == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    arguments = {**tensors, "lse": lse, **_strides(tensors), **_common(q, k, problem)}
    ungrouped = k.shape[-2] == q.shape[-2]
    short = tuning.short_backward_tiles(_call(q, problem)) if ungrouped and _plain(problem) else None
    with on_device(q):
        if short is not None:
            programs, options = _short_options(q, problem, short)
            _short_bwd_kernel[(programs,)](**arguments, **options)
        else:
            _backward_by_tile({**arguments, **_added(q, problem), "kv_heads": k.shape[-2]}, out, problem)


def _backward_by_tile(arguments: dict[str, Any], out: Tensor, problem: AttentionProblem) -> None:
    q, lse, heads = arguments["q"], arguments["lse"], arguments["heads"]
    call = _call(q, problem)
    if problem.packed:
        rows = len(q) + problem.sequences(q) * MAX_BLOCK_M.value
        size = heads * rows
    else:
        rows = cdiv(problem.max_seqlen, MAX_BLOCK_M.value) * MAX_BLOCK_M.value
        size = problem.sequences(q) * heads * rows
    arguments |= {"statistics": lse.new_empty(2 * size), "statistics_rows": rows, "statistics_size": size}
    chosen = tuning.query_tiles(call)
    tiles = max(cdiv(problem.max_seqlen, chosen.queries), 1)
    _bwd_q_kernel[(tiles * heads * (problem.sequences(q) + problem.packed),)](
        **_without(arguments, "dk", "dv"), out=out, tiles=tiles, **_tile_options(problem, chosen)
    )
    chosen = tuning.key_tiles(call)
    tiles = max(cdiv(problem.max_seqlen_k, chosen.keys), 1)
    prefetch = chosen.ahead > 0 and q.is_cuda
    _bwd_kv_kernel[(tiles * arguments["kv_heads"] * (problem.sequences(q) + problem.packed),)](
        **_without(arguments, "dq", "lse"),
        tiles=tiles,
        ahead=chosen.ahead * multiprocessors(q) if prefetch else 0,
        AHEAD=prefetch,
        KEYS_FIRST=chosen.keys_first,
        **_tile_options(problem, chosen),
    )


def attention_bias_bwd_triton(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: AttentionProblem, dbias: Tensor
) -> None:
    """Writes the gradient of the bias, [1 or B, 1 or H, rows, keys] with adjacent keys. ``out`` is contiguous."""
    if q.numel() == 0 or k.numel() == 0 or dbias.numel() == 0:
        dbias.zero_()
        return
    tensors = {"q": q, "k": k, "v": v, "dout": dout}
    common = _common(q, k, problem)
    chosen = tuning.bias_tiles(_call(q, problem))
    batches, heads, rows, keys = dbias.shape
    tiles = (cdiv(rows, chosen.queries), cdiv(keys, chosen.keys))
    with on_device(q):
        _bias_kernel[(tiles[0] * tiles[1] * heads * batches,)](
            **tensors,
            **_strides(tensors),
            **common,
            **_added(q, problem),
            out=out,
            lse=lse,
            dbias=dbias,
            dbias_batch=dbias.stride(0),
            dbias_head=dbias.stride(1),
            dbias_row=dbias.stride(2),
            sequences=problem.sequences(q),
            group=q.shape[-2] // k.shape[-2],
            query_tiles=tiles[0],
            key_tiles=tiles[1],
            bias_heads=heads,
            rows=rows,
            keys=keys,
            ALL_SEQUENCES=batches == 1,
            ALL_HEADS=heads == 1,
            **_tile_options(problem, chosen),
        )


def _without(arguments: dict[str, Any], *tensors: str) -> dict[str, Any]:
    """The arguments without some tensors and their strides."""
    left_out = {f"{tensor}{axis}" for tensor in tensors for axis in ("", "_batch", "_row", "_head")}
    return {name: value for name, value in arguments.items() if name not in left_out}
