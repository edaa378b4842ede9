"""Attention of one new token of each sequence to a KV cache in Triton (split-K); the formulas are in reference.py.

A program computes one sequence, one key/value head with all its query heads, and SPLIT keys. Programs without visible
keys return at once. The others store their partial sums; the last program to arrive adds them up in the order of the
keys and writes the result, so the result does not depend on which program that is. The number of programs and the
bounds of the splits depend on the shapes and not on the lengths: one CUDA graph works for all lengths, and repeated
calls give the same bits. The program whose split contains the new token writes its key and value into the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, cdiv, next_power_of_2, on_device
from fasttfm.kernels.common.triton.dependent_launch import launch_options, wait_for_inputs
from fasttfm.kernels.common.triton.launcher import launched_kernel

_LOG2_E = 1.4426950408889634


@triton.jit
def _combined(parts, sums, first, end, PART_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Merges the partial results of the splits from ``first`` to ``end``: [PART_G, BLOCK_D]."""
    heads = tl.arange(0, PART_G)
    columns = tl.arange(0, BLOCK_D)
    largest = tl.full([PART_G], float("-inf"), tl.float32)
    total = tl.zeros([PART_G], tl.float32)
    acc = tl.zeros([PART_G, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)  # up to _MOST_SPLITS: 32 bits for PART_G * BLOCK_D <= 2^15
        here = (splits < end)[:, None]
        at = splits[:, None] * PART_G + heads[None, :]
        # Other programs have written these: .cg bypasses L1, which is not coherent.
        m = tl.load(sums + at * 2, mask=here, other=float("-inf"), cache_modifier=".cg")
        weight = tl.load(sums + at * 2 + 1, mask=here, other=0.0, cache_modifier=".cg")
        places = at[:, :, None] * BLOCK_D + columns[None, None, :]
        values = tl.load(parts + places, mask=here[:, :, None], other=0.0, cache_modifier=".cg")
        new = tl.maximum(largest, tl.max(m, axis=0))
        # Padding rows of the group of heads have no scores: their maximum is -inf.
        base = tl.where(new == float("-inf"), 0.0, new)
        old = tl.exp2(largest - base)
        factor = tl.exp2(m - base[None, :])
        total = total * old + tl.sum(weight * factor, axis=0)
        acc = acc * old[:, None] + tl.sum(values * factor[:, :, None], axis=0)
        largest = new
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@launched_kernel
@triton.jit
def decode_attention_kernel(
    q,  # [B, H, D]
    k,  # [B, Hk, D]
    v,  # [B, Hk, D]
    key_cache,  # [B, room, Hk, D]
    value_cache,  # [B, room, Hk, D]
    lengths,  # int32 [B]
    out,  # [B, H, D] contiguous
    parts,  # fp32 [B, Hk, splits, PART_G, BLOCK_D]
    sums,  # fp32 [B, Hk, splits, PART_G, 2]: maximum and sum of a split
    arrived,  # int32 [B, Hk], 0 before and after
    room,
    left,
    scale_log2,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    v_stride_b,
    v_stride_h,
    keys_stride_b,
    keys_stride_t,
    keys_stride_h,
    keys_stride_d,
    values_stride_b,
    values_stride_t,
    values_stride_h,
    values_stride_d,
    D: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key/value head
    PART_G: tl.constexpr,  # GROUP padded for tensor cores: 1 or at least 16
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MANY: tl.constexpr,  # more than one split
    DEPENDENT: tl.constexpr,
):
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_inputs(DEPENDENT)
    length = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), room - 1)
    end = length + 1
    first_key = tl.maximum(length - left, 0) if HAS_WINDOW else 0
    if (split * SPLIT < end) & ((split + 1) * SPLIT > first_key):
        wide = sequence.to(tl.int64)
        wide_head = head.to(tl.int64)
        heads = tl.arange(0, PART_G)
        columns = tl.arange(0, BLOCK_D)
        wide_columns = columns.to(tl.int64)
        in_d = columns < D
        real = (heads < GROUP)[:, None] & in_d[None, :]
        query_heads = wide_head * GROUP + heads
        query = tl.load(q + wide * q_stride_b + query_heads[:, None] * q_stride_h + columns[None, :], real, other=0.0)
        new_key = tl.load(k + wide * k_stride_b + wide_head * k_stride_h + columns, mask=in_d, other=0.0)
        new_value = tl.load(v + wide * v_stride_b + wide_head * v_stride_h + columns, mask=in_d, other=0.0)
        keys = key_cache + wide * keys_stride_b + wide_head * keys_stride_h
        values = value_cache + wide * values_stride_b + wide_head * values_stride_h
        # The new token's key and value initialize the sums; the loop reads only older rows of the cache.
        has_new = length // SPLIT == split
        if has_new:
            at = length.to(tl.int64)
            tl.store(keys + at * keys_stride_t + wide_columns * keys_stride_d, new_key, mask=in_d)
            tl.store(values + at * values_stride_t + wide_columns * values_stride_d, new_value, mask=in_d)
        new_score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale_log2
        largest = tl.where(has_new, new_score, float("-inf"))
        total = tl.where(has_new, tl.full([PART_G], 1.0, tl.float32), 0.0)
        acc = tl.zeros([PART_G, BLOCK_D], tl.float32) + tl.where(has_new, new_value.to(tl.float32), 0.0)[None, :]
        stop = tl.minimum((split + 1) * SPLIT, length)
        for start in range(split * SPLIT, stop, BLOCK_N):
            places = start + tl.arange(0, BLOCK_N)
            seen = (places < length) & (places >= first_key)
            read = seen[:, None] & in_d[None, :]
            at = places.to(tl.int64)[:, None]
            key = tl.load(keys + at * keys_stride_t + wide_columns[None, :] * keys_stride_d, mask=read, other=0.0)
            value = tl.load(
                values + at * values_stride_t + wide_columns[None, :] * values_stride_d, mask=read, other=0.0
            )
            if PART_G == 1:
                scores = tl.sum(key.to(tl.float32) * query.to(tl.float32), axis=1)[None, :]
            else:
                scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            scores = tl.where(seen[None, :], scores * scale_log2, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, axis=1))
            base = tl.where(new == float("-inf"), 0.0, new)  # all keys of a block may be before the window
            weights = tl.exp2(scores - base[:, None])
            rescale = tl.exp2(largest - base)
            total = total * rescale + tl.sum(weights, axis=1)
            if PART_G == 1:
                added = tl.sum(tl.trans(weights) * value.to(tl.float32), axis=0)[None, :]
            else:
                added = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            acc = acc * rescale[:, None] + added
            largest = new
        results = out + (wide * tl.num_programs(1) * GROUP + query_heads[:, None]) * D + columns[None, :]
        if MANY:
            first_split = first_key // SPLIT
            end_split = (end + SPLIT - 1) // SPLIT
            if end_split - first_split == 1:
                tl.store(results, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
            else:
                row = wide * tl.num_programs(1) + head
                first_part = row * tl.num_programs(2) * PART_G
                at = first_part + split * PART_G + heads
                tl.store(sums + at * 2, largest)
                tl.store(sums + at * 2 + 1, total)
                tl.store(parts + at[:, None] * BLOCK_D + columns[None, :], acc)
                tl.debug_barrier()  # all threads have stored their parts before the program counts as arrived
                before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
                if before == end_split - first_split - 1:
                    base_parts, base_sums = parts + first_part * BLOCK_D, sums + first_part * 2
                    whole = _combined(base_parts, base_sums, first_split, end_split, PART_G, BLOCK_S, BLOCK_D)
                    tl.store(results, whole.to(out.dtype.element_ty), mask=real)
                    tl.store(arrived + row, 0)
        else:
            tl.store(results, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


_MOST_SPLITS = 65535  # programs along z


def tile(batch: int, key_heads: int, group: int, width: int, wide: bool, room: int = 0) -> dict[str, int]:
    """Tile sizes; ``wide`` for fp32. Small batches use short splits, so that there are programs for all SMs, and CUDA
    cores; large batches and groups of heads use tensor cores. Splits of a cache with more than 8 million rows are
    longer."""
    block_d = max(16, next_power_of_2(width))
    programs = batch * key_heads
    split = 128 if programs <= 64 else 256 if programs <= 2048 else 1024
    split = max(split, next_power_of_2(max(1, cdiv(room, _MOST_SPLITS))))
    if group == 1 and (programs <= 64 or wide):
        sizes = {"PART_G": 1, "BLOCK_N": max(16, min(128, 8192 // block_d)), "BLOCK_S": 8, "num_stages": 1}
    else:
        part_g = max(16, next_power_of_2(group))
        sizes = {"PART_G": part_g, "BLOCK_N": max(16, min(64, 8192 // block_d)), "BLOCK_S": 1, "num_stages": 3}
    return {**sizes, "BLOCK_D": block_d, "SPLIT": split, "num_warps": 4}


def decode_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    arrived: Tensor | None,
    left: int,
    scale: float,
    overlap: bool,
) -> Tensor:
    """``arrived``: int32 [B, Hk] of zeros, which the kernel resets to 0."""
    batch, heads, width = q.shape
    _, room, key_heads, _ = key_cache.shape
    out = torch.empty((batch, heads, width), dtype=q.dtype, device=q.device)
    if batch == 0:
        return out
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    group = heads // key_heads
    chosen = tile(batch, key_heads, group, width, q.dtype == torch.float32, room)
    splits = cdiv(room, chosen["SPLIT"])
    parts = sums = out
    if splits > 1:
        shape = (batch, key_heads, splits, chosen["PART_G"])
        parts = torch.empty((*shape, chosen["BLOCK_D"]), dtype=torch.float32, device=q.device)
        sums = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        if arrived is None:
            arrived = torch.zeros((batch, key_heads), dtype=torch.int32, device=q.device)
    with on_device(q):
        decode_attention_kernel[(batch, key_heads, splits)](
            q,
            k,
            v,
            key_cache,
            value_cache,
            lengths,
            out,
            parts,
            sums,
            lengths if arrived is None else arrived,
            room,
            left,
            scale * _LOG2_E,
            *(stride for tensor in (q, k, v) for stride in tensor.stride()[:2]),
            *(stride for cache in (key_cache, value_cache) for stride in cache.stride()),
            D=width,
            GROUP=group,
            HAS_WINDOW=left >= 0,
            MANY=splits > 1,
            **chosen,
            **launch_options(q, overlap),
        )
    return out


def compile_signatures(
    batch: int, group: int, width: int, element: str, dependent: bool = False
) -> list[dict[str, object]]:
    """The kernel as the launcher compiles it for heads of ``width`` elements of Triton type ``element``."""
    chosen = tile(batch, 12, group, width, element == "fp32")
    tensors = dict.fromkeys(("q", "k", "v", "key_cache", "value_cache", "out"), f"*{element}")
    work = {"lengths": "*i32", "parts": "*fp32", "sums": "*fp32", "arrived": "*i32"}
    names = [f"{name}_stride_{axis}" for name in ("q", "k", "v") for axis in "bh"]
    names += [f"{name}_stride_{axis}" for name in ("keys", "values") for axis in "bth"]
    sizes = {"room": "i32", "left": "i32", "scale_log2": "fp32", **dict.fromkeys(names, "i32")}
    constants = {"D": width, "GROUP": group, "HAS_WINDOW": True, "MANY": True, "DEPENDENT": dependent}
    constants |= {"keys_stride_d": 1, "values_stride_d": 1}
    options = {"target": 90} if dependent else {}
    signature = {**tensors, **work, **sizes}
    return [ahead_of_time(decode_attention_kernel, signature, chosen, options=options, **constants)]
