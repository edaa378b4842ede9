"""The signatures with which attention's Triton kernels are compiled ahead of time, for fasttfm.testing.aot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fasttfm.kernels.attention import tuning
from fasttfm.kernels.attention.triton_backward import _bwd_kv_kernel, _bwd_q_kernel
from fasttfm.kernels.attention.triton_bias import _bias_kernel
from fasttfm.kernels.attention.triton_forward import _fwd_kernel
from fasttfm.kernels.attention.triton_short import _short_bwd_kernel, _short_fwd_kernel
from fasttfm.kernels.common.launch import next_power_of_2

_FLOATS = ("lse", "statistics", "slopes")
_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "bias", "dbias")


def compile_signatures(
    head_dim: int, element: str, hopper: bool, dropout: bool, block_memory: int
) -> Iterator[dict[str, Any]]:
    """Every kernel with the tiles that tuning.py selects: packed and causal with dropout, and dense and even
    without."""
    element_bytes = 4 if element == "fp32" else 2
    most = 128 if hopper else 64
    short = tuning.Call(hopper, head_dim, element_bytes, most, most, dropout, block_memory)
    long = tuning.Call(hopper, head_dim, element_bytes, 4096, 4096, dropout, block_memory)
    spills = element == "fp32" or head_dim > 128  # registers do not hold such tiles
    for kernel, tiles in (
        (_short_fwd_kernel, tuning.short_forward_tiles(short)),
        (_short_bwd_kernel, tuning.short_backward_tiles(short)),
        (_fwd_kernel, tuning.forward_tiles(long)),
        (_bwd_q_kernel, tuning.query_tiles(long)),
        (_bwd_kv_kernel, tuning.key_tiles(long)),
        (_bias_kernel, tuning.bias_tiles(long)),
    ):
        if tiles is not None:
            few = kernel is not _fwd_kernel and kernel is not _short_fwd_kernel  # backward is a few registers short
            description = _describe(kernel, tiles, head_dim, element, dropout)
            chosen_for = {"target": 90 if hopper else 80, "least_memory": block_memory}
            yield {**description, "allow_spills": spills or few, **chosen_for}
    if hopper and head_dim == 64 and not spills and not dropout:
        biased = long._replace(bias=True)
        for kernel, tiles in (
            (_fwd_kernel, tuning.forward_tiles(biased)),
            (_bwd_q_kernel, tuning.query_tiles(biased)),
            (_bwd_kv_kernel, tuning.key_tiles(biased)),
        ):
            description = _describe(kernel, tiles, head_dim, element, dropout, bias=True)
            yield {**description, "allow_spills": False, "target": 90, "least_memory": block_memory}


def _describe(
    kernel: Any, tiles: tuning.Tiles, head_dim: int, element: str, dropout: bool, *, bias: bool = False
) -> dict[str, Any]:
    bias = bias or kernel is _bias_kernel
    layout = "packed" if dropout else "dense"
    constants = {
        "Q_LAYOUT": layout,
        "K_LAYOUT": layout,
        "UNIT": 8,
        "WIDE": False,
        "FEATURES": (False, dropout, 8 if bias else 0, False, not bias, dropout),
        "ALL_SEQUENCES": True,
        "ALL_HEADS": False,
        "PRECISION": "ieee" if element == "fp32" else "tf32",
        "D": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "BLOCK_M": tiles.queries,
        "BLOCK_N": tiles.keys,
        "EVEN": not dropout,
        "AHEAD": tiles.ahead > 0,
        "KEYS_FIRST": tiles.keys_first,
        "STAGES": tiles.stages,
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return {
        "kernel": kernel,
        "signature": {name: _type(name, element) for name in kernel.arg_names if name not in constants},
        "constants": constants,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _type(argument: str, element: str) -> str:
    if argument in _TENSORS:
        return f"*{element}"
    if argument in _FLOATS:
        return "*fp32"
    special = {"q_bounds": "*i32", "k_bounds": "*i32", "seed": "*i64", "scale": "fp32", "dropout_scale": "fp32"}
    return special.get(argument, "i32")
