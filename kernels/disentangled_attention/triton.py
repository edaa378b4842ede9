"""Disentangled attention in Triton: launchers. Kernels are in triton_forward.py and triton_backward.py.

There is no matrix of all scores, in no direction. The gradients of the tables come as sums over diagonals of tiles,
``[chunks, H, diagonals, 2 BLOCK, D]`` in fp32, which are added up by distance and then by row of the table.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.launch import block_memory, cdiv, next_power_of_2, on_device
from fasttfm.kernels.common.rows import empty_output
from fasttfm.kernels.disentangled_attention.problem import Problem
from fasttfm.kernels.disentangled_attention.triton_backward import _bwd_kv_kernel, _bwd_positions_kernel, _bwd_q_kernel
from fasttfm.kernels.disentangled_attention.triton_forward import _fwd_kernel

_LOG2_E = math.log2(math.e)
BLOCK = 64  # dropout draws for 64 keys at a time
_TWO_STAGES = 132 * 1024  # bytes of shared memory of a program that loads tiles while it computes others
_CHUNKS = 8  # of sequences, each with its own sums of the tables' gradients


def _common(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> dict[str, Any]:
    """Arguments that every kernel takes. Tensors are [T, H, D]; a missing tensor, which is not read, is q."""
    cu_seqlens, mask, seed = problem.cu_seqlens, problem.mask, problem.seed
    tables, biases = (problem.position_keys, problem.position_queries), (problem.key_bias, problem.segment_bias)
    table = next((table for table in tables if table is not None), q)
    tensors = {"q": q, "k": k, "v": v, "position_keys": tables[0], "position_queries": tables[1]}
    tensors = {name: q if tensor is None else tensor for name, tensor in tensors.items()}
    tensors = {name: _adjacent(tensor.flatten(0, -3)) for name, tensor in tensors.items()}
    prefixes = {"position_keys": "keys", "position_queries": "queries"}
    strides = {
        f"{prefixes.get(name, name)}_{axis}": tensor.stride(index)
        for name, tensor in tensors.items()
        for index, axis in enumerate(("row", "head"))
    }
    threshold = philox.threshold(problem.p)
    return {
        **tensors,
        **strides,
        "key_bias": q if biases[0] is None else biases[0].contiguous(),
        "segment_bias": q if biases[1] is None else biases[1].contiguous(),
        "segments": q if problem.segments is None else problem.segments,
        "distance_rows": problem.distance_rows,
        "bounds": q if cu_seqlens is None else cu_seqlens,
        "mask": q if mask is None else mask.view(torch.uint8).flatten(),
        "seed": q if seed is None else seed,
        "total": tensors["q"].shape[0],
        "heads": q.shape[-2],
        "tiles": cdiv(problem.max_seqlen, BLOCK),
        "size": q.shape[-3],
        "longest": problem.max_seqlen,
        "table_rows": table.shape[0],
        "middle": len(problem.distance_rows) // 2,
        "scale": problem.scale * _LOG2_E,
        "threshold": threshold,
        "dropout_scale": philox.scale(threshold),
        "PACKED": cu_seqlens is not None,
        "MASKED": mask is not None,
        "TABLES": tuple(table is not None for table in tables),
        "BIASES": tuple(bias is not None for bias in biases),
        "DROPOUT": seed is not None,
        "PRECISION": precision(q.element_size()),
        "D": q.shape[-1],
        "BLOCK_D": max(16, next_power_of_2(q.shape[-1])),
        "BLOCK": BLOCK,
    }


def _adjacent(x: Tensor) -> Tensor:
    """The tensor with adjacent columns, which kernels read."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _options(q: Tensor, *, tables: bool = False) -> dict[str, int]:
    return tile_options(q.element_size(), q.shape[-1], block_memory(q), tables=tables)


def _sequences(q: Tensor, problem: Problem) -> int:
    return len(q) if problem.cu_seqlens is None else len(problem.cu_seqlens) - 1


def needed_memory(element_bytes: int, head_dim: int) -> int:
    """Bytes of shared memory that a program has to have, at most, with one stage."""
    wide = element_bytes * max(32, next_power_of_2(head_dim))
    return 99 * 1024 if wide <= 128 else 192 * 1024 if wide <= 256 else 2**31


def tile_options(element_bytes: int, head_dim: int, memory: int, *, tables: bool = False) -> dict[str, int]:
    """The launch options of a kernel, for programs with ``memory`` bytes of shared memory. ``tables``: whether it is
    the kernel of the tables' gradients.

    With heads of 64 columns in bf16 on an H200, the forward and the gradients of q, k and v take 0.58, 0.51 and 0.60
    times as long with 4 warps as with 8, although they spill more registers; the tables' gradients take 1.6 times as
    long.
    """
    if element_bytes * head_dim <= 128 and not tables:
        return {"num_warps": 4, "num_stages": 1}
    return {"num_warps": 8, "num_stages": 2 if element_bytes * head_dim <= 128 and memory >= _TWO_STAGES else 1}


def precision(element_bytes: int) -> str:
    """How the kernels multiply. Products of fp32 numbers are three of TF32: with exact ones these kernels, which have
    up to five tiles in registers, spill 9 to 14 KB."""
    return "tf32x3" if element_bytes == 4 else "tf32"


def disentangled_attention_forward_triton(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    problem, heads = Problem(*others), q.shape[-2]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((heads, q.shape[:-2].numel()), -math.inf, dtype=torch.float32, device=q.device)
    if q.numel() and problem.max_seqlen:
        arguments = _common(q, k, v, problem)
        with on_device(q):
            _fwd_kernel[(arguments["tiles"] * heads * _sequences(q, problem),)](
                **arguments, out=out, lse=lse, **_options(q)
            )
    return out, lse


def disentangled_attention_backward_triton(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    fields, (want_dkeys, want_dqueries, *_) = others[: len(Problem._fields)], others[len(Problem._fields) :]
    problem = Problem(*fields)
    biases = (problem.key_bias, problem.segment_bias)
    dbiases = [
        empty_output(q) if bias is None else torch.zeros(bias.shape, dtype=q.dtype, device=q.device) for bias in biases
    ]
    gradients = [torch.zeros(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)]
    tables = (problem.position_keys if want_dkeys else None, problem.position_queries if want_dqueries else None)
    if q.numel() == 0 or problem.max_seqlen == 0:
        table_gradients = [empty_output(q) if table is None else torch.zeros_like(table) for table in tables]
        return (*gradients, *table_gradients, *dbiases)
    arguments = _common(q, k, v, problem)
    arguments |= {"dout": dout.contiguous(), "lse": lse, "deltas": torch.empty_like(lse)}
    sequences, heads, tiles = _sequences(q, problem), arguments["heads"], arguments["tiles"]
    options = _options(q)
    grid = (tiles * heads * sequences,)
    with on_device(q):
        _bwd_q_kernel[grid](**arguments, out=out, dq=gradients[0], dsegment_bias=dbiases[1], **options)
        _bwd_kv_kernel[grid](**arguments, dk=gradients[1], dv=gradients[2], dkey_bias=dbiases[0], **options)
        table_gradients = [empty_output(q), empty_output(q)]
        if any(table is not None for table in tables):
            chunks = min(_CHUNKS, sequences)
            shape = (2, chunks, heads, 2 * tiles - 1, 2 * BLOCK, q.shape[-1])
            sums = torch.empty(shape, dtype=torch.float32, device=q.device)
            counts = {"sequences": sequences, "chunks": chunks}
            counts |= _options(q, tables=True)
            _bwd_positions_kernel[(heads * (2 * tiles - 1) * chunks,)](**arguments, sums=sums, **counts)
            for index, table in enumerate(tables):
                if table is not None:
                    table_gradients[index] = _by_row(sums[index], problem.distance_rows, table)
    return (*gradients, *table_gradients, *dbiases)


def _by_row(sums: Tensor, distance_rows: Tensor, table: Tensor) -> Tensor:
    """The gradient of a table [R, H, D], from the sums of diagonals [chunks, H, diagonals, 2 BLOCK, D].

    The upper half of a diagonal has the same distances as the lower half of the next. The order of all sums is fixed.
    """
    halves = sums.sum(0).unflatten(2, (2, BLOCK))
    heads, diagonals, _, _, columns = halves.shape
    distances = sums.new_zeros(heads, diagonals + 1, BLOCK, columns)
    distances[:, :-1] += halves[:, :, 0]
    distances[:, 1:] += halves[:, :, 1]
    middle, first = len(distance_rows) // 2, 1 - (diagonals + 1) // 2 * BLOCK  # the distance of the first element
    places = torch.arange(first, first + distances[0, :, :, 0].numel(), device=table.device) + middle
    rows = distance_rows.long()[places.clamp(0, 2 * middle)].clamp(0, len(table) - 1)
    gradient = sums.new_zeros(len(table), heads, columns)
    gradient = gradient.index_put((rows,), distances.flatten(1, 2).transpose(0, 1), accumulate=True)
    return gradient.to(table.dtype)
