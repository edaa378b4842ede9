"""LayerNorm of a tile of whole rows in Triton, shared by all ops that contain a LayerNorm.

A tile is ``[BLOCK_N, BLOCK_C]`` in fp32: rows ``rows`` of N, columns ``columns`` of C. Statistics are ``[2, N]`` fp32:
mean, rstd.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fasttfm.kernels.common.launch import next_power_of_2


@triton.jit
def normalized(
    value,  # zero past the rows' ends
    rows,
    columns,
    weight,  # [C] or unused
    bias,  # [C] or unused
    statistics,
    N,
    C,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Stores the rows' statistics and returns (value - mean) * rstd * weight + bias."""
    in_row = columns < C
    mean = tl.sum(value, axis=1) / C
    centered = tl.where(in_row[None, :], value - mean[:, None], 0.0)
    correction = tl.sum(centered, axis=1) / C  # the rounding error of the mean
    centered = tl.where(in_row[None, :], centered - correction[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=1) / C + eps)
    tl.store(statistics + rows, mean, mask=rows < N)
    tl.store(statistics + N + rows, rstd, mask=rows < N)
    out = centered * rstd[:, None]
    if HAS_WEIGHT:
        out = out * tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        out = out + tl.load(bias + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def normalized_gradient(value, scaled, rows, columns, statistics, N, C):
    """Returns xhat and the gradient of ``value`` for rows ``value`` and ``scaled`` = dy * weight, zero past their ends.

    Past the rows' ends xhat is not zero; products with dy are.
    """
    mean = tl.load(statistics + rows, mask=rows < N, other=0.0)
    rstd = tl.load(statistics + N + rows, mask=rows < N, other=0.0)
    xhat = tl.where((columns < C)[None, :], (value - mean[:, None]) * rstd[:, None], 0.0)
    xhat -= (tl.sum(xhat, axis=1) / C)[:, None]
    mean_scaled = tl.sum(scaled, axis=1) / C
    mean_scaled_xhat = tl.sum(scaled * xhat, axis=1) / C
    return xhat, rstd[:, None] * (scaled - mean_scaled[:, None] - xhat * mean_scaled_xhat[:, None])


def row_tile(columns: int, elements: int, per_thread: int, least_columns: int = 1) -> dict[str, int]:
    """A tile of whole rows with about ``elements`` elements in total, ``per_thread`` for each thread."""
    block_c = max(least_columns, next_power_of_2(columns))
    block_n = min(16, max(1, elements // block_c))
    num_warps = min(32, max(1, block_n * block_c // (32 * per_thread)))
    return {"BLOCK_N": block_n, "BLOCK_C": block_c, "num_warps": num_warps}


# Tiles of layer_norm and rms_norm, whose rows take the same number of registers. Measured on an H200: two rows per
# program, four if they are short.
def norm_forward_tile(columns: int) -> dict[str, int]:
    return row_tile(columns, elements=8192 if columns > 2048 else 4096, per_thread=32)


def norm_backward_tile(columns: int) -> dict[str, int]:
    return row_tile(columns, elements=2048, per_thread=16)
