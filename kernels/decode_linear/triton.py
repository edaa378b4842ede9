"""The linear layers of a decoding step in Triton; the formulas are in reference.py.

With few rows the time is that of reading the weight. Every program reads BLOCK_N rows of it once, and computes the
LayerNorm of its input rows itself, which costs less than a separate kernel. If K fits into one chunk, the weight is
loaded before the wait for the previous kernel, so that its latency overlaps with that kernel.

One row is multiplied by CUDA cores. More rows are multiplied by tensor cores, BLOCK_M at a time: K is divided into
PARTS for different warps, because one warp would have a long chain of dependent mma instructions. The order of all sums
depends only on the shapes and the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, block_memory, cdiv, next_power_of_2, on_device
from fasttfm.kernels.common.rows import empty_rows
from fasttfm.kernels.common.triton.activation import activated
from fasttfm.kernels.common.triton.dependent_launch import launch_options, wait_for_inputs
from fasttfm.kernels.common.triton.launcher import launched_kernel

TILE_ROWS = 16  # the M of an mma instruction
_DEEP_MEMORY = 200_000  # bytes of shared memory per block, which Hopper and later GPUs exceed


@triton.jit
def _mean(values, K):
    """The mean of rows [PARTS, BLOCK_M, part] of K elements: [1, BLOCK_M, 1]."""
    return tl.sum(tl.sum(values, axis=2, keep_dims=True), axis=0, keep_dims=True) / K


@triton.jit
def _statistics(x_rows, columns, in_rows, K, eps, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Mean and 1 / standard deviation of rows that have several chunks, in two passes."""
    total = tl.zeros([PARTS, BLOCK_M, BLOCK_K // PARTS], tl.float32)
    for first in range(0, K, BLOCK_K):
        total += tl.load(x_rows + first + columns, mask=in_rows & (first + columns < K), other=0.0).to(tl.float32)
    mean = _mean(total, K)
    squares = tl.zeros([PARTS, BLOCK_M, BLOCK_K // PARTS], tl.float32)
    for first in range(0, K, BLOCK_K):
        inside = in_rows & (first + columns < K)
        value = tl.load(x_rows + first + columns, mask=inside, other=0.0).to(tl.float32)
        centered = tl.where(inside, value - mean, 0.0)
        squares += centered * centered
    return mean, 1.0 / tl.sqrt(_mean(squares, K) + eps)


@triton.jit
def _product(value, w, total, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``total`` plus the products of input rows [PARTS, BLOCK_M, part] and weight rows [PARTS, BLOCK_N, part]."""
    if BLOCK_M == 1:
        total += tl.sum(tl.sum(w.to(tl.float32) * value.to(tl.float32), axis=2), axis=0)[None, None, :]
    elif PARTS == 1:
        transposed = tl.trans(tl.reshape(w, (BLOCK_N, BLOCK_K)))
        total += tl.dot(tl.reshape(value, (BLOCK_M, BLOCK_K)), transposed, input_precision="ieee")[None, :, :]
    else:
        total = tl.dot(value, tl.permute(w, (0, 2, 1)), total, input_precision="ieee")
    return total


@launched_kernel
@triton.jit
def decode_linear_kernel(
    x,  # [M, K], rows x_stride apart
    weight,  # [N, K]
    bias,  # [N] or unused
    norm_weight,  # [K] or unused
    norm_bias,  # [K] or unused
    residual,  # [M, N] or unused
    y,  # [M, N], rows y_stride apart
    M,
    N,
    K,
    x_stride,
    y_stride,
    eps,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "" for none
    ONE_CHUNK: tl.constexpr,  # K <= BLOCK_K
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # All programs are along x, where a grid may have more than 65,535 of them. A single row needs no division.
    across = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) if BLOCK_M == 1 else tl.program_id(0) % across
    outputs = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (0 if BLOCK_M == 1 else tl.program_id(0) // across * BLOCK_M) + tl.arange(0, BLOCK_M)
    part: tl.constexpr = BLOCK_K // PARTS
    dtype = weight.dtype.element_ty
    exact: tl.constexpr = weight.dtype.element_ty == tl.float32
    columns = (tl.arange(0, PARTS)[:, None] * part + tl.arange(0, part)[None, :])[:, None, :]  # [PARTS, 1, part]
    weight_rows = weight + outputs.to(tl.int64)[None, :, None] * K
    in_weight = (outputs < N)[None, :, None]
    x_rows = x + rows.to(tl.int64)[None, :, None] * x_stride
    in_rows = (rows < M)[None, :, None]
    total = tl.zeros([PARTS, BLOCK_M, BLOCK_N], tl.float32)
    if ONE_CHUNK:
        inside = columns < K
        w = tl.load(weight_rows + columns, mask=in_weight & inside, other=0.0)
        if HAS_NORM_WEIGHT:
            factor = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM_BIAS:
            shift = tl.load(norm_bias + columns, mask=inside, other=0.0).to(tl.float32)
        wait_for_inputs(DEPENDENT)
        value = tl.load(x_rows + columns, mask=in_rows & inside, other=0.0)
        if NORM:
            value = value.to(tl.float32)
            value = tl.where(inside, value - _mean(value, K), 0.0)
            value = value * (1.0 / tl.sqrt(_mean(value * value, K) + eps))
            if HAS_NORM_WEIGHT:
                value = value * factor
            if HAS_NORM_BIAS:
                value = value + shift
        total = _product(value.to(dtype), w, total, PARTS, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        wait_for_inputs(DEPENDENT)
        if NORM:
            mean, rstd = _statistics(x_rows, columns, in_rows, K, eps, PARTS, BLOCK_M, BLOCK_K)
        for first in range(0, K, BLOCK_K):
            inside = first + columns < K
            w = tl.load(weight_rows + first + columns, mask=in_weight & inside, other=0.0)
            value = tl.load(x_rows + first + columns, mask=in_rows & inside, other=0.0)
            if NORM:
                value = tl.where(inside, (value.to(tl.float32) - mean) * rstd, 0.0)
                if HAS_NORM_WEIGHT:
                    value = value * tl.load(norm_weight + first + columns, mask=inside, other=0.0).to(tl.float32)
                if HAS_NORM_BIAS:
                    value = value + tl.load(norm_bias + first + columns, mask=inside, other=0.0).to(tl.float32)
            total = _product(value.to(dtype), w, total, PARTS, BLOCK_M, BLOCK_N, BLOCK_K)
    u = tl.sum(total, axis=0)
    mask = (rows < M)[:, None] & (outputs < N)[None, :]
    if HAS_BIAS:
        u += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        u, _ = activated(u, ACTIVATION, exact)
    if HAS_RESIDUAL:
        offsets = rows.to(tl.int64)[:, None] * N + outputs[None, :]
        u += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + rows.to(tl.int64)[:, None] * y_stride + outputs[None, :], u.to(y.dtype.element_ty), mask=mask)


def tile(count: int, outputs: int, columns: int, *, wide: bool = False, deep: bool = False) -> dict[str, int]:
    """Tile sizes for ``count`` rows of ``columns`` and ``outputs`` rows of weight; ``wide`` for an fp32 weight,
    ``deep`` if shared memory has room for many chunks of 16-bit rows."""
    block_k = max(64, next_power_of_2(columns))
    if count == 1:
        block_k = min(block_k, 2048 if wide else 4096)
        block_n = min(4 if outputs <= 2048 else 8, 16384 // block_k)  # a thread holds 64 elements of the weight
        warps = max(1, min(8, block_n * block_k // 2048))
        return {"BLOCK_M": 1, "BLOCK_N": block_n, "BLOCK_K": block_k, "PARTS": 1, "num_warps": warps, "num_stages": 2}
    block_n, stages = 16, 1
    if wide:
        block_k, stages = min(block_k, 256), 2
    elif outputs > 16384:  # a vocabulary: there are many programs, so throughput matters more than their latency
        block_n, block_k, stages = 64, min(block_k, 128), 3
    elif block_k > 1024:  # 6 stages: for 3,072 columns the loads of all chunks but one are in flight at the start
        block_k, stages = 512, 6 if deep else 3
    parts = max(1, min(4, block_k // 32))
    sizes = {"BLOCK_M": TILE_ROWS, "BLOCK_N": block_n, "BLOCK_K": block_k, "PARTS": parts}
    return {**sizes, "num_warps": parts, "num_stages": stages}


def decode_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None,
    eps: float | None,
    activation: str,
    out_dtype: torch.dtype,
    overlap: bool = False,
    sizes: dict[str, int] | None = None,
) -> Tensor:
    """``sizes`` replaces the result of ``tile``, for measurements; a BLOCK_M of 1 is for one row."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, columns = rows.shape
    outputs = weight.shape[0]
    y = empty_rows((*x.shape[:-1], outputs), out_dtype, x.device)
    if count == 0:
        return y
    deep = x.dtype != torch.float32 and block_memory(x) >= _DEEP_MEMORY
    chosen = sizes or tile(count, outputs, columns, wide=weight.dtype == torch.float32, deep=deep)
    grid = (cdiv(outputs, chosen["BLOCK_N"]) * cdiv(count, chosen["BLOCK_M"]),)
    with on_device(x):
        decode_linear_kernel[grid](
            rows,
            weight.contiguous(),
            *(weight if tensor is None else tensor.contiguous() for tensor in (bias, norm_weight, norm_bias, residual)),
            y,
            count,
            outputs,
            columns,
            rows.stride(0),
            y.stride(-2) if y.dim() > 1 else outputs,
            0.0 if eps is None else eps,
            HAS_BIAS=bias is not None,
            NORM=eps is not None,
            HAS_NORM_WEIGHT=norm_weight is not None,
            HAS_NORM_BIAS=norm_bias is not None,
            HAS_RESIDUAL=residual is not None,
            ACTIVATION=activation,
            ONE_CHUNK=columns <= chosen["BLOCK_K"],
            **chosen,
            **launch_options(x, overlap),
        )
    return y


def compile_signatures(count: int, outputs: int, columns: int, element: str, stream: str) -> list[dict[str, object]]:
    """The kernel as the launcher compiles it for rows of Triton type ``stream`` and a weight of type ``element``."""
    deep = stream != "fp32"
    chosen = tile(count, outputs, columns, wide=element == "fp32", deep=deep)
    e, s = f"*{element}", f"*{stream}"
    pointers = {"x": s, "weight": e, "bias": e, "norm_weight": e, "norm_bias": e, "residual": s, "y": s}
    signature = {**pointers, **dict.fromkeys(("M", "N", "K", "x_stride", "y_stride"), "i32"), "eps": "fp32"}
    constants = {
        "HAS_BIAS": True,
        **dict.fromkeys(("NORM", "HAS_NORM_WEIGHT", "HAS_NORM_BIAS"), columns <= 2048),
        "HAS_RESIDUAL": True,
        "ACTIVATION": "gelu_tanh",
        "ONE_CHUNK": columns <= chosen["BLOCK_K"],
        "DEPENDENT": False,
    }
    return [
        ahead_of_time(decode_linear_kernel, signature, chosen, options={"target": 90 if deep else None}, **constants)
    ]
